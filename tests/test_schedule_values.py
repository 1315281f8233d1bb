"""Scheduled steps of real models: the same bits, the promised order, the cost model by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_graphs import MOE, Builder, aten, calls_of
from small_runs import small_config, small_world
from test_chunk import Net, _batch, _loss
from test_schedule import random_graph
from torch import fx

from interlace import ep
from interlace.chunk import chunk_graph
from interlace.chunk.buffers import assign_buffer_sets, reuse_edges, show_reuse
from interlace.graph import comm_of, is_wait, tag_of
from interlace.graph.chunking import Chunking
from interlace.graph.dag import Dag, build_dag, check_order
from interlace.schedule import (
    NETWORK_CARD,
    CostModel,
    Machine,
    comm_order,
    pair_flights,
    schedule_graph,
    simulate,
)
from interlace.schedule.cost import independent_us
from interlace.trace import Step, Traced, trace_step
from interlace.train.arms import ARMS
from interlace.train.config import Config
from interlace.train.engine import build_engine, compute
from interlace.train.presets import PRESETS
from interlace.train.schedule_command import unscheduled_graph

WGRAD = torch.ops.interlace.grouped_wgrad.default


def _net(
    num_chunks: int, *, root: str = "layers.*.moe", recompute: bool = False, backend: str
) -> tuple:
    torch.manual_seed(3)
    ep.register_group(ep.Group("mirror", 2, 0, "loopback"))
    exchange = ep.Exchange("mirror", 2, 0, backend=backend, padded=backend == "pooled")
    chunking = Chunking(root, num_chunks)
    step = Step(Net(exchange, recompute=recompute), _loss, boundary=chunking.is_root)
    full = trace_step(step, _batch())
    if num_chunks > 1:
        chunk_graph(full.gm, trace_step(step, _batch(12 // num_chunks)).gm, chunking, 12)
    return step, full


def _outputs(step: Step, traced: Traced) -> list[torch.Tensor]:
    traced.gm.graph.lint()
    traced.gm.recompile()
    result = traced(*step.state(), _batch(seed=5))
    return [result.loss, *result.grads.values(), *result.extra.values()]


@pytest.mark.parametrize("scheduler", ["policy", pytest.param("cost", marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_chunks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("root", ["layers.*.moe", "layers.*"])
def test_a_scheduled_step_has_the_same_bits(scheduler: str, num_chunks: int, root: str) -> None:
    step, traced = _net(num_chunks, root=root, backend="alltoall")
    expected, before = _outputs(step, traced), comm_order(traced.gm)
    edges = schedule_graph(traced.gm, scheduler=scheduler)
    check_order(traced.gm, edges)
    assert all(torch.equal(a, b) for a, b in zip(_outputs(step, traced), expected, strict=True))
    assert sorted(comm_order(traced.gm)) == sorted(before)
    if num_chunks > 1:
        assert comm_order(traced.gm) != before


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_poisoned_buffers_survive_any_schedule(num_chunks: int) -> None:
    """Recomputed layers over buffers that are filled with NaN at each reuse."""
    step, traced = _net(num_chunks, recompute=True, backend="pooled")
    assign_buffer_sets(traced.gm)
    extra = reuse_edges(traced.gm)
    show_reuse(traced.gm, extra)
    expected = _outputs(step, traced)
    for scheduler in ("policy", "cost"):
        schedule_graph(traced.gm, scheduler=scheduler, extra=extra)
        found = _outputs(step, traced)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert not any(x.isnan().any() for x in found)


@pytest.mark.parametrize("preset", ["dsv3-tiny", "qwen3-tiny"])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.slow
def test_traced_models_have_the_same_bits_when_scheduled(preset: str, chunks: int) -> None:
    """The step of a preset over a loopback of two ranks."""
    config = small_config(
        preset,
        model__num_layers=3,
        parallelism__expert_parallel_degree=2,
        ep__transport="loopback",
        overlap__chunks=chunks,
    )
    world = replace(small_world(), loopback=True, ep_size=2)
    results = []
    for arm in ("chunk-graph", "chunk-scheduled") if chunks > 1 else ("control", "scheduled"):
        outcome = compute(build_engine(config, world, ARMS[arm]), 0)
        results.append([outcome.loss, *outcome.grads.values(), outcome.counts_LE])
    assert len(results[0]) > 30
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _before_wgrads(gm: fx.GraphModule) -> dict[str, bool]:
    """Per layer: whether chunk 0's backward combine comes before both its weight gradients."""
    place = {n: i for i, n in enumerate(gm.graph.nodes)}
    found = {}
    for node in gm.graph.nodes:
        tag, spec = tag_of(node), comm_of(node)
        if spec and spec.name == "combine" and tag.phase == "backward" and tag.chunk == 0:
            wgrads = [
                n for n in gm.graph.nodes
                if n.target is WGRAD and tag_of(n).chunk == 0
                and tag_of(n).layer.startswith(tag.layer)
            ]  # fmt: skip
            assert wgrads
            found[tag.layer] = all(place[node] < place[n] for n in wgrads)
    return found


def _meta_config(preset: str, layers: int, **changes) -> Config:
    config = PRESETS[preset]
    config = replace(config, model=replace(config.model, num_layers=layers))
    for name, value in changes.items():
        section, _, key = name.partition("__")
        config = replace(config, **{section: replace(getattr(config, section), **{key: value})})
    return config


