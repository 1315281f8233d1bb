"""What the passes know about communication: one registry, asked by all, labelled by none.

An asynchronous thing is a launch op and a wait op.  A backend registers a :class:`CommSpec` for its
launch; chunk roots, buffer assignment, scheduling, validation and the report ask for it, so that a
new backend changes no pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from interlace import _compat


@dataclass(frozen=True)
class CommSpec:
    """One launch op and how to wait for it.

    ``lane`` names the stream whose order must hold.  ``buffer_set_arg`` and ``reuse_arg`` are the
    positions of those arguments in the launch's schema, None where it owns no buffers.
    """

    name: str
    launch: Any
    wait: Any
    lane: str
    buffer_set_arg: int | None = None
    reuse_arg: int | None = None
    token_exchange: bool = False


_by_launch: dict[Any, CommSpec] = {}
_waits: set[Any] = set()
_blocking: dict[Any, str] = {}


def register_comm(spec: CommSpec) -> None:
    """Makes a launch and its wait known; neither is ever removed as dead code."""
    if spec.launch in _by_launch:
        raise ValueError(f"register_comm: {spec.launch} is registered already.")
    _by_launch[spec.launch] = spec
    _waits.add(spec.wait)
    _compat.mark_effectful(spec.launch)
    _compat.mark_effectful(spec.wait)


def register_blocking(op: Any, lane: str) -> None:
    """Makes a collective known that returns only when it is done."""
    _blocking[op] = lane
    _compat.mark_effectful(op)


def comm_of(node: fx.Node) -> CommSpec | None:
    """The spec of a launch node, None for any other node."""
    return _by_launch.get(node.target)


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a launch."""
    return node.target in _waits


def is_collective(node: fx.Node) -> bool:
    """Whether every rank must run this node, in the same order as its peers."""
    return node.op == "call_function" and (
        node.target in _by_launch
        or node.target in _blocking
        or (
            _compat.op_namespace(node.target) in ("_c10d_functional", "c10d_functional", "c10d")
            and "wait" not in str(node.target)
        )
    )
