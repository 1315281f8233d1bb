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
from interlace.ep.backend import Sizes, expert_side_of
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
    def sizes(self) -> Sizes:
        """How long the index vectors are and how many rows they bring."""
        ex = self.exchange
        return ops.sizes_of(self.meta, self.top_k, ex.backend, ex.max_tokens)

    @property
    def out_rows(self) -> int:
        """Expert-major rows; in exact mode a size that depends on the routing."""
        return self.sizes.out_rows

    @property
    def sent_rows(self) -> int:
        """Rows that a combine delivers to this rank, one a slot."""
        return self.sizes.sent_rows

    @property
    def stage_rows(self) -> int:
        """Rows that a staged dispatch or a reduced combine delivers, one a token and rank."""
        return self.sizes.stage_rows


def plan(ids_TK: Tensor, num_experts: int, exchange: Exchange) -> Plan:
    """Works out the exchange of a layer from its chosen experts; a collective.

    Shapes: ids (T, K) int64 in [0, num_experts), no expert twice in a row.
    Sync:   the host in exact mode, none in padded mode.
    Raises: ValueError for ids of another kind, and for more than ``exchange.max_tokens`` tokens;
            in padded mode on CPU also where ranks expect other sizes.
    """
    if ids_TK.dim() != 2 or ids_TK.dtype != torch.int64:
        raise ValueError(
            f"ep.plan: ids is {ids_TK.dtype} {tuple(ids_TK.shape)}; expected int64 (T, K)."
        )
    exchange.num_local_experts(num_experts)
    if exchange.at_experts:
        expert_side_of(exchange.backend)
    num_tokens, top_k = ids_TK.shape
    rows = exchange.block_rows(num_tokens, top_k, num_experts)
    counts, offsets, live, overflow, meta = _ep.plan(
        ids_TK,
        num_experts,
        rows,
        exchange.group,
        exchange.backend,
        max_tokens=exchange.max_tokens,
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
              ranks.  With ``reduce="rank"`` each rank sums its own rows so, rounds, and the origin
              sums the ranks in ascending order, in float32, with one more rounding.
    """
    if not plan.exchange.at_experts:
        return _Combine.apply(y_RH, scores_TK, plan, *plan.meta)
    staged_SK = _Stage.apply(scores_TK, plan, *plan.meta)
    return _CombineAtExperts.apply(y_RH, staged_SK, scores_TK.detach(), plan, *plan.meta)


def _launch_dispatch(x: Tensor, scores: Tensor | None, plan: Plan, meta: Any) -> Any:
    ex = plan.exchange
    return _ep.dispatch_launch(
        x, scores, list(meta), None, plan.out_rows, ex.buffer_set, ex.group, ex.backend
    )


def _stage(x: Tensor, plan: Plan, meta: Any) -> Tensor:
    ex = plan.exchange
    launched = _ep.stage_launch(
        x, list(meta), None, plan.stage_rows, ex.buffer_set, ex.group, ex.backend
    )
    return _ep.wait(*launched)


def _bring_back(
    y: Tensor, plan: Plan, meta: Any, *, reduce: str, staged_scores: Tensor | None = None
) -> Tensor:
    """The rows that a combine delivers."""
    ex = plan.exchange
    rows = plan.sent_rows if reduce == "slot" else plan.stage_rows
    launched = _ep.combine_launch(
        y,
        list(meta),
        None,
        rows,
        ex.buffer_set,
        ex.group,
        ex.backend,
        scores=staged_scores,
        reduce=reduce,
    )
    return _ep.wait(*launched)


def _finish(rows: Tensor, scores: Tensor | None, plan: Plan, meta: Any, *, reduce: str) -> Tensor:
    backend = plan.exchange.backend
    return _ep.combine_finish(rows, scores, list(meta), plan.top_k, backend, reduce=reduce)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan, *meta: Tensor) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(*meta)
        return _ep.wait(*_launch_dispatch(x, None, plan, meta))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan, meta, reduce = ctx.plan, ctx.saved_tensors, ctx.plan.exchange.reduce
        rows = _bring_back(grad.contiguous(), plan, meta, reduce=reduce)
        return _finish(rows, None, plan, meta, reduce=reduce), None, *(None for _ in meta)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, scores: Tensor, plan: Plan, *meta: Tensor) -> Tensor:
        slots = _bring_back(y, plan, meta, reduce="slot")
        ctx.plan = plan
        ctx.save_for_backward(slots, scores, *meta)
        return _finish(slots, scores, plan, meta, reduce="slot")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan, (slots, scores, *meta) = ctx.plan, ctx.saved_tensors
        grad = grad.contiguous()
        pending, token = _launch_dispatch(grad, scores, plan, meta)
        g_scores = _ep.score_grad(slots, grad, meta, plan.top_k, plan.exchange.backend)
        return _ep.wait(pending, token), g_scores, None, *(None for _ in meta)


class _Stage(torch.autograd.Function):
    """Scores (T, K) to every rank that has an expert of their token: (S, K), as tokens travel.

    Exact both ways: of the gradients that ranks return for a score, one at most is not zero.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, plan: Plan, *meta: Tensor) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(*meta)
        return _stage(scores, plan, meta)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan, meta = ctx.plan, ctx.saved_tensors
        rows = _bring_back(grad.contiguous(), plan, meta, reduce="stage")
        return _finish(rows, None, plan, meta, reduce="rank"), None, *(None for _ in meta)


class _CombineAtExperts(torch.autograd.Function):
    """Keeps the experts' rows where they are; the gradient of a score is worked out beside them.

    ``scores`` (T, K) is without gradient: that goes through the ``staged`` ones.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, staged: Tensor, scores: Tensor, plan: Plan, *meta: Tensor
    ) -> Tensor:
        reduce = plan.exchange.reduce
        ctx.plan = plan
        ctx.save_for_backward(y, staged, *meta)
        if reduce == "slot":
            rows = _bring_back(y, plan, meta, reduce=reduce)
            return _finish(rows, scores, plan, meta, reduce=reduce)
        rows = _bring_back(y, plan, meta, reduce=reduce, staged_scores=staged)
        return _finish(rows, None, plan, meta, reduce=reduce)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan, (y, staged, *meta) = ctx.plan, ctx.saved_tensors
        stage = _stage(grad.contiguous(), plan, meta)
        g_y, g_staged = _ep.row_grad(y, stage, staged, meta, plan.exchange.backend)
        return g_y, g_staged, None, None, *(None for _ in meta)


__all__ = ["Plan", "combine", "dispatch", "ops", "plan"]
