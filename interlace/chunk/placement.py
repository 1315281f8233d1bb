"""What a chunk's value is to the whole: a slice, a summand, the same, or nothing joinable.

The lattice of one node's value inside a region:

Replicate   the same in every chunk; computed once.
Shard(d)    chunk c holds its part of dimension d; joined by concatenation.
Partial     a summand, proven: the operator contracts the sharded dimension.  Joined by addition.
Local       the chunk's own rows and plans, in the exchange's order.  Never joined.
Mixed       the chunk's own statistic over its tokens (a mean, a length).  Never joined either, but
            what is computed from it for each token is sharded; reported, for it is not the whole's.

Partial comes from the contractions listed here and survives linear operators only.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from interlace import ep  # noqa: F401 - registers the operators that are named below
from interlace.chunk.align import constants, describe, sharded_dim
from interlace.kernels import grouped_mm  # noqa: F401

aten, _ep, _ours = torch.ops.aten, torch.ops.ep, torch.ops.interlace


@dataclass(frozen=True)
class Placement:
    """``kind`` is Replicate, Shard, Partial, Local or Mixed; ``dim`` belongs to Shard."""

    kind: str
    dim: int = 0

    def __str__(self) -> str:
        return f"Shard({self.dim})" if self.kind == "Shard" else self.kind


REPLICATE, PARTIAL = Placement("Replicate"), Placement("Partial")
LOCAL, MIXED = Placement("Local"), Placement("Mixed")
Placed = Placement | tuple[Placement, ...]

# Linear in their only tensor argument: the sum of the chunks' results is the result of the sum.
_LINEAR = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.neg.default,
        aten.mul.Scalar,
        aten.div.Scalar,
        aten.clone.default,
        aten.detach.default,
        aten.alias.default,
        aten._to_copy.default,
    }
)
_SUMS = frozenset({aten.sum.default, aten.sum.dim_IntList})
_PRODUCTS = {aten.mm.default: (1, 0), aten.bmm.default: (2, 1)}  # contracted dims of both factors
_SCATTERED = frozenset({aten.embedding_dense_backward.default, _ours.grouped_wgrad.default})
# Which results of a norm's backward are gradients of its weights: sums over tokens.
_WEIGHT_GRADS = {
    aten._fused_rms_norm_backward.default: (1,),
    aten.native_layer_norm_backward.default: (1, 2),
}

# The exchange, whose shapes do not tell: plan and rows belong to the chunk alone, what comes back
# to the tokens is sharded by token.  The overflow counts rows that did not fit: a summand.
_EXCHANGE: dict[Any, Placed] = {
    _ep.plan.default: (LOCAL, LOCAL, LOCAL, PARTIAL, LOCAL),
    _ep.dispatch_launch.default: (LOCAL, LOCAL),
    _ep.combine_launch.default: (LOCAL, LOCAL),
    _ep.wait.default: LOCAL,
    _ep.combine_finish.default: Placement("Shard", 0),
    _ep.score_grad.default: Placement("Shard", 0),
}


def place(
    node: fx.Node, twin: fx.Node, num_chunks: int, of: dict[fx.Node, Placed]
) -> tuple[Placed, bool]:
    """The placement of a node's value, and whether its operator mixes tokens.

    ``of`` holds the placements of earlier nodes; what is missing is Replicate.
    Raises: ValueError that names the node where the extent is in several dimensions, or in a
            ratio other than n.
    """
    inputs = [_of(x, of) for x in node.all_input_nodes]
    if node.target in _EXCHANGE:
        return _EXCHANGE[node.target], False
    if node.target is operator.getitem:
        source, index = node.args[0], node.args[1]
        assert isinstance(source, fx.Node)
        placed = of.get(source, REPLICATE)
        return (placed[index] if isinstance(placed, tuple) else placed), False
    kinds = {p.kind for p in inputs}
    # A number that depends on the tokens (a mean's, a size to expand to) makes it another function.
    if _is_partial(node, of, kinds) and constants(node) == constants(twin):
        return PARTIAL, False
    if "Local" in kinds:
        return LOCAL, False
    values, others = node.meta.get("val"), twin.meta.get("val")
    if isinstance(values, (tuple, list)) and isinstance(others, (tuple, list)):
        sums = _WEIGHT_GRADS.get(node.target, ())
        each = tuple(
            PARTIAL if i in sums and "Shard" in kinds else _by_shape(node, v, w, num_chunks, kinds)
            for i, (v, w) in enumerate(zip(values, others, strict=True))
        )
        return each, MIXED in each and "Mixed" not in kinds
    placed = _by_shape(node, values, others, num_chunks, kinds)
    if placed == REPLICATE and constants(node) != constants(twin):
        placed = MIXED  # for example a number of tokens that became a constant
    return placed, placed == MIXED and "Mixed" not in kinds


def place_outside(node: fx.Node, twin: fx.Node, num_chunks: int) -> Placement:
    """The placement of a value that is made outside of all regions: its shape alone decides."""
    return _by_shape(node, node.meta.get("val"), twin.meta.get("val"), num_chunks, set())


def _of(node: fx.Node, of: dict[fx.Node, Placed]) -> Placement:
    placed = of.get(node, REPLICATE)
    if isinstance(placed, tuple):
        return next((p for p in placed if p != REPLICATE), REPLICATE)
    return placed


def _by_shape(node: fx.Node, value: Any, other: Any, num_chunks: int, kinds: set[str]) -> Placement:
    try:
        dim = sharded_dim(value, other, num_chunks)
    except ValueError as error:
        raise ValueError(f"chunking: {describe(node)} {error}.") from None
    if dim is not None:
        return Placement("Shard", dim)
    return MIXED if kinds - {"Replicate"} else REPLICATE


def _is_partial(node: fx.Node, of: dict[fx.Node, Placed], kinds: set[str]) -> bool:
    args = node.args
    if node.target in _LINEAR:
        return kinds == {"Partial"}
    if node.target in (aten.add.Tensor, aten.sub.Tensor):
        return kinds == {"Partial"} and all(isinstance(a, fx.Node) for a in args[:2])
    if node.target in _SCATTERED:
        return bool(kinds & {"Shard", "Local"})
    if node.target in (aten.mul.Tensor, aten.div.Tensor):
        factors = tuple(_of(a, of) if isinstance(a, fx.Node) else REPLICATE for a in args[:2])
        swapped = node.target is aten.mul.Tensor and factors == (REPLICATE, PARTIAL)
        return swapped or factors == (PARTIAL, REPLICATE)
    if node.target in _SUMS:
        placed = _of(args[0], of)
        dims = _sum_dims(node)
        over_tokens = placed.kind == "Shard" and (dims is None or placed.dim in dims)
        return placed == PARTIAL or over_tokens
    if node.target in _PRODUCTS:
        left, right = (_of(a, of) for a in args[:2])
        contracted = _PRODUCTS[node.target]
        return (left, right) == tuple(Placement("Shard", d) for d in contracted)
    return False


def _sum_dims(node: fx.Node) -> set[int] | None:
    if node.target is aten.sum.default or not node.args[1:] or not node.args[1]:
        return None
    rank = node.args[0].meta["val"].dim()
    return {d % rank for d in node.args[1]}
