"""Autograd's backward with every operator tagged, its own gradient sums included.

Autograd adds gradients itself, outside of any grad_fn: right after the hook that follows a
producer, in the order of the producer's outputs, wherever the consumer's slot is filled already.
The hook replays that rule, so it knows how many sums come before the next grad_fn and whose they
are: the innermost region that holds every use summed so far.  One too many or too few is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from interlace.graph.tag import Tag, set_tag
from interlace.trace.regions import Region, Regions

_ADDS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


@dataclass
class Sums:
    """After each grad_fn that ran: its region, and the owners of the sums that follow."""

    after: list[tuple[Region, list[Region]]] = field(default_factory=list)


def tagged_grad(regions: Regions, loss: Tensor, inputs: Sequence[Tensor], sums: Sums) -> Any:
    """``torch.autograd.grad(loss, inputs)`` with regions published; fills ``sums``.

    An input that the loss does not depend on gets a zero gradient.
    """
    live = _nodes_that_run(loss, inputs)
    filled: dict[tuple[Any, int], Region] = {(loss.grad_fn, loss.output_nr): regions.stack[-1]}
    handles = []
    for node in live:
        if getattr(node, "variable", None) is None:
            handles += _hook(regions, node, live, filled, sums)
    outer = (regions.stack, regions.phase, regions.role, regions.running)
    regions.phase, regions.role = "backward", "seed"
    regions.publish()
    try:
        grads = torch.autograd.grad(loss, list(inputs), allow_unused=True)
        regions.publish()
        return fill_unused(inputs, grads)
    finally:
        for handle in handles:
            handle.remove()
        regions.end_grad_fn(outer)
        regions.publish()


def fill_unused(inputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Zeros where the loss does not depend on an input."""
    pairs = zip(inputs, grads, strict=True)
    return [torch.zeros_like(x) if g is None else g for x, g in pairs]


def _nodes_that_run(loss: Tensor, inputs: Sequence[Tensor]) -> set[Any]:
    """The grad_fns on a path from the loss to an input, and the leaves that are captured."""
    leaves = {id(t) for t in inputs}
    order, seen, todo = [], set(), [(loss.grad_fn, False)]
    while todo:
        node, done = todo.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            todo.append((node, True))
            todo += [(f, False) for f, _ in node.next_functions if f is not None]
    live: set[Any] = set()
    for node in order:  # a node comes after everything that it feeds
        captured = id(getattr(node, "variable", None)) in leaves
        if captured or any(f in live for f, _ in node.next_functions):
            live.add(node)
    return live


def _hook(
    regions: Regions,
    node: Any,
    live: set[Any],
    filled: dict[tuple[Any, int], Region],
    sums: Sums,
) -> list[Any]:
    owner, edges = regions.owner(node), node.next_functions
    saved: list[Any] = []

    def before(_: Any) -> None:
        saved.append(regions.start_grad_fn(owner))

    def after(grads: Any, _: Any) -> None:
        regions.end_grad_fn(saved.pop())
        owners = []
        for grad, edge in zip(grads, edges, strict=True):
            if grad is None or edge[0] not in live:
                continue
            earlier = filled.get(edge)
            filled[edge] = earlier.common(owner) if earlier else owner
            if earlier:
                owners.append(filled[edge])
        sums.after.append((owner, owners))
        regions.publish(gap=len(sums.after) - 1)

    return [node.register_prehook(before), node.register_hook(after)]


def settle_tags(gm: fx.GraphModule, io_roles: Sequence[tuple[str, str]], sums: Sums) -> None:
    """Turns what the trace published into one :class:`Tag` a node; ``io_roles`` are the inputs'.

    Raises: ValueError where autograd's sums are not those that were foretold.
    """
    left = [list(owners) for _, owners in sums.after]
    io = iter(io_roles)
    for node in gm.graph.nodes:
        custom = node.meta.pop("custom", None) or {}
        gap = custom.get("gap")
        if node.op == "placeholder":
            role, layer = next(io)
            set_tag(node, Tag("", layer, 0, None, "io", role))
        elif node.op == "output":
            set_tag(node, Tag("", "", 0, None, "io", "output"))
        elif node.op != "call_function" or gap is None:
            if "tag" in custom:
                set_tag(node, custom["tag"])
        elif left[gap] and node.target in _ADDS:
            set_tag(node, left[gap].pop(0).tag("backward", "accum"))
        elif left[gap]:
            raise ValueError(
                f"{node.name}: expected autograd's gradient sum after "
                f"{sums.after[gap][0].layer or 'the step'}, found {node.target}."
            )
        else:  # a user's tensor hook runs between two grad_fns
            set_tag(node, sums.after[gap][0].tag("backward", "hook"))
    if any(left):
        missing = [r.layer or "the step" for owners in left for r in owners]
        raise ValueError(f"autograd's gradient sums are not in the graph: {', '.join(missing)}")
