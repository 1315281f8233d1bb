"""A profiler trace as columns: device events, launches, annotations.

Only what the report needs is kept.  Device events are kernels, copies and sets of memory; host
events are launches (with the correlation number that their kernels carry) and annotations.  An
annotation is never a device event, whatever its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from interlace.measure.intervals import TICKS_PER_US, Ticks
from interlace.measure.reading import TraceReader

KERNEL, COPY = 0, 1
_ACTIVITY = {
    "kernel": KERNEL, "concurrent_kernel": KERNEL,
    "gpu_memcpy": COPY, "memcpy": COPY, "gpu_memset": COPY, "memset": COPY,
}  # fmt: skip
_HOST = {"cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime", "xpu_runtime"}
_ANNOTATION = {"user_annotation", "gpu_user_annotation"}
_AUTOGRAD = "autograd::engine::evaluate_function"
_EXACT_US = 2.0**43  # above, a float64 is coarser than a tick
_MAX_US = 2.0**52
_HOUR = 3600 * 10**6 * TICKS_PER_US
_RANK_IN_NAME = re.compile(r"rank[-_. ]?(\d+)", re.IGNORECASE)


_Plain = int | float | str | None


class _Args(msgspec.Struct, gc=False):
    device: _Plain = None
    stream: _Plain = None
    correlation: _Plain = None
    collective: str | None = msgspec.field(default=None, name="Collective name")
    group: _Plain = msgspec.field(default=None, name="Process Group Name")
    about: str | None = msgspec.field(default=None, name="Process Group Description")
    members: _Plain = msgspec.field(default=None, name="Process Group Ranks")


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: _Plain = None
    tid: _Plain = None
    ts: msgspec.Raw = msgspec.Raw()  # kept as written: a float64 of today's time is too coarse
    dur: msgspec.Raw = msgspec.Raw()
    args: _Args | None = None


_NO_ARGS = _Args()


@dataclass(frozen=True)
class Annotation:
    """A named range: of a host thread, or of a device's stream."""

    name: str
    start: int
    end: int
    place: str  # thread of a host, or Trace.place_of a stream


@dataclass
class Trace:
    """One file.  Columns of one length each: ``start`` ... of device events, ``launch_*``."""

    path: str
    rank: int | None = None
    world_size: int | None = None
    base_ns: int = 0
    notes: list[str] = field(default_factory=list)  # what the file does not say
    warnings: list[str] = field(default_factory=list)  # what is damaged or was left out
    names: list[str] = field(default_factory=list)  # what name codes mean
    places: list[str] = field(default_factory=list)  # what place codes mean: "device/stream"
    groups: list[tuple[str, str, str, str]] = field(default_factory=list)
    start: Ticks = field(default_factory=lambda: np.zeros(0, np.int64))
    end: Ticks = field(default_factory=lambda: np.zeros(0, np.int64))
    name: Ticks = field(default_factory=lambda: np.zeros(0, np.int64))
    activity: Ticks = field(default_factory=lambda: np.zeros(0, np.int64))
    place: Ticks = field(default_factory=lambda: np.zeros(0, np.int64))
    correlation: Ticks = field(default_factory=lambda: np.zeros(0, np.int64))
    group: Ticks = field(default_factory=lambda: np.zeros(0, np.int64))  # -1, or into groups
    empty_correlation: Ticks = field(default_factory=lambda: np.zeros(0, np.int64))  # of no length
    launch_name: Ticks = field(default_factory=lambda: np.zeros(0, np.int64))
    launch_time: Ticks = field(default_factory=lambda: np.zeros(0, np.int64))
    launch_thread: Ticks = field(default_factory=lambda: np.zeros(0, np.int64))
    launch_correlation: Ticks = field(default_factory=lambda: np.zeros(0, np.int64))
    threads: list[str] = field(default_factory=list)  # what thread codes mean
    annotations: list[Annotation] = field(default_factory=list)
    device_annotations: list[Annotation] = field(default_factory=list)


