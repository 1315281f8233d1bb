"""What a device did: compute, communication, and what of the communication nothing hid.

Definitions, all over unions of intervals, so that nothing counts twice:
    compute   kernels that are not communication
    comm      kernels that are
    busy      either
    exposed   comm without compute beside it = busy - compute
    idle      span - busy; copies alone are a part of it
so compute + exposed + idle = span, exactly.  Exposed time that several kernels share belongs to the
one that began first; the parts by kind, layer and phase add up to the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from interlace.measure.complete import (
    Step,
    find_steps,
    graph_rows,
    leave_out,
    num_missing,
    unreliable_graphs,
)
from interlace.measure.intervals import Cover, Ticks, concurrency, cover, owned, to_us
from interlace.measure.labels import Labels
from interlace.measure.names import KINDS, short
from interlace.measure.trace import COPY, KERNEL, Trace

_WORST = 20  # windows and kernels listed
_CARRIES = 0.1  # of a stream's kernel time: then it is a communication stream


@dataclass
class Device:
    """The device events of one device of one trace, and the covers of their classes."""

    trace: Trace
    labels: Labels
    rows: Ticks
    counted: Cover  # the time that counts
    name: str

    @cached_property
    def comm_rows(self) -> Ticks:
        return self.rows[self.labels.communication[self.rows]]

    @cached_property
    def compute_rows(self) -> Ticks:
        kernels = self.rows[self.trace.activity[self.rows] == KERNEL]
        return kernels[~self.labels.communication[kernels]]

    @cached_property
    def compute(self) -> Cover:
        return self.cover_of(self.compute_rows)

    @cached_property
    def comm(self) -> Cover:
        return self.cover_of(self.comm_rows)

    @cached_property
    def copies(self) -> Cover:
        return self.cover_of(self.rows[self.trace.activity[self.rows] == COPY])

    @cached_property
    def busy(self) -> Cover:
        return self.cover_of(self.rows[self.trace.activity[self.rows] == KERNEL])

    @cached_property
    def exposed(self) -> Cover:
        return self.comm.minus(self.compute)

    @cached_property
    def exposed_parts(self) -> Ticks:
        """Exposed time that belongs to each of comm_rows; together all of it."""
        start, end = owned(self.trace.start[self.comm_rows], self.trace.end[self.comm_rows])
        return (end - start) - self.compute.within(start, end)

    def cover_of(self, rows: Ticks) -> Cover:
        return cover(self.trace.start[rows], self.trace.end[rows])

    def kernel(self, row: int) -> str:
        return self.trace.names[self.trace.name[row]]


def devices_of(trace: Trace, labels: Labels) -> tuple[list[Device], list[Step]]:
    """One entry a device with kernels; incomplete steps are left out, unless all are."""
    steps = find_steps(trace)
    keep, _ = leave_out(trace, labels.step, steps)
    usable = steps
    if not keep[trace.activity == KERNEL].any():  # all steps are incomplete: better than nothing
        usable, keep = [], np.ones(len(trace.start), bool)
    _, counted = leave_out(trace, labels.step, usable)
    of_place = [place.split("/", 1)[0] for place in trace.places]
    devices = []
    for name in dict.fromkeys(of_place):
        codes = [code for code, device in enumerate(of_place) if device == name]
        rows = np.flatnonzero(keep & np.isin(trace.place, codes))
        if not (trace.activity[rows] == KERNEL).any():
            continue
        start, end = trace.start[rows].min(keepdims=True), trace.end[rows].max(keepdims=True)
        devices.append(Device(trace, labels, rows, counted.common(cover(start, end)), name))
    return devices, steps


def summary(device: Device, steps: list[Step]) -> dict[str, Any]:
    """The figures of one device, ready for JSON; times in microseconds, exact in binary."""
    span = device.counted.total
    comm, exposed = device.comm.total, device.exposed.total
    windows = windows_of(device)
    alone = device.copies.minus(device.busy).total
    return {
        "rank": device.trace.rank,
        "device": device.name,
        "file": device.trace.path,
        "span_us": to_us(span),
        "busy_us": to_us(device.busy.total),
        "compute_us": to_us(device.compute.total),
        "comm_us": to_us(comm),
        "exposed_us": to_us(exposed),
        "idle_us": to_us(span - device.busy.total),
        "copy_us": to_us(device.copies.total),
        "copy_alone_us": to_us(alone),
        "hidden_share": (comm - exposed) / comm if comm else 0.0,
        "by_kind": by(device, device.labels.kind, order=list(KINDS)),
        "by_layer": by(device, device.labels.layer),
        "by_phase": by(device, device.labels.phase),
        "steps": [_step(device, step) for step in steps],
        "streams": _streams(device),
        "windows": sorted(windows, key=lambda w: -w["exposed_us"])[:_WORST],
        "ended_by": _ended_by(device, windows),
        "kernels": len(device.comm_rows) + len(device.compute_rows),
        "max_concurrency": concurrency(*_kernel_times(device)),
        "reliable": True,
        "notes": [],
    }


def by(device: Device, texts: np.ndarray, order: list[str] | None = None) -> dict[str, Any]:
    """Communication, exposed time and kernels for each text; "unknown" where there is none."""
    rows = device.comm_rows
    exposed = device.exposed_parts
    text_of = texts[rows]
    known = sorted(set(text_of), key=lambda text: _key(text, order))
    if known == [""] and order is None:
        return {}
    result = {}
    for text in known:
        mine = text_of == text
        result[text or "unknown"] = {
            "comm_us": to_us(device.cover_of(rows[mine]).total),
            "exposed_us": to_us(exposed[mine].sum()),
            "kernels": int(mine.sum()),
        }
    return result


def _key(text: str, order: list[str] | None) -> tuple[bool, int, str]:
    if order is not None:
        return False, order.index(text), ""
    return not text, int(text) if text.isdecimal() else 0, text


def _kernel_times(device: Device) -> tuple[Ticks, Ticks]:
    rows = np.concatenate([device.comm_rows, device.compute_rows])
    return device.trace.start[rows], device.trace.end[rows]


def _step(device: Device, step: Step) -> dict[str, Any]:
    mine = device.rows[device.labels.step[device.rows] == step.name]
    part: dict[str, Any] = {
        "step": int(step.name),
        "complete": step.complete,
        "launches": step.num_launches,
        "missing": step.num_missing,
    }
    if not len(mine):
        return part
    hull = cover(
        device.trace.start[mine].min(keepdims=True), device.trace.end[mine].max(keepdims=True)
    )
    only = Device(device.trace, device.labels, mine, hull, device.name)
    times = {
        "span_us": hull.total,
        "compute_us": only.compute.total,
        "comm_us": only.comm.total,
        "exposed_us": only.exposed.total,
        "idle_us": hull.total - only.busy.total,
    }
    return part | {name: to_us(ticks) for name, ticks in times.items()}


def _streams(device: Device) -> list[dict[str, Any]]:
    trace, result = device.trace, []
    for code in np.unique(trace.place[device.rows]):
        rows = device.rows[trace.place[device.rows] == code]
        kernels = trace.activity[rows] == KERNEL
        comm = device.labels.communication[rows]
        mine = trace.place[device.comm_rows] == code
        result.append({
            "stream": trace.places[code].split("/", 1)[1],
            "kernels": int(kernels.sum()),
            "compute_us": to_us(device.cover_of(rows[kernels & ~comm]).total),
            "comm_us": to_us(device.cover_of(device.comm_rows[mine]).total),
            "exposed_us": to_us(device.exposed_parts[mine].sum()),
            "copy_us": to_us(device.cover_of(rows[~kernels]).total),
        })  # fmt: skip
    return sorted(result, key=lambda s: -(s["compute_us"] + s["comm_us"]))


# --- exposed windows ------------------------------------------------------------------------------


def windows_of(device: Device) -> list[dict[str, Any]]:
    """Every exposed window: which communication it waited for, which compute kernel came next."""
    exposed, rows, trace = device.exposed, device.comm_rows, device.trace
    if not len(exposed.start):
        return []
    _, until = owned(trace.start[rows], trace.end[rows])
    # Several parts may end at one time, empty ones too; any of them was still running before it.
    order = np.argsort(until, kind="stable")
    last = order[np.searchsorted(until[order], exposed.end, "left")]
    compute = device.compute_rows
    following = np.searchsorted(trace.start[compute], exposed.end, "left")
    origin = int(device.counted.start[0])
    result = []
    for index, (start, end) in enumerate(zip(exposed.start, exposed.end, strict=True)):
        comm = rows[last[index]]
        window = {
            "start_us": to_us(start - origin),
            "exposed_us": to_us(end - start),
            "kernel": device.kernel(comm),
            "kind": device.labels.kind[comm],
            "layer": device.labels.layer[comm],
            "phase": device.labels.phase[comm],
            "ended_by": "",
            "gap_us": 0.0,
        }
        if following[index] < len(compute):
            next_row = compute[following[index]]
            window["ended_by"] = device.kernel(next_row)
            window["gap_us"] = to_us(trace.start[next_row] - end)
        result.append(window)
    return result


def _ended_by(device: Device, windows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Exposed time by kind and by the kernel that ended its window, largest first."""
    exposed, rows = device.exposed, device.comm_rows
    start, end = owned(device.trace.start[rows], device.trace.end[rows])
    order = np.argsort(end, kind="stable")
    order = order[end[order] > start[order]]
    edges = np.sort(np.concatenate([exposed.start, exposed.end, end[order]]))
    left, right = edges[:-1], edges[1:]
    pieces = np.flatnonzero(exposed.within(left, right) > 0)
    owner = order[np.searchsorted(end[order], left[pieces], "right")]
    window = np.searchsorted(exposed.end, left[pieces], "right")
    kinds = device.labels.kind[rows[owner]]
    sums: dict[tuple[str, str], int] = {}
    counts: dict[tuple[str, str], set[int]] = {}
    for piece, kind, number in zip(pieces, kinds, window, strict=True):
        key = (kind, short(windows[number]["ended_by"]))
        sums[key] = sums.get(key, 0) + int(right[piece] - left[piece])
        counts.setdefault(key, set()).add(int(number))
    ranked = sorted(sums, key=lambda key: -sums[key])[:_WORST]
    return [
        {
            "kind": key[0],
            "ended_by": key[1],
            "exposed_us": to_us(sums[key]),
            "windows": len(counts[key]),
        }
        for key in ranked
    ]


