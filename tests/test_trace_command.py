"""``interlace trace``: the graph that a run with the same settings would have.

Oracle: the order and the passes of the arm that ``arm_of`` names.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_runs import small_config

from interlace.train.arms import ARMS
from interlace.train.trace_command import describe, trace_command, trace_on_meta

CHUNKED = {"overlap__chunks": 2, "overlap__chunk_root": "layers.*"}


@pytest.mark.parametrize(
    ("arm", "changes"),
    [
        ("scheduled", {}),
        ("control", {"overlap__scheduler": "off"}),
        pytest.param("chunk-scheduled", CHUNKED, marks=pytest.mark.slow),
        pytest.param(
            "chunk-graph", {**CHUNKED, "overlap__scheduler": "off"}, marks=pytest.mark.slow
        ),
    ],
)
def test_what_would_run_is_what_is_shown(
    arm: str, changes: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(parallelism__expert_parallel_degree=2, training__mode="traced", **changes)
    trace_command(config, tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    expected = trace_on_meta(config, ARMS[arm])
    assert summary["arm"] == arm
    assert [p["name"] for p in summary["passes"]] == [r.name for r in expected.reports]
    lines = (tmp_path / "graph.txt").read_text().splitlines()
    assert [line.split(" ")[0] for line in lines] == [n.name for n in expected.gm.graph.nodes]
    assert capsys.readouterr().out.count(f"\n{arm}: {len(lines):,} nodes in ") == 1


def test_eager_has_no_graph_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace_command(small_config(training__mode="eager"), tmp_path)
    assert "training.mode is eager, which has no graph; shown is" in capsys.readouterr().out
    assert json.loads((tmp_path / "summary.json").read_text())["arm"] == "scheduled"


def test_notes_of_passes_are_printed(tmp_path: Path) -> None:
    trace_command(small_config(training__mode="traced"), tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert not [line for line in describe(summary) if line.startswith("note:")]
    summary["passes"][0]["notes"] = ["mean sees the tokens of its chunk only"]
    assert describe(summary)[-1] == "note: mean sees the tokens of its chunk only"
