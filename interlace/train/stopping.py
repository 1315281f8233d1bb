"""How a run ends before its last step: because it was asked to, or because it must not go on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


class StepRefused(RuntimeError):
    """A step that no rank may apply, found by all of them; the message is for the user."""


@dataclass
class StopRequest:
    """Whether this process was asked to end, by SIGTERM: after the step the state is saved and the
    process ends with 0.  Ranks hear of each other's request in the next step."""

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