# --- what to be wary of ---------------------------------------------------------------------------


def warn(device: Device, figures: dict[str, Any], steps: list[Step], num_ranks: int) -> None:
    """Fill in ``notes`` and ``reliable``: what makes the figures less than they seem."""
    trace, notes = device.trace, figures["notes"]
    notes += [{"level": "note", "text": text} for text in trace.notes]
    graph = unreliable_graphs(trace)
    lost = _incomplete(trace, steps)
    for text in (*trace.warnings, graph, lost, *_doubts(device, figures, num_ranks)):
        if text:
            notes.append({"level": "warning", "text": text})
    all_lost = bool(steps) and not any(step.complete for step in steps)
    outside = not steps and bool(lost)
    cut = any("cut short" in text or "damaged" in text for text in trace.warnings)
    silent = num_ranks_of(trace, num_ranks) > 1 and not len(device.comm_rows)
    figures["reliable"] = not (graph or all_lost or outside or cut or silent)


def num_ranks_of(trace: Trace, num_given: int) -> int:
    return max(num_given, trace.world_size or 1)


def _incomplete(trace: Trace, steps: list[Step]) -> str:
    incomplete = [step for step in steps if not step.complete]
    if not incomplete:
        missing, launches = num_missing(trace)
        if steps or not missing:
            return ""
        return f"{missing} of {launches} launches have no kernel: the trace is incomplete."
    names = ", ".join(
        f"{step.name} ({step.num_missing} of {step.num_launches} launches without a kernel)"
        for step in incomplete
    )
    if len(incomplete) == len(steps):
        return f"every step is incomplete: {names}; figures are unreliable."
    return f"incomplete steps were left out: {names}."


