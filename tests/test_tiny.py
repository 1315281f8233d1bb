"""The entire flow on a two-layer model, in seconds: build, trace, verify, train, read."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from interlace.train.config_read import load_config
from interlace.train.loop import train
from interlace.train.verify import verify
from interlace.train.world import init_world

FLAGS = [
    "dsv3-tiny",
    *("--model.num_layers", "2"),
    *("--model.dim", "32"),
    *("--training.seq_len", "32"),
    *("--training.local_batch_size", "4"),
    *("--training.microbatches", "2"),
    *("--training.steps", "12"),
    *("--optimizer.lr", "0.02"),
    *("--ep.transport", "loopback"),
]


def test_verify_then_train(tmp_path: Path, capsys) -> None:
    config = load_config([*FLAGS, "--metrics.folder", str(tmp_path / "run")])
    world = init_world(config)
    assert verify(config, world, ["eager", "control"], 2, tmp_path / "verify.json")
    report = json.loads((tmp_path / "verify.json").read_text())
    assert [(a["name"], a["against"], a["equal"]) for a in report["arms"]] == [
        ("eager", None, True),
        ("control", "eager", True),
    ]
    assert report["transport"] == "loopback"
    assert report["arms"][0]["losses"] == report["arms"][1]["losses"]

    train(config, world)
    printed = capsys.readouterr().out
    assert "loopback (1 process stands for 2 mirrored ranks)" in printed
    lines = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines] == list(range(1, 13))
    assert lines[0]["loss"] == report["arms"][0]["losses"][0]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert all(x["transport"] == "loopback" for x in lines)
    assert load_config([str(tmp_path / "run/config.toml")]) == config
    assert ElementTree.parse(tmp_path / "run/loss.svg").getroot().tag.endswith("svg")
