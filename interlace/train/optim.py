"""Optimizer and learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

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
    norms), without.  Fused on CUDA, foreach elsewhere; the state dict carries parameter names.
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
    on_cuda = all(p.is_cuda for _, p in parameters)
    speed = {"fused": True} if on_cuda else {"foreach": True}
    if name == "SGD":
        return torch.optim.SGD(groups, lr=lr, **speed)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, **speed)


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


def assign_gradients(
    named_parameters: Iterable[tuple[str, Parameter]], grads: Mapping[str, Tensor | None]
) -> None:
    """Hands gradients to the optimizer; a parameter without one gets zeros, never None.

    An expert that saw no token must still decay and keep its moments in time, as it would where
    its neighbours on the same rank had tokens: else its state depends on the layout.
    Raises: ValueError for gradients of unknown parameters.
    """
    parameters = dict(named_parameters)
    if unknown := sorted(set(grads) - set(parameters)):
        raise ValueError(
            f"assign_gradients: gradients for {', '.join(unknown[:3])} ({len(unknown)} in all), "
            f"but the model has no such parameter; use the names of named_parameters()."
        )
    for name, parameter in parameters.items():
        grad = grads.get(name)
        parameter.grad = torch.zeros_like(parameter) if grad is None else grad
