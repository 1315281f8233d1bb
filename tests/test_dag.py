"""What must come before what: every kind of edge on graphs of a few nodes, and its check."""

from __future__ import annotations

import operator

import pytest
import torch
from small_graphs import Builder, aten, calls_of
from torch import fx

from interlace.graph.dag import Edge, build_dag, check_order, is_fence


def _edges(gm: fx.GraphModule, why: str) -> set[tuple[str, str]]:
    return {(e.src.name, e.dst.name) for e in build_dag(gm).edges if e.why == why}


def test_data_edges_are_the_arguments() -> None:
    b = Builder()
    b.compute("a", "x")
    b.compute("c", "a", "x")
    gm = b.done("c")
    expected = {("x", "a"), ("a", "c"), ("x", "c"), ("c", "output")}
    assert _edges(gm, "data") == expected
    assert len(build_dag(gm).edges) == 4


def test_a_write_is_ordered_against_readers_of_views_and_other_writes() -> None:
    b = Builder()
    b.compute("a", "x")
    view = b.call("view", aten.view.default, (b.nodes["a"], [16]))
    parts = b.call("parts", aten.split.Tensor, (view, 8))
    part = b.call("part", operator.getitem, (parts, 0))
    b.call("unsafe", aten._unsafe_view.default, (part, [2, 4]))
    b.compute("before", "unsafe")
    b.call("write", aten.add_.Tensor, (b.nodes["a"], 1.0))
    b.compute("after", "unsafe")
    b.call("again", aten.mul_.Tensor, (view, 2.0))
    b.compute("copy", "x")
    gm = b.done("before", "after", "copy", "x")
    found = _edges(gm, "mutation")
    assert {
        ("before", "write"),
        ("write", "after"),
        ("write", "again"),
        ("after", "again"),
    } <= found
    assert not any("copy" in pair for pair in found)  # another storage
    assert ("before", "after") not in found  # readers are free


def test_a_transfer_reads_its_source_until_the_wait() -> None:
    b = Builder()
    b.compute("y", "x")
    b.launch("C", "y", combine=True)
    b.wait("w", "C")
    b.call("write", aten.add_.Tensor, (b.nodes["y"], 1.0))
    b.compute("z", "w")
    assert {("C", "write"), ("w", "write")} <= _edges(b.done("z"), "mutation")


def test_launches_of_one_stream_keep_their_order_and_chunks_may_pass() -> None:
    b = Builder()
    for name, chunk, source in (("a", 0, "0F"), ("b", 1, "0F"), ("c", 0, "0F"), ("d", 0, "1F")):
        b.launch(name, "x", chunk=chunk, source=source)
        b.wait(f"w{name}", name, chunk=chunk, source=source)
    assert _edges(b.done("wa", "wb", "wc", "wd"), "lane_order") == {("a", "c")}


def test_a_blocking_collective_keeps_its_place_among_the_launches_of_its_stream() -> None:
    b = Builder()
    plan = torch.ops.ep.plan.default

    def plan_node(name: str, chunk: int) -> None:
        b.call(name, plan, (b.x, 4, None, "single", "alltoall"), chunk=chunk)

    plan_node("p0", 0)
    b.launch("a", "x", chunk=0)
    b.wait("wa", "a", chunk=0)
    plan_node("p1", 1)
    plan_node("q0", 0)
    b.launch("c", "x", chunk=0)
    b.wait("wc", "c", chunk=0)
    expected = {("p0", "a"), ("a", "q0"), ("p0", "q0"), ("q0", "c")}
    found = _edges(b.done("wa", "wc"), "lane_order")
    assert found <= expected
    assert {("p0", "a"), ("a", "q0"), ("q0", "c")} <= found


_lib = torch.library.Library("others", "DEF")
_lib.define("barrier(Tensor x) -> Tensor")
_lib.define("swap_rows(Tensor x, str group_name) -> Tensor")
_lib.define("norm(Tensor x) -> Tensor")


