"""The transformer of both families.

Legend: B sequences, S tokens a sequence, D hidden, V vocabulary, E experts, L MoE layers,
C document boundaries a sequence, r half of the rotated channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from interlace import ep
from interlace.model.attention import (
    GroupedAttention,
    LatentAttention,
    activate_flash_attention,
    attention_bounds,
    rope_tables,
)
from interlace.model.config import ModelConfig, check_model
from interlace.model.layers import Embedding, Linear, RMSNorm, SwiGLU
from interlace.model.moe import MoE


class Routed(NamedTuple):
    """What the MoE layers of one forward did: tokens sent to each expert (padding left out), rows
    that did not fit, and the balance loss."""

    counts_LE: Tensor  # int64
    overflow_L: Tensor  # int32
    balance: Tensor | None = None  # float32, 0-d, summed over layers; None if off


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``.

    Every input has the sequences in dimension 0, and nothing but the outputs changes: a block may
    be run again for its backward, or on a part of the batch.
    """

    def __init__(self, config: ModelConfig, index: int, exchange: ep.Exchange) -> None:
        super().__init__()
        latent = config.family == "deepseek_v3"
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = LatentAttention(config) if latent else GroupedAttention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.is_moe = index >= config.num_dense_layers
        if self.is_moe:
            self.moe = MoE(config, exchange)
        else:
            self.ffn = SwiGLU(config.dim, config.dense_hidden_dim)

    def forward(
        self,
        x_BSD: Tensor,
        cos_BSr: Tensor,
        sin_BSr: Tensor,
        bounds: Tensor,
        live_BS: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor | None] | None]:
        """-> x_BSD, (counts_E, overflow, balance) or None in a dense layer."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos_BSr, sin_BSr, bounds)
        if not self.is_moe:
            return x_BSD + self.ffn(self.ffn_norm(x_BSD)), None
        out_BSD, *routed = self.moe(self.ffn_norm(x_BSD), live_BS)
        return x_BSD + out_BSD, tuple(routed)


class MoETransformer(nn.Module):
    """Embedding, blocks, norm, head.  The head is apart, for losses that want it."""

    def __init__(self, config: ModelConfig, exchange: ep.Exchange) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, i, exchange) for i in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = Linear(config.dim, config.vocab_size)

    def forward(
        self, tokens_BS: Tensor, positions_BS: Tensor, cu_seqlens_BC: Tensor
    ) -> tuple[Tensor, Routed]:
        """-> hidden_BSD after the norm, and what the MoE layers did."""
        c = self.config
        x_BSD = self.embedding(tokens_BS)
        cos_BSr, sin_BSr = rope_tables(positions_BS, c.rope_dim, c.rope_theta)
        bounds = attention_bounds(x_BSD, cu_seqlens_BC)
        live_BS = positions_BS >= 0
        moe_layers = []
        for layer in self.layers:
            x_BSD, routed = layer(x_BSD, cos_BSr, sin_BSr, bounds, live_BS)
            if routed is not None:
                moe_layers.append(routed)
        counts, overflows, shares = zip(*moe_layers, strict=True)
        balance = None if shares[0] is None else torch.stack(shares).sum()
        return self.norm(x_BSD), Routed(torch.stack(counts), torch.cat(overflows), balance)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V), in the type of the parameters."""
        return self.head(hidden)

    def expert_parameters(self) -> list[str]:
        """Names of the parameters with one slice an expert, local experts in dimension 0."""
        return [name for name, _ in self.named_parameters() if is_expert_parameter(name)]


def is_expert_parameter(name: str) -> bool:
    """Whether a parameter of that name is split over the expert-parallel ranks."""
    return ".moe.experts." in name


def build_model(config: ModelConfig, exchange: ep.Exchange) -> MoETransformer:
    """The model on torch's default device and in its default type, not yet initialised.

    Raises: ValueError with every setting that cannot work, or if the exchange does not divide
            the experts.
    """
    problems = check_model(config)
    if problems:
        raise ValueError("\n".join(problems))
    if torch.get_default_device().type == "cuda":
        activate_flash_attention(config.qk_head_dim)
    return MoETransformer(config, exchange)
