"""The loss of a microbatch: a sum, so that the caller decides what to divide by."""

from __future__ import annotations

from torch import Tensor

from interlace.kernels.cross_entropy import cross_entropy
from interlace.model.transformer import MoETransformer


def cross_entropy_sum(model: MoETransformer, hidden_BSD: Tensor, labels_BS: Tensor) -> Tensor:
    """Cross entropy summed over the valid tokens: a float32 scalar, 0 where none is valid."""
    return cross_entropy(model.logits(hidden_BSD).flatten(0, 1), labels_BS.flatten()).sum()
