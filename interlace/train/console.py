"""What a person sees while training: a progress bar on a terminal, plain lines elsewhere.

Only rank 0 speaks.  Whatever may take over two seconds is announced before it starts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def format_step(record: Mapping[str, Any]) -> str:
    """One log line from a record of :func:`metrics.step_record`; what is unknown reads N/A.

    Example: step 3  loss 4.1250  grad_norm 0.7500  memory 1.50GiB  tps 1,234  tflops 0.02
             mfu N/A  ep_imbalance 1.20  graph=eager
    """
    memory = next((v for k, v in record.items() if k.startswith("memory/max_")), None)
    fields = [
        f"step {record['step']}",
        f"loss {_number(record['loss'], '.4f')}",
        f"grad_norm {_number(record['grad_norm'], '.4f')}",
        f"memory {_number(memory, '.2f', 'GiB')}",
        f"tps {_number(record.get('throughput(tps)'), ',.0f')}",
        f"tflops {_number(record.get('tflops'), '.2f')}",
        f"mfu {_number(record.get('mfu(%)'), '.2f', '%')}",
    ]
    if record.get("ep_imbalance") is not None:
        fields.append(f"ep_imbalance {_number(record['ep_imbalance'], '.2f')}")
    if record.get("graph") is not None:
        fields.append(f"graph={record['graph']}")
    return "  ".join(fields)


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return "N/A" if value is None else f"{value:{spec}}{unit}"


class Console:
    """Owns the output of one process; all ranks but 0 stay silent."""

    def __init__(self, *, rank: int = 0, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._speaks = rank == 0
        is_terminal = self._speaks and self._stream.isatty()
        self._rich = RichConsole(file=self._stream, highlight=False) if is_terminal else None
        self._progress: Progress | None = None  # while steps() runs on a terminal
        self._task: Any = None

    def line(self, text: str) -> None:
        """Prints one line, above the progress bar if there is one."""
        if not self._speaks:
            return
        if self._rich is not None:
            self._rich.print(text, markup=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Announces a longer piece of work; at its end says how long it took, or that it failed.

        Example: with console.working("tracing the step"): ...
                 -> "tracing the step ..." and then "tracing the step: done in 3.1 s"
        """
        began = time.perf_counter()
        outcome = "failed after"
        try:
            with self._announced(what):
                yield
            outcome = "done in"
        finally:
            self.line(f"{what}: {outcome} {time.perf_counter() - began:.1f} s")

    def _announced(self, what: str) -> Any:
        if self._rich is not None and self._progress is None:
            return self._rich.status(f"{what} ...")
        self.line(f"{what} ...")
        return nullcontext()

    @contextmanager
    def steps(self, total: int, *, first: int = 0) -> Iterator[None]:
        """Shows the progress of ``total`` steps, ``first`` of them already done (a resumed run)."""
        if self._rich is None:
            yield
            return
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._rich, transient=True) as progress:
            self._progress = progress
            self._task = progress.add_task("training", total=total, completed=first)
            try:
                yield
            finally:
                self._progress = None

    def step(self, record: Mapping[str, Any], *, log: bool = True) -> None:
        """Counts a finished step and, unless this one is not to be logged, prints its line."""
        if self._progress is not None:
            self._progress.advance(self._task)
        if log:
            self.line(format_step(record))


@contextmanager
def working(what: str, *, rank: int = 0, stream: TextIO | None = None) -> Iterator[None]:
    """:meth:`Console.working` where no console is at hand."""
    with Console(rank=rank, stream=stream).working(what):
        yield