def test_what_nobody_registered_is_a_fence() -> None:
    """Field report I3: a pass hoisted an exchange over a barrier that it did not know."""
    b = Builder()
    b.launch("a", "x", chunk=0)
    b.wait("wa", "a", chunk=0)
    b.compute("free", "x")
    b.call("barrier", torch.ops.others.barrier.default, (b.x,))
    b.call("total", torch.ops._c10d_functional.all_reduce.default, (b.x, "sum", "0"))
    b.call("total_w", torch.ops._c10d_functional.wait_tensor.default, (b.nodes["total"],))
    b.call("swap", torch.ops.others.swap_rows.default, (b.x, "0"))
    b.call("norm", torch.ops.others.norm.default, (b.x,))
    b.launch("b", "x", chunk=1)
    b.wait("wb", "b", chunk=1)
    gm = b.done("wa", "wb", "total_w", "free", "swap", "norm")
    fences = [n.name for n in gm.graph.nodes if is_fence(n)]
    assert fences == ["barrier", "total", "total_w", "swap"]
    found = _edges(gm, "lane_order")
    assert {
        ("a", "barrier"),
        ("wa", "barrier"),
        ("barrier", "total"),
        ("swap", "b"),
        ("swap", "wb"),
    } <= found
    assert not any("free" in pair or "norm" in pair for pair in found)


def test_random_draws_keep_their_order() -> None:
    b = Builder()
    for name in ("r0", "r1", "r2"):
        b.call(name, aten.bernoulli.default, (b.x,))
    assert _edges(b.done("r0", "r1", "r2"), "lane_order") == {("r0", "r1"), ("r1", "r2")}


@pytest.mark.parametrize(("dropout", "edges"), [(0.0, set()), (0.1, {("r0", "r1")})])
def test_attention_is_a_draw_only_with_dropout(dropout: float, edges: set) -> None:
    b = Builder()
    attention = aten._scaled_dot_product_flash_attention.default
    for name in ("r0", "r1"):
        b.call(name, attention, (b.x, b.x, b.x, dropout))
    assert _edges(b.done("r0", "r1"), "lane_order") == edges


def test_copies_to_the_host_and_their_readers_stay_in_order() -> None:
    """Trap 9: a copy that does not block is complete once a later one has."""
    b = Builder()
    for name in ("c0", "c1"):
        b.call(name, aten._to_copy.default, (b.x,)).meta["val"] = torch.empty(4, 4)
    b.compute("y", "c0")
    b.call("read", aten._local_scalar_dense.default, (b.x,))
    found = _edges(b.done("y", "read", "c1"), "host_sync")
    assert found == {("c0", "c1"), ("c1", "y"), ("y", "read")}


def test_an_order_that_breaks_an_edge_names_it() -> None:
    b = Builder()
    first, second = b.compute("first", "x"), b.compute("second", "x", chunk=1)
    gm = b.done("first", "second")
    edges = build_dag(gm, [Edge(first, second, "buffer_reuse")]).edges
    check_order(gm, edges)
    first.prepend(second)
    with pytest.raises(
        ValueError,
        match=r"broken edge: first \[0F layers.0.moe forward\] before "
        r"second \[0F layers.0.moe/1 forward\] \(buffer_reuse\)",
    ):
        check_order(gm, edges)


def test_a_node_that_went_missing_takes_only_data_edges_along() -> None:
    b = Builder()
    b.compute("a", "x")
    b.compute("kept", "x")
    b.compute("dead", "x")
    gm = b.done("a", "kept")
    dag = build_dag(gm, [Edge(b.nodes["dead"], b.nodes["kept"], "mutation")])
    gm.graph.erase_node(b.nodes["dead"])
    check_order(gm, [e for e in dag.edges if e.why == "data"])
    with pytest.raises(ValueError, match=r"dead.*before kept.*\(mutation\) lost dead"):
        check_order(gm, dag.edges)


def test_reasons_are_checked() -> None:
    b = Builder()
    with pytest.raises(ValueError, match="unknown reason 'because'; one of data, mutation"):
        Edge(b.x, b.x, "because")


@pytest.mark.parametrize("writes", [False, True])
def test_building_is_linear(writes: bool) -> None:
    """4,000 and 12,000 nodes that all read one tensor, which is written every 50."""
    calls = []
    for count in (4_000, 12_000):
        b = Builder()
        b.compute("a", "x")
        for i in range(count):
            write = writes and i % 50 == 0
            target = aten.add_.Tensor if write else aten.mul.Tensor
            b.call(f"n{i}", target, (b.nodes["a"], 1.0))
        gm, found = b.done("n1"), []
        calls.append(calls_of(lambda gm=gm, found=found: found.append(build_dag(gm))))
        (dag,) = found
        assert len(dag.edges) < 3 * len(dag.nodes)
    assert calls[1] < 3.1 * calls[0]
