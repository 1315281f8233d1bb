"""Putting the nodes of a graph in another order."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from torch import fx

from interlace import _compat

Key = tuple[int, ...]


def move_to(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    """Puts all nodes of a graph in this order, which has to keep data dependences."""
    end = _compat.graph_root(graph)
    for node in order:
        end.prepend(node)


def sort_by_key(graph: fx.Graph, keys: Mapping[fx.Node, Key]) -> None:
    """Program order by key wherever data allows it; equal keys keep their order.

    Raises: ValueError that names the first nodes which need their own results.
    """
    nodes = list(graph.nodes)
    place = {n: i for i, n in enumerate(nodes)}
    waiting = {n: len(n.all_input_nodes) for n in nodes}
    ready = [(keys[n], place[n], n) for n in nodes if not waiting[n]]
    heapq.heapify(ready)
    order: list[fx.Node] = []
    while ready:
        _, _, node = heapq.heappop(ready)
        order.append(node)
        for user in node.users:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (keys[user], place[user], user))
    if len(order) != len(nodes):
        stuck = [f"{n.name} ({n.target})" for n in nodes if waiting[n] > 0]
        raise ValueError(f"these nodes need their own results: {', '.join(stuck[:3])}.")
    move_to(graph, order)
