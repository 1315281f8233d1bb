"""Rows that did not fit a capacity: what all ranks do about it, together.

The exchange cuts at the sender and counts what it cut, by MoE layer, on the device; a step's number
is the largest of its microbatches.  After the step the ranks agree on the largest anywhere, so all
of them decide the same, before any has changed a weight.  ``ep.overflow``:

error   the run ends, and the message says which capacity would have been enough.
skip    the step is left out on all ranks: its batch is used up, nothing else happens.
redo    all ranks make room and do the step again: same batch, same random numbers.
drop    cut rows count as zero; they are counted by layer.

Legend: L MoE layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from interlace import ep
from interlace.model.moe import MoE
from interlace.train.world import World

SLACK = 1.1  # room beyond what was needed: routing moves on, and a rebuild costs much
PARTS = 8  # a capacity factor becomes a multiple of 1 / PARTS


@dataclass(frozen=True)
class Load:
    """What one exchange of a layer carries: tokens of a rank (of one chunk), choices, experts."""

    num_tokens: int
    top_k: int
    num_experts: int

    def rows(self, exchange: ep.Exchange) -> int:
        """Rows for one peer; 0 in exact mode, which has no capacity."""
        return exchange.block_rows(self.num_tokens, self.top_k, self.num_experts) or 0


def agree(overflow_L: Tensor, world: World) -> int:
    """The most rows that a layer of any rank had too many; equal on all ranks.

    Sync: one collective and one read of the device.
    """
    worst = overflow_L.max().to(torch.int64)
    if world.size > 1:
        import torch.distributed as dist

        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return int(worst)


def exchange_of(model: torch.nn.Module) -> ep.Exchange:
    """The exchange that the MoE layers share."""
    return _layers(model)[0].exchange


def set_exchange(model: torch.nn.Module, exchange: ep.Exchange) -> None:
    """Gives every layer another exchange.  What was traced before still holds the earlier one."""
    for layer in _layers(model):
        layer.exchange = exchange


def _layers(model: torch.nn.Module) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


@contextmanager
def room_for_all(model: torch.nn.Module) -> Iterator[None]:
    """Inside: the exact exchange, which no routing overflows, for what runs in plain PyTorch.

    An evaluation has more balanced batches and less balanced ones; it must neither fail nor cut.
    Numerics: sums in slot order, at the origin, whatever the training does.
    """
    before = exchange_of(model)
    exact = ep.Exchange(before.group, before.size, before.rank)
    set_exchange(model, exact)
    try:
        yield
    finally:
        set_exchange(model, before)


def enough(exchange: ep.Exchange, missing: int, load: Load) -> float | None:
    """The capacity factor for ``missing`` more rows, with slack; None: room for every token.

    Example: 24 rows of room, 8 missing, 96 rows over 2 ranks -> 32 * 1.1 * 2 / 96 -> 0.75
    """
    balanced = load.num_tokens * load.top_k / exchange.size
    needed = (load.rows(exchange) + missing) * SLACK
    factor = math.ceil(needed / balanced * PARTS) / PARTS
    larger = replace(exchange, capacity_factor=factor)
    everything = replace(exchange, capacity_factor=None)
    return None if load.rows(larger) >= load.rows(everything) else factor


def describe(exchange: ep.Exchange, missing: int, load: Load) -> str:
    """What was needed and what there was, in one clause."""
    return (
        f"a rank had {missing} rows too many: for one peer ep.capacity_factor="
        f"{exchange.capacity_factor} has room for {load.rows(exchange)}"
    )


def advice(exchange: ep.Exchange, missing: int, load: Load) -> str:
    """What to set."""
    factor = enough(exchange, missing, load)
    return f"Use ep.capacity_factor={'none' if factor is None else f'{factor:g} or none'}"
