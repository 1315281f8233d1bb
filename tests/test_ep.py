"""The exchange against a dense computation without one, in every mode, transport and routing."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
import test_chunk
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from interlace import _compat, ep
from interlace.ep import alltoall, pending
from interlace.ep.windows import close_windows
from interlace.kernels.grouped_mm import grouped_mm_ref

H, E = 8, 8


def _problem(num_tokens: int, top_k: int, seed: int, routing: str = "random"):
    """x, ids, scores, weights (E, H, H) and the gradient of the output."""
    gen = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_tokens, E, generator=gen).argsort(1)[:, :top_k]
    if routing == "all-to-one":
        ids = torch.arange(top_k).expand(num_tokens, -1).contiguous()
    elif routing == "last":
        ids = torch.arange(E - top_k, E).expand(num_tokens, -1).contiguous()
    x, g = (torch.randn(num_tokens, H, generator=gen) for _ in range(2))
    scores = torch.rand(num_tokens, top_k, generator=gen)
    w = torch.randn(E, H, H, generator=torch.Generator().manual_seed(99))
    return x, ids, scores, w, g


def _dense(x: Tensor, ids: Tensor, scores: Tensor, w: Tensor, g: Tensor) -> list[Tensor]:
    """Oracle: every slot by itself in fp64, no exchange; output and gradients of x, scores, w."""
    x, scores, w = (t.double().requires_grad_() for t in (x, scores, w))
    out = sum(
        scores[:, k, None] * torch.einsum("th,thf->tf", x, w[ids[:, k]])
        for k in range(ids.shape[1])
    )
    return [out, *torch.autograd.grad(out, (x, scores, w), g.double())]


def _exchanged(x: Tensor, ids: Tensor, scores: Tensor, w: Tensor, g: Tensor, exchange: ep.Exchange):
    x, scores, w = (t.clone().requires_grad_() for t in (x, scores, w))
    plan = ep.plan(ids, E, exchange)
    rows = ep.dispatch(x, plan)
    # The reference leaves rows past the end at zero; poison them: they must reach nothing.
    y = grouped_mm_ref(rows, w, plan.offsets[1:])
    tail = torch.arange(y.shape[0])[:, None] >= plan.offsets[-1]
    y = torch.where(tail, float("nan"), y)
    out = ep.combine(y, scores, plan)
    grads = torch.autograd.grad(out, (x, scores, w), g)
    assert pending.num_in_flight() == 0
    return [out, *grads], plan


def _assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 9), st.integers(1, 4), st.integers(0, 10**6), st.booleans())
def test_one_rank_equals_dense(num_tokens: int, top_k: int, seed: int, padded: bool) -> None:
    problem = _problem(num_tokens, top_k, seed)
    result, plan = _exchanged(*problem, ep.Exchange(padded=padded))
    _assert_close(result, _dense(*problem))
    assert plan.overflow.item() == 0
    assert plan.counts.tolist() == [(problem[1] == e).sum() for e in range(E)]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 9), st.integers(1, 4), st.sampled_from([2, 4, 8]), st.booleans(), st.data())
def test_loopback_equals_one_rank_with_tied_experts(num_tokens, top_k, size, padded, data) -> None:
    x, ids, scores, w, g = _problem(num_tokens, top_k, data.draw(st.integers(0, 10**6)))
    ep.register_group(ep.Group("mirror", size, 0, "loopback"))
    local = w[: E // size]
    (out, gx, gs, gw), _ = _exchanged(
        x, ids, scores, local, g, ep.Exchange("mirror", size, 0, padded=padded)
    )
    expected = _dense(x, ids, scores, local.repeat(size, 1, 1), g)
    expected[3] = expected[3].view(size, E // size, H, H).sum(0)  # tied experts share a gradient
    _assert_close([out, gx, gs, gw], expected)


def _rank_result(rank: int, size: int, num_tokens: list[int], routing: str, padded: bool):
    """This rank's output and gradients, and those of all tokens computed densely."""
    group = dist.group.WORLD
    ep.register_group(ep.Group("ep", size, rank, "process", group))
    problems = [_problem(n, 2, 7 + r, routing) for r, n in enumerate(num_tokens)]
    x, ids, scores, w, g = problems[rank]
    local = w[rank * E // size : (rank + 1) * E // size]
    (out, gx, gs, gw), plan = _exchanged(
        x, ids, scores, local, g, ep.Exchange("ep", size, rank, padded=padded)
    )
    parts = [_dense(*p) for p in problems]
    mine = slice(rank * E // size, (rank + 1) * E // size)
    expected = [*parts[rank][:3], sum(p[3] for p in parts)[mine]]
    _assert_close([out, gx, gs, gw], expected)
    ep.drop_group("ep")
    return plan.counts.tolist()


ROUTINGS = ["random", "all-to-one", "last"]


@pytest.mark.parametrize(("routing", "padded"), list(itertools.product(ROUTINGS, [False, True])))
def test_processes_equal_dense(two_ranks, routing: str, padded: bool) -> None:
    tokens = [6, 6] if padded else [5, 8]
    counts = two_ranks.run(_rank_result, tokens, routing, padded)
    if routing == "all-to-one":  # field report A1: rank 1 has no token at all
        assert counts == [[sum(tokens)] * 2 + [0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("tokens", [[1, 1], [0, 3]])
def test_hardly_any_tokens(two_ranks, tokens: list[int]) -> None:
    two_ranks.run(_rank_result, tokens, "random", False)


@pytest.mark.parametrize("padded", [False, True])
def test_four_processes_equal_dense(four_ranks, padded: bool) -> None:
    four_ranks.run(_rank_result, [3] * 4 if padded else [3, 1, 6, 2], "random", padded)


def _unequal_padded(rank: int, size: int) -> str:
    ep.register_group(ep.Group("ep", size, rank, "process", dist.group.WORLD))
    _, ids, *_ = _problem([5, 8][rank], 2, 0)
    try:
        ep.plan(ids, E, ep.Exchange("ep", size, rank, padded=True))
    except ValueError as error:
        return str(error)
    return "no error"


def test_unequal_tokens_are_refused_by_every_rank_in_padded_mode(two_ranks) -> None:
    """Field report A5: capacities that differ would stall the exchange."""
    for message in two_ranks.run(_unequal_padded):
        assert "as many tokens on every rank; blocks of rows by rank are [10, 16]" in message


# --- unequal numbers of tokens in padded mode: every backend has blocks of max_tokens then

UNEQUAL = {2: [[5, 8], [0, 3], [8, 0], [1, 1]], 4: [[5, 0, 9, 1], [0, 0, 1, 0], [2, 9, 0, 7]]}
BACKENDS = ["alltoall", "minimal_async", "hybridep"]


def _padded_equals_exact(rank: int, size: int, counts: list[list[int]], slack: int) -> None:
    """Oracle: the exact all-to-all, which never had to know how many tokens others bring; it is
    compared with a dense computation above.  Output and gradients of x, scores and weights."""
    ep.register_group(ep.Group("ep", size, rank, "process", dist.group.WORLD))
    most = max(map(max, counts)) + slack
    for (i, tokens), routing in itertools.product(enumerate(counts), ROUTINGS):
        x, ids, scores, w, g = _problem(tokens[rank], 2, 50 * i + rank, routing)
        local = w[rank * E // size : (rank + 1) * E // size]
        exact, padded = (
            _exchanged(x, ids, scores, local, g, ep.Exchange("ep", size, rank, **settings))
            for settings in ({}, {"padded": True, "max_tokens": most})
        )
        for a, b in zip(exact[0], padded[0], strict=True):
            assert torch.equal(a, b)
        for name in ("counts", "offsets", "live", "overflow"):
            assert torch.equal(getattr(exact[1], name), getattr(padded[1], name))
        assert padded[1].out_rows == size * most * 2
    ep.drop_group("ep")


@pytest.mark.parametrize("slack", [0, 3])
def test_unequal_tokens_of_two_processes(two_ranks, slack: int) -> None:
    two_ranks.run(_padded_equals_exact, UNEQUAL[2], slack)


def test_unequal_tokens_of_four_processes(four_ranks) -> None:
    four_ranks.run(_padded_equals_exact, UNEQUAL[4], 0)


def test_capacity_follows_from_the_most_tokens() -> None:
    """max_tokens * K * f / W; the worst case has max_tokens * min(K, E / W)."""
    for factor, expected in ((None, 20), (1.0, 10), (1.25, 13)):
        ex = ep.Exchange("x", 2, 0, padded=True, capacity_factor=factor, max_tokens=10)
        assert [ex.block_rows(n, 2, 8) for n in (0, 3, 10)] == [expected] * 3
    assert ep.Exchange("x", 2, 0, max_tokens=10).block_rows(11, 2, 8) is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_room_for_more_tokens_changes_no_bit(backend: str, size: int) -> None:
    """Oracle: the same backend with room for the tokens that there are."""
    ep.register_group(ep.Group("mirror", size, 0, "loopback"))
    for num_tokens in (0, 1, 6):
        x, ids, scores, w, g = _problem(num_tokens, 3, num_tokens)
        (wanted, _), (found, plan) = (
            _exchanged(x, ids, scores, w[: E // size], g,
                       ep.Exchange("mirror", size, 0, backend, True, max_tokens=most))
            for most in (None, 11)
        )  # fmt: skip
        assert all(map(torch.equal, found, wanted))
        assert plan.out_rows == size * 11 * min(3, E // size)
    close_windows()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("max_tokens", [None, 5, 9])
def test_shapes_without_values_are_those_of_the_run(backend: str, max_tokens: int | None) -> None:
    ep.register_group(ep.Group("mirror", 2, 0, "loopback"))
    for num_tokens in (0, 5):
        _, ids, *_ = _problem(num_tokens, 2, 0)
        rows = ep.Exchange("mirror", 2, 0, padded=True, max_tokens=max_tokens).block_rows(
            num_tokens, 2, E
        )
        args = (E, rows, "mirror", backend)
        real = torch.ops.ep.plan(ids, *args, max_tokens=max_tokens)
        with _compat.fake_mode() as mode:
            fake = torch.ops.ep.plan(_compat.to_fake(mode, ids), *args, max_tokens=max_tokens)
        for a, b in zip((*real[:4], *real[4]), (*fake[:4], *fake[4]), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
        sizes = [ep.ops.sizes_of(made[4], 2, backend, max_tokens) for made in (real, fake)]
        assert sizes[0] == sizes[1]
        assert sizes[0].num_tokens == num_tokens
    close_windows()


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_of_a_batch_have_room_for_max_tokens_each(backend: str) -> None:
    """Oracle: chunking in plain PyTorch with the room that follows from the part."""
    chunking = test_chunk.Chunking(test_chunk.MOE, 2, test_chunk.BATCH)
    most = test_chunk.B * test_chunk.S + 5
    exchange = replace(test_chunk._exchange(2, padded=True), backend=backend)
    model = test_chunk.Net(replace(exchange, max_tokens=most))
    traced, _ = test_chunk._chunked(model, chunking)
    for layer in model.layers:
        layer.moe.exchange = exchange
    test_chunk._assert_equals_eager_chunking(model, traced, chunking)
    close_windows()


def _refused(rank: int, size: int, backend: str, tokens: list[int], most: list) -> str:
    ep.register_group(ep.Group("ep", size, rank, "process", dist.group.WORLD))
    _, ids, *_ = _problem(tokens[rank], 2, 0)
    try:
        ep.plan(ids, E, ep.Exchange("ep", size, rank, backend, True, max_tokens=most[rank]))
    except ValueError as error:
        return str(error)
    finally:
        close_windows()
        ep.drop_group("ep")
    return "no error"


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_that_expect_other_sizes_are_refused(two_ranks, backend: str) -> None:
    for tokens, most in (([5, 8], [None, None]), ([5, 5], [5, 8]), ([5, 3], [None, 8])):
        for message in two_ranks.run(_refused, backend, tokens, most):
            assert "as many tokens on every rank; blocks of rows by rank are [10, 16]" in message
            assert "set max_tokens of the exchange alike on all" in message


def test_more_tokens_than_the_most_are_refused(two_ranks) -> None:
    for backend in BACKENDS:
        messages = two_ranks.run(_refused, backend, [6, 7], [5, 5])
        assert messages == [
            f"ep.max_tokens=5: rank {rank} of group 'ep' brings {tokens} tokens to one plan; raise "
            "it on all ranks."
            for rank, tokens in enumerate((6, 7))
        ]
    with pytest.raises(ValueError, match=r"ep.max_tokens: 0 tokens; expected at least 1, or None"):
        ep.Exchange(max_tokens=0)


def _carriers(rank: int, size: int) -> list[str]:
    """Which communicator carries what, in order: a plan, a dispatch, a combine."""
    counts, real, seen = dist.new_group(), dist.all_to_all_single, []
    ep.register_group(ep.Group("ep", size, rank, "process", dist.group.WORLD, counts))

    def watched(*args, group, **kwargs):
        seen.append("counts" if group is counts else "rows")
        return real(*args, group=group, **kwargs)

    dist.all_to_all_single = watched
    try:
        x, ids, scores, *_ = _problem(6, 2, rank)
        plan = ep.plan(ids, E, ep.Exchange("ep", size, rank))
        ep.combine(ep.dispatch(x, plan), scores, plan)
    finally:
        dist.all_to_all_single = real
        ep.drop_group("ep")
        dist.destroy_process_group(counts)
    return seen


def test_counts_never_queue_behind_rows(two_ranks) -> None:
    assert two_ranks.run(_carriers) == [["counts", "rows", "rows"]] * 2


def test_overflow_is_counted_and_what_was_cut_counts_as_zero() -> None:
    x, ids, scores, *_ = _problem(6, 2, 3, "all-to-one")
    ep.register_group(ep.Group("mirror", 2, 0, "loopback"))
    plan = ep.plan(ids, E, ep.Exchange("mirror", 2, 0, padded=True, capacity_factor=4 / 3))
    assert plan.overflow.tolist() == [4]  # 12 rows for peer 0, room for 8
    assert plan.live.tolist() == [8]
    out = ep.combine(ep.dispatch(x, plan), scores, plan)
    kept = torch.ones(6, 2)
    kept[2:, 1] = 0  # slots leave by expert: expert 0's six rows fit, two of expert 1's
    expected = (scores * kept).sum(1, keepdim=True) * x
    torch.testing.assert_close(out, expected)


def test_worked_example_of_the_plan() -> None:
    ids = torch.tensor([[2], [0], [3], [0]])
    ep.register_group(ep.Group("mirror", 2, 0, "loopback"))
    *_, meta = torch.ops.ep.plan(ids, 4, None, "mirror", "alltoall")
    assert meta[alltoall.SEND_SLOT].tolist() == [1, 3, 0, 2]
    assert meta[alltoall.SLOT_POS].tolist() == [2, 0, 3, 1]
    assert meta[alltoall.SPLITS].tolist() == [[2, 2], [2, 2]]


def test_rows_are_ordered_by_expert_then_rank_then_slot() -> None:
    ids = torch.tensor([[0, 4], [4, 1], [0, 1]])
    ep.register_group(ep.Group("mirror", 2, 0, "loopback"))
    plan = ep.plan(ids, E, ep.Exchange("mirror", 2, 0))
    rows = ep.dispatch(torch.tensor([[0.0], [1.0], [2.0]]), plan)
    # expert 0 gets slots of its own, then those that the mirrored peer sends (mine for expert 4)
    assert rows[:, 0].tolist() == [0, 2, 0, 1, 1, 2]
    assert plan.offsets.tolist() == [0, 4, 6, 6, 6]


@pytest.mark.parametrize(("capacity", "expected"), [(None, 20), (1.0, 10), (1.25, 13), (100.0, 20)])
def test_block_rows(capacity: float | None, expected: int) -> None:
    exchange = ep.Exchange("x", 2, 0, padded=True, capacity_factor=capacity)
    assert exchange.block_rows(10, 2, 8) == expected
    assert ep.Exchange("x", 2, 0).block_rows(10, 2, 8) is None


def test_block_rows_worst_case_counts_local_experts() -> None:
    """One local expert: a token sends one row to a peer at most."""
    assert ep.Exchange("x", 8, 0, padded=True).block_rows(10, 4, 8) == 10


def test_a_second_wait_is_an_error() -> None:
    token = pending.start(lambda: None)
    torch.ops.ep.wait(torch.ones(1), token)
    with pytest.raises(RuntimeError, match=r"exchange \d+ is not in flight"):
        torch.ops.ep.wait(torch.ones(1), token)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"8 experts cannot be split over 3 .* ranks"):
        ep.Exchange("x", 3, 0).num_local_experts(8)
    with pytest.raises(ValueError, match=r"ids is torch.int32 \(2, 1\); expected int64"):
        ep.plan(torch.zeros(2, 1, dtype=torch.int32), 8, ep.Exchange())
    with pytest.raises(ValueError, match=r"group 'nowhere' is unknown; known: .*single"):
        ep.plan(torch.zeros(2, 1, dtype=torch.int64), 8, ep.Exchange("nowhere", 2, 0))
    with pytest.raises(ValueError, match="'carrier-pigeon' is unknown; available: alltoall,"):
        ep.plan(torch.zeros(2, 1, dtype=torch.int64), 8, ep.Exchange(backend="carrier-pigeon"))
    ep.register_group(ep.Group("paper", 2, 0, "abstract"))
    with pytest.raises(ValueError, match="'paper' has sizes only and cannot move tokens"):
        ep.plan(torch.zeros(2, 1, dtype=torch.int64), 8, ep.Exchange("paper", 2, 0))
    with pytest.raises(ValueError, match="unknown kind 'psychic'"):
        ep.register_group(ep.Group("x", 2, 0, "psychic"))


@pytest.mark.slow
def test_groups_are_forgotten_at_exit() -> None:
    """A process group that is held into Python's exit may abort the process."""
    code = """
import atexit, sys
atexit.register(lambda: print(sorted(sys.modules["interlace.ep.transport"]._groups)))  # runs last
from interlace import ep
ep.register_group(ep.Group("experts", 4, 0, "loopback"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "['single']\n"
