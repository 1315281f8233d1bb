"""The loss of a microbatch: a sum, so that the caller decides what to divide by."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from interlace.model.batch import IGNORED
from interlace.model.transformer import MoETransformer


def cross_entropy_sum(model: MoETransformer, hidden_BSD: Tensor, labels_BS: Tensor) -> Tensor:
    """Cross entropy summed over the valid tokens: a float32 scalar, 0 where none is valid."""
    logits_TV = model.logits(hidden_BSD).flatten(0, 1).float()
    return F.cross_entropy(logits_TV, labels_BS.flatten(), ignore_index=IGNORED, reduction="sum")
