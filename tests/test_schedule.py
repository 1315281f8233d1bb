"""Schedules: every edge kept, each clause of the policy, one order on all ranks, the same bits."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_graphs import Builder, aten, names, two_chunks_backward, two_chunks_forward
from torch import fx

from interlace.graph.dag import Dag, Edge, build_dag, check_order
from interlace.schedule import (
    Machine,
    agree_on_order,
    comm_order,
    list_schedule,
    order_hash,
    pair_flights,
    rounds_of,
    schedule_graph,
)
from interlace.schedule.cost import CostModel
from interlace.schedule.policy import Overlap, ProgramOrder

KINDS = ("mul", "add", "view", "write", "write", "draw", "launch", "wait", "wait", "fence")


# --- properties of random graphs that can run


def random_graph(seed: int) -> fx.GraphModule:
    """Compute, views, writes, draws, transfers and fences of three chunks and two phases."""
    rng, b = random.Random(seed), Builder()
    values, flying = ["x"], []
    for i in range(rng.randint(5, 40)):
        name, chunk = f"n{i}", rng.choice([None, 0, 1, 2])
        where = {"chunk": chunk, "phase": rng.choice(["forward", "backward"])}
        read = rng.choice(values)
        kind = rng.choice(KINDS)
        if kind == "mul":
            b.compute(name, read, **where)
        elif kind == "add":
            b.compute(name, read, rng.choice(values), target=aten.add.Tensor, **where)
        elif kind == "view":
            b.call(name, aten.t.default, (b.nodes[read],), **where)
        elif kind == "write" and read != "x":
            b.call(name, aten.add_.Tensor, (b.nodes[read], rng.random()), **where)
        elif kind == "draw":
            b.call(name, aten.rand_like.default, (b.nodes[read],), **where)
        elif kind == "launch":  # in every chunk: a region's chunks exchange alike
            for c in (0, 1, 2):
                where = {"chunk": c, "phase": where["phase"]}
                b.launch(f"{name}_{c}", rng.choice(values), combine=True, **where)
                flying.append((f"{name}_{c}", where))
            continue
        elif kind == "wait" and flying:
            launch, where = flying.pop(rng.randrange(len(flying)))
            b.wait(name, launch, **where)
        elif kind == "fence":
            b.compute(f"{name}_s", "x", target=aten.sum.default)
            b.call(name, aten._assert_async.default, (b.nodes[f"{name}_s"],))
            continue
        else:
            continue
        values.append(name)
    for launch, where in flying:
        b.wait(f"w{launch}", launch, **where)
        values.append(f"w{launch}")
    return b.done(*values)


def _run(gm: fx.GraphModule) -> list[torch.Tensor]:
    torch.manual_seed(0)
    gm.graph.lint()
    gm.recompile()
    return [t.clone() for t in gm(torch.arange(16.0).view(4, 4))]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**9), scheduler=st.sampled_from(["policy", "cost"]))
@pytest.mark.slow
def test_every_schedule_keeps_every_edge_and_every_bit(seed: int, scheduler: str) -> None:
    """Oracle: the program order itself, run; writes, draws and transfers included."""
    gm = random_graph(seed)
    expected, before = _run(gm), set(gm.graph.nodes)
    dag = build_dag(gm)
    edges = schedule_graph(gm, scheduler=scheduler)
    order = list(gm.graph.nodes)
    place = {n: i for i, n in enumerate(order)}
    assert set(order) == before
    assert len(order) == len(before)
    assert all(place[e.src] < place[e.dst] for e in (*dag.edges, *edges))
    assert {(e.src, e.dst) for e in dag.edges} <= {(e.src, e.dst) for e in edges}
    assert all(torch.equal(a, b) for a, b in zip(_run(gm), expected, strict=True))

    again = random_graph(seed)
    schedule_graph(again, scheduler=scheduler)
    assert [n.name for n in again.graph.nodes] == [n.name for n in order]
    assert order_hash(again) == order_hash(gm)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_the_order_of_the_edges_does_not_matter(seed: int) -> None:
    dag = build_dag(random_graph(seed))
    shuffled = random.Random(seed).sample(dag.edges, len(dag.edges))
    orders = [
        list_schedule(d, Overlap(d, rounds_of(d))) for d in (dag, Dag(dag.nodes, tuple(shuffled)))
    ]
    assert orders[0] == orders[1]


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**9), data=st.data())
def test_any_broken_edge_is_caught(seed: int, data: st.DataObject) -> None:
    gm = random_graph(seed)
    edges = schedule_graph(gm)
    edge = data.draw(st.sampled_from(edges))
    edge.src.prepend(edge.dst)
    with pytest.raises(ValueError, match="check_order: broken edge") as caught:
        check_order(gm, edges)
    assert any(f"({e.why})" in str(caught.value) for e in edges)
    with pytest.raises(ValueError, match=rf"{edge.src.name} .*{edge.dst.name} .*\({edge.why}\)"):
        check_order(gm, [edge])


def test_an_edge_left_out_of_the_schedule_is_caught() -> None:
    """The scheduler is handed one edge too few, wherever that lets it break the edge."""
    caught = 0
    for seed in range(30):
        gm = random_graph(seed)
        full = build_dag(gm)
        for edge in (e for e in full.edges if e.why in ("mutation", "lane_order")):
            fewer = Dag(full.nodes, tuple(e for e in full.edges if e is not edge))
            reverse = Dag(fewer.nodes, (*fewer.edges, Edge(edge.dst, edge.src, "policy")))
            try:
                order = list_schedule(reverse, ProgramOrder(reverse))
            except ValueError:
                continue  # other edges imply it
            for a, b in pairwise(order):
                a.append(b)
            with pytest.raises(ValueError, match=rf"\({edge.why}\)"):
                check_order(gm, full.edges)
            caught += 1
    assert caught > 50


def test_a_cycle_is_named_with_its_reasons() -> None:
    b = Builder()
    for name, read in (("a", "x"), ("c", "a"), ("d", "c"), ("later", "d")):
        b.compute(name, read)
    gm = b.done("later")
    extra = [Edge(b.nodes["d"], b.nodes["a"], "buffer_reuse")]
    cycle = r"(a -data-> c -data-> d -buffer_reuse-> a|c -data-> d -buffer_reuse-> a -data-> c|"
    cycle += r"d -buffer_reuse-> a -data-> c -data-> d)\.$"
    with pytest.raises(ValueError, match=rf"the edges form a cycle: {cycle}"):
        schedule_graph(gm, extra=extra)


@pytest.mark.slow
def test_the_order_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests'); from test_schedule import *; "
        "gm = random_graph(5); schedule_graph(gm); print([n.name for n in gm.graph.nodes])"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed},
                       capture_output=True, text=True, check=True).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert runs[0] == runs[1]
    assert "n1" in runs[0]


# --- the policy, clause by clause


def _scheduled(gm: fx.GraphModule, scheduler: str = "policy") -> list[str]:
    schedule_graph(gm, scheduler=scheduler)
    return names(gm)


def test_forward_chunks_alternate_at_every_launch() -> None:
    b = Builder()
    two_chunks_forward(b)
    order = _scheduled(b.done("merge"))
    # Launch at once; then the other chunk's way to its launch; a wait when nothing else is ready:
    # chunk 0's shared experts fill the gap, chunk 1's are kept for its combine.
    expected = "r0 D0 r1 D1 s0 wD0 e0 C0 wD1 e1 C1 s1 wC0 f0 wC1 f1 merge"
    assert order == expected.split()


def test_backward_chunks_alternate_and_weight_gradients_fill() -> None:
    b = Builder()
    two_chunks_backward(b)
    out = [f"w{i}_{c}" for i in (1, 2) for c in (0, 1)]
    order = _scheduled(b.done("gx", *out))
    expected = "g1 D1 g0 D0 wD1 d2_1 d1_1 C1 w2_1 w1_1 wD0 d2_0 d1_0 C0 w2_0 w1_0 wC1 f1 wC0 f0 gx"
    assert order == expected.split()


def test_the_reservation_is_an_edge() -> None:
    """Chunk 0's weight gradients come after its own combine, in any later order too."""
    b = Builder()
    two_chunks_backward(b)
    gm = b.done("gx", "w1_0", "w2_0", "w1_1", "w2_1")
    policy = {(e.src.name, e.dst.name) for e in schedule_graph(gm) if e.why == "policy"}
    assert policy == {("C0", "w1_0"), ("C0", "w2_0")}


