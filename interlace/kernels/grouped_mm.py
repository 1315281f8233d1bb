"""One matrix product an expert, over rows sorted by expert.

Legend: R rows (all experts, capacity included), e local experts, D in, F out.

``torch.nn.functional.grouped_mm`` does the work.  It stands behind operators of our own for three
reasons: its shape inference refuses float32 (torch 2.11 and 2.13), the gradients keep the contract
on rows past the last expert, and graph passes meet plain operators instead of a decomposition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_lib = torch.library.Library("interlace", "FRAGMENT")
_lib.define("grouped_mm(Tensor x, Tensor w, Tensor ends) -> Tensor")
_lib.define("grouped_wgrad(Tensor x, Tensor grad, Tensor ends) -> Tensor")


def grouped_mm(x_RD: Tensor, w_eDF: Tensor, ends_e: Tensor) -> Tensor:
    """Multiplies the rows of expert j, ``ends[j-1] .. ends[j]``, by ``w[j]``.

    Shapes:   x (R, D), w (e, D, F), ends (e,) int32 ascending, ends[-1] <= R -> (R, F).
    Numerics: that of torch's grouped_mm: float32 accumulation, one rounding.
              Rows past ``ends[-1]`` are garbage in the output and in the gradient of x; neither
              reaches the valid rows nor the gradient of w.  An expert without rows has a zero
              gradient, not none.
    Sync:     none on CUDA.
    Raises:   ValueError for shapes that do not fit, TypeError for ends that are not int32.
    """
    if x_RD.dim() != 2 or w_eDF.dim() != 3 or x_RD.shape[1] != w_eDF.shape[1]:
        raise ValueError(
            f"grouped_mm: x is {tuple(x_RD.shape)} and w is {tuple(w_eDF.shape)}; "
            "expected (R, D) and (e, D, F)."
        )
    if ends_e.dtype != torch.int32 or ends_e.shape != w_eDF.shape[:1]:
        raise TypeError(
            f"grouped_mm: ends is {ends_e.dtype} {tuple(ends_e.shape)}; "
            f"expected int32 ({w_eDF.shape[0]},)."
        )
    return torch.ops.interlace.grouped_mm(x_RD, w_eDF, ends_e)


def grouped_mm_ref(x_RD: Tensor, w_eDF: Tensor, ends_e: Tensor) -> Tensor:
    """The specification: a loop over experts; rows past the end are zero."""
    out_RF = x_RD.new_zeros(x_RD.shape[0], w_eDF.shape[2])
    start = 0
    for j, end in enumerate(ends_e.tolist()):
        out_RF[start:end] = x_RD[start:end] @ w_eDF[j]
        start = end
    return out_RF


def _mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    if x.shape[0] == 0:
        return x.new_empty(0, w.shape[2])
    return torch.nn.functional.grouped_mm(x, w, offs=ends)


def _wgrad(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    if x.shape[0] == 0:
        return x.new_zeros(ends.shape[0], x.shape[1], grad.shape[1])
    return torch.nn.functional.grouped_mm(x.t(), grad, offs=ends)


for _key in ("CPU", "CUDA"):
    _lib.impl("grouped_mm", _mm, _key)
    _lib.impl("grouped_wgrad", _wgrad, _key)


@torch.library.register_fake("interlace::grouped_mm", lib=_lib)
def _mm_fake(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


@torch.library.register_fake("interlace::grouped_wgrad", lib=_lib)
def _wgrad_fake(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], grad.shape[1])


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, w, ends = ctx.saved_tensors
    grad = grad.contiguous()
    gx = torch.ops.interlace.grouped_mm(grad, w.transpose(1, 2), ends)
    gw = torch.ops.interlace.grouped_wgrad(x, grad, ends)
    return gx, gw, None


torch.library.register_autograd("interlace::grouped_mm", _backward, setup_context=_setup, lib=_lib)
