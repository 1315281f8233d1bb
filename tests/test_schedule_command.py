"""``interlace schedule``: its numbers against the graph, and a picture that is one."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from small_graphs import Builder, two_chunks_backward, two_chunks_forward
from small_runs import small_config

from interlace.graph import comm_of
from interlace.schedule import NETWORK_CARD, Machine, simulate
from interlace.schedule.timeline_svg import timeline_svg
from interlace.train.schedule_command import (
    compare_orders,
    describe_schedule,
    schedule_command,
    unscheduled_graph,
)

SVG = "{http://www.w3.org/2000/svg}"


def _config(**changes):
    return small_config(
        model__num_layers=3,
        parallelism__expert_parallel_degree=2,
        training__mode="traced",
        **changes,
    )


@pytest.mark.parametrize("chunks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_command_writes_report_and_picture(
    chunks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "out"
    schedule_command(_config(overlap__chunks=chunks), out)
    report = json.loads((out / "schedule.json").read_text())
    assert report["chunks"] == chunks
    assert report["scheduler"] == "policy"
    assert report["routing_taken_as_balanced"] is True
    assert len(report["order"]) == 64
    # Two MoE layers, dispatch and combine, forward and backward, each chunk.
    rows = report["exchanges"]
    assert len(rows) == 8 * chunks
    assert {(r["layer"], r["exchange"], r["phase"], r["chunk"]) for r in rows} == {
        (f"layers.{i}.moe", kind, phase, None if chunks == 1 else c)
        for i in (1, 2)
        for kind in ("dispatch", "combine")
        for phase in ("forward", "backward")
        for c in range(chunks)
    }
    for row in rows:
        for beside, exposed in zip(row["beside_us"], row["exposed_us"], strict=True):
            assert 0 <= exposed <= row["flight_us"] + 1e-6
            assert beside <= row["may_run_beside_us"] + 1e-6
    total, exposed = report["total_us"], report["exposed_us"]
    assert exposed[1] < exposed[0]
    assert exposed[0] == pytest.approx(sum(r["exposed_us"][0] for r in rows))
    assert total[0] - total[1] == pytest.approx(exposed[0] - exposed[1])  # compute stays the same

    text = capsys.readouterr().out
    assert "layers.1.moe" in text
    assert "the window ends with" in text
    assert "taken as balanced" in text
    assert sum("forward combine" in line for line in text.splitlines()) == 2 * chunks
    root = ET.parse(out / "timeline.svg").getroot()
    headings = [t.text for t in root.iter(f"{SVG}text") if t.get("class") == "h"]
    assert [h.split(":")[0] for h in headings[1:]] == [
        f"{phase}, {order}"
        for phase in ("forward", "backward")
        for order in ("program order", "scheduled")
    ]


def test_the_op_that_ends_a_window_reads_the_result() -> None:
    b = Builder()
    two_chunks_forward(b)
    two_chunks_forward_names = {"D0": "e0", "D1": "e1", "C0": "f0", "C1": "f1"}
    report, _, _ = compare_orders(b.done("merge"), "policy", Machine())
    found = {r["node"]: r["window_ends_with"][1].split(" ")[0] for r in report["exchanges"]}
    assert found == two_chunks_forward_names


def test_the_picture_has_every_exchange_and_every_stall_of_its_layers() -> None:
    b = Builder()
    two_chunks_forward(b)
    two_chunks_backward(_renamed(b), "merge")
    gm = b.done("gx")
    before = simulate(gm.graph.nodes, Machine())
    svg = ET.fromstring(timeline_svg(before, before, "twice <the same> & more"))
    assert svg.find(f"{SVG}title").text == "twice <the same> & more"
    hints = [t.text for r in svg.iter(f"{SVG}rect") for t in r.iter(f"{SVG}title")]
    for kind in ("dispatch", "combine"):
        for phase in ("forward", "backward"):
            for chunk in (0, 1):
                start = f"{kind}, layers.0, chunk {chunk}, {phase}: "
                assert sum(h.startswith(start) for h in hints) == 2
    stalls = sum(e.exposed_us > 0 for e in before.exchanges)
    assert stalls > 0
    assert sum(h.startswith("exposed") for h in hints) == 2 * stalls
    style = svg.find(f"{SVG}style").text
    assert "prefers-color-scheme: dark" in style


def _renamed(b: Builder) -> Builder:
    """The backward uses the forward's names; fx makes them unique."""
    b.nodes = {"x": b.nodes["x"], "merge": b.nodes["merge"]}
    return b


@pytest.mark.slow
def test_a_slower_network_exposes_more_and_deep_models_are_shown_in_part() -> None:
    gm = unscheduled_graph(_config(overlap__chunks=2))
    fast = simulate(gm.graph.nodes, Machine(launch_us=0.0, collective_us=0.0))
    slow = simulate(gm.graph.nodes, Machine(launch_us=0.0, exchange_bytes_per_s=45e9))
    assert slow.flight_us == pytest.approx(fast.flight_us * 300 / 45)
    assert slow.exposed_us > fast.exposed_us
    assert NETWORK_CARD.exchange_bytes_per_s == 45e9
    report, _, _ = compare_orders(gm, "cost", Machine())
    many = report | {"exchanges": report["exchanges"] * 3}
    lines = describe_schedule(many)
    assert "... one layer of 2; schedule.json has all 48 exchanges" in lines
    assert sum(comm_of(n) is not None for n in gm.graph.nodes) == 16


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(ValueError, match="is a file; name a folder"):
        schedule_command(_config(), tmp_path / "out")


def test_off_shows_what_policy_would_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule_command(_config(overlap__scheduler="off"), tmp_path)
    assert "overlap.scheduler is off; shown is what policy would do" in capsys.readouterr().out
    assert json.loads((tmp_path / "schedule.json").read_text())["scheduler"] == "policy"


@pytest.mark.parametrize("launch_us", [1, 3, 7, 13, 29])
def test_labels_end_inside_of_the_picture(launch_us: int) -> None:
    """A character of the axis is about 7 wide; timelines of several lengths."""
    b = Builder()
    two_chunks_forward(b)
    timeline = simulate(b.done("merge").graph.nodes, Machine(launch_us=launch_us))
    svg = ET.fromstring(timeline_svg(timeline, timeline, "t"))
    width = float(svg.get("width"))
    labels = [t for t in svg.iter(f"{SVG}text") if t.get("class") == "axis"]
    assert labels
    for label in labels:
        x, long = float(label.get("x")), 7 * len(label.text)
        start, end = (x - long, x) if label.get("text-anchor") == "end" else (x, x + long)
        assert 110 - long <= start < end <= width
