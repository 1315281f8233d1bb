"""Draws every picture in docs/img with the tool itself.

    python docs/pictures.py            # all of them, about a minute on a laptop
    python docs/pictures.py report     # those whose name is given

The schedules come from `interlace schedule` with the flags below, the report's timeline from the
bundled demo trace.  `tests/test_docs.py` fails when a picture no longer says what the tool says.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from importlib.resources import as_file, files
from pathlib import Path

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


def main(names: list[str]) -> None:
    known = [*SCHEDULES, "report"]
    for name in names or known:
        if name not in known:
            raise SystemExit(f"no picture is called {name}; there are {', '.join(known)}.")
        text = draw_report() if name == "report" else draw_schedule(name)
        (IMG / f"{name}.svg").write_text(text, encoding="utf-8")
        print(f"wrote {IMG / name}.svg, {len(text):,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
