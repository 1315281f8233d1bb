"""Worker processes for multi-rank tests: started once a session, fed functions, never left behind.

Importing torch costs seconds a process, so the workers stay.  A function that takes too long is
answered with the stacks of every rank, and the workers are killed.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 60


def _serve(rank: int, size: int, folder: str, pipe: Any) -> None:
    stacks = open(f"{folder}/stacks.{rank}", "w")  # noqa: SIM115 - lives as long as the process
    faulthandler.register(signal.SIGUSR1, file=stacks)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    while (task := pipe.recv()) is not None:
        function, args = task
        try:
            pipe.send((True, function(rank, size, *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Ranks:
    """Owns ``size`` gloo processes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT_SECONDS
    ) -> list:
        """``[function(rank, size, *args) for each rank]``; AssertionError where one fails."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout):
                stacks = self._stacks()
                self.stop(kill=True)
                raise AssertionError(f"rank {rank} did not answer in {timeout} s\n{stacks}")
            try:
                results.append(pipe.recv())
            except EOFError:
                self.stop(kill=True)
                raise AssertionError(f"rank {rank} died") from None
        failures = [f"rank {r}:\n{text}" for r, (ok, text) in enumerate(results) if not ok]
        if failures:
            self.stop(kill=True)
            raise AssertionError("\n".join(failures))
        return [value for _, value in results]

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = mp.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, self._folder.name, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _stacks(self) -> str:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        self._processes[0].join(0.5)
        files = sorted(Path(self._folder.name).glob("stacks.*"))
        return "\n".join(f"{f.name}\n{f.read_text()}" for f in files)

    def stop(self, *, kill: bool = False) -> None:
        """Ends the workers; the next :meth:`run` starts new ones."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            if kill:
                process.kill()
            elif process.is_alive():
                pipe.send(None)
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
        if self._processes:
            self._folder.cleanup()
        self._processes, self._pipes = [], []


if __name__ == "__main__":
    sys.exit("not a script")
