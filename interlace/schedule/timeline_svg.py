"""A timeline as a picture: two lanes, program order above schedule, stalls in red.

Two MoE layers from the middle of the model are drawn, forward and backward, each pair of orders on
one scale.  Inside a lane every chunk has a row of its own; what is not chunked fills the lane.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import torch
from torch import fx

from interlace.graph import comm_of, tag_of
from interlace.schedule.cost import Span, Timeline

_COLOURS = {  # after Okabe and Ito: told apart without red-green vision, on light and on dark
    "attention": "#0072b2",
    "routing": "#cc79a7",
    "experts": "#009e73",
    "expert weight gradients": "#56b4e9",
    "shared, dense": "#e69f00",
    "dispatch": "#d55e00",
    "combine": "#f0e442",
    "other": "#8c8c8c",
}
_WIDTH, _LEFT, _LANES = 1200, 110, {"compute": 44, "exchange": 30}
_STRIP = sum(_LANES.values()) + 58
_STYLE = """
  svg { background: #fff; font: 12px system-ui, sans-serif; }
  text, .axis { fill: #222; } .in { fill: #111; font-size: 10px; pointer-events: none; }
  .lane { fill: #f0f0f0; } .tick { stroke: #bbb; } .h { font-weight: 600; font-size: 13px; }
  @media (prefers-color-scheme: dark) {
    svg { background: #16181d; } text, .axis { fill: #ddd; } .in { fill: #111; }
    .lane { fill: #252932; } .tick { stroke: #4a4f5a; }
  }
"""


@dataclass(frozen=True)
class _Bar:
    kind: str
    layer: str
    phase: str
    chunk: int | None
    lane: str
    start_us: float
    end_us: float


def timeline_svg(before: Timeline, after: Timeline, title: str) -> str:
    """The two orders of one graph as an SVG document."""
    layers = _middle_layers(before)
    rows = 1 + max((tag_of(s.node).chunk or 0 for s in before.spans), default=0)
    strips: list[str] = []
    y = 92
    for phase in ("forward", "backward"):
        windows = [(t, _window(t, layers, phase)) for t in (before, after)]
        longest = max(end - start for _, (start, end) in windows)
        for name, (timeline, window) in zip(("program order", "scheduled"), windows, strict=True):
            stalled = sum(b - a for a, b in _stalls(timeline, window))
            head = f"{phase}, {name}: {(window[1] - window[0]) / 1e3:.2f} ms"
            head += f", {stalled / 1e3:.2f} ms exposed"
            strips += _strip(timeline, window, longest, rows, y, head)
            y += _STRIP
    height, shown = y + 8, " and ".join(layers) or "the step"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            f'width="{_WIDTH}" height="{height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            '<defs><pattern id="stall" width="6" height="6" patternUnits="userSpaceOnUse"',
            'patternTransform="rotate(45)"><rect width="3" height="6" fill="#e5383b"/>',
            "</pattern></defs>",
            f'<text x="12" y="24" class="h">{escape(title)}</text>',
            f'<text x="12" y="42">{escape(shown)}; simulated, not measured</text>',
            *_legend(64),
            *strips,
            "</svg>\n",
        ]
    )


def _middle_layers(timeline: Timeline) -> list[str]:
    """Up to two neighbouring layers with exchanges, from the middle of the model."""
    layers = list(dict.fromkeys(_top(tag_of(e.launch).layer) for e in timeline.exchanges))
    layers = layers[: (len(layers) + 1) // 2] if len(layers) > 2 else layers
    return layers[-2:]


def _top(layer: str) -> str:
    return ".".join(layer.split(".")[:2])


def _window(timeline: Timeline, layers: list[str], phase: str) -> tuple[float, float]:
    """From the first to the last moment of these layers in one direction.

    Backward it starts with an exchange: trifles that need no gradient may run long before.
    """
    forward = phase == "forward"
    spans = [
        s
        for s in timeline.spans
        if (tag := tag_of(s.node)).phase != "io"
        and tag.role != "cast"  # casts of parameters lie far from their use in program order
        and (tag.phase == "forward") == forward
        and (not layers or _top(tag.layer) in layers)
        and (s.lane != "compute" or _kind(s.node) == "attention" or not layers)
    ]
    starts = [s.start_us for s in spans if forward or s.lane != "compute" or not layers]
    return min(starts, default=0.0), max((s.end_us for s in spans), default=1.0)


def _stalls(timeline: Timeline, window: tuple[float, float]) -> Iterator[tuple[float, float]]:
    for e in timeline.exchanges:
        start, end = max(e.end_us - e.exposed_us, window[0]), min(e.end_us, window[1])
        if end > start:
            yield start, end


def _kind(node: fx.Node) -> str:
    if spec := comm_of(node):
        return spec.name if spec.name in _COLOURS else "other"
    layer = tag_of(node).layer + "."
    if node.target is torch.ops.interlace.grouped_wgrad.default:
        return "expert weight gradients"
    if node.target is torch.ops.ep.plan.default:
        return "routing"
    words = {".experts.": "experts", ".router.": "routing", ".attention.": "attention",
             ".shared.": "shared, dense", ".ffn.": "shared, dense"}  # fmt: skip
    return next((kind for word, kind in words.items() if word in layer), "other")


def _bars(timeline: Timeline, window: tuple[float, float]) -> list[_Bar]:
    """Neighbours of one kind, layer and chunk as one bar, cut to the window."""
    bars: list[_Bar] = []
    for s in timeline.spans:
        start, end = max(s.start_us, window[0]), min(s.end_us, window[1])
        if end <= start:
            continue
        tag, lane = tag_of(s.node), _lane(s)
        kind = _kind(s.node) if lane == "exchange" or not comm_of(s.node) else "routing"
        bar = _Bar(kind, _top(tag.layer), tag.phase, tag.chunk, lane, start, end)
        if bars and _continues(bars[-1], bar):
            bar = _Bar(kind, bar.layer, bar.phase, bar.chunk, lane, bars.pop().start_us, end)
        bars.append(bar)
    return bars


def _lane(span: Span) -> str:
    return "compute" if span.lane == "compute" else "exchange"


def _continues(a: _Bar, b: _Bar) -> bool:
    same = (a.kind, a.layer, a.phase, a.chunk) == (b.kind, b.layer, b.phase, b.chunk)
    return same and a.lane == b.lane == "compute" and b.start_us - a.end_us < 0.5


def _strip(
    timeline: Timeline,
    window: tuple[float, float],
    longest_us: float,
    rows: int,
    top: int,
    head: str,
) -> Iterator[str]:
    scale = (_WIDTH - _LEFT - 16) / longest_us
    yield f'<text x="12" y="{top}" class="h">{escape(head)}</text>'
    lane_top = {"compute": top + 10, "exchange": top + 16 + _LANES["compute"]}
    for lane, lane_y in lane_top.items():
        yield f'<text x="12" y="{lane_y + _LANES[lane] / 2 + 4:.0f}">{lane}</text>'
        yield _rect(_LEFT, lane_y, (window[1] - window[0]) * scale, _LANES[lane], 'class="lane"')
    for bar in _bars(timeline, window):
        high = _LANES[bar.lane] / (1 if bar.chunk is None else rows)
        y = lane_top[bar.lane] + (0 if bar.chunk is None else bar.chunk * high)
        x, width = _LEFT + (bar.start_us - window[0]) * scale, (bar.end_us - bar.start_us) * scale
        chunk = "" if bar.chunk is None else f", chunk {bar.chunk}"
        hint = f"{bar.kind}, {bar.layer or 'step'}{chunk}, {bar.phase}: "
        hint += f"{bar.end_us - bar.start_us:,.0f} us"
        yield _rect(x, y, width, high - 1, f'fill="{_COLOURS[bar.kind]}"', hint)
        label = bar.layer.replace("layers.", "L") + ("" if bar.chunk is None else f"/{bar.chunk}")
        if width > 7 * len(label) and high >= 11:
            yield f'<text class="in" x="{x + 3:.1f}" y="{y + high / 2 + 3:.1f}">{label}</text>'
    for start, end in _stalls(timeline, window):
        x = _LEFT + (start - window[0]) * scale
        yield _rect(x, lane_top["compute"], (end - start) * scale, _LANES["compute"],
                    'fill="url(#stall)"', f"exposed: {end - start:,.0f} us")  # fmt: skip
    base = lane_top["exchange"] + _LANES["exchange"]
    step = _tick_us(longest_us)
    for i in range(int(longest_us / step) + 1):
        x = _LEFT + i * step * scale
        yield f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 5}"/>'
        label = f"{i * step / 1e3:g} ms"
        place, side = x + 3, ""
        if place + 7 * len(label) > _WIDTH:  # the last one: left of its tick
            place, side = x - 3, ' text-anchor="end"'
        yield f'<text class="axis" x="{place:.1f}" y="{base + 13}"{side}>{label}</text>'


def _tick_us(longest_us: float) -> float:
    step = 1.0
    while longest_us / step > 10:
        step *= 10
    return step if longest_us / step > 4 else step / 2


def _rect(x: float, y: float, width: float, height: float, style: str, hint: str = "") -> str:
    inner = f"<title>{escape(hint)}</title>" if hint else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.4):.1f}" height="{height:.1f}"'
    return f"<rect {place} {style}>{inner}</rect>"


def _legend(y: int) -> Iterator[str]:
    x = 12
    for kind, colour in [*_COLOURS.items(), ("exposed", "url(#stall)")]:
        yield _rect(x, y - 9, 11, 11, f'fill="{colour}"')
        yield f'<text x="{x + 15}" y="{y}">{kind}</text>'
        x += 32 + int(6.6 * len(kind))
