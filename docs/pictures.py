"""Draws every picture in docs/img with the tool itself.

    python docs/pictures.py            # all of them, about a minute on a laptop
    python docs/pictures.py report     # those whose name is given

The schedules come from `interlace schedule` with the flags below, the report's timeline from the
bundled demo trace, the bars from results of `interlace bench` in benchmarks/results.
`tests/test_docs.py` fails when a picture no longer says what the tool says.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
import tempfile
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from interlace.cli import main as interlace
from interlace.measure.report import build_report
from interlace.measure.timeline import WIDTH, timeline, worst_step

IMG = Path(__file__).parent / "img"

_LAYERS = ["--overlap.chunks", "2", "--overlap.chunk_root", "layers.*"]
_MOE = ["--overlap.chunks", "2", "--overlap.chunk_root", "layers.*.moe"]

SCHEDULES = {
    "schedule": ["dsv3-16b-slim", *_LAYERS, "--network-card"],
    "schedule-one": ["dsv3-16b-slim", "--network-card"],
    "schedule-moe": ["dsv3-16b-slim", *_MOE, "--network-card"],
    "schedule-nvlink": ["dsv3-16b-slim", *_LAYERS],
}


def draw_schedule(name: str) -> str:
    """What `interlace schedule` draws with the flags of that picture."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        code = interlace(["schedule", *SCHEDULES[name], "--out", folder])
        if code:
            raise ValueError(f"interlace schedule for {name} ended with {code}.")
        return (Path(folder) / "timeline.svg").read_text(encoding="utf-8")


_ROW, _LEFT, _TOP = 26, 90, 34
_STYLE = """
  svg { background: #fbfbfa; font: 12px system-ui, sans-serif; }
  text { fill: #1d2126; } .h { font-weight: 600; font-size: 13px; } .lane { fill: #eceef0; }
  .compute { fill: #3f78b5; } .comm { fill: #d99a2b; } .copy { fill: #8a93a0; }
  .exposed { fill: #c8372d; }
  @media (prefers-color-scheme: dark) {
    svg { background: #14171b; } text { fill: #e4e7ea; } .lane { fill: #252b32; }
    .compute { fill: #6ea3dc; } .comm { fill: #e3b04b; } .copy { fill: #7c8794; }
    .exposed { fill: #f0655a; }
  }
"""


def draw_report() -> str:
    """The rows that `interlace report --demo --html FILE` draws for its worst step, as one file."""
    with as_file(files("interlace.measure").joinpath("demo.json.gz")) as path:
        report = build_report([path])
    device, figures = report.devices[0], report.figures["ranks"][0]
    step = worst_step(device, figures)
    if step is None:
        raise ValueError("the demo trace has one step; expected two, of which one is drawn.")
    name, start, end = step
    rows = timeline(device, start, end)
    exposed = next(s for s in figures["steps"] if str(s["step"]) == name)["exposed_us"] / 1e3
    height = _TOP + _ROW * len(rows) + 34
    head = f"interlace report --demo, step {name}: {exposed:.3f} ms of communication exposed"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + _LEFT + 10:.0f} {height}" '
        f'width="{WIDTH + _LEFT + 10:.0f}" height="{height}" role="img">',
        f"<title>{head}</title>",
        f"<style>{_STYLE}</style>",
        f'<text x="12" y="22" class="h">{head}</text>',
    ]
    for n, row in enumerate(rows):
        y = _TOP + n * _ROW
        parts.append(f'<text x="12" y="{y + 15}">{row.name}</text>')
        lane = f'x="{_LEFT}" y="{y}" width="{WIDTH:.0f}" height="20" class="lane"'
        parts.append(f"<rect {lane}/>")
        for bar in row.bars:
            high = (18 if bar.work != "copy" else 8) * bar.fill
            place = f'x="{_LEFT + bar.x:.2f}" y="{y + 19 - high:.1f}"'
            size = f'width="{bar.width}" height="{high:.1f}"'
            parts.append(
                f'<rect {place} {size} class="{bar.work}"><title>{bar.title}</title></rect>'
            )
    x, y = _LEFT, height - 12
    for work in ("compute", "comm", "exposed"):
        name = {"comm": "communication"}.get(work, work)
        parts.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" class="{work}"/>')
        parts.append(f'<text x="{x + 16}" y="{y}">{name}</text>')
        x += 130
    return "\n".join([*parts, "</svg>\n"])


