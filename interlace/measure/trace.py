"""A profiler trace as columns: device events, launches, annotations.

Only what the report needs is kept.  Device events are kernels, copies and sets of memory; host
events are launches (with the correlation number that their kernels carry) and annotations.  An
annotation is never a device event, whatever its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
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


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: msgspec.Raw = msgspec.Raw()
    tid: msgspec.Raw = msgspec.Raw()
    ts: msgspec.Raw = msgspec.Raw()
    dur: msgspec.Raw = msgspec.Raw()
    args: msgspec.Raw = msgspec.Raw()


class _Args(msgspec.Struct, gc=False):
    device: msgspec.Raw = msgspec.Raw()
    stream: msgspec.Raw = msgspec.Raw()
    correlation: msgspec.Raw = msgspec.Raw()
    collective: str | None = msgspec.field(default=None, name="Collective name")
    group: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Process Group Name")
    about: str | None = msgspec.field(default=None, name="Process Group Description")
    members: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Process Group Ranks")


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
    notes: list[str] = field(default_factory=list)
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
    trace.notes[:0] = reader.notes
    _read_fields(trace, reader.fields)
    return trace


class _Codes:
    """Numbers for values, in the order in which they first came."""

    def __init__(self) -> None:
        self.of: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        return self.of.setdefault(value, len(self.of))


class _Columns:
    def __init__(self) -> None:
        self.names, self.places, self.groups, self.threads = (
            _Codes(), _Codes(), _Codes(), _Codes()
        )  # fmt: skip
        self.device: list[tuple[bytes, bytes, int, int, int, int, int]] = []
        self.parts: list[tuple[NDArray[np.int64], ...]] = []
        self.launches: list[tuple[int, bytes, int, int]] = []
        self.launch_parts: list[tuple[NDArray[np.int64], ...]] = []
        self.ranges: list[tuple[str, bytes, bytes, str, bool]] = []
        self.args = msgspec.json.Decoder(_Args)
        self.num_bad_times = 0

    def add(self, events: list[_Event]) -> None:
        for event in events:
            category = event.cat
            if category is None or event.ph != "X" or event.name is None:
                continue
            activity = _ACTIVITY.get(category)
            if activity is None:
                activity = _ACTIVITY.get(category.lower())
            if activity is not None:
                self._add_device(event, activity)
            elif category in _HOST:
                self._add_launch(event)
            elif category in _ANNOTATION or event.name.startswith(_AUTOGRAD):
                self._add_range(event, category == "gpu_user_annotation")
        self._pack()

    def _args_of(self, event: _Event) -> _Args:
        if not len(memoryview(event.args)):
            return _Args()
        try:
            return self.args.decode(event.args)
        except msgspec.DecodeError:
            return _Args()

    def _add_device(self, event: _Event, activity: int) -> None:
        args = self._args_of(event)
        device = _text(args.device) or _text(event.pid) or "?"
        stream = _text(args.stream) or _text(event.tid) or "?"
        group = -1
        if args.collective is not None or args.about is not None:
            group = self.groups(
                (args.collective or "", args.about or "", _text(args.group), _text(args.members))
            )
        self.device.append(
            (bytes(event.ts), bytes(event.dur), self.names(event.name), activity,
             self.places(f"{device}/{stream}"), _integer(args.correlation), group)
        )  # fmt: skip

    def _add_launch(self, event: _Event) -> None:
        correlation = _integer(self._args_of(event).correlation)
        if correlation >= 0:
            thread = self.threads(f"{_text(event.pid)}/{_text(event.tid)}")
            self.launches.append((self.names(event.name), bytes(event.ts), thread, correlation))

    def _add_range(self, event: _Event, on_device: bool) -> None:
        name = _AUTOGRAD if (event.name or "").startswith(_AUTOGRAD) else event.name or ""
        place = f"{_text(event.pid)}/{_text(event.tid)}"
        self.ranges.append((name, bytes(event.ts), bytes(event.dur), place, on_device))

    def _pack(self) -> None:
        """Lists of a batch become arrays, so that memory stays small."""
        if self.device:
            ts, dur, *codes = zip(*self.device, strict=True)
            self.parts.append((_ticks(ts), _ticks(dur), *(np.array(c, np.int64) for c in codes)))
            self.device = []
        if self.launches:
            name, ts, *codes = zip(*self.launches, strict=True)
            self.launch_parts.append(
                (np.array(name, np.int64), _ticks(ts), *(np.array(c, np.int64) for c in codes))
            )
            self.launches = []

    def finish(self, path: str) -> Trace:
        trace = Trace(
            path,
            names=list(self.names.of),
            places=list(self.places.of),
            groups=list(self.groups.of),
            threads=list(self.threads.of),
        )
        self._finish_device(trace)
        if self.launch_parts:
            columns = [np.concatenate(column) for column in zip(*self.launch_parts, strict=True)]
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
        columns = [column[keep] for column in columns]
        order = np.argsort(columns[0], kind="stable")
        (trace.start, length, trace.name, trace.activity, trace.place, trace.correlation,
         trace.group) = (column[order] for column in columns)  # fmt: skip
        trace.end = trace.start + length


def _count(trace: Trace, mask: NDArray[np.bool_], text: str) -> None:
    if count := int(mask.sum()):
        trace.notes.append(f"{count} {text}")


_NO_TIME = -(1 << 62)


def _ticks(texts: tuple[bytes, ...]) -> Ticks:
    """Times as written, in us, to ticks; _NO_TIME where there is none."""
    values = np.array([_number(text) for text in texts], np.float64)
    bad = ~(np.abs(values) < _MAX_US)
    ticks = np.rint(np.where(bad, 0, values) * TICKS_PER_US).astype(np.int64)
    ticks[bad] = _NO_TIME
    for row in np.flatnonzero(~bad & (np.abs(values) >= _EXACT_US)):
        ticks[row] = _exact(texts[row])
    return ticks


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        pass
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


def _text(raw: msgspec.Raw) -> str:
    return bytes(raw).decode("utf-8", "replace").strip('"')


def _integer(raw: msgspec.Raw) -> int:
    text = bytes(raw).strip(b'"')
    # More than 18 digits are no correlation number but a damaged one.
    return int(text) if text.isdigit() and len(text) < 19 else -1


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
