"""The parts that every block is made of.

Their tensors start uninitialised: :func:`interlace.model.init.init_weights` fills each of them.
Half precision comes from half-precision parameters, not from autocast.

Legend: B sequences, S tokens a sequence, D hidden, F feed-forward hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """``nn.Linear`` without bias, and without the fill that init_weights would overwrite."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(num_in, num_out, bias=False)

    def reset_parameters(self) -> None:
        """Leaves the weight to init_weights."""


class Embedding(nn.Embedding):
    """``nn.Embedding`` without the fill that init_weights would overwrite."""

    def reset_parameters(self) -> None:
        """Leaves the weight to init_weights."""


class RMSNorm(nn.Module):
    """Divides by the root mean square of the last dimension, computed in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class SwiGLU(nn.Module):
    """A dense feed-forward: ``down(silu(gate(x)) * up(x))``; w13 holds gate, then up."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w13 = Linear(dim, 2 * hidden_dim)
        self.w2 = Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)
