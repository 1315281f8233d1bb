"""Local worker processes: started together, ended together, none left behind.

Parent side: ``launch`` and ``run_workers``.  Worker side: ``in_worker`` and ``report_failure``.

Every worker is the leader of its own session, so that it and whatever it starts can be ended by
process group.  On Linux the kernel kills a worker when its launcher dies, even by SIGKILL.
Rank 0 writes straight to our terminal; what other ranks write is kept in unlinked files and shown
only if the run fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import IO

from interlace.train.watch import STATUS_FD, read_status

GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL
_POLL_SECONDS = 0.03
_TAIL_LINES = 60
_ERROR_FD = "INTERLACE_ERROR_FD"  # a worker writes its failure there: see report_failure

# Runs first in each worker: asks the kernel to kill it with its parent, then becomes the command.
# A wrapper rather than preexec_fn, which is unsafe once the parent has threads.
_GUARD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG; kept across exec
if os.getppid() != int(sys.argv[1]):
    os._exit(1)  # the launcher died before the line above
os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    log: IO[bytes] | None  # stdout and stderr; None for rank 0, which has our terminal
    failure: IO[bytes]  # the record of report_failure
    status: IO[bytes]  # where the worker is: see watch.py
    ended: bool = False

    def poll(self) -> int | None:
        """The exit code, or None; whatever the worker left in its process group is killed."""
        if not self.ended:
            # WNOWAIT keeps the process id taken, so that the group cannot be someone else's yet.
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self.process.pid, flags) is None:
                return None
            self.signal_group(signal.SIGKILL)
            self.process.wait()
            self.ended = True
        return self.process.returncode

    def where(self) -> tuple[str, str]:
        """What the worker is doing and, if it has been at it for long, its stacks."""
        self.status.seek(0)
        return read_status(self.status.read())

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


@dataclass(frozen=True)
class _Failure:
    """How one worker ended; ``order`` sorts by what most likely came first."""

    rank: int
    how: str
    text: str
    expected: bool
    order: tuple[int, int, int]


@dataclass(frozen=True)
class _Place:
    """Where a worker was when the run failed: its phase and, if that took long, its stacks."""

    rank: int
    at_work: bool
    where: str
    stacks: str


def launch(argv: list[str], nproc: int, *, stop_seconds: float = GRACE_SECONDS) -> int:
    """Run ``python -m interlace ARGV`` as ``nproc`` local workers; the exit code of the run."""
    optimize = ["-" + "O" * sys.flags.optimize] if sys.flags.optimize else []
    return run_workers([sys.executable, *optimize, "-m", "interlace", *argv], nproc, stop_seconds)


def run_workers(command: list[str], nproc: int, stop_seconds: float = GRACE_SECONDS) -> int:
    """Run ``command`` as ``nproc`` workers with torchrun's environment variables.

    Returns 0 when all end well; else the code of the first that failed (128 + n for signal n),
    after ending the others.  SIGINT, SIGTERM and SIGHUP end all; a second one does not wait.
    After SIGTERM the workers have ``stop_seconds`` to save, and if all end with 0, so do we.
    """
    if nproc < 1:
        raise ValueError(f"nproc={nproc} processes cannot run anything; use 1 or more.")
    workers: list[_Worker] = []
    with _caught_signals() as caught, contextlib.ExitStack() as files:
        try:
            environment = _environment(nproc)
            for rank in range(nproc):
                workers.append(_start(command, rank, environment, files))
            while not caught:
                codes = [worker.poll() for worker in workers]
                if any(codes) or None not in codes:
                    break
                time.sleep(_POLL_SECONDS)
        finally:
            failed = [worker for worker in workers if worker.poll()]
            places = [_Place(w.rank, not w.ended, *w.where()) for w in workers]
            _end(workers, caught, stop_seconds)
        if caught:
            return _stopped(workers, caught[0])
        if not failed:
            return 0
        failures = sorted((_failure_of(worker) for worker in failed), key=lambda f: f.order)
        _show(failures, places)
        code = workers[failures[0].rank].process.returncode
        return code if code > 0 else 128 - code


def in_worker() -> bool:
    """Whether this process is one of several: ours, or torchrun's."""
    return "RANK" in os.environ


