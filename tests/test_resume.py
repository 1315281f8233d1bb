"""The same command again: after SIGTERM, after SIGKILL at any point, after the last step.

Oracle: the uninterrupted run; every tensor of the last checkpoint, and every loss, bitwise.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from small_runs import documents_of_three, small_config, small_world, unequal
from torch.distributed import checkpoint as dcp

from interlace.train import checkpoint_files as files
from interlace.train.loop import train

ROOT = Path(__file__).parents[1]


def steps_of(folder: Path) -> list[dict]:
    """Complete lines of the metrics file."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def last_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    path = files.complete(folder / "checkpoints")[-1][1]
    known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in known.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return tensors


def config_for(folder: Path, **changes):
    plain = {
        "training__steps": 6,
        "metrics__folder": str(folder),
        "metrics__log_freq": 100,
        "checkpoint__enabled": True,
        "checkpoint__interval": 2,
    }
    return small_config(**(plain | changes))


# --- in this process ------------------------------------------------------------------------------


def test_the_same_command_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stopped after 4 of 6 steps with a metrics file that runs ahead; history and curve go on."""
    world = small_world()
    train(config_for(tmp_path / "whole"), world)
    folder = tmp_path / "halves"
    train(config_for(folder), world)
    # As if killed in step 6: the last checkpoint is older than the metrics, one line is cut short.
    newest = files.complete(folder / "checkpoints")[-1][1]
    os.rename(newest, newest.with_name(".partial-step-00000006"))
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 7, "lo')
    capsys.readouterr()
    train(config_for(folder), world)
    assert "step-00000004 at step 4" in capsys.readouterr().out
    for a, b in zip(steps_of(tmp_path / "whole"), steps_of(folder), strict=True):
        for key in ("step", "loss", "grad_norm", "lr", "tokens_seen", "data/first_row"):
            assert a[key] == b[key]
        assert a["expert_load/imbalance"] == b["expert_load/imbalance"]
    assert unequal(last_checkpoint(tmp_path / "whole"), last_checkpoint(folder)) == []
    assert (folder / "loss.svg").read_text() == (tmp_path / "whole" / "loss.svg").read_text()
    train(config_for(folder), world)
    assert "nothing to do: step 6 of 6 is done" in capsys.readouterr().out


def test_without_checkpoints_a_run_starts_anew(tmp_path: Path) -> None:
    config = config_for(tmp_path, training__steps=2, checkpoint__enabled=False)
    for _ in range(2):
        train(config, small_world())
    assert [r["step"] for r in steps_of(tmp_path)] == [1, 2]
    assert not (tmp_path / "checkpoints").exists()


def test_sigterm_saves_and_returns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_for(tmp_path, training__steps=100_000, checkpoint__interval=100_000)

    def stop_after_three_steps() -> None:
        deadline = time.monotonic() + 60
        while len(steps_of(tmp_path)) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=stop_after_three_steps)
    thread.start()
    train(config, small_world())
    thread.join()
    done = steps_of(tmp_path)[-1]["step"]
    assert files.complete(tmp_path / "checkpoints")[-1][0] == done >= 3
    assert f"stopped by SIGTERM after step {done}; the same command" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(("at_end", "steps"), [("stop", 8), ("wrap", 15)])
def test_the_end_of_the_data(tmp_path: Path, at_end: str, steps: int) -> None:
    """100 rows of 4 documents, 12 a step: eight whole batches, or a second epoch."""
    path = documents_of_three(tmp_path / "ids.npy")
    config = config_for(
        tmp_path, training__steps=15, data__source=str(path), data__separator=0,
        data__at_end=at_end, checkpoint__interval=100,
    )  # fmt: skip
    train(config, small_world())
    assert len(steps_of(tmp_path)) == steps
    assert files.complete(tmp_path / "checkpoints")[-1][0] == steps


# --- as a user does it ----------------------------------------------------------------------------

WORKER = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from interlace.train.launch import in_worker, run_workers
log, *args = sys.argv[1:]
if not in_worker():
    sys.exit(run_workers([sys.executable, __file__, log, *args], 2, 60))
import torch
torch.set_num_threads(1)
from dataclasses import replace
from interlace.train import engine
opened = engine.open_training_data
def logging(config, world):
    data = opened(config, world)
    file = open(f"{{log}}.{{world.rank}}", "a", buffering=1)
    file.write("start\\n")
    def read_row(place):
        file.write(f"{{place}}\\n")
        return data.read_row(place)
    return replace(data, read_row=read_row)
engine.open_training_data = logging
from interlace.cli import main
sys.exit(main(args))
"""

