"""What a backend of the exchange is: the functions behind the operators, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Backend:
    """The functions behind ``ep::plan`` and its fellows; arguments as in :mod:`interlace.ep.ops`.

    ``owns_buffers``: results lie in buffers that a later launch of the same set and kind writes
    again, so that buffer sets and reuse edges matter.
    """

    name: str
    plan: Callable[..., Any]
    dispatch_launch: Callable[..., Any]
    combine_launch: Callable[..., Any]
    combine_finish: Callable[..., Any]
    score_grad: Callable[..., Any]
    owns_buffers: bool = False


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
