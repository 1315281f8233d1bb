"""AdamW of one parameter in one pass over memory, the gradient clipped and widened on the way.

torch's fused AdamW wants the gradient in the parameter's type and already clipped: a cast and a
scaling, two more passes over all gradients.  Here the gradient is read once, as the backward left
it (half precision or float32), and multiplied by the clipping factor in registers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from interlace import _compat

if _compat.HAS_TRITON:
    import triton
    import triton.language as tl

_BLOCK = 2048


def adamw_ref_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    factor: Tensor | None,
    *,
    decay: float,
    beta1: float,
    beta2: float,
    step_size: float,
    denominator: float,
    eps: float,
) -> None:
    """The specification."""
    g = grad.float() if factor is None else grad.float() * factor
    param.mul_(decay)
    exp_avg.lerp_(g, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    param.addcdiv_(exp_avg, exp_avg_sq.sqrt().div_(denominator).add_(eps), value=-step_size)


if _compat.HAS_TRITON:

    @triton.jit
    def _adamw_kernel(
        param: tl.tensor,
        grad: tl.tensor,
        exp_avg: tl.tensor,
        exp_avg_sq: tl.tensor,
        factor: tl.tensor,
        numel: tl.tensor,
        decay: tl.tensor,
        rest1: tl.tensor,
        beta2: tl.tensor,
        rest2: tl.tensor,
        step_size: tl.tensor,
        denominator: tl.tensor,
        eps: tl.tensor,
        BLOCK: tl.constexpr,
    ) -> None:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = i < numel
        g = tl.load(grad + i, mask=inside, other=0.0).to(tl.float32)
        if factor is not None:
            g = g * tl.load(factor)
        p = tl.load(param + i, mask=inside, other=0.0) * decay
        m = tl.load(exp_avg + i, mask=inside, other=0.0)
        v = tl.load(exp_avg_sq + i, mask=inside, other=0.0)
        m = m + (g - m) * rest1
        v = v * beta2 + g * g * rest2
        p = p - step_size * m / (tl.sqrt(v) / denominator + eps)
        tl.store(exp_avg + i, m, mask=inside)
        tl.store(exp_avg_sq + i, v, mask=inside)
        tl.store(param + i, p, mask=inside)


def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    factor: Tensor | None = None,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One AdamW update in place, of a gradient times ``factor``; ``step`` counts from 1.

    Shapes:   all equal; param and moments float32, grad float32 or half precision, all contiguous;
              factor a 0-d float32 tensor on the same device, or none.
    Units:    moves (24 + itemsize of grad) bytes an element.
    Numerics: float32; torch's AdamW up to the rounding of its last operations (the moments are
              lerped and fused there as the compiler likes).
    Sync:     none.
    Raises:   ValueError for tensors that do not fit.
    """
    same = (param, exp_avg, exp_avg_sq)
    if any(t.dtype != torch.float32 or not t.is_contiguous() for t in same) or any(
        t.shape != param.shape or t.device != param.device for t in (grad, *same)
    ):
        raise ValueError(
            f"adamw_: parameter {tuple(param.shape)}, gradient {tuple(grad.shape)}, moments "
            f"{tuple(exp_avg.shape)} and {tuple(exp_avg_sq.shape)}; expected equal shapes on one "
            "device, parameter and moments float32 and contiguous."
        )
    numbers = {
        "decay": 1 - lr * weight_decay,
        "beta2": betas[1],
        "step_size": lr / (1 - betas[0] ** step),
        "denominator": math.sqrt(1 - betas[1] ** step),
        "eps": eps,
    }
    if not _compat.runs_triton("adamw_", param.device):
        adamw_ref_(param, grad, exp_avg, exp_avg_sq, factor, beta1=betas[0], **numbers)
        return
    if param.numel() == 0:
        return
    _adamw_kernel[(triton.cdiv(param.numel(), _BLOCK),)](
        param,
        grad.contiguous(),
        exp_avg,
        exp_avg_sq,
        factor,
        param.numel(),
        rest1=1 - betas[0],
        rest2=1 - betas[1],
        **numbers,
        BLOCK=_BLOCK,
        num_warps=8,
    )
