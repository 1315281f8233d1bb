"""One dependency graph, one list scheduler: every pass that overlaps anything hands edges to it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from torch import fx

from interlace.graph.dag import Edge, build_dag, check_order
from interlace.schedule.cost import NETWORK_CARD, CostModel, Machine, Timeline, simulate, total_us
from interlace.schedule.flights import (
    Flight,
    agree_on_order,
    comm_order,
    order_hash,
    pair_flights,
)
from interlace.schedule.policy import (
    Overlap,
    ProgramOrder,
    list_schedule,
    reservations,
    rounds_of,
)

SCHEDULERS = ("policy", "cost", "off")


def schedule_graph(
    gm: fx.GraphModule,
    *,
    scheduler: str = "policy",
    extra: Iterable[Edge] = (),
    machine: Machine | None = None,
) -> tuple[Edge, ...]:
    """Reorders the nodes of a graph so that exchanges run beside compute; returns all edges.

    Contract: requires one wait a launch and chunks that exchange alike; ensures an order that keeps
              every edge, the same on every rank; changes no value.  ``extra`` are the edges of
              other passes.  Check the result against :func:`check_order` after every later pass.
              "off" leaves the order alone and checks it; "cost" takes the policy with or without a
              clock, whichever is shorter on ``machine``.
    Raises:   ValueError that names the cycle, the edge or the launch at fault.
    """
    if scheduler not in SCHEDULERS:
        raise ValueError(f"overlap.scheduler={scheduler!r}: use one of {', '.join(SCHEDULERS)}.")
    pair_flights(gm)
    dag = build_dag(gm, extra)
    if scheduler != "off":
        rounds = rounds_of(dag)
        dag = dag.plus(reservations(dag, rounds))
        order = list_schedule(dag, Overlap(dag, rounds))
        if scheduler == "cost":
            cost = CostModel(dag.nodes, machine or Machine())
            timed = list_schedule(dag, Overlap(dag, rounds, cost))
            order = min(order, timed, key=lambda nodes: total_us(nodes, cost))
        for before, node in pairwise(order):
            before.append(node)
    check_order(gm, dag.edges)
    return dag.edges


__all__ = [
    "NETWORK_CARD",
    "SCHEDULERS",
    "CostModel",
    "Edge",
    "Flight",
    "Machine",
    "Overlap",
    "ProgramOrder",
    "Timeline",
    "agree_on_order",
    "check_order",
    "comm_order",
    "list_schedule",
    "order_hash",
    "pair_flights",
    "reservations",
    "rounds_of",
    "schedule_graph",
    "simulate",
]
