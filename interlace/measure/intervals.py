"""Unions of time intervals.

Times are int64 ticks of 1/1024 us: the grid of a float64 at the time stamps that profilers write.
Sums and differences are exact, and so is a tick count divided by 1024 as a float64.

Example: [0, 4) and [2, 6) and [8, 9) -> Cover of [0, 6), [8, 9), total 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ticks = NDArray[np.int64]
TICKS_PER_US = 1024


def to_us(ticks: int | np.integer) -> float:
    """Exact: 1/1024 is a power of two."""
    return int(ticks) / TICKS_PER_US


@dataclass(frozen=True)
class Cover:
    """Disjoint, sorted, half-open intervals that do not touch."""

    start: Ticks
    end: Ticks

    @property
    def total(self) -> int:
        return int((self.end - self.start).sum())

    @cached_property
    def _before(self) -> Ticks:
        """Covered time before each interval, and after the last."""
        return np.concatenate([[0], np.cumsum(self.end - self.start)]).astype(np.int64)

    def until(self, time: Ticks) -> Ticks:
        """Covered time before each of the given times."""
        if not len(self.start):
            return np.zeros(len(time), np.int64)
        index = np.searchsorted(self.start, time, side="right") - 1
        inside = np.minimum(time, self.end[index]) - self.start[index]
        return np.where(index < 0, 0, self._before[index] + inside)

    def within(self, start: Ticks, end: Ticks) -> Ticks:
        """Covered time inside each of the given intervals."""
        return self.until(end) - self.until(start)

    def minus(self, other: Cover) -> Cover:
        """What this covers and the other does not."""
        return _combine(self, other, lambda mine, theirs: mine & ~theirs)

    def common(self, other: Cover) -> Cover:
        """What both cover."""
        return _combine(self, other, lambda mine, theirs: mine & theirs)


def cover(start: Ticks, end: Ticks) -> Cover:
    """The union of any intervals."""
    start, end = np.asarray(start, np.int64), np.asarray(end, np.int64)
    keep = end > start
    start, end = start[keep], end[keep]
    if not len(start):
        return Cover(start, end)
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], start[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return Cover(start[first], reach[last])


def owned(start: Ticks, end: Ticks) -> tuple[Ticks, Ticks]:
    """Share a union out among its intervals: what several cover belongs to the first that began.

    The parts are disjoint and their union is that of the intervals; a part may be empty.
    Example: [0, 4), [1, 3), [2, 6) -> [0, 4), [3, 3), [4, 6).
    """
    order = np.argsort(start, kind="stable")
    reach = np.maximum.accumulate(end[order])
    before = np.concatenate([[np.iinfo(np.int64).min], reach[:-1]]) if len(reach) else reach
    own_end = np.maximum(end[order], np.minimum(before, end[order]))
    own_start = np.minimum(np.maximum(start[order], before), own_end)
    back = np.argsort(order, kind="stable")
    return own_start[back], own_end[back]


def concurrency(start: Ticks, end: Ticks) -> int:
    """How many intervals overlap at most."""
    time = np.concatenate([start, end])
    step = np.concatenate([np.ones(len(start), np.int64), -np.ones(len(end), np.int64)])
    order = np.lexsort((step, time))  # ends before starts
    return int(np.cumsum(step[order]).max(initial=0))


def _combine(mine: Cover, theirs: Cover, rule) -> Cover:  # type: ignore[no-untyped-def]
    time = np.sort(np.concatenate([mine.start, mine.end, theirs.start, theirs.end]))
    # np.unique would hash, which takes seconds for a million regular times (numpy 2.4).
    time = time[np.diff(time, prepend=time[:1] - 1) > 0]
    if len(time) < 2:
        return cover(time[:0], time[:0])
    left, right = time[:-1], time[1:]
    keep = rule(mine.within(left, right) > 0, theirs.within(left, right) > 0)
    return cover(left[keep], right[keep])
