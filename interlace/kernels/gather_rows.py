"""Gather rows of a matrix, each scaled or not: packs and unpacks an exchange in one launch.

Legend: T source rows, R gathered rows, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interlace import _compat

if _compat.HAS_TRITON:
    import triton
    import triton.language as tl


def gather_rows_ref(
    x_TH: Tensor, index_R: Tensor, scale_R: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """The specification."""
    if scale_R is None:
        return torch.index_select(x_TH, 0, index_R, out=out)
    rows_RH = (x_TH.index_select(0, index_R).float() * scale_R[:, None]).to(x_TH.dtype)
    return rows_RH if out is None else out.copy_(rows_RH)


if _compat.HAS_TRITON:
    # H is a compile-time constant: only so does the compiler know which rows are 16-byte aligned.
    # The number of rows changes from step to step and must not make it compile again.
    @triton.jit(do_not_specialize=["num_rows"])
    def _gather_rows_kernel(
        x: tl.tensor,
        index: tl.tensor,
        scale: tl.tensor,
        out: tl.tensor,
        num_rows: tl.tensor,
        H: tl.constexpr,
        BLOCK_R: tl.constexpr,
        BLOCK_H: tl.constexpr,
    ) -> None:
        row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
        column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        live = row < num_rows
        mask = live[:, None] & (column < H)[None, :]
        source = tl.load(index + row, mask=live, other=0).to(tl.int64)
        value = tl.load(x + source[:, None] * H + column[None, :], mask=mask)
        if scale is not None:
            factor = tl.load(scale + row, mask=live, other=0.0)
            value = (value.to(tl.float32) * factor[:, None]).to(out.dtype.element_ty)
        tl.store(out + row[:, None] * H + column[None, :], value, mask=mask)


def gather_rows(
    x_TH: Tensor, index_R: Tensor, scale_R: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Row r of the result is ``x[index[r]]``, times ``scale[r]`` if a scale is given.

    Shapes:   x (T, H), index (R,) int64 in [0, T), not checked on CUDA, scale (R,) float32
              -> (R, H) in the type of x; ``out`` is a contiguous place for it, apart from x.
    Units:    moves (T + R) * H * itemsize bytes when every row is used once.
    Numerics: without a scale bit-exact; with one, one float32 product, rounded once.
    Sync:     none; safe under capture.  Not differentiable.
    Raises:   ValueError for shapes, types or devices that do not fit.
    Example:  x = [[1, 2], [3, 4]], index = [1, 1], scale = [1, 10] -> [[3, 4], [30, 40]].
    """
    _check(x_TH, index_R, scale_R, out)
    if not _compat.runs_triton("gather_rows", x_TH.device):
        return gather_rows_ref(x_TH, index_R, scale_R, out)
    num_rows, hidden = index_R.shape[0], x_TH.shape[1]
    if out is None:
        out = x_TH.new_empty(num_rows, hidden)
    if out.numel() == 0:
        return out
    # A program moves 16 KiB, 8 loads of 16 bytes a thread: enough in flight for any row length.
    block_h = min(triton.next_power_of_2(hidden), 2048)
    block_r = max(16384 // x_TH.element_size() // block_h, 1)
    _gather_rows_kernel[triton.cdiv(num_rows, block_r), triton.cdiv(hidden, block_h)](
        x_TH.contiguous(),
        index_R.contiguous(),
        None if scale_R is None else scale_R.contiguous(),
        out,
        num_rows,
        H=hidden,
        BLOCK_R=block_r,
        BLOCK_H=block_h,
        num_warps=4,
    )
    return out


def _check(x_TH: Tensor, index_R: Tensor, scale_R: Tensor | None, out: Tensor | None) -> None:
    if x_TH.dim() != 2 or index_R.dim() != 1 or index_R.dtype != torch.int64:
        raise ValueError(
            f"gather_rows: x is {tuple(x_TH.shape)} and index is {index_R.dtype} "
            f"{tuple(index_R.shape)}; expected (T, H) and int64 (R,)."
        )
    wanted = (index_R.shape[0], x_TH.shape[1])
    if scale_R is not None and (scale_R.dtype, scale_R.shape) != (torch.float32, wanted[:1]):
        raise ValueError(
            f"gather_rows: scale is {scale_R.dtype} {tuple(scale_R.shape)}; "
            f"expected torch.float32 {wanted[:1]}, one factor a gathered row."
        )
    if out is not None and not (
        out.shape == wanted and out.dtype == x_TH.dtype and out.is_contiguous()
    ):
        raise ValueError(
            f"gather_rows: out is {out.dtype} {tuple(out.shape)} with strides {out.stride()}; "
            f"expected contiguous {x_TH.dtype} {wanted}."
        )
    devices = {str(t.device) for t in (x_TH, index_R, scale_R, out) if t is not None}
    if len(devices) > 1:
        raise ValueError(f"gather_rows: tensors on {', '.join(sorted(devices))}; use one device.")
