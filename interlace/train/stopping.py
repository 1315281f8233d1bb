"""SIGTERM as a request: the step is finished, the state saved, the process ends with 0."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """Whether this process was asked to end.  Ranks hear of each other's in the next step."""

    requested: bool = False

    @contextmanager
    def on_sigterm(self) -> Iterator[None]:
        """Notes SIGTERM instead of dying of it; only the main thread of a process can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            self.requested = True

        before = signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