BENCHES = ("qwen3-30b-slim", "dsv3-16b-slim")
_RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
_LINK_RUN = "2026-11-30-2xh200-"
_MS = 1.6  # pixels a millisecond
_LINE_STYLE = """
  .line { fill: none; stroke-width: 2.5; }
  .line.compute { stroke: #3f78b5; } .line.comm { stroke: #d99a2b; }
  @media (prefers-color-scheme: dark) {
    .line.compute { stroke: #6ea3dc; } .line.comm { stroke: #e3b04b; }
  }
"""


def draw_bench() -> str:
    """Captured arms of `interlace bench` as bars: what is exposed of the exchange, and the rest."""
    parts, y = [], _TOP
    for preset in BENCHES:
        path = _RESULTS / f"2026-11-29-h200-bench-{preset}.json"
        figures = json.loads(path.read_text(encoding="utf-8"))
        bounds = {b["budget"]: b for b in figures["ceilings"]}
        arms = [a for a in figures["arms"] if a["arm"].endswith("captured")]
        for budget, bound in bounds.items():
            blocks = "block" if budget == 1 else "blocks"
            name = f"{preset}, {budget} thread {blocks} for an exchange"
            parts.append(f'<text x="12" y="{y + 14}" class="h">{name}</text>')
            y += 22
            top = y
            for arm in (a for a in arms if a["budget"] == budget):
                bare, whole = arm["exposed_ms"] * _MS, arm["ms"] * _MS
                parts.append(f'<text x="12" y="{y + 14}">{arm["arm"]}</text>')
                for x, width, kind in ((0, bare, "exposed"), (bare, whole - bare, "compute")):
                    place = f'x="{_LEFT + 50 + x:.1f}" y="{y + 2}"'
                    size = f'width="{width:.1f}" height="16"'
                    parts.append(f'<rect {place} {size} class="{kind}"/>')
                text = f"{arm['ms']:.1f} ms, {arm['hidden_share']:.0%} hidden"
                parts.append(f'<text x="{_LEFT + 58 + whole:.1f}" y="{y + 14}">{text}</text>')
                y += 21
            least = max(bound["compute_only_ms"], bound["exchange_only_ms"]) * _MS
            place = f'x="{_LEFT + 50 + least:.1f}" y="{top}" width="2" height="{y - top}"'
            parts.append(f'<rect {place} class="copy"/>')
            y += 8
    y += 16
    legend = (
        ("exposed", "exchange with nothing beside it"),
        ("compute", "the rest of the step"),
        ("copy", "the larger of compute only and exchange only"),
    )
    for x, (kind, text) in zip((_LEFT, _LEFT + 230, _LEFT + 400), legend, strict=True):
        parts.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" class="{kind}"/>')
        parts.append(f'<text x="{x + 16}" y="{y}">{text}</text>')
    head = "interlace bench on one H200 in loopback, forward and backward, whole-step CUDA graphs"
    opening = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 980 {y + 12}" width="980" '
        f'height="{y + 12}" role="img">',
        f"<title>{head}</title>",
        f"<style>{_STYLE}</style>",
        f'<text x="12" y="22" class="h">{head}</text>',
    ]
    return "\n".join([*opening, *parts, "</svg>\n"])


_PANEL, _HIGH = 380, 210  # pixels of a plot
_LINES = {"scheduled-captured": ("compute", "reordered"), "chunk-captured": ("comm", "two chunks")}


def _read(name: str) -> Any:
    return json.loads((_RESULTS / f"{_LINK_RUN}{name}.json").read_text(encoding="utf-8"))


