"""Chunking in plain PyTorch: the numerical reference of graph chunking.

A matching module's forward splits its tensor inputs along the chunk dimension, runs once for each
part, and joins the results.  Nothing else changes, so every property of the graph form can be
compared with this one bit by bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from interlace import _compat
from interlace.graph.chunking import Chunking, chunk_extent
from interlace.trace.regions import Regions


@contextlib.contextmanager
def chunk_modules(
    model: torch.nn.Module, chunking: Chunking, regions: Regions | None = None
) -> Iterator[list[str]]:
    """Chunks the forward of each matching module while the context lasts; yields their paths.

    ``regions`` tags what each part records.
    Raises: ValueError where nothing matches or an extent does not split.
    """
    names = [n for n, _ in model.named_modules() if chunking.is_root(n)]
    if not names:
        known = ", ".join(n for n, _ in list(model.named_modules())[1:6])
        raise ValueError(
            f"overlap.chunk_root={chunking.root} matches no module; the first are {known}."
        )
    modules = [model.get_submodule(n) for n in names]
    for name, module in zip(names, modules, strict=True):
        module.forward = _chunked(name, module.forward, chunking, regions)
    try:
        yield names
    finally:
        for module in modules:
            del module.forward  # the class's own shows again


def _chunked(
    name: str, forward: Callable[..., Any], chunking: Chunking, regions: Regions | None
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = _compat.tree_flatten((args, kwargs))
        extent = _extent(name, leaves, chunking.dim)
        part = chunk_extent(f"{name}, dimension {chunking.dim} of its input,", extent,
                            chunking.num_chunks)  # fmt: skip
        pieces = [_split(x, extent, part, chunking.dim) for x in leaves]
        outputs = []
        for chunk in range(chunking.num_chunks):
            inputs, named = _compat.tree_unflatten([p[chunk] for p in pieces], spec)
            region = regions.region(chunk=chunk) if regions else contextlib.nullcontext()
            with region:
                outputs.append(forward(*inputs, **named))
        return _join(outputs, part, chunking.dim)

    return run


def _extent(name: str, leaves: list[Any], dim: int) -> int:
    for x in leaves:
        if isinstance(x, Tensor) and x.dim() > dim:
            return x.shape[dim]
    raise ValueError(f"{name} has no tensor input with a dimension {dim} to chunk.")


def _split(x: Any, extent: int, part: int, dim: int) -> list[Any]:
    """Parts of an input that has the chunked extent; anything else goes to every part whole."""
    if isinstance(x, Tensor) and x.dim() > dim and x.shape[dim] == extent:
        return [piece.contiguous() for piece in x.split(part, dim)]
    return [x] * (extent // part)


def _join(outputs: list[Any], part: int, dim: int) -> Any:
    """Results with the extent of a part are concatenated; all others are sums over tokens.

    A vector of whole numbers is always a sum (tokens of each expert): its length may happen to be
    that of a part.
    """
    columns, spec = [], None
    for output in outputs:
        leaves, spec = _compat.tree_flatten(output)
        columns.append(leaves)
    joined: list[Any] = []
    for values in zip(*columns, strict=True):
        first = values[0]
        if not isinstance(first, Tensor):
            joined.append(first)
            continue
        has_tokens = first.dim() > dim and first.shape[dim] == part
        if has_tokens and (first.is_floating_point() or first.dim() > 1):
            joined.append(torch.cat(values, dim))
        else:
            joined.append(sum(values[1:], start=first))
    return _compat.tree_unflatten(joined, spec)
