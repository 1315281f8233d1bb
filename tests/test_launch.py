"""The launcher: every worker ends, whatever happens.  The workers are scripts without torch."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from interlace.train.launch import GRACE_SECONDS, run_workers

ROOT = Path(__file__).parent.parent
PRELUDE = """
import os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
def note(pid, who):
    with open(sys.argv[1] + f"/{who}.part", "w") as file:
        file.write(str(pid))
    os.rename(sys.argv[1] + f"/{who}.part", sys.argv[1] + f"/{who}.pid")
note(os.getpid(), f"rank{rank}")
"""


def script(tmp_path: Path, body: str) -> list[str]:
    path = tmp_path / "worker.py"
    path.write_text(PRELUDE + body)
    return [sys.executable, "-S", str(path), str(tmp_path)]


def is_alive(pid: int) -> bool:
    """A zombie whose new parent is slow to collect it has ended all the same."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def pids(tmp_path: Path, count: int) -> list[int]:
    deadline = time.monotonic() + 20
    while len(found := list(tmp_path.glob("*.pid"))) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(found) == count
    return [int(path.read_text()) for path in found]


def all_gone(numbers: list[int], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(is_alive, numbers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_alive, numbers))


def test_environment_and_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = """
import json
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump(dict(os.environ), file)
print("hello from", rank)
"""
    assert run_workers(script(tmp_path, body), 3) == 0
    assert capfd.readouterr().out == "hello from 0\n"
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for rank, environment in enumerate(seen):
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "3"
        assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert len({environment["MASTER_PORT"] for environment in seen}) == 1
    assert all_gone(pids(tmp_path, 3))


def test_one_fails_all_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = """
if rank == 1:
    while not all(os.path.exists(sys.argv[1] + f"/rank{r}.pid") for r in range(3)):
        time.sleep(0.01)
    sys.exit("boom on one")
time.sleep(100)
"""
    start = time.monotonic()
    assert run_workers(script(tmp_path, body), 3) == 1
    assert time.monotonic() - start < GRACE_SECONDS + 2
    err = capfd.readouterr().err.splitlines()
    assert err == [
        "[rank 1] boom on one",
        "[rank 1] exited with code 1; the other ranks were ended",
    ]
    assert all_gone(pids(tmp_path, 3), 0.1)