def test_what_leads_to_a_launch_goes_before_unrelated_weight_gradients() -> None:
    b = Builder()
    at = {"phase": "backward"}
    b.compute("g", "x", **at)
    for i in range(3):
        b.compute(f"w{i}", "g", **at)  # leads nowhere
    b.compute("d", "g", **at)
    b.launch("D", "d", **at)
    b.wait("wD", "D", **at)
    b.compute("end", "wD", **at)
    order = _scheduled(b.done("end", "w0", "w1", "w2"))
    assert order == "g d D w0 w1 w2 wD end".split()


def test_a_nearer_launch_goes_before_a_farther_one() -> None:
    b = Builder()
    b.compute("far", "x", chunk=0)
    b.compute("near", "x", chunk=0)
    b.launch("D", "near", chunk=0)
    b.wait("wD", "D", chunk=0)
    b.compute("both", "wD", "far", chunk=0)
    b.launch("C", "both", combine=True, chunk=0)
    b.wait("wC", "C", chunk=0)
    assert _scheduled(b.done("wC")) == "near D far wD both C wC".split()


def test_the_wait_that_leads_to_a_launch_goes_first() -> None:
    b = Builder()
    for name in ("A", "B"):
        b.launch(name, "x", chunk=0)
    b.wait("wA", "A", chunk=0)
    b.compute("end", "wA", chunk=0)
    b.wait("wB", "B", chunk=0)
    b.launch("C", "wB", combine=True, chunk=0)
    b.wait("wC", "C", chunk=0)
    order = _scheduled(b.done("end", "wC"))
    assert order == "A B wB C wA end wC".split()


