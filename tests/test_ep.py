"""The exchange against a dense computation without one, in every mode, transport and routing."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from interlace import ep
from interlace.ep import alltoall, pending
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
