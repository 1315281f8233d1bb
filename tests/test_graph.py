"""Tags, the pass driver and safe clean-up, on graphs of a few nodes."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from interlace import ep  # noqa: F401 - registers the exchange operators
from interlace.graph import (
    Pass,
    Tag,
    check_invariants,
    comm_of,
    count_effects,
    is_collective,
    is_wait,
    register_comm,
    remove_dead_nodes,
    run_passes,
    set_tag,
    tag_of,
)
from interlace.graph.comm import CommSpec

aten = torch.ops.aten
TAG = Tag("0F", "layers.0", 0, None, "forward")


def _tagged(graph: fx.Graph) -> fx.GraphModule:
    for node in graph.nodes:
        set_tag(node, TAG)
    return fx.GraphModule(torch.nn.Module(), graph)


def _graph_with_effects() -> fx.GraphModule:
    """x, ids -> x + 1, with a dead product, a dead write, a dead draw and a dead exchange."""
    g = fx.Graph()
    x, ids, buffer = g.placeholder("x"), g.placeholder("ids"), g.placeholder("buffer")
    g.call_function(aten.mul.Tensor, (x, 2))
    g.call_function(aten.add_.Tensor, (buffer, 1))
    g.call_function(aten.bernoulli.default, (x,))
    plan = g.call_function(torch.ops.ep.plan.default, (ids, 4, None, "single", "alltoall"))
    meta = g.call_function(operator.getitem, (plan, 4))
    launch = g.call_function(
        torch.ops.ep.combine_launch.default, (x, meta, None, 2, 0, "single", "alltoall")
    )
    pending = g.call_function(operator.getitem, (launch, 0))
    token = g.call_function(operator.getitem, (launch, 1))
    g.call_function(torch.ops.ep.wait.default, (pending, token))
    g.output(g.call_function(aten.add.Tensor, (x, 1)))
    return _tagged(g)


def test_clean_up_keeps_everything_with_an_effect() -> None:
    """Field report H1: a dead exchange on one rank only must stay, else its peers hang."""
    gm = _graph_with_effects()
    before = count_effects(gm)
    assert before == {
        "aten.add_.Tensor": 1,
        "aten.bernoulli.default": 1,
        "ep.plan.default": 1,
        "ep.combine_launch.default": 1,
        "ep.wait.default": 1,
    }
    (report,) = run_passes(gm, [Pass("remove_dead_nodes", remove_dead_nodes)])
    assert count_effects(gm) == before
    assert not [n for n in gm.graph.nodes if n.target is aten.mul.Tensor]
    assert report.nodes_before - report.nodes_after == 1


def test_torchs_own_clean_up_keeps_the_exchange_too() -> None:
    gm = _graph_with_effects()
    gm.graph.eliminate_dead_code()
    kept = {str(n.target) for n in gm.graph.nodes}
    assert {"ep.plan.default", "ep.combine_launch.default", "ep.wait.default"} <= kept


def test_a_collective_without_a_wait_stays() -> None:
    g = fx.Graph()
    x = g.placeholder("x")
    g.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))
    g.output(x)
    gm = _tagged(g)
    run_passes(gm, [Pass("remove_dead_nodes", remove_dead_nodes)])
    assert count_effects(gm) == {"_c10d_functional.all_reduce.default": 1}


def test_registry_answers_for_exchange_ops_only() -> None:
    nodes = {str(n.target): n for n in _graph_with_effects().graph.nodes}
    launch = nodes["ep.combine_launch.default"]
    spec = comm_of(launch)
    assert spec is not None
    assert (spec.name, spec.lane, spec.token_exchange) == ("combine", "ep", True)
    names = [a.name for a in launch.target._schema.arguments]
    assert names[spec.reuse_arg] == "reuse"
    assert names[spec.buffer_set_arg] == "buffer_set"
    assert is_collective(launch)
    assert is_collective(nodes["ep.plan.default"])
    assert is_wait(nodes["ep.wait.default"])
    assert comm_of(nodes["aten.mul.Tensor"]) is None
    assert not is_collective(nodes["aten.mul.Tensor"])
    with pytest.raises(ValueError, match="registered already"):
        register_comm(spec)
    dispatch = comm_of_target(torch.ops.ep.dispatch_launch.default)
    names = [a.name for a in dispatch.launch._schema.arguments]
    assert names[dispatch.reuse_arg] == "reuse"
    assert names[dispatch.buffer_set_arg] == "buffer_set"


def comm_of_target(target) -> CommSpec:
    g = fx.Graph()
    spec = comm_of(g.call_function(target, ()))
    assert spec is not None
    return spec


def test_driver_names_the_guilty_pass() -> None:
    def loses_a_write(gm: fx.GraphModule) -> None:
        node = next(n for n in gm.graph.nodes if n.target is aten.add_.Tensor)
        gm.graph.erase_node(node)

    def forgets_a_tag(gm: fx.GraphModule) -> None:
        output = next(n for n in gm.graph.nodes if n.op == "output")
        with gm.graph.inserting_before(output):
            gm.graph.call_function(aten.relu.default, (output.args[0],))

    def raises(gm: fx.GraphModule) -> None:
        raise KeyError("layers.3.moe")

    def breaks_the_order(gm: fx.GraphModule) -> None:
        first = next(iter(gm.graph.nodes))
        last = next(n for n in reversed(gm.graph.nodes) if n.op == "call_function")
        last.append(first)

    for bad, message in (
        (loses_a_write, r"pass 'bad' failed: side effects were lost or added: aten.add_.Tensor"),
        (forgets_a_tag, r"pass 'bad' failed: 1 nodes have no tag: relu"),
        (raises, r"pass 'bad' failed: 'layers.3.moe'"),
        (breaks_the_order, r"pass 'bad' failed: .*"),
    ):
        passes = [Pass("good", remove_dead_nodes), Pass("bad", bad)]
        with pytest.raises(ValueError, match=message):
            run_passes(_graph_with_effects(), passes)


def test_a_pass_that_means_to_add_effects_may() -> None:
    def adds(gm: fx.GraphModule) -> None:
        x = next(iter(gm.graph.nodes))
        with gm.graph.inserting_after(x):
            set_tag(gm.graph.call_function(aten.add_.Tensor, (x, 1)), TAG)

    run_passes(_graph_with_effects(), [Pass("adds", adds, keeps_effects=False)])
    with pytest.raises(ValueError, match="side effects were lost or added"):
        run_passes(_graph_with_effects(), [Pass("adds", adds)])


def test_tags_say_where_a_node_came_from() -> None:
    assert str(TAG) == "0F layers.0 forward"
    assert str(Tag("0B", "", 1, 0, "backward", "accum")) == "0B step#1/0 backward (accum)"
    g = fx.Graph()
    node = g.placeholder("x")
    with pytest.raises(ValueError, match=r"node x \(x\) has no tag"):
        tag_of(node)
    g.output(node)
    with pytest.raises(ValueError, match="2 nodes have no tag: x, output"):
        check_invariants(fx.GraphModule(torch.nn.Module(), g))


def test_what_is_no_pass_is_refused_before_anything_runs() -> None:
    ran = []

    def first(gm: fx.GraphModule) -> None:
        ran.append(gm)

    with pytest.raises(ValueError, match=r"first is no Pass .* Pass\('first', first\)"):
        run_passes(_graph_with_effects(), [Pass("good", first), first])
    assert ran == []


@pytest.mark.parametrize("notes", ["one line", ["a", 1], {"a": 1}, 7, torch.ones(2)], ids=str)
def test_notes_are_lines_of_text(notes: object) -> None:
    with pytest.raises(ValueError, match=r"pass 'bad' failed: it returned .*expected notes"):
        run_passes(_graph_with_effects(), [Pass("bad", lambda gm: notes)])


def test_notes_are_kept() -> None:
    passes = [Pass("a", lambda gm: ["x", "y"]), Pass("b", lambda gm: ("z",)), Pass("c", len_of)]
    reports = run_passes(_graph_with_effects(), passes)
    assert [r.notes for r in reports] == [("x", "y"), ("z",), ()]


def len_of(gm: fx.GraphModule) -> None:
    """Returns nothing, as most passes do."""
