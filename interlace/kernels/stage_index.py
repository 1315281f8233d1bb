"""Where tokens lie that cross once per rank: index vectors from the rows of their slots.

Legend: T tokens, K choices a token, slot t * K + k, N = T * K, W ranks, S = W * T stage rows of a
        rank, R expert-major rows of a rank.

The stage of a rank has a row for every token of every rank: row ``source * T + t``.  Nothing is
compacted, for the number of rows is static anyway; so a place follows from a token, and the slot
row ``source * N + t * K + k`` of an expert row names its stage row and its choice alike.  In
loopback (``mirrored``) what is sent to rank r lies as if r had sent it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interlace import _compat

if _compat.HAS_TRITON:
    import triton
    import triton.language as tl


def send_index_ref(
    target_TK: Tensor, num_ranks: int, rows_per_rank: int, rank: int, *, mirrored: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The specification."""
    num_tokens, device = target_TK.shape[0], target_TK.device
    ranks_W = torch.arange(num_ranks, device=device)
    peer_TK = torch.where(target_TK >= 0, target_TK // max(rows_per_rank, 1), -1)
    sent_TW = (peer_TK[:, :, None] == ranks_W).any(1)
    token_T1 = torch.arange(num_tokens, device=device)[:, None]
    home_W = ranks_W if mirrored else torch.full_like(ranks_W, rank)
    there_TW = (ranks_W * num_ranks + home_W) * num_tokens + token_T1
    back_TW = ranks_W * num_tokens + token_T1
    there_TW, back_TW = (torch.where(sent_TW, place, -1) for place in (there_TW, back_TW))
    return there_TW.view(-1), token_T1.repeat(1, num_ranks).view(-1), back_TW


def receive_index_ref(
    origin_R: Tensor, shape: tuple[int, int], num_ranks: int, rank: int, *, mirrored: bool
) -> tuple[Tensor, Tensor]:
    """The specification."""
    (num_tokens, top_k), device = shape, origin_R.device
    num_stage = num_ranks * num_tokens
    rows = torch.full((num_stage * top_k + 1,), -1, dtype=torch.int64, device=device)
    unused = torch.where(origin_R < 0, num_stage * top_k, origin_R)  # one place more for these
    rows[unused] = torch.arange(origin_R.shape[0], device=device)
    rows_SK = rows[:-1].view(num_stage, top_k)
    stage_S = torch.arange(num_stage, device=device)
    source_S = stage_S // max(num_tokens, 1)
    home_S = source_S if mirrored else torch.full_like(source_S, rank)
    back_S = (source_S * num_ranks + home_S - source_S) * num_tokens + stage_S
    return rows_SK, torch.where((rows_SK >= 0).any(1), back_S, -1)


if _compat.HAS_TRITON:

    @triton.jit(do_not_specialize=["num_tokens", "rows_per_rank", "rank"])
    def _send_kernel(
        target: tl.tensor,
        there: tl.tensor,
        take: tl.tensor,
        back: tl.tensor,
        num_tokens: tl.tensor,
        rows_per_rank: tl.tensor,
        rank: tl.tensor,
        W: tl.constexpr,
        K: tl.constexpr,
        MIRRORED: tl.constexpr,
        W_PAD: tl.constexpr,
        BLOCK: tl.constexpr,
    ) -> None:
        token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = token < num_tokens
        peer = tl.arange(0, W_PAD)
        sent = tl.zeros([BLOCK, W_PAD], tl.int32)
        for k in tl.static_range(K):
            goal = tl.load(target + token * K + k, mask=inside, other=-1)
            found = tl.where(goal >= 0, goal // rows_per_rank, -1)
            sent |= (found[:, None] == peer[None, :]).to(tl.int32)
        place = peer.to(tl.int64)[None, :] * num_tokens + token[:, None]
        if MIRRORED:
            home = peer.to(tl.int64)
        else:
            home = peer.to(tl.int64) * 0 + rank
        far = (peer * W + home)[None, :] * num_tokens + token[:, None]
        mask = inside[:, None] & (peer < W)[None, :]
        at = token[:, None] * W + peer[None, :]
        tl.store(there + at, tl.where(sent > 0, far, -1), mask=mask)
        tl.store(take + at, token[:, None] + peer[None, :] * 0, mask=mask)
        tl.store(back + at, tl.where(sent > 0, place, -1), mask=mask)

    @triton.jit(do_not_specialize=["num_rows"])
    def _scatter_kernel(
        origin: tl.tensor, rows: tl.tensor, num_rows: tl.tensor, BLOCK: tl.constexpr
    ) -> None:
        row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        place = tl.load(origin + row, mask=row < num_rows, other=-1)
        tl.store(rows + place, row, mask=place >= 0)

    @triton.jit(do_not_specialize=["num_tokens", "num_stage", "rank"])
    def _return_kernel(
        rows: tl.tensor,
        back: tl.tensor,
        num_tokens: tl.tensor,
        num_stage: tl.tensor,
        rank: tl.tensor,
        W: tl.constexpr,
        K: tl.constexpr,
        MIRRORED: tl.constexpr,
        BLOCK: tl.constexpr,
    ) -> None:
        stage = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = stage < num_stage
        used = tl.zeros([BLOCK], tl.int32)
        for k in tl.static_range(K):
            row = tl.load(rows + stage * K + k, mask=inside, other=-1)
            used |= (row >= 0).to(tl.int32)
        source = stage // num_tokens
        if MIRRORED:
            home = source
        else:
            home = source * 0 + rank
        place = (source * W + home - source) * num_tokens + stage
        tl.store(back + stage, tl.where(used > 0, place, -1), mask=inside)


def send_index(
    target_TK: Tensor, num_ranks: int, rows_per_rank: int, rank: int, *, mirrored: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Where each token goes once per rank, and where that rank's answer to it comes back.

    Shapes:  target (T, K) int64: rank * R + row of each slot, R = ``rows_per_rank``, -1 if cut
             -> for each token and rank p: p * S + stage row (T * W,), the token (T * W,), and the
             row p * T + t (T, W), all int64; places are -1 where no slot of the token goes to p.
    Sync:    none; safe under capture.
    Example: W=2, R=4, rank 0, target [[0, 5], [-1, 2]]
             -> [0, 4, 1, -1], [0, 0, 1, 1], [[0, 2], [1, -1]].
    """
    _check("send_index", target_TK, 2)
    if not _compat.runs_triton("send_index", target_TK.device):
        return send_index_ref(target_TK, num_ranks, rows_per_rank, rank, mirrored=mirrored)
    num_tokens, top_k = target_TK.shape
    there, take, back = (target_TK.new_empty(num_tokens, num_ranks) for _ in range(3))
    if num_tokens:
        _send_kernel[(triton.cdiv(num_tokens, 128),)](
            target_TK.contiguous(), there, take, back, num_tokens, rows_per_rank, rank, num_ranks,
            top_k, mirrored, triton.next_power_of_2(num_ranks), 128,
        )  # fmt: skip
    return there.view(-1), take.view(-1), back


def receive_index(
    origin_R: Tensor,
    shape: tuple[int, int],
    num_ranks: int,
    rank: int,
    *,
    mirrored: bool = False,
) -> tuple[Tensor, Tensor]:
    """Which expert rows a stage row becomes, and where their sum goes back to.

    Shapes:  origin (R,) int64: source * N + slot of each expert-major row, -1 past the live ones;
             ``shape`` is (T, K) -> (S, K) int64 expert-major row of each choice, -1 where it is not
             of this rank; (S,) int64 source * S + rank * T + t, -1 for an empty stage row.
    Sync:    none; safe under capture.
    Example: T=1, K=2, W=2, rank 1, origin [3, 1, 2] -> [[-1, 1], [2, 0]], [1, 3].
    """
    _check("receive_index", origin_R, 1)
    if not _compat.runs_triton("receive_index", origin_R.device):
        return receive_index_ref(origin_R, shape, num_ranks, rank, mirrored=mirrored)
    num_tokens, top_k = shape
    num_stage, num_rows = num_ranks * num_tokens, origin_R.shape[0]
    rows_SK = torch.full((num_stage, top_k), -1, dtype=torch.int64, device=origin_R.device)
    back_S = origin_R.new_empty(num_stage)
    if num_rows:
        _scatter_kernel[(triton.cdiv(num_rows, 1024),)](
            origin_R.contiguous(), rows_SK, num_rows, BLOCK=1024
        )
    if num_stage:
        _return_kernel[(triton.cdiv(num_stage, 256),)](
            rows_SK, back_S, num_tokens, num_stage, rank, num_ranks, top_k, mirrored, 256
        )
    return rows_SK, back_S


def _check(op: str, index: Tensor, dim: int) -> None:
    if index.dtype != torch.int64 or index.dim() != dim:
        raise ValueError(
            f"{op}: the index is {index.dtype} {tuple(index.shape)}; expected int64 with {dim} "
            f"dimensions."
        )
