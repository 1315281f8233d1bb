"""The ways to run one and the same step, by name: what `verify` compares and `train` chooses from.

eager            plain PyTorch
control          the traced step, unscheduled
scheduled        the traced step, reordered
chunk-eager      plain PyTorch with chunked modules
chunk-graph      the traced step, chunked on the graph
chunk-scheduled  that, reordered
captured         the traced step, chunked and reordered as set, as one CUDA graph

With ``compile.regional`` plain PyTorch has no compiled regions to compare with: the references are
then the traced step, and the trace of eager chunking, with the same regions as every other arm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from interlace.capture import capture
from interlace.chunk import chunk_graph
from interlace.graph.chunking import BATCH, SEQUENCE, Chunking, chunk_extent
from interlace.graph.passes import Pass
from interlace.regional import compile_regions
from interlace.schedule import schedule_graph
from interlace.trace import Step, StepResult, Traced, run_eager, trace_step
from interlace.train.config import Config

ForwardBackward = Callable[[tuple[Tensor, ...]], StepResult]
Working = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Arm:
    """``against`` is the arm that it must equal bitwise, None where it is a reference itself."""

    name: str
    against: str | None
    traced: bool
    chunked: bool = False
    scheduled: bool = False
    captured: bool = False


ARMS = {
    arm.name: arm
    for arm in (
        Arm("eager", None, traced=False),
        Arm("control", "eager", traced=True),
        Arm("scheduled", "control", traced=True, scheduled=True),
        Arm("chunk-eager", None, traced=False, chunked=True),
        Arm("chunk-graph", "chunk-eager", traced=True, chunked=True),
        Arm("chunk-scheduled", "chunk-eager", traced=True, chunked=True, scheduled=True),
        Arm("captured", "control", traced=True, captured=True),
        Arm("chunk-captured", "chunk-eager", True, chunked=True, scheduled=True, captured=True),
    )
}


def arm_of(config: Config) -> Arm:
    """The arm that the settings ask a training run to be."""
    chunked, scheduled = config.overlap.chunks > 1, config.overlap.scheduler != "off"
    if config.training.mode == "eager":
        return ARMS["chunk-eager" if chunked else "eager"]
    names = {
        (False, False): "control",
        (False, True): "scheduled",
        (True, False): "chunk-graph",
        (True, True): "chunk-scheduled",
    }
    arm = ARMS[names[chunked, scheduled]]
    return replace(arm, captured=config.capture.enabled)


def chunking_of(config: Config, *, at_least: int = 1) -> Chunking:
    """How regions are chunked; verification takes two chunks where the settings have one."""
    o = config.overlap
    dim = BATCH if o.chunk_dim == "batch" else SEQUENCE
    return Chunking(o.chunk_root, max(o.chunks, at_least), dim)


def build_arm(
    arm: Arm, step: Step, batch: Sequence[Tensor], config: Config, working: Working
) -> tuple[ForwardBackward, Traced | None]:
    """The function that computes a microbatch of ``batch``'s shapes, and the graph if there is one.

    ``batch``: tokens, labels, positions (B, S), document boundaries (B, C), a scalar.
    """
    if arm.chunked:
        step = replace(step, chunking=chunking_of(config, at_least=2))
    params, buffers = step.state()
    if not (arm.traced or (arm.chunked and config.compile.regional)):
        return lambda tensors: run_eager(step, params, buffers, tensors), None
    with working("tracing the step"):
        traced = trace_arm(arm, step, batch, config)

    def run(tensors: Sequence[Tensor]) -> StepResult:
        return traced(params, buffers, tensors)

    if not arm.captured:
        return run, traced
    check_capturable(config)
    with working("capturing the step"):
        captured = capture(run, batch)
    if config.training.microbatches == 1:
        return captured, traced
    return lambda tensors: _kept(captured(tensors)), traced


def check_capturable(config: Config) -> None:
    """ValueError where a captured step would have to read a size on the host."""
    if not config.ep.padded:
        raise ValueError(
            "capture.enabled: the exact exchange reads sizes on the host, which a CUDA graph "
            "cannot; use --ep.padded."
        )


def _kept(result: StepResult) -> StepResult:
    """A copy that the next replay does not overwrite, for gradients that add up over replays."""
    return StepResult(
        result.loss.clone(),
        {n: g.clone() for n, g in result.grads.items()},
        {n: x.clone() for n, x in result.extra.items()},
    )


def trace_arm(arm: Arm, step: Step, batch: Sequence[Tensor], config: Config) -> Traced:
    """The graph of an arm; passes are run and reported in order.

    What chunking refuses is traced once more, to name the line of the model at fault.
    """
    try:
        return _trace_arm(arm, step, batch, config, source_lines=False)
    except ValueError:
        if not arm.chunked:
            raise
    return _trace_arm(arm, step, batch, config, source_lines=True)


def _trace_arm(
    arm: Arm, step: Step, batch: Sequence[Tensor], config: Config, *, source_lines: bool
) -> Traced:
    passes = []
    chunking = chunking_of(config, at_least=2)
    if arm.chunked and arm.traced:
        step = replace(step, chunking=None, boundary=chunking.is_root)
        extent = batch[0].shape[chunking.dim]
        name = ("training.local_batch_size / microbatches", "training.seq_len")[chunking.dim]
        part = chunk_extent(name, extent, chunking.num_chunks)
        parts = [_part_of(x, chunking.dim, extent, part) for x in batch]
        small = trace_step(step, parts, source_lines=source_lines)

        def chunk(gm: fx.GraphModule) -> list[str]:
            mixing = chunk_graph(gm, small.gm, chunking, extent).cross_token
            return [f"{node} sees the tokens of its chunk only" for node in mixing]

        passes.append(Pass("chunk_graph", chunk, keeps_effects=False))
    if config.compile.regional:

        def compile_all(gm: fx.GraphModule) -> None:
            compile_regions(gm)

        passes.append(Pass("compile_regions", compile_all, keeps_effects=False))
    if arm.scheduled:
        scheduler = "policy" if config.overlap.scheduler == "off" else config.overlap.scheduler

        def schedule(gm: fx.GraphModule) -> None:
            schedule_graph(gm, scheduler=scheduler)

        passes.append(Pass("schedule", schedule))
    return trace_step(step, batch, passes, source_lines=source_lines)


def reference_of(arm: str, arms: Sequence[str], config: Config) -> str | None:
    """The arm among ``arms`` that this one must equal; None for a reference.

    Where the arm that it is defined against does not run, the first of its kind takes its place.
    """
    wanted = ARMS[arm].against
    if config.compile.regional and wanted == "eager":
        return None
    kind = [a for a in arms if ARMS[a].chunked == ARMS[arm].chunked]
    if config.compile.regional:
        kind = [a for a in kind if a != "eager"]
    if wanted is None or kind[0] == arm:
        return None
    return wanted if wanted in arms else kind[0]


def _part_of(x: Tensor, dim: int, extent: int, part: int) -> Tensor:
    """An example of a chunk's input; a trace reads shapes only."""
    if x.dim() > dim and x.shape[dim] == extent:
        return torch.empty_like(x.narrow(dim, 0, part))
    return x
