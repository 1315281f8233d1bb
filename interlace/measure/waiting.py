"""Wait against transfer, where the traces of several ranks are given.

A collective moves nothing before its last rank has come.  The n-th kernel of one name, stream and
group on each rank is the same collective: what a rank spent between its own start and the start of
the last rank is waiting, the rest is transfer.  Clocks of different hosts may differ; the figures
are as good as the clocks.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from interlace.measure.analyse import Device
from interlace.measure.intervals import TICKS_PER_US, Ticks, to_us

Key = tuple[str, str, str]
_FIXED_PARTNER = {"p2p"}  # send and receive pair two ranks, which the order does not tell


def add_waiting(devices: list[Device], figures: list[dict[str, Any]]) -> list[str]:
    """Give each rank's figures an entry ``waiting``; returns what could not be matched."""
    ranks = {device.trace.rank for device in devices}
    if len(devices) < 2 or len(ranks) < len(devices) or None in ranks:
        return []
    sequences = [_sequences(device) for device in devices]
    wait: list[Ticks] = [np.full(len(device.trace.start), -1) for device in devices]
    unmatched = 0
    for key in dict.fromkeys(key for found in sequences for key in found):
        holders = [n for n, found in enumerate(sequences) if key in found]
        if len(holders) < 2 or len({len(sequences[n][key]) for n in holders}) > 1:
            unmatched += sum(len(sequences[n][key]) for n in holders)
            continue
        for members in _same_group(key, devices, holders):
            _wait_of(key, members, devices, sequences, wait)
    for device, figure, waited in zip(devices, figures, wait, strict=True):
        figure["waiting"] = _sum(device, waited)
    if unmatched:
        return [
            f"{unmatched} communication kernel(s) have no counterpart on another given rank, or a "
            f"different number of them: wait and transfer leave them out."
        ]
    return []


def _sequences(device: Device) -> dict[Key, Ticks]:
    """Rows of each (name, stream, group) in order of time."""
    trace = device.trace
    found: dict[Key, list[int]] = {}
    for row in device.comm_rows:
        if device.labels.kind[row] in _FIXED_PARTNER:
            continue
        group = "/".join(trace.groups[trace.group[row]][2:]) if trace.group[row] >= 0 else ""
        stream = trace.places[trace.place[row]].split("/", 1)[1]
        found.setdefault((trace.names[trace.name[row]], stream, group), []).append(int(row))
    return {key: np.array(rows, np.int64) for key, rows in found.items()}


def _same_group(key: Key, devices: list[Device], holders: list[int]) -> list[list[int]]:
    """Holders that are members of the group, where its ranks are known; else all of them."""
    members = {int(text) for text in re.findall(r"\d+", key[2].partition("/")[2])}
    if not members:
        return [holders]
    inside = [n for n in holders if devices[n].trace.rank in members]
    return [inside] if len(inside) > 1 else []


def _wait_of(
    key: Key,
    members: list[int],
    devices: list[Device],
    sequences: list[dict[Key, Ticks]],
    wait: list[Ticks],
) -> None:
    shift = [_shift(devices[n], devices[members[0]]) for n in members]
    starts = np.stack([
        devices[n].trace.start[sequences[n][key]] + by
        for n, by in zip(members, shift, strict=True)
    ])  # fmt: skip
    last = starts.max(axis=0)
    for own, n in zip(starts, members, strict=True):
        rows = sequences[n][key]
        length = devices[n].trace.end[rows] - devices[n].trace.start[rows]
        wait[n][rows] = np.minimum(last - own, length)


def _shift(device: Device, first: Device) -> int:
    """Between the base times of two files, in ticks."""
    return round((device.trace.base_ns - first.trace.base_ns) * TICKS_PER_US / 1000)


def _sum(device: Device, waited: Ticks) -> dict[str, Any]:
    rows = device.comm_rows
    rows = rows[waited[rows] >= 0]
    trace = device.trace

    def parts(mine: Ticks) -> dict[str, Any]:
        total = int((trace.end[mine] - trace.start[mine]).sum())
        wait = int(waited[mine].sum())
        return {
            "wait_us": to_us(wait), "transfer_us": to_us(total - wait), "kernels": len(mine)
        }  # fmt: skip

    kinds = device.labels.kind[rows]
    by_kind = {kind: parts(rows[kinds == kind]) for kind in dict.fromkeys(kinds)}
    return parts(rows) | {"by_kind": by_kind}
