"""A mixture-of-experts feed-forward: route, exchange, compute, exchange back.

Legend: B sequences, S tokens a sequence, T = B * S, D hidden, F expert hidden, E experts,
e experts of this rank, K experts a token, R rows sorted by expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interlace import ep
from interlace.kernels.grouped_mm import grouped_mm
from interlace.model.config import ModelConfig
from interlace.model.layers import SwiGLU
from interlace.model.router import Router

MoEOutput = tuple[Tensor, Tensor, Tensor, Tensor | None]


class Experts(nn.Module):
    """The SwiGLU feed-forwards of this rank's experts; w13 holds gate, then up."""

    def __init__(self, num_local: int, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(num_local, dim, 2 * hidden_dim))
        self.w2 = nn.Parameter(torch.empty(num_local, hidden_dim, dim))

    def forward(self, x_RD: Tensor, ends_e: Tensor) -> Tensor:
        gate_RF, up_RF = grouped_mm(x_RD, self.w13, ends_e).chunk(2, dim=-1)
        return grouped_mm(F.silu(gate_RF) * up_RF, self.w2, ends_e)


class MoE(nn.Module):
    """Routed experts behind the token exchange, and the shared experts beside them."""

    def __init__(self, config: ModelConfig, exchange: ep.Exchange) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.exchange = exchange
        self.router = Router(config)
        num_local = exchange.num_local_experts(config.num_experts)
        self.experts = Experts(num_local, config.dim, config.expert_hidden_dim)
        shared_dim = config.num_shared_experts * config.expert_hidden_dim
        self.shared = SwiGLU(config.dim, shared_dim) if shared_dim else None

    def forward(self, x_BSD: Tensor, live_BS: Tensor | None = None) -> MoEOutput:
        """-> out_BSD; counts_E: tokens that this rank sends to each expert; overflow (1,) int32;
        the layer's share of the balance loss, None if that is off.

        Padding (``live_BS`` false) is computed like any token and counted nowhere.
        """
        x_TD = x_BSD.flatten(0, 1)
        live_T = None if live_BS is None else live_BS.flatten()
        ids_TK, scores_TK, counts_E, balance = self.router(x_TD, live_T)
        plan = ep.plan(ids_TK, self.num_experts, self.exchange)
        rows_RD = ep.dispatch(x_TD, plan)
        rows_RD = self.experts(rows_RD, plan.offsets[1:])
        out_TD = ep.combine(rows_RD, scores_TK, plan)
        if self.shared is not None:
            out_TD = out_TD + self.shared(x_TD)
        return out_TD.unflatten(0, x_BSD.shape[:2]), counts_E, plan.overflow, balance
