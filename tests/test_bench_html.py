"""The page of a benchmark: its figures, and what a real browser makes of it.

Oracle: the figures that it was written from.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from interlace.measure.bench_html import render

CHROMIUM = Path("/usr/bin/chromium")


def row(arm: str, budget: int, ms: float, **more: Any) -> dict[str, Any]:
    known = {
        "setting": {}, "equal": True, "against": "eager", "differs_in": None,
        "ms_p10": ms - 1, "ms_p90": ms + 1, "tokens_per_s": 16384e3 / ms, "mfu_percent": 21.7,
        "exposed_ms": 10.0, "hidden_share": 0.5, "exchange_ms": 20.0, "compute_ms": 90.0,
        "exposed_by_kind": {}, "exposed_by_layer": {}, "peak_memory_gib": 56.3,
        "clock_mhz": 1905.0, "power_w": 632.6, "gain": 1.0, "gain_p10": 1.0, "gain_p90": 1.0,
        "over_bound": 1.1,
    }  # fmt: skip
    return {"arm": arm, "budget": budget, "ms": ms} | known | more


FIGURES: dict[str, Any] = {
    "preset": "qwen3-30b-slim", "machine": "GPU <b>&amp;", "torch": "2.11", "transport": "loopback",
    "world_size": 1, "expert_parallel_degree": 2, "routing": "balanced", "tokens": 16384,
    "sequences": 4, "rounds": 5, "optimizer": False,
    "recommendation": "Leave overlap off: <script>alert(1)</script>.",
    "arms": [
        row("control", 1, 200.0, exposed_ms=50.0),
        row("chunk-captured", 1, 100.0, setting={"overlap.chunks": 2},
            exposed_by_kind={"ep_dispatch": 4.0, "ep_combine": 6.0},
            exposed_by_layer={"3": 7.5, "unknown": 2.5}),
        row("control", 8, 99.0, exposed_ms=None, hidden_share=None),
        row("chunk-captured", 8, 98.0, equal=False, differs_in="</script>layers.1"),
    ],
    "ceilings": [
        {"setting": {}, "budget": 1, "compute_only_ms": 80.0, "compute_only_ms_p10": 79.0,
         "compute_only_ms_p90": 81.0, "exchange_only_ms": 90.0},
        {"setting": {}, "budget": 8, "compute_only_ms": None, "compute_only_ms_p10": None,
         "compute_only_ms_p90": None, "exchange_only_ms": None},
    ],
    "left_out": [{"arm": "captured", "setting": {"ep.padded": False}, "reason": "exact exchange"}],
}  # fmt: skip


def test_the_page_loads_nothing_escapes_all_and_holds_the_figures() -> None:
    text = render(FIGURES)
    found = re.search(r'id="interlace-bench">(.*?)</script>', text, re.DOTALL)
    assert found
    assert json.loads(found[1]) == FIGURES
    assert text.count("<script") == 1
    assert "GPU &lt;b&gt;&amp;amp;" in text
    assert not re.search(r"url\(|@import|https?://|\ssrc=", text)
    assert "prefers-color-scheme: dark" in text
    assert "loopback: one process stands for all expert-parallel ranks" in text
    assert "left out" not in text.lower() or "captured ep.padded=False: exact exchange" in text
    assert re.search(r"<tr><th>EP combine</th><td>6.000</td></tr>", text)
    assert re.search(r"<tr><th>layer 3</th><td>7.500</td></tr>", text)


def test_bars_have_the_lengths_of_their_times() -> None:
    """The longest spread ends at 201 ms, which is the width of 1000 units."""
    unit = 1000 / 201
    text = render(FIGURES)
    exposed = [float(x) for x in re.findall(r'class="exposed" x="0" y="3" width="([\d.]+)"', text)]
    rest = [float(x) for x in re.findall(r'class="rest" .*? width="([\d.]+)"', text)]
    bounds = [float(x) for x in re.findall(r'class="bound" x="([\d.]+)"', text)]
    assert exposed == pytest.approx([50 * unit, 10 * unit, 10 * unit], abs=0.01)
    assert rest == pytest.approx([150 * unit, 90 * unit, 99 * unit, 88 * unit], abs=0.01)
    assert bounds == pytest.approx([90 * unit, 90 * unit], abs=0.01)  # only where both are known


# Runs inside the page: what the browser made of it.
_PROBE = """<script>
addEventListener("load", () => {
  const bars = [...document.querySelectorAll("svg.bar rect")].map(r => r.getBoundingClientRect());
  const wide = [...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll"))
    .some(e => e.getBoundingClientRect().right > innerWidth + 1);
  const pre = document.createElement("pre");
  pre.id = "probe";
  pre.textContent = JSON.stringify({bars: bars.length,
    drawn: bars.filter(b => b.width > 0 && b.height > 0).length, wide,
    background: getComputedStyle(document.body).backgroundColor,
    loaded: performance.getEntriesByType("resource").length,
    ms: [...document.querySelectorAll("data[data-key=ms]")].map(d => +d.value),
    arms: JSON.parse(document.getElementById("interlace-bench").textContent).arms.length});
  document.body.append(pre);
});
</script>"""


@pytest.mark.skipif(not CHROMIUM.exists(), reason="no /usr/bin/chromium: the page was not opened")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(render(FIGURES).replace("</body>", _PROBE + "</body>"))
    backgrounds = set()
    for scheme, size in (("1", "1200,900"), ("0", "400,900")):
        done = _browse(page, tmp_path, f"--window-size={size}", scheme)
        assert not re.search(r"CONSOLE.*(rror|refused)", done.stderr), done.stderr
        found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout)
        assert found, done.stdout[-2000:]
        seen = json.loads(found[1])
        assert seen["drawn"] == seen["bars"] == 3 + 4 + 4 + 2  # exposed, rest, spread, bound
        assert seen["ms"] == [arm["ms"] for arm in FIGURES["arms"]]
        assert (seen["loaded"], seen["wide"], seen["arms"]) == (0, False, 4)
        backgrounds.add(seen["background"])
    assert len(backgrounds) == 2


def _browse(page: Path, folder: Path, size: str, scheme: str) -> subprocess.CompletedProcess[str]:
    profile = folder / "profile"
    shutil.rmtree(profile, ignore_errors=True)
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --dump-dom "
        "--disable-background-networking --disable-component-update --disable-sync "
        "--enable-logging=stderr --hide-scrollbars --virtual-time-budget=2000"
    )
    return subprocess.run(
        [str(CHROMIUM), *flags.split(), f"--user-data-dir={profile}", size,
         f"--blink-settings=preferredColorScheme={scheme}", page.as_uri()],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
