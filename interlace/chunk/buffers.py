"""Which buffers a launch writes, and what must have been read before it may.

Backends that own their buffers write the same memory again: a launch of kind k and set s overwrites
what the previous launch of that kind and set delivered.  Sets are given out as a compiler gives out
registers.  Launches of one class (kind, group, chunk, phase) share sets among themselves: each
takes the lowest set whose readers all come before it in the graph's order, else a new one.  So
chunks may run side by side, and what is saved for the backward keeps its set until its last reader,
the memory that an ordinary tensor would take.  Then every reader is ordered before the launch that
overwrites what it reads.  The schema says where both arguments are; nothing here knows a backend.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from interlace import _compat
from interlace.chunk.align import describe
from interlace.ep.backend import get_backend
from interlace.graph import comm_of, is_wait, tag_of
from interlace.graph.comm import CommSpec
from interlace.graph.dag import Edge

UNMANAGED = -1  # every launch has a result of its own

_Class = tuple[str, str, int | None, str]


def assign_buffers(gm: fx.GraphModule, *, max_sets: int | None = None) -> list[Edge]:
    """Gives every launch its buffer set and shows what it must wait for; returns those edges.

    Contract: requires the graph in its program order, behind whatever replaces nodes; changes
              arguments of launches only, and no value.  Any later order must keep the edges.
    Raises:   ValueError that names launch and reader where a class would need more than
              ``max_sets`` sets.
    """
    assign_buffer_sets(gm, max_sets=max_sets)
    edges = reuse_edges(gm)
    show_reuse(gm, edges)
    return edges


@dataclass
class _Set:
    """A buffer of one class: its number, who filled it, and the last place at which it is read."""

    number: int
    launch: fx.Node
    last: int = -1


@dataclass
class _Classes:
    """Sets by class; numbers are global, one a set of a class."""

    sets: dict[_Class, list[_Set]] = field(default_factory=dict)
    count: int = 0

    def take(self, key: _Class, launch: fx.Node, at: int, last: int) -> _Set:
        """The lowest set of the class that nobody reads from ``at`` on, or a new one."""
        known = self.sets.setdefault(key, [])
        for each in known:
            if each.last < at:
                each.launch, each.last = launch, last
                return each
        known.append(_Set(self.count, launch, last))
        self.count += 1
        return known[-1]


def assign_buffer_sets(gm: fx.GraphModule, *, max_sets: int | None = None) -> int:
    """Sets by liveness; returns how many there are.

    What leaves the graph is read after any launch, that of the next call included: it stays
    unmanaged, a tensor of its own.
    """
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    classes = _Classes()
    for node, spec in _launches(gm):
        reading = readers(node)
        if any(r.op == "output" for r in reading):
            _set_argument(node, spec.buffer_set_arg, UNMANAGED)
            continue
        tag = tag_of(node)
        key = (spec.name, _group(node), tag.chunk, tag.phase)
        last = max((place[r] for r in reading), default=place[node])
        blocking = [s for s in classes.sets.get(key, []) if s.last >= place[node]]
        if max_sets is not None and len(blocking) >= max_sets:
            late = max(readers(blocking[0].launch), key=place.__getitem__)
            raise ValueError(
                f"buffers: {describe(node)} needs set {len(blocking) + 1} of {max_sets}: "
                f"{describe(late)} still reads what {describe(blocking[0].launch)} delivered. "
                f"Recompute {tag_of(blocking[0].launch).layer} in the backward, or allow more sets."
            )
        taken = classes.take(key, node, place[node], last)
        _set_argument(node, spec.buffer_set_arg, taken.number)
    return classes.count


def reuse_edges(gm: fx.GraphModule) -> list[Edge]:
    """An edge from each reader of a generation to the launch that overwrites it.

    Raises: ValueError that names the value where one is read after its buffer is written again,
            in the order that the graph has: by sets that were given out by hand, for example.
    """
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    latest: dict[tuple[str, str, int], fx.Node] = {}
    edges = []
    for node, spec in _launches(gm):
        key = (spec.name, _group(node), _set_of(node, spec))
        if key[2] == UNMANAGED:
            continue
        earlier = latest.get(key)
        latest[key] = node
        if earlier is None:
            continue
        for reader in readers(earlier):
            if place[reader] > place[node]:
                raise ValueError(
                    f"{describe(reader)} reads what {describe(earlier)} delivered after "
                    f"{describe(node)} has written the buffer again; recompute "
                    f"{tag_of(earlier).layer} in the backward, or give the launch another set."
                )
            edges.append(Edge(reader, node, "buffer_reuse"))
    return edges


def show_reuse(gm: fx.GraphModule, edges: list[Edge]) -> None:
    """Hands each launch the last reader of its buffer as an operand, so that any order keeps it."""
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    last: dict[fx.Node, fx.Node] = {}
    for edge in sorted(edges, key=lambda e: place[e.src]):
        before = place[edge.dst]
        whole = [edge.src, *(u for u in edge.src.users if place[u] < before and _is_part(u))]
        tensors = [n for n in whole if n.op == "call_function" and _is_tensor(n)]
        if tensors:
            last[edge.dst] = tensors[0]
    for launch, reader in last.items():
        spec = comm_of(launch)
        assert spec is not None
        _set_argument(launch, spec.reuse_arg, reader)


def readers(launch: fx.Node) -> list[fx.Node]:
    """Every node that reads the memory which a launch fills, its wait and views included.

    A launch of something else reads until its own wait, which then counts as well.
    """
    found: dict[fx.Node, None] = {}
    todo = [u for u in launch.users if u.args[1] == 0]
    until: dict[fx.Node, None] = {}
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found[node] = None
        if comm_of(node) is not None:
            until.update((w, None) for part in node.users for w in part.users if is_wait(w))
        elif _may_pass_on(node):
            todo += list(node.users)
    return list({**found, **until})


# Share the memory of their arguments although their schemas cannot say so.
_UNDECLARED_VIEWS = frozenset({torch.ops.aten._unsafe_view.default})


def _may_pass_on(node: fx.Node) -> bool:
    """Whether a result may lie in the memory of an argument.

    A callable without a schema (a compiled region) may return what it was given.
    """
    if node.op != "call_function":
        return node.op in ("call_module", "call_method")
    if is_wait(node) or node.target in _UNDECLARED_VIEWS or _compat.op_is_view(node.target):
        return True
    return not _compat.op_namespace(node.target)


def _is_part(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _is_tensor(node: fx.Node) -> bool:
    """Whether a node's value is one tensor, which is what a launch's operand has to be."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def _launches(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, CommSpec]]:
    """The launches that deliver a buffer of their backend's own, in program order."""
    for node in gm.graph.nodes:
        spec = comm_of(node)
        if spec is not None and spec.buffer_set_arg is not None and _owns_buffer(node, spec):
            yield node, spec


def _set_of(node: fx.Node, spec: CommSpec) -> int:
    assert spec.buffer_set_arg is not None
    value = node.args[spec.buffer_set_arg]
    assert isinstance(value, int)
    return value


def _set_argument(node: fx.Node, position: int | None, value: int | fx.Node) -> None:
    assert position is not None
    node.update_arg(position, value)


def _owns_buffer(node: fx.Node, spec: CommSpec) -> bool:
    backend = get_backend(str(node.args[-1]))
    return backend.owns_buffers and spec.name not in backend.private


def _group(node: fx.Node) -> str:
    return str(node.args[-2])
