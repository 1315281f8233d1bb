"""Figures of one or several traces, and the difference between two sets of them.

``build_report(paths)`` is the library's entry; ``Report.figures`` is what ``--json`` writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlace.measure.analyse import Device, devices_of, summary, warn
from interlace.measure.labels import label
from interlace.measure.order import label_replays
from interlace.measure.trace import load_trace
from interlace.measure.waiting import add_waiting

COMPARED = (
    "span_us", "busy_us", "compute_us", "comm_us", "exposed_us", "idle_us", "hidden_share",
)  # fmt: skip


@dataclass(frozen=True)
class Report:
    """``figures["ranks"][i]`` belongs to ``devices[i]``."""

    figures: dict[str, Any]
    devices: list[Device]


def build_report(
    paths: list[Path],
    own: re.Pattern[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Raises ValueError if a file is no trace, or if no file has a GPU kernel."""
    traced = []
    for path in paths:
        trace = load_trace(path, progress)
        traced.append((trace, label(trace, own)))
    label_replays(traced)
    found = [devices_of(trace, labels) for trace, labels in traced]
    ranks: list[dict[str, Any]] = []
    devices: list[Device] = []
    notes = []
    num_ranks = len({trace.rank for trace, _ in traced})
    for (trace, _), (of_file, steps) in zip(traced, found, strict=True):
        if not of_file:
            notes.append({"level": "warning", "text": _no_kernels(trace.path, trace.warnings)})
        for device in of_file:
            entry = summary(device, steps)
            warn(device, entry, steps, num_ranks)
            ranks.append(entry)
            devices.append(device)
    if not devices:
        raise ValueError(notes[0]["text"])
    unmatched = add_waiting(devices, ranks)
    notes += [{"level": "note", "text": text} for text in unmatched]
    return Report({"ranks": ranks, "notes": notes}, devices)


def _no_kernels(path: str, damage: list[str]) -> str:
    return " ".join([
        f"{path} has no GPU kernels; record the trace with ProfilerActivity.CUDA on a machine with "
        f"a GPU.",
        *damage,
    ])  # fmt: skip


def title(entry: dict[str, Any], entries: list[dict[str, Any]]) -> str:
    """How people tell this rank from the others."""
    name = "rank ?" if entry["rank"] is None else f"rank {entry['rank']}"
    if sum(other["rank"] == entry["rank"] for other in entries) > 1:
        name += f", device {entry['device']}, {Path(entry['file']).name}"
    return name


def difference(new: dict[str, Any], base: dict[str, Any]) -> list[dict[str, Any]]:
    """New minus base for each rank that both have; in the order of the new one.

    Ranks are matched by number; where numbers repeat or lack, by their place in the list.
    """
    theirs, ours = base["ranks"], new["ranks"]
    pairs = _pairs(ours, theirs)
    if not pairs:
        raise ValueError(
            f"--against: no rank in common: {[r['rank'] for r in ours]} against "
            f"{[r['rank'] for r in theirs]}; give traces of the same ranks."
        )
    result = []
    for mine, other in pairs:
        kinds = dict.fromkeys([*mine["by_kind"], *other["by_kind"]])
        result.append({
            "rank": mine["rank"],
            "steps": [len(mine["steps"]), len(other["steps"])],
            **{key: {"new": mine[key], "base": other[key], "change": mine[key] - other[key]}
               for key in COMPARED},
            "exposed_by_kind": {kind: _change(mine, other, kind) for kind in kinds},
        })  # fmt: skip
    return result


def _pairs(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    numbers = [[entry["rank"] for entry in side] for side in (ours, theirs)]
    clear = all(len(set(side)) == len(side) and None not in side for side in numbers)
    if len(ours) == len(theirs) and (len(ours) == 1 or not clear):
        return list(zip(ours, theirs, strict=True))
    by_rank = {entry["rank"]: entry for entry in theirs}
    return [(entry, by_rank[entry["rank"]]) for entry in ours if entry["rank"] in by_rank]


def _change(mine: dict[str, Any], other: dict[str, Any], kind: str) -> dict[str, float]:
    new, base = (
        side["by_kind"].get(kind, {"exposed_us": 0.0})["exposed_us"] for side in (mine, other)
    )
    return {"new": new, "base": base, "change": new - base}
