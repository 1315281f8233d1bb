"""The hybridep backend on CPU: against ``alltoall`` bit by bit, and against its own words.

Oracles: the padded ``alltoall``, which is tested against a dense computation (``slot``); the sums
that ``reduce="rank"`` promises, written out without an exchange, bitwise; and fp64 within bounds.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from interlace import ep
from interlace.ep import hybridep, pending, signals, windows
from interlace.kernels.grouped_mm import grouped_mm_ref

E = 8
ROUTINGS = ["random", "all-to-one", "last", "empty-rank"]
NAMES = ["out", "x", "y", "scores"]


def _problem(tokens: int, top_k: int, hidden: int, seed: int, routing: str):
    """x, ids, scores, weights (E, H, H), gradient; every rank draws its own from its seed."""
    gen = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, E, generator=gen).argsort(1)[:, :top_k]
    if routing == "all-to-one":
        ids = torch.arange(top_k).expand(tokens, -1).contiguous()
    elif routing == "last":
        ids = torch.arange(E - top_k, E).expand(tokens, -1).contiguous()
    elif routing == "empty-rank":  # nobody chooses the experts of rank 0, of two or four
        ids = torch.rand(tokens, E // 2, generator=gen).argsort(1)[:, :top_k] + E // 2
    x, g = (torch.randn(tokens, hidden, generator=gen) for _ in range(2))
    scores = torch.rand(tokens, top_k, generator=gen)
    w = torch.randn(E, hidden, hidden, generator=torch.Generator().manual_seed(99))
    return x, ids, scores, w, g


def _run(x, ids, scores, w, g, exchange: ep.Exchange) -> tuple[list[Tensor], ep.Plan]:
    """Output and gradients of x, y and scores; rows that count for nothing are NaN."""
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    plan = ep.plan(ids, E, exchange)
    rows = ep.dispatch(x, plan)
    y = grouped_mm_ref(rows, w.to(rows.dtype), plan.offsets[1:])
    tail = torch.arange(y.shape[0])[:, None] >= plan.offsets[-1]
    y = torch.where(tail, float("nan"), y)
    y.retain_grad()
    out = ep.combine(y, scores, plan)
    out.backward(g)
    assert pending.num_in_flight() == 0
    live = int(plan.live)
    return [out.detach(), x.grad, y.grad[:live], scores.grad], plan


def _differs(a: list[Tensor], b: list[Tensor]) -> list[str]:
    return [n for n, s, t in zip(NAMES, a, b, strict=True) if not torch.equal(s, t)]


def _against_alltoall(problem, w, **kwargs) -> None:
    (a, pa), (b, pb) = (
        _run(*problem[:3], w, problem[4], ep.Exchange(backend=backend, padded=True, **kwargs))
        for backend in ("alltoall", "hybridep")
    )
    assert pb.overflow.tolist() == pa.overflow.tolist()
    assert pb.counts.tolist() == pa.counts.tolist()
    assert pb.offsets.tolist() == pa.offsets.tolist()
    assert pb.live.tolist() == pa.live.tolist()
    assert _differs(a, b) == []


def _mirror(size: int) -> dict:
    ep.register_group(ep.Group("mirror", size, 0, "loopback"))
    return {"group": "mirror", "size": size, "rank": 0}


@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, 9),
    st.integers(1, 4),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(ROUTINGS),
    st.sampled_from([None, 1.0, 1.4]),
    st.integers(0, 10**6),
)
def test_loopback_equals_alltoall(tokens, top_k, hidden, size, routing, factor, seed) -> None:
    problem = _problem(tokens, top_k, hidden, seed, routing)
    where = _mirror(size)
    _against_alltoall(problem, problem[3][: E // size], capacity_factor=factor, **where)


@contextmanager
def _group(rank: int, size: int):
    """The group of all processes, with windows poisoned; yields its part of an Exchange."""
    ep.register_group(ep.Group("ep", size, rank, "process", dist.group.WORLD))
    windows.poison_on_reuse(enabled=True)
    try:
        yield {"group": "ep", "size": size, "rank": rank}
    finally:
        windows.poison_on_reuse(enabled=False)
        windows.close_windows("ep")
        ep.drop_group("ep")


def _rank_equals(
    rank: int, size: int, tokens: int, hidden: int, routings: list[str], factor: float | None
) -> int:
    """Runs both backends on this rank's own problem and routing; returns the overflow."""
    with _group(rank, size) as where:
        problem = _problem(tokens, 2, hidden, 7 + rank, routings[rank % len(routings)])
        local = problem[3][rank * E // size : (rank + 1) * E // size]
        where["capacity_factor"] = factor
        for repeat in range(2):  # windows that were used before
            _against_alltoall((problem[0] + repeat, *problem[1:]), local, **where)
        return int(ep.plan(problem[1], E, ep.Exchange(padded=True, **where)).overflow)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_two_processes_equal_alltoall(two_ranks, routing: str) -> None:
    two_ranks.run(_rank_equals, 6, 8, [routing], None)


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 8), (5, 7), (3, 1)])
def test_one_token_and_odd_widths(two_ranks, tokens: int, hidden: int) -> None:
    two_ranks.run(_rank_equals, tokens, hidden, ["random"], None)


