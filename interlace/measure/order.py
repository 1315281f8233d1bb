"""Layer, phase and kind of kernels that a CUDA graph launched.

A replay is one launch, so annotations around it say nothing of its kernels.  The step that was
traced uncaptured runs the same kernels in the same order: the n-th kernel of a name in a replay is
the n-th of that name in such a step.  This is claimed only where the name occurs equally often in
both, and on one stream in the step: its kernels were captured as a chain, so their order is fixed.
A replay may spread such a chain over streams of its own choice, but no two of it ever overlap, or
only by what time stamps are off.
"""

from __future__ import annotations

import numpy as np

from interlace.measure.complete import graph_rows
from interlace.measure.intervals import TICKS_PER_US, Ticks
from interlace.measure.labels import Labels
from interlace.measure.trace import Trace

_JITTER = 2 * TICKS_PER_US  # seen: up to 0.3 us between kernels of one chain


def label_replays(traced: list[tuple[Trace, Labels]]) -> None:
    """Fill in labels of replayed kernels, from an eager step of the same trace or of another."""
    references = [_reference(trace, labels) for trace, labels in traced]
    for index, (trace, labels) in enumerate(traced):
        replayed = np.flatnonzero(graph_rows(trace, labels.launch))
        if not len(replayed):
            continue
        own_first = [references[index], *references[:index], *references[index + 1 :]]
        known = next((reference for reference in own_first if reference), None)
        if known is None:
            text = "no annotated step outside of the graph does"
            done = 0
        else:
            done = sum(
                _copy(trace, labels, replayed[trace.correlation[replayed] == number], known)
                for number in np.unique(trace.correlation[replayed])
            )
            text = "their order was compared with an annotated step outside of the graph"
        trace.notes.append(
            f"{done} of {len(replayed)} kernels of graph replays have a layer or phase: the graph "
            f"does not say them, {text}."
        )


Reference = dict[str, list[tuple[str, str, str]]]  # name -> (layer, phase, kind) in order


def _reference(trace: Trace, labels: Labels) -> Reference:
    """The first step that was launched kernel by kernel and says layers or phases."""
    rows = np.flatnonzero((labels.launch >= 0) & ~graph_rows(trace, labels.launch))
    says = (labels.layer[rows] != "") | (labels.phase[rows] != "")
    if not says.any():
        return {}
    step = labels.step[rows[says]][0]
    rows = rows[labels.step[rows] == step]
    return {
        name: [(labels.layer[row], labels.phase[row], labels.kind[row]) for row in mine]
        for name, mine in _by_name(trace, rows).items()
    }


def _by_name(trace: Trace, rows: Ticks, *, replayed: bool = False) -> dict[str, Ticks]:
    """Rows of each kernel name that keeps to one stream, in order of time; of a replay also those
    that follow each other over several."""
    found = {}
    for code in np.unique(trace.name[rows]):
        mine = rows[trace.name[rows] == code]
        mine = mine[np.argsort(trace.start[mine], kind="stable")]
        overlap = trace.end[mine][:-1] - trace.start[mine][1:]
        chained = replayed and bool((overlap <= _JITTER).all())
        if chained or len(np.unique(trace.place[mine])) == 1:
            found[trace.names[code]] = mine
    return found


def _copy(trace: Trace, labels: Labels, rows: Ticks, known: Reference) -> int:
    done = 0
    for name, mine in _by_name(trace, rows, replayed=True).items():
        told = known.get(name, [])
        if len(told) != len(mine):
            continue
        for row, (layer, phase, kind) in zip(mine, told, strict=True):
            labels.layer[row] = labels.layer[row] or layer
            labels.phase[row] = labels.phase[row] or phase
            if labels.communication[row] and kind:
                labels.kind[row] = kind
            done += bool(layer or phase)
    return done
