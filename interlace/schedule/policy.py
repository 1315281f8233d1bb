"""One list scheduler, and the order in which it prefers what is ready.

Everything follows from the graph alone, so that every rank finds the same order.  Time is counted
in rounds, launches on the longest path to a node:

birth   launches that lie behind a node's operands: it cannot run earlier.
round   the birth of the first node that reads it, one less for a launch.  To run it in an earlier
        round is of no use to anyone and only holds memory.  Through this, casts of parameters and
        recomputed layers stay back although their operands are there from the start.
goal    (round, chunk) of the first launch that a node leads to; none for weight gradients.

Of what is ready and whose round has come, this goes first:

1. launches;
2. compute by the round of its goal, that of the stream that did not launch last before the other.
   So a launch is followed by the other chunk's way to its own, what leads to a later launch fills
   gaps, weight gradients come last; program order decides among equals;
3. compute of a chunk, such as its shared experts, one round before its use;
4. waits, by the goal of what they let run.

Nothing runs more than a round before it can be used, and weight gradients wait no longer than until
the next wait: memory stays near that of program order.

With a :class:`CostModel` a clock runs along (scheduler "cost"): a wait whose transfer has landed
counts as compute that is free, and before a wait blocks, casts may go a round early too.
"""

from __future__ import annotations

import heapq
import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import fx

from interlace import _compat
from interlace.graph import comm_of, has_tag, is_wait, tag_of
from interlace.graph.dag import Dag, Edge, stream_of
from interlace.schedule.cost import CostModel, Lanes

_Goal = tuple[int, int, str]  # round, place of the chunk, source
_NO_GOAL: _Goal = (1 << 30, 0, "")
_Stream = tuple[str, int | None]


class Ready(Protocol):
    """Nodes whose predecessors have all run, and which of them goes next."""

    def push(self, node: fx.Node) -> None: ...

    def pop(self) -> fx.Node: ...

    def __len__(self) -> int: ...


def list_schedule(dag: Dag, ready: Ready) -> list[fx.Node]:
    """Every node once, after all that must come before it; ``ready`` decides what is left open.

    Raises: ValueError that names a cycle, node by node with the reasons.
    """
    missing = dict.fromkeys(dag.nodes, 0)
    for edge in dag.edges:
        missing[edge.dst] += 1
    for node in dag.nodes:
        if not missing[node]:
            ready.push(node)
    order: list[fx.Node] = []
    while len(ready):
        order.append(ready.pop())
        for edge in dag.out[order[-1]]:
            missing[edge.dst] -= 1
            if not missing[edge.dst]:
                ready.push(edge.dst)
    if len(order) != len(dag.nodes):
        raise ValueError(f"schedule: the edges form a cycle: {_cycle(dag, missing)}.")
    return order


def _cycle(dag: Dag, missing: dict[fx.Node, int]) -> str:
    """One cycle: of nodes that could not run, each has a predecessor that could not either."""
    before = {e.dst: e for e in dag.edges if missing[e.src] and missing[e.dst]}
    node, path = next(iter(before)), list[Edge]()
    while node not in [edge.dst for edge in path]:
        path.append(before[node])
        node = before[node].src
    start = [edge.dst for edge in path].index(node)
    return node.name + "".join(f" -{e.why}-> {e.dst.name}" for e in reversed(path[start:]))


class ProgramOrder:
    """Keeps the order in which the nodes were given."""

    def __init__(self, dag: Dag) -> None:
        self._place = {node: i for i, node in enumerate(dag.nodes)}
        self._nodes = dag.nodes
        self._heap: list[int] = []

    def push(self, node: fx.Node) -> None:
        heapq.heappush(self._heap, self._place[node])

    def pop(self) -> fx.Node:
        return self._nodes[heapq.heappop(self._heap)]

    def __len__(self) -> int:
        return len(self._heap)


@dataclass(frozen=True)
class Rounds:
    """What the module's docstring defines, for every node."""

    birth: dict[fx.Node, int]
    round: dict[fx.Node, int]
    goal: dict[fx.Node, _Goal]


def rounds_of(dag: Dag) -> Rounds:
    """One pass down the graph and one up: linear.  Raises ValueError for a cycle."""
    order = list_schedule(dag, ProgramOrder(dag))
    birth, rounds, goal = dict.fromkeys(order, 0), dict[fx.Node, int](), dict[fx.Node, _Goal]()
    for node in order:
        after = birth[node] + (comm_of(node) is not None)
        for edge in dag.out[node]:
            birth[edge.dst] = max(birth[edge.dst], after)
    for node in reversed(order):
        readers, launches = [edge.dst for edge in dag.out[node]], comm_of(node) is not None
        # The output reads everything and is no reason to wait with it.
        needed = min((0 if r.op == "output" else rounds[r] for r in readers), default=0)
        rounds[node] = max(birth[node], needed - launches)
        goal[node] = min((goal[r] for r in readers), default=_NO_GOAL)
        if launches:
            goal[node] = (rounds[node], _place_of_chunk(node), stream_of(node)[0])
    return Rounds(birth, rounds, goal)


