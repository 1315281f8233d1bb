"""What must come before what in a graph, and why.

A schedule is any order that keeps every :class:`Edge`.  Reasons:

data          the result of one node is an argument of the other.
mutation      one of them writes memory that the other reads or writes, views included.
buffer_reuse  a buffer of a backend gets its next contents; handed in by the pass that assigns them.
lane_order    communication of one stream of work stays in program order.  Chunks and sources may
              pass each other: every rank computes the same order.  What nobody registered (send,
              barrier, foreign collectives) stays in place among all communication.
keep_alive    memory must outlive a transfer.  None is made here: the table of ``ep.pending`` holds
              what a launch reads until its wait.  A backend without such a table hands edges in.
host_sync     the host reads a value; such reads stay in program order, for one that is asynchronous
              is only complete once a later one has blocked.
policy        a schedule's own wish, checked like the others.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, fx

from interlace import _compat
from interlace.graph.comm import comm_of, is_collective, is_wait
from interlace.graph.passes import has_effect
from interlace.graph.tag import has_tag, tag_of

REASONS = (
    "data", "mutation", "buffer_reuse", "lane_order", "keep_alive", "host_sync", "policy",
)  # fmt: skip

# Share the memory of their arguments although their schemas cannot say so.
_UNDECLARED_VIEWS = frozenset({operator.getitem, torch.ops.aten._unsafe_view.default})
_FOREIGN_COMM = ("c10d", "_c10d_functional", "c10d_functional", "symm_mem")
_KNOWN_PURE = ("aten", "prims", "ep", "interlace", "")
_SOUNDS_LIKE_COMM = re.compile(
    r"send|recv|barrier|all_?(reduce|gather|to_?all)|reduce_?scatter|broadcast|exchange|sync"
)


@dataclass(frozen=True)
class Edge:
    """``src`` runs before ``dst``; ``why`` is one of :data:`REASONS`."""

    src: fx.Node
    dst: fx.Node
    why: str

    def __post_init__(self) -> None:
        if self.why not in REASONS:
            raise ValueError(f"Edge: unknown reason {self.why!r}; one of {', '.join(REASONS)}.")

    def __str__(self) -> str:
        return f"{_describe(self.src)} before {_describe(self.dst)} ({self.why})"


@dataclass(frozen=True)
class Dag:
    """Nodes in program order, and what orders them."""

    nodes: tuple[fx.Node, ...]
    edges: tuple[Edge, ...]

    @cached_property
    def out(self) -> dict[fx.Node, list[Edge]]:
        """The edges that leave each node."""
        leaving: dict[fx.Node, list[Edge]] = {node: [] for node in self.nodes}
        for edge in self.edges:
            leaving[edge.src].append(edge)
        return leaving

    def plus(self, edges: Iterable[Edge]) -> Dag:
        """The same nodes with further edges."""
        return Dag(self.nodes, tuple(_unique([*self.edges, *edges])))


def build_dag(gm: fx.GraphModule, extra: Iterable[Edge] = ()) -> Dag:
    """All edges of a graph, and those handed in.  Linear in the size of the graph."""
    nodes = list(gm.graph.nodes)
    found = [*_data(nodes), *_mutation(nodes), *_lane_order(nodes), *_host_sync(nodes), *extra]
    return Dag(tuple(nodes), tuple(_unique(found)))


def check_order(gm: fx.GraphModule, edges: Iterable[Edge]) -> None:
    """Raises ValueError where the order of a graph breaks an edge; names edge, reason and nodes.

    Run after every pass that follows the schedule.  An edge of which both nodes are gone went with
    what replaced them; of a data edge the graph itself keeps what is left.
    """
    position = {node: i for i, node in enumerate(gm.graph.nodes)}
    for edge in edges:
        src, dst = position.get(edge.src), position.get(edge.dst)
        if src is not None and dst is not None:
            if src >= dst:
                raise ValueError(f"check_order: broken edge: {edge}; it is at {dst}, behind {src}.")
        elif edge.why != "data" and (src is None) != (dst is None):
            gone = edge.src if src is None else edge.dst
            raise ValueError(
                f"check_order: {edge} lost {gone.name}; the pass that removed it must hand over "
                "edges for what stands in its place."
            )


def is_fence(node: fx.Node) -> bool:
    """Whether a node must keep its place among all communication (field report: a hoisted
    collective passed a barrier that the pass did not know, and ranks hung).

    True for collectives and waits without a :class:`CommSpec`, effects that no schema explains, and
    operators of others that take a process group or are named like communication.
    """
    if node.op in ("call_module", "call_method"):
        return True
    if node.op != "call_function" or comm_of(node) or is_wait(node):
        return False
    namespace = _compat.op_namespace(node.target)
    if namespace in _FOREIGN_COMM:
        return True
    if is_collective(node):
        return False  # registered as blocking
    if namespace not in _KNOWN_PURE and _is_comm_like(node.target):
        return True
    known = _compat.op_is_mutable(node.target) or _compat.op_is_random(node.target)
    return has_effect(node) and not known


@cache
def _is_comm_like(target: Any) -> bool:
    names = [name for name, _, _ in _compat.op_memory(target)]
    has_group = any(n in ("pg", "process_group") or n.startswith("group") for n in names)
    return has_group or bool(_SOUNDS_LIKE_COMM.search(str(target).partition(".")[2]))


def _data(nodes: Sequence[fx.Node]) -> Iterator[Edge]:
    for node in nodes:
        for source in node.all_input_nodes:
            yield Edge(source, node, "data")


def _mutation(nodes: Sequence[fx.Node]) -> Iterator[Edge]:
    """A write comes after every earlier reader and writer of the memory, and before later ones."""
    if not any(_compat.op_is_mutable(node.target) for node in nodes):
        return
    memory: dict[fx.Node, tuple[fx.Node, ...]] = {}  # the nodes that made what a result lies in
    writer: dict[fx.Node, fx.Node] = {}
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        shared: list[fx.Node] = []
        read: list[fx.Node] = []
        written: list[fx.Node] = []
        for source, shares, writes in _accesses(node):
            (written if writes else read).extend(memory[source])
            if shares:
                shared.extend(memory[source])
        memory[node] = tuple(dict.fromkeys(shared)) or (node,)
        written = list(dict.fromkeys(written))
        for root in dict.fromkeys(read):
            if root in writer:
                yield Edge(writer[root], node, "mutation")
            if root not in written:
                readers.setdefault(root, []).append(node)
        for root in written:
            for earlier in (*readers.pop(root, ()), *filter(None, (writer.get(root),))):
                if earlier is not node:
                    yield Edge(earlier, node, "mutation")
            writer[root] = node


def _accesses(node: fx.Node) -> Iterator[tuple[fx.Node, bool, bool]]:
    """Each argument: node, whether the result may share its memory, whether it is written."""
    schema = _compat.op_memory(node.target) if node.op == "call_function" else ()
    # A launch reads until its wait, so both count as readers of whatever it was given.  A callable
    # without a schema (a compiled region) may return what it was given.
    all_share = comm_of(node) or is_wait(node) or node.target in _UNDECLARED_VIEWS or not schema
    if not schema:
        yield from ((source, True, False) for source in node.all_input_nodes)
        return
    for i, (name, shares, writes) in enumerate(schema):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(name)
        for source in _nodes_in(value):
            yield source, bool(all_share or shares), writes


def _nodes_in(value: Any) -> list[fx.Node]:
    if isinstance(value, fx.Node):
        return [value]
    if isinstance(value, (list, tuple)):
        return [n for v in value for n in _nodes_in(v)]
    return []


def _lane_order(nodes: Sequence[fx.Node]) -> Iterator[Edge]:
    """Program order of the launches of one stream and lane, of a stream's blocking collectives and
    all its launches, of random draws, and of a fence and everything that communicates."""
    tails: dict[tuple[str, int | None], dict[str | None, fx.Node]] = {}
    fence: fx.Node | None = None
    since: list[fx.Node] = []
    draw: fx.Node | None = None
    for node in nodes:
        spec, before = comm_of(node), []
        if is_fence(node):
            before = since or [n for n in (fence,) if n is not None]
            fence, since = node, []
        elif spec or is_collective(node) or is_wait(node):
            before = [fence] if fence is not None else []
            since.append(node)
            tail = tails.setdefault(stream_of(node), {})
            if spec:
                before += filter(None, [tail.get(spec.lane, tail.get(None))])
                tail[spec.lane] = node
            elif not is_wait(node):
                before += tail.values()
                tail.clear()
                tail[None] = node
        elif node.op == "call_function" and _compat.call_draws(node.target, node.args, node.kwargs):
            before, draw = [draw] if draw is not None else [], node
        yield from (Edge(earlier, node, "lane_order") for earlier in before)


def _host_sync(nodes: Sequence[fx.Node]) -> Iterator[Edge]:
    last: fx.Node | None = None
    copies: set[fx.Node] = set()  # results of copies to the host, not waited for by themselves
    for node in nodes:
        if node.op != "call_function":
            continue
        if _copies_to_host(node):
            copies.add(node)
        elif node.target is not torch.ops.aten._local_scalar_dense.default and not any(
            n in copies for n in node.all_input_nodes
        ):
            continue
        if last is not None:
            yield Edge(last, node, "host_sync")
        last = node


def _copies_to_host(node: fx.Node) -> bool:
    if node.target is not torch.ops.aten._to_copy.default:
        return False
    result, source = node.meta.get("val"), node.all_input_nodes[0].meta.get("val")
    if not isinstance(result, Tensor) or not isinstance(source, Tensor):
        return False
    return result.device.type == "cpu" and source.device.type != "cpu"


def stream_of(node: fx.Node) -> tuple[str, int | None]:
    """The stream of work that a node belongs to: source and chunk of its tag."""
    if not has_tag(node):
        return ("", None)
    tag = tag_of(node)
    return (tag.source, tag.chunk)


def _unique(edges: Iterable[Edge]) -> list[Edge]:
    """One edge a pair, the first reason given."""
    kept: dict[tuple[fx.Node, fx.Node], Edge] = {}
    for edge in edges:
        kept.setdefault((edge.src, edge.dst), edge)
    return list(kept.values())


def _describe(node: fx.Node) -> str:
    return f"{node.name} [{tag_of(node)}]" if has_tag(node) else node.name
