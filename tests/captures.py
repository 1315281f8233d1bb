"""A stand-in for a CUDA graph on any device: the same fixed places, replayed by running again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from interlace.capture import WARM_UPS, Captured, random_state, set_random_state
from interlace.trace import StepResult
from interlace.train.engine import Engine


class FakeGraph:
    """A replay computes from the fixed inputs into the memory of the first result."""

    def __init__(self, run: Callable[..., StepResult], inputs: Any, result: StepResult) -> None:
        self.run, self.inputs, self.result = run, inputs, result
        self.log: list[str] = []

    def replay(self) -> None:
        new = self.run(self.inputs)
        self.result.loss.copy_(new.loss)
        for mine, other in ((self.result.grads, new.grads), (self.result.extra, new.extra)):
            for name, place in mine.items():
                place.copy_(other[name])

    def reset(self) -> None:
        self.log.append("graph")


def fake_capture(
    run: Callable[..., StepResult],
    batch: Sequence[Tensor],
    *,
    state: Callable[[], Mapping[str, Tensor]] = dict,
) -> Captured:
    """As :func:`interlace.capture.capture_step`: warm-ups, then one recorded call."""
    inputs = tuple(x.clone() for x in batch)
    before = random_state(inputs[0].device)
    for _ in range(WARM_UPS):
        run(inputs)
    result = run(inputs)
    set_random_state(inputs[0].device, before)
    return Captured(FakeGraph(run, inputs, result), inputs, result, state)  # type: ignore[arg-type]


def batch_of(engine: Engine, step: int) -> tuple[Tensor, ...]:
    """What an engine's ``forward_backward`` takes, of one process."""
    t = engine.config.training
    batch = engine.data.rows(
        step, global_batch_rows=t.local_batch_size, first=0, count=t.local_batch_size
    )
    return (*batch.tensors(), torch.tensor(100.0))
