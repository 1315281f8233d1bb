"""Is a step fit to be applied?  All ranks agree, and the message names parameter and rank.

Legend: P parameters.

The decision reads the loss and the gradient norm, which are the same on all ranks and hold every
NaN or infinity of any rank.  Where a bad number came from is gone once gradients are summed over
ranks, so each rank keeps the largest element of its own from before, on the device, unread while
all is well.  Gradients that are not summed (experts without replicas) are looked at when needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass

import torch
from torch import Tensor

_MOST_SHOWN = 4


@dataclass(frozen=True)
class Local:
    """One rank's own numbers before any sum: its loss, and the largest element by parameter."""

    loss: Tensor
    names: tuple[str, ...]
    peaks_P: Tensor


@dataclass(frozen=True)
class Fault:
    """Where a number is not finite.  ``where`` is a parameter, maybe with its expert, or "loss".

    An expert's gradient (``is_expert``) is made of tokens of all ranks that exchange with this one:
    the cause may lie there.
    """

    rank: int
    where: str
    value: float
    is_expert: bool = False


def look(grads: Mapping[str, Tensor], loss: Tensor) -> Local:
    """Takes the measure of the gradients that are about to be summed over ranks.  No sync."""
    return Local(loss.detach().clone(), tuple(grads), _peaks(list(grads.values()), loss))


def _peaks(grads: list[Tensor], like: Tensor) -> Tensor:
    if not grads:
        return like.new_zeros(0)
    return torch.stack(torch.ops.aten._foreach_norm.Scalar(grads, math.inf, torch.float32))


def is_finite(loss: Tensor, grad_norm: Tensor) -> bool:
    """Whether a step may be applied; reads two numbers that are equal on all ranks (sync)."""
    return bool(torch.isfinite(torch.stack((loss.float(), grad_norm.float()))).all())


def my_faults(
    local: Local, grads: Mapping[str, Tensor], expert_names: Set[str], rank: int, first_expert: int
) -> list[Fault]:
    """What this rank put in: parameters in the model's order, experts by their global number."""
    found = []
    if not math.isfinite(loss := local.loss.item()):
        found.append(Fault(rank, "loss", loss))
    alone = [name for name in grads if name not in local.names]
    peaks = dict(zip(local.names, local.peaks_P.tolist(), strict=True))
    peaks |= zip(alone, _peaks([grads[n] for n in alone], local.loss).tolist(), strict=True)
    for name, grad in grads.items():
        if math.isfinite(peak := peaks[name]):
            continue
        where = name
        if name in expert_names:
            bad = [i for i, one in enumerate(grad) if not bool(torch.isfinite(one).all())]
            where += f" (expert {', '.join(str(first_expert + i) for i in bad)})" if bad else ""
        found.append(Fault(rank, where, peak, name in expert_names))
    return found


def describe(faults: list[Fault], loss: float, grad_norm: float) -> str:
    """One line: the norm, then who brought it about, at most a few of each rank.

    First come ranks whose own loss or shared parameters are bad; others may have caught it from
    them in the exchange.
    """
    head = f"the gradient norm is {grad_norm} (loss {loss})"
    if not faults:
        return f"{head}, though every element is finite: the norm is beyond float32"
    shown: list[str] = []
    sources = {f.rank for f in faults if not f.is_expert}
    for rank in sorted({f.rank for f in faults}, key=lambda rank: (rank not in sources, rank)):
        mine = [f for f in faults if f.rank == rank]
        names = ", ".join(f"{f.where} is {f.value}" for f in mine[:_MOST_SHOWN])
        more = f" and {len(mine) - _MOST_SHOWN} more" if len(mine) > _MOST_SHOWN else ""
        shown.append(f"on rank {rank} {names}{more}")
    return f"{head}: {'; '.join(shown)}"
