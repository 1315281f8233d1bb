"""Compiled regions: which they are follows from the graph, and they compute what it did."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from test_chunk import LAYER, MOE, Net, _batch, _exchange, _loss
from torch import fx

from interlace.graph import Tag, check_invariants, set_tag, tag_of
from interlace.regional import _computes, compile_regions, find_regions
from interlace.trace import Step, run_eager, trace_step
from interlace.train.arms import ARMS, chunking_of, trace_arm
from interlace.train.config_read import load_config
from interlace.train.trace_command import step_on_meta

aten = torch.ops.aten


def _graph(*operators) -> tuple[fx.GraphModule, list[fx.Node]]:
    """Nodes by (layer, target, operands): numbers are earlier nodes, -1 the input."""
    g = fx.Graph()
    x = g.placeholder("x")
    made: list[fx.Node] = []
    for layer, target, operands in operators:
        args = tuple(x if a == -1 else made[a] for a in operands)
        made.append(g.call_function(target, args))
        set_tag(made[-1], Tag("0F", layer, 0, None, "forward"))
    g.output(made[-1])
    for node in g.nodes:
        node.meta["val"] = torch.empty(4, 4)
        if node.op != "call_function":
            set_tag(node, Tag("", "", 0, None, "io", "arg"))
    return fx.GraphModule(torch.nn.Module(), g), made


def _regions(gm: fx.GraphModule, made: list[fx.Node]) -> list[list[int]]:
    return [[made.index(n) for n in region] for region in find_regions(gm)]


def test_connected_operators_of_one_call_are_one_region() -> None:
    gm, made = _graph(
        ("a", aten.relu.default, [-1]), ("a", aten.exp.default, [0]), ("b", aten.exp.default, [1])
    )
    assert _regions(gm, made) == [[0, 1], [2]]


def test_what_lies_behind_a_product_is_another_region() -> None:
    gm, made = _graph(
        ("a", aten.relu.default, [-1]),
        ("a", aten.mm.default, [0, 0]),
        ("a", aten.exp.default, [1]),
        ("a", aten.neg.default, [0]),
        ("a", aten.mul.Tensor, [2, 3]),
    )
    assert _regions(gm, made) == [[0, 3], [2, 4]]


def test_a_common_operand_connects_and_nothing_else_does() -> None:
    gm, made = _graph(
        ("a", aten.mm.default, [-1, -1]),
        ("a", aten.mm.default, [-1, -1]),
        ("a", aten.relu.default, [0]),
        ("a", aten.exp.default, [0]),
        ("a", aten.relu.default, [1]),
        ("b", aten.mul.Tensor, [2, 4]),
    )
    assert _regions(gm, made) == [[2, 3], [4], [5]]


@pytest.mark.parametrize(
    "preset", ["qwen3-tiny", pytest.param("dsv3-tiny", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("routing", ["balanced", pytest.param("learned", marks=pytest.mark.slow)])
@pytest.mark.parametrize("root", [pytest.param(MOE, marks=pytest.mark.slow), LAYER])
@pytest.mark.slow
def test_chunked_arms_have_the_same_regions(preset: str, routing: str, root: str) -> None:
    """Graph chunking orders nodes otherwise than the trace of eager chunking."""
    flags = [preset, "--model.num_layers", "2", "--model.dim", "32", "--model.routing", routing]
    flags += ["--training.seq_len", "16", "--overlap.chunks", "2", "--overlap.chunk_root", root]
    config = load_config(flags)
    step, batch = step_on_meta(config)
    eager = trace_step(replace(step, chunking=chunking_of(config)), batch)
    graph = trace_arm(ARMS["chunk-graph"], step, batch, config)
    found = []
    for gm in (eager.gm, graph.gm):
        regions = [r for r in find_regions(gm) if sum(map(_computes, r)) > 1]
        assert len(regions) > 10
        names = [(str(tag_of(r[0])), Counter(str(n.target) for n in r)) for r in regions]
        found.append(sorted((tag, sorted(ops.items())) for tag, ops in names))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of Inductor itself
def test_compiled_regions_compute_the_same() -> None:
    """Against plain PyTorch, within float32 rounding; shapes, strides and tags stay."""
    torch.manual_seed(0)
    step = Step(Net(_exchange(padded=True)), _loss)
    traced = trace_step(step, _batch())
    report = compile_regions(traced.gm)
    check_invariants(traced.gm)
    traced.gm.recompile()
    assert report.regions > report.compiled > 3  # equal regions of both layers are compiled once
    params, buffers = step.state()
    expected = run_eager(step, params, buffers, _batch(seed=3))
    actual = traced(params, buffers, _batch(seed=3))
    for name, grad in expected.grads.items():
        torch.testing.assert_close(actual.grads[name], grad, rtol=1e-5, atol=1e-6)
        assert actual.grads[name].stride() == grad.stride()
    assert torch.equal(actual.extra["counts"], expected.extra["counts"])
