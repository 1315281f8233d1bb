"""The ``hybridep`` backend: a token crosses once per destination rank and is expanded on arrival.

Legend: T tokens, K choices a token, N = T * K slots, M the most tokens of a rank (T, unless the
        exchange says ``max_tokens``), W ranks, E experts, S = W * M stage rows,
        R = W * block_rows expert-major rows, H hidden.

A rank that several choices of a token fall on gets its row once, into the *stage*, a window with a
row for every token of every rank.  From there it is expanded to expert-major rows, in the order of
``alltoall``.  With top-8 over two ranks that is a quarter of the bytes.  There are two ways back:

    slot   each expert's row goes back to its slot at the origin: the same bits, no fewer bytes
    rank   the expert rank sums its rows of a token, weighted, in slot order, rounds once, and sends
           one row; the origin sums those of the ranks in ascending order

Capacity: slots are cut as by ``alltoall``, so both agree on what overflows.  The stage has room for
all M tokens of each source whatever the capacity: a source sends a token to a peer once, so M is
its bound, which a capacity factor hardly ever lowers (M * K * factor / W is less only for
K * factor < W), and with it no place depends on what other tokens do.

Plans are those of ``minimal_async``, which knows the row of every slot at its expert, and the slot
of every row; four index vectors more say which rows and slots share a token and a rank.

The stage of a dispatch is read on the exchange stream before its launch ends, so a dispatch
delivers a tensor of its own whatever the buffer set.  What a combine or a staged dispatch delivers
is the window itself for a set of 0 and above, and a copy for -1.

Example: W=2, E=4, K=2, rank 0 has ids [[0, 1], [2, 1]]: token 0 fills one stage row of rank 0 and
two of its expert rows; token 1 fills one stage row of both ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from interlace.ep import minimal_async, pending
from interlace.ep.backend import Backend, ExpertSide, Sizes, register_backend
from interlace.ep.budget import max_ctas
from interlace.ep.signals import deliver, enter, open_signals
from interlace.ep.transport import Group, moves_rows
from interlace.ep.windows import Windows, open_windows, release
from interlace.kernels.expand_rows import expand_rows
from interlace.kernels.push_rows import push_rows
from interlace.kernels.row_grad import row_grad
from interlace.kernels.slot_grad import slot_grad
from interlace.kernels.slot_reduce import slot_reduce
from interlace.kernels.stage_index import receive_index, send_index

(
    STAGE_TARGET,  # (T * W,): rank * S + stage row of token t at rank p; -1: not sent there
    STAGE_TOKEN,  # (T * W,): t, for each of these
    RANK_POS,  # (T, W): row in which rank p returns its sum of token t; -1: none
    SLOT_POS,  # (N,): row in which slot n returns, n itself; -1: cut
    ROW_SLOT,  # (R,): rank * M * K + slot of expert-major row r: its stage row * K + k; -1: dead
    STAGE_ROWS,  # (S, K): expert-major row of choice k of stage row s; -1: not of this rank
    RANK_TARGET,  # (S,): rank * S + row to which the sum of stage row s returns; -1: empty
    LIVE,  # (1,): expert-major rows
) = range(8)


def plan(
    ids_TK: Tensor, num_experts: int, block_rows: int | None, group: Group, max_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Returns counts_e int64, offsets int32 (e+1,), live (1,), overflow (1,) and the index vectors.

    Collective: all ranks of the group call it in the same order, with the same ``max_tokens``.
    Sync: none; safe under capture once it ran before.
    Raises: ValueError in exact mode.
    """
    rows = _needs_padding(block_rows)
    *result, live, overflow, routed = minimal_async.plan(
        ids_TK, num_experts, rows, group, max_tokens
    )
    (num_tokens, top_k), size = ids_TK.shape, group.size
    mirrored = group.kind == "loopback"
    target_TK = routed[minimal_async.TARGET].view(num_tokens, top_k)
    origin_R = routed[minimal_async.ORIGIN]
    if num_tokens < max_tokens:  # places in a stage follow from M tokens; those missing go nowhere
        missing = (0, 0, 0, max_tokens - num_tokens)
        target_TK = torch.nn.functional.pad(target_TK, missing, value=-1)
    there, token, back = send_index(target_TK, size, size * rows, group.rank, mirrored=mirrored)
    num_sent = num_tokens * size
    sent = there[:num_sent], token[:num_sent], back[:num_tokens]
    arrived = receive_index(origin_R, (max_tokens, top_k), size, group.rank, mirrored=mirrored)
    meta = [*sent, routed[minimal_async.PLACE], origin_R, *arrived, live.clone()]
    return *result, live, overflow, meta


def _needs_padding(block_rows: int | None) -> int:
    if block_rows is None:
        raise ValueError(
            "ep.backend=hybridep: its buffers have static shapes and no exact mode. Set ep.padded, "
            "or use ep.backend=alltoall."
        )
    return block_rows


