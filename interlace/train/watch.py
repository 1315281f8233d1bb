"""Where this process is, for whoever asks why nothing moves.

The loop says what it is about to do.  Under our launcher that goes to a file which the launcher can
read whatever state we are in: a fixed-size record, then the stacks that faulthandler adds when a
phase of one of several ranks has lasted for most of the time that peers wait for each other.
Elsewhere those stacks go to standard error.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from dataclasses import dataclass

STATUS_FD = "INTERLACE_STATUS_FD"
RECORD_BYTES = 256
_PART_OF_TIMEOUT = 0.9  # stacks first, then the peers' time-out error ends the run
_REARM_SECONDS = 1.0  # arming starts a thread: not for every phase of a fast step


@dataclass
class _Watch:
    phase: str = ""
    seconds: float = 0.0  # before stacks are written; 0: never
    armed_at: float = 0.0
    descriptor: int | None = None


_watch = _Watch()


def start(timeout_seconds: float) -> None:
    """From now on a phase of most of ``timeout_seconds`` leaves its stacks behind; 0: never."""
    text = os.environ.get(STATUS_FD)
    _watch.descriptor = int(text) if text else None
    _watch.seconds = _PART_OF_TIMEOUT * timeout_seconds
    _watch.armed_at = 0.0
    if _watch.descriptor is not None:
        os.lseek(_watch.descriptor, RECORD_BYTES, os.SEEK_SET)


def enter(phase: str, step: int | None = None) -> None:
    """The process begins ``phase``, of ``step`` (from 0)."""
    _watch.phase = phase if step is None else f"{phase}, step {step + 1}"
    now = time.monotonic()
    if _watch.descriptor is not None:
        record = json.dumps({"phase": _watch.phase[:150], "ns": time.monotonic_ns()})
        os.pwrite(_watch.descriptor, record.encode().ljust(RECORD_BYTES), 0)
    if _watch.seconds and now - _watch.armed_at >= min(_REARM_SECONDS, _watch.seconds / 10):
        _watch.armed_at = now
        target = sys.stderr.fileno() if _watch.descriptor is None else _watch.descriptor
        faulthandler.dump_traceback_later(_watch.seconds, file=target)


def stop() -> None:
    """The loop has ended: no stacks any more."""
    if _watch.seconds:
        faulthandler.cancel_dump_traceback_later()
    _watch.phase, _watch.seconds, _watch.descriptor = "", 0.0, None


def now() -> str:
    """What the process was about, empty outside of the loop."""
    return _watch.phase


def read_status(raw: bytes) -> tuple[str, str]:
    """Launcher side: "phase, for 3.2 s" and the stacks; both may be empty."""
    head, stacks = raw[:RECORD_BYTES].strip(b"\0 "), raw[RECORD_BYTES:]
    if not head:
        return "", ""
    record = json.loads(head)
    seconds = (time.monotonic_ns() - record["ns"]) / 1e9
    where = f"{record['phase']}, for {seconds:.1f} s" if record["phase"] else ""
    return where, stacks.decode("utf-8", "replace").strip()
