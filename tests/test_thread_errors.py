"""An error in an expert's forward, in the backward, or on a thread of ours: the first one is shown
and nothing is left behind, no process and no thread (field report I6).
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_runs import small_config, small_world
from test_failures import ROOT, SETTINGS

from interlace.train import checkpoint_files as files
from interlace.train import engine as engines
from interlace.train import sinks
from interlace.train.loop import train

# --- two processes: forward and backward


# Breaks one call on one rank, writes down when, and what threads live when the process ends.
SCRIPT = f"""
import os, sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from interlace.train.launch import in_worker, run_workers
folder, where, rank, call, *args = sys.argv[1:]
if not in_worker():
    sys.exit(run_workers([sys.executable, *sys.argv], 2))
import torch
from torch.nn import functional as F
from interlace.model import moe
torch.set_num_threads(1)
left = int(call)

def is_time():
    global left
    left -= 1
    return left == 0 and os.environ["RANK"] == rank

def broken(grad=None):
    with open(folder + "/broke", "w") as file:
        file.write(str(time.time()))
    raise OSError("broken on purpose")

class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        broken()

forward, product = moe.Experts.forward, F.grouped_mm

def experts(self, *args):
    out = forward(self, *args)
    if where in ("expert", "hook", "function") and is_time():
        if where == "expert":
            broken()
        out = Raises.apply(out) if where == "function" else out
        if where == "hook":
            out.register_hook(broken)
    return out

def grouped_mm(x, w, **kwargs):
    if where == ("forward operator" if w.dim() == 3 else "backward operator") and is_time():
        broken()
    return product(x, w, **kwargs)

moe.Experts.forward, F.grouped_mm = experts, grouped_mm
leave = os._exit

def end(code):
    others = [t for t in threading.enumerate() if t is not threading.main_thread()]
    with open(folder + "/threads." + os.environ["RANK"], "w") as file:
        file.write(str([t.name for t in others if not t.daemon]))
    leave(code)

os._exit = end
from interlace.cli import main
sys.exit(main(args))
"""

BREAKS = [  # where, mode, rank, which call: at the third step, but for the trace
    ("expert", "eager", 0, 3),
    ("expert", "eager", 1, 3),
    ("hook", "eager", 0, 3),
    ("hook", "eager", 1, 3),
    ("function", "eager", 1, 3),
    ("expert", "traced", 1, 1),  # while it is traced
    ("forward operator", "traced", 0, 9),
    ("backward operator", "traced", 0, 5),
    ("backward operator", "traced", 1, 5),
]


def _processes_of(folder: Path) -> list[str]:
    """Command lines of processes that were started for a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        found += [line] if str(folder) in line else []
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("where", "mode", "rank", "call"), BREAKS)
def test_an_error_in_forward_or_backward_ends_all(
    tmp_path: Path, where: str, mode: str, rank: int, call: int
) -> None:
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    settings = SETTINGS | {"metrics.folder": tmp_path / "run", "training.mode": mode}
    settings |= {"parallelism.expert_parallel_degree": 2}
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, str(script), str(tmp_path), where, str(rank), str(call)]
    done = subprocess.run(
        [*command, "train", "dsv3-tiny", *flags], capture_output=True, text=True, timeout=90
    )
    seconds = time.time() - float((tmp_path / "broke").read_text())
    assert done.returncode == 1
    assert done.stderr.startswith(f"[rank {rank}] Traceback (most recent call last):"), done.stderr
    assert f"[rank {rank}] OSError: broken on purpose" in done.stderr
    assert seconds < 8
    assert (tmp_path / f"threads.{rank}").read_text() == "[]"
    assert _processes_of(tmp_path) == []


# --- one process: the threads of a run


class StepBroke(Exception):
    """What the main thread raises."""


@pytest.fixture
def others() -> Iterator[Callable[[], list[str]]]:
    """Names of threads that were not there before the test, daemons too."""
    before = set(threading.enumerate())
    yield lambda: [t.name for t in threading.enumerate() if t not in before]
    assert [t.name for t in threading.enumerate() if t not in before] == []


def _run(folder: Path, **changes: Any) -> None:
    plain = {
        "training__steps": 6, "metrics__folder": str(folder), "metrics__log_freq": 100,
        "checkpoint__enabled": True, "checkpoint__interval": 2, "checkpoint__async_mode": "async",
    }  # fmt: skip
    train(small_config(**(plain | changes)), small_world())


def _break_step(monkeypatch: pytest.MonkeyPatch, number: int, meanwhile: Callable[[], Any]) -> None:
    """From step ``number`` on (counted from 1) the main thread raises, after ``meanwhile``."""
    real = engines.cross_entropy_sum
    left = iter(range(number - 1))

    def broken(*args: Any) -> Any:
        if next(left, None) is None:
            meanwhile()
            raise StepBroke
        return real(*args)

    monkeypatch.setattr(engines, "cross_entropy_sum", broken)


def test_what_the_writer_raises_the_main_thread_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: Callable[[], list[str]]
) -> None:
    """Its own error, not one made of it, at the next step and not at the end of the run."""
    first = OSError("disk full")
    seen: list[str] = []

    def broken(*_: Any) -> None:
        seen.append(threading.current_thread().name)
        raise first

    monkeypatch.setattr(files, "publish", broken)
    with pytest.raises(OSError, match="disk full") as caught:
        _run(tmp_path, training__steps=1000, checkpoint__interval=20)
    assert caught.value is first
    assert seen == ["checkpoint"]
    assert others() == []


def test_a_save_under_way_ends_before_an_error_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: Callable[[], list[str]]
) -> None:
    real, slow = files.publish, threading.Event()

    def publish(*args: Any) -> Any:
        slow.wait(10)
        time.sleep(0.2)
        return real(*args)

    monkeypatch.setattr(files, "publish", publish)
    _break_step(monkeypatch, 3, slow.set)
    with pytest.raises(StepBroke):
        _run(tmp_path)
    assert others() == []
    assert [step for step, _ in files.complete(tmp_path / "checkpoints")] == [2]


def test_the_error_of_a_save_is_told_beside_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: Callable[[], list[str]]
) -> None:
    slow = threading.Event()

    def publish(*_: Any) -> None:
        slow.wait(10)
        time.sleep(0.2)
        raise OSError("disk full")

    monkeypatch.setattr(files, "publish", publish)
    _break_step(monkeypatch, 3, slow.set)
    with pytest.raises(StepBroke) as caught:
        _run(tmp_path)
    assert caught.value.__notes__ == ["The checkpoint of step 2 failed too: OSError: disk full"]
    assert others() == []


class _BrokenSink:
    def __init__(self, *_: Any) -> None:
        pass

    def write(self, *_: Any) -> None:
        pass

    def close(self) -> None:
        raise ConnectionError("no answer")


def test_a_sink_that_fails_to_close_hides_no_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    others: Callable[[], list[str]],
) -> None:
    """A run that is well raises it; one that broke raises what broke it, and prints no other."""
    monkeypatch.setattr(sinks, "TensorBoard", _BrokenSink)
    with pytest.raises(ConnectionError, match="no answer"):
        _run(tmp_path / "well", metrics__enable_tensorboard=True, training__steps=1)
    assert others() == []
    _break_step(monkeypatch, 1, lambda: None)
    capfd.readouterr()
    with pytest.raises(StepBroke) as caught:
        _run(tmp_path / "broken", metrics__enable_tensorboard=True)
    assert "Exception in thread" not in capfd.readouterr().err
    assert caught.value.__notes__ == ["A sink could not be closed: ConnectionError: no answer"]
    assert others() == []