def _doubts(device: Device, figures: dict[str, Any], num_ranks: int) -> list[str]:
    texts = _unmatched(device)
    world = num_ranks_of(device.trace, num_ranks)
    if not len(device.comm_rows):
        if world > 1:
            texts.append(
                f"no communication kernel was found although there are {world} ranks; name yours "
                f"with --comm REGEX.  Nothing exposed here is no good news."
            )
    elif len(device.compute_rows) and not device.comm.common(device.compute).total:
        texts.append(
            f"communication and compute never ran together (at most "
            f"{figures['max_concurrency']} kernel(s) at a time): is something serialising the "
            f"streams, such as CUDA_DEVICE_MAX_CONNECTIONS=1 or CUDA_LAUNCH_BLOCKING=1?"
        )
    return texts


def _unmatched(device: Device) -> list[str]:
    """Kernels on a communication stream that no pattern takes for communication.

    The streams of a graph's replay are its own choice and say nothing of what a kernel does.
    """
    trace, texts = device.trace, []
    replayed = graph_rows(trace, device.labels.launch)
    compute_rows = device.compute_rows[~replayed[device.compute_rows]]
    comm_rows = device.comm_rows[~replayed[device.comm_rows]]
    place_of = trace.place[compute_rows]
    times = {
        int(code): device.cover_of(compute_rows[place_of == code]).total
        for code in np.unique(place_of)
    }
    main = max(times, key=lambda code: times[code], default=-1)
    for code in np.unique(trace.place[comm_rows]):
        comm = device.cover_of(comm_rows[trace.place[comm_rows] == code]).total
        other = times.get(int(code), 0)
        if not other or comm < _CARRIES * (comm + other) or (code == main and comm < other):
            continue
        rows = compute_rows[place_of == code]
        names, counts = np.unique(trace.name[rows], return_counts=True)
        top = [short(trace.names[names[i]], 40) for i in np.argsort(-counts)[:3]]
        texts.append(
            f"{len(rows)} kernel(s), {to_us(other):.3f} us, on communication stream "
            f"{trace.places[code].split('/', 1)[1]} match no communication pattern and count as "
            f"compute: {', '.join(top)}.  If they communicate, name them with --comm REGEX."
        )
    return texts
