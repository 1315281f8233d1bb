"""What a backend of the exchange is: the functions behind the operators, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Sizes(NamedTuple):
    """What the index vectors of a plan say about sizes; whole numbers, symbolic in exact mode."""

    sent_rows: int  # rows that a combine delivers
    out_rows: int  # expert-major rows that a dispatch delivers
    num_tokens: int
    stage_rows: int = 0  # rows that a staged dispatch and a reduced combine deliver


@dataclass(frozen=True)
class ExpertSide:
    """What a backend adds that takes scores to the experts (``scores_at``, ``reduce="rank"``)."""

    stage_launch: Callable[..., Any]
    reduce_launch: Callable[..., Any]
    return_launch: Callable[..., Any]
    reduce_finish: Callable[..., Any]
    row_grad: Callable[..., Any]


@dataclass(frozen=True)
class Backend:
    """The functions behind ``ep::plan`` and its fellows; arguments as in :mod:`interlace.ep.ops`.

    ``owns_buffers``: results lie in buffers that a later launch of the same set and kind writes
    again, so that buffer sets and reuse edges matter; ``private`` names the launches of which that
    is not so, by their :class:`~interlace.graph.comm.CommSpec`.

    The index vectors of a plan are the backend's own affair, so it also says what they look like:
    ``meta_fake(ids_TK, num_experts, block_rows, group, max_tokens)`` are such tensors without
    values, for tracing; ``sizes(meta, top_k, max_tokens)`` reads their shapes.  None: those of
    ``alltoall``.  ``max_tokens`` is for ``plan`` and ``meta_fake`` a number always, this rank's
    where the exchange has none; for ``sizes`` as the exchange has it.
    """

    name: str
    plan: Callable[..., Any]
    dispatch_launch: Callable[..., Any]
    combine_launch: Callable[..., Any]
    combine_finish: Callable[..., Any]
    score_grad: Callable[..., Any]
    owns_buffers: bool = False
    private: frozenset[str] = frozenset()
    meta_fake: Callable[..., list[Any]] | None = None
    sizes: Callable[[list[Any], int, int | None], Sizes] | None = None
    expert_side: ExpertSide | None = None


_backends: dict[str, Backend] = {}


def register_backend(backend: Backend) -> None:
    """Makes a backend known under its name; ValueError where the name is taken."""
    if backend.name in _backends:
        raise ValueError(f"register_backend: {backend.name!r} is registered already.")
    _backends[backend.name] = backend


def get_backend(name: str) -> Backend:
    """The backend of that name; ValueError lists the available ones."""
    if name not in _backends:
        known = ", ".join(sorted(_backends))
        raise ValueError(f"ep.backend: {name!r} is unknown; available: {known}.")
    return _backends[name]


def expert_side_of(name: str) -> ExpertSide:
    """ValueError names the backends that take scores to the experts, if this one does not."""
    side = get_backend(name).expert_side
    if side is None:
        able = ", ".join(sorted(n for n, b in _backends.items() if b.expert_side))
        raise ValueError(
            f"ep.backend={name} keeps scores at the origin: ep.reduce=rank and "
            f"ep.scores_at=expert need one of {able}; choose that, or ep.reduce=slot."
        )
    return side
