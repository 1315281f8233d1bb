"""Optimizer and learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from interlace.kernels.adamw import adamw_
from interlace.train.norms import scale_

OPTIMIZERS = ("AdamW", "SGD")


def build_optimizer(
    named_parameters: Iterable[tuple[str, Parameter]],
    *,
    name: str = "AdamW",
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> Optimizer:
    """AdamW, or plain SGD: no momentum, no decay, for comparisons (it hides no scale fault).

    Two parameter groups: matrices, with AdamW's weight decay, and the rest (vectors, biases,
    norms), without.  The state dict carries parameter names.
    """
    if name not in OPTIMIZERS:
        raise ValueError(
            f"optimizer.name={name}: unknown optimizer. Use one of {', '.join(OPTIMIZERS)}."
        )
    parameters = [(n, p) for n, p in named_parameters if p.requires_grad]
    if not parameters:
        raise ValueError("build_optimizer: the model has no trainable parameter; give it one.")
    decay = weight_decay if name == "AdamW" else 0.0
    matrices = [(n, p) for n, p in parameters if decays(n, p)]
    rest = [(n, p) for n, p in parameters if not decays(n, p)]
    groups: list[dict[str, Any]] = [
        {"params": params, "weight_decay": value}
        for params, value in ((matrices, decay), (rest, 0.0))
        if params
    ]
    if name == "SGD":
        return torch.optim.SGD(groups, lr=lr, foreach=True)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, foreach=True)


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: matrices only, stacked ones included; never norms, biases.

    Names matter too: the stacked biases of all experts form a matrix.
    """
    is_excluded = "norm" in name or name.rpartition(".")[2].endswith("bias")
    return parameter.ndim >= 2 and not is_excluded


def learning_rate(
    step: int, *, base: float, warmup_steps: int, total_steps: int, min_factor: float = 0.0
) -> float:
    """Linear warm-up, then a cosine down to ``min_factor * base``.

    ``step`` counts finished updates, from 0.  The first of ``warmup_steps`` is already above 0,
    the last has ``base``; the last of ``total_steps`` has the minimum, and so has all after it.
    Example: base 1, warm-up 2, total 4, minimum 0 -> 0.5, 1, 0.5, 0.
    """
    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    peak = max(warmup_steps - 1, 0)
    progress = min((step - peak) / max(total_steps - 1 - peak, 1), 1.0)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return base * (min_factor + (1 - min_factor) * cosine)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Gives all parameter groups this rate, before the step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def update(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]],
    grads: Mapping[str, Tensor | None],
    factor: Tensor | None = None,
) -> None:
    """One optimizer step with these gradients times ``factor`` (0-d float32; None: as they are).

    A gradient may be in half precision; arithmetic is float32.  AdamW on CUDA reads each once, in
    one kernel a parameter; all else goes through torch's own step.  ``grads`` may be scaled in
    place.
    Raises: as :func:`complete`.
    """
    full = complete(named_parameters, grads)
    if _fits_kernel(optimizer, [p for p, _ in full]):
        fill_moments(optimizer)
        by_parameter = {id(p): g for p, g in full}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                state["step"] += 1
                adamw_(
                    parameter.detach(),
                    by_parameter[id(parameter)],
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    factor,
                    step=int(state["step"]),
                    lr=group["lr"],
                    betas=group["betas"],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                )
        return
    widened = [(p, g.to(p.dtype)) for p, g in full]
    if factor is not None:
        scale_({str(i): g for i, (_, g) in enumerate(widened)}, factor)
    for parameter, grad in widened:
        parameter.grad = grad
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _fits_kernel(optimizer: Optimizer, parameters: list[Parameter]) -> bool:
    """Whether our kernel computes what this optimizer's own step would."""
    return (
        type(optimizer) is torch.optim.AdamW
        and not any(group["amsgrad"] or group["maximize"] for group in optimizer.param_groups)
        and all(p.is_cuda and p.dtype == torch.float32 and p.is_contiguous() for p in parameters)
    )


def complete(
    named_parameters: Iterable[tuple[str, Parameter]], grads: Mapping[str, Tensor | None]
) -> list[tuple[Parameter, Tensor]]:
    """Every parameter that is trained with its gradient; one without gets zeros.

    An expert that saw no token must still decay and keep its moments in time, as it would where
    its neighbours on the same rank had tokens: else its state depends on the layout.
    Raises: ValueError for gradients of unknown parameters.
    """
    parameters = {n: p for n, p in named_parameters if p.requires_grad}
    if unknown := sorted(set(grads) - set(parameters)):
        raise ValueError(
            f"update: gradients for {', '.join(unknown[:3])} ({len(unknown)} in all), "
            f"but the model has no such parameter that is trained; use the names of "
            f"named_parameters(), without frozen ones."
        )
    found = []
    for name, parameter in parameters.items():
        grad = grads.get(name)
        found.append((parameter, torch.zeros_like(parameter) if grad is None else grad))
    return found


def fill_moments(optimizer: Optimizer) -> None:
    """AdamW's state as its first step would make it: a checkpoint always has the same names.

    An optimizer makes moments when it first sees a gradient; zeros at step 0 are the same to it.
    """
    if not isinstance(optimizer, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),  # on the host: known there
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
