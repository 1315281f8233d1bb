"""Which experts a token goes to, and with what weight.

Legend: T tokens, D hidden, E experts, K experts a token, n groups of experts.

Routing is computed in float32 whatever the type of the hidden states: a rounded score changes the
choice of an expert, not just its weight.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interlace.model.config import ModelConfig, skew_alpha

_SKEW_SEED = 0x5EED
_MASK_32 = 0xFFFFFFFF


class Choice(NamedTuple):
    """What a router decided.  Counts and balance see each token once and no padding."""

    ids_TK: Tensor  # int64
    scores_TK: Tensor  # float32
    counts_E: Tensor  # int64: tokens of each expert
    balance: Tensor | None  # float32, 0-d: this layer's share of the balance loss; None if off


class Router(nn.Module):
    """Scores of every expert, and a choice of K.

    deepseek_v3: sigmoid scores; ``expert_bias`` takes part in the choice but not in the weights,
    which are normalised and multiplied by ``route_scale``; only the best groups are eligible.
    qwen3_moe: softmax scores, normalised over the chosen experts.

    ``balance_price`` is given by the trainer before each step: what a unit of probability for an
    expert costs (see train/balance.py).  The balance loss is a plain sum over tokens, so that any
    split of a batch gives the same gradient.
    """

    expert_bias: Tensor | None
    balance_price: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Parameter(torch.empty(config.num_experts, config.dim))
        sigmoid = config.family == "deepseek_v3"
        # The trainer moves the bias between steps; a forward never does.
        bias_E = torch.zeros(config.num_experts, dtype=torch.float32) if sigmoid else None
        self.register_buffer("expert_bias", bias_E)
        has_price = config.balance_loss_weight > 0
        price_E = torch.zeros(config.num_experts, dtype=torch.float32) if has_price else None
        self.register_buffer("balance_price", price_E, persistent=False)

    def forward(self, x_TD: Tensor, live_T: Tensor | None = None) -> Choice:
        """``live_T`` (bool) is false at padding; None: there is none."""
        c = self.config
        logits_TE = F.linear(x_TD.float(), self.gate.float())
        if self.expert_bias is None:
            scores_TE = logits_TE.softmax(dim=-1)
            scale, choice_TE = 1.0, scores_TE
        else:
            scores_TE = logits_TE.sigmoid()
            scale, choice_TE = c.route_scale, scores_TE + self.expert_bias
        ids_TK = self._choose(choice_TE.detach())
        scores_TK = scores_TE.gather(1, ids_TK)
        balance = self._balance(scores_TE, live_T)
        # The small number keeps a token whose scores all underflowed from dividing by zero.
        scores_TK = scores_TK / (scores_TK.sum(dim=-1, keepdim=True) + 1e-20) * scale
        # Compared and summed, not bincount: that has a size which depends on the data.
        experts_E = torch.arange(c.num_experts, device=ids_TK.device)
        counted_TK = ids_TK
        if live_T is not None:
            counted_TK = ids_TK.masked_fill(~live_T.unsqueeze(-1), -1)
        counts_E = (counted_TK.reshape(-1, 1) == experts_E).sum(dim=0)
        return Choice(ids_TK, scores_TK, counts_E, balance)

    def _balance(self, scores_TE: Tensor, live_T: Tensor | None) -> Tensor | None:
        """Sum over tokens and experts of probability times price."""
        if self.balance_price is None:
            return None
        share_TE = scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + 1e-20)
        if live_T is not None:
            share_TE = share_TE * live_T.unsqueeze(-1)
        return (share_TE.sum(dim=0) * self.balance_price).sum()

    def _choose(self, choice_TE: Tensor) -> Tensor:
        c = self.config
        if c.routing == "balanced":
            return balanced_ids(choice_TE.shape[0], c.num_experts, c.top_k, choice_TE.device)
        alpha = skew_alpha(c.routing)
        if alpha is not None:
            num_tokens = choice_TE.shape[0]
            return skewed_ids(num_tokens, c.num_experts, c.top_k, alpha, choice_TE.device)
        if c.num_groups > 1:
            choice_TE = limit_groups(choice_TE, c.num_groups, c.top_groups)
        return choice_TE.topk(c.top_k, dim=-1).indices


def limit_groups(choice_TE: Tensor, num_groups: int, top_groups: int) -> Tensor:
    """Scores of experts outside of the best groups become -inf.

    A group counts as the sum of its best two scores.
    """
    choice_Tnm = choice_TE.unflatten(1, (num_groups, -1))
    best = min(2, choice_Tnm.shape[-1])
    group_Tn = choice_Tnm.topk(best, dim=-1).values.sum(dim=-1)
    chosen = group_Tn.topk(top_groups, dim=-1).indices
    groups_n = torch.arange(num_groups, device=chosen.device)
    eligible_Tn = (chosen.unsqueeze(-1) == groups_n).any(dim=1)
    return choice_Tnm.masked_fill(~eligible_Tn.unsqueeze(-1), -math.inf).flatten(1)


def balanced_ids(num_tokens: int, num_experts: int, top_k: int, device: torch.device) -> Tensor:
    """Slot k of token t goes to expert (t * K + k) mod E: equal counts where E divides T * K."""
    slots = torch.arange(num_tokens * top_k, device=device)
    return (slots % num_experts).unflatten(0, (num_tokens, top_k))


def skewed_ids(
    num_tokens: int, num_experts: int, top_k: int, alpha: float, device: torch.device
) -> Tensor:
    """K different experts a token, expert e drawn with weight (e + 1) ** -alpha.

    The K largest of log weight + Gumbel noise are a draw without replacement.  The noise is a hash
    of (token, expert): no generator has a state, and every run draws alike.
    """
    token_T1 = torch.arange(num_tokens, device=device).unsqueeze(1)
    expert_E = torch.arange(num_experts, device=device)
    noise_TE = _uniform(token_T1 * num_experts + expert_E + (_SKEW_SEED << 32))
    gumbel_TE = -torch.log(-torch.log(noise_TE))
    weight_E = -alpha * torch.log(expert_E.float() + 1.0)
    return (gumbel_TE + weight_E).topk(top_k, dim=-1).indices


def _uniform(numbers: Tensor) -> Tensor:
    """A float32 in (0, 1), never 0 or 1, from the bits of each int64."""
    h = _mix(_mix(numbers & _MASK_32) ^ (numbers >> 32))
    return ((h >> 9).float() + 0.5) * 2.0**-23


def _mix(h: Tensor) -> Tensor:
    """A bijection of 32-bit numbers; multipliers below 2**31 keep int64 from overflowing."""
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK_32
    h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & _MASK_32
    return h ^ (h >> 16)
