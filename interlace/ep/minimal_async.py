"""The ``minimal_async`` backend: every row goes straight to its place in the peer's buffer.

Legend: T tokens, K choices a token, N = T * K slots, M the most tokens of a rank (T, unless the
        exchange says ``max_tokens``), W ranks, R = W * block_rows rows of a rank, H hidden.

Counts never leave the device.  A plan shares each rank's counts, works out the row of every slot at
its expert, and tells the receiver where each of its rows came from; a dispatch writes x rows into
the windows of the peers, in expert order; a combine writes y rows back into the slot windows of
the tokens' ranks, (M * K, H), where the same sum as ever ends it: its bits are those of
``alltoall``.

A plan's index vectors:

    target_N   rank * R + row that slot n's row has there, -1 where it was cut
    token_N    its token, n // K
    place_N    n, or -1 where it was cut: where its answer lies in the slot window
    origin_R   rank * M * K + slot that a row of mine came from, -1 past the live rows

Buffers.  Each (dispatch or combine, buffer set) has windows and a channel of signals of its own.
Sets from 0 on are used in place: what was delivered is valid until the next launch of that kind and
set, see ``chunk/buffers.py``.  Set -1 has one window for all, and each launch copies what arrived
into a tensor of its own on the exchange stream.  On CUDA a launch waits for the compute stream, so
that all earlier readers of its buffer on this rank are done before it tells the peers so.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from interlace.ep import pending
from interlace.ep.backend import Backend, Sizes, register_backend
from interlace.ep.budget import max_ctas
from interlace.ep.signals import (
    Signals,
    await_arrival,
    deliver,
    enter,
    meet,
    open_signals,
    publish,
)
from interlace.ep.transport import Group, moves_rows
from interlace.ep.windows import Windows, open_windows, release
from interlace.kernels.push_rows import push_rows
from interlace.kernels.rank_slots import rank_slots
from interlace.kernels.route import lay_out, origins, place_slots, share_counts
from interlace.kernels.slot_grad import slot_grad
from interlace.kernels.slot_reduce import slot_reduce

TARGET, TOKEN, PLACE, ORIGIN = range(4)
PLAN_SIGNAL = "ep_signal_plan"


def plan(
    ids_TK: Tensor, num_experts: int, block_rows: int | None, group: Group, max_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Returns counts_e int64, offsets int32 (e+1,), live (1,), overflow (1,) and the index vectors.

    Collective: all ranks of the group call it in the same order, with the same ``max_tokens``.
    Sync: none; safe under capture once it ran before.
    Raises: ValueError in exact mode, whose sizes a host would have to read.
    """
    if block_rows is None:
        raise ValueError(
            "ep.backend=minimal_async: rows of an exact exchange have no fixed place in a peer's "
            "buffer. Set ep.padded; without a capacity factor it never drops a row."
        )
    device, size, mirrored = ids_TK.device, group.size, group.kind == "loopback"
    slots_per_rank = max_tokens * ids_TK.shape[1]
    counts = open_windows(
        group, "minimal_async.counts", 1 if mirrored else size, num_experts + 2, torch.int32, device
    )
    channel = open_signals(group, "minimal_async.counts", device, PLAN_SIGNAL)
    ranked = rank_slots(ids_TK, num_experts)
    enter(channel)
    peers, addresses = (
        (counts.peers[:1], counts.addresses[:1]) if mirrored else (counts.peers, counts.addresses)
    )
    share_counts(ranked.counts, block_rows, slots_per_rank, peers, addresses, group.rank)
    deliver(channel)
    _agree_on_sizes(counts.mine[:, num_experts:], group)
    layout = lay_out(counts.mine[:, :num_experts], size, group.rank, block_rows, mirrored=mirrored)
    arrived = open_windows(
        group, "minimal_async.origins", 1, size * block_rows, torch.int32, device
    )
    target_N, token_N, place_N = place_slots(
        ids_TK, ranked, layout, arrived.peers, arrived.addresses, group.rank, mirrored=mirrored,
        slots_per_rank=slots_per_rank,
    )  # fmt: skip
    # The announcement of the counts has freed this window as well: one meeting is enough.
    meet(open_signals(group, "minimal_async.origins", device, PLAN_SIGNAL))
    origin_R = origins(arrived.mine[0], layout.live)
    meta = [target_N, token_N, place_N, origin_R]
    return layout.counts, layout.offsets, layout.live, layout.overflow, meta


def _agree_on_sizes(sizes_W2: Tensor, group: Group) -> None:
    """Ranks with other numbers of tokens would open windows that nobody else opens.

    Checked where reading a number costs nothing; on CUDA the settings have to see to it.
    """
    if group.kind != "process" or sizes_W2.is_cuda:
        return
    if bool((sizes_W2 != sizes_W2[0]).any()):
        blocks, slots = sizes_W2.t().tolist()
        raise ValueError(
            f"ep.plan: the padded exchange needs as many tokens on every rank; blocks of rows by "
            f"rank are {blocks}, slots {slots}. Give each rank the same tokens, set "
            "max_tokens of the exchange alike on all, or use ep.backend=alltoall in exact mode."
        )


