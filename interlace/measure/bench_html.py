"""A benchmark as one self-contained page: table, bars, and the figures themselves as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from interlace.measure.bench_text import HEAD, about, ceiling, cells
from interlace.measure.bench_verdict import ctas
from interlace.measure.names import KINDS

WIDTH = 1000.0  # of a bar's drawing, in its own units


def render(figures: Mapping[str, Any]) -> str:
    """The page as text; it loads nothing."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True,
                              lstrip_blocks=True)  # fmt: skip
    source = files("interlace.measure").joinpath("bench.html.j2").read_text(encoding="utf-8")
    scale = WIDTH / max([row["ms_p90"] for row in figures["arms"]], default=1.0)
    return environment.from_string(source).render(
        figures=figures,
        about=about(figures),
        head=HEAD,
        rows=[(row, cells(row)) for row in figures["arms"]],
        bars=[_bar(row, figures["ceilings"], scale) for row in figures["arms"]],
        ceilings=[(bound, ceiling(bound)) for bound in figures["ceilings"]],
        kinds=KINDS,
        ctas=ctas,
        width=WIDTH,
    )


def _bar(row: Mapping[str, Any], ceilings: list[Mapping[str, Any]], scale: float) -> dict[str, Any]:
    """Lengths of a bar's parts: exposed exchange in front of all else, the spread, the bound."""
    bounds = [
        max(bound["compute_only_ms"], bound["exchange_only_ms"] or 0.0)
        for bound in ceilings
        if bound["compute_only_ms"] is not None
        and bound["budget"] == row["budget"]
        and all(row["setting"].get(name) == value for name, value in bound["setting"].items())
    ]
    exposed = min(row["exposed_ms"] or 0.0, row["ms"])
    return {
        "exposed": round(exposed * scale, 2),
        "rest": round((row["ms"] - exposed) * scale, 2),
        "low": round(row["ms_p10"] * scale, 2),
        "high": round(row["ms_p90"] * scale, 2),
        "bound": round(bounds[0] * scale, 2) if bounds else None,
    }
