"""The ``alltoall`` backend: pack, one all-to-all, unpack; every rearrangement is a gather.

Legend: T tokens, K choices a token, N = T * K slots (slot t * K + k is choice k of token t),
        W ranks, E experts, e = E / W local experts, S rows sent, R expert-major rows, H hidden.

A plan is five index vectors, worked out once from the chosen experts and used by forward,
recompute and backward alike:

    send_slot_S    slot whose row is sent at position s of the send buffer
    send_token_S   its token, send_slot // K
    slot_pos_N     position in the send buffer at which slot n left, and at which it returns
    expert_src_R   position in the receive buffer of expert-major row r
    recv_dst_S     expert-major row that answers receive position s

Exact mode: the buffers are as long as the routing needs, sizes are read on the host.
Padded mode: each peer has a block of ``block_rows`` rows, S = R = W * block_rows, nothing is read
on the host.  What does not fit is cut at the sender and counted in ``overflow``.  Ranks may have
other numbers of tokens than each other, as long as their blocks agree.

Example, exact, W=2, E=4, K=1, ids [2, 0, 3, 0]: slots sorted by expert are [1, 3, 0, 2]; experts 0
and 1 live here: send_slot = [1, 3, 0, 2], splits [2, 2], slot_pos = [2, 0, 3, 1].
"""

from __future__ import annotations

import torch
from torch import Tensor

from interlace import _compat
from interlace.ep import pending
from interlace.ep.backend import Backend, Sizes, register_backend
from interlace.ep.transport import Group, all_to_all
from interlace.kernels.gather_rows import gather_rows
from interlace.kernels.slot_grad import slot_grad
from interlace.kernels.slot_reduce import slot_reduce

NUM_META = 6
SEND_SLOT, SEND_TOKEN, SLOT_POS, EXPERT_SRC, RECV_DST, SPLITS = range(NUM_META)


