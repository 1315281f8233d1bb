"""One list scheduler, and the order in which it prefers what is ready.

Everything follows from the graph alone, so that every rank finds the same order.  Time is counted
in rounds, the number of launches on the longest path to a node:

birth   rounds that lie behind a node's operands: it cannot run earlier.
round   the birth of the first node that reads it, a launch's reader counting one less: running it
        earlier is of no use to anyone and only holds memory.  Casts of parameters, transposes for
        the backward and recomputed layers are ready from the start and stay back through this.
goal    (round, chunk) of the first launch that a node leads to; none for weight gradients.

Whatever is ready and whose round has come goes in this order:

1. launches;
2. compute by its goal, the stream that did not launch last first; so the other chunk's way to its
   launch comes after a launch, what leads to a later launch fills the gap, weight gradients and
   bookkeeping come last, program order decides among equals;
3. waits, by the goal of what they let run: only when nothing else is ready.

With a :class:`CostModel` a clock runs along: a wait whose transfer has landed is free and counts as
compute, any other comes last; before a wait blocks, the next round's operands may be prepared.
"""

from __future__ import annotations

import heapq
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import fx

from interlace.graph import comm_of, has_tag, is_wait, tag_of
from interlace.graph.dag import Dag, Edge, stream_of
from interlace.schedule.cost import CostModel, launch_of
from interlace.schedule.flights import region_of

_NEVER = 1 << 30
HZ, HZ2 = 0, 1
MODE=1
_Goal = tuple[int, int, str]
_NO_GOAL: _Goal = (_NEVER, 0, "")
_WGRAD = torch.ops.interlace.grouped_wgrad.default


class Ready(Protocol):
    """Nodes whose predecessors have all run, and which of them goes next."""

    def push(self, node: fx.Node) -> None: ...

    def pop(self) -> fx.Node: ...

    def __len__(self) -> int: ...


class ProgramOrder:
    """Keeps the order in which the nodes were given."""

    def __init__(self, dag: Dag) -> None:
        self._place = {node: i for i, node in enumerate(dag.nodes)}
        self._nodes, self._heap = dag.nodes, []  # type: tuple[fx.Node, ...], list[int]

    def push(self, node: fx.Node) -> None:
        heapq.heappush(self._heap, self._place[node])

    def pop(self) -> fx.Node:
        return self._nodes[heapq.heappop(self._heap)]

    def __len__(self) -> int:
        return len(self._heap)


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
        node = ready.pop()
        order.append(node)
        for edge in dag.out[node]:
            missing[edge.dst] -= 1
            if not missing[edge.dst]:
                ready.push(edge.dst)
    if len(order) != len(dag.nodes):
        raise ValueError(f"the edges form a cycle: {_cycle(dag, missing)}.")
    return order


def _cycle(dag: Dag, missing: dict[fx.Node, int]) -> str:
    """One cycle among the nodes that could not run: each has a predecessor that could not either."""
    before: dict[fx.Node, Edge] = {}
    for edge in dag.edges:
        if missing[edge.src] and missing[edge.dst]:
            before.setdefault(edge.dst, edge)
    path, seen = [], set()
    node = next(iter(before))
    while node not in seen:
        seen.add(node)
        path.append(before[node])
        node = before[node].src
    start = next(i for i, edge in enumerate(path) if edge.dst is node)
    loop = path[start:][::-1]
    return " ".join([node.name, *(f"-{e.why}-> {e.dst.name}" for e in loop)])


@dataclass(frozen=True)
class Rounds:
    """What the module's docstring defines, for every node."""

    birth: dict[fx.Node, int]
    round: dict[fx.Node, int]
    goal: dict[fx.Node, _Goal]


def rounds_of(dag: Dag) -> Rounds:
    """One pass down the graph and one up; linear.  Raises ValueError for a cycle."""
    order = list_schedule(dag, ProgramOrder(dag))
    birth = dict.fromkeys(order, 0)
    for node in order:
        after = birth[node] + (comm_of(node) is not None)
        for edge in dag.out[node]:
            birth[edge.dst] = max(birth[edge.dst], after)
    round_, goal = dict[fx.Node, int](), dict[fx.Node, _Goal]()
    for node in reversed(order):
        launches = comm_of(node) is not None
        readers = [edge.dst for edge in dag.out[node]]
        needed = min((0 if r.op == "output" else round_[r] for r in readers), default=0)
        round_[node] = max(birth[node], needed - launches)
        if launches:
            goal[node] = (round_[node], _chunk_rank(node), stream_of(node)[0])
        else:
            goal[node] = min((goal[r] for r in readers), default=_NO_GOAL)
    return Rounds(birth, round_, goal)


def _chunk_rank(node: fx.Node) -> int:
    """Chunks launch in ascending order forward and in descending order backward, as autograd."""
    tag = tag_of(node) if has_tag(node) else None
    if tag is None or tag.chunk is None:
        return 0
    return tag.chunk if tag.phase == "forward" else -tag.chunk


