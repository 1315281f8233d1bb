"""Bars of a timeline: how much of it can be drawn is bounded, whatever the trace holds.

A row is a stream, a class of work a colour.  Where there are too many intervals to be seen, bars of
equal width stand for them, as high as they are full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from interlace.measure.analyse import Device
from interlace.measure.intervals import Cover, cover, to_us
from interlace.measure.trace import COPY, KERNEL

WIDTH = 1000.0  # of the drawing, in its own units
MAX_BARS = 400  # of one class in one row


@dataclass(frozen=True)
class Bar:
    """From ``x`` on, in drawing units; ``fill`` of it is work, in (0, 1]."""

    x: float
    width: float
    fill: float
    work: str  # compute, comm, copy, exposed
    title: str


@dataclass(frozen=True)
class Row:
    name: str
    bars: list[Bar]


def timeline(device: Device, start: int, end: int) -> list[Row]:
    """Rows between two times: what stayed exposed, then each stream, the busiest first."""
    rows = [Row("exposed", _bars(device.exposed, start, end, "exposed"))]
    trace, labels = device.trace, device.labels
    streams = {
        code: device.rows[trace.place[device.rows] == code]
        for code in np.unique(trace.place[device.rows])
    }
    for code, mine in sorted(streams.items(), key=lambda x: -device.cover_of(x[1]).total):
        kernels, comm = trace.activity[mine] == KERNEL, labels.communication[mine]
        classes = {
            "compute": kernels & ~comm,
            "copy": trace.activity[mine] == COPY,
            "comm": comm,
        }
        bars = [
            bar
            for work, which in classes.items()
            for bar in _bars(device.cover_of(mine[which]), start, end, work)
        ]
        rows.append(Row(f"stream {trace.places[code].split('/', 1)[1]}", bars))
    return rows


def worst_step(device: Device, figures: dict[str, Any]) -> tuple[str, int, int] | None:
    """The complete step with most exposed time: its name, start and end; None if it is alone."""
    steps = [step for step in figures["steps"] if step["complete"] and "exposed_us" in step]
    if len(steps) < 2:
        return None
    name = str(max(steps, key=lambda step: step["exposed_us"])["step"])
    rows = device.rows[device.labels.step[device.rows] == name]
    return name, int(device.trace.start[rows].min()), int(device.trace.end[rows].max())


def _bars(work: Cover, start: int, end: int, name: str) -> list[Bar]:
    span = max(end - start, 1)
    seen = work.common(cover(np.array([start]), np.array([end])))
    starts, ends = seen.start, seen.end
    if len(starts) > MAX_BARS:  # too many to be seen: how full each of some hundred parts is
        edges = np.linspace(start, end, MAX_BARS + 1).astype(np.int64)
        starts, ends = edges[:-1], edges[1:]
    busy = seen.within(starts, ends)
    return [
        Bar(
            round((int(s) - start) / span * WIDTH, 2),
            round(max((int(e) - int(s)) / span * WIDTH, 0.6), 2),
            round(int(b) / int(e - s), 3),
            name,
            f"{name} {to_us(b) / 1000:.3f} ms of {to_us(e - s) / 1000:.3f} ms "
            f"from {to_us(s - start) / 1000:.3f} ms on",
        )
        for s, e, b in zip(starts, ends, busy, strict=True)
        if b
    ]
