"""What the lines of a benchmark mean: gain, bound, recommendation, gate.  Pure functions over rows.

A row is what the JSON holds for an arm: see docs/bench.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from interlace.measure.bench_timing import Spread, spread
from interlace.train.arms import ARMS

Row = Mapping[str, Any]


def paired_gain(control: Sequence[float], mine: Sequence[float]) -> Spread:
    """Control over arm, round by round: 2 is twice as fast.

    Example: [4, 6] over [2, 2] -> median 2.5, from 2 to 3.
    """
    return spread([a / b for a, b in zip(control, mine, strict=True)])


def over_bound(
    ms: float, compute_only_ms: float | None, exchange_only_ms: float | None
) -> float | None:
    """Time over the larger of both ceilings; None where one was not measured."""
    if not compute_only_ms or exchange_only_ms is None:
        return None
    return ms / max(compute_only_ms, exchange_only_ms)


def overlaps(row: Row) -> bool:
    """Whether the arm may run an exchange beside compute."""
    return ARMS[row["arm"]].scheduled


def recommend(rows: Sequence[Row], *, exchanges: bool = True) -> str:
    """One sentence a budget: the arm to use, or to leave overlap off, and why.

    The best overlapping arm is compared with the best of the others, captured ones included, and
    counts as faster only if their spreads are apart.  Arms that gave other bits do not count.
    """
    if not exchanges:
        return "Leave overlap off: with one expert-parallel rank there is no exchange to hide."
    found = [_distrust(row) for row in rows if row["equal"] is False]
    good = [row for row in rows if row["equal"] is not False]
    budgets = list(dict.fromkeys(row["budget"] for row in rows))
    for budget in budgets:
        sentence = _choose([row for row in good if row["budget"] == budget])
        if len(budgets) > 1:
            sentence = f"With {ctas(budget)}, {sentence[0].lower()}{sentence[1:]}"
        found.append(sentence)
    return " ".join(found)


def ctas(budget: int | None) -> str:
    """A budget in words."""
    return "no budget" if budget is None else f"{budget} CTA{'s' if budget > 1 else ''}"


def _distrust(row: Row) -> str:
    return (
        f"{name_of(row)} gave other bits than {row['against']} in {row['differs_in']}: its speed "
        f"counts for nothing until that is understood."
    )


def _choose(rows: list[Row]) -> str:
    over = min((r for r in rows if overlaps(r)), key=lambda r: r["ms"], default=None)
    plain = min((r for r in rows if not overlaps(r)), key=lambda r: r["ms"], default=None)
    if over is None or plain is None:
        kind = "overlapping" if over is None else "other"
        return f"No recommendation: no {kind} arm with the right bits was measured."
    pair = f"{name_of(over)} ({over['ms']:.1f} ms)", f"{name_of(plain)} ({plain['ms']:.1f} ms)"
    if over["ms_p90"] < plain["ms_p10"]:
        reason = ""
        if over["hidden_share"] is not None:
            reason = f", {100 * over['hidden_share']:.0f}% of its exchange is hidden"
        return f"Use {pair[0]}: {plain['ms'] / over['ms']:.2f}x as fast as {pair[1]}{reason}."
    return f"Leave overlap off: {pair[0]} is no faster than {pair[1]}; {_why(over, plain)}."


def _why(over: Row, plain: Row) -> str:
    if over["ms_p10"] <= plain["ms_p90"]:
        return "the difference is within the spread"
    known = ("exposed_ms", "compute_ms")
    if all(row[key] is not None for row in (over, plain) for key in known):
        hidden, cost = (sign * (plain[key] - over[key]) for sign, key in zip((1, -1), known))  # noqa: B905
        if cost > 0:
            return f"it hides {max(hidden, 0):.1f} ms of exchange and pays {cost:.1f} ms of compute"
    return "it is slower by more than the spread"


def name_of(row: Row) -> str:
    """An arm with the swept values that matter to it."""
    values = ", ".join(f"{name}={value}" for name, value in row["setting"].items())
    return f"{row['arm']} with {values}" if values else str(row["arm"])


def failure(rows: Sequence[Row], min_gain: float | None) -> str | None:
    """Why the command must fail, in one line: an arm gave other bits, or the gate is not reached.

    ``min_gain``: under every budget the best arm must be so many times as fast as its control.
    """
    if wrong := next((row for row in rows if row["equal"] is False), None):
        return _distrust(wrong)
    if min_gain is None:
        return None
    for budget in dict.fromkeys(row["budget"] for row in rows):
        mine = [row for row in rows if row["budget"] == budget and row["arm"] != "control"]
        best = max(mine, key=lambda row: row["gain"], default=None)
        if best is None:
            return f"--min-gain {min_gain:g} cannot be judged: no arm beside the control ran."
        if best["gain"] < min_gain:
            return (
                f"with {ctas(budget)} the best arm, {name_of(best)}, gains {best['gain']:.3f}x "
                f"over the control, less than --min-gain {min_gain:g}."
            )
    return None