def plan(
    ids_TK: Tensor, num_experts: int, block_rows: int | None, group: Group, max_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Returns counts_e int64, offsets int32 (e+1,), live (1,), overflow (1,) and the index vectors.

    Collective: all ranks of the group call it in the same order.
    Sync: the host in exact mode, none in padded mode.
    """
    num_slots, top_k = ids_TK.numel(), ids_TK.shape[1]
    sorted_ids_N, order_N = ids_TK.reshape(-1).sort(stable=True)
    experts = torch.arange(num_experts + 1, device=ids_TK.device)
    starts = torch.searchsorted(sorted_ids_N, experts)  # (E+1,), no atomics
    block_starts_W = starts[:: num_experts // group.size][:-1]
    if block_rows is None:
        sent_WE = starts.diff().view(group.size, -1)
        overflow = starts.new_zeros(1, dtype=torch.int32)
        send_slot, slot_pos = order_N, _inverse(order_N)
    else:
        ends_We = starts[1:].view(group.size, -1) - block_starts_W[:, None]
        overflow = (ends_We[:, -1] - block_rows).clamp(min=0).sum().to(torch.int32).view(1)
        ends_We = ends_We.clamp(max=block_rows)
        sent_WE = ends_We.diff(dim=1, prepend=ends_We.new_zeros(group.size, 1))
        within_B = torch.arange(block_rows, device=ids_TK.device)
        taken = (block_starts_W[:, None] + within_B).clamp(max=max(num_slots - 1, 0))
        # Without a token there is no slot to name; dispatch_launch sends zeros then.
        send_slot = order_N[taken.view(-1)] if num_slots else torch.zeros_like(taken.view(-1))
        peer_N = sorted_ids_N // (num_experts // group.size)
        within_N = torch.arange(num_slots, device=ids_TK.device) - block_starts_W[peer_N]
        position_N = torch.where(within_N < block_rows, peer_N * block_rows + within_N, -1)
        slot_pos = torch.empty_like(order_N)
        slot_pos[order_N] = position_N

    if block_rows is not None:
        _agree_on_block(block_rows, group, ids_TK.device)
    received_We = torch.empty_like(sent_WE)
    all_to_all(received_We, sent_WE.contiguous(), group, counts=True)()
    counts_e = received_We.sum(0)
    offsets = torch.nn.functional.pad(counts_e.cumsum(0), (1, 0)).to(torch.int32)
    if block_rows is None:
        splits = torch.stack([sent_WE.sum(1), received_We.sum(1)]).cpu()
        expert_src = _expert_major_exact(received_We, int(splits[1].sum()))
    else:
        splits = torch.empty(0, dtype=torch.int64)
        expert_src = _expert_major_padded(received_We, block_rows)
    meta = [send_slot, send_slot // top_k, slot_pos, expert_src, _inverse(expert_src), splits]
    return counts_e, offsets, offsets[-1:].to(torch.int64), overflow, meta


def meta_fake(
    ids_TK: Tensor, num_experts: int, block_rows: int | None, group: Group, max_tokens: int
) -> list[Tensor]:
    """The index vectors without values; in exact mode R is a size that only the run tells."""
    num_slots = ids_TK.numel()
    sent = num_slots if block_rows is None else group.size * block_rows
    dynamic = block_rows is None and group.size > 1
    rows = _compat.new_dynamic_size() if dynamic else sent
    splits = torch.empty(
        (2, group.size) if block_rows is None else (0,), dtype=torch.int64, device="cpu"
    )
    return [*(ids_TK.new_empty(n) for n in (sent, sent, num_slots, rows, rows)), splits]


def sizes(meta: list[Tensor], top_k: int, max_tokens: int | None) -> Sizes:
    """Read from the shapes of the index vectors, which know ``max_tokens`` as rows of a block."""
    num_tokens = meta[SLOT_POS].shape[0] // top_k
    return Sizes(meta[SEND_SLOT].shape[0], meta[EXPERT_SRC].shape[0], num_tokens)


def _agree_on_block(block_rows: int, group: Group, device: torch.device) -> None:
    """Ranks with other numbers of tokens would wait for each other's rows for ever.

    Checked where reading a number costs nothing; on CUDA the settings have to see to it.
    """
    if group.kind != "process" or device.type != "cpu":
        return
    mine, theirs = torch.full((group.size,), block_rows), torch.empty(group.size, dtype=torch.int64)
    all_to_all(theirs, mine, group, counts=True)()
    if bool((theirs != block_rows).any()):
        raise ValueError(
            f"ep.plan: the padded exchange needs as many tokens on every rank; blocks of rows by "
            f"rank are {theirs.tolist()}. Give each rank the same tokens, set max_tokens of the "
            "exchange alike on all, or use exact mode."
        )


def _inverse(permutation: Tensor) -> Tensor:
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(permutation.numel(), device=permutation.device)
    return inverse


def _expert_major_exact(received_We: Tensor, num_rows: int) -> Tensor:
    """Rows arrive by (rank, expert, slot) and are wanted by (expert, rank, slot)."""
    row = torch.arange(num_rows, device=received_We.device)
    segment = torch.searchsorted(received_We.reshape(-1).cumsum(0), row, right=True)
    return (segment % received_We.shape[1]).argsort(stable=True)


def _expert_major_padded(received_We: Tensor, block_rows: int) -> Tensor:
    """The same with fixed blocks; rows that nobody sent sort behind the last expert."""
    num_ranks = received_We.shape[0]
    within = torch.arange(block_rows, device=received_We.device).expand(num_ranks, -1).contiguous()
    expert = torch.searchsorted(received_We.cumsum(1), within, right=True)
    return expert.reshape(-1).argsort(stable=True)


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
    if x_TH.shape[0] == 0:
        sent = x_TH.new_zeros(meta[SEND_TOKEN].shape[0], x_TH.shape[1])
        return _exchange(sent, meta, meta[EXPERT_SRC], group, to_experts=True)
    scale_S = None
    if scores_TK is not None:
        scale_S = scores_TK.reshape(-1).index_select(0, meta[SEND_SLOT])
    sent = gather_rows(x_TH, meta[SEND_TOKEN], scale_S)
    return _exchange(sent, meta, meta[EXPERT_SRC], group, to_experts=True)


def combine_launch(
    y_RH: Tensor, meta: list[Tensor], out_rows: int, *, buffer_set: int, group: Group
) -> tuple[Tensor, Tensor]:
    """Sends each expert-major row back to where it came from: the send buffer's layout."""
    sent = y_RH if group.size == 1 else gather_rows(y_RH, meta[RECV_DST])
    return _exchange(sent, meta, None, group, to_experts=False)


def _exchange(
    sent: Tensor, meta: list[Tensor], order: Tensor | None, group: Group, *, to_experts: bool
) -> tuple[Tensor, Tensor]:
    if group.size == 1:  # rows sorted by expert are expert-major rows: nothing to move or copy
        return sent, pending.start(lambda: None)
    splits: list[list[int] | None] = [None, None]
    if meta[SPLITS].numel():
        splits = meta[SPLITS].tolist()
    in_splits, out_splits = splits if to_experts else splits[::-1]
    rows = sent.shape[0] if out_splits is None else sum(out_splits)
    received = sent.new_empty(rows, sent.shape[1])
    result = received if order is None else torch.empty_like(received)

    def unpack() -> None:
        if order is not None:
            gather_rows(received, order, out=result)

    if not sent.is_cuda:
        wait = all_to_all(received, sent, group, out_splits, in_splits)

        def finish() -> None:
            wait()
            unpack()

        return result, pending.start(finish, sent)

    def run() -> None:
        all_to_all(received, sent, group, out_splits, in_splits)()
        unpack()

    token = pending.launch(sent.device, run, sent, received, order)
    return result, token


def combine_finish(
    slots_SH: Tensor, scores_TK: Tensor | None, meta: list[Tensor], top_k: int
) -> Tensor:
    """out[t] = sum over k of score[t, k] * returned row; float32, k = 0..K-1, rounded once.

    A slot that was cut counts as zero.
    """
    return slot_reduce(slots_SH, meta[SLOT_POS].view(-1, top_k), scores_TK)


def score_grad(slots_SH: Tensor, grad_TH: Tensor, meta: list[Tensor], top_k: int) -> Tensor:
    """d score[t, k] = <returned row, grad[t]>, float32."""
    return slot_grad(slots_SH, meta[SLOT_POS].view(-1, top_k), grad_TH)


register_backend(
    Backend("alltoall", plan, dispatch_launch, combine_launch, combine_finish, score_grad)
)
