"""The ``minimal_async`` backend against ``alltoall``, padded to the same blocks: every bit, every
result; and the protocol that keeps a fast rank out of what a slow one still reads."""

from __future__ import annotations

import itertools
import os
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import run_steps, small_config, small_engine, snapshot, unequal
from torch import Tensor

from interlace import _compat, ep
from interlace.ep import budget, minimal_async, pending, signals
from interlace.ep.windows import close_windows, poison_on_reuse
from interlace.kernels.grouped_mm import grouped_mm_ref

E = 8
ROUTINGS = ["random", "all-to-one", "last", "unequal"]
_ops = torch.ops.ep


def _problem(num_tokens: int, top_k: int, hidden: int, dtype: torch.dtype, seed: int, routing: str):
    """x, ids, scores, weights (E, H, H), gradient of the output; ``seed`` differs by rank."""
    gen = torch.Generator().manual_seed(seed)
    weight = torch.ones(E)
    if routing == "unequal":
        weight = torch.rand(E, generator=gen) ** 6 + 1e-6
    ids = torch.multinomial(weight.expand(max(num_tokens, 1), -1), top_k, generator=gen)
    ids = ids[:num_tokens]
    if routing in ("all-to-one", "last"):
        first = 0 if routing == "all-to-one" else E - top_k
        ids = torch.arange(first, first + top_k).repeat(num_tokens, 1)
    x, g = (torch.randn(num_tokens, hidden, generator=gen).to(dtype) for _ in range(2))
    scores = torch.rand(num_tokens, top_k, generator=gen)
    weights = torch.randn(E, hidden, hidden, generator=torch.Generator().manual_seed(99))
    return x, ids, scores, weights.to(dtype), g


def _results(problem, exchange: ep.Exchange) -> dict[str, Tensor]:
    """Output, gradients and the plan; what lies past the live rows is poisoned."""
    x, ids, scores, w, g = problem
    w = w.chunk(exchange.size)[exchange.rank]
    x, scores, w = (t.clone().requires_grad_() for t in (x, scores, w))
    plan = ep.plan(ids, E, exchange)
    rows = ep.dispatch(x, plan)
    tail = torch.arange(rows.shape[0])[:, None] >= plan.offsets[-1]
    rows = torch.where(tail, float("nan"), rows)
    y = torch.where(tail, float("nan"), grouped_mm_ref(rows, w, plan.offsets[1:]))
    out = ep.combine(y, scores, plan)
    gx, gs, gw = torch.autograd.grad(out, (x, scores, w), g)
    assert pending.num_in_flight() == 0
    found = {"out": out, "x.grad": gx, "scores.grad": gs, "w.grad": gw}
    found |= {"counts": plan.counts, "offsets": plan.offsets, "overflow": plan.overflow}
    return found | {"rows": rows.detach()[: int(plan.live)], "live": plan.live}


def _assert_same(problem, name: str, size: int, rank: int, factor: float | None = None) -> None:
    expected, actual = (
        _results(problem, ep.Exchange(name, size, rank, backend, True, factor))
        for backend in ("alltoall", "minimal_async")
    )
    for key, value in expected.items():
        assert actual[key].dtype == value.dtype
        assert torch.equal(actual[key], value), key


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 9),
    st.integers(1, 4),
    st.sampled_from([1, 3, 8, 13]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(ROUTINGS),
    st.sampled_from([None, 1.0, 1.5]),
    st.integers(0, 10**6),
)
def test_one_process(num_tokens, top_k, hidden, dtype, size, routing, factor, seed) -> None:
    name = "single" if size == 1 else "mirror"
    if size > 1:
        ep.register_group(ep.Group(name, size, 0, "loopback"))
    problem = _problem(num_tokens, top_k, hidden, dtype, seed, routing)
    _assert_same(problem, name, size, 0, factor)
    close_windows()


@contextmanager
def _group(rank: int, size: int):
    ep.register_group(ep.Group("ep", size, rank, "process", dist.group.WORLD))
    try:
        yield
    finally:
        close_windows()
        ep.drop_group("ep")