def test_ranks_with_routings_of_their_own(two_ranks) -> None:
    two_ranks.run(_rank_equals, 9, 8, ["all-to-one", "empty-rank"], None)


@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_both_cut_the_same_slots(two_ranks, factor: float) -> None:
    overflows = two_ranks.run(_rank_equals, 9, 8, ["all-to-one", "random"], factor)
    assert overflows[0] == 18 - math.ceil(9 * factor)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_four_processes_equal_alltoall(four_ranks, routing: str) -> None:
    four_ranks.run(_rank_equals, 5, 6, [routing, "random"], None)


def _unequal_equals_exact(rank: int, size: int, counts, hidden: int, factor) -> None:
    """Oracle: the exact all-to-all; with a capacity, the padded one, which cuts the same slots."""
    most = max(map(max, counts))
    with _group(rank, size) as where:
        room = {"padded": True, "capacity_factor": factor, "max_tokens": most, **where}
        for (i, tokens), routing in itertools.product(enumerate(counts), ROUTINGS):
            problem = _problem(tokens[rank], 2, hidden, 10 * i + rank, routing)
            local = problem[3][rank * E // size : (rank + 1) * E // size]
            backend = {"backend": "hybridep", **room}
            (exact, wanted), (slot, plan), (expert, _) = (
                _run(*problem[:3], local, problem[4], ep.Exchange(**settings))
                for settings in (room if factor else where, backend,
                                 {**backend, "scores_at": "expert"})
            )  # fmt: skip
            assert _differs(exact, slot) == []
            for name in ("counts", "offsets", "live", "overflow"):
                assert torch.equal(getattr(plan, name), getattr(wanted, name))
            assert _differs(exact, expert) in ([], ["scores"])  # their dots run in another order
            torch.testing.assert_close(exact[3], expert[3], rtol=1e-5, atol=1e-5)
            assert (plan.sent_rows, plan.stage_rows) == (2 * most, size * most)
            _check_traffic(plan, rank, most)


def _check_traffic(plan: ep.Plan, rank: int, most: int) -> None:
    """Oracle: the origins of the rows, one by one."""
    slots = [s for s in plan.meta[hybridep.ROW_SLOT].tolist() if s >= 0]
    away = [s for s in slots if s // (2 * most) != rank]
    expected = (10 * len({s // 2 for s in away}), 10 * len(away))
    assert hybridep.traffic(plan.meta, 10, rank) == expected


@pytest.mark.parametrize(("hidden", "factor"), [(8, None), (7, None), (1, None), (8, 1.0)])
def test_unequal_tokens_of_two_processes(two_ranks, hidden: int, factor: float | None) -> None:
    two_ranks.run(_unequal_equals_exact, [[5, 8], [0, 3], [8, 0]], hidden, factor)


def test_unequal_tokens_of_four_processes(four_ranks) -> None:
    four_ranks.run(_unequal_equals_exact, [[5, 0, 9, 1], [0, 9, 0, 0]], 7, None)


def _late(rank: int, size: int, where: str) -> None:
    """Rank 1 is slow at one step of the protocol, and before it reads what has arrived."""
    seconds = 0.03 if rank == 1 else 0.0
    signals.delay(where, seconds)
    try:
        time.sleep(seconds)
        _rank_equals(rank, size, 6, 8, ["random"], None)
    finally:
        signals.delay(where, 0.0)


@pytest.mark.parametrize("where", signals.STEPS)
def test_a_slow_rank_changes_nothing(two_ranks, where: str) -> None:
    two_ranks.run(_late, where)


def _read_late(rank: int, size: int, reduce: str, slow: int, waits: bool) -> int:
    """Combines in place, one after the other, of a rank that reads late; how many came out wrong.

    Between them nothing else lets the ranks meet: one plan serves all.
    """
    real = hybridep.enter
    hybridep.enter = real if waits else signals.announce
    ep.register_group(ep.Group("ep", size, rank, "process", dist.group.WORLD))
    try:
        x, ids, *_ = _problem(6, 2, 8, rank, "random")
        plan = ep.plan(ids, E, ep.Exchange("ep", size, rank, "hybridep", padded=True))
        rows = ep.dispatch(x, plan)
        num_rows = plan.sent_rows if reduce == "slot" else plan.stage_rows
        wrong = 0
        for i in range(1, 21):
            launched = torch.ops.ep.combine_launch(
                i * rows, plan.meta, None, num_rows, 0, "ep", "hybridep", reduce=reduce
            )
            back = torch.ops.ep.wait(*launched)
            time.sleep(0.01 if rank == slow else 0.0)
            out = torch.ops.ep.combine_finish(back, None, plan.meta, 2, "hybridep", reduce=reduce)
            wrong += not torch.equal(out, i * x + i * x)
        return wrong
    finally:
        dist.barrier()
        hybridep.enter = real
        windows.close_windows("ep")
        ep.drop_group("ep")


@pytest.mark.parametrize("reduce", ["slot", "rank"])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_late_reader_is_waited_for(two_ranks, reduce: str, slow: int) -> None:
    assert two_ranks.run(_read_late, reduce, slow, True) == [0, 0]


def test_without_the_credit_a_late_reader_loses_rows(two_ranks) -> None:
    """What the announcement is for; and that the test above could fail."""
    assert sum(two_ranks.run(_read_late, "slot", 1, False)) > 0


# --- reduce="rank": what it promises, written out


def _weighted(rows_H: list[Tensor], scores: list[float], dtype: torch.dtype) -> Tensor:
    """float32 in the given order, product and sum each rounded, then the type of the rows."""
    total = torch.zeros_like(rows_H[0], dtype=torch.float32)
    for row, score in zip(rows_H, scores, strict=True):
        total = total + row.float() * score
    return total.to(dtype)


def _rank_sums(y_TKH: Tensor, ids: Tensor, scores: Tensor | None, size: int) -> Tensor:
    """sum over ranks, ascending, of each rank's rounded sum over its choices, in slot order."""
    out = []
    for t in range(ids.shape[0]):
        parts = []
        for rank in range(size):
            mine = [k for k in range(ids.shape[1]) if int(ids[t, k]) // (E // size) == rank]
            if mine:
                weights = [1.0 if scores is None else scores[t, k] for k in mine]
                parts.append(_weighted([y_TKH[t, k] for k in mine], weights, y_TKH.dtype))
        out.append(_weighted(parts, [1.0] * len(parts), y_TKH.dtype))
    return torch.stack(out)


def _promised(x, ids, scores, factors_E, g, size: int) -> list[Tensor]:
    """Experts multiply by a number: rows do not depend on their neighbours."""
    f = factors_E[ids][:, :, None].to(x.dtype)
    y = x[:, None] * f
    out = _rank_sums(y, ids, scores, size)
    gy = (g[:, None].float() * scores[:, :, None]).to(x.dtype)
    gx = _rank_sums(gy * f, ids, None, size)
    gs = (y.float() * g[:, None].float()).sum(2)
    return [out, gx, gs]


def _rank_problem(rank: int, dtype: torch.dtype, hidden: int = 12):
    x, ids, scores, _, g = _problem(7, 4, hidden, 40 + rank, "random")
    factors = torch.linspace(0.5, 2.0, E)
    return x.to(dtype), ids, scores, factors, g.to(dtype)


def _reduced(x, ids, scores, factors_e, g, exchange: ep.Exchange) -> list[Tensor]:
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    plan = ep.plan(ids, E, exchange)
    rows = ep.dispatch(x, plan)
    expert_R = torch.repeat_interleave(torch.arange(len(factors_e)), plan.counts)
    f = torch.full((rows.shape[0], 1), float("nan"))
    f[: len(expert_R)] = factors_e[expert_R, None]
    out = ep.combine(rows * f.to(rows.dtype), scores, plan)
    return [out.detach(), *torch.autograd.grad(out, (x, scores), g)]


def _check_promise(result: list[Tensor], problem, size: int) -> None:
    out, gx, gs = _promised(*problem, size)
    assert torch.equal(result[0], out)
    assert torch.equal(result[1], gx)
    torch.testing.assert_close(result[2], gs, rtol=1e-6, atol=1e-6)


def _rank_reduced(rank: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    with _group(rank, size) as where:
        problem = _rank_problem(rank, dtype)
        mine = slice(rank * E // size, (rank + 1) * E // size)
        ex = ep.Exchange(**where, backend="hybridep", padded=True, reduce="rank")
        runs = [_reduced(*problem[:3], problem[3][mine], problem[4], ex) for _ in range(2)]
        _check_promise(runs[0], problem, size)
        assert all(map(torch.equal, *runs))
        return runs[0]


DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rank_sums_are_those_promised(two_ranks, dtype: torch.dtype) -> None:
    two_ranks.run(_rank_reduced, dtype)


def test_rank_sums_of_four(four_ranks) -> None:
    four_ranks.run(_rank_reduced, torch.bfloat16)


@pytest.mark.parametrize(("size", "dtype"), list(itertools.product([1, 2, 4, 8], DTYPES)))
def test_rank_sums_in_loopback(size: int, dtype: torch.dtype) -> None:
    """Mirrored ranks hold the experts of rank 0."""
    x, ids, scores, factors, g = _rank_problem(0, dtype)
    local = factors[: E // size]
    ex = ep.Exchange(**_mirror(size), backend="hybridep", padded=True, reduce="rank")
    result = _reduced(x, ids, scores, local, g, ex)
    _check_promise(result, (x, ids, scores, local.repeat(size), g), size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rank_sums_within_rounding_of_fp64(dtype: torch.dtype) -> None:
    """One rounding a rank and one at the end, of values no larger than the sum of magnitudes."""
    x, ids, scores, factors, g = _rank_problem(3, dtype)
    ex = ep.Exchange(**_mirror(2), backend="hybridep", padded=True, reduce="rank")
    result = _reduced(x, ids, scores, factors[: E // 2], g, ex)
    _check_rounding(result, x, ids, scores, factors[: E // 2].repeat(2), g)


def _check_rounding(result: list[Tensor], x, ids, scores, factors, g) -> None:
    (out, gx, gs), dtype = result, x.dtype
    f = factors[ids][:, :, None].to(dtype)
    y, s, g = (x[:, None] * f).double(), scores.double()[:, :, None], g.double()[:, None]
    eps = torch.finfo(dtype).eps
    for got, terms, roundings in ((out, s * y, 2), (gx, s * g * f.double(), 4)):
        bound = roundings * eps * terms.abs().sum(1)
        assert ((got.double() - terms.sum(1)).abs() <= bound).all()
    assert ((gs - (y * g).sum(2)).abs() <= 1e-6 * (y * g).abs().sum(2)).all()


def _rank_reduced_unequal(rank: int, size: int, counts: list[list[int]], dtype) -> None:
    mine, factors = slice(rank * E // size, (rank + 1) * E // size), torch.linspace(0.5, 2.0, E)
    with _group(rank, size) as where:
        room = {"padded": True, "max_tokens": max(map(max, counts)), **where}
        for i, tokens in enumerate(counts):
            x, ids, scores, _, g = _problem(tokens[rank], 4, 7, 40 * i + rank, "random")
            x, g = x.to(dtype), g.to(dtype)
            ex = ep.Exchange(backend="hybridep", reduce="rank", **room)
            result = _reduced(x, ids, scores, factors[mine], g, ex)
            assert [r.shape[0] for r in result] == [tokens[rank]] * 3
            if tokens[rank]:
                _check_promise(result, (x, ids, scores, factors, g), size)
                _check_rounding(result, x, ids, scores, factors, g)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rank_sums_of_unequal_tokens(two_ranks, four_ranks, dtype: torch.dtype) -> None:
    """Oracles as above, bitwise and fp64; rows of 7 elements."""
    two_ranks.run(_rank_reduced_unequal, [[5, 8], [0, 3], [8, 0]], dtype)
    four_ranks.run(_rank_reduced_unequal, [[5, 0, 9, 1], [0, 9, 0, 0]], dtype)


def test_one_rank_sums_as_slots_do() -> None:
    """Where the ranks are one, both reductions are defined to be the same."""
    problem = _problem(6, 3, 8, 1, "random")
    slot, rank = (
        _run(*problem, ep.Exchange(backend="hybridep", padded=True, reduce=reduce))[0]
        for reduce in ("slot", "rank")
    )
    assert _differs(slot, rank) in ([], ["scores"])  # their dots run in another order
    torch.testing.assert_close(slot[3], rank[3])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_scores_at_the_experts_change_no_slot_sum(size: int) -> None:
    problem = _problem(6, 3, 8, 2, "random")
    where = {**_mirror(size), "padded": True}
    w = problem[3][: E // size]
    plain, _ = _run(*problem[:3], w, problem[4], ep.Exchange(**where))
    ex = ep.Exchange(**where, backend="hybridep", scores_at="expert")
    moved, _ = _run(*problem[:3], w, problem[4], ex)
    assert _differs(plain, moved) in ([], ["scores"])
    torch.testing.assert_close(plain[3], moved[3], rtol=1e-5, atol=1e-6)


def test_a_cut_slot_counts_as_zero_in_a_rank_sum() -> None:
    x, ids, scores, factors, g = _rank_problem(0, torch.float32)
    ids = torch.arange(4).expand(7, 4).contiguous()  # 28 slots for rank 0, room for 14
    ex = ep.Exchange(
        **_mirror(2), backend="hybridep", padded=True, capacity_factor=1.0, reduce="rank"
    )
    assert ep.plan(ids, E, ex).overflow.tolist() == [14]
    out, gx, gs = _reduced(x, ids, scores, factors[: E // 2], g, ex)
    kept = torch.tensor([1.0, 1.0, 0.0, 0.0])  # sorted by expert: those of experts 0 and 1 fit
    expected = _promised(x, ids, scores * kept, factors[: E // 2].repeat(2), g, 2)
    assert torch.equal(out, expected[0])
    assert torch.equal(gx, expected[1])
    torch.testing.assert_close(gs, expected[2] * kept)


# --- buffers


def test_a_managed_set_is_used_in_place_and_an_unmanaged_one_is_not() -> None:
    ids = torch.tensor([[0, 5], [1, 2]])
    x = torch.randn(2, 4)
    where = {**_mirror(2), "backend": "hybridep", "padded": True}
    for reduce, rows in (("slot", 4), ("rank", 4)):
        plan = ep.plan(ids, E, ep.Exchange(**where, reduce=reduce))

        def bring(y: Tensor, buffer_set: int, plan=plan, reduce=reduce, rows=rows) -> Tensor:
            return torch.ops.ep.wait(
                *torch.ops.ep.combine_launch(
                    y, plan.meta, None, rows, buffer_set, "mirror", "hybridep", reduce=reduce
                )
            )

        rows_RH = ep.dispatch(x, plan)
        first, second = bring(rows_RH, 3), bring(2 * rows_RH, 3)
        assert first.data_ptr() == second.data_ptr()
        kept, later = bring(rows_RH, -1), bring(2 * rows_RH, -1)
        finished = [
            torch.ops.ep.combine_finish(r, None, plan.meta, 2, "hybridep", reduce=reduce)
            for r in (kept, later, first)
        ]
        assert torch.equal(finished[1], 2 * finished[0])
        assert torch.equal(finished[2], finished[1])


def test_a_dispatch_is_private_whatever_its_set() -> None:
    plan = ep.plan(
        torch.tensor([[0, 5], [1, 2]]),
        E,
        ep.Exchange(**_mirror(2), backend="hybridep", padded=True, buffer_set=4),
    )
    x = torch.randn(2, 4)
    first = ep.dispatch(x, plan)
    before = first[: int(plan.live)].clone()
    ep.dispatch(2 * x, plan)
    assert torch.equal(first[: int(plan.live)], before)


# --- bytes


def test_bytes_on_the_wire_are_a_quarter_for_top_8_over_two_ranks() -> None:
    """Oracles: the experts themselves, exactly; uniform routing, in the mean over tokens."""
    tokens, top_k, experts, row_bytes = 4096, 8, 256, 4096
    ids = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0)).argsort(1)
    ids = ids[:, :top_k].contiguous()
    for size, flat, deduped in ((2, 4.00, 1.00), (4, 6.00, 2.71), (8, 7.00, 4.63)):
        ex = ep.Exchange(**_mirror(size), backend="hybridep", padded=True)
        plan = ep.plan(ids, experts, ex)
        wire, logical = hybridep.traffic(plan.meta, row_bytes, rank=0)
        peers = [set(row) - {0} for row in (ids // (experts // size)).tolist()]
        slots = Counter((ids // (experts // size)).view(-1).tolist())
        assert wire == row_bytes * sum(map(len, peers))
        assert logical == row_bytes * (sum(slots.values()) - slots[0])
        local = experts // size
        some = 1 - math.comb(experts - local, top_k) / math.comb(experts, top_k)
        assert (size - 1) * some == pytest.approx(deduped, abs=0.005)
        assert wire / tokens / row_bytes == pytest.approx((size - 1) * some, rel=0.01)
        assert logical / tokens / row_bytes == pytest.approx(flat, rel=0.01)
    assert deduped / flat < 0.67


# --- errors


def test_bad_arguments_are_named() -> None:
    ids = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"ep.backend=hybridep: .* no exact mode. Set ep.padded"):
        ep.plan(ids, E, ep.Exchange(backend="hybridep"))
    with pytest.raises(ValueError, match=r"ep.backend=alltoall keeps scores at the origin: .*hyb"):
        ep.plan(ids, E, ep.Exchange(padded=True, reduce="rank"))
    with pytest.raises(ValueError, match=r"ep.backend=minimal_async keeps scores at the origin"):
        ep.plan(ids, E, ep.Exchange(backend="minimal_async", padded=True, scores_at="expert"))
    with pytest.raises(ValueError, match=r"ep.reduce: 'tree' is unknown; one of slot, rank"):
        ep.Exchange(reduce="tree")
