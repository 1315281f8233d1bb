"""Layer, phase, kind and step of device events, from the annotations around their launches.

The launch of a kernel, found by its correlation number, happened on a host thread inside some
annotations; the innermost that says something wins.  Where a trace has no launches, annotations of
the device's own stream serve.  Phase and step may come from another thread: backward runs on the
autograd engine's, inside the main thread's "backward" range.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from interlace.measure.intervals import Ticks
from interlace.measure.names import (
    directed_kind,
    general_kind,
    is_communication,
    kind_of,
    layer_of,
    phase_of,
    step_of,
)
from interlace.measure.trace import KERNEL, Annotation, Trace

Strings = np.ndarray  # of Python strings


@dataclass
class Labels:
    """One entry a device event; an empty text where nothing is known."""

    communication: np.ndarray
    kind: Strings  # of communication only
    layer: Strings
    phase: Strings
    step: Strings
    launch: Ticks  # row of the launch, or -1


def label(trace: Trace, own: re.Pattern[str] | None = None) -> Labels:
    """``own``: kernels of these names are communication too."""
    named = [is_communication(name, own) for name in trace.names]
    communication = np.array(named, bool)[trace.name] & (trace.activity == KERNEL)
    launch = launches_of(trace)
    find = _Finder(trace, launch)
    kind = _kinds(trace, communication, find)
    return Labels(
        communication,
        kind,
        find.value(layer_of),
        find.value(phase_of, any_thread=True),
        find.value(step_of, any_thread=True, by_time=True),
        launch,
    )


def launches_of(trace: Trace) -> Ticks:
    """Row of each device event's launch, -1 where it has none."""
    known = trace.launch_correlation
    if not len(known):
        return np.full(len(trace.start), -1)
    row = np.minimum(np.searchsorted(known, trace.correlation), len(known) - 1)
    return np.where(known[row] == trace.correlation, row, -1)


def _kinds(trace: Trace, communication: np.ndarray, find: _Finder) -> Strings:
    near, around = find.value(general_kind), find.value(directed_kind)
    kind = np.full(len(trace.start), "", object)
    known: dict[tuple[int, int, str, str], str] = {}
    for row in np.flatnonzero(communication):
        key = (int(trace.name[row]), int(trace.group[row]), near[row], around[row])
        if key not in known:
            collective, about = trace.groups[key[1]][:2] if key[1] >= 0 else ("", "")
            known[key] = kind_of(trace.names[key[0]], near[row], around[row], collective, about)
        kind[row] = known[key]
    return kind


class _Finder:
    def __init__(self, trace: Trace, launch: Ticks) -> None:
        self.trace, self.launch = trace, launch
        self.launched = np.flatnonzero(launch >= 0)

    def value(
        self, read: Callable[[str], str], *, any_thread: bool = False, by_time: bool = False
    ) -> Strings:
        """What annotations around the launch say; ``by_time``: or, without launches, the event."""
        trace = self.trace
        host, device = _saying(trace.annotations, read), _saying(trace.device_annotations, read)
        found = np.full(len(trace.start), "", object)
        if any_thread:
            self._at_launch(found, host, None)
        places = np.array(trace.places, object)[trace.place] if len(trace.place) else found
        for place in {item.place for item, _ in device}:
            rows = np.flatnonzero(places == place)
            _paint(found, rows, trace.start[rows], [x for x in device if x[0].place == place])
        for thread in {item.place for item, _ in host}:
            self._at_launch(found, host, thread)
        if by_time and not len(trace.launch_time):
            rows = np.flatnonzero(found == "")
            _paint(found, rows, trace.start[rows], host)
        return found

    def _at_launch(
        self, found: Strings, host: list[tuple[Annotation, str]], thread: str | None
    ) -> None:
        trace, rows = self.trace, self.launched
        if thread is not None:
            if thread not in trace.threads:
                return
            of_thread = trace.launch_thread[self.launch[rows]] == trace.threads.index(thread)
            rows = rows[of_thread]
            host = [x for x in host if x[0].place == thread]
        time = trace.launch_time[self.launch[rows]]
        order = np.argsort(time, kind="stable")
        _paint(found, rows[order], time[order], host)


def _saying(items: list[Annotation], read: Callable[[str], str]) -> list[tuple[Annotation, str]]:
    """Annotations that say something, outer ones first."""
    texts = {name: read(name) for name in {item.name for item in items}}
    said = [(item, texts[item.name]) for item in items if texts[item.name]]
    return sorted(said, key=lambda x: (x[0].start, -x[0].end))


def _paint(found: Strings, rows: Ticks, time: Ticks, items: list[tuple[Annotation, str]]) -> None:
    """Write each annotation's text over the rows whose (sorted) time it holds."""
    starts = np.searchsorted(time, np.array([x.start for x, _ in items], np.int64), "left")
    ends = np.searchsorted(time, np.array([x.end for x, _ in items], np.int64), "left")
    for (_, text), first, last in zip(items, starts, ends, strict=True):
        if last > first:
            found[rows[first:last]] = text
