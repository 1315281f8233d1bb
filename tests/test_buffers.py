"""Buffers that are used again, poisoned at each reuse: every reuse edge must be needed and kept."""

from __future__ import annotations

import pytest
import torch
from test_chunk import MOE, Net, _batch, _loss
from torch import fx

from interlace import ep
from interlace.chunk import chunk_graph
from interlace.chunk.buffers import assign_buffer_sets, readers, reuse_edges, show_reuse
from interlace.graph import comm_of, tag_of
from interlace.graph.chunking import Chunking
from interlace.graph.dag import Edge
from interlace.graph.order import move_to
from interlace.trace import Step, Traced, run_eager, trace_step


def _traced(num_chunks: int, recompute: bool = True) -> tuple[Step, Traced, Chunking]:
    torch.manual_seed(3)
    ep.register_group(ep.Group("mirror", 2, 0, "loopback"))
    model = Net(ep.Exchange("mirror", 2, 0, backend="pooled", padded=True), recompute=recompute)
    chunking = Chunking(MOE, num_chunks)
    step = Step(model, _loss, boundary=chunking.is_root)
    full = trace_step(step, _batch())
    if num_chunks > 1:
        small = trace_step(step, _batch(12 // num_chunks))
        chunk_graph(full.gm, small.gm, chunking, 12)
    assign_buffer_sets(full.gm)
    return step, full, chunking


def _equal(step: Step, traced: Traced, chunking: Chunking) -> bool:
    """Against eager chunking over the all-to-all, which owns no buffers."""
    plain = Net(ep.Exchange("mirror", 2, 0, padded=True))
    plain.load_state_dict(step.model.state_dict())
    reference = Step(plain, _loss, chunking=chunking if chunking.num_chunks > 1 else None)
    expected = run_eager(reference, *reference.state(), _batch(seed=5))
    traced.gm.graph.lint()
    traced.gm.recompile()
    actual = traced(*step.state(), _batch(seed=5))
    return torch.equal(actual.loss, expected.loss) and all(
        torch.equal(actual.grads[n], g) for n, g in expected.grads.items()
    )


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_pooled_buffers_change_nothing(num_chunks: int) -> None:
    step, traced, chunking = _traced(num_chunks)
    edges = reuse_edges(traced.gm)
    show_reuse(traced.gm, edges)
    assert _equal(step, traced, chunking)
    sets = {(tag_of(n).chunk, n.args[comm_of(n).buffer_set_arg]) for n in _launches(traced)}
    chunks = [None] if num_chunks == 1 else range(num_chunks)
    expected = {(c, 2 * (c or 0) + side) for c in chunks for side in (0, 1)}
    assert sets == expected


def _launches(traced: Traced) -> list[fx.Node]:
    return [n for n in traced.gm.graph.nodes if comm_of(n)]


def test_without_recompute_the_saved_value_is_named() -> None:
    """A value saved for the backward would outlive its buffer."""
    _, traced, _ = _traced(2, recompute=False)
    with pytest.raises(
        ValueError,
        match=r"reads what dispatch_launch.* delivered after dispatch_launch.* has written the "
        r"buffer again; recompute layers.0.moe in the backward",
    ):
        reuse_edges(traced.gm)


def test_every_reuse_edge_is_needed() -> None:
    """Each reader's edge is left out in turn, in the worst order without it: NaN must show.

    A reader that only passes the memory on (wait, getitem, view) has no value of its own to lose.
    """
    step, traced, chunking = _traced(2)
    edges = reuse_edges(traced.gm)
    by_launch: dict[fx.Node, list[Edge]] = {}
    for edge in edges:
        by_launch.setdefault(edge.dst, []).append(edge)
    tried = 0
    program = list(traced.gm.graph.nodes)
    for launch, group in by_launch.items():
        generation = [e.src for e in group]
        same_layer = tag_of(generation[0]).layer.startswith(tag_of(launch).layer)
        if same_layer and tag_of(launch).phase == "recompute":
            continue  # it delivers the very rows that it overwrites
        order = _launch_first(program, launch, generation)
        if order is None:
            continue  # data keeps the launch behind its readers anyway
        move_to(traced.gm.graph, order)
        assert not _equal(step, traced, chunking), f"{launch} may overwrite {generation}"
        tried += 1
        move_to(traced.gm.graph, program)
        assert _equal(step, traced, chunking)
    assert tried >= 3


def _launch_first(
    program: list[fx.Node], launch: fx.Node, generation: list[fx.Node]
) -> list[fx.Node] | None:
    """An order with the launch before the last computing reader, if data allows one."""
    needed: set[fx.Node] = set()
    todo = [launch]
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    computing = [r for r in generation if not any(u in generation for u in r.users)]
    free = [r for r in computing if r not in needed]
    if not free:
        return None
    first = min(program.index(r) for r in free)
    if program.index(launch) < first:
        return None
    head, tail = program[:first], program[first:]
    early = [n for n in tail if n in needed]
    return head + early + [n for n in tail if n not in needed]


def test_readers_follow_waits_and_views() -> None:
    _, traced, _ = _traced(1)
    launch = _launches(traced)[0]
    names = [str(n.target) for n in readers(launch)]
    assert "ep.wait.default" in names
    assert "interlace.grouped_mm.default" in names
