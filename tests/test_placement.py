"""The placement lattice on operators by themselves.  Oracle: the algebra, worked out by hand."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from interlace.chunk.placement import LOCAL, MIXED, PARTIAL, REPLICATE, Placement, place

aten = torch.ops.aten
N = 2
SHARD0, SHARD1 = Placement("Shard", 0), Placement("Shard", 1)


def _node(target, shapes, out, small_out, args=None, small_args=None):
    """A node over placeholders x0, x1, ... of these shapes, and its twin."""
    made = []
    for result, args in ((out, args), (small_out, small_args or args)):  # noqa: B020
        g = fx.Graph()
        inputs = [g.placeholder(f"x{i}") for i in range(len(shapes))]
        for x, shape in zip(inputs, shapes, strict=True):
            x.meta["val"] = torch.empty(shape)
        node = g.call_function(target, args(inputs) if args else tuple(inputs))
        is_many = isinstance(result, list)
        node.meta["val"] = [torch.empty(s) for s in result] if is_many else torch.empty(result)
        made.append((node, inputs))
    (node, inputs), (twin, _) = made
    return node, twin, inputs


@pytest.mark.parametrize(
    ("left", "right", "shapes", "out", "small", "expected"),
    [
        (SHARD0, REPLICATE, [(8, 3), (3, 5)], (8, 5), (4, 5), SHARD0),
        (SHARD1, SHARD0, [(3, 8), (8, 5)], (3, 5), (3, 5), PARTIAL),
        (SHARD0, SHARD1, [(8, 3), (3, 8)], (8, 8), (4, 4), None),
        (REPLICATE, REPLICATE, [(3, 4), (4, 5)], (3, 5), (3, 5), REPLICATE),
        (PARTIAL, REPLICATE, [(3, 4), (4, 5)], (3, 5), (3, 5), MIXED),
        (LOCAL, REPLICATE, [(9, 3), (3, 5)], (9, 5), (9, 5), LOCAL),
    ],
)
def test_matrix_product(left, right, shapes, out, small, expected) -> None:
    node, twin, (a, b) = _node(aten.mm.default, shapes, out, small)
    if expected is None:
        with pytest.raises(ValueError, match=r"mm.* in several dimensions: \[8, 8\] .* \[4, 4\]"):
            place(node, twin, N, {a: left, b: right})
        return
    assert place(node, twin, N, {a: left, b: right})[0] == expected


@pytest.mark.parametrize(("dims", "expected"), [([0], PARTIAL), ([1], SHARD0), ([0, 1], PARTIAL)])
def test_sum(dims, expected) -> None:
    out = {(0,): (3,), (1,): (8,), (0, 1): ()}[tuple(dims)]
    small = {(0,): (3,), (1,): (4,), (0, 1): ()}[tuple(dims)]
    node, twin, (x,) = _node(
        aten.sum.dim_IntList, [(8, 3)], out, small, args=lambda xs: (xs[0], dims)
    )
    assert place(node, twin, N, {x: SHARD0}) == (expected, False)


def test_a_mean_is_a_statistic_of_the_chunk_and_reported_once() -> None:
    node, twin, (x,) = _node(aten.mean.dim, [(8, 3)], (3,), (3,), args=lambda xs: (xs[0], [0]))
    assert place(node, twin, N, {x: SHARD0}) == (MIXED, True)
    later, later_twin, (y,) = _node(aten.exp.default, [(3,)], (3,), (3,))
    assert place(later, later_twin, N, {y: MIXED}) == (MIXED, False)
    used, used_twin, (a, b) = _node(aten.sub.Tensor, [(8, 3), (3,)], (8, 3), (4, 3))
    assert place(used, used_twin, N, {a: SHARD0, b: MIXED})[0] == SHARD0


@pytest.mark.parametrize(
    ("target", "args", "expected"),
    [
        (aten.t.default, lambda xs: (xs[0],), PARTIAL),
        (aten.mul.Scalar, lambda xs: (xs[0], 2.0), PARTIAL),
        (aten._to_copy.default, lambda xs: (xs[0],), PARTIAL),
        (aten.sum.dim_IntList, lambda xs: (xs[0], [0]), PARTIAL),
        (aten.sum.default, lambda xs: (xs[0],), PARTIAL),
        (aten.relu.default, lambda xs: (xs[0],), MIXED),
        (aten.pow.Tensor_Scalar, lambda xs: (xs[0], 2), MIXED),
    ],
)
def test_partial_survives_linear_operators_only(target, args, expected) -> None:
    node, twin, (x,) = _node(target, [(3, 3)], (3, 3), (3, 3), args=args)
    assert place(node, twin, N, {x: PARTIAL})[0] == expected


def test_sums_of_partials_and_nothing_else() -> None:
    node, twin, (a, b) = _node(aten.add.Tensor, [(3,), (3,)], (3,), (3,))
    assert place(node, twin, N, {a: PARTIAL, b: PARTIAL})[0] == PARTIAL
    assert place(node, twin, N, {a: PARTIAL, b: REPLICATE})[0] == MIXED


@pytest.mark.parametrize(
    ("target", "placed", "expected"),
    [
        (aten.mul.Tensor, (PARTIAL, REPLICATE), PARTIAL),
        (aten.mul.Tensor, (REPLICATE, PARTIAL), PARTIAL),
        (aten.div.Tensor, (PARTIAL, REPLICATE), PARTIAL),
        (aten.div.Tensor, (REPLICATE, PARTIAL), MIXED),
        (aten.mul.Tensor, (PARTIAL, PARTIAL), MIXED),
        (aten.mul.Tensor, (PARTIAL, MIXED), MIXED),
    ],
)
def test_a_partial_may_be_scaled_by_what_all_chunks_share(target, placed, expected) -> None:
    node, twin, (a, b) = _node(target, [(3,), (3,)], (3,), (3,))
    assert place(node, twin, N, {a: placed[0], b: placed[1]})[0] == expected


@pytest.mark.parametrize(
    ("target", "full", "small"),
    [
        (aten.div.Tensor, 8, 4),
        (aten.mul.Tensor, 0.125, 0.25),
        (aten.div.Scalar, 8, 4),
        (aten.mul.Scalar, 0.125, 0.25),
    ],
)
def test_a_sum_over_a_number_of_tokens_is_a_mean(target, full, small) -> None:
    """Each chunk would divide by its own number: the means of n chunks add up to n means."""
    node, twin, (x,) = _node(
        target, [(3,)], (3,), (3,), args=lambda xs: (xs[0], full),
        small_args=lambda xs: (xs[0], small),
    )  # fmt: skip
    assert place(node, twin, N, {x: PARTIAL}) == (MIXED, True)
    node, twin, (x,) = _node(target, [(3,)], (3,), (3,), args=lambda xs: (xs[0], 5))
    assert place(node, twin, N, {x: PARTIAL}) == (PARTIAL, False)


def test_a_sum_expanded_to_the_tokens_is_a_slice() -> None:
    node, twin, (x,) = _node(
        aten.expand.default, [(1, 3)], (8, 3), (4, 3), args=lambda xs: (xs[0], [8, 3]),
        small_args=lambda xs: (xs[0], [4, 3]),
    )  # fmt: skip
    assert place(node, twin, N, {x: PARTIAL})[0] == SHARD0


def test_norm_backward_gives_a_shard_and_a_sum() -> None:
    """As CUDA's fused norm does: (gradient of x, gradient of the weight)."""
    node, twin, (g, x, r, w) = _node(
        aten._fused_rms_norm_backward.default,
        [(8, 3), (8, 3), (8, 1), (3,)],
        [(8, 3), (3,)],
        [(4, 3), (3,)],
        args=lambda xs: (xs[0], xs[1], [3], xs[2], xs[3], [True, True]),
    )
    placed = place(node, twin, N, {g: SHARD0, x: SHARD0, r: SHARD0, w: REPLICATE})
    assert placed == ((SHARD0, PARTIAL), False)
    item = node.graph.call_function(operator.getitem, (node, 1))
    assert place(item, item, N, {node: placed[0]})[0] == PARTIAL


def test_a_ratio_other_than_n_is_refused() -> None:
    node, twin, (x,) = _node(aten.relu.default, [(9,)], (9,), (4,))
    with pytest.raises(ValueError, match=r"relu.* is not 2 times as long .* \[9\] .* \[4\]"):
        place(node, twin, N, {x: SHARD0})


def test_a_number_of_tokens_that_became_a_constant_is_the_chunks_own() -> None:
    node, twin, (x,) = _node(aten.div.Tensor, [(3,)], (3,), (3,), args=lambda xs: (xs[0], 8))
    twin.args = (twin.args[0], 4)
    assert place(node, twin, N, {x: REPLICATE}) == (MIXED, True)
