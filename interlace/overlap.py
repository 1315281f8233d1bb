"""From a step to its overlapped graph in one call: chunked, compiled, buffered, scheduled.

    trace the step for a part of the batch; trace it whole, with these passes:
    chunk_graph, compile_regions, assign_buffers, schedule

Each is left out where it was not asked for.  Buffers are assigned behind all that replaces nodes
and before all that moves them; for backends that own none, that does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from interlace.chunk import chunk_graph
from interlace.chunk.buffers import assign_buffers
from interlace.graph.chunking import Chunking, chunk_extent
from interlace.graph.passes import Pass
from interlace.regional import compile_regions
from interlace.schedule import SCHEDULERS, Edge, schedule_graph
from interlace.trace import Step, Traced, trace_step


def trace_overlapped(
    step: Step,
    batch: Sequence[Tensor],
    chunking: Chunking | None,
    scheduler: str = "policy",
    regional: bool = False,
    source_lines: bool = False,
) -> Traced:
    """The step as one graph, its regions in independent chunks, exchanges under compute.

    ``batch`` gives shapes only; what is chunked is dimension ``chunking.dim``, in every tensor that
    has the extent of the first.  ``chunking`` None or of one chunk: only reordered.  ``scheduler``
    as in :func:`schedule_graph`, "off" for program order.  ``regional`` compiles regions.
    ``source_lines`` as in :func:`trace_step`: names the line that chunking refuses.

    Ensures: bitwise equal to ``run_eager`` of the step with this ``chunking``; compiled regions
             have Inductor's bits.  What passes have to tell is in ``reports``.
    Raises:  ValueError that says what cannot be chunked or ordered, and where.
    """
    if scheduler not in SCHEDULERS:
        raise ValueError(f"scheduler={scheduler!r}: use one of {', '.join(SCHEDULERS)}.")
    passes: list[Pass] = []
    reuse: list[Edge] = []  # of buffers, for the schedule
    if chunking is not None and chunking.num_chunks > 1:
        step = replace(step, chunking=None, boundary=chunking.is_root)
        passes.append(_chunk_pass(step, batch, chunking, source_lines))

    def compile_all(gm: fx.GraphModule) -> None:
        compile_regions(gm)

    def assign(gm: fx.GraphModule) -> None:
        reuse.extend(assign_buffers(gm))

    def schedule(gm: fx.GraphModule) -> None:
        schedule_graph(gm, scheduler=scheduler, extra=reuse)

    if regional:
        passes.append(Pass("compile_regions", compile_all, keeps_effects=False))
    passes.append(Pass("assign_buffers", assign))
    if scheduler != "off":
        passes.append(Pass("schedule", schedule))
    return trace_step(step, batch, passes, source_lines=source_lines)


def _chunk_pass(
    step: Step, batch: Sequence[Tensor], chunking: Chunking, source_lines: bool
) -> Pass:
    """Traces the step for one part of the batch, which tells what a chunk is."""
    dim = chunking.dim
    extent = next((x.shape[dim] for x in batch if x.dim() > dim), None)
    if extent is None:
        raise ValueError(f"chunking: the batch has no tensor with a dimension {dim} to chunk.")
    part = chunk_extent(f"dimension {dim} of the batch", extent, chunking.num_chunks)
    parts = [_part_of(x, dim, extent, part) for x in batch]
    small = trace_step(step, parts, source_lines=source_lines)

    def chunk(gm: fx.GraphModule) -> list[str]:
        mixing = chunk_graph(gm, small.gm, chunking, extent).cross_token
        return [f"{node} sees the tokens of its chunk only" for node in mixing]

    return Pass("chunk_graph", chunk, keeps_effects=False)


def _part_of(x: Tensor, dim: int, extent: int, part: int) -> Tensor:
    """An example of a chunk's input; a trace reads shapes only."""
    if x.dim() > dim and x.shape[dim] == extent:
        return torch.empty_like(x.narrow(dim, 0, part))
    return x
