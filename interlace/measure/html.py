"""One self-contained page: timeline, tables, and the figures themselves as JSON."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import msgspec
from jinja2 import Environment, StrictUndefined

from interlace.measure.intervals import to_us
from interlace.measure.names import KINDS, short
from interlace.measure.report import COMPARED, Report, title
from interlace.measure.text import ms, percent, share
from interlace.measure.timeline import WIDTH, Row, timeline, worst_step

_TICKS = 5
_MAX_DRAWN = 16  # ranks with a timeline; tables hold all


def render(report: Report) -> str:
    """The page as text; it loads nothing."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True,
                              lstrip_blocks=True)  # fmt: skip
    environment.filters.update(ms=ms, share=share, short=short, percent=percent)
    source = files("interlace.measure").joinpath("report.html.j2").read_text(encoding="utf-8")
    ranks = report.figures["ranks"]
    return environment.from_string(source).render(
        ranks=ranks,
        titles=[title(rank, ranks) for rank in ranks],
        drawings=[_drawings(report, index) for index in range(len(ranks))],
        notes=report.figures["notes"],
        against=report.figures.get("against", []),
        compared=[key for key in COMPARED if key.endswith("_us")],
        kinds=KINDS,
        width=WIDTH,
        figures_json=_embedded(report.figures),
    )


def _embedded(figures: dict[str, Any]) -> str:
    """JSON that no HTML parser takes for markup."""
    text = msgspec.json.encode(figures).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _drawings(report: Report, index: int) -> list[dict[str, Any]]:
    if index >= _MAX_DRAWN:
        return []
    device, figures = report.devices[index], report.figures["ranks"][index]
    start, end = int(device.counted.start[0]), int(device.counted.end[-1])
    found = [_drawing("The whole trace", timeline(device, start, end), start, end)]
    if step := worst_step(device, figures):
        name, first, last = step
        caption = f"Step {name}, the one with most exposed time"
        found.append(_drawing(caption, timeline(device, first, last), first, last))
    return found


def _drawing(caption: str, rows: list[Row], start: int, end: int) -> dict[str, Any]:
    span = to_us(end - start)
    ticks = [ms(span * n / (_TICKS - 1)) for n in range(_TICKS)]
    return {"caption": caption, "rows": rows, "ticks": ticks}