def report_failure(text: str, *, expected: bool) -> None:
    """Tell the launcher why this worker ends; without our launcher, tell standard error.

    The launcher shows the earliest failure first; a peer's "connection closed" must not hide it.
    """
    descriptor = os.environ.get(_ERROR_FD)
    if descriptor is None:
        print(text, file=sys.stderr, flush=True)
        return
    record = {"ns": time.monotonic_ns(), "expected": expected, "text": text}
    os.write(int(descriptor), json.dumps(record).encode())


def _environment(nproc: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
    }
    # All workers are local: gloo need not resolve the machine's own name, which often fails.
    if any(name == "lo" for _, name in socket.if_nameindex()):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def _start(
    command: list[str], rank: int, environment: dict[str, str], files: contextlib.ExitStack
) -> _Worker:
    failure = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
    status = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
    log = None if rank == 0 else files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
    if sys.platform == "linux":
        guard = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid())]
        command = [*guard, *command]
    process = subprocess.Popen(
        command,
        env=environment
        | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        | {_ERROR_FD: str(failure.fileno()), STATUS_FD: str(status.fileno())},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(failure.fileno(), status.fileno()),
        start_new_session=True,
    )
    return _Worker(rank, process, log, failure, status)


def _end(workers: list[_Worker], caught: list[int], stop_seconds: float) -> None:
    """SIGTERM, then SIGKILL after the grace period, or at once on a second signal."""
    grace_seconds = stop_seconds if caught == [signal.SIGTERM] else GRACE_SECONDS
    for worker in workers:
        if not worker.ended:
            worker.signal_group(signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while any(worker.poll() is None for worker in workers):
        if time.monotonic() > deadline or len(caught) > 1:
            for worker in workers:
                if not worker.ended:
                    worker.signal_group(signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _stopped(workers: list[_Worker], number: int) -> int:
    """The exit code after a signal to us; what went wrong while workers saved is shown."""
    name = signal.Signals(number).name
    codes = [worker.process.returncode for worker in workers]
    if number == signal.SIGTERM and codes and not any(codes):
        print(f"stopped by {name}: every rank has saved and ended", file=sys.stderr)
        return 0
    print(f"stopped by {name}", file=sys.stderr)
    failures = [_failure_of(worker) for worker in workers if worker.process.returncode > 0]
    if failures:
        _show(sorted(failures, key=lambda f: f.order), [])
    return 128 + number


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """Collect signals instead of raising, so that no worker is lost between start and record."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught  # Python installs handlers in the main thread alone
        return

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _failure_of(worker: _Worker) -> _Failure:
    code = worker.process.returncode
    how = f"exited with code {code}" if code > 0 else f"was killed by {_signal_name(-code)}"
    worker.failure.seek(0)
    raw = worker.failure.read()
    if raw:
        record = json.loads(raw)
        order = (1, record["ns"], worker.rank)
        return _Failure(worker.rank, how, record["text"].rstrip(), record["expected"], order)
    # No record: killed by a signal is a cause; a plain exit may be a consequence.
    order = (0 if code < 0 else 2, 0, worker.rank)
    return _Failure(worker.rank, how, _tail(worker), False, order)


def _tail(worker: _Worker) -> str:
    if worker.log is None:
        return ""
    worker.log.seek(0)
    lines = worker.log.read().decode("utf-8", "replace").rstrip().splitlines()
    return "\n".join(lines[-_TAIL_LINES:])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _show(failures: list[_Failure], places: list[_Place]) -> None:
    """The first failure in full; of the others, which are mostly its echo, one line each, and where
    those were that had not failed."""
    first, *others = failures
    if first.expected:
        print(first.text, file=sys.stderr, flush=True)
        return
    lines = [*first.text.splitlines(), first.how + "; the other ranks were ended"]
    print("\n".join(f"[rank {first.rank}] {line}" for line in lines), file=sys.stderr)
    for other in others:
        last = other.text.splitlines()[-1:] or [other.how]
        print(f"[rank {other.rank}] then failed too: {last[0]}", file=sys.stderr)
    for place in places:
        if place.rank == first.rank:
            continue
        if place.where and (place.at_work or place.stacks):
            print(f"[rank {place.rank}] was at: {place.where}", file=sys.stderr)
        for line in place.stacks.splitlines()[-_TAIL_LINES:]:
            print(f"[rank {place.rank}] {line}", file=sys.stderr)
    sys.stderr.flush()