def meta_fake(
    ids_TK: Tensor, num_experts: int, block_rows: int | None, group: Group, max_tokens: int
) -> list[Tensor]:
    """The index vectors without values."""
    slots, rows = ids_TK.numel(), group.size * (block_rows or 0)
    return [ids_TK.new_empty(n) for n in (slots, slots, slots, rows)]


def sizes(meta: list[Tensor], top_k: int, max_tokens: int | None) -> Sizes:
    """Read from the shapes of the index vectors."""
    slots = meta[TARGET].shape[0]
    delivered = slots if max_tokens is None else max_tokens * top_k
    return Sizes(delivered, meta[ORIGIN].shape[0], slots // top_k)


def dispatch_launch(
    x_TH: Tensor,
    scores_TK: Tensor | None,
    meta: list[Tensor],
    out_rows: int,
    *,
    buffer_set: int,
    group: Group,
) -> tuple[Tensor, Tensor]:
    """Sends each slot's row to its expert; with scores, row = score * x, rounded once."""
    x_TH = x_TH.contiguous()
    scale_N = None if scores_TK is None else scores_TK.reshape(-1)

    def push(windows: Windows) -> None:
        push_rows(x_TH, meta[TOKEN], meta[TARGET], windows, out_rows, scale_N, max_ctas())

    return _launch("dispatch", x_TH, out_rows, push, (meta, scale_N), buffer_set, group)


def combine_launch(
    y_RH: Tensor, meta: list[Tensor], out_rows: int, *, buffer_set: int, group: Group
) -> tuple[Tensor, Tensor]:
    """Sends each live expert-major row back to the slot that it came from."""

    y_RH = y_RH.contiguous()

    def push(windows: Windows) -> None:
        push_rows(y_RH, None, meta[ORIGIN], windows, out_rows, None, max_ctas())

    return _launch("combine", y_RH, out_rows, push, (meta,), buffer_set, group)


def _launch(
    kind: str,
    source: Tensor,
    rows: int,
    push: Callable[[Windows], None],
    keep_alive: tuple[object, ...],
    buffer_set: int,
    group: Group,
) -> tuple[Tensor, Tensor]:
    """One use of a channel; the result is this rank's window, or a copy of it."""
    key = f"minimal_async.{kind}.{'any' if buffer_set < 0 else buffer_set}"
    windows = open_windows(group, key, rows, source.shape[1], source.dtype, source.device)
    channel = open_signals(group, key, source.device)
    in_place = buffer_set >= 0 and windows.mine.is_contiguous()
    result = windows.mine.detach() if in_place else source.new_empty(rows, source.shape[1])

    def send() -> None:
        release(windows)
        enter(channel)
        if moves_rows():
            push(windows)

    def receive() -> None:
        if not in_place:
            result.copy_(windows.mine)

    if not source.is_cuda:
        return result, _start_on_cpu(channel, send, receive, in_place=in_place)

    def run() -> None:
        send()
        deliver(channel)
        receive()

    return result, pending.launch(source.device, run, source, keep_alive)


def _start_on_cpu(
    channel: Signals, send: Callable[[], None], receive: Callable[[], None], *, in_place: bool
) -> Tensor:
    """Rows leave at once; they are waited for at the wait, or here where the window is shared."""
    send()
    publish(channel)
    if in_place:
        return pending.start(lambda: await_arrival(channel))
    await_arrival(channel)
    receive()
    return pending.start(lambda: None)


def combine_finish(
    slots_PH: Tensor, scores_TK: Tensor | None, meta: list[Tensor], top_k: int
) -> Tensor:
    """out[t] = sum over k of score[t, k] * returned row; float32, k = 0..K-1, rounded once.

    Shapes: slots (M * K, H), of which the first N rows are this rank's.  A slot that was cut counts
            as zero.
    """
    return slot_reduce(slots_PH, meta[PLACE].view(-1, top_k), scores_TK)


def score_grad(slots_PH: Tensor, grad_TH: Tensor, meta: list[Tensor], top_k: int) -> Tensor:
    """d score[t, k] = <returned row, grad[t]>, float32."""
    return slot_grad(slots_PH, meta[PLACE].view(-1, top_k), grad_TH)


register_backend(
    Backend(
        "minimal_async",
        plan,
        dispatch_launch,
        combine_launch,
        combine_finish,
        score_grad,
        owns_buffers=True,
        meta_fake=meta_fake,
        sizes=sizes,
    )
)
