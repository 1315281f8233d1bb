"""Exchanges in flight: every launch with its wait, and the order of communication over ranks."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

from interlace.graph import CommSpec, comm_of, is_collective, is_wait, tag_of
from interlace.graph.dag import is_fence

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_READS_ONLY_SIZES = (torch.ops.aten.sym_size.int,)
_Region = tuple[str, str, int, str]


@dataclass(frozen=True)
class Flight:
    """One launch, the wait that completes it, and what is known about both."""

    launch: fx.Node
    wait: fx.Node
    spec: CommSpec


def pair_flights(gm: fx.GraphModule) -> list[Flight]:
    """Every launch with its wait, in program order.

    Raises: ValueError for a launch without exactly one wait, for anything else that reads a result
            before its wait, and for chunks of a region that do not exchange alike.
    """
    flights = [_pair(node, spec) for node in gm.graph.nodes if (spec := comm_of(node))]
    _check_chunks_alike(flights)
    return flights


def _pair(launch: fx.Node, spec: CommSpec) -> Flight:
    readers = [reader for part in launch.users for reader in part.users]
    waits = dict.fromkeys(r for r in readers if is_wait(r))
    if len(waits) != 1:
        names = ", ".join(w.name for w in waits) or "none"
        raise ValueError(
            f"{launch.name} ({tag_of(launch)}) has {len(waits)} waits: {names}; "
            "each launch needs exactly one."
        )
    early = [r for r in readers if not is_wait(r) and r.target not in _READS_ONLY_SIZES]
    if early:
        raise ValueError(
            f"{early[0].name} ({tag_of(early[0])}) reads the result of {launch.name} before its "
            f"wait; let it read {next(iter(waits)).name}."
        )
    return Flight(launch, next(iter(waits)), spec)


def region_of(node: fx.Node) -> _Region:
    """The call of a module, in one phase, that all its chunks repeat."""
    tag = tag_of(node)
    return (tag.source, tag.layer, tag.call, tag.phase)


def _check_chunks_alike(flights: list[Flight]) -> None:
    sequences: dict[_Region, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for flight in flights:
        chunk = tag_of(flight.launch).chunk
        if chunk is not None:
            sequences[region_of(flight.launch)][chunk].append(flight.spec.name)
    num_chunks = 1 + max((c for chunks in sequences.values() for c in chunks), default=-1)
    for (source, layer, call, phase), chunks in sequences.items():
        if len({tuple(chunks.get(c, ())) for c in range(num_chunks)}) > 1:
            found = "; ".join(
                f"chunk {c}: {' '.join(chunks.get(c, ())) or 'none'}" for c in range(num_chunks)
            )
            raise ValueError(
                f"the chunks of {layer} (call {call}, {source} {phase}) exchange differently: "
                f"{found}; every chunk needs the same exchanges in the same order."
            )


def comm_order(gm: fx.GraphModule) -> tuple[str, ...]:
    """What every rank must issue alike: operator, tag; launches, waits, collectives, fences."""
    return tuple(
        f"{node.target} | {tag_of(node)}"
        for node in gm.graph.nodes
        if node.op == "call_function" and (is_collective(node) or is_wait(node) or is_fence(node))
    )


def order_hash(gm: fx.GraphModule) -> str:
    """A digest of :func:`comm_order`, equal in every process that has the same order."""
    return hashlib.sha256("\n".join(comm_order(gm)).encode()).hexdigest()


def agree_on_order(gm: fx.GraphModule, group: ProcessGroup | None = None) -> None:
    """Compares the order of communication over the ranks of a group, once a compile.

    Sync:   a collective; returns at once where there are no peers.
    Raises: ValueError on every rank alike that names the first position at which ranks differ.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    hashes: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(hashes, order_hash(gm), group=group)
    if len(set(hashes)) == 1:
        return
    orders: list[tuple[str, ...]] = [()] * len(hashes)
    dist.all_gather_object(orders, comm_order(gm), group=group)
    length = max(map(len, orders))
    padded = [(*order, *["nothing"] * (length - len(order))) for order in orders]
    at = next(i for i, ops in enumerate(zip(*padded, strict=True)) if len(set(ops)) > 1)
    shown = "; ".join(f"rank {rank}: {order[at]}" for rank, order in enumerate(padded))
    raise ValueError(
        f"ranks would communicate in different orders and wait for each other for ever; first "
        f"difference at position {at}: {shown}. Give all ranks the same settings and code."
    )
