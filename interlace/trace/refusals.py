"""What a user's step is refused for, each in one line that says what to do."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

Layout = tuple[tuple[tuple[int, ...], torch.dtype], ...]
_TORCH, _OURS = Path(torch.__file__).parent, Path(__file__).parents[1]
_CHECKPOINT = _TORCH / "utils" / "checkpoint.py"


def layout_of(batch: Sequence[Tensor]) -> Layout:
    """Shapes and dtypes: what a step is traced and captured for."""
    return tuple((tuple(x.shape), x.dtype) for x in batch)


def check_layout(expected: Layout, batch: Sequence[Tensor], done: str) -> None:
    """ValueError that names both layouts where a batch is not laid out as expected.

    ``done`` is what made the step fit one layout only: "trace" or "capture".
    """
    found = layout_of(batch)
    if found == expected:
        return
    if len(found) != len(expected):
        raise ValueError(
            f"the step was {done}d for {len(expected)} inputs and got {len(found)}; hand it "
            f"inputs like those that it was {done}d with."
        )
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        if a != b:
            raise ValueError(
                f"the step was {done}d for {b[0]} {b[1]} as input {index} and got {a[0]} {a[1]}; "
                f"{done} it again for the new shape."
            )


def check_loss(returned: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The pair that a ``loss_fn`` returned; ValueError for anything else."""
    loss, extra = returned if isinstance(returned, tuple) and len(returned) == 2 else (None, None)
    if isinstance(loss, Tensor) and isinstance(extra, Mapping):
        others = [n for n, x in extra.items() if not isinstance(x, Tensor)]
        if not others:
            return loss, extra
        kind = f"a {type(extra[others[0]]).__name__} as {others[0]}"
    elif isinstance(returned, tuple):
        kind = f"({', '.join(map(_kind, returned))})"
    else:
        kind = _kind(returned)
    raise ValueError(
        f"loss_fn returned {kind}; expected (loss, extra): a number as a tensor, and a dictionary "
        "of further tensors by name, which may be empty."
    )


def _kind(x: Any) -> str:
    return "Tensor" if isinstance(x, Tensor) else type(x).__name__  # not FakeTensor


@contextlib.contextmanager
def values_are_not_read(model: torch.nn.Module) -> Iterator[None]:
    """A graph has no values: ValueError names the module and the line that branch on one."""
    try:
        yield
    except GuardOnDataDependentSymNode as error:
        if _compares_recomputed_sizes(error):
            raise ValueError(
                "trace_step: a checkpointed part of the model holds an exchange of exact sizes, "
                "which are new sizes when it is recomputed; give its ep.Exchange padded=True, or "
                "leave the exchange out of the checkpointed part."
            ) from error
        raise ValueError(
            f"trace_step: {_place_of(error, model)} depends on the value of a tensor, which only "
            "the run will tell; no if, loop or size may follow from a value: use torch.where, or "
            "sizes that are fixed."
        ) from error


def _compares_recomputed_sizes(error: BaseException) -> bool:
    """Whether no module asked for the value, but checkpointing itself: the innermost frame outside
    of torch's symbols is its own."""
    inside = False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename)
        inside = file == _CHECKPOINT or (inside and file.is_relative_to(_TORCH))
    return inside


def _place_of(error: BaseException, model: torch.nn.Module) -> str:
    """``layers.1.moe at model.py:12``: the innermost module of the model, and the user's line."""
    names = {id(module): name for name, module in model.named_modules()}
    name, line = "", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        name = names.get(id(frame.f_locals.get("self")), name)
        file = Path(frame.f_code.co_filename)
        if file.is_absolute() and not any(file.is_relative_to(x) for x in (_TORCH, _OURS)):
            line = f" at {file.name}:{number}"
    return f"{name or 'the loss'}{line}"