def load_trace(path: Path, progress: Callable[[int], None] | None = None) -> Trace:
    """Raises ValueError, one line with the file and the byte, if it is no trace."""
    reader = TraceReader(path, _Event, progress)
    columns = _Columns()
    for batch in reader.batches():
        columns.add(batch)
    trace = columns.finish(str(path))
    trace.warnings[:0] = reader.notes
    _read_fields(trace, reader.fields)
    return trace


class _Codes:
    """Numbers for values, in the order in which they first came."""

    def __init__(self) -> None:
        self.of: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        return self.of.setdefault(value, len(self.of))

    def array(self, values: list[Any]) -> NDArray[np.int64]:
        of = self.of
        for value in dict.fromkeys(values):
            of.setdefault(value, len(of))
        return np.array([of[value] for value in values], np.int64)


class _Columns:
    def __init__(self) -> None:
        self.names, self.places, self.groups, self.threads = (
            _Codes(), _Codes(), _Codes(), _Codes()
        )  # fmt: skip
        self.parts: list[list[NDArray[np.int64]]] = []
        self.launch_parts: list[list[NDArray[np.int64]]] = []
        self.ranges: list[tuple[str, bytes, bytes, str, bool]] = []

    def add(self, events: list[_Event]) -> None:
        device, launches = [], []
        for event in events:
            category = event.cat
            if category is None or event.ph != "X" or event.name is None:
                continue
            if category in _HOST:
                launches.append(event)
            elif category in _ACTIVITY or category.lower() in _ACTIVITY:
                device.append(event)
            elif category in _ANNOTATION or event.name.startswith(_AUTOGRAD):
                self._add_range(event, category == "gpu_user_annotation")
        if device:
            self._add_device(device)
        if launches:
            self._add_launches(launches)

    def _add_device(self, events: list[_Event]) -> None:
        args = [event.args or _NO_ARGS for event in events]
        pairs = zip(events, args, strict=True)
        places = [
            (e.pid if a.device is None else a.device, e.tid if a.stream is None else a.stream)
            for e, a in pairs
        ]
        groups = [
            -1
            if a.collective is None and a.about is None
            else self.groups((a.collective or "", a.about or "", str(a.group), str(a.members)))
            for a in args
        ]
        self.parts.append([
            _ticks([bytes(event.ts) for event in events]),
            _ticks([bytes(event.dur) for event in events]),
            self.names.array([event.name for event in events]),
            np.array([_ACTIVITY[event.cat.lower()] for event in events], np.int64),  # type: ignore[union-attr]
            self.places.array(places),
            np.array([_integer(a.correlation) for a in args], np.int64),
            np.array(groups, np.int64),
        ])  # fmt: skip

    def _add_launches(self, events: list[_Event]) -> None:
        self.launch_parts.append([
            self.names.array([event.name for event in events]),
            _ticks([bytes(event.ts) for event in events]),
            self.threads.array([(event.pid, event.tid) for event in events]),
            np.array([_integer((e.args or _NO_ARGS).correlation) for e in events], np.int64),
        ])  # fmt: skip

    def _add_range(self, event: _Event, on_device: bool) -> None:
        name = _AUTOGRAD if (event.name or "").startswith(_AUTOGRAD) else event.name or ""
        place = _place((event.pid, event.tid))
        self.ranges.append((name, bytes(event.ts), bytes(event.dur), place, on_device))

    def finish(self, path: str) -> Trace:
        trace = Trace(
            path,
            names=list(self.names.of),
            places=[_place(pair) for pair in self.places.of],
            groups=list(self.groups.of),
            threads=[_place(pair) for pair in self.threads.of],
        )
        self._finish_device(trace)
        if self.launch_parts:
            columns = [np.concatenate(column) for column in zip(*self.launch_parts, strict=True)]
            known = (columns[3] >= 0) & (columns[1] != _NO_TIME)
            columns = [column[known] for column in columns]
            order = np.argsort(columns[3], kind="stable")
            (trace.launch_name, trace.launch_time, trace.launch_thread,
             trace.launch_correlation) = (column[order] for column in columns)  # fmt: skip
        if self.ranges:
            names, ts, dur, places, on_device = zip(*self.ranges, strict=True)
            start, length = _ticks(ts), _ticks(dur)
            for row in np.flatnonzero((start > _NO_TIME) & (length > _NO_TIME)):
                item = Annotation(
                    names[row], int(start[row]), int(start[row] + length[row]), places[row]
                )
                (trace.device_annotations if on_device[row] else trace.annotations).append(item)
        return trace

    def _finish_device(self, trace: Trace) -> None:
        if not self.parts:
            return
        columns = [np.concatenate(column) for column in zip(*self.parts, strict=True)]
        start, length = columns[0], columns[1]
        bad = (start == _NO_TIME) | (length == _NO_TIME)
        # A start of zero is a lost time stamp where everything else happened long after.
        other = start[~bad & (start != 0)]
        lost = (start == 0) & (len(other) > 0) & (other.min(initial=1 << 62) > _HOUR)
        empty = ~bad & ((length <= 0) | lost)
        _count(trace, bad, "device events without a readable time were left out.")
        _count(trace, empty, "device events at time zero or of zero length were left out.")
        keep = ~bad & ~empty
        trace.empty_correlation = columns[5][~keep]
        columns = [column[keep] for column in columns]
        order = np.argsort(columns[0], kind="stable")
        (trace.start, length, trace.name, trace.activity, trace.place, trace.correlation,
         trace.group) = (column[order] for column in columns)  # fmt: skip
        trace.end = trace.start + length