def _compare(rank: int, size: int, cases) -> None:
    with _group(rank, size):
        for i, (tokens, top_k, hidden, dtype, routing, factor) in enumerate(cases):
            problem = _problem(tokens, top_k, hidden, dtype, 100 * i + rank, routing)
            _assert_same(problem, "ep", size, rank, factor)
    assert not signals.opened()


CASES = [
    *((6, 2, 8, torch.float32, r, f) for r, f in itertools.product(ROUTINGS, [None, 1.0])),
    (1, 2, 8, torch.float32, "random", None),
    (1, 1, 5, torch.bfloat16, "last", None),
    (7, 3, 13, torch.bfloat16, "unequal", 1.25),  # rows of 26 bytes
    (7, 3, 3, torch.float32, "unequal", None),  # rows of 12 bytes
    (0, 2, 8, torch.float32, "random", None),
]


def test_two_processes(two_ranks) -> None:
    two_ranks.run(_compare, CASES)


def test_four_processes(four_ranks) -> None:
    four_ranks.run(_compare, CASES)


def _unequal_equals_exact(rank: int, size: int, cases) -> None:
    """Oracle: the exact all-to-all; with a capacity, the padded one, which cuts the same slots.

    Windows are used again with other numbers of tokens, and poisoned each time.
    """
    poison_on_reuse(enabled=True)
    most = max(n for tokens, *_ in cases for n in tokens) + 1
    try:
        with _group(rank, size):
            for i, (tokens, top_k, hidden, dtype, routing, factor) in enumerate(cases):
                problem = _problem(tokens[rank], top_k, hidden, dtype, 100 * i + rank, routing)
                room = {"padded": True, "capacity_factor": factor, "max_tokens": most}
                actual = _results(problem, ep.Exchange("ep", size, rank, "minimal_async", **room))
                oracle = room if factor else {}
                expected = _results(problem, ep.Exchange("ep", size, rank, **oracle))
                for key, value in expected.items():
                    assert actual[key].dtype == value.dtype
                    assert torch.equal(actual[key], value), (key, tokens)
        assert not signals.opened()
    finally:
        poison_on_reuse(enabled=False)


def _unequal_cases(counts: list[list[int]]) -> list[tuple]:
    shapes = [
        (2, 8, torch.float32, "random", None),
        (3, 13, torch.bfloat16, "unequal", None),  # rows of 26 bytes
        (1, 1, torch.float32, "last", None),
        (2, 3, torch.float32, "all-to-one", None),
        (2, 8, torch.float32, "unequal", 1.0),
    ]
    return [(tokens, *shape) for tokens in counts for shape in shapes]


def test_unequal_tokens_of_two_processes(two_ranks) -> None:
    two_ranks.run(_unequal_equals_exact, _unequal_cases([[5, 8], [0, 3], [9, 0], [0, 0]]))


def test_unequal_tokens_of_four_processes(four_ranks) -> None:
    counts = [[5, 0, 9, 1], [0, 9, 0, 0], [1, 2, 3, 0]]
    four_ranks.run(_unequal_equals_exact, _unequal_cases(counts))


def _train(rank: int, size: int, backend: str, arm: str, preset: str, steps: int):
    config = small_config(
        preset,
        ep__backend=backend,
        ep__padded=True,
        parallelism__expert_parallel_degree=size,
        overlap__chunks=2 if "chunk" in arm else 1,
        data__source="stdlib",
    )
    try:
        engine = small_engine(config, rank, size, arm)
        losses = run_steps(engine, steps)
        return losses, snapshot(engine)
    finally:
        close_windows()


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["eager", "scheduled", "chunk-graph", "chunk-scheduled"])
def test_twenty_steps_of_training(two_ranks, arm: str) -> None:
    """Losses, weights, moments and counts on both ranks; buffers poisoned whenever freed."""
    expected = two_ranks.run(_train, "alltoall", arm, "dsv3-tiny", 20, timeout=200)
    two_ranks.run(_poison, True)
    actual = two_ranks.run(_train, "minimal_async", arm, "dsv3-tiny", 20, timeout=200)
    two_ranks.run(_poison, False)
    for (losses, state), (wanted, wanted_state) in zip(actual, expected, strict=True):
        assert losses == wanted
        assert not unequal(state, wanted_state)
        assert losses[-1] < losses[0] - 0.05


