"""Is the trace whole?  Profilers drop kernels and say nothing; a launch without a kernel shows it.

A step in which a launch has no kernel is incomplete: it is flagged and left out.  Under CUDA graphs
one launch stands for many kernels; few or uneven numbers of them make every figure unreliable.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from interlace.measure.intervals import Cover, Ticks, cover
from interlace.measure.names import step_of
from interlace.measure.trace import Annotation, Trace

_KERNEL_LAUNCH = re.compile(r"launch\w*kernel", re.IGNORECASE)
_GRAPH_LAUNCH = re.compile(r"graphlaunch", re.IGNORECASE)
_CAPTURE_BEGINS = re.compile(r"beginCapture", re.IGNORECASE)
_CAPTURE_ENDS = re.compile(r"endCapture", re.IGNORECASE)
_FEW = 10  # kernels a graph launch


@dataclass(frozen=True)
class Step:
    """One profiled step: its window on the host, and its launches."""

    name: str
    start: int
    end: int
    num_launches: int
    num_missing: int

    @property
    def complete(self) -> bool:
        return not self.num_missing


def find_steps(trace: Trace) -> list[Step]:
    """The profiler's steps, in order of time."""
    launches, missing = _kernel_launches(trace)
    steps = []
    for item in _step_annotations(trace):
        inside = (launches >= item.start) & (launches < item.end)
        lost = (missing >= item.start) & (missing < item.end)
        steps.append(
            Step(step_of(item.name), item.start, item.end, int(inside.sum()), int(lost.sum()))
        )
    return steps


def num_missing(trace: Trace) -> tuple[int, int]:
    """Launches without a kernel, and all launches of kernels, in and outside of steps."""
    launches, missing = _kernel_launches(trace)
    return len(missing), len(launches)


def unreliable_graphs(trace: Trace) -> str:
    """Why figures under graph replay cannot be trusted, or nothing."""
    rows = _rows(trace, _GRAPH_LAUNCH)
    if not len(rows):
        return ""
    counts = [int((trace.correlation == number).sum()) for number in trace.launch_correlation[rows]]
    seen = f"{len(counts)} graph launch(es) with {min(counts)} to {max(counts)} device events each"
    if min(counts) == 0 or sum(counts) < _FEW * len(counts):
        return f"few kernels were recorded under graph replay: {seen}; figures are unreliable."
    if len(counts) == 1:
        return (
            f"CUDA graph replay: {seen}; with one replay nothing shows whether all kernels were "
            f"recorded: figures are unreliable; profile two replays or more."
        )
    if 1 in Counter(counts).values():
        return f"graph replays differ in their kernels: {seen}; figures are unreliable."
    return ""


def graph_rows(trace: Trace, launch: Ticks) -> np.ndarray:
    """Which device events a graph launch started."""
    is_graph = np.array([bool(_GRAPH_LAUNCH.search(name)) for name in trace.names] + [False], bool)
    name = trace.launch_name[launch] if len(trace.launch_name) else launch
    return np.where(launch >= 0, is_graph[np.where(launch >= 0, name, -1)], False)


def leave_out(trace: Trace, step_of_row: np.ndarray, steps: list[Step]) -> tuple[np.ndarray, Cover]:
    """Device events to keep, and the time on the device that counts.

    Between the last kernel before an incomplete step and the first after it nothing counts.
    """
    incomplete = [step for step in steps if not step.complete]
    keep = ~np.isin(step_of_row, np.array([step.name for step in incomplete], object))
    start, end = trace.start[keep], trace.end[keep]
    if not len(start):
        return keep, cover(start, end)
    hull = cover(start[:1], end.max(keepdims=True))
    if not incomplete:
        return keep, hull
    launched = _launch_times(trace)[keep]
    cuts = []
    for step in incomplete:
        before, after = launched < step.start, launched >= step.end
        first = int(end[before].max(initial=hull.start[0]))
        last = int(start[after].min(initial=hull.end[0]))
        cuts.append((first, max(first, last)))
    lost = cover(*(np.array(side, np.int64) for side in zip(*cuts, strict=True)))
    busy = cover(start, end)
    return keep, hull.minus(lost.minus(busy))


def _launch_times(trace: Trace) -> Ticks:
    """When each device event was launched; its own start where no launch is known."""
    known = trace.launch_correlation
    if not len(known):
        return trace.start
    row = np.minimum(np.searchsorted(known, trace.correlation), len(known) - 1)
    return np.where(known[row] == trace.correlation, trace.launch_time[row], trace.start)


def _step_annotations(trace: Trace) -> list[Annotation]:
    host = [item for item in trace.annotations if step_of(item.name)]
    items = host or [item for item in trace.device_annotations if step_of(item.name)]
    first: dict[str, Annotation] = {}
    for item in sorted(items, key=lambda item: item.start):
        first.setdefault(step_of(item.name), item)
    return list(first.values())


def _rows(trace: Trace, pattern: re.Pattern[str]) -> Ticks:
    match = np.array([bool(pattern.search(name)) for name in trace.names], bool)
    return np.flatnonzero(match[trace.launch_name]) if len(match) else np.zeros(0, np.int64)


def _kernel_launches(trace: Trace) -> tuple[Ticks, Ticks]:
    """Times of the launches of single kernels, and of those that have no kernel."""
    rows = _rows(trace, _KERNEL_LAUNCH)
    rows = rows[~_captured(trace, rows)]
    seen = np.concatenate([trace.correlation, trace.empty_correlation])
    lost = ~np.isin(trace.launch_correlation[rows], seen)
    return trace.launch_time[rows], trace.launch_time[rows[lost]]


def _captured(trace: Trace, rows: Ticks) -> np.ndarray:
    """Launches into a graph that is being captured run nothing."""
    captured = np.zeros(len(rows), bool)
    time, thread = trace.launch_time[rows], trace.launch_thread[rows]
    ends = _rows(trace, _CAPTURE_ENDS)
    for begin in _rows(trace, _CAPTURE_BEGINS):
        same = ends[trace.launch_thread[ends] == trace.launch_thread[begin]]
        later = trace.launch_time[same][trace.launch_time[same] > trace.launch_time[begin]]
        until = later.min(initial=np.iinfo(np.int64).max)
        captured |= (
            (thread == trace.launch_thread[begin])
            & (time > trace.launch_time[begin])
            & (time < until)
        )
    return captured
