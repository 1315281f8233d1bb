"""Where every slot's row goes: from the chosen experts to destination rows, in few launches.

Legend: T tokens, K choices a token, N = T * K slots (slot t * K + k is choice k of token t),
        W ranks, E experts, e = E / W of each rank, B blocks of slots, R rows of a rank.

A rank's rows lie sorted by expert, then source rank, then slot.  So the row of a slot is the start
of its expert, plus what earlier ranks send to that expert, plus how many earlier slots of its own
rank chose it; positions come from prefix sums, never from atomics.

1. rank_slots   (``rank_slots.py``) count each expert in blocks of slots, add up over blocks
2. share_counts (ranks exchange them)
3. lay_out      the first row of this rank's slots at every expert, from the counts of all ranks
4. place_slots  the row of every slot; the receiver is told whom each row came from
5. origins      (once they have arrived) where each row of mine goes back to
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from interlace import _compat
from interlace.kernels.rank_slots import BLOCK, Ranked

if _compat.HAS_TRITON:
    import triton
    import triton.language as tl


@dataclass(frozen=True)
class Layout:
    """Where this rank's rows go and what it receives.

    Shapes: first (E,) int64: rank * R + row of the first slot at an expert; kept (E,) int32: slots
            that fit; counts (e,) int64, offsets (e + 1,) int32, live (1,) int64: the rows that this
            rank receives; overflow (1,) int32: rows of all blocks that did not fit.
    """

    first: Tensor
    kept: Tensor
    counts: Tensor
    offsets: Tensor
    live: Tensor
    overflow: Tensor


def lay_out_ref(
    counts: Tensor, num_ranks: int, rank: int, block_rows: int, *, mirrored: bool
) -> Layout:
    """The specification; s is a source rank, d a destination, j an expert of it."""
    local = counts.shape[1] // num_ranks
    ranks_W = torch.arange(num_ranks, device=counts.device)
    if mirrored:  # what I send to rank s comes from rank s as well
        sent_sdj = counts.view(num_ranks, 1, local).expand(-1, num_ranks, -1)
        source_d = ranks_W
    else:
        sent_sdj = counts.view(num_ranks, num_ranks, local)
        source_d = torch.full_like(ranks_W, rank)
    ends_sdj = sent_sdj.cumsum(2).clamp(max=block_rows)
    kept_sdj = ends_sdj.diff(dim=2, prepend=ends_sdj.new_zeros(num_ranks, num_ranks, 1))
    total_dj = kept_sdj.sum(0)
    start_dj = total_dj.cumsum(1) - total_dj
    earlier = (ranks_W[:, None] < source_d)[:, :, None]
    first_dj = ranks_W[:, None] * (num_ranks * block_rows) + start_dj + (kept_sdj * earlier).sum(0)
    offsets = torch.nn.functional.pad(total_dj[rank].cumsum(0), (1, 0))
    missing_d = sent_sdj[source_d, ranks_W].sum(1) - block_rows
    return Layout(
        first_dj.view(-1),
        kept_sdj[source_d, ranks_W].view(-1).to(torch.int32),
        total_dj[rank].clone(),
        offsets.to(torch.int32),
        offsets[-1:].clone(),
        missing_d.clamp(min=0).sum().to(torch.int32).view(1),
    )


def place_slots_ref(ids_TK: Tensor, ranked: Ranked, layout: Layout) -> tuple[Tensor, ...]:
    """The specification of ``target``, ``token`` and ``place``."""
    ids_N, (num_tokens, top_k) = ids_TK.reshape(-1), ids_TK.shape
    slot_N = torch.arange(num_tokens * top_k, device=ids_TK.device)
    position_N = ranked.within + ranked.before[slot_N // BLOCK, ids_N]
    kept_N = position_N < layout.kept[ids_N]
    target_N = torch.where(kept_N, layout.first[ids_N] + position_N, -1)
    return target_N, slot_N // top_k, torch.where(kept_N, slot_N, -1)


if _compat.HAS_TRITON:
    # Sizes and ranks are not specialised: a 1 among them would not be a tensor, and every other
    # value would compile again.
    @triton.jit(do_not_specialize=["first", "block_rows", "num_slots"])
    def _share_kernel(
        counts: tl.tensor,
        addresses: tl.tensor,
        first: tl.tensor,
        block_rows: tl.tensor,
        num_slots: tl.tensor,
        E: tl.constexpr,
        E_PAD: tl.constexpr,
    ) -> None:
        expert = tl.arange(0, E_PAD)
        base = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(tl.int32)) + first
        found = tl.load(counts + expert, mask=expert < E, other=0)
        tl.store(base + expert, found, mask=expert < E)
        tl.store(base + E, block_rows.to(tl.int32))
        tl.store(base + E + 1, num_slots.to(tl.int32))

    @triton.jit(do_not_specialize=["stride", "rank", "block_rows"])
    def _lay_out_kernel(
        counts: tl.tensor,
        first: tl.tensor,
        kept: tl.tensor,
        counts_out: tl.tensor,
        offsets: tl.tensor,
        live: tl.tensor,
        overflow: tl.tensor,
        stride: tl.tensor,
        rank: tl.tensor,
        block_rows: tl.tensor,
        W: tl.constexpr,
        LOCAL: tl.constexpr,
        MIRRORED: tl.constexpr,
        W_PAD: tl.constexpr,
        LOCAL_PAD: tl.constexpr,
    ) -> None:
        s = tl.arange(0, W_PAD)[:, None, None]
        d = tl.arange(0, W_PAD)[None, :, None]
        j = tl.arange(0, LOCAL_PAD)[None, None, :]
        inside = (s < W) & (d < W) & (j < LOCAL)
        if MIRRORED:
            place = counts + s * LOCAL + d * 0 + j
            source = d
        else:
            place = counts + s * stride + d * LOCAL + j
            source = d * 0 + rank
        sent = tl.load(place, mask=inside, other=0)
        ends = tl.cumsum(sent, 2)
        fit = tl.minimum(ends, block_rows) - tl.minimum(ends - sent, block_rows)
        fit = tl.where(inside, fit, 0)
        total = tl.sum(fit, 0)
        start = tl.cumsum(total, 1) - total
        earlier = tl.sum(tl.where(s < source, fit, 0), 0)
        rows = tl.arange(0, W_PAD)[:, None]
        column = tl.arange(0, LOCAL_PAD)[None, :]
        mask = (rows < W) & (column < LOCAL)
        capacity = block_rows.to(tl.int64) * W
        tl.store(
            first + rows * LOCAL + column, rows.to(tl.int64) * capacity + start + earlier, mask=mask
        )
        mine = tl.sum(tl.where(s == source, fit, 0), 0)
        tl.store(kept + rows * LOCAL + column, mine, mask=mask)
        own = mask & (rows == rank)
        tl.store(counts_out + column + rows * 0, total.to(tl.int64), mask=own)
        tl.store(offsets + 1 + column + rows * 0, start + total, mask=own)
        tl.store(offsets, 0)
        tl.store(live, tl.sum(tl.sum(tl.where(own, total, 0), 1), 0).to(tl.int64))
        wanted = tl.sum(tl.sum(tl.where((s == source) & inside, sent, 0), 0), 1)
        tl.store(overflow, tl.sum(tl.maximum(wanted - block_rows, 0), 0))

    @triton.jit(
        do_not_specialize=["num_slots", "num_experts", "rank", "rows_per_rank", "slots_per_rank"]
    )
    def _place_kernel(
        ids: tl.tensor,
        within: tl.tensor,
        before: tl.tensor,
        first: tl.tensor,
        kept: tl.tensor,
        addresses: tl.tensor,
        target: tl.tensor,
        token: tl.tensor,
        place: tl.tensor,
        num_slots: tl.tensor,
        num_experts: tl.tensor,
        rank: tl.tensor,
        rows_per_rank: tl.tensor,
        slots_per_rank: tl.tensor,
        K: tl.constexpr,
        MIRRORED: tl.constexpr,
        BLOCK: tl.constexpr,
    ) -> None:
        block = tl.program_id(0)
        slot = block * BLOCK + tl.arange(0, BLOCK)
        inside = slot < num_slots
        expert = tl.load(ids + slot, mask=inside, other=0)
        position = tl.load(within + slot, mask=inside, other=0)
        position += tl.load(before + block * num_experts + expert, mask=inside, other=0)
        fits = inside & (position < tl.load(kept + expert, mask=inside, other=0))
        goal = tl.load(first + expert, mask=inside, other=0) + position
        tl.store(target + slot, tl.where(fits, goal, -1), mask=inside)
        tl.store(token + slot, (slot // K).to(tl.int64), mask=inside)
        tl.store(place + slot, tl.where(fits, slot, -1).to(tl.int64), mask=inside)
        peer = goal // rows_per_rank
        base = tl.load(addresses + peer, mask=fits, other=0)
        source = peer if MIRRORED else peer * 0 + rank
        origin = (source * slots_per_rank + slot).to(tl.int32)
        there = base.to(tl.pointer_type(tl.int32)) + (goal - peer * rows_per_rank)
        tl.store(there, origin, mask=fits)

    @triton.jit(do_not_specialize=["num_rows"])
    def _origins_kernel(
        arrived: tl.tensor,
        live: tl.tensor,
        out: tl.tensor,
        num_rows: tl.tensor,
        BLOCK: tl.constexpr,
    ) -> None:
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = row < num_rows
        origin = tl.load(arrived + row, mask=inside, other=-1).to(tl.int64)
        tl.store(out + row, tl.where(row < tl.load(live), origin, -1), mask=inside)


def share_counts(
    counts_E: Tensor,
    block_rows: int,
    num_slots: int,
    peers: tuple[Tensor, ...],
    addresses: Tensor,
    row: int,
) -> None:
    """Writes [counts, block_rows, num_slots] into one row of each peer's window.

    Shapes: counts (E,) int32; peers: windows (>= row + 1, E + 2) int32 with contiguous rows.
    Sync:   none; safe under capture.  Peers see it after a ``publish``.
    """
    num_experts = counts_E.shape[0]
    if not _compat.runs_triton("share_counts", counts_E.device):
        sizes = counts_E.new_tensor([block_rows, num_slots])
        for peer in peers:
            peer[row] = torch.cat([counts_E, sizes])
        return
    pad = triton.next_power_of_2(num_experts)
    _share_kernel[len(peers),](
        counts_E, addresses, row * peers[0].stride(0), block_rows, num_slots, num_experts, pad
    )


def lay_out(
    counts: Tensor, num_ranks: int, rank: int, block_rows: int, *, mirrored: bool = False
) -> Layout:
    """The first row of this rank's slots at every expert, and what this rank receives.

    A rank sends at most ``block_rows`` rows to one peer; R = W * block_rows.  What does not fit is
    cut at the end of the peer's experts.
    Shapes:  counts (W, E) int32: what each rank sends to each expert; ``mirrored``: (1, E), the
             counts of rank 0, which all others mirror.
    Sync:    none; safe under capture.
    """
    num_experts = counts.shape[1]
    rows = 1 if mirrored else num_ranks
    if counts.shape[0] != rows or num_experts % num_ranks or counts.dtype != torch.int32:
        raise ValueError(
            f"lay_out: counts is {counts.dtype} {tuple(counts.shape)} for {num_ranks} ranks; "
            f"expected int32 ({rows}, E) with E a multiple of {num_ranks}."
        )
    if not _compat.runs_triton("lay_out", counts.device):
        return lay_out_ref(counts, num_ranks, rank, block_rows, mirrored=mirrored)
    local = num_experts // num_ranks

    def new(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=counts.device)

    layout = Layout(
        new(num_experts, torch.int64),
        new(num_experts, torch.int32),
        new(local, torch.int64),
        new(local + 1, torch.int32),
        new(1, torch.int64),
        new(1, torch.int32),
    )
    _lay_out_kernel[1,](
        counts, layout.first, layout.kept, layout.counts, layout.offsets, layout.live,
        layout.overflow, counts.stride(0), rank, block_rows, num_ranks, local, mirrored,
        triton.next_power_of_2(num_ranks), triton.next_power_of_2(local),
    )  # fmt: skip
    return layout


def place_slots(
    ids_TK: Tensor,
    ranked: Ranked,
    layout: Layout,
    peers: tuple[Tensor, ...],
    addresses: Tensor,
    rank: int,
    *,
    mirrored: bool = False,
    slots_per_rank: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Every slot's row; each receiver is told whose row it is.

    Shapes: peers: windows (1, R) int32, ``addresses`` as in :mod:`interlace.ep.windows`
            -> target (N,) int64 = rank * R + row, -1 where the slot was cut; token (N,) int64;
            place (N,) int64: the slot itself, or -1.
            Writes source rank * ``slots_per_rank`` + slot at every row that it targets; None is N,
            which does where all ranks have as many.
    Sync:   none; safe under capture.  Peers see their part after a ``publish``.
    """
    num_slots, rows_per_rank = ids_TK.numel(), peers[0].shape[1]
    apart = num_slots if slots_per_rank is None else slots_per_rank
    if not _compat.runs_triton("place_slots", ids_TK.device):
        target_N, token_N, place_N = place_slots_ref(ids_TK, ranked, layout)
        for r, peer in enumerate(peers):
            (moved,) = ((target_N >= 0) & (target_N // max(rows_per_rank, 1) == r)).nonzero(
                as_tuple=True
            )
            origin = (r if mirrored else rank) * apart + moved
            peer[0].index_copy_(0, target_N[moved] - r * rows_per_rank, origin.to(torch.int32))
        return target_N, token_N, place_N
    target_N, token_N, place_N = (
        torch.empty(num_slots, dtype=torch.int64, device=ids_TK.device) for _ in range(3)
    )
    if num_slots:
        num_blocks, num_experts = ranked.before.shape
        _place_kernel[num_blocks,](
            ids_TK.contiguous(), ranked.within, ranked.before, layout.first, layout.kept, addresses,
            target_N, token_N, place_N, num_slots, num_experts, rank, rows_per_rank,
            apart, ids_TK.shape[1], mirrored, BLOCK,
        )  # fmt: skip
    return target_N, token_N, place_N


def origins(arrived_R: Tensor, live: Tensor) -> Tensor:
    """(R,) int32 as it arrived -> (R,) int64, -1 past the live rows.  Safe under capture."""
    if not _compat.runs_triton("origins", arrived_R.device):
        row_R = torch.arange(arrived_R.shape[0], device=arrived_R.device)
        return torch.where(row_R < live, arrived_R.to(torch.int64), -1)
    out = torch.empty(arrived_R.shape[0], dtype=torch.int64, device=arrived_R.device)
    if out.numel():
        _origins_kernel[triton.cdiv(out.numel(), 1024),](
            arrived_R, live, out, out.numel(), BLOCK=1024
        )
    return out