def _place_of_chunk(node: fx.Node) -> int:
    """Chunks launch in ascending order forward, in descending order backward, as autograd does."""
    tag = tag_of(node) if has_tag(node) else None
    if tag is None or tag.chunk is None:
        return 0
    return tag.chunk if tag.phase == "forward" else -tag.chunk


def reservations(dag: Dag, rounds: Rounds) -> Iterator[Edge]:
    """Edges that keep something to run beside the last launch of a region.

    The branch of the chunk that launches last stays back until that launch: backward the expert
    weight gradients of chunk 0, forward what passes by the exchange, as shared experts do.
    """
    last: dict[tuple[str, str, int], fx.Node] = {}
    for node in filter(comm_of, dag.nodes):
        tag = tag_of(node)
        key = (tag.source, tag.layer, tag.call)
        if key not in last or rounds.goal[node] >= rounds.goal[last[key]]:
            last[key] = node
    for node in dag.nodes:
        if node.op != "call_function" or comm_of(node) or is_wait(node):
            continue
        tag, layer = tag_of(node), tag_of(node).layer
        while layer and (tag.source, layer, tag.call) not in last:
            layer = layer.rpartition(".")[0]
        launch = last.get((tag.source, layer, tag.call))
        if launch is None or tag_of(launch).chunk != tag.chunk:
            continue
        wgrad = node.target is torch.ops.interlace.grouped_wgrad.default
        passes_by = (
            tag.phase == "forward"
            and tag.chunk is not None
            and rounds.birth[node] <= rounds.round[launch]
        )
        if (wgrad or passes_by) and rounds.goal[node] > rounds.goal[launch]:
            yield Edge(launch, node, "policy")


class Overlap:
    """The policy of the module's docstring."""

    def __init__(self, dag: Dag, rounds: Rounds, cost: CostModel | None = None) -> None:
        self._nodes, self._rounds = dag.nodes, rounds
        self._place = {node: i for i, node in enumerate(dag.nodes)}
        self._at_once: list[int] = []  # inputs, views, parts of a tuple: free, and hold no memory
        self._launches: list[tuple[_Goal, int]] = []
        self._compute: dict[_Stream, list[tuple[_Goal, int]]] = defaultdict(list)
        self._waits: list[tuple[_Goal, int]] = []
        self._later: dict[bool, list[tuple[int, _Goal, int]]] = {True: [], False: []}
        self._at_last: list[int] = []
        self._length = self._round = 0
        self._stream: _Stream | None = None  # of the last launch
        self._lanes = None if cost is None else Lanes(cost)

    def __len__(self) -> int:
        return self._length

    def push(self, node: fx.Node) -> None:
        self._length += 1
        place = self._place[node]
        if node.op == "output":
            heapq.heappush(self._at_last, place)
        elif node.op != "call_function" or _is_part(node):
            heapq.heappush(self._at_once, place)
        elif self._rounds.round[node] > self._round:
            compute = not comm_of(node) and not is_wait(node)
            early = compute and (stream_of(node)[1] is not None or self._lanes is not None)
            entry = (self._rounds.round[node], self._rounds.goal[node], place)
            heapq.heappush(self._later[early], entry)
        else:
            self._admit(node)

    def _admit(self, node: fx.Node) -> None:
        queue = self._compute[stream_of(node)]
        if comm_of(node):
            queue = self._launches
        elif is_wait(node):
            queue = self._waits
        heapq.heappush(queue, (self._rounds.goal[node], self._place[node]))

    def pop(self) -> fx.Node:
        self._length -= 1
        node = self._nodes[self._choose()]
        if comm_of(node):
            self._stream = stream_of(node)
            self._round = max(self._round, self._rounds.round[node] + 1)
            for later in self._later.values():
                while later and later[0][0] <= self._round:
                    self._admit(self._nodes[heapq.heappop(later)[2]])
        if self._lanes is not None:
            self._lanes.run(node)
        return node

    def _choose(self) -> int:
        if self._at_once:
            return heapq.heappop(self._at_once)
        if self._launches:
            return heapq.heappop(self._launches)[1]
        if self._lanes is not None:
            self._admit_landed(self._lanes)
        queues = [(q[0][0][0], key == self._stream, q) for key, q in self._compute.items() if q]
        if queues:
            return heapq.heappop(min(queues)[2])[1]
        early = self._later[True]
        if early and early[0][0] <= self._round + 1:
            return heapq.heappop(early)[2]
        if self._waits:
            return heapq.heappop(self._waits)[1]
        later = min(filter(None, self._later.values()), default=None)
        return heapq.heappop(later)[2] if later else heapq.heappop(self._at_last)

    def _admit_landed(self, lanes: Lanes) -> None:
        blocking = []
        for entry in self._waits:
            wait = self._nodes[entry[1]]
            if lanes.has_landed(wait):
                heapq.heappush(self._compute[stream_of(wait)], entry)
            else:
                blocking.append(entry)
        self._waits = blocking


def _is_part(node: fx.Node) -> bool:
    return node.target is operator.getitem or _compat.op_is_view(node.target)
