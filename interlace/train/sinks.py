"""Where the metrics of a run go beside the JSONL file: services that are imported when chosen.

A sink takes flat names and numbers.  Records have lists by layer; they become one name a layer.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from interlace.train.config import Config

_SECONDS_AFTER_ERROR = 3.0


class Sink(Protocol):
    """One service."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files below ``folder``; what a resumed run does again is hidden."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = first_step + 1 if first_step else None
        self._writer = SummaryWriter(log_dir=str(folder), purge_step=purge)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbLike:
    """Weights & Biases, or trackio with the same calls; a resumed run is the same run there."""

    def __init__(self, module: Any, **arguments: Any) -> None:
        self._module = module
        module.init(**arguments)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._module.log(dict(values), step=step)

    def close(self) -> None:
        self._module.finish()


@contextlib.contextmanager
def open_sinks(config: Config, first_step: int) -> Iterator[list[Sink]]:
    """The chosen sinks; all are closed.  After an error they get a few seconds: a service that does
    not answer must not keep the other ranks waiting."""
    m, folder = config.metrics, Path(config.metrics.folder)
    name = f"{config.model.name}-{_id_of(folder)}"
    with contextlib.ExitStack() as stack:
        sinks: list[Sink] = []

        def add(sink: Sink) -> None:
            stack.push(lambda _, error, __: _close_soon(sink, error) if error else sink.close())
            sinks.append(sink)

        if m.enable_tensorboard:
            add(TensorBoard(folder / "tensorboard", first_step))
        if m.enable_wandb:
            wandb = importlib.import_module("wandb")
            settings = asdict(config)
            add(WandbLike(wandb, project=m.project, name=name, id=_id_of(folder), resume="allow",
                          config=settings, dir=str(folder)))  # fmt: skip
        if m.enable_trackio:
            trackio = importlib.import_module("trackio")
            add(WandbLike(trackio, project=m.project, name=name, resume="allow",
                          config=asdict(config)))  # fmt: skip
        yield sinks


def _close_soon(sink: Sink, error: BaseException) -> None:
    """What goes wrong here becomes a note of the error that ended the run."""

    def close() -> None:
        try:
            sink.close()
        except Exception as other:
            error.add_note(f"A sink could not be closed: {type(other).__name__}: {other}")

    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    thread.join(_SECONDS_AFTER_ERROR)


def flatten(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by flat name: a list has one entry a layer, text is left out.

    Example: {"loss": 2.0, "graph": "eager", "x": [1, 3]} -> {"loss": 2.0, "x/0": 1.0, "x/1": 3.0}
    """
    flat: dict[str, float] = {}
    for name, value in record.items():
        values = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, one in values:
            if isinstance(one, int | float) and not isinstance(one, bool):
                flat[name if index is None else f"{name}/{index}"] = float(one)
    return {name: value for name, value in flat.items() if math.isfinite(value)}


def _id_of(folder: Path) -> str:
    """Names a run by its folder, so that the same command continues it."""
    return hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:12]
