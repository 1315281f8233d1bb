"""The loss curve as one self-contained SVG: no script, no font, no network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 704, 48, 352  # the plot's edges
_MAX_POINTS = 1200  # beyond it neighbours are joined: the file stays small
_SMOOTH_FROM = 10  # points from which on a smoothed line says more than the raw one

_STYLE = """
.page { fill: #ffffff } text { fill: #24292f; font: 12px system-ui, sans-serif }
.title { font-size: 15px; font-weight: 600 } .tick { fill: #57606a }
.grid { stroke: #d0d7de; stroke-width: 1 } .axis { stroke: #57606a; stroke-width: 1 }
.raw { fill: none; stroke: #9ec5fe; stroke-width: 1.2 }
.smooth { fill: none; stroke: #0a58ca; stroke-width: 2; stroke-linejoin: round }
.end { fill: #0a58ca } .value { font-weight: 600 }
.bad { fill: none; stroke: #cf222e; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117 } text { fill: #e6edf3 } .tick { fill: #9198a1 }
.grid { stroke: #30363d } .axis { stroke: #9198a1 } .raw { stroke: #1f4a86 }
.smooth { stroke: #6ea8fe } .end { fill: #6ea8fe } .bad { stroke: #ff7b72 } }
"""

Point = tuple[float, float]  # step, loss


def loss_curve_svg(steps: Sequence[int], losses: Sequence[float], title: str) -> str:
    """Raw losses light, a centred moving average dark, first and last finite value labelled.

    Follows the viewer's light or dark scheme.  A loss that is not finite leaves a gap in both
    lines and a cross at the lower edge.  Long curves keep the extremes of each bucket of steps.
    Raises: ValueError when there is no point, or not one loss for each step.
    """
    if len(steps) != len(losses) or not steps:
        raise ValueError(
            f"loss_curve_svg: got {len(steps)} steps and {len(losses)} losses; "
            f"expected as many of each and at least one."
        )
    points = [(float(s), float(v)) for s, v in zip(steps, losses, strict=True)]
    finite = [point for point in points if math.isfinite(point[1])]
    bad = [point for point in points if not math.isfinite(point[1])]
    y_ticks = _ticks(*_span([loss for _, loss in finite]))
    x_low, x_high = _span([step for step, _ in points])
    x_ticks = [t for t in _ticks(x_low, x_high) if min(steps) <= t <= max(steps) and t == round(t)]
    x = _scale(x_low, x_high, LEFT, RIGHT)
    y = _scale(y_ticks[0], y_ticks[-1], BOTTOM, TOP)

    def place(point: Point) -> Point:
        return x(point[0]), y(point[1])

    runs = _runs(points)
    raw = [[place(p) for p in _thin(run, len(points))] for run in runs]
    body = [*_grid(x_ticks, y_ticks, x, y)]
    if len(points) >= _SMOOTH_FROM:
        window = max(3, len(points) // 20)
        smooth = [[place(p) for p in _thin(_moving_average(r, window), len(points))] for r in runs]
        body += [_line("raw", run) for run in raw] + [_line("smooth", run) for run in smooth]
    else:
        body += [_line("smooth", run) for run in raw]
    body += [_cross(x(step), f"step {step:g}: loss {loss}") for step, loss in _thin(bad, len(bad))]
    if finite:
        body += _end_labels(finite, place)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" role="img">',
            f"<title>{_clean(title)}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
            f'<text class="title" x="{LEFT}" y="26">{_clean(title)}</text>',
            *body,
            "</svg>",
            "",
        ]
    )


def _span(values: list[float]) -> tuple[float, float]:
    """Lowest and highest, never equal, so that one value can be placed too."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    margin = abs(low) / 2 or 1.0
    return low - margin, high + margin


def _ticks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, from at most ``low`` to at least ``high``."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    width = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    first, last = math.floor(low / width + 1e-9), math.ceil(high / width - 1e-9)
    digits = max(0, 1 - math.floor(math.log10(width)))
    return [round(i * width, digits) for i in range(first, last + 1)]


def _scale(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
    """The linear map of [low, high] to [begin, end]."""
    per_unit = (end - begin) / (high - low)
    return lambda value: begin + (value - low) * per_unit


def _runs(points: list[Point]) -> list[list[Point]]:
    """Stretches of finite losses; a bad one cuts."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _thin(points: list[Point], total: int) -> list[Point]:
    """Lowest and highest of each bucket in their order, so that no spike is lost."""
    size = math.ceil(2 * total / _MAX_POINTS) if total > _MAX_POINTS else 1
    if size <= 2:
        return points
    kept: list[Point] = []
    for begin in range(0, len(points), size):
        bucket = points[begin : begin + size]
        ends = {min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def _moving_average(points: list[Point], window: int) -> list[Point]:
    """Mean over ``window`` neighbours, symmetric, narrower towards the ends."""
    sums = [0.0, *accumulate(loss for _, loss in points)]
    smooth = []
    for i, (step, _) in enumerate(points):
        reach = min(window // 2, i, len(points) - 1 - i)
        total = sums[i + reach + 1] - sums[i - reach]
        smooth.append((step, total / (2 * reach + 1)))
    return smooth


def _grid(
    x_ticks: list[float],
    y_ticks: list[float],
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> list[str]:
    parts = []
    for tick in y_ticks:
        at = f"{y(tick):.1f}"
        parts.append(f'<path class="grid" d="M{LEFT} {at}H{RIGHT}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">'
            f"{tick:g}</text>"
        )
    for tick in x_ticks:
        parts.append(f'<path class="axis" d="M{x(tick):.1f} {BOTTOM}v5"/>')
        parts.append(
            f'<text class="tick" x="{x(tick):.1f}" y="{BOTTOM + 20}" text-anchor="middle">'
            f"{int(tick):,}</text>"
        )
    parts.append(f'<path class="axis" d="M{LEFT} {BOTTOM}H{RIGHT}"/>')
    parts.append(
        f'<text class="tick" x="{(LEFT + RIGHT) / 2:g}" y="{HEIGHT - 10}" '
        f'text-anchor="middle">step</text>'
    )
    return parts


def _line(kind: str, placed: list[Point]) -> str:
    """A polyline; a lone point becomes a dot, which a line would not show."""
    if len(placed) == 1:
        (x, y) = placed[0]
        return f'<circle class="end" cx="{x:.1f}" cy="{y:.1f}" r="2"/>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    return f'<polyline class="{kind}" points="{path}"/>'


def _cross(x: float, hint: str) -> str:
    top, low = BOTTOM - 10, BOTTOM - 2
    return (
        f'<path class="bad" d="M{x - 4:.1f} {top}L{x + 4:.1f} {low}M{x + 4:.1f} {top}'
        f'L{x - 4:.1f} {low}"><title>{_clean(hint)}</title></path>'
    )


def _end_labels(finite: list[Point], place: Callable[[Point], Point]) -> list[str]:
    ends = [(finite[0], "start", 6)]
    if len(finite) > 1:
        ends.append((finite[-1], "end", -6))
    parts = []
    for point, anchor, shift in ends:
        x, y = place(point)
        above = max(y - 8, TOP - 6)
        parts.append(f'<circle class="end" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
        parts.append(
            f'<text class="value" x="{x + shift:.1f}" y="{above:.1f}" text-anchor="{anchor}">'
            f"{point[1]:.4g}</text>"
        )
    return parts


def _clean(text: str) -> str:
    """Escaped, and without the control characters that XML forbids."""
    return escape("".join(c if c.isprintable() else " " for c in text))
