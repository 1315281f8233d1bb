"""One rank fails, all end within seconds, with the first error and its code (field report I5).

Runs of two gloo processes with a fault put in on purpose on one of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from interlace.train import watch

ROOT = Path(__file__).parents[1]

# What to break: a function of a module that the loop calls, on the rank and at the call asked for.
SCRIPT = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from interlace.train.launch import in_worker, run_workers
target, rank, call, how, *args = sys.argv[1:]
if not in_worker():
    sys.exit(run_workers([sys.executable, __file__, target, rank, call, how, *args], 2))
import importlib, signal
import torch
torch.set_num_threads(1)
path, name = target.split(":")
owner = importlib.import_module("interlace.train." + path.split(".")[0])
for part in path.split(".")[1:]:
    owner = getattr(owner, part)
real, left = getattr(owner, name), int(call)
def broken(*a, **k):
    global left
    left -= 1
    if left == 0 and os.environ["RANK"] == rank:
        if how == "nan":
            return real(*a, **k) * float("nan")
        if how == "hang":
            time.sleep(300)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError("broken on purpose")
    return real(*a, **k)
setattr(owner, name, broken)
from interlace.cli import main
sys.exit(main(args))
"""

SETTINGS = {
    "model.dim": 16, "model.num_heads": 2, "model.kv_lora_rank": 8, "model.v_head_dim": 8,
    "model.dense_hidden_dim": 16, "model.expert_hidden_dim": 8, "model.num_layers": 2,
    "training.steps": 1000, "training.seq_len": 12, "training.local_batch_size": 2,
    "training.mode": "eager", "data.source": "random", "checkpoint.interval": 2,
    "evaluation.interval": 3, "evaluation.batches": 1, "metrics.log_freq": 1000,
}  # fmt: skip


def run(tmp_path: Path, target: str, rank: int, call: int, how: str, **more: object):
    """Code, standard error, and seconds that the run took after it was broken."""
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    settings = SETTINGS | {"metrics.folder": tmp_path / "run"} | more
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, str(script), target, str(rank), str(call), how]
    command += ["train", "dsv3-tiny", *flags, "--checkpoint.enabled"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    metrics = tmp_path / "run" / "metrics.jsonl"
    seconds = time.time() - metrics.stat().st_mtime
    return done.returncode, done.stderr, seconds


FAULTS = {
    "data": ("data:_stack", 12),
    "forward": ("engine:cross_entropy_sum", 3),
    "evaluation": ("evaluate.Evaluation:__init__", 1),
    "checkpoint": ("checkpoint.Checkpointer:_write", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", FAULTS)
def test_an_exception_on_one_rank_ends_all(tmp_path: Path, where: str, rank: int) -> None:
    target, call = FAULTS[where]
    code, err, seconds = run(tmp_path, target, rank, call, "raise")
    assert code == 1
    assert err.startswith(f"[rank {rank}] Traceback (most recent call last):")
    assert f"[rank {rank}] OSError: broken on purpose" in err
    assert f"[rank {rank}] at: " in err
    assert seconds < 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "mode"),
    [
        ("checkpoint_files:begin", "disabled"),  # the folder
        ("checkpoint_files:publish", "async"),  # in the background thread
        ("report.Report:write", "disabled"),  # logging
    ],
)
def test_an_exception_where_only_the_main_rank_works(
    tmp_path: Path, target: str, mode: str
) -> None:
    code, err, seconds = run(tmp_path, target, 0, 2, "raise", **{"checkpoint.async_mode": mode})
    assert code == 1
    assert err.startswith("[rank 0] Traceback")
    assert "[rank 0] OSError: broken on purpose" in err
    assert seconds < 8


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_all(tmp_path: Path, rank: int) -> None:
    code, err, seconds = run(tmp_path, "engine:cross_entropy_sum", rank, 3, "kill")
    assert code == 128 + 9
    assert err.startswith(f"[rank {rank}] was killed by SIGKILL; the other ranks were ended")
    assert seconds < 8


@pytest.mark.slow
def test_a_bad_step_is_one_line_and_not_a_settings_error(tmp_path: Path) -> None:
    code, err, _ = run(tmp_path, "engine:cross_entropy_sum", 1, 3, "nan")
    assert code == 1
    assert err.startswith(
        "interlace: error: step 3: the gradient norm is nan (loss nan): on rank 1 "
    )
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_timeout_tells_what_each_rank_waits_for(tmp_path: Path) -> None:
    """Rank 1 hangs while it reads data of step 3; rank 0 waits for it and gives up."""
    code, err, _ = run(tmp_path, "data:_stack", 1, 12, "hang", **{"comm.timeout_seconds": 4})
    assert code == 1
    assert err.startswith("[rank 0] Traceback")
    assert "[rank 0] at: the count of tokens over all ranks, step 3" in err
    assert "[rank 1] was at: reading data, step 3, for 4." in err or "for 5." in err
    assert "[rank 1] Timeout (" in err
    assert "in broken" in err  # the innermost frame of rank 1's stack


def test_the_status_of_a_process() -> None:
    with tempfile.TemporaryFile() as file:
        assert watch.read_status(b"") == ("", "")
        before = os.environ.get(watch.STATUS_FD)
        os.environ[watch.STATUS_FD] = str(file.fileno())
        try:
            watch.start(0.3)
            watch.enter("reading data", 4)
            time.sleep(0.5)
            file.seek(0)
            where, stacks = watch.read_status(file.read())
            assert where.startswith("reading data, step 5, for 0.")
            assert "test_the_status_of_a_process" in stacks
            assert watch.now() == "reading data, step 5"
            watch.enter("an evaluation")
            file.seek(0)
            assert watch.read_status(file.read())[0].startswith("an evaluation, for 0.0")
        finally:
            watch.stop()
            del os.environ[watch.STATUS_FD]
            if before is not None:
                os.environ[watch.STATUS_FD] = before
    assert watch.now() == ""
