"""Load balancing without a loss: the bias that steers which experts are chosen.

Legend: E experts of one layer; leading dimensions (layers) may come before it.
"""

from __future__ import annotations

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
