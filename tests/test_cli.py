"""The command line: help, one-line errors, dry runs, exit codes.  Nothing is trained here."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from interlace import __version__, cli
from interlace.cli import main
from interlace.train.config_read import load_config
from interlace.train.stopping import StepRefused

ROOT = Path(__file__).parent.parent
COMMANDS = ("train", "verify", "trace", "doctor")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def run(*argv: str) -> int:
    try:
        return main(list(argv))
    except SystemExit as stop:
        return int(stop.code or 0)


def test_overview_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n  {command} " in text
        assert f"\n  interlace {command} " in text  # its example
    assert run() == 0
    assert capsys.readouterr().out == text
    assert run("--version") == 0
    assert capsys.readouterr().out == f"interlace {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    text = capsys.readouterr().out
    assert f"example: interlace {command}" in text
    assert "--help" in text


def test_help_of_a_preset_lists_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "dsv3-tiny", "--help") == 0
    text = capsys.readouterr().out
    assert "--training.local_batch_size" in text
    assert "Sequences per rank and step." in text


ERRORS: list[tuple[list[str], str]] = [
    (["trian"], "unknown command 'trian'; did you mean train?"),
    (["xyz"], "commands: train, verify, trace, schedule, bench, report, doctor."),
    (["train"], "name a preset or a TOML file first; presets: dsv3-tiny"),
    (["train", "--nprc", "2", "dsv3-tiny"], "first, got --nprc"),
    (["train", "dsv3-tiny", "--nproc", "two"], "--nproc: invalid int value: 'two'"),
    (["train", "dsv3-tiny", "--nproc", "0"], "--nproc 0 must be at least 1; nearest: 1."),
    (["train", "dsv3-tiny", "--nproc", "1"], "expert_parallel_degree=2 (product 2) is larger"),
    (["train", "dsv3-tiny", "--training.seq_len", "1"], "training.seq_len=1 must be at least 2"),
    (["train", "dsv3-671b"], "64 processes, more than the 8"),
    (["verify", "dsv3-tiny", "--arms", "eagr"], "unknown arm 'eagr', legal: eager, control,"),
    (["verify", "dsv3-tiny", "--arms", ","], "--arms names no arm"),
    (["verify", "dsv3-tiny", "--steps", "0"], "--steps 0 must be at least 1; nearest: 1."),
    (["verify", "dsv3-tiny", "--json", "no/such/x.json"], "--json no/such/x.json: no file can"),
    (["trace", "dsv3-tiny"], "--out DIR is missing"),
    (["trace", "dsv3-tiny", "--out", __file__], "is a file; name a folder"),
    (["doctor", "now"], "unknown argument now"),
]


@pytest.mark.parametrize(("argv", "message"), ERRORS, ids=lambda v: str(v)[:50])
def test_errors_are_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("interlace: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_dry_run_prints_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["qwen3-tiny", "--training.steps", "7", "--metrics.folder", str(tmp_path / "run")]
    assert run("train", *flags, "--dry-run") == 0
    saved = tmp_path / "run" / "config.toml"
    assert capsys.readouterr().out == saved.read_text()
    assert load_config([str(saved)]) == load_config(flags)


def test_dry_run_of_a_planning_preset(tmp_path: Path) -> None:
    assert run("train", "dsv3-671b", "--dry-run", "--metrics.folder", str(tmp_path)) == 0


def test_a_folder_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    folder = f"{__file__}/run"
    assert run("train", "dsv3-tiny", "--dry-run", "--metrics.folder", folder) == 2
    assert f"metrics.folder={folder} cannot be written" in capsys.readouterr().err


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    module = types.ModuleType(f"interlace.train.{name}")
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, module.__name__, module)


SINGLE = ["dsv3-tiny", "--parallelism.expert_parallel_degree", "1"]


@pytest.mark.parametrize("equal", [True, False])
def test_verify_hands_over_and_exits(
    equal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def verify(config: Any, world: Any, arms: list[str], steps: int, json_path: Path) -> bool:
        seen.append((config.preset, world.size, world.backend, arms, steps, json_path))
        return equal

    fake_module(monkeypatch, "verify", verify=verify)
    path = tmp_path / "v.json"
    code = run("verify", *SINGLE, "--arms", "control,eager", "--steps", "3", "--json", str(path))
    assert code == (0 if equal else 1)
    assert seen == [("dsv3-tiny", 1, "none", ["control", "eager"], 3, path)]


def test_several_processes_are_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []

    def launch(argv: list[str], nproc: int, *, stop_seconds: float) -> int:
        launched.append((argv, nproc))
        return 5

    monkeypatch.setattr("interlace.cli.launch", launch)
    folder = ["--metrics.folder", str(tmp_path)]
    assert run("train", "dsv3-tiny", *folder) == 5
    assert run("train", "dsv3-tiny", "--nproc", "4", *folder) == 5
    assert launched == [
        (["train", "dsv3-tiny", *folder], 2),
        (["train", "dsv3-tiny", "--nproc", "4", *folder], 4),
    ]


def test_loopback_runs_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worlds: list[Any] = []
    fake_module(monkeypatch, "loop", train=lambda config, world: worlds.append(world))
    flags = ["--ep.transport", "loopback", "--metrics.folder", str(tmp_path)]
    assert run("train", "dsv3-tiny", *flags) == 0
    (world,) = worlds
    assert (world.size, world.ep_size, world.ep_rank, world.loopback) == (1, 2, 0, True)
    assert world.num_replicas == 1


def test_a_fault_of_ours_keeps_its_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ValueError from outside of the package is no message to the user."""

    def train(config: Any, world: Any) -> None:
        int("x")

    fake_module(monkeypatch, "loop", train=train)
    with pytest.raises(ValueError, match="invalid literal"):
        run("train", *SINGLE, "--metrics.folder", str(tmp_path))