@pytest.mark.parametrize(
    "preset", ["dsv3-16b-slim", pytest.param("qwen3-30b-slim", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("root", ["layers.*.moe", pytest.param("layers.*", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_the_last_combine_goes_before_both_weight_gradients_in_every_layer(
    preset: str, root: str
) -> None:
    """On the step of a production model, and the exchange is hidden as far as that allows."""
    gm = unscheduled_graph(_meta_config(preset, 4, overlap__chunks=2, overlap__chunk_root=root))
    nvlink, card = simulate(gm.graph.nodes, Machine()), simulate(gm.graph.nodes, NETWORK_CARD)
    schedule_graph(gm)
    found = _before_wgrads(gm)
    assert len(found) >= 3
    assert all(found.values())
    after = simulate(gm.graph.nodes, Machine())
    assert nvlink.exposed_us / nvlink.flight_us > 0.9
    assert after.exposed_us / after.flight_us < 0.15
    assert simulate(gm.graph.nodes, NETWORK_CARD).total_us < card.total_us / 1.15
    assert not _live_later(gm)


def _live_later(gm: fx.GraphModule) -> list[str]:
    """Forward nodes behind a backward launch: there must be none but what only the end needs."""
    seen, late = False, []
    for node in gm.graph.nodes:
        tag = tag_of(node)
        seen = seen or (comm_of(node) is not None and tag.phase == "backward")
        if seen and tag.phase == "forward" and (comm_of(node) or is_wait(node) or MOE in tag.layer):
            late += [] if all(u.op == "output" for u in node.users) else [node.name]
    return late


# --- the cost model


def test_what_may_run_beside_an_exchange() -> None:
    """Oracle: ancestors and descendants by search, for every launch."""
    for seed in range(20):
        gm = random_graph(seed)
        dag = build_dag(gm)
        cost = CostModel(dag.nodes, Machine())
        found = independent_us(dag, cost)
        waits = {f.launch: f.wait for f in pair_flights(gm)}
        for launch, us in found.items():
            tied = _reach(dag, launch, back=True) | _reach(dag, waits[launch], back=False)
            expected = sum(cost.us[n] for n in dag.nodes if n not in tied)
            assert us == pytest.approx(expected)


def _reach(dag: Dag, node: fx.Node, *, back: bool) -> set[fx.Node]:
    found, todo = set(), [node]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += (
                [e.src for e in dag.edges if e.dst is node]
                if back
                else [e.dst for e in dag.out[node]]
            )
    return found


def test_two_lanes_by_hand() -> None:
    """Compute and transfers take 10 us each: beside a node nothing is exposed, alone all is."""
    b = Builder()
    b.launch("D", "x")
    b.compute("a", "x")
    b.wait("wD", "D")
    b.compute("e", "wD")
    gm = b.done("a", "e")
    machine = Machine(launch_us=10.0, bytes_per_s=1e30, exchange_bytes_per_s=1e30)
    timeline = simulate(gm.graph.nodes, machine)
    (exchange,) = timeline.exchanges
    # The launch packs for 10 us, then flies for 10 beside a; nothing is exposed.
    assert (exchange.start_us, exchange.end_us, exchange.exposed_us) == (10.0, 20.0, 0.0)
    assert exchange.beside_us == 10.0
    assert exchange.ended_by == f"e ({MOE})"
    assert timeline.total_us == 30.0
    b.nodes["D_1"].append(b.nodes["wD"])
    timeline = simulate(gm.graph.nodes, machine)
    assert (timeline.exposed_us, timeline.total_us) == (10.0, 40.0)


def test_matrix_products_count_by_hand() -> None:
    g = fx.Graph()
    x, w = g.placeholder("x"), g.placeholder("w")
    mm = g.call_function(aten.mm.default, (x, w))
    for node, shape in ((x, (4096, 2048)), (w, (2048, 1024)), (mm, (4096, 1024))):
        node.meta["val"] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    machine = Machine(launch_us=0.0)
    us = CostModel(g.nodes, machine).us[mm]
    assert us == pytest.approx(1e6 * 2 * 4096 * 2048 * 1024 / 700e12)
    slow = Machine(launch_us=0.0, bytes_per_s=1e12)  # now the memory is what takes long
    moved = 2 * (4096 * 2048 + 2048 * 1024 + 4096 * 1024)
    assert CostModel(g.nodes, slow).us[mm] == pytest.approx(1e6 * moved / 1e12)


def test_a_token_that_crosses_once_costs_its_bytes_once() -> None:
    """8 choices over 2 ranks: a dispatch of ``hybridep`` sends a quarter of what all slots are."""
    machine = Machine(launch_us=0.0, exchange_bytes_per_s=1e9)
    flights = {}
    for backend in ("minimal_async", "hybridep"):
        gm = unscheduled_graph(
            _meta_config(
                "qwen3-30b-slim", 1, ep__padded=True, ep__capacity_factor=1.0, ep__backend=backend
            )
        )
        us = CostModel(gm.graph.nodes, machine).flight_us
        flights[backend] = [
            x for n, x in us.items() if n.target is torch.ops.ep.dispatch_launch.default
        ]
    (minimal, back), (hybrid, _) = flights["minimal_async"], flights["hybridep"]
    tokens, row = 4 * 4096, 2 * 2048
    assert minimal == back == pytest.approx(1e6 * tokens * 8 * row / 2 / 1e9)
    assert hybrid == pytest.approx(minimal / 4)


@pytest.mark.slow
def test_scheduling_grows_linearly_to_27_layers() -> None:
    """In calls made, which no other load on the machine changes."""
    calls, sizes = [], []
    for layers in (9, 27):
        gm = unscheduled_graph(_meta_config("dsv3-16b", layers, overlap__chunks=2))
        calls.append(calls_of(lambda gm=gm: check_order(gm, schedule_graph(gm))))
        sizes.append(len(gm.graph.nodes))
    assert sizes[1] > 12_000
    assert calls[1] / calls[0] < 1.2 * sizes[1] / sizes[0]
    assert all(_before_wgrads(gm).values())
    assert len(_before_wgrads(gm)) == 26
