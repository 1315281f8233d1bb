"""The gradient of the scores: one dot product for each slot of each token.

Legend: T tokens, K choices a token, S slot rows (in the layout of the send buffer), H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interlace import _compat
from interlace.kernels.slot_reduce import check_slots, slot_rows

if _compat.HAS_TRITON:
    import triton
    import triton.language as tl


def slot_grad_ref(slots_SH: Tensor, pos_TK: Tensor, grad_TH: Tensor) -> Tensor:
    """The specification."""
    if pos_TK.shape[1] == 0:
        return pos_TK.new_zeros(pos_TK.shape, dtype=torch.float32)
    grad = grad_TH.float()
    columns = [(slot_rows(slots_SH, pos_T) * grad).sum(1) for pos_T in pos_TK.unbind(1)]
    return torch.stack(columns, 1)


if _compat.HAS_TRITON:
    # H is a compile-time constant: only so does the compiler know which rows are 16-byte aligned.
    @triton.jit
    def _slot_grad_kernel(
        slots: tl.tensor,
        pos: tl.tensor,
        grad: tl.tensor,
        out: tl.tensor,
        H: tl.constexpr,
        K: tl.constexpr,
        BLOCK_K: tl.constexpr,
        BLOCK_H: tl.constexpr,
    ) -> None:
        token = tl.program_id(0).to(tl.int64)
        k = tl.arange(0, BLOCK_K)
        place = tl.load(pos + token * K + k, mask=k < K, other=-1).to(tl.int64)
        total = tl.zeros([BLOCK_K, BLOCK_H], tl.float32)
        for start in tl.range(0, H, BLOCK_H):
            column = start + tl.arange(0, BLOCK_H)
            inside = column < H
            factor = tl.load(grad + token * H + column, mask=inside, other=0.0).to(tl.float32)
            mask = (place >= 0)[:, None] & inside[None, :]
            row = tl.load(slots + place[:, None] * H + column[None, :], mask=mask, other=0.0)
            total += row.to(tl.float32) * factor[None, :]
        tl.store(out + token * K + k, tl.sum(total, 1), mask=k < K)


def slot_grad(slots_SH: Tensor, pos_TK: Tensor, grad_TH: Tensor) -> Tensor:
    """``out[t, k] = <slots[pos[t, k]], grad[t]>``; a position of -1 gives zero.

    Shapes:   slots (S, H), pos (T, K) int64 in [-1, S), not checked on CUDA, grad (T, H) -> (T, K)
              float32.
    Units:    moves (T * K + T) * H * itemsize bytes when every slot is used once.
    Numerics: float32 products and sums in a fixed order, no atomics: the same bits each run, not
              the reference's.
    Sync:     none; safe under capture.  Not differentiable.
    Raises:   ValueError for shapes, types or devices that do not fit.
    Example:  slots = [[1, 2], [3, 4]], pos = [[1, -1]], grad = [[10, 1]] -> [[34, 0]].
    """
    check_slots("slot_grad", slots_SH, pos_TK, None)
    (num_tokens, top_k), hidden = pos_TK.shape, slots_SH.shape[1]
    if grad_TH.shape != (num_tokens, hidden) or grad_TH.device != slots_SH.device:
        raise ValueError(
            f"slot_grad: grad is {tuple(grad_TH.shape)} on {grad_TH.device}; "
            f"expected {(num_tokens, hidden)} on {slots_SH.device}, one row a token."
        )
    if not _compat.runs_triton("slot_grad", slots_SH.device):
        return slot_grad_ref(slots_SH, pos_TK, grad_TH)
    out_TK = pos_TK.new_empty((num_tokens, top_k), dtype=torch.float32)
    if out_TK.numel() == 0:
        return out_TK
    # One warp a token, whose threads hold all K rows at 16 bytes of columns: no exchange between
    # threads before the last sum, K + 1 wide loads in flight each.
    block_k = triton.next_power_of_2(top_k)
    block_h = min(512 // slots_SH.element_size(), max(2048 // block_k, 32))
    _slot_grad_kernel[num_tokens,](
        slots_SH.contiguous(),
        pos_TK.contiguous(),
        grad_TH.contiguous(),
        out_TK,
        H=hidden,
        K=top_k,
        BLOCK_K=block_k,
        BLOCK_H=min(block_h, triton.next_power_of_2(max(hidden, 1))),
        num_warps=1,
    )
    return out_TK
