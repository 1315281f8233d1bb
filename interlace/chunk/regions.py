"""Which nodes of a step belong to a chunked region, and what crosses its border."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from interlace.chunk.align import Twins, constants, describe
from interlace.chunk.placement import (
    LOCAL,
    MIXED,
    PARTIAL,
    REPLICATE,
    Placed,
    Placement,
    place,
    place_outside,
)
from interlace.graph import comm_of, is_collective, tag_of
from interlace.graph.chunking import SEQUENCE, Chunking


@dataclass(eq=False)
class Region:
    """One phase of one root: the nodes that every chunk repeats, in program order."""

    root: str
    phase: str
    body: list[fx.Node] = field(default_factory=list)


@dataclass
class Analysis:
    """Regions in program order, the placement of their nodes, and what mixes tokens in them."""

    regions: list[Region]
    placed: dict[fx.Node, Placed]
    cross_token: list[str]

    def home(self) -> dict[fx.Node, Region]:
        """The region that repeats a node."""
        return {node: region for region in self.regions for node in region.body}


def matching_roots(gm: fx.GraphModule, chunking: Chunking) -> list[str]:
    """Paths of the matching modules, at least one of which holds a token exchange.

    An exchange is found through its launch, not through a name.  A matching module without one is
    chunked all the same, so that chunks flow through it and need not be joined.
    Raises: ValueError where no exchange is inside, or where a root is called twice in the step.
    """
    roots: dict[str, None] = {}
    exchanging = 0
    for node in gm.graph.nodes:
        root = chunking.root_of(tag_of(node).layer)
        if root is not None:
            roots[root] = None
            spec = comm_of(node)
            exchanging += spec is not None and spec.token_exchange
    if not exchanging:
        held = sorted({tag_of(n).layer for n in gm.graph.nodes if comm_of(n)})
        raise ValueError(
            f"overlap.chunk_root={chunking.root} matches no module with a token exchange; "
            f"exchanges are in {', '.join(held[:4]) or 'no module at all'}."
        )
    twice = {tag_of(n).layer for n in gm.graph.nodes if tag_of(n).call > 0} & roots.keys()
    if twice:
        raise ValueError(
            f"chunking: {', '.join(sorted(twice))} is called more than once in a step; "
            "give each call a module of its own."
        )
    return list(roots)


def analyse(full: fx.GraphModule, twins: Twins, chunking: Chunking, extent: int) -> Analysis:
    """Places every node of every region; ``extent`` is the full size of the chunked dimension.

    Raises: ValueError that names the node, its module and line: a foreign collective inside a
            region, two chunked dimensions, an extent folded into another, a ratio other than n.
    """
    roots = set(matching_roots(full, chunking))
    regions: dict[tuple[str, str], Region] = {}
    home: dict[fx.Node, Region] = {}
    placed: dict[fx.Node, Placed] = {}
    cross_token = []
    for node in full.graph.nodes:
        tag = tag_of(node)
        root = chunking.root_of(tag.layer)
        if node.op != "call_function" or root not in roots or tag.role == "cast":
            continue
        region = regions.setdefault((root, tag.phase), Region(root, tag.phase))
        seen = {
            source: _seen_from(region, source, twins, home, placed, chunking, extent)
            for source in node.all_input_nodes
        }
        placed[node], mixes = place(node, twins[node], chunking.num_chunks, seen)
        if _is_replicate(placed[node]) and constants(node) == constants(twins[node]):
            continue
        if is_collective(node) and not _is_exchange(node):
            raise ValueError(
                f"chunking: {describe(node)} is a collective inside of the region {root}, which "
                "the chunks would repeat; move it out or choose another overlap.chunk_root."
            )
        if mixes:
            cross_token.append(describe(node))
        region.body.append(node)
        home[node] = region
    return Analysis([r for r in regions.values() if r.body], placed, cross_token)


def _seen_from(
    region: Region,
    source: fx.Node,
    twins: Twins,
    home: dict[fx.Node, Region],
    placed: dict[fx.Node, Placed],
    chunking: Chunking,
    extent: int,
) -> Placed:
    """The placement of an operand as a region finds it: joined values count as the whole."""
    origin = home.get(source)
    if origin is region:
        return placed[source]
    if origin is None:
        value = place_outside(source, twins[source], chunking.num_chunks)
        shard = shard_of(value)
        if shard is not None:
            check_extent(source, shard, chunking, extent)
        return value
    if placed[source] == PARTIAL:
        return REPLICATE
    if _is_local(placed[source]) and origin.root != region.root:
        raise ValueError(
            f"chunking: {describe(source)} belongs to one chunk of {origin.root} and is used in "
            f"{region.root}; return it from the module as a tensor with the chunked dimension."
        )
    return placed[source]


def check_extent(node: fx.Node, shard: Placement, chunking: Chunking, extent: int) -> None:
    """A part of the chunked dimension must be one slice of the value's dimension."""
    size = node.meta["val"].shape[shard.dim]
    if size % extent or (chunking.dim == SEQUENCE and size != extent):
        raise ValueError(
            f"chunking: {describe(node)} crosses the border of a region with the chunk extent "
            f"{extent} folded into a dimension of {size}; keep the dimension apart there."
        )


def _is_local(placed: Placed) -> bool:
    own = (LOCAL, MIXED)
    return placed in own or (isinstance(placed, tuple) and any(p in own for p in placed))


def _is_replicate(placed: Placed) -> bool:
    return all(p == REPLICATE for p in (placed if isinstance(placed, tuple) else (placed,)))


def _is_exchange(node: fx.Node) -> bool:
    spec = comm_of(node)
    return str(node.target).startswith("ep.plan") or (spec is not None and spec.token_exchange)


def shard_of(placed: Placed) -> Placement | None:
    """The placement of a value that can be sliced or concatenated."""
    return placed if isinstance(placed, Placement) and placed.kind == "Shard" else None
