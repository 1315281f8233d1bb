"""Graph chunking: every region of a step runs as n independent chunks, forward and backward.

Contract: requires the step traced at the full extent and at extent / n, both with a boundary at
          each root.  Ensures a graph that is bitwise equal to eager chunking.  Buffers and order
          are no business of this pass: see ``buffers.py`` and ``schedule/``.

Pseudo-code:
    align the two traces; place the nodes of each region; for each region and chunk copy the small
    trace's nodes, reading per-chunk values, slices of outside values, or shared ones;
    join what leaves a region: concatenate shards, add summands (backward: last chunk first, as
    autograd does); sort.

A chunk's nodes come from the small trace, so shapes, constants and strides are those that eager
chunking sees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from interlace.chunk.align import Twins, align, describe
from interlace.chunk.placement import PARTIAL, place_outside
from interlace.chunk.regions import Analysis, Region, analyse, check_extent, shard_of
from interlace.graph import set_tag, tag_of
from interlace.graph.chunking import Chunking
from interlace.graph.order import Key, sort_by_key

aten = torch.ops.aten


@dataclass(frozen=True)
class ChunkReport:
    """What was chunked: regions as (root, phase, nodes of a chunk), and what mixes tokens."""

    regions: list[tuple[str, str, int]]
    cross_token: list[str]


def chunk_graph(
    full: fx.GraphModule, small: fx.GraphModule, chunking: Chunking, extent: int
) -> ChunkReport:
    """Rewrites ``full`` in place; ``extent`` is the full size of the chunked dimension.

    Raises: ValueError that names node, module and line for whatever cannot be proven right, or a
            root without a boundary.
    """
    try:
        twins = align(full, small)
    except ValueError as error:
        if extent == chunking.num_chunks:
            raise ValueError(
                f"{error} Parts of extent 1 are laid out differently from longer ones: "
                f"use fewer than {extent} chunks, or more rows."
            ) from None
        raise
    analysis = analyse(full, twins, chunking, extent)
    _check_boundaries(full, analysis)
    _Chunker(full.graph, twins, analysis, chunking, extent).run()
    return ChunkReport(
        [(r.root, r.phase, len(r.body)) for r in analysis.regions], analysis.cross_token
    )


def _check_boundaries(full: fx.GraphModule, analysis: Analysis) -> None:
    """Without a boundary gradients would be summed in another order than eager chunking has."""
    cut = {tag_of(n).layer for n in full.graph.nodes if n.target is aten.alias.default}
    for region in analysis.regions:
        if region.root not in cut:
            raise ValueError(
                f"chunking: {region.root} has no boundary in the full trace; trace both steps "
                "with Step(..., boundary=chunking.is_root)."
            )


class _Chunker:
    """The state of one rewrite: what stands for a node's value in each chunk, and where it goes."""

    def __init__(
        self,
        graph: fx.Graph,
        twins: Twins,
        analysis: Analysis,
        chunking: Chunking,
        extent: int,
    ) -> None:
        self.graph, self.twins, self.chunking, self.extent = graph, twins, chunking, extent
        self.originals = {small: node for node, small in twins.items()}
        self.placed, self.regions = analysis.placed, analysis.regions
        self.home = analysis.home()
        self.index = {node: i for i, node in enumerate(graph.nodes)}
        self.keys: dict[fx.Node, Key] = {n: (i, 0, 0) for n, i in self.index.items()}
        self.chunks: dict[fx.Node, list[fx.Node]] = {}  # body node -> its value in each chunk
        self.slices: dict[fx.Node, list[fx.Node]] = {}  # outside value -> its slices

    def run(self) -> None:
        first = {region: self.index[region.body[0]] for region in self.regions}
        bodies = sorted(self.home, key=self.index.__getitem__)
        for node in bodies:  # regions may interleave: a backward with its own recompute
            self._copy(node, self.home[node], first[self.home[node]])
        for region in self.regions:
            self._join(region)
        for node in reversed(bodies):
            self.graph.erase_node(node)
        sort_by_key(self.graph, self.keys)

    def _copy(self, node: fx.Node, region: Region, first: int) -> None:
        """n copies of a node; outside of the forward the last chunk comes first, as in autograd."""
        num_chunks, twin = self.chunking.num_chunks, self.twins[node]
        self.chunks[node] = []
        for c in range(num_chunks):

            def operand(a: fx.Node, c: int = c) -> fx.Node:
                return self._operand(self.originals[a], region, c)

            args, kwargs = fx.map_arg(twin.args, operand), fx.map_arg(twin.kwargs, operand)
            with self.graph.inserting_before(node):
                copy = self.graph.create_node(
                    node.op, node.target, args, kwargs, name=f"{node.name}_c{c}"
                )
            copy.meta = dict(twin.meta)
            set_tag(copy, replace(tag_of(node), chunk=c))
            rank = c if region.phase == "forward" else num_chunks - 1 - c
            self.keys[copy] = (first, rank + 1, self.index[node])
            self.chunks[node].append(copy)

    def _operand(self, node: fx.Node, region: Region, chunk: int) -> fx.Node:
        origin = self.home.get(node)
        if origin is region or (origin is not None and self.placed[node] != PARTIAL):
            return self.chunks[node][chunk]
        if origin is None:
            shard = shard_of(place_outside(node, self.twins[node], self.chunking.num_chunks))
            if shard is not None:
                return self._slices(node, shard.dim, region)[chunk]
        return node

    def _slices(self, node: fx.Node, dim: int, region: Region) -> list[fx.Node]:
        if node in self.slices:
            return self.slices[node]
        value = node.meta["val"]
        part = value.shape[dim] // self.chunking.num_chunks
        made = []
        for c in range(self.chunking.num_chunks):
            with self.graph.inserting_before(region.body[0]):
                piece = self.graph.call_function(
                    aten.slice.Tensor, (node, dim, c * part, (c + 1) * part)
                )
                piece.meta["val"] = self.twins[node].meta["val"]
                nodes = [piece]
                if not _slices_are_contiguous(value, dim):
                    whole = {"memory_format": torch.contiguous_format}
                    nodes.append(self.graph.call_function(aten.clone.default, (piece,), whole))
                    nodes[-1].meta["val"] = self.twins[node].meta["val"]
            for new in nodes:
                set_tag(new, replace(tag_of(region.body[0]), chunk=c, role="split"))
                self.keys[new] = (self.index[region.body[0]], 0, c)
            made.append(nodes[-1])
        self.slices[node] = made
        return made

    def _join(self, region: Region) -> None:
        """What is read outside of all chunks is joined; everything else stays apart."""
        last = self.index[region.body[-1]]
        for node in region.body:
            outside = [u for u in node.users if not self._reads_chunks(u, node)]
            if not outside:
                continue
            values = self.chunks[node]
            shard, dim = shard_of(self.placed[node]), 0
            made: list[fx.Node] = []
            if shard is not None:
                dim = shard.dim
                check_extent(node, shard, self.chunking, self.extent)
                with self.graph.inserting_before(region.body[-1]):
                    made.append(self.graph.call_function(aten.cat.default, (values, dim)))
            elif self.placed[node] == PARTIAL:
                backwards = region.phase != "forward"
                total, *others = reversed(values) if backwards else values
                for other in others:
                    with self.graph.inserting_before(region.body[-1]):
                        total = self.graph.call_function(aten.add.Tensor, (total, other))
                    made.append(total)
            else:
                raise ValueError(
                    f"chunking: {describe(node)} leaves the region {region.root} to "
                    f"{', '.join(describe(u) for u in outside[:2])}, but it is neither a slice nor "
                    "a proven sum of the whole; compute it outside of the region."
                )
            for new in made:
                new.meta["val"] = node.meta["val"]
                set_tag(new, replace(tag_of(node), chunk=None, role="merge"))
                self.keys[new] = (last, self.chunking.num_chunks + 1, self.index[node])
            for user in outside:
                user.replace_input_with(node, made[-1])

    def _reads_chunks(self, user: fx.Node, node: fx.Node) -> bool:
        """Whether a user of an original body node has been copied with per-chunk operands."""
        home = self.home.get(user)
        if home is None:
            return False
        return home is self.home[node] or self.placed[node] != PARTIAL


def _slices_are_contiguous(value: torch.Tensor, dim: int) -> bool:
    return value.is_contiguous() and all(size == 1 for size in value.shape[:dim])
