"""Cross entropy of half-precision logits without a float32 copy of them.

torch's form widens the logits, writes their log-softmax in float32, and reads both again for the
gradient: at a vocabulary of 100,000 that is five times the bytes of the logits themselves.  Here
the forward keeps one number a row (the logarithm of the sum of exponentials), and the backward
reads the logits once more and writes their gradient in their own type.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from interlace import _compat

if _compat.HAS_TRITON:
    import triton
    import triton.language as tl

_lib = torch.library.Library("interlace", "FRAGMENT")
_lib.define("cross_entropy(Tensor logits, Tensor labels) -> (Tensor nll, Tensor log_sum)")
_lib.define(
    "cross_entropy_grad(Tensor logits, Tensor labels, Tensor log_sum, Tensor grad) -> Tensor"
)
_BLOCK = 4096


def cross_entropy(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """``nll[t] = log(sum over v of exp(logits[t, v])) - logits[t, labels[t]]``; 0 for no label.

    Shapes:   logits (T, V), labels (T,) int64 in [0, V), or negative: no label -> (T,) float32.
    Units:    forward reads, backward reads and writes T * V * itemsize bytes.
    Numerics: float32 from the widened logits, sums in a fixed order; the gradient is rounded once
              to the type of the logits.  Labels of V and above are not checked on CUDA.
    Sync:     none; safe under capture.
    Raises:   ValueError for shapes or types that do not fit.
    """
    if logits_TV.dim() != 2 or labels_T.shape != logits_TV.shape[:1]:
        raise ValueError(
            f"cross_entropy: logits are {tuple(logits_TV.shape)} and labels "
            f"{tuple(labels_T.shape)}; expected (T, V) and (T,)."
        )
    if labels_T.dtype != torch.int64:
        raise ValueError(f"cross_entropy: labels are {labels_T.dtype}; expected torch.int64.")
    return torch.ops.interlace.cross_entropy(logits_TV, labels_T)[0]


def cross_entropy_ref(logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
    """The specification of the forward: nll and log_sum, (T,) float32."""
    log_sum_T = logits_TV.float().logsumexp(1)
    taken_T = logits_TV.gather(1, labels_T.clamp(min=0).unsqueeze(1)).squeeze(1).float()
    return torch.where(labels_T < 0, 0.0, log_sum_T - taken_T), log_sum_T


def cross_entropy_grad_ref(
    logits_TV: Tensor, labels_T: Tensor, log_sum_T: Tensor, grad_T: Tensor
) -> Tensor:
    """The specification of the backward: (softmax - one at the label) * grad."""
    softmax_TV = (logits_TV.float() - log_sum_T[:, None]).exp_()
    at_label_T1 = labels_T.clamp(min=0).unsqueeze(1)
    softmax_TV.scatter_(1, at_label_T1, softmax_TV.gather(1, at_label_T1) - 1)
    softmax_TV *= torch.where(labels_T < 0, 0.0, grad_T)[:, None]
    return softmax_TV.to(logits_TV.dtype)


if _compat.HAS_TRITON:

    @triton.jit
    def _cross_entropy_kernel(
        logits: tl.tensor,
        labels: tl.tensor,
        nll: tl.tensor,
        log_sum: tl.tensor,
        V: tl.constexpr,
        BLOCK: tl.constexpr,
    ) -> None:
        row = tl.program_id(0).to(tl.int64)
        largest = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, V, BLOCK):  # a running maximum in every lane
            column = start + tl.arange(0, BLOCK)
            x = tl.load(logits + row * V + column, mask=column < V, other=float("-inf"))
            x = x.to(tl.float32)
            higher = tl.maximum(largest, x)
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(largest - shift) + tl.exp(x - shift)
            largest = higher
        top = tl.max(largest, 0)
        result = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
        label = tl.load(labels + row)
        taken = tl.load(logits + row * V + tl.maximum(label, 0)).to(tl.float32)
        tl.store(log_sum + row, result)
        tl.store(nll + row, tl.where(label < 0, 0.0, result - taken))

    @triton.jit
    def _cross_entropy_grad_kernel(
        logits: tl.tensor,
        labels: tl.tensor,
        log_sum: tl.tensor,
        grad: tl.tensor,
        out: tl.tensor,
        V: tl.constexpr,
        BLOCK: tl.constexpr,
    ) -> None:
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        label = tl.load(labels + row)
        factor = tl.where(label < 0, 0.0, tl.load(grad + row))
        x = tl.load(logits + row * V + column, mask=column < V, other=0.0).to(tl.float32)
        g = tl.exp(x - tl.load(log_sum + row)) - tl.where(column == label, 1.0, 0.0)
        tl.store(out + row * V + column, (g * factor).to(out.dtype.element_ty), mask=column < V)


def _forward(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if not _compat.runs_triton("cross_entropy", logits.device) or logits.numel() == 0:
        return cross_entropy_ref(logits, labels)
    logits, num_tokens = logits.contiguous(), logits.shape[0]
    nll, log_sum = (logits.new_empty(num_tokens, dtype=torch.float32) for _ in range(2))
    block = min(_BLOCK, triton.next_power_of_2(logits.shape[1]))
    _cross_entropy_kernel[num_tokens,](
        logits, labels.contiguous(), nll, log_sum, V=logits.shape[1], BLOCK=block, num_warps=8
    )
    return nll, log_sum


def _backward(logits: Tensor, labels: Tensor, log_sum: Tensor, grad: Tensor) -> Tensor:
    if not _compat.runs_triton("cross_entropy", logits.device) or logits.numel() == 0:
        return cross_entropy_grad_ref(logits, labels, log_sum, grad)
    logits = logits.contiguous()
    out, (num_tokens, vocab) = torch.empty_like(logits), logits.shape
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    _cross_entropy_grad_kernel[num_tokens, triton.cdiv(vocab, block)](
        logits, labels.contiguous(), log_sum, grad.contiguous(), out, V=vocab, BLOCK=block,
        num_warps=8,
    )  # fmt: skip
    return out


for _key in ("CPU", "CUDA"):
    _lib.impl("cross_entropy", _forward, _key)
    _lib.impl("cross_entropy_grad", _backward, _key)


@torch.library.register_fake("interlace::cross_entropy", lib=_lib)
def _forward_fake(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    nll, log_sum = (logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(2))
    return nll, log_sum


@torch.library.register_fake("interlace::cross_entropy_grad", lib=_lib)
def _backward_fake(logits: Tensor, labels: Tensor, log_sum: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])


def _autograd(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
    logits, labels, log_sum = ctx.saved_tensors
    return torch.ops.interlace.cross_entropy_grad(logits, labels, log_sum, grad), None


torch.library.register_autograd(
    "interlace::cross_entropy", _autograd, setup_context=_setup, lib=_lib
)
