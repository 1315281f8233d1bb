"""Metrics, console lines and the loss curve: values, units, strict JSON, XML coordinates."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from interlace.train.console import Console, format_step, working
from interlace.train.curve import BOTTOM, LEFT, RIGHT, TOP, loss_curve_svg
from interlace.train.metrics import (
    MetricsFile,
    ep_imbalance,
    peak_flops,
    peak_memory,
    step_record,
    to_json,
)

SVG = "{http://www.w3.org/2000/svg}"


def record(**changes: object) -> dict:
    values = {
        "step": 3,
        "loss": 4.125,
        "grad_norm": 0.75,
        "lr": 1e-3,
        "tokens": 8000,
        "tokens_seen": 24000,
        "seconds": 2.0,
        "data_seconds": 0.5,
        "num_devices": 2,
        "memory": ("memory/max_reserved(GiB)", 1.5),
        "flops_per_token": 1e9,
        "peak_flops_per_device": 4e13,
        "imbalance": 1.25,
        "graph": "eager",
    }
    return step_record(**(values | changes))


def test_record_values() -> None:
    """Hand-worked: 8000 tokens / 2 s / 2 devices, times 1 GFLOP, over 40 TFLOP/s."""
    assert record() == {
        "step": 3,
        "loss": 4.125,
        "grad_norm": 0.75,
        "memory/max_reserved(GiB)": 1.5,
        "throughput(tps)": 2000.0,
        "tflops": 2.0,
        "mfu(%)": 5.0,
        "ep_imbalance": 1.25,
        "graph": "eager",
        "lr": 1e-3,
        "tokens_seen": 24000,
        "time_metrics/end_to_end(s)": 2.0,
        "time_metrics/data_loading(s)": 0.5,
        "time_metrics/data_loading(%)": 25.0,
    }


def test_unknown_is_none() -> None:
    unknown = record(peak_flops_per_device=None)
    assert unknown["mfu(%)"] is None
    assert unknown["tflops"] == 2.0
    assert record(flops_per_token=None)["tflops"] is None
    assert record(seconds=0.0)["throughput(tps)"] is None


def test_jsonl_is_strict_and_flushed(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    path = tmp_path / "new" / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.write(record(loss=math.nan, grad_norm=math.inf))
        (line,) = path.read_text().splitlines()  # there before the file is closed
        assert json.loads(line, parse_constant=refuse)["loss"] == "nan"
        assert json.loads(line)["grad_norm"] == "inf"
        assert json.loads(line)["mfu(%)"] == 5.0
    with MetricsFile(path) as file:
        file.write(record(step=4))
    assert [json.loads(text)["step"] for text in path.read_text().splitlines()] == [3, 4]
    assert to_json({"a": -math.inf}) == '{"a": "-inf"}'


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("AMD Instinct MI300X", None),
        ("cpu", None),
    ],
)
def test_peak_flops(name: str, expected: float | None) -> None:
    assert peak_flops(name) == expected


def test_cpu_memory_has_its_own_key() -> None:
    key, gib = peak_memory(torch.device("cpu"))
    assert key == "memory/max_rss(GiB)"
    assert 0.05 < gib < 64  # torch alone takes more than 50 MiB


def test_imbalance_is_that_of_the_worst_layer() -> None:
    assert ep_imbalance(torch.tensor([[2, 2, 2, 2], [5, 1, 1, 1], [0, 0, 0, 0]])) == 2.5
    assert ep_imbalance(torch.tensor([[8, 0]])) == 2.0
    assert ep_imbalance(torch.zeros(2, 4, dtype=torch.int64)) is None
    assert ep_imbalance(torch.zeros(0, 4, dtype=torch.int64)) is None


def test_log_line() -> None:
    assert format_step(record(tokens=8_000_000)) == (
        "step 3  loss 4.1250  grad_norm 0.7500  memory 1.50GiB  tps 2,000,000  tflops 2000.00  "
        "mfu 5000.00%  ep_imbalance 1.25  graph=eager"
    )
    bare = record(
        loss=math.nan,
        flops_per_token=None,
        imbalance=None,
        graph=None,
        memory=("memory/max_rss(GiB)", 0.5),
    )
    assert format_step(bare) == (
        "step 3  loss nan  grad_norm 0.7500  memory 0.50GiB  tps 2,000  tflops N/A  mfu N/A"
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_without_terminal() -> None:
    stream = io.StringIO()
    console = Console(stream=stream)
    with console.steps(2):
        console.step(record())
        console.step(record(step=4), log=False)
        with console.working("capturing the step"):
            assert stream.getvalue().endswith("capturing the step ...\n")
    lines = stream.getvalue().splitlines()
    assert lines[:2] == [format_step(record()), "capturing the step ..."]
    assert re.fullmatch(r"capturing the step: done in \d+\.\d s", lines[2])
    assert len(lines) == 3


def test_failed_work_says_so() -> None:
    stream = io.StringIO()
    with pytest.raises(KeyError), working("tracing", stream=stream):
        raise KeyError
    assert re.fullmatch(r"tracing \.\.\.\ntracing: failed after \d+\.\d s\n", stream.getvalue())


def test_other_ranks_are_silent() -> None:
    for stream in (io.StringIO(), Terminal()):
        console = Console(rank=1, stream=stream)
        with console.steps(1), console.working("tracing"):
            console.step(record())
        assert stream.getvalue() == ""


def test_terminal_shows_progress_and_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    console = Console(stream=stream)
    with console.working("reading [data]"):
        pass
    with console.steps(2):
        console.step(record())
        with console.working("capturing"):
            pass
        console.step(record(step=4))
    text = stream.getvalue()
    for part in (format_step(record()), "reading [data]: done in", "capturing ...", "2/2"):
        assert part in text


# --- the loss curve


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def lines_of(root: ElementTree.Element, kind: str) -> list[list[tuple[float, float]]]:
    found = [e for e in root.iter(f"{SVG}polyline") if e.get("class") == kind]
    return [
        [tuple(float(c) for c in pair.split(",")) for pair in e.get("points").split()]
        for e in found
    ]


def values_of(root: ElementTree.Element) -> list[str]:
    return [e.text for e in root.iter(f"{SVG}text") if e.get("class") == "value"]


def test_coordinates_of_a_short_curve() -> None:
    """Hand-worked: ticks 1..5, so that 5 is at the top, 1 at the bottom, 3 in the middle."""
    root = parse(loss_curve_svg([1, 2, 3], [5.0, 3.0, 1.0], "run"))
    middle = (LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2
    assert lines_of(root, "smooth") == [[(LEFT, TOP), middle, (RIGHT, BOTTOM)]]
    assert lines_of(root, "raw") == []
    assert values_of(root) == ["5", "1"]
    ticks = [e.text for e in root.iter(f"{SVG}text") if e.get("class") == "tick"]
    assert ticks == ["1", "2", "3", "4", "5", "1", "2", "3", "step"]


def test_smoothed_line_is_a_centred_mean() -> None:
    """Alternating 2 and 4 over 60 steps, window of three: 10/3 at a 2, 8/3 at a 4, ends kept."""
    root = parse(loss_curve_svg(range(60), [2.0, 4.0] * 30, "run"))
    (raw,), (smooth,) = lines_of(root, "raw"), lines_of(root, "smooth")
    assert len(raw) == len(smooth) == 60
    low, high = raw[0][1], raw[1][1]  # where 2 and 4 are drawn
    assert smooth[0] == raw[0]
    assert smooth[10][1] == pytest.approx(low + (high - low) * 2 / 3, abs=0.06)
    assert smooth[11][1] == pytest.approx(low + (high - low) / 3, abs=0.06)


def test_gap_and_mark_where_the_loss_is_not_finite() -> None:
    losses = [3.0] * 5 + [math.nan, math.inf] + [2.0] * 8
    root = parse(loss_curve_svg(range(15), losses, "run"))
    assert [len(line) for line in lines_of(root, "raw")] == [5, 8]
    assert [len(line) for line in lines_of(root, "smooth")] == [5, 8]
    marks = [e for e in root.iter(f"{SVG}path") if e.get("class") == "bad"]
    assert [m.find(f"{SVG}title").text for m in marks] == ["step 5: loss nan", "step 6: loss inf"]
    x = LEFT + (RIGHT - LEFT) * 5 / 14
    assert marks[0].get("d").startswith(f"M{x - 4:.1f} ")
    assert values_of(root) == ["3", "2"]


@pytest.mark.parametrize(
    ("losses", "values"),
    [([2.5], ["2.5"]), ([0.0], ["0"]), ([math.nan], []), ([2.0, 2.0], ["2", "2"])],
)
def test_degenerate_curves(losses: list[float], values: list[str]) -> None:
    root = parse(loss_curve_svg(range(len(losses)), losses, "run"))
    assert values_of(root) == values
    for dot in root.iter(f"{SVG}circle"):
        assert LEFT <= float(dot.get("cx")) <= RIGHT
        assert TOP <= float(dot.get("cy")) <= BOTTOM


def test_long_curve_is_small_and_keeps_its_spike() -> None:
    losses = [1.0 + 1 / (i + 1) for i in range(20_000)]
    losses[12_345] = 9.0
    svg = loss_curve_svg(range(20_000), losses, "run")
    assert len(svg) < 60_000
    (raw,) = lines_of(parse(svg), "raw")
    x = LEFT + (RIGHT - LEFT) * 12_345 / 19_999
    assert min(raw, key=lambda p: p[1])[0] == pytest.approx(x, abs=0.06)


def test_title_is_escaped() -> None:
    title = 'a < b & "c" </text>\x00'
    root = parse(loss_curve_svg([1], [1.0], title))
    assert root.find(f"{SVG}title").text == title.replace("\x00", " ")


def test_bad_curves() -> None:
    with pytest.raises(ValueError, match="got 1 steps and 0 losses"):
        loss_curve_svg([1], [], "run")
    with pytest.raises(ValueError, match="at least one"):
        loss_curve_svg([], [], "run")