def meta_fake(
    ids_TK: Tensor, num_experts: int, block_rows: int | None, group: Group, max_tokens: int
) -> list[Tensor]:
    """The index vectors without values."""
    rows, (num_tokens, top_k), size = _needs_padding(block_rows), ids_TK.shape, group.size
    num_sent, num_stage = num_tokens * size, max_tokens * size
    shapes = [
        num_sent,
        num_sent,
        (num_tokens, size),
        ids_TK.numel(),
        size * rows,
        (num_stage, top_k),
        num_stage,
        1,
    ]
    return [ids_TK.new_empty(s) for s in shapes]


def sizes(meta: list[Tensor], top_k: int, max_tokens: int | None) -> Sizes:
    """Read from the shapes of the index vectors."""
    num_slots, num_stage = meta[SLOT_POS].shape[0], meta[RANK_TARGET].shape[0]
    delivered = num_slots if max_tokens is None else max_tokens * top_k
    return Sizes(delivered, meta[ROW_SLOT].shape[0], num_slots // top_k, num_stage)


def dispatch_launch(
    x_TH: Tensor,
    scores_TK: Tensor | None,
    meta: list[Tensor],
    out_rows: int,
    *,
    buffer_set: int,
    group: Group,
) -> tuple[Tensor, Tensor]:
    """Sends each token once to each of its ranks; with scores, row = score * x, rounded once there.

    The scores of a token, if any, travel beside it.
    """
    stage = _stage_windows("dispatch", x_TH, meta, group)
    posts, beside = [_to_stage(x_TH, meta, stage)], None
    if scores_TK is not None:
        beside = _stage_windows("scores", scores_TK, meta, group)
        posts.append(_to_stage(scores_TK, meta, beside))
    rows_RH = x_TH.new_empty(out_rows, x_TH.shape[1])

    def expand() -> None:
        top_k, scale_SK = meta[STAGE_ROWS].shape[1], None if beside is None else beside.mine
        expand_rows(stage.mine, meta[ROW_SLOT], top_k, meta[LIVE], scale_SK, rows_RH)

    token = _exchange("dispatch", lambda: posts, expand, group, rows_RH, x_TH, scores_TK, *meta)
    return rows_RH, token


def stage_launch(
    x_TH: Tensor, meta: list[Tensor], out_rows: int, *, buffer_set: int, group: Group
) -> tuple[Tensor, Tensor]:
    """Sends each token once to each of its ranks and delivers the stage as it is."""
    stage = _stage_windows(f"stage.{buffer_set}", x_TH, meta, group)
    result, settle = _result(stage, buffer_set)
    posts = [_to_stage(x_TH, meta, stage)]
    return result, _exchange(
        f"stage.{buffer_set}", lambda: posts, settle, group, result, x_TH, *meta
    )


def combine_launch(
    y_RH: Tensor, meta: list[Tensor], out_rows: int, *, buffer_set: int, group: Group
) -> tuple[Tensor, Tensor]:
    """Sends each expert-major row back to its slot."""
    name = f"slots.{buffer_set}"
    slots = _windows(name, y_RH, out_rows, group)
    result, settle = _result(slots, buffer_set)
    posts = [_Post(y_RH.contiguous(), None, meta[ROW_SLOT], slots)]
    return result, _exchange(name, lambda: posts, settle, group, result, y_RH, *meta)


def reduce_launch(
    y_RH: Tensor,
    scores_SK: Tensor | None,
    meta: list[Tensor],
    out_rows: int,
    *,
    buffer_set: int,
    group: Group,
) -> tuple[Tensor, Tensor]:
    """Sums this rank's rows of each token, times their staged scores if given, and sends one back.

    Numerics: float32 in slot order, one rounding.
    """
    return _return_stage(
        lambda: slot_reduce(y_RH, meta[STAGE_ROWS], scores_SK), y_RH, scores_SK, meta, buffer_set,
        group,
    )  # fmt: skip


def return_launch(
    stage_SH: Tensor, meta: list[Tensor], out_rows: int, *, buffer_set: int, group: Group
) -> tuple[Tensor, Tensor]:
    """Sends each stage row back to its token's rank."""
    return _return_stage(lambda: stage_SH.contiguous(), stage_SH, None, meta, buffer_set, group)


def _return_stage(
    stage_of: Callable[[], Tensor],
    like: Tensor,
    scores_SK: Tensor | None,
    meta: list[Tensor],
    buffer_set: int,
    group: Group,
) -> tuple[Tensor, Tensor]:
    name = f"sums.{buffer_set}"
    sums = _stage_windows(name, like, meta, group)
    result, settle = _result(sums, buffer_set)

    def pack() -> list[_Post]:
        return [_Post(stage_of(), None, meta[RANK_TARGET], sums)]

    return result, _exchange(name, pack, settle, group, result, like, scores_SK, *meta)


class _Post(NamedTuple):
    """Rows to push: ``windows[target[m]] = source[take[m]]``."""

    source: Tensor
    take: Tensor | None
    target: Tensor
    windows: Windows


def _to_stage(x: Tensor, meta: list[Tensor], stage: Windows) -> _Post:
    return _Post(x.contiguous(), meta[STAGE_TOKEN], meta[STAGE_TARGET], stage)


def _stage_windows(name: str, like: Tensor, meta: list[Tensor], group: Group) -> Windows:
    return _windows(name, like, meta[RANK_TARGET].shape[0], group)


def _windows(name: str, like: Tensor, rows: int, group: Group) -> Windows:
    return open_windows(group, f"hybridep.{name}", rows, like.shape[1], like.dtype, like.device)


def _result(windows: Windows, buffer_set: int) -> tuple[Tensor, Callable[[], None]]:
    """What a launch delivers from a window, and what is to be done once the rows are there.

    The window itself where a set is managed; rows that are padded to 16 bytes are copied all the
    same, because results are contiguous.
    """
    if buffer_set >= 0 and windows.mine.is_contiguous():
        return windows.mine.detach(), _nothing
    result = torch.empty(windows.mine.shape, dtype=windows.mine.dtype, device=windows.mine.device)

    def copy() -> None:
        result.copy_(windows.mine)

    return result, copy


def _exchange(
    channel: str,
    pack: Callable[[], list[_Post]],
    unpack: Callable[[], None],
    group: Group,
    result: Tensor,
    *operands: Tensor | None,
) -> Tensor:
    """One round of the protocol on the exchange stream: pack, push, unpack; returns the token."""
    signals = open_signals(group, f"hybridep.{channel}", result.device)

    def run() -> list[_Post]:
        posts = pack()
        for post in posts:
            release(post.windows)
        enter(signals)
        for source, take, target, windows in posts if moves_rows() else ():
            push_rows(source, take, target, windows, windows.mine.shape[0], max_ctas=max_ctas())
        deliver(signals)
        unpack()
        return posts

    if not result.is_cuda:
        run()
        return pending.start(_nothing)
    return pending.launch(result.device, run, result, operands)


def _nothing() -> None:
    return None


def combine_finish(
    slots_PH: Tensor, scores_TK: Tensor | None, meta: list[Tensor], top_k: int
) -> Tensor:
    """out[t] = sum over k of score[t, k] * returned row; float32, k = 0..K-1, rounded once.

    Shapes: slots (M * K, H), of which the first N rows are this rank's.
    """
    return slot_reduce(slots_PH, meta[SLOT_POS].view(-1, top_k), scores_TK)


def reduce_finish(sums_SH: Tensor, meta: list[Tensor], top_k: int) -> Tensor:
    """out[t] = sum over the ranks, in ascending order, of what each returned; rounded once."""
    return slot_reduce(sums_SH, meta[RANK_POS])


def score_grad(slots_PH: Tensor, grad_TH: Tensor, meta: list[Tensor], top_k: int) -> Tensor:
    """d score[t, k] = <returned row, grad[t]>, float32."""
    return slot_grad(slots_PH, meta[SLOT_POS].view(-1, top_k), grad_TH)


def row_grads(
    y_RH: Tensor, stage_SH: Tensor, scores_SK: Tensor, meta: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Gradients of the experts' rows and of their staged scores, from the tokens' staged one."""
    return row_grad(y_RH, stage_SH, meta[ROW_SLOT], scores_SK, meta[LIVE])


class Traffic(NamedTuple):
    """Bytes of rows that reach a rank from others in one exchange."""

    wire: int  # what crosses
    logical: int  # what would cross if every slot sent its row


def traffic(meta: list[Tensor], row_bytes: int, rank: int) -> Traffic:
    """What a dispatch, or the combine of ``reduce="rank"``, moves; for ``slot`` all is logical.

    In loopback the mirror makes what this rank gets equal to what it sends.
    Sync: reads two numbers on the host.
    """
    stage, slot = meta[RANK_TARGET], meta[ROW_SLOT]
    num_stage, num_slots = stage.shape[0], meta[STAGE_ROWS].numel() // meta[RANK_POS].shape[1]
    rows = ((stage >= 0) & (stage // max(num_stage, 1) != rank)).sum()
    slots = ((slot >= 0) & (slot // max(num_slots, 1) != rank)).sum()
    return Traffic(int(rows) * row_bytes, int(slots) * row_bytes)


register_backend(
    Backend(
        "hybridep",
        plan,
        dispatch_launch,
        combine_launch,
        combine_finish,
        score_grad,
        owns_buffers=True,
        private=frozenset({"dispatch"}),
        meta_fake=meta_fake,
        sizes=sizes,
        expert_side=ExpertSide(
            stage_launch, reduce_launch, return_launch, reduce_finish, row_grads
        ),
    )
)
