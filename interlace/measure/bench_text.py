"""A benchmark as lines for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interlace.measure.bench_verdict import ctas

HEAD = (
    "arm", "budget", "ms", "10 to 90%", "tokens/s", "MFU", "bits", "gain", "exchange", "exposed",
    "hidden", "over bound", "memory", "clock, power",
)  # fmt: skip
UNKNOWN = "N/A"
TRANSPORTS = {
    "loopback": "loopback: one process stands for all expert-parallel ranks, its peers mirror it",
    "none": "no exchange: one expert-parallel rank",
}


def lines(figures: Mapping[str, Any]) -> list[str]:
    """Table, ceilings, recommendation; always which transport carried the exchange."""
    rows = [cells(row) for row in figures["arms"]]
    width = [max(len(line[n]) for line in [HEAD, *rows]) for n in range(len(HEAD))]
    table = [
        "  ".join(
            cell.ljust(width[n]) if n in (0, 6) else cell.rjust(width[n])
            for n, cell in enumerate(line)
        ).rstrip()
        for line in [HEAD, *rows]
    ]
    notes = [f"ceiling, {_where(bound)}: {ceiling(bound)}" for bound in figures["ceilings"]]
    return [about(figures), *table, *notes, figures["recommendation"]]


def about(figures: Mapping[str, Any]) -> str:
    """One line: what ran where, and what carried the exchange."""
    transport = TRANSPORTS.get(figures["transport"], figures["transport"])
    exposure = "" if figures["arms"][0]["exposed_ms"] is not None else f"; {_not_measured(figures)}"
    update = " and update" if figures["optimizer"] else ""
    return (
        f"{figures['preset']} on {figures['machine']}, torch {figures['torch']}; {transport}; "
        f"EP {figures['expert_parallel_degree']}, {figures['tokens']:,} tokens a GPU, routing "
        f"{figures['routing']}, forward and backward{update}, {figures['rounds']} rounds{exposure}"
    )


def _not_measured(figures: Mapping[str, Any]) -> str:
    if figures["machine"].startswith("CPU"):
        return "exposed time is not measured on a CPU, whose times say nothing of a GPU"
    return "exposed time: the profiler lost kernels"


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """One line of the table, in the order of HEAD; what is not known reads N/A."""
    setting = "".join(f" {name.split('.')[-1]}={value}" for name, value in row["setting"].items())
    clock = f"{number(row['clock_mhz'], '.0f', ' MHz')}, {number(row['power_w'], '.0f', ' W')}"
    share = row["hidden_share"]
    return (
        row["arm"] + setting,
        "-" if row["budget"] is None else ctas(row["budget"]),
        f"{row['ms']:.2f}",
        f"{row['ms_p10']:.2f} to {row['ms_p90']:.2f}",
        f"{row['tokens_per_s']:,.0f}",
        number(row["mfu_percent"], ".1f", "%"),
        bits(row),
        f"{row['gain']:.3f}x",
        number(row["exchange_ms"], ".2f"),
        number(row["exposed_ms"], ".2f"),
        number(None if share is None else 100 * share, ".1f", "%"),
        number(row["over_bound"], ".2f"),
        number(row["peak_memory_gib"], ".1f", " GiB"),
        UNKNOWN if row["clock_mhz"] is None and row["power_w"] is None else clock,
    )


def bits(row: Mapping[str, Any]) -> str:
    """The verdict on an arm's results."""
    if row["equal"] is None:
        return "reference"
    return f"= {row['against']}" if row["equal"] else f"DIFFERS: {row['differs_in']}"


def ceiling(bound: Mapping[str, Any]) -> str:
    """Both ceilings, in milliseconds."""
    return (
        f"compute only {number(bound['compute_only_ms'], '.2f', ' ms')}, exchange only "
        f"{number(bound['exchange_only_ms'], '.2f', ' ms')}"
    )


def _where(bound: Mapping[str, Any]) -> str:
    values = [f"{name}={value}" for name, value in bound["setting"].items()]
    return ", ".join([ctas(bound["budget"]), *values])


def number(value: float | None, form: str, unit: str = "") -> str:
    """A figure with its unit, or N/A."""
    return UNKNOWN if value is None else f"{value:{form}}{unit}"