def _count(trace: Trace, mask: NDArray[np.bool_], text: str) -> None:
    if count := int(mask.sum()):
        trace.warnings.append(f"{count} {text}")


_NO_TIME = -(1 << 62)


def _ticks(texts: Sequence[bytes]) -> Ticks:
    """Times as written, in us, to ticks; _NO_TIME where there is none."""
    try:
        values = np.array(list(map(float, texts)), np.float64)
    except ValueError:
        values = np.array([_number(text) for text in texts], np.float64)
    bad = ~(np.abs(values) < _MAX_US)
    ticks = np.rint(np.where(bad, 0, values) * TICKS_PER_US).astype(np.int64)
    ticks[bad] = _NO_TIME
    for row in map(int, np.flatnonzero(~bad & (np.abs(values) >= _EXACT_US))):
        ticks[row] = _exact(texts[row])
    return ticks


def _number(text: bytes) -> float:
    try:
        return float(text.strip(b'"'))
    except ValueError:
        return math.nan


def _exact(text: bytes) -> int:
    whole, _, digits = text.strip(b'" ').partition(b".")
    try:
        fraction = float(b"0." + digits) if digits else 0.0
        return int(whole) * TICKS_PER_US + round(fraction * TICKS_PER_US)
    except ValueError:  # an exponent
        return round(_number(text) * TICKS_PER_US)


def _place(pair: tuple[_Plain, _Plain]) -> str:
    return "/".join("?" if part is None or part == "" else str(part) for part in pair)


def _integer(value: _Plain) -> int:
    if isinstance(value, str):
        value = int(value) if value.isdecimal() and len(value) < 19 else None
    # More than 63 bits are no correlation number but a damaged one.
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else -1


def _read_fields(trace: Trace, fields: dict[str, Any]) -> None:
    info = fields.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    trace.rank = _whole(info.get("rank"))
    trace.world_size = _whole(info.get("world_size"))
    trace.base_ns = _whole(fields.get("baseTimeNanoseconds")) or 0
    if trace.rank is None:
        named = _RANK_IN_NAME.search(Path(trace.path).name)
        if named:
            trace.rank = int(named[1])
            trace.notes.append(f"the file does not say its rank; {trace.rank} is from its name.")
        else:
            trace.notes.append("the file does not say its rank (no distributedInfo).")
    if trace.world_size is None:
        trace.notes.append("the file does not say the number of ranks (no distributedInfo).")
    if len(trace.start) and any(place.startswith("?/") for place in trace.places):
        trace.notes.append("some device events do not say their device; they count as device ?.")


def _whole(value: Any) -> int | None:
    try:
        return int(value) if not isinstance(value, bool) else None
    except (TypeError, ValueError, OverflowError):
        return None