def test_nothing_is_prepared_long_before_its_use() -> None:
    """Casts stand first in the program; each moves to the round of its first reader, so that the
    memory of later layers' casts is not held from the start."""
    b = Builder()
    layers = range(3)
    for i in layers:
        b.compute(f"cast{i}", "x", layer=f"layers.{i}.moe")
    last = "x"
    for i in layers:
        where = {"layer": f"layers.{i}.moe", "chunk": 0}
        b.launch(f"D{i}", last, **where)
        b.wait(f"wD{i}", f"D{i}", **where)
        b.compute(f"e{i}", f"wD{i}", f"cast{i}", **where)
        last = f"e{i}"
    order = _scheduled(b.done(last))
    assert order == "D0 cast0 wD0 e0 D1 cast1 wD1 e1 D2 cast2 wD2 e2".split()


def test_recomputed_layers_stay_in_the_backward() -> None:
    """Their operands are there since the forward: without a bound all would run at once."""
    b = Builder()
    saved = "x"
    for i in range(3):
        where = {"layer": f"layers.{i}.moe", "source": "0F"}
        b.launch(f"F{i}", saved, **where)
        b.wait(f"wF{i}", f"F{i}", **where)
        saved = f"wF{i}"
    b.compute("loss", saved)
    grad = "loss"
    for i in (2, 1, 0):
        where = {"layer": f"layers.{i}.moe", "source": "0B"}
        b.compute(f"re{i}", "x" if i == 0 else f"wF{i - 1}", phase="recompute", **where)
        b.launch(f"R{i}", f"re{i}", phase="recompute", **where)
        b.wait(f"wR{i}", f"R{i}", phase="recompute", **where)
        b.launch(f"B{i}", grad, phase="backward", **where)
        b.wait(f"wB{i}", f"B{i}", phase="backward", **where)
        b.compute(f"g{i}", f"wB{i}", f"wR{i}", phase="backward", **where)
        grad = f"g{i}"
    order = _scheduled(b.done(grad))
    at = {name: i for i, name in enumerate(order)}
    assert at["loss"] < min(at[f"wR{i}"] for i in range(3))
    assert at["F2"] < at["re2"]  # not earlier than the last forward launch
    for i in (1, 0):  # a layer's recompute starts when the layer above it has had its gradient
        assert at[f"B{i + 1}"] < at[f"re{i}"]


