"""Buffers that are used again, poisoned at each reuse: every reuse edge must be needed and kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from test_chunk import MOE, Net, _batch, _loss
from torch import Tensor, fx

from interlace import ep
from interlace.chunk import chunk_graph
from interlace.chunk.buffers import (
    UNMANAGED,
    assign_buffer_sets,
    assign_buffers,
    readers,
    reuse_edges,
)
from interlace.ep.windows import close_windows, poison_on_reuse
from interlace.graph import comm_of, is_wait, tag_of
from interlace.graph.chunking import Chunking
from interlace.graph.dag import Edge
from interlace.graph.order import move_to
from interlace.trace import Step, Traced, run_eager, trace_step

BACKENDS = ["pooled", "minimal_async"]


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Whoever frees a buffer fills it with NaN, as the ``pooled`` backend does by itself."""
    poison_on_reuse(enabled=True)
    yield
    poison_on_reuse(enabled=False)
    close_windows()


def _traced(
    num_chunks: int, recompute: bool = True, backend: str = "pooled"
) -> tuple[Step, Traced, Chunking]:
    torch.manual_seed(3)
    ep.register_group(ep.Group("mirror", 2, 0, "loopback"))
    model = Net(ep.Exchange("mirror", 2, 0, backend=backend, padded=True), recompute=recompute)
    chunking = Chunking(MOE, num_chunks)
    step = Step(model, _loss, boundary=chunking.is_root)
    full = trace_step(step, _batch())
    if num_chunks > 1:
        small = trace_step(step, _batch(12 // num_chunks))
        chunk_graph(full.gm, small.gm, chunking, 12)
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_buffers_used_again_change_nothing(num_chunks: int, backend: str) -> None:
    """With recompute one set a class is enough: readers come before the next layer's launch."""
    step, traced, chunking = _traced(num_chunks, backend=backend)
    assign_buffers(traced.gm)
    assert _equal(step, traced, chunking)
    assert _equal(step, traced, chunking)  # the sets of the call before are written again
    sets = _sets(traced)
    chunks = [None] if num_chunks == 1 else range(num_chunks)
    kinds, phases = ("dispatch", "combine"), ("forward", "recompute", "backward")
    assert set(sets) == set(itertools.product(kinds, chunks, phases))
    numbers = [n for found in sets.values() for n in found]
    assert sorted(numbers) == list(range(len(sets)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_saved_value_keeps_its_set(backend: str) -> None:
    """Without recompute each layer's rows are saved: as many sets as layers in the forward."""
    step, traced, chunking = _traced(2, recompute=False, backend=backend)
    assign_buffers(traced.gm)
    assert _equal(step, traced, chunking)
    sizes = {key: len(found) for key, found in _sets(traced).items()}
    chunks = range(2)
    assert sizes == {
        **{(kind, c, "forward"): 2 for kind in ("dispatch", "combine") for c in chunks},
        **{(kind, c, "backward"): 1 for kind in ("dispatch", "combine") for c in chunks},
    }


def test_unmanaged_launches_change_nothing() -> None:
    """A graph without sets: every launch has a result of its own."""
    step, traced, chunking = _traced(2, recompute=False, backend="minimal_async")
    assert {n.args[comm_of(n).buffer_set_arg] for n in _launches(traced)} == {UNMANAGED}
    assert _equal(step, traced, chunking)


def test_what_leaves_the_graph_is_unmanaged() -> None:
    _, traced, _ = _traced(1, backend="minimal_async")
    launch = _launches(traced)[0]
    (wait,) = [r for r in readers(launch) if is_wait(r)]
    (output,) = [n for n in traced.gm.graph.nodes if n.op == "output"]
    output.args = ((*output.args[0], wait),)
    assign_buffers(traced.gm)
    sets = [n.args[comm_of(n).buffer_set_arg] for n in _launches(traced)]
    assert sets[0] == UNMANAGED
    assert min(sets[1:]) == 0


def _sets(traced: Traced) -> dict[tuple, set[int]]:
    """Buffer sets by kind, chunk and phase."""
    found: dict[tuple, set[int]] = {}
    for n in _launches(traced):
        tag, spec = tag_of(n), comm_of(n)
        key = (spec.name, tag.chunk, tag.phase)
        found.setdefault(key, set()).add(n.args[spec.buffer_set_arg])
    return found


def _launches(traced: Traced) -> list[fx.Node]:
    return [n for n in traced.gm.graph.nodes if comm_of(n)]


def test_a_bound_on_sets_names_the_saved_value() -> None:
    _, traced, _ = _traced(2, recompute=False)
    with pytest.raises(
        ValueError,
        match=r"dispatch_launch.* needs set 2 of 1: .* still reads what dispatch_launch.* "
        r"delivered. Recompute layers.0.moe in the backward, or allow more sets",
    ):
        assign_buffers(traced.gm, max_sets=1)
    assign_buffers(traced.gm, max_sets=2)


def test_sets_given_by_hand_are_checked() -> None:
    """A value saved for the backward would outlive its buffer."""
    _, traced, _ = _traced(2, recompute=False)
    for launch in _launches(traced):
        launch.update_arg(comm_of(launch).buffer_set_arg, 0)
    with pytest.raises(
        ValueError,
        match=r"reads what dispatch_launch.* delivered after dispatch_launch.* has written the "
        r"buffer again; recompute layers.0.moe in the backward",
    ):
        reuse_edges(traced.gm)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_reuse_edge_is_needed(backend: str) -> None:
    """Each reader's edge is left out in turn, in the worst order without it: NaN must show.

    A reader that only passes the memory on (wait, getitem, view) has no value of its own to lose.
    """
    step, traced, chunking = _traced(2, backend=backend)
    assign_buffer_sets(traced.gm)
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


def test_a_launch_reads_until_its_wait() -> None:
    """Rows that go straight back: the combine's wait reads the dispatch's buffer, not its users."""
    exchange = ep.Exchange("mirror", 2, 0, "minimal_async", padded=True)

    class Echo(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            plan = ep.plan(torch.arange(8).view(4, 2) % 4, 4, exchange)
            return ep.combine(ep.dispatch(x * self.scale, plan), torch.ones(4, 2), plan) * 2

    def loss(model: torch.nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return model(x).sum(), {}

    ep.register_group(ep.Group("mirror", 2, 0, "loopback"))
    traced = trace_step(Step(Echo(), loss), (torch.ones(4, 3),))
    dispatch, combine = _launches(traced)[:2]
    names = {str(n.target) for n in readers(dispatch)}
    assert combine in readers(dispatch)
    (wait,) = {w for part in combine.users for w in part.users if is_wait(w)}
    assert wait in readers(dispatch)
    assert "ep.combine_finish.default" not in names
