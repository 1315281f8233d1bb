"""The command: output, files, comparison, gate; the page in a real browser.

Oracle: the JSON beside the page; figures on paper for the gate and the difference.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from small_traces import A2A, GEMM, kernel, trace, write

from interlace.measure.command import report_command
from interlace.measure.timeline import MAX_BARS

CHROMIUM = Path("/usr/bin/chromium")


def report(*traces: Path, **options: Any) -> int:
    given = {
        "json_path": None, "html_path": None, "against": None, "max_exposed_ms": None,
        "comm_patterns": [], "demo": False,
    }  # fmt: skip
    return report_command(list(traces), **(given | options))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Exposed 10 us, span 40."""
    events = [kernel(GEMM, 0, 30), kernel(A2A, 20, 20, 20)]
    return write(tmp_path / "small.json", trace(events))


@pytest.fixture
def worse(tmp_path: Path) -> Path:
    """Exposed 25 us, span 55."""
    events = [kernel(GEMM, 0, 30), kernel(A2A, 20, 35, 20)]
    return write(tmp_path / "worse.json", trace(events))


def test_json_has_the_promised_shape(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert report(small, json_path=out) == 0
    (rank,) = json.loads(out.read_text())["ranks"]
    promised = (
        "rank", "span_us", "busy_us", "compute_us", "comm_us", "exposed_us", "hidden_share",
    )  # fmt: skip
    assert {key: rank[key] for key in promised} == dict(
        zip(promised, [0, 40, 40, 30, 20, 10, 0.5], strict=True)
    )
    assert set(rank["by_kind"]) == {"p2p"}


def test_the_gate(small: Path, worse: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(small, max_exposed_ms=0.01) == 0
    assert capsys.readouterr().err == ""
    assert report(small, worse, max_exposed_ms=0.024) == 1
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "exposes 0.025 ms of communication, more than --max-exposed-ms 0.024" in line


def test_the_gate_does_not_open_for_figures_that_mean_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "t.json", trace([kernel("unknown_transport", 0, 9)], world=4))
    assert report(path, max_exposed_ms=5) == 1
    assert "cannot be judged: the figures of rank 0 are unreliable" in capsys.readouterr().err


def test_the_difference(
    small: Path, worse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "d.json", tmp_path / "d.html"
    assert report(worse, against=small, json_path=out, html_path=page) == 0
    (change,) = json.loads(out.read_text())["against"]
    assert change["exposed_us"] == {"new": 25, "base": 10, "change": 15}
    assert change["span_us"]["change"] == 15
    assert change["exposed_by_kind"]["p2p"]["change"] == 15
    assert re.search(r"exposed ms +0\.025 +0\.010 +\+0\.015 +\+150\.0%", capsys.readouterr().out)
    assert "Difference, rank 0" in page.read_text()


def test_ranks_that_have_nothing_in_common_are_refused(tmp_path: Path) -> None:
    events = [kernel(GEMM, 0, 9)]
    a, b, c = (write(tmp_path / f"{n}.json", trace(events, rank=n)) for n in (0, 1, 2))
    with pytest.raises(ValueError, match=r"no rank in common: \[0, 1\] against \[2\]"):
        report(a, b, against=c)


def test_options_are_checked_first(small: Path, tmp_path: Path) -> None:
    cases: list[tuple[list[Path], dict[str, Any], str]] = [
        ([], {}, "no trace given"),
        ([tmp_path / "none.json"], {}, "does not exist"),
        ([tmp_path], {}, "is a folder"),
        ([small], {"demo": True}, "--demo brings its own trace"),
        ([small], {"json_path": tmp_path / "no" / "x.json"}, "no file can be written there"),
        ([small], {"html_path": small}, "is one of the traces"),
        ([small], {"max_exposed_ms": -1.0}, "must be at least 0"),
    ]
    for traces, options, message in cases:
        with pytest.raises(ValueError, match=message):
            report(*traces, **options)


def test_the_demo_says_that_it_is_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert report(demo=True, html_path=tmp_path / "demo.html") == 0
    assert "EP dispatch" in capsys.readouterr().out
    assert "no GPU took part" in (tmp_path / "demo.html").read_text()


# --- the page -------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """Figures by data-key for each rank, embedded JSON, bars, and whatever would be loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.figures: list[dict[str, float]] = []
        self.bars = 0
        self.loads: list[str] = []
        self.embedded = ""
        self._key, self._json = "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.loads += [v for k, v in given.items() if k in ("src", "href") and v != "data:,"]
        self.bars += tag == "rect"
        self._json = given.get("id") == "interlace-report"
        if "rank" in given.get("class", "").split():
            self.figures.append({})
        if "data-key" in given:
            self._key = given["data-key"]
        if tag == "data" and self._key:
            self.figures[-1][self._key] = float(given["value"])
            self._key = ""

    def handle_data(self, data: str) -> None:
        if self._json:
            self.embedded += data


def _check_page(page: _Page, figures: dict[str, Any]) -> None:
    assert json.loads(page.embedded) == figures
    for shown, rank in zip(page.figures, figures["ranks"], strict=True):
        assert len(shown) == 8
        assert shown == {key: rank[key] for key in shown}


def _written(tmp_path: Path, *traces: Path, **options: Any) -> tuple[Path, dict[str, Any]]:
    page, out = tmp_path / "page.html", tmp_path / "page.json"
    assert report(*traces, json_path=out, html_path=page, **options) == 0
    return page, json.loads(out.read_text())


def test_the_page_loads_nothing_and_holds_the_figures(tmp_path: Path, small: Path) -> None:
    nasty = kernel("</script><b>&lt;", 50, 5)
    path = write(tmp_path / "t.json", trace([*json.loads(small.read_text())["traceEvents"], nasty]))
    page, figures = _written(tmp_path, path)
    text = page.read_text()
    parsed = _Page(text)
    _check_page(parsed, figures)
    assert not parsed.loads
    assert not re.search(r"url\(|@import|https?://", text)
    assert "prefers-color-scheme: dark" in text


def test_many_kernels_draw_a_bounded_number_of_bars(tmp_path: Path) -> None:
    # 5000 kernels with gaps on one stream: no more bars than MAX_BARS in each of 3 classes.
    events = [kernel(GEMM, 10 * n, 5) for n in range(5000)]
    page, _ = _written(tmp_path, write(tmp_path / "t.json", trace(events)))
    assert 100 < _Page(page.read_text()).bars <= MAX_BARS


def _browse(page: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    profile = folder / "profile"
    shutil.rmtree(profile, ignore_errors=True)
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
        "--disable-background-networking --disable-component-update --disable-sync "
        "--enable-logging=stderr --hide-scrollbars --virtual-time-budget=2000"
    )
    return subprocess.run(
        [str(CHROMIUM), *flags.split(), f"--user-data-dir={profile}", *options, page.as_uri()],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip


# Runs inside the page: what the browser made of it.
_PROBE = """<script>
addEventListener("load", () => {
  const bars = [...document.querySelectorAll("svg.timeline rect")]
    .map(r => r.getBoundingClientRect());
  const wide = [...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll"))
    .some(e => e.getBoundingClientRect().right > innerWidth + 1);
  const pre = document.createElement("pre");
  pre.id = "probe";
  pre.textContent = JSON.stringify({bars: bars.length,
    drawn: bars.filter(b => b.width > 0 && b.height > 0).length, wide, width: innerWidth,
    background: getComputedStyle(document.body).backgroundColor,
    loaded: performance.getEntriesByType("resource").length,
    exposed: [...document.querySelectorAll("[data-key=exposed_us] data")].map(d => +d.value),
    ranks: JSON.parse(document.getElementById("interlace-report").textContent).ranks.length});
  document.body.append(pre);
});
</script>"""


@pytest.mark.skipif(not CHROMIUM.exists(), reason="no /usr/bin/chromium: the page was not opened")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    page, figures = _written(tmp_path, demo=True)
    _check_page(_Page(page.read_text()), figures)
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text().replace("</body>", _PROBE + "</body>"))
    seen = {}
    for scheme, size in (("1", "1200,900"), ("0", "400,900")):
        done = _browse(
            probed, tmp_path, f"--window-size={size}", "--dump-dom",
            f"--blink-settings=preferredColorScheme={scheme}",
        )  # fmt: skip
        assert not re.search(r"CONSOLE.*(rror|refused)", done.stderr), done.stderr
        found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout)
        assert found, done.stdout[-2000:]
        seen[scheme] = json.loads(found[1])
    for result in seen.values():
        assert result["bars"] > 50
        assert result["drawn"] == result["bars"] == _Page(page.read_text()).bars
        assert result["loaded"] == 0
        assert not result["wide"]
        assert result["exposed"] == [rank["exposed_us"] for rank in figures["ranks"]]
        assert result["ranks"] == len(figures["ranks"])
    assert seen["1"]["width"] == 1200
    assert seen["0"]["width"] <= 500  # some builds know no narrower window
    assert seen["0"]["background"] != seen["1"]["background"]