@pytest.mark.parametrize("command", ["train", "verify"])
def test_torchrun_ranks_all_say_the_same(command: str) -> None:
    """No launcher of ours in sight: each rank refuses by itself, before it meets the others."""
    texts = set()
    for rank in range(3):
        environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": "3"}
        done = subprocess.run(
            [sys.executable, "-m", "interlace", command, "dsv3-tiny"],
            env=environment, cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 2
        texts.add(done.stderr)
    (text,) = texts
    assert "expert_parallel_degree=2 (product 2) does not divide the world size 3" in text
    assert text.count("\n") == 1


def test_trace_hands_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    fake_module(
        monkeypatch, "trace_command", trace_command=lambda c, out: seen.append((c.preset, out))
    )
    assert run("trace", "dsv3-671b", "--out", str(tmp_path)) == 0
    assert seen == [("dsv3-671b", tmp_path)]


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--json") == 0
    findings = {item["name"]: item for item in json.loads(capsys.readouterr().out)}
    assert findings["python"]["value"] == sys.version.split()[0]
    assert findings["grouped_mm, float32 on cpu"]["value"] == "works"
    for item in findings.values():
        assert item["ok"] or item["why"]  # a lack has its reason
    assert run("doctor") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(findings)
    assert all(line.startswith(("yes  ", "no   ")) for line in lines)


def test_notes_of_an_expected_error_are_shown(monkeypatch, capsys) -> None:
    """A save that failed beside a refused step, say."""
    refused = StepRefused("step 3: no update.")
    refused.add_note("The checkpoint of step 2 failed too: OSError: disk full")

    def refuse(rest: list[str]) -> int:
        raise refused

    monkeypatch.setitem(cli._COMMANDS, "train", (refuse, "", ""))
    assert run("train") == 1
    assert capsys.readouterr().err == (
        "interlace: error: step 3: no update.\n"
        "The checkpoint of step 2 failed too: OSError: disk full\n"
    )