def _poison(rank: int, size: int, enabled: bool) -> None:
    poison_on_reuse(enabled=enabled)


# --- the protocol: buffer set 0 is used again and again, by ranks of very different speed


def _generations(
    rank: int,
    size: int,
    count: int,
    slow: int,
    delays: dict[str, float],
    tokens: tuple[int, ...] = (6, 6, 6, 6),
) -> int:
    """Dispatches and combines in place, each result read late by one rank; the wrong results."""
    wrong = 0
    poison_on_reuse(enabled=True)
    for where, seconds in delays.items():
        signals.delay(where, seconds if rank == slow else 0)
    try:
        with _group(rank, size):
            wrong = sum(_generation(rank, size, g, slow, tokens) for g in range(count))
    finally:
        poison_on_reuse(enabled=False)
        for where in delays:
            signals.delay(where, 0)
    return wrong


def _generation(rank: int, size: int, generation: int, slow: int, tokens: tuple[int, ...]) -> int:
    """Which rank has how many tokens changes with every generation."""
    mine = [tokens[(r + generation) % size] for r in range(size)]
    problems = [
        _problem(mine[r], 2, 8, torch.float32, 10 * generation + r, "unequal") for r in range(size)
    ]
    x, ids, *_ = problems[rank]
    most = None if len(set(tokens)) == 1 else max(tokens)
    exchange = ep.Exchange("ep", size, rank, "minimal_async", padded=True, max_tokens=most)
    plan = ep.plan(ids, E, exchange)
    rows = _ops.wait(
        *_ops.dispatch_launch(x, None, plan.meta, None, plan.out_rows, 0, "ep", "minimal_async")
    )
    if rank == slow:
        time.sleep(0.02)  # a weight gradient, say, that still has to read
    live = rows[: int(plan.live)].clone()
    slots = _ops.wait(
        *_ops.combine_launch(live * 2, plan.meta, None, plan.sent_rows, 0, "ep", "minimal_async")
    )
    if rank == slow:
        time.sleep(0.02)
    out = _ops.combine_finish(slots, None, plan.meta, plan.top_k, "minimal_async")
    # Oracle, without an exchange: by (expert, rank, slot), and 2 * K times the token.
    mine = range(rank * E // size, (rank + 1) * E // size)
    expected = [p[0][(p[1] == e).nonzero()[:, 0]] for e in mine for p in problems]
    wrong_rows = not torch.equal(live, torch.cat(expected))
    return wrong_rows + (not torch.allclose(out, 2 * plan.top_k * x))


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_reader_is_waited_for(two_ranks, slow: int) -> None:
    assert two_ranks.run(_generations, 20, slow, {}) == [0, 0]


@pytest.mark.parametrize("where", signals.STEPS)
def test_delays_at_every_step(two_ranks, where: str) -> None:
    for slow in range(2):
        assert two_ranks.run(_generations, 5, slow, {where: 0.02}) == [0, 0]


def test_four_ranks_of_different_speed(four_ranks) -> None:
    assert four_ranks.run(_generations, 5, 2, {"announce": 0.01, "publish": 0.01}) == [0] * 4


def test_ranks_of_different_speed_and_numbers_of_tokens(four_ranks) -> None:
    """Slow is now a rank without a token, now the one with most."""
    args = (8, 2, {"announce": 0.01, "publish": 0.01}, (5, 0, 9, 1))
    assert four_ranks.run(_generations, *args) == [0] * 4


def _without_credit(rank: int, size: int) -> int:
    """The same, but nobody waits until the peers' buffers are free."""
    real, minimal_async.enter = minimal_async.enter, signals.announce
    try:
        return _generations(rank, size, 20, 1, {})
    finally:
        minimal_async.enter = real


def test_without_the_credit_a_slow_reader_loses_its_rows(two_ranks) -> None:
    """The announcement is needed: what arrived has not been read yet when the next rows come."""
    wrong = two_ranks.run(_without_credit)
    assert sum(wrong) > 0


# --- what is refused


def test_exact_mode_is_refused() -> None:
    _, ids, *_ = _problem(4, 2, 8, torch.float32, 0, "random")
    with pytest.raises(ValueError, match=r"minimal_async: rows of an exact .* Set ep.padded"):
        ep.plan(ids, E, ep.Exchange(backend="minimal_async"))


def _unequal_tokens(rank: int, size: int) -> str:
    with _group(rank, size):
        _, ids, *_ = _problem([5, 8][rank], 2, 8, torch.float32, 0, "random")
        try:
            ep.plan(ids, E, ep.Exchange("ep", size, rank, "minimal_async", padded=True))
        except ValueError as error:
            return str(error)
    return "no error"


def test_unequal_tokens_are_refused_by_every_rank(two_ranks) -> None:
    for message in two_ranks.run(_unequal_tokens):
        assert "as many tokens on every rank; blocks of rows by rank are [10, 16]" in message


def test_worked_example_of_the_plan() -> None:
    """Slots sorted by expert: 1, 3, 0, 2; experts 0 and 1 are here, 2 and 3 at the mirrored rank,
    whose two rows come back for experts 0 and 1.  R = 2 * 4."""
    ids = torch.tensor([[2], [0], [3], [0]])
    ep.register_group(ep.Group("mirror", 2, 0, "loopback"))
    counts, offsets, live, overflow, meta = _ops.plan(ids, 4, 4, "mirror", "minimal_async")
    assert counts.tolist() == [3, 1]
    assert offsets.tolist() == [0, 3, 4]
    assert (live.item(), overflow.item()) == (4, 0)
    target, token, place, origin = (m.tolist() for m in meta)
    assert target == [8 + 2, 0, 8 + 3, 1]
    assert token == place == [0, 1, 2, 3]
    assert origin == [1, 3, 4 + 0, 4 + 2, -1, -1, -1, -1]
    close_windows()


# --- GPUs: two processes on one device over CUDA IPC, or on two over symmetric memory


def _problem_on(device: torch.device, rank: int, seed: int, tokens: int = 64):
    hidden, routing = 72, ROUTINGS[seed % len(ROUTINGS)]
    x, ids, scores, _, g = _problem(tokens, 3, hidden, torch.bfloat16, 50 * seed + rank, routing)
    return [t.to(device) for t in (x, ids, scores, g)]


def _forward_backward(x, ids, scores, g, exchange: ep.Exchange, slow: bool) -> list[Tensor]:
    """An exchange there and back, forward and backward, in buffer sets 0 and 1; each delivery is
    read after a sleep on the slow rank.  Rows past the live ones count as zero."""

    def late(rows: Tensor) -> Tensor:
        if slow:
            _compat.gpu_sleep(2, rows.device)
        return rows.clone()

    def wait(kind: str, source: Tensor, *args) -> Tensor:
        launch = getattr(_ops, f"{kind}_launch")
        return late(_ops.wait(*launch(source, *args, name, exchange.backend)))

    name = exchange.group
    plan = ep.plan(ids, E, exchange)
    live = torch.arange(plan.out_rows, device=x.device)[:, None] < plan.offsets[-1]
    meta, out_rows, sent = plan.meta, plan.out_rows, plan.sent_rows
    finish = {"top_k": plan.top_k, "backend": exchange.backend}
    rows = wait("dispatch", x, None, meta, None, out_rows, 0)
    slots = wait("combine", rows * 1.5, meta, None, sent, 0)
    out = _ops.combine_finish(slots, scores, meta, **finish)
    g_scores = _ops.score_grad(slots, g, meta, **finish)
    g_rows = wait("dispatch", g, scores, meta, None, out_rows, 1)
    back = wait("combine", g_rows * 1.5, meta, None, sent, 1)
    g_x = _ops.combine_finish(back, None, meta, **finish)
    kept = [torch.where(live, r, 0) for r in (rows, g_rows)]
    return [*kept, out, g_scores, g_x, plan.counts, plan.offsets]


def _on_gpus(
    rank: int, size: int, shared: bool, iterations: int, replays: int, counts=(64, 64)
) -> list[int]:
    """Iterations whose results differ from the all-to-all's: eager, then replayed.

    ``counts``: the tokens of each rank.
    """
    device = torch.device("cuda", 0 if shared else rank)
    torch.cuda.set_device(device)
    signals.TIMEOUT_SECONDS["cuda"] = 20.0
    poison_on_reuse(enabled=True)
    tokens, most = counts[rank], None if len(set(counts)) == 1 else max(counts)
    exchange, reference = (
        ep.Exchange("ep", size, rank, backend, padded=True, max_tokens=most)
        for backend in ("minimal_async", "alltoall")
    )
    wrong = [0, 0]

    def differ(actual: list[Tensor], problem: list[Tensor]) -> bool:
        expected = _forward_backward(*problem, reference, slow=False)
        return not all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))

    with _group(rank, size):
        for i in range(iterations):
            problem = _problem_on(device, rank, i, tokens)
            actual = _forward_backward(*problem, exchange, slow=rank == i % size)
            wrong[0] += differ(actual, problem)
        static = _problem_on(device, rank, 0, tokens)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = _forward_backward(*static, exchange, slow=rank == 1)
        for i in range(replays):
            problem = _problem_on(device, rank, 1000 + i, tokens)
            for place, value in zip(static, problem, strict=True):
                place.copy_(value)
            graph.replay()
            torch.cuda.synchronize()
            wrong[1] += differ(result, problem)
        signals.check_timeouts()
        dist.barrier()
        graph.reset()
        poison_on_reuse(enabled=False)
    return wrong


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [(64, 64), (64, 40), (0, 64)])
def test_two_processes_on_one_gpu(two_ranks, counts: tuple[int, int]) -> None:
    assert two_ranks.run(_on_gpus, True, 20, 10, counts, timeout=200) == [[0, 0]] * 2


