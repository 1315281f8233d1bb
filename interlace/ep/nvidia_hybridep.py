"""The ``hybridep_nvidia`` backend: what ``hybridep`` does, carried by NVIDIA's HybridEP.

Written against the documented interface of ``deep_ep.HybridEPBuffer`` and tested on CPU with a
stand-in for it (``tests/fake_deep_ep.py``); **not yet run with the package**, which is built from
source on a machine with nvcc and GPUs.

Legend: T tokens, K choices a token, M the most tokens of a rank, W ranks, E experts, H hidden,
        R = max(W * block_rows, M) + 1 expert-major rows.

For ``ep.reduce=rank`` with scores at the experts, the only way that the package has:

    dispatch   dispatch_with_permute(x): one copy a rank, expanded there, sorted by expert, then
               source rank, then token.  Its handle serves whatever follows of the same plan
    stage      of rows: the same with the handle; of scores: as the package's probabilities, beside
               narrow rows that nobody reads.  Both arrive one an expert-major row
    reduce     combine_with_unpermute(score * row): each rank sums its rows of a token, the token's
               rank sums those
    return     of gradients of scores: the same with probabilities

Numerics: bfloat16 rows.  A combine rounds score * row first, which ``hybridep`` does not; then each
rank's sum, in expert order, and the sum of ranks.  Scores and their gradients are exact copies.

Capacity is a rank's in total, not a peer's: fewer rows are cut than by ``hybridep``, and those are
the rows of its highest experts.  The counts of a plan are exchanged here, so that offsets and
overflow are known before rows are sent; should the package cut rows that the plan has room for, its
flag turns a delivered row into NaN.  There is a row of room more than the plan gives out, because
versions differ on whether an exact fit is an overflow.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from interlace.ep import transport
from interlace.ep.backend import Backend, ExpertSide, Sizes, register_backend
from interlace.ep.nvidia_buffers import (
    NAME,
    handle_of,
    hybrid_ep_buffer,
    launch,
    new_ticket,
    ticket_of,
)
from interlace.ep.transport import Group
from interlace.kernels.row_grad import row_grad
from interlace.kernels.slot_reduce import slot_reduce

(
    IDS,  # (T, K): the chosen experts
    ROUTING,  # (M, E) bool: whether token t goes to expert j; no token from T on
    ROW,  # (R,): r for a live row, -1 for a dead one
    LIVE,  # (1,): expert-major rows
    TICKET,  # (1,) on the host: the number that leads to the plan's handles
) = range(5)
SCORE_WIDTH = 512  # of the rows beside scores; some versions take nothing narrower
DEVICES = ("cuda",)


def plan(
    ids_TK: Tensor, num_experts: int, block_rows: int | None, group: Group, max_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Returns counts_e int64, offsets int32 (e+1,), live (1,), overflow (1,) and the index vectors.

    Collective: all ranks of the group call it in the same order, with the same ``max_tokens``.
    Sync: none on CUDA; safe under capture once it ran before.
    Raises: ValueError in exact mode, without the package, and where there are no ranks on CUDA.
    """
    room = _room(block_rows, group, max_tokens)
    if group.kind != "process" or group.size < 2 or ids_TK.device.type not in DEVICES:
        raise ValueError(
            f"ep.backend={NAME}: group {group.name!r} is of kind {group.kind} with {group.size} "
            f"rank(s), on {ids_TK.device.type}; expected at least two processes with a GPU each. "
            "Start those, or use ep.backend=hybridep."
        )
    hybrid_ep_buffer()
    routing_ME = ids_TK.new_zeros(max_tokens, num_experts, dtype=torch.bool)
    routing_ME[: ids_TK.shape[0]].scatter_(1, ids_TK, True)
    sent_E = routing_ME.sum(0)
    arrived_E = torch.empty_like(sent_E)
    transport.all_to_all(arrived_E, sent_E, group, counts=True)()
    ends_e = arrived_E.view(group.size, -1).sum(0).cumsum(0)
    offsets = torch.nn.functional.pad(ends_e, (1, 0)).clamp(max=room)
    over = (ends_e[-1:] - room).clamp(min=0)
    overflow = (-(-over // group.size)).int()  # rows a peer, as everywhere
    live = offsets[-1:].clone()
    row_R = torch.arange(room + 1, device=ids_TK.device)
    row_R.masked_fill_(row_R >= live, -1)
    meta = [ids_TK.clone(), routing_ME, row_R, live.clone(), new_ticket(overflow.clone())]
    return offsets.diff(), offsets.int(), live, overflow, meta


def _room(block_rows: int | None, group: Group, max_tokens: int) -> int:
    if block_rows is None:
        raise ValueError(
            f"ep.backend={NAME}: its rows have static shapes and no exact mode. Set ep.padded, or "
            "use ep.backend=alltoall."
        )
    return max(group.size * block_rows, max_tokens)


def meta_fake(
    ids_TK: Tensor, num_experts: int, block_rows: int | None, group: Group, max_tokens: int
) -> list[Tensor]:
    """The index vectors without values."""
    return [
        torch.empty_like(ids_TK),
        ids_TK.new_empty(max_tokens, num_experts, dtype=torch.bool),
        ids_TK.new_empty(_room(block_rows, group, max_tokens) + 1),
        ids_TK.new_empty(1),
        torch.empty(1, dtype=torch.int64, device="cpu"),
    ]


def sizes(meta: list[Tensor], top_k: int, max_tokens: int | None) -> Sizes:
    """Read from the shapes of the index vectors; staged rows are expert-major ones."""
    num_tokens, rows = meta[IDS].shape[0], meta[ROW].shape[0]
    return Sizes(num_tokens * top_k, rows, num_tokens, rows)


def dispatch_launch(
    x_TH: Tensor, scores_TK: Tensor | None, meta: list[Tensor], out_rows: int, **where: Any
) -> tuple[Tensor, Tensor]:
    """Sends each token once to each of its ranks and delivers it once to each of its experts."""
    if scores_TK is not None:
        _refuse_slots()
    hidden = x_TH.shape[1]
    if x_TH.dtype != torch.bfloat16 or hidden % 16:
        raise ValueError(
            f"ep.backend={NAME}: rows are {hidden} x {x_TH.dtype}, {hidden * x_TH.itemsize} bytes; "
            "expected bfloat16 and a multiple of 16 elements, so that bytes are one of 16 too. "
            "Change model.dim or training.dtype, or use ep.backend=hybridep."
        )
    return _launch(
        lambda carrier: _dispatch(carrier, x_TH, meta)[0],
        hidden, (out_rows, hidden), x_TH, meta, **where,
    )  # fmt: skip


def stage_launch(
    x: Tensor, meta: list[Tensor], out_rows: int, **where: Any
) -> tuple[Tensor, Tensor]:
    """Rows (T, H) as a dispatch; scores (T, K), float32, to column 0 of (R, K), 0 elsewhere."""
    if x.dtype != torch.float32:
        return dispatch_launch(x, None, meta, out_rows, **where)

    def send(carrier: Any) -> Tensor:
        probs_ME = x.new_zeros(meta[ROUTING].shape)
        probs_ME[: x.shape[0]].scatter_(1, meta[IDS], x)
        beside = x.new_zeros(x.shape[0], SCORE_WIDTH, dtype=torch.bfloat16)
        arrived_R = _dispatch(carrier, beside, meta, probs_ME)[1]
        staged_RK = x.new_zeros(out_rows, x.shape[1])
        staged_RK[:, 0] = arrived_R.masked_fill(meta[ROW] < 0, 0.0)
        return staged_RK

    return _launch(send, SCORE_WIDTH, (out_rows, x.shape[1]), x, meta, **where)


def _dispatch(
    carrier: Any, x: Tensor, meta: list[Tensor], probs_ME: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rows and their probabilities; the first of a plan and width makes its handle."""
    ticket = ticket_of(meta[TICKET])
    known = ticket.handles.get(x.shape[1])
    rows, probs_R, _, _, handle = carrier.dispatch_with_permute(
        hidden=_of_rows(x.contiguous(), meta[ROUTING].shape[0]),
        routing_map=meta[ROUTING] if known is None else None,
        probs=probs_ME,
        num_permuted_tokens=meta[ROW].shape[0],
        non_blocking=True,
        handle=known,
    )
    if known is None:
        flag = handle[-1]
        if not isinstance(flag, Tensor):
            raise ValueError(
                f"ep.backend={NAME}: the handle of this deep_ep ends in {type(flag).__name__}, not "
                "in an overflow flag, so rows would be lost in silence; use a later version."
            )
        ticket.handles[x.shape[1]] = handle
        unsaid = (flag.reshape(-1)[:1] != 0) & (ticket.overflow == 0)
        rows[:1].masked_fill_(unsaid, float("nan"))
    return rows, probs_R


def reduce_launch(
    y_RH: Tensor, scores_RK: Tensor | None, meta: list[Tensor], out_rows: int, **where: Any
) -> tuple[Tensor, Tensor]:
    """Sums the rows of each token, times their staged scores if given; delivers (R, H), T used.

    Dead rows count as zero, whatever they hold.
    """
    hidden = y_RH.shape[1]

    def send(carrier: Any) -> Tensor:
        scores_R1 = None if scores_RK is None else scores_RK[:, :1].contiguous()
        weighted_RH = slot_reduce(y_RH, meta[ROW][:, None], scores_R1)
        handle = handle_of(ticket_of(meta[TICKET]), hidden)
        sums_MH, _ = carrier.combine_with_unpermute(hidden=weighted_RH, handle=handle)
        return _of_rows(sums_MH, out_rows)

    return _launch(send, hidden, (out_rows, hidden), y_RH, meta, scores_RK, **where)


def return_launch(
    grad_RK: Tensor, meta: list[Tensor], out_rows: int, **where: Any
) -> tuple[Tensor, Tensor]:
    """Gradients of staged scores back to their tokens; delivers (R, K), T rows of them used."""

    def send(carrier: Any) -> Tensor:
        handle = handle_of(ticket_of(meta[TICKET]), SCORE_WIDTH)
        beside = grad_RK.new_zeros(grad_RK.shape[0], SCORE_WIDTH, dtype=torch.bfloat16)
        probs_R, ids_TK = grad_RK[:, 0].contiguous(), meta[IDS]
        _, back_ME = carrier.combine_with_unpermute(hidden=beside, probs=probs_R, handle=handle)
        return _of_rows(back_ME[: ids_TK.shape[0]].gather(1, ids_TK), out_rows)

    return _launch(send, SCORE_WIDTH, (out_rows, grad_RK.shape[1]), grad_RK, meta, **where)


def _launch(
    send: Any, width: int, shape: tuple[int, int], source: Tensor, meta: list[Tensor], *more: Any,
    **where: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_tokens, num_experts = meta[ROUTING].shape
    operands = (source, *meta, *more, ticket_of(meta[TICKET]))
    return launch(send, width, shape, (num_tokens, num_experts), operands, **where)


def _of_rows(source: Tensor, rows: int) -> Tensor:
    """The same rows in a tensor of so many; those added hold whatever the memory held."""
    if source.shape[0] == rows:
        return source
    taller, kept = source.new_empty(rows, *source.shape[1:]), min(rows, source.shape[0])
    taller[:kept] = source[:kept]
    return taller


def reduce_finish(sums_RH: Tensor, meta: list[Tensor], top_k: int) -> Tensor:
    """The sums of this rank's tokens, which arrived ready."""
    return sums_RH[: meta[IDS].shape[0]].clone()


def row_grads(
    y_RH: Tensor, stage_RH: Tensor, scores_RK: Tensor, meta: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Gradients of the experts' rows and of their staged scores, from the tokens' staged one."""
    return row_grad(y_RH, stage_RH, meta[ROW] * scores_RK.shape[1], scores_RK, meta[LIVE])


def _refuse_slots(*_: Any, **__: Any) -> NoReturn:
    raise ValueError(
        f"ep.backend={NAME} brings sums of a rank's rows back and no single rows; set "
        "ep.reduce=rank, or use ep.backend=hybridep."
    )


register_backend(
    Backend(
        NAME,
        plan,
        dispatch_launch,
        _refuse_slots,
        _refuse_slots,
        _refuse_slots,
        meta_fake=meta_fake,
        sizes=sizes,
        expert_side=ExpertSide(
            stage_launch, reduce_launch, return_launch, reduce_finish, row_grads
        ),
    )
)
