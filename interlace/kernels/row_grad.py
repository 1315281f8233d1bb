"""Backward of a combine that is weighted at the experts: gradients of rows and of their scores.

One pass that expands the staged gradient of each token, scales it and multiplies it with the row
that the expert had made.

Legend: S stage rows, K choices a token, R expert-major rows, of which only the first ``live``
        count, H hidden.  A row's slot, s * K + k, names its stage row s and its choice k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interlace import _compat
from interlace.kernels.expand_rows import check_staged

if _compat.HAS_TRITON:
    import triton
    import triton.language as tl


def row_grad_ref(
    y_RH: Tensor, stage_SH: Tensor, slot_R: Tensor, scores_SK: Tensor, live: Tensor
) -> tuple[Tensor, Tensor]:
    """The specification."""
    count, top_k = int(live), scores_SK.shape[1]
    slot = slot_R[:count]
    grad = stage_SH.index_select(0, slot // top_k).float()
    y_grad = torch.empty_like(y_RH)
    y_grad[:count] = (grad * scores_SK.reshape(-1)[slot][:, None]).to(y_RH.dtype)
    scores_grad = torch.zeros(scores_SK.shape, dtype=torch.float32, device=y_RH.device)
    scores_grad.view(-1)[slot] = (y_RH[:count].float() * grad).sum(1)
    return y_grad, scores_grad


if _compat.HAS_TRITON:
    # H is a compile-time constant: only so does the compiler know which rows are 16-byte aligned.
    @triton.jit
    def _row_grad_kernel(
        y: tl.tensor,
        stage: tl.tensor,
        slot: tl.tensor,
        scores: tl.tensor,
        live: tl.tensor,
        y_grad: tl.tensor,
        scores_grad: tl.tensor,
        K: tl.constexpr,
        STRIDE: tl.constexpr,
        SCORE_STRIDE: tl.constexpr,
        H: tl.constexpr,
        BLOCK_R: tl.constexpr,
        BLOCK_H: tl.constexpr,
    ) -> None:
        first = tl.program_id(0).to(tl.int64) * BLOCK_R
        num_rows = tl.load(live)
        if first < num_rows:  # a buffer of worst-case size is mostly empty
            row = first + tl.arange(0, BLOCK_R)
            used = row < num_rows
            which = tl.load(slot + row, mask=used, other=0).to(tl.int64)
            place = which // K
            score = tl.load(scores + place * SCORE_STRIDE + (which - place * K), mask=used, other=0)
            total = tl.zeros([BLOCK_R, BLOCK_H], tl.float32)
            for start in tl.range(0, H, BLOCK_H):
                column = start + tl.arange(0, BLOCK_H)
                mask = used[:, None] & (column < H)[None, :]
                far = stage + place[:, None] * STRIDE + column[None, :]
                near = row[:, None] * H + column[None, :]
                grad = tl.load(far, mask=mask, other=0.0).to(tl.float32)
                value = tl.load(y + near, mask=mask, other=0.0).to(tl.float32)
                total += value * grad
                scaled = (grad * score[:, None]).to(y_grad.dtype.element_ty)
                tl.store(y_grad + near, scaled, mask=mask)
            tl.store(scores_grad + which, tl.sum(total, 1), mask=used)


def row_grad(
    y_RH: Tensor, stage_SH: Tensor, slot_R: Tensor, scores_SK: Tensor, live: Tensor
) -> tuple[Tensor, Tensor]:
    """With g = stage[slot[r] // K], r < live: y_grad[r] = score * g, scores_grad[slot[r]] = <y, g>.

    Shapes:   y (R, H), stage (S, H), slot (R,) int64 in [0, S * K) for live rows, each once, not
              checked on CUDA, scores (S, K) float32, live (1,) int64 -> (R, H) in the type of y,
              garbage from ``live`` on, and (S, K) float32, zero where no row has the slot.
              Rows of stage and scores are contiguous, with any stride.
    Units:    moves (2 * live + S) * H * itemsize bytes when every stage row is used.
    Numerics: y_grad one float32 product, rounded once; scores_grad float32 products and sums in a
              fixed order, the same bits each run, not the reference's.
    Sync:     none on CUDA; safe under capture.  Not differentiable.
    Raises:   ValueError for shapes, types or devices that do not fit.
    Example:  y = [[1, 2]], stage = [[0, 0], [3, 4]], slot = [1], K = 1, scores = [[5], [10]],
              live = [1] -> [[30, 40]], [[0], [11]].
    """
    check_staged("row_grad", stage_SH, slot_R, scores_SK.shape[-1], live, scores_SK)
    if y_RH.shape != (slot_R.shape[0], stage_SH.shape[1]) or y_RH.dtype != stage_SH.dtype:
        raise ValueError(
            f"row_grad: y is {y_RH.dtype} {tuple(y_RH.shape)}; expected {stage_SH.dtype} "
            f"{(slot_R.shape[0], stage_SH.shape[1])}, one row a slot."
        )
    if not _compat.runs_triton("row_grad", y_RH.device):
        return row_grad_ref(y_RH, stage_SH, slot_R, scores_SK, live)
    (num_rows, hidden), top_k = y_RH.shape, scores_SK.shape[1]
    y_grad = y_RH.new_empty(y_RH.shape)
    scores_grad = torch.zeros(scores_SK.shape, dtype=torch.float32, device=y_RH.device)
    if num_rows == 0:
        return y_grad, scores_grad
    # Eight rows a program: half of the programs of a worst-case buffer do nothing but start.
    block_h = min(triton.next_power_of_2(max(hidden, 1)), 1024 // y_RH.element_size())
    _row_grad_kernel[(triton.cdiv(num_rows, 8),)](
        y_RH.contiguous(),
        stage_SH,
        slot_R.contiguous(),
        scores_SK,
        live,
        y_grad,
        scores_grad,
        K=top_k,
        STRIDE=stage_SH.stride(0),
        SCORE_STRIDE=scores_SK.stride(0),
        H=hidden,
        BLOCK_R=8,
        BLOCK_H=block_h,
        num_warps=4,
    )
    return y_grad, scores_grad