@pytest.mark.multi_gpu
@pytest.mark.parametrize("mapping", ["symmetric", "ipc"])
def test_two_gpus(two_ranks, mapping: str) -> None:
    two_ranks.run(_set_mapping, mapping)
    assert two_ranks.run(_on_gpus, False, 20, 10, timeout=200) == [[0, 0]] * 2
    two_ranks.run(_set_mapping, "")


def _set_mapping(rank: int, size: int, mapping: str) -> None:
    os.environ["INTERLACE_EP_MAPPING"] = mapping


@pytest.mark.gpu
@pytest.mark.parametrize("max_ctas", [None, 4])
def test_loopback_on_gpu(max_ctas: int | None) -> None:
    """Eager and replayed, bounded and not, against the all-to-all on the same device."""
    device = torch.device("cuda", torch.cuda.current_device())
    ep.register_group(ep.Group("mirror", 4, 0, "loopback"))
    exchange, reference = (
        ep.Exchange("mirror", 4, 0, backend, True, 1.25)
        for backend in ("minimal_async", "alltoall")
    )
    with budget.bounded(max_ctas):
        for i in range(4):
            problem = _problem_on(device, 0, i)
            actual = _forward_backward(*problem, exchange, slow=False)
            expected = _forward_backward(*problem, reference, slow=False)
            assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
        static = _problem_on(device, 0, 0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = _forward_backward(*static, exchange, slow=False)
        for i in range(10):
            problem = _problem_on(device, 0, 100 + i)
            for place, value in zip(static, problem, strict=True):
                place.copy_(value)
            graph.replay()
            expected = _forward_backward(*problem, reference, slow=False)
            assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    graph.reset()
    signals.check_timeouts()
    close_windows()


def test_the_gpu_tests_own_step_on_cpu() -> None:
    """What the tests above run, so that a fault of the tests themselves shows without a GPU."""
    ep.register_group(ep.Group("mirror", 4, 0, "loopback"))
    for tokens, most in ((64, None), (40, 64), (0, 64)):
        problem = _problem_on(torch.device("cpu"), 0, 3, tokens)
        actual, expected = (
            _forward_backward(
                *problem,
                ep.Exchange("mirror", 4, 0, backend, True, 1.25, max_tokens=most),
                slow=False,
            )
            for backend in ("minimal_async", "alltoall")
        )
        assert len(actual) == 7
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    close_windows()