@pytest.mark.slow
def test_a_worker_deaf_to_sigterm_is_killed(tmp_path: Path) -> None:
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
note(subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"]).pid, f"c{rank}")
if rank == 0:
    while not os.path.exists(sys.argv[1] + "/c1.pid"):
        time.sleep(0.01)
    sys.exit(7)
time.sleep(100)
"""
    start = time.monotonic()
    assert run_workers(script(tmp_path, body), 2) == 7
    assert time.monotonic() - start < GRACE_SECONDS + 3
    assert all_gone(pids(tmp_path, 4), 0.5)


def test_children_of_a_successful_worker_end_too(tmp_path: Path) -> None:
    body = """
note(subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"]).pid, "child")
"""
    assert run_workers(script(tmp_path, body), 1) == 0
    assert all_gone(pids(tmp_path, 2), 0.5)


def test_a_killed_worker_is_the_cause(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0 reports its lost peer at the same time; the kill is shown first."""
    body = f"""
sys.path.insert(0, {str(ROOT)!r})
if rank == 1:
    while not os.path.exists(sys.argv[1] + "/ready.pid"):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)
from interlace.train.launch import report_failure
report_failure("Traceback\\nConnectionError: lost a peer", expected=False)
note(0, "ready")
os._exit(1)
"""
    assert run_workers(script(tmp_path, body), 2) == 128 + signal.SIGKILL
    err = capfd.readouterr().err.splitlines()
    assert err[0] == "[rank 1] was killed by SIGKILL; the other ranks were ended"
    assert err[1:] in ([], ["[rank 0] then failed too: ConnectionError: lost a peer"])


def test_the_earliest_failure_comes_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = f"""
sys.path.insert(0, {str(ROOT)!r})
from interlace.train.launch import report_failure
if rank == 0:
    while not os.path.exists(sys.argv[1] + "/failed.pid"):
        time.sleep(0.001)
report_failure(f"Traceback\\nError: on {{rank}}", expected=False)
note(0, "failed")
os._exit(1)
"""
    assert run_workers(script(tmp_path, body), 2) == 1
    err = capfd.readouterr().err.splitlines()
    assert err[:2] == ["[rank 1] Traceback", "[rank 1] Error: on 1"]


def test_an_expected_failure_is_told_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = f"""
sys.path.insert(0, {str(ROOT)!r})
from interlace.train.launch import report_failure
report_failure("interlace: error: no such file", expected=True)
os._exit(2)
"""
    assert run_workers(script(tmp_path, body), 3) == 2
    assert capfd.readouterr().err == "interlace: error: no such file\n"


LAUNCHER = """
import sys
from interlace.train.launch import run_workers
sys.exit(run_workers(sys.argv[1:], 2))
"""


def start_launcher(tmp_path: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    command = [sys.executable, "-c", LAUNCHER, *script(tmp_path, "time.sleep(100)")]
    launcher = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
    return launcher, pids(tmp_path, 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all(tmp_path: Path, number: signal.Signals) -> None:
    launcher, workers = start_launcher(tmp_path)
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=20)
    assert launcher.returncode == 128 + number
    assert err.decode() == f"stopped by {number.name}\n"
    assert all_gone(workers, 0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends orphans on Linux only")
def test_workers_notice_a_killed_launcher(tmp_path: Path) -> None:
    launcher, workers = start_launcher(tmp_path)
    launcher.kill()
    launcher.communicate(timeout=20)
    assert all_gone(workers)


def test_a_killed_worker_ends_the_run(tmp_path: Path) -> None:
    launcher, workers = start_launcher(tmp_path)
    os.kill(workers[0], signal.SIGKILL)
    launcher.communicate(timeout=20)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert all_gone(workers, 0.1)


def test_works_outside_the_main_thread(tmp_path: Path) -> None:
    codes: list[int] = []
    command = script(tmp_path, "sys.exit(5)")
    thread = threading.Thread(target=lambda: codes.append(run_workers(command, 2)))
    thread.start()
    thread.join(20)
    assert codes == [5]


def test_a_command_that_does_not_exist(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_workers(["/no/such/command"], 2) != 0
    assert "FileNotFoundError" in capfd.readouterr().err


def test_signal_handlers_are_put_back(tmp_path: Path) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    run_workers(script(tmp_path, ""), 1)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_no_processes_is_an_error() -> None:
    with pytest.raises(ValueError, match="nproc=0"):
        run_workers(["true"], 0)


# --- with torch -----------------------------------------------------------------------------------

WORLD = f"""
sys.path.insert(0, {str(ROOT)!r})
import torch
import torch.distributed as dist
from interlace.train.config_read import load_config
from interlace.train.world import close_world, init_world
world = init_world(load_config(["dsv3-tiny"]))
total = torch.ones(())
dist.all_reduce(total)
value = torch.tensor(float(world.rank))
dist.all_reduce(value, group=world.ep_group)
replicas = torch.tensor(float(world.rank))
if world.replica_group is not None:
    dist.all_reduce(replicas, group=world.replica_group)
found = (world.size, world.backend, world.ep_rank, float(total), float(value), float(replicas))
"""


@pytest.mark.slow
def test_world_of_four(tmp_path: Path) -> None:
    """By hand: EP groups (0,1), (2,3); replicas (0,2), (1,3)."""
    body = (
        WORLD
        + """
with open(f"{sys.argv[1]}/{rank}.txt", "w") as file:
    file.write(repr(found))
close_world(world)
"""
    )
    command = script(tmp_path, body)
    command.remove("-S")
    assert run_workers(command, 4) == 0
    found = [(tmp_path / f"{rank}.txt").read_text() for rank in range(4)]
    assert found == [
        "(4, 'gloo', 0, 4.0, 1.0, 2.0)",
        "(4, 'gloo', 1, 4.0, 1.0, 4.0)",
        "(4, 'gloo', 0, 4.0, 5.0, 2.0)",
        "(4, 'gloo', 1, 4.0, 5.0, 4.0)",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_on_one_rank_ends_its_waiting_peer(
    tmp_path: Path, broken: int, capfd: pytest.CaptureFixture[str]
) -> None:
    body = f"""
import sys
import types
sys.path.insert(0, {str(ROOT)!r})
def train(config, world):
    import torch, torch.distributed as dist
    note(0, "training%d" % world.rank)
    if world.rank == {broken}:
        raise RuntimeError("broken on purpose")
    dist.all_reduce(torch.ones(()))
sys.modules["interlace.train.loop"] = loop = types.ModuleType("loop")
loop.train = train
from interlace.cli import main
main(["train", "dsv3-tiny", "--metrics.folder", sys.argv[1]])
"""
    command = script(tmp_path, body)
    command.remove("-S")
    assert run_workers(command, 2) == 1
    err = capfd.readouterr().err.splitlines()
    assert err[0] == f"[rank {broken}] Traceback (most recent call last):"
    assert f"[rank {broken}] RuntimeError: broken on purpose" in err
