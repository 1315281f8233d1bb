"""Expand staged rows: a token that came once becomes a row for each of its local experts.

Legend: S stage rows, K choices a token, R expert-major rows, of which only the first ``live``
        count, H hidden.  A row's slot, s * K + k, names its stage row s and its choice k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interlace import _compat
from interlace.kernels.gather_rows import gather_rows_ref

if _compat.HAS_TRITON:
    import triton
    import triton.language as tl


def expand_rows_ref(
    stage_SH: Tensor, slot_R: Tensor, top_k: int, live: Tensor, scale_SK: Tensor | None, out: Tensor
) -> Tensor:
    """The specification."""
    count = int(live)
    slot = slot_R[:count]
    scale = None if scale_SK is None else scale_SK.reshape(-1)[slot]
    out[:count] = gather_rows_ref(stage_SH, slot // top_k, scale)
    return out


if _compat.HAS_TRITON:
    # H is a compile-time constant: only so does the compiler know which rows are 16-byte aligned.
    @triton.jit
    def _expand_rows_kernel(
        stage: tl.tensor,
        slot: tl.tensor,
        live: tl.tensor,
        scale: tl.tensor,
        out: tl.tensor,
        K: tl.constexpr,
        STRIDE: tl.constexpr,
        SCALE_STRIDE: tl.constexpr,
        H: tl.constexpr,
        BLOCK_R: tl.constexpr,
        BLOCK_H: tl.constexpr,
    ) -> None:
        first = tl.program_id(0).to(tl.int64) * BLOCK_R
        num_rows = tl.load(live)
        if first < num_rows:  # a buffer of worst-case size is mostly empty
            row = first + tl.arange(0, BLOCK_R)
            column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
            inside = row < num_rows
            mask = inside[:, None] & (column < H)[None, :]
            which = tl.load(slot + row, mask=inside, other=0).to(tl.int64)
            place = which // K
            value = tl.load(stage + place[:, None] * STRIDE + column[None, :], mask=mask)
            if scale is not None:
                at = scale + place * SCALE_STRIDE + (which - place * K)
                factor = tl.load(at, mask=inside, other=0.0)
                value = (value.to(tl.float32) * factor[:, None]).to(out.dtype.element_ty)
            tl.store(out + row[:, None] * H + column[None, :], value, mask=mask)


def expand_rows(
    stage_SH: Tensor,
    slot_R: Tensor,
    top_k: int,
    live: Tensor,
    scale_SK: Tensor | None = None,
    out_RH: Tensor | None = None,
) -> Tensor:
    """Row r < live is ``stage[slot[r] // K]``, times the scale of ``slot[r]`` if there are scales.

    Shapes:   stage (S, H), slot (R,) int64 in [0, S * K) for live rows, not checked on CUDA, live
              (1,) int64, scale (S, K) float32 -> (R, H) in the type of stage, from row ``live`` on
              as the memory was.  Rows of stage and scale are contiguous, with any stride.
    Units:    moves (S + live) * H * itemsize bytes when every stage row is used.
    Numerics: without a scale bit-exact; with one, one float32 product, rounded once.
    Sync:     none on CUDA; safe under capture.  Not differentiable.
    Raises:   ValueError for shapes, types or devices that do not fit.
    Example:  stage = [[1], [2]], slot = [3, 2, 0], K = 2, live = [2], scale = [[9, 9], [1, 10]]
              -> [[20], [2], garbage].
    """
    check_staged("expand_rows", stage_SH, slot_R, top_k, live, scale_SK)
    num_rows, hidden = slot_R.shape[0], stage_SH.shape[1]
    if out_RH is None:
        out_RH = stage_SH.new_empty(num_rows, hidden)
    if not _compat.runs_triton("expand_rows", stage_SH.device):
        return expand_rows_ref(stage_SH, slot_R, top_k, live, scale_SK, out_RH)
    if out_RH.numel() == 0:
        return out_RH
    # A program moves 16 KiB, 8 loads of 16 bytes a thread: enough in flight for any row length.
    block_h = min(triton.next_power_of_2(hidden), 2048)
    block_r = max(16384 // stage_SH.element_size() // block_h, 1)
    _expand_rows_kernel[triton.cdiv(num_rows, block_r), triton.cdiv(hidden, block_h)](
        stage_SH,
        slot_R.contiguous(),
        live,
        scale_SK,
        out_RH,
        K=top_k,
        STRIDE=stage_SH.stride(0),
        SCALE_STRIDE=0 if scale_SK is None else scale_SK.stride(0),
        H=hidden,
        BLOCK_R=block_r,
        BLOCK_H=block_h,
        num_warps=4,
    )
    return out_RH


def check_staged(
    op: str, stage_SH: Tensor, slot_R: Tensor, top_k: int, live: Tensor, scale_SK: Tensor | None
) -> None:
    """ValueError, naming ``op``, for a stage, slots and factors that do not belong together."""
    for name, rows in (("stage", stage_SH), ("scale", scale_SK)):
        if rows is not None and (rows.dim() != 2 or (rows.shape[1] > 1 and rows.stride(1) != 1)):
            raise ValueError(
                f"{op}: {name} is {tuple(rows.shape)} with strides {rows.stride()}; expected a "
                f"matrix with contiguous rows."
            )
    if slot_R.dim() != 1 or slot_R.dtype != torch.int64 or live.dtype != torch.int64:
        raise ValueError(
            f"{op}: slot is {slot_R.dtype} {tuple(slot_R.shape)} and live {live.dtype}; "
            f"expected int64 (R,) and int64 (1,)."
        )
    wanted = (stage_SH.shape[0], top_k)
    if scale_SK is not None and (scale_SK.dtype, scale_SK.shape) != (torch.float32, wanted):
        raise ValueError(
            f"{op}: the factors are {scale_SK.dtype} {tuple(scale_SK.shape)}; expected "
            f"torch.float32 {wanted}, one a choice of a stage row."
        )
    devices = {str(t.device) for t in (stage_SH, slot_R, live, scale_SK) if t is not None}
    if len(devices) > 1:
        raise ValueError(f"{op}: tensors on {', '.join(sorted(devices))}; use one device.")
