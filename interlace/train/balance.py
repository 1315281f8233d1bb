"""Load balancing: the bias that steers which experts are chosen, the prices of the balance loss.

Legend: E experts of one layer; leading dimensions (layers) may come before it.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor


@torch.no_grad()
def update_expert_bias_(bias_E: Tensor, counts_E: Tensor, speed: float) -> None:
    """The rule of DeepSeek-V3: raise the bias of idle experts, lower that of busy ones, by speed.

    Call it once per optimizer step, with counts summed over all microbatches and all ranks whose
    tokens were routed, and not for a step that was skipped.
    Shapes:   bias_E fp32, in place; counts_E int64.
    Numerics: exact integer comparison with the mean; an expert at the mean keeps its bias.
    Example:  counts 1, 3, 2 and speed 0.1 -> bias changes by +0.1, -0.1, 0.
    Source:   DeepSeek-V3 report, section 2.1.2.
    """
    if bias_E.dtype != torch.float32 or counts_E.is_floating_point():
        raise TypeError(
            f"update_expert_bias_: expected an fp32 bias and integer counts, found {bias_E.dtype} "
            f"and {counts_E.dtype}; keep the bias in fp32 when casting the model."
        )
    if bias_E.shape != counts_E.shape:
        raise ValueError(
            f"update_expert_bias_: the bias has shape {tuple(bias_E.shape)}, the counts "
            f"{tuple(counts_E.shape)}; give the counts of the same layer, all global experts."
        )
    counts_E = counts_E.long()
    # sign(mean - count) without a division
    direction_E = (counts_E.sum(-1, keepdim=True) - counts_E * counts_E.shape[-1]).sign()
    bias_E.add_(direction_E.to(bias_E.dtype), alpha=speed)


@torch.no_grad()
def set_prices_(
    model: torch.nn.Module,
    load_LE: Tensor,
    num_live: Tensor,
    weight: float,
    left_out: Set[int] = frozenset(),
) -> None:
    """Gives each router what a unit of probability costs in the balance loss of the coming step.

    The loss of a layer is ``weight * E * sum_e load_e * share_e``: ``load_e`` is expert e's part of
    the tokens routed in the last update, over all ranks and microbatches; ``share_e`` the mean
    probability that this step's tokens give it.  An even layer costs ``weight``; layers are added.
    With the load given instead of computed on the way, the loss is a plain sum over tokens: the
    same gradient for any split into ranks, microbatches and chunks, each token once, no padding.
    Before the first update the load is even, and so has no gradient.
    Shapes: load_LE int64, maybe empty; num_live 0-d: tokens of this step on all ranks.
    """
    routers = [m for m in model.modules() if getattr(m, "balance_price", None) is not None]
    for layer, router in enumerate(routers):
        price_E = router.balance_price
        if layer in left_out:
            price_E.zero_()
            continue
        num_experts = len(price_E)
        part_E = torch.full_like(price_E, 1 / num_experts)
        if load_LE.numel():
            load_E = load_LE[layer].to(price_E.device, torch.float32)
            part_E = torch.where(load_E.sum() > 0, load_E / load_E.sum().clamp(min=1), part_E)
        scale = weight * num_experts / num_live.to(price_E.device, torch.float32).clamp(min=1)
        price_E.copy_(part_E * scale)
