"""A traced step as one CUDA graph: recorded once, replayed with new inputs.

What is captured never reads a size on the host: the exchange runs in padded mode.  Parameters and
buffers are read where they are, so an update between two replays is seen; inputs are copied to
fixed places.  What a replay returns lies in the graph's memory and holds until the next replay.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from interlace.trace import StepResult

WARM_UPS = 3  # kernels are compiled and handles made before anything is recorded
Run = Callable[[tuple[Tensor, ...]], StepResult]


@dataclass
class Captured:
    """Owns a CUDA graph, its inputs and its results; ``close`` before process groups go."""

    graph: torch.cuda.CUDAGraph | None
    inputs: tuple[Tensor, ...]
    result: StepResult

    def __call__(self, batch: Sequence[Tensor]) -> StepResult:
        """Replays the step on ``batch``.

        Raises: ValueError for other shapes or dtypes than those captured, RuntimeError once closed.
        """
        if self.graph is None:
            raise RuntimeError("this captured step has been closed and cannot be replayed.")
        check_inputs(self.inputs, batch)
        for place, new in zip(self.inputs, batch, strict=True):
            place.copy_(new)
        self.graph.replay()
        return self.result

    def close(self) -> None:
        """Releases the graph, which else keeps communicators alive at exit."""
        if self.graph is not None:
            torch.cuda.synchronize()
            self.graph.reset()
            self.graph = None


def check_inputs(captured: Sequence[Tensor], batch: Sequence[Tensor]) -> None:
    """ValueError that names both layouts where a batch is not laid out like the captured one."""
    found = [(tuple(x.shape), x.dtype) for x in batch]
    expected = [(tuple(x.shape), x.dtype) for x in captured]
    if found != expected:
        index = next(i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b)
        raise ValueError(
            f"the step was captured for {expected[index][0]} {expected[index][1]} as input {index} "
            f"and got {found[index][0]} {found[index][1]}; capture it again for the new shape."
        )


def capture(run: Run, batch: Sequence[Tensor]) -> Captured:
    """Records one call of ``run``; all of its work must be on the device of ``batch``.

    Raises: ValueError without CUDA.
    """
    device = batch[0].device
    if device.type != "cuda":
        raise ValueError(
            f"capture.enabled: a CUDA graph needs CUDA tensors, got {device.type}; "
            "use --capture.no-enabled there."
        )
    inputs = tuple(x.clone() for x in batch)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            run(inputs)
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(inputs)
    return Captured(graph, inputs, result)