def test_the_clock_knows_when_a_transfer_has_landed() -> None:
    """With costs a wait that does not block goes before more filler; without, after all of it."""

    def graph() -> fx.GraphModule:
        b = Builder()
        b.launch("D", "x", chunk=0)
        b.wait("wD", "D", chunk=0)
        b.compute("e", "wD", chunk=0)
        b.launch("C", "e", combine=True, chunk=0)
        b.wait("wC", "C", chunk=0)
        for i in range(4):
            b.compute(f"fill{i}", "x")
        return b.done("wC", "fill0", "fill1", "fill2", "fill3")

    assert _scheduled(graph()) == "D fill0 fill1 fill2 fill3 wD e C wC".split()
    # A transfer of 4 us (no bytes of note), fillers of 2 us: two cover it, two are left for C.
    gm = graph()
    dag = build_dag(gm)
    slow = Machine(launch_us=2.0, exchange_bytes_per_s=1.0)
    cost = CostModel(dag.nodes, slow)
    cost.flight_us = dict.fromkeys(cost.flight_us, 4.0)
    order = list_schedule(dag, Overlap(dag, rounds_of(dag), cost))
    assert names(gm, [n.name for n in order]) is not None
    shown = [n.name for n in order if n.name in "D C e wD wC fill0 fill1 fill2 fill3".split()]
    assert shown == "D fill0 fill1 wD e C fill2 fill3 wC".split()


def test_off_leaves_the_order_alone_and_unknown_names_are_refused() -> None:
    b = Builder()
    two_chunks_forward(b)
    gm = b.done("merge")
    before = names(gm)
    assert schedule_graph(gm, scheduler="off")
    assert names(gm) == before
    with pytest.raises(ValueError, match=r"overlap.scheduler='best': use one of policy, cost, off"):
        schedule_graph(gm, scheduler="best")


# --- pairs, and agreement of chunks and ranks


def test_each_launch_has_one_wait_and_its_result_is_read_after_it() -> None:
    b = Builder()
    b.launch("D", "x", chunk=0)
    with pytest.raises(ValueError, match=r"D \(0F layers.0.moe/0 forward\) has 0 waits: none"):
        pair_flights(b.done("x"))
    b = Builder()
    b.launch("D", "x")
    b.wait("w1", "D")
    b.wait("w2", "D")
    with pytest.raises(ValueError, match="has 2 waits: w1, w2; each launch needs exactly one"):
        pair_flights(b.done("w1", "w2"))
    b = Builder()
    b.launch("D", "x")
    b.compute("early", "D_0")
    b.wait("w", "D")
    with pytest.raises(
        ValueError, match=r"early .* reads the result of D before its wait; let it read w"
    ):
        pair_flights(b.done("early", "w"))


def test_chunks_that_exchange_differently_are_refused() -> None:
    b = Builder()
    for c in (0, 1):
        b.launch(f"D{c}", "x", chunk=c, combine=c == 1)
        b.wait(f"w{c}", f"D{c}", chunk=c)
    with pytest.raises(
        ValueError,
        match=r"chunks of layers.0.moe \(call 0, 0F forward\) exchange differently: "
        r"chunk 0: dispatch; chunk 1: combine",
    ):
        schedule_graph(b.done("w0", "w1"))


def _agree(rank: int, size: int, differ: bool) -> str:
    b = Builder()
    two_chunks_forward(b)
    gm = b.done("merge")
    schedule_graph(gm)
    if differ and rank == 1:
        (d1,) = [n for n in gm.graph.nodes if n.name == "D1"]
        (d0,) = [n for n in gm.graph.nodes if n.name == "D0"]
        d0.prepend(d1)
    try:
        agree_on_order(gm)
    except ValueError as error:
        return str(error)
    return order_hash(gm)


def test_ranks_agree_on_one_order_or_all_raise(two_ranks) -> None:
    first, second = two_ranks.run(_agree, False)
    assert first == second
    assert len(first) == 64
    errors = two_ranks.run(_agree, True)
    assert errors[0] == errors[1]
    assert "first difference at position 0: rank 0: ep.dispatch_launch.default" in errors[0]
    assert "layers.0.moe/0" in errors[0]
    assert "layers.0.moe/1" in errors[0]


def test_the_hash_names_operators_and_tags_only() -> None:
    b = Builder()
    b.launch("D", "x", chunk=1)
    b.wait("w", "D", chunk=1)
    assert comm_order(b.done("w")) == (
        "ep.dispatch_launch.default | 0F layers.0.moe/1 forward",
        "ep.wait.default | 0F layers.0.moe/1 forward",
    )