TINY = {
    "model.dim": 16, "model.num_heads": 2, "model.kv_lora_rank": 8, "model.v_head_dim": 8,
    "model.dense_hidden_dim": 16, "model.expert_hidden_dim": 8, "model.num_layers": 2,
    "training.seq_len": 12, "training.local_batch_size": 2, "training.mode": "eager",
    "data.max_documents": 4, "data.separator": 0, "metrics.log_freq": 1000,
    "checkpoint.interval": 7, "checkpoint.keep_latest_k": 2,
}  # fmt: skip


def start(tmp_path: Path, folder: str, steps: int, mode: str = "async") -> subprocess.Popen[str]:
    script, source = tmp_path / "run.py", tmp_path / "ids.npy"
    script.write_text(WORKER)
    if not source.exists():
        documents_of_three(source)
    settings = TINY | {
        "training.steps": steps,
        "data.source": source,
        "metrics.folder": tmp_path / folder,
        "checkpoint.async_mode": mode,
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, str(script), str(tmp_path / f"{folder}.ids"), "train", "dsv3-tiny"]
    return subprocess.Popen(
        [*command, *flags, "--checkpoint.enabled"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def succeeds(run: subprocess.Popen[str]) -> None:
    _, err = run.communicate(timeout=200)
    assert run.returncode == 0, err


def wait_for(condition, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happens"
        time.sleep(0.002)


def kill_at(run: subprocess.Popen[str], folder: Path, point: int, *, in_save: bool) -> bool:
    """SIGKILL after ``point`` steps, if wished inside of the next save; whether it was inside."""
    wait_for(lambda: len(steps_of(folder)) >= point or run.poll() is not None)
    if in_save:
        partial = folder / "checkpoints"
        wait_for(lambda: list(partial.glob(".partial-*")) or run.poll() is not None)
    assert run.poll() is None, run.stderr.read()
    run.kill()  # the kernel ends the workers with it
    run.communicate()
    time.sleep(0.2)
    return bool(list((folder / "checkpoints").glob(".partial-*")))


def samples(tmp_path: Path, folder: str, rows: int) -> list[int]:
    """Places of all rows that are part of the final weights.

    A start counts up to the step at which the next one went on; what lies beyond was lost with it.
    """
    found = []
    for rank in range(2):
        text = (tmp_path / f"{folder}.ids.{rank}").read_text()
        starts = [[int(x) for x in part.split()] for part in text.split("start\n")[1:]]
        starts = [places for places in starts if places]
        bounds = [*[places[0] // rows * rows for places in starts][1:], sys.maxsize]
        for places, bound in zip(starts, bounds, strict=True):
            found += [place for place in places if place < bound]
    return sorted(found)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_ten_times_in_200_steps(tmp_path: Path) -> None:
    """SIGKILL of everything at random points, every second one inside of a save."""
    steps, rows = 200, 4
    succeeds(start(tmp_path, "whole", steps))
    folder, rng = tmp_path / "killed", random.Random(11)
    points = sorted(rng.sample(range(8, steps - 2), 10))
    in_save = [
        kill_at(start(tmp_path, "killed", steps), folder, point, in_save=bool(index % 2))
        for index, point in enumerate(points)
    ]
    assert sum(in_save) >= 3, "the kills missed the saves"
    succeeds(start(tmp_path, "killed", steps))
    assert unequal(last_checkpoint(tmp_path / "whole"), last_checkpoint(folder)) == []
    expected = [(r["step"], r["loss"]) for r in steps_of(tmp_path / "whole")]
    assert [(r["step"], r["loss"]) for r in steps_of(folder)] == expected
    assert len(expected) == steps
    assert samples(tmp_path, "killed", rows) == list(range(steps * rows))


@pytest.mark.slow
def test_sigterm_to_the_launcher(tmp_path: Path) -> None:
    """Two ranks save at the same step and the exit code is 0; then the run goes on to its end."""
    run = start(tmp_path, "stopped", 100_000, mode="disabled")
    wait_for(lambda: len(steps_of(tmp_path / "stopped")) >= 3)
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (0, "stopped by SIGTERM: every rank has saved and ended\n")
    done = steps_of(tmp_path / "stopped")[-1]["step"]
    assert files.complete(tmp_path / "stopped" / "checkpoints")[-1][0] == done
    succeeds(start(tmp_path, "stopped", done + 3))
    assert [r["step"] for r in steps_of(tmp_path / "stopped")] == list(range(1, done + 4))
    assert samples(tmp_path, "stopped", 4) == list(range((done + 3) * 4))
