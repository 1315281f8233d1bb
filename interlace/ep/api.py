"""What a model calls: ``plan``, ``dispatch``, ``combine``.

plan = ep.plan(ids_TK, num_experts, exchange)
rows_RH = ep.dispatch(x_TH, plan)              # rows of my experts, sorted by expert
y_RH = experts(rows_RH, plan.offsets)          # grouped_mm(..., plan.offsets[1:])
out_TH = ep.combine(y_RH, scores_TK, plan)     # weighted sum over the choices, at the origin
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interlace.ep import ops
from interlace.ep.exchange import Exchange

_ep = torch.ops.ep


@dataclass(frozen=True)
class Plan:
    """Where every row goes, shared by forward, recompute and backward.

    Shapes: counts (e,) int64 live rows of each local expert; offsets (e+1,) int32 starts;
            live (1,) int64 = offsets[-1]; overflow (1,) int32 rows that did not fit, 0 if all did.
    """

    counts: Tensor
    offsets: Tensor
    live: Tensor
    overflow: Tensor
    meta: list[Tensor]
    num_tokens: int
    top_k: int
    exchange: Exchange

    @property
    def out_rows(self) -> int:
        """Expert-major rows; in exact mode a size that depends on the routing."""
        return self.meta[3].shape[0]

    @property
    def sent_rows(self) -> int:
        """Rows of the send buffer, to which a combine returns."""
        return self.meta[0].shape[0]


def plan(ids_TK: Tensor, num_experts: int, exchange: Exchange) -> Plan:
    """Works out the exchange of a layer from its chosen experts; a collective.

    Shapes: ids (T, K) int64 in [0, num_experts), no expert twice in a row.
    Sync:   the host in exact mode, none in padded mode.
    """
    if ids_TK.dim() != 2 or ids_TK.dtype != torch.int64:
        raise ValueError(
            f"ep.plan: ids is {ids_TK.dtype} {tuple(ids_TK.shape)}; expected int64 (T, K)."
        )
    exchange.num_local_experts(num_experts)
    num_tokens, top_k = ids_TK.shape
    rows = exchange.block_rows(num_tokens, top_k, num_experts)
    counts, offsets, live, overflow, meta = _ep.plan(
        ids_TK, num_experts, rows, exchange.group, exchange.backend
    )
    return Plan(counts, offsets, live, overflow, meta, num_tokens, top_k, exchange)


def dispatch(x_TH: Tensor, plan: Plan) -> Tensor:
    """x (T, H) -> rows (R, H) of this rank's experts, sorted by expert, then source rank and slot.

    Numerics: bit-exact copies; the gradient of x is summed in slot order, in float32.
              Rows past ``plan.offsets[-1]`` are garbage.
    """
    return _Dispatch.apply(x_TH, plan, *plan.meta)


def combine(y_RH: Tensor, scores_TK: Tensor, plan: Plan) -> Tensor:
    """y (R, H), scores (T, K) float32 -> (T, H): the sum over k of score * row.

    Numerics: float32 in slot order k = 0..K-1, one rounding: the same bits whatever the number of
              ranks.
    """
    return _Combine.apply(y_RH, scores_TK, plan, *plan.meta)


def _launch_dispatch(x: Tensor, scores: Tensor | None, plan: Plan, meta: Any) -> Any:
    ex = plan.exchange
    return _ep.dispatch_launch(
        x, scores, list(meta), None, plan.out_rows, ex.buffer_set, ex.group, ex.backend
    )


def _launch_combine(y: Tensor, plan: Plan, meta: Any) -> Any:
    ex = plan.exchange
    return _ep.combine_launch(
        y, list(meta), None, plan.sent_rows, ex.buffer_set, ex.group, ex.backend
    )


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan, *meta: Tensor) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(*meta)
        return _ep.wait(*_launch_dispatch(x, None, plan, meta))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan, meta = ctx.plan, ctx.saved_tensors
        slots = _ep.wait(*_launch_combine(grad.contiguous(), plan, meta))
        gx = _ep.combine_finish(slots, None, list(meta), plan.top_k, plan.exchange.backend)
        return gx, None, *(None for _ in meta)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, scores: Tensor, plan: Plan, *meta: Tensor) -> Tensor:
        slots = _ep.wait(*_launch_combine(y, plan, meta))
        ctx.plan = plan
        ctx.save_for_backward(slots, scores, *meta)
        return _ep.combine_finish(slots, scores, list(meta), plan.top_k, plan.exchange.backend)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan, (slots, scores, *meta) = ctx.plan, ctx.saved_tensors
        grad = grad.contiguous()
        pending, token = _launch_dispatch(grad, scores, plan, meta)
        g_scores = _ep.score_grad(slots, grad, meta, plan.top_k, plan.exchange.backend)
        return _ep.wait(pending, token), g_scores, None, *(None for _ in meta)


__all__ = ["Plan", "combine", "dispatch", "ops", "plan"]