def reservations(dag: Dag, rounds: Rounds) -> Iterator[Edge]:
    """What stays back until the last launch of a region: the branch of the chunk that comes last.

    Backward these are its expert weight gradients, forward what goes past the exchange (shared
    experts).  Otherwise nothing would be left to run beside that launch.
    """
    last: dict[tuple[str, str, int, str], fx.Node] = {}
    for node in dag.nodes:
        if comm_of(node):
            key = region_of(node)
            if key not in last or rounds.goal[node] >= rounds.goal[last[key]]:
                last[key] = node
    heads = {key[:3]: launch for key, launch in last.items()}
    for node in dag.nodes:
        if node.op != "call_function" or comm_of(node) or is_wait(node):
            continue
        tag = tag_of(node)
        launch = _around(heads, tag.source, tag.layer, tag.call)
        if launch is None or tag.chunk != tag_of(launch).chunk or rounds.goal[node] <= rounds.goal[launch]:
            continue
        if node.target is _WGRAD or (
            tag.phase == "forward" and tag.chunk is not None and rounds.birth[node] <= rounds.round[launch]
        ):
            yield Edge(launch, node, "policy")


def _around(heads: dict[tuple[str, str, int], fx.Node], source: str, layer: str, call: int) -> fx.Node | None:
    """The last launch of the innermost region around a module call."""
    while layer:
        if (source, layer, call) in heads:
            return heads[source, layer, call]
        layer = layer.rpartition(".")[0]
    return None


class Overlap:
    """The policy of the module's docstring."""

    def __init__(self, dag: Dag, rounds: Rounds, cost: CostModel | None = None) -> None:
        self._rounds, self._cost = rounds, cost
        self._place = {node: i for i, node in enumerate(dag.nodes)}
        self._first: list[int] = []  # inputs, and parts of a tuple: nothing is gained by holding it
        self._launches: list[tuple[_Goal, int]] = []
        self._compute: dict[tuple[str, int | None], list[tuple[_Goal, int]]] = defaultdict(list)
        self._waits: list[tuple[_Goal, int]] = []
        self._later: list[tuple[int, _Goal, int]] = []
        self._last: list[int] = []
        self._nodes = dag.nodes
        self._length = 0
        self._round = 0
        self._stream: tuple[str, int | None] | None = None
        self._now_us = 0.0
        self._free_us: dict[str, float] = {}
        self._landed_us: dict[fx.Node, float] = {}
        self._work_us: dict[_Goal, float] = defaultdict(float)
        if cost:
            for node in dag.nodes: self._work_us[rounds.goal[node]] += cost.us[node]
            self._work_us[_NO_GOAL] = 1e30

    def __len__(self) -> int:
        return self._length

    def push(self, node: fx.Node) -> None:
        self._length += 1
        place = self._place[node]
        if node.op == "output":
            heapq.heappush(self._last, place)
        elif node.op != "call_function" or node.target is operator.getitem:
            heapq.heappush(self._first, place)
        elif self._rounds.round[node] > self._round:
            heapq.heappush(self._later, (self._rounds.round[node], self._rounds.goal[node], place))
        else:
            self._enter(node)

    def _enter(self, node: fx.Node) -> None:
        entry = (self._rounds.goal[node], self._place[node])
        if comm_of(node):
            heapq.heappush(self._launches, entry)
        elif is_wait(node):
            heapq.heappush(self._waits, entry)
        else:
            heapq.heappush(self._compute[stream_of(node)], entry)

    def pop(self) -> fx.Node:
        self._length -= 1
        node = self._nodes[self._choose()]
        self._advance(node)
        return node

    def _choose(self) -> int:
        if self._first:
            return heapq.heappop(self._first)
        if self._launches:
            return heapq.heappop(self._launches)[1]
        self._admit_landed()
        best = min(
            (q for q in self._compute.items() if q[1]),
            key=lambda q: (self._work_us[q[1][0][0]] if self._cost and max(self._free_us.values(),default=0)<=self._now_us and MODE else q[1][0][0][0], q[0] == self._stream, q[1][0]),
            default=None,
        )
        if best is not None:
            return heapq.heappop(best[1])[1]
        if (self._cost or HZ) and self._later and self._waits and self._later[0][0] <= self._round + HZ2:
            return heapq.heappop(self._later)[2]
        if self._waits:
            return heapq.heappop(self._waits)[1]
        return heapq.heappop(self._later)[2] if self._later else heapq.heappop(self._last)

    def _admit_landed(self) -> None:
        """Waits that would not block any more are like compute that costs nothing."""
        if self._cost is None:
            return
        blocking = []
        for entry in self._waits:
            wait = self._nodes[entry[1]]
            if self._landed_us[launch_of(wait)] <= self._now_us:
                heapq.heappush(self._compute[stream_of(wait)], entry)
            else:
                blocking.append(entry)
        self._waits = blocking

    def _advance(self, node: fx.Node) -> None:
        spec = comm_of(node)
        if spec:
            self._stream = stream_of(node)
            self._round = max(self._round, self._rounds.round[node] + 1)
            while self._later and self._later[0][0] <= self._round:
                self._enter(self._nodes[heapq.heappop(self._later)[2]])
        if self._cost is None:
            return
        if is_wait(node):
            self._now_us = max(self._now_us, self._landed_us[launch_of(node)])
        self._now_us += self._cost.us[node]
        self._work_us[self._rounds.goal[node]] -= self._cost.us[node]
        if spec:
            start = max(self._now_us, self._free_us.get(spec.lane, 0.0))
            self._landed_us[node] = self._free_us[spec.lane] = start + self._cost.flight_us[node]


def place_nodes(order: Iterable[fx.Node]) -> None:
    """Puts the nodes of a graph in this order."""
    before: fx.Node | None = None
    for node in order:
        if before is not None:
            before.append(node)
        before = node
