"""The driver of all passes, and the rules that hold between them.

A pass is a plain function that changes a graph module in place.  It never lints, recompiles, logs
or times: :func:`run_passes` does, checks the invariants after each, and names the guilty one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from interlace import _compat
from interlace.graph.comm import is_collective, is_wait
from interlace.graph.tag import has_tag


@dataclass(frozen=True)
class Pass:
    """A named change of a graph; what ``run`` returns are notes for the user.

    ``keeps_effects`` False is for the few that add or split collectives on purpose; all others must
    leave the multiset of side effects as it was.
    """

    name: str
    run: Callable[[fx.GraphModule], Sequence[str] | None]
    keeps_effects: bool = True


@dataclass(frozen=True)
class PassReport:
    """What a pass did: its name, seconds, nodes before and after, and what a user should know."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int
    notes: tuple[str, ...] = ()


def has_effect(node: fx.Node) -> bool:
    """Whether removing a node would change something besides its own result.

    True for collectives and waits (peers wait for them), writes and random draws.
    """
    if node.op in ("placeholder", "output"):
        return True
    if node.op != "call_function":
        return node.op in ("call_module", "call_method")
    return (
        is_collective(node)
        or is_wait(node)
        or _compat.op_is_mutable(node.target)
        or _compat.op_is_random(node.target)
        or node.is_impure()
    )


def remove_dead_nodes(gm: fx.GraphModule) -> None:
    """Removes what nobody reads and what has no effect; never a collective on any rank."""
    for node in reversed(list(gm.graph.nodes)):
        if not node.users and not has_effect(node):
            gm.graph.erase_node(node)


def check_invariants(gm: fx.GraphModule) -> None:
    """Raises ValueError where a graph is not legal: lint, and a tag on every node."""
    gm.graph.lint()
    untagged = [n.name for n in gm.graph.nodes if not has_tag(n)]
    if untagged:
        shown = ", ".join(untagged[:5])
        raise ValueError(f"{len(untagged)} nodes have no tag: {shown}")


def count_effects(gm: fx.GraphModule) -> Counter[str]:
    """How often each operator with an effect occurs."""
    return Counter(
        str(n.target) for n in gm.graph.nodes if n.op == "call_function" and has_effect(n)
    )


def run_passes(gm: fx.GraphModule, passes: Sequence[Pass]) -> list[PassReport]:
    """Runs passes in order on ``gm``, in place.

    Raises: ValueError that names the pass and its cause, when one raises, leaves an illegal graph
            loses a side effect or returns no notes; or for what is no pass, before any runs.
    """
    for p in passes:
        if not isinstance(p, Pass):
            name = getattr(p, "__name__", type(p).__name__)
            raise ValueError(
                f"run_passes: {name} is no Pass but a {type(p).__name__}; name it: "
                f"Pass({name!r}, {name})."
            )
    reports = []
    for p in passes:
        effects, before, start = count_effects(gm), len(gm.graph.nodes), time.perf_counter()
        try:
            notes = _notes(p.run(gm))
            check_invariants(gm)
            if p.keeps_effects and (after := count_effects(gm)) != effects:
                changed = sorted((effects - after) + (after - effects))
                raise ValueError(f"side effects were lost or added: {', '.join(changed)}")
        except Exception as error:
            raise ValueError(f"pass {p.name!r} failed: {error}") from error
        gm.recompile()
        seconds = time.perf_counter() - start
        reports.append(PassReport(p.name, seconds, before, len(gm.graph.nodes), notes))
    return reports


def _notes(returned: Any) -> tuple[str, ...]:
    """What a pass returned, as lines for the user."""
    if returned is None:
        return ()
    lines = isinstance(returned, (list, tuple)) and all(isinstance(x, str) for x in returned)
    if not lines:
        raise ValueError(
            f"it returned a {type(returned).__name__}; expected notes for the user: a list of "
            "strings, or None."
        )
    return tuple(returned)
