"""Sum the K returned rows of each token, weighted by its scores: the end of a combine.

Legend: T tokens, K choices a token, S slot rows (in the layout of the send buffer), H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interlace import _compat

if _compat.HAS_TRITON:
    import triton
    import triton.language as tl


def slot_reduce_ref(slots_SH: Tensor, pos_TK: Tensor, scores_TK: Tensor | None = None) -> Tensor:
    """The specification."""
    out_TH = slots_SH.new_zeros(pos_TK.shape[0], slots_SH.shape[1], dtype=torch.float32)
    for k in range(pos_TK.shape[1]):
        row_TH = slot_rows(slots_SH, pos_TK[:, k])
        if scores_TK is not None:
            row_TH *= scores_TK[:, k, None]
        out_TH += row_TH
    return out_TH.to(slots_SH.dtype)


def slot_rows(slots_SH: Tensor, pos_T: Tensor) -> Tensor:
    """The float32 rows at these positions; a negative position gives zeros."""
    if slots_SH.shape[0] == 0:
        return slots_SH.new_zeros(pos_T.shape[0], slots_SH.shape[1], dtype=torch.float32)
    rows_TH = slots_SH.index_select(0, pos_T.clamp(min=0)).float()
    return rows_TH.masked_fill_(pos_T[:, None] < 0, 0.0)


if _compat.HAS_TRITON:
    # H is a compile-time constant: only so does the compiler know which rows are 16-byte aligned.
    @triton.jit
    def _slot_reduce_kernel(
        slots: tl.tensor,
        pos: tl.tensor,
        scores: tl.tensor,
        out: tl.tensor,
        H: tl.constexpr,
        K: tl.constexpr,
        BLOCK_H: tl.constexpr,
    ) -> None:
        token = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = column < H
        total = tl.zeros([BLOCK_H], tl.float32)
        for k in tl.static_range(K):
            place = tl.load(pos + token * K + k).to(tl.int64)
            row = tl.load(slots + place * H + column, mask=inside & (place >= 0), other=0.0)
            row = row.to(tl.float32)
            if scores is not None:
                row = row * tl.load(scores + token * K + k)
            total += row
        tl.store(out + token * H + column, total.to(out.dtype.element_ty), mask=inside)


def slot_reduce(slots_SH: Tensor, pos_TK: Tensor, scores_TK: Tensor | None = None) -> Tensor:
    """``out[t] = sum over k of scores[t, k] * slots[pos[t, k]]``; a position of -1 counts zero.

    Shapes:   slots (S, H), pos (T, K) int64 in [-1, S), not checked on CUDA, scores (T, K) float32
              or none -> (T, H) in the type of slots.
    Units:    moves (T * K + T) * H * itemsize bytes when every slot is used once.
    Numerics: float32, k = 0 .. K-1 in this order, product and sum each rounded (no fused
              multiply-add), one rounding to the type of slots: the same bits as the reference.
    Sync:     none; safe under capture.  Not differentiable.
    Raises:   ValueError for shapes, types or devices that do not fit.
    Example:  slots = [[1], [2]], pos = [[1, 0], [0, -1]], scores = [[5, 1], [3, 9]]
              -> [[11], [3]].
    """
    check_slots("slot_reduce", slots_SH, pos_TK, scores_TK)
    if not _compat.runs_triton("slot_reduce", slots_SH.device):
        return slot_reduce_ref(slots_SH, pos_TK, scores_TK)
    (num_tokens, top_k), hidden = pos_TK.shape, slots_SH.shape[1]
    out_TH = slots_SH.new_empty(num_tokens, hidden)
    if out_TH.numel() == 0:
        return out_TH
    block_h = min(triton.next_power_of_2(hidden), 2048)
    _slot_reduce_kernel[num_tokens, triton.cdiv(hidden, block_h)](
        slots_SH.contiguous(),
        pos_TK.contiguous(),
        None if scores_TK is None else scores_TK.contiguous(),
        out_TH,
        H=hidden,
        K=top_k,
        BLOCK_H=block_h,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out_TH


def check_slots(op: str, slots_SH: Tensor, pos_TK: Tensor, scores_TK: Tensor | None) -> None:
    """ValueError, naming ``op``, for slots, positions and scores that do not belong together."""
    if slots_SH.dim() != 2 or pos_TK.dim() != 2 or pos_TK.dtype != torch.int64:
        raise ValueError(
            f"{op}: slots is {tuple(slots_SH.shape)} and pos is {pos_TK.dtype} "
            f"{tuple(pos_TK.shape)}; expected (S, H) and int64 (T, K)."
        )
    if scores_TK is not None and (
        scores_TK.dtype != torch.float32 or scores_TK.shape != pos_TK.shape
    ):
        raise ValueError(
            f"{op}: scores is {scores_TK.dtype} {tuple(scores_TK.shape)}; "
            f"expected torch.float32 {tuple(pos_TK.shape)}, one score a position."
        )
    devices = {str(t.device) for t in (slots_SH, pos_TK, scores_TK) if t is not None}
    if len(devices) > 1:
        raise ValueError(f"{op}: tensors on {', '.join(sorted(devices))}; use one device.")