def draw_link() -> str:
    """Hidden share and gain of `interlace bench` on two GPUs against the speed of the link, which
    thread blocks set."""
    gb_s = {
        row["ctas"]: row["copy_gb_s"]
        for row in _read("exchange")["rows"]
        if row["tokens"] == 16384 and row["backend"] == "minimal_async" and row["ctas"]
    }
    arms = {
        (preset, a["arm"], a["budget"]): a
        for preset in BENCHES
        for a in _read(f"bench-{preset}")["arms"]
    }
    budgets = sorted({budget for _, _, budget in arms})
    speeds = ", ".join(f"{gb_s[b]:.0f}" for b in budgets)
    head = f"Two H200s, 1, 2 and 8 thread blocks for an exchange: a link of {speeds} GB/s"
    x_of = {b: 40 + (_PANEL - 90) * math.log(gb_s[b] / 40) / math.log(400 / 40) for b in budgets}
    parts = []
    for panel, (title, low, high, form) in enumerate(
        (
            ("exchange that is hidden", 0, 1, ".0%"),
            ("times as fast as the control", 0.9, 1.35, ".2f"),
        )
    ):
        left, bottom = 30 + panel * (_PANEL + 90), 70 + _HIGH
        labels: list[tuple[float, float, str]] = []
        parts.append(f'<text x="{left}" y="52">{title}</text>')
        parts.append(f'<rect x="{left}" y="70" width="{_PANEL}" height="{_HIGH}" class="lane"/>')
        for budget in budgets:
            x = left + x_of[budget]
            parts.append(f'<text x="{x:.0f}" y="{bottom + 16}">{gb_s[budget]:.0f} GB/s</text>')
        for preset in BENCHES:
            for arm, (color, name) in _LINES.items():
                found = [arms[preset, arm, b] for b in budgets]
                base = [arms[preset, "captured", b]["ms"] for b in budgets]
                values = (
                    [a["hidden_share"] for a in found]
                    if panel == 0
                    else [b / a["ms"] for a, b in zip(found, base, strict=True)]
                )
                at = [
                    (left + x_of[b], bottom - _HIGH * (v - low) / (high - low))
                    for b, v in zip(budgets, values, strict=True)
                ]
                dash = ' stroke-dasharray="6 4"' if preset == BENCHES[1] else ""
                points = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
                parts.append(
                    f'<polyline points="{points}" class="line {color}"{dash}><title>{preset}, '
                    f"{name}</title></polyline>"
                )
                labels += [
                    (at[0][0] - 36, at[0][1], f"{values[0]:{form}}"),
                    (at[-1][0] + 6, at[-1][1], f"{values[-1]:{form}}"),
                ]
        lowest: dict[float, float] = {}  # by column: where its last label stands
        for x, y, text in sorted(labels):
            y = lowest[x] = max(y, lowest.get(x, 0) + 13)
            parts.append(f'<text x="{x:.0f}" y="{y + 4:.0f}">{text}</text>')
    y, x = 70 + _HIGH + 44, 30
    for preset, dash in zip(BENCHES, ("", ' stroke-dasharray="6 4"'), strict=True):
        for color, name in _LINES.values():
            parts.append(
                f'<polyline points="{x},{y - 4} {x + 26},{y - 4}" class="line {color}"{dash}/>'
                f'<text x="{x + 32}" y="{y}">{preset}, {name}</text>'
            )
            x += 215
    opening = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {y + 14}" width="900" '
        f'height="{y + 14}" role="img">',
        f"<title>{head}</title>",
        f"<style>{_STYLE}{_LINE_STYLE}</style>",
        f'<text x="12" y="22" class="h">{head}</text>',
    ]
    return "\n".join([*opening, *parts, "</svg>\n"])


def main(names: list[str]) -> None:
    others = {"report": draw_report, "bench": draw_bench, "link": draw_link}
    known = [*SCHEDULES, *others]
    for name in names or known:
        if name not in known:
            raise SystemExit(f"no picture is called {name}; there are {', '.join(known)}.")
        text = others[name]() if name in others else draw_schedule(name)
        (IMG / f"{name}.svg").write_text(text, encoding="utf-8")
        print(f"wrote {IMG / name}.svg, {len(text):,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
