"""Metrics for services, with small stand-ins for their packages; loads of experts by layer."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import small_config, small_world

from interlace.train.config_check import check
from interlace.train.loop import train
from interlace.train.metrics import expert_load, read_history
from interlace.train.sinks import flatten


def stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A module of that name that notes its calls."""
    calls: list[tuple[Any, ...]] = []
    module = types.ModuleType(name)
    module.init = lambda **k: calls.append(("init", k))
    module.log = lambda values, step: calls.append(("log", step, values))
    module.finish = lambda: calls.append(("finish",))
    monkeypatch.setitem(sys.modules, name, module)
    pretend_installed(name, monkeypatch)
    return calls


def pretend_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def find_spec(package: str, *rest: Any) -> Any:
        return object() if package == name else real(package, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def run(folder: Path, **changes: Any) -> None:
    plain = {"training__steps": 3, "metrics__folder": str(folder), "metrics__log_freq": 100}
    config = small_config(**(plain | changes))
    check(config, 1)
    train(config, small_world())


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_every_step_reaches_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    calls = stand_in(name, monkeypatch)
    changes = {f"metrics__enable_{name}": True, "checkpoint__enabled": True}
    run(tmp_path, **changes)
    kinds = [call[0] for call in calls]
    assert kinds == ["init", "log", "log", "log", "finish"]
    arguments = calls[0][1]
    assert arguments["project"] == "interlace"
    assert arguments["config"]["training"]["steps"] == 3
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for (_, step, values), record in zip(calls[1:4], records, strict=True):
        assert step == record["step"]
        assert values["loss"] == record["loss"]
        assert values["expert_load/imbalance/0"] == record["expert_load/imbalance"][0]
    run(tmp_path, **(changes | {"training__steps": 4}))  # resumed: the same run there
    again = calls[5][1]
    assert (again["name"], again["resume"]) == (arguments["name"], "allow")
    assert again.get("id") == arguments.get("id")
    assert [call[1] for call in calls[6:-1]] == [4]


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[Any, ...]] = []

    class SummaryWriter:
        def __init__(self, log_dir: str, purge_step: int | None) -> None:
            written.append((log_dir, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            if name == "loss":
                written.append((step, value))

        def close(self) -> None:
            written.append(("closed",))

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    pretend_installed("tensorboard", monkeypatch)
    run(tmp_path, metrics__enable_tensorboard=True, checkpoint__enabled=True)
    run(tmp_path, metrics__enable_tensorboard=True, checkpoint__enabled=True, training__steps=4)
    folder = str(tmp_path / "tensorboard")
    assert [w[0] for w in written] == [folder, 1, 2, 3, "closed", folder, 4, "closed"]
    assert [w[1] for w in written if w[0] == folder] == [None, 4]


def test_sinks_are_closed_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in("wandb", monkeypatch)

    def broken(values: Any, step: int) -> None:
        raise ConnectionError("the service is gone")

    sys.modules["wandb"].log = broken
    with pytest.raises(ConnectionError, match="the service is gone"):
        run(tmp_path, metrics__enable_wandb=True)
    assert [call[0] for call in calls] == ["init", "finish"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_told_before_the_run(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    config = small_config(**{f"metrics__enable_{name}": True})
    with pytest.raises(ValueError, match=rf"metrics\.enable_{name}=true needs the package {name}"):
        check(config, 1)
    check(small_config(), 1)


def test_flat_numbers() -> None:
    record = {"step": 3, "loss": 2.0, "graph": "eager", "x": [1, 3], "mfu": None, "on": True}
    assert flatten(record | {"bad": math.nan}) == {"step": 3, "loss": 2, "x/0": 1, "x/1": 3}


def test_load_by_layer() -> None:
    """By hand: 8 tokens over 4 experts; a layer without tokens has no busiest expert."""
    counts_LE = torch.tensor([[2, 2, 2, 2], [5, 3, 0, 0], [0, 0, 0, 0]])
    assert expert_load(counts_LE) == {
        "expert_load/imbalance": [1.0, 2.5, 0.0],
        "expert_load/dead": [0, 2, 4],
    }


def test_history_is_cut_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": "nan"}\n{"step": 2, "loss": 1.5}\n{"step": 3}\n{"ste')
    assert read_history(path, 2) == [{"step": 1, "loss": "nan"}, {"step": 2, "loss": 1.5}]
    assert path.read_text() == '{"step": 1, "loss": "nan"}\n{"step": 2, "loss": 1.5}\n'
    assert read_history(path, 0) == []
    assert path.read_text() == ""
    assert read_history(tmp_path / "none", 5) == []
