"""One gradient norm over dense and expert parameters, and clipping by it.

Legend: W ranks of the EP group, e local experts.

Dense gradients are equal on all ranks and count once.  Expert gradients are sharded over the EP
group (local experts in dim 0), so the p-th powers of their norms are summed over it.  All sums run
in fp64 in a fixed order and each expert is measured by itself, so that the norm does not depend on
how experts are placed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Gather = Callable[[Tensor], Tensor]  # my (1,) value -> the values of all W ranks, in rank order


def global_norm(
    grads: Mapping[str, Tensor],
    expert_names: Set[str],
    *,
    expert_group: Gather | dist.ProcessGroup | None = None,
    norm_type: float = 2.0,
) -> Tensor:
    """The norm of the whole model's gradient: fp32, 0-d, the same on all ranks.

    ``expert_group`` is the EP process group, or a function that gathers one value of each of its
    ranks; None means that all experts are here.  ``norm_type`` may be infinite.
    Numerics: norms in fp32 per tensor, then fp64.  A NaN or infinity anywhere shows in the result
              on every rank, also with the infinity norm (a MAX reduction may drop NaN).
    Sync:     none on the host; one collective with a group, to be called by all of its ranks.
    Example:  expert gradients of squared norms 20 and 100 on two ranks -> sqrt(120).
    """
    if not norm_type > 0:
        raise ValueError(f"global_norm: norm_type={norm_type} must be above 0; use 2.0 or inf.")
    if unknown := sorted(expert_names - grads.keys()):
        raise ValueError(
            f"global_norm: no gradient for expert parameters {', '.join(unknown[:3])} "
            f"({len(unknown)} in all); pass zeros for experts without tokens."
        )
    dense = [grad for name, grad in grads.items() if name not in expert_names]
    experts = [one for name in grads if name in expert_names for one in grads[name].unbind(0)]
    device = next(iter(grads.values())).device if grads else torch.device("cpu")
    parts = [
        _power_sum(dense, norm_type, device),
        *_gathered(_power_sum(experts, norm_type, device), expert_group).unbind(0),
    ]
    return _root(torch.stack(parts), norm_type).float()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What to multiply gradients by so that ``norm`` becomes at most ``max_norm``: float32, 0-d.

    Sync: none; below ``max_norm`` the factor is exactly 1.  A norm that is not finite gives NaN or
    zero: check it (by the caller's policy) before the update.
    """
    if not max_norm > 0:
        raise ValueError(
            f"clip_factor: max_norm={max_norm} must be above 0; leave it out for no clipping."
        )
    return (max_norm / norm).clamp(max=1.0)


def scale_(grads: Mapping[str, Tensor], factor: Tensor) -> None:
    """Multiplies all gradients in place; a factor of 1 changes no bit."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}  # mixed lists take the slow path
    for grad in grads.values():
        by_dtype.setdefault(grad.dtype, []).append(grad)
    for tensors in by_dtype.values():
        torch.ops.aten._foreach_mul_.Tensor(tensors, factor)


def _power_sum(tensors: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Sum of the p-th powers of all elements (the maximum for infinity), fp64, 0-d."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(torch.ops.aten._foreach_norm.Scalar(tensors, norm_type, torch.float32))
    norms = norms.double()
    return norms.max() if norm_type == float("inf") else norms.pow(norm_type).sum()


def _root(powers: Tensor, norm_type: float) -> Tensor:
    if norm_type == float("inf"):
        return powers.max()
    return powers.sum().pow(1.0 / norm_type)


def _gathered(value: Tensor, group: Any) -> Tensor:
    """The values of all ranks in rank order: a sum over them is the same everywhere."""
    mine = value.reshape(1)
    if group is None:
        return mine
    if not isinstance(group, dist.ProcessGroup):
        return group(mine)
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)  # the one-tensor form has another name by version
    return torch.cat(parts)
