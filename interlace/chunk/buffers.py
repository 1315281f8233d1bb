"""Which buffers a launch writes, and what must have been read before it may.

Backends that own their buffers write the same memory again: a launch of kind k and set s overwrites
what the previous launch of that kind and set delivered.  Chunks get sets of their own; every reader
of the earlier generation comes before the later launch.  The schema says where both arguments are;
nothing here knows a backend.
"""

from __future__ import annotations

from torch import fx

from interlace import _compat
from interlace.chunk.align import describe
from interlace.ep.backend import get_backend
from interlace.graph import comm_of, is_wait, tag_of
from interlace.graph.dag import Edge


def assign_buffer_sets(gm: fx.GraphModule) -> None:
    """Chunk c takes set 2c in the forward and its recompute, 2c + 1 in the backward.

    The rows that a recompute has dispatched are still to be read for the weight gradients when the
    backward dispatches its gradients: one set for both would be overwritten too early.
    """
    for node in gm.graph.nodes:
        spec = comm_of(node)
        if spec is not None and spec.buffer_set_arg is not None:
            tag = tag_of(node)
            node.update_arg(spec.buffer_set_arg, 2 * (tag.chunk or 0) + (tag.phase == "backward"))


def reuse_edges(gm: fx.GraphModule) -> list[Edge]:
    """An edge from each reader of a generation to the launch that overwrites it.

    Raises: ValueError that names the value where one is read after its buffer is written again,
            in the order that the graph has: saved for the backward, for example.
    """
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    latest: dict[tuple[str, str, int], fx.Node] = {}
    edges = []
    for node in gm.graph.nodes:
        spec = comm_of(node)
        if spec is None or spec.buffer_set_arg is None or not _owns_buffers(node):
            continue
        key = (spec.name, _group(node), int(node.args[spec.buffer_set_arg]))
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
        if edge.src.op == "call_function" and not _is_part(edge.src):
            last[edge.dst] = edge.src
    for launch, reader in last.items():
        spec = comm_of(launch)
        assert spec is not None
        assert spec.reuse_arg is not None
        launch.update_arg(spec.reuse_arg, reader)


def readers(launch: fx.Node) -> list[fx.Node]:
    """Every node that reads the memory which a launch fills, its wait and views included."""
    found: dict[fx.Node, None] = {}
    todo = [u for u in launch.users if u.args[1] == 0]
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found[node] = None
        if is_wait(node) or _is_part(node) or _compat.op_is_view(node.target):
            todo += list(node.users)
    return list(found)


def _is_part(node: fx.Node) -> bool:
    return "getitem" in str(node.target)


def _owns_buffers(node: fx.Node) -> bool:
    return get_backend(str(node.args[-1])).owns_buffers


def _group(node: fx.Node) -> str:
    return str(node.args[-2])
