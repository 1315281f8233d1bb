"""The hybridep_nvidia backend with a stand-in for its package, on two processes.

Oracles: our own ``hybridep`` with ``reduce="rank"``, bitwise where sums have the same terms and
order (scores that are powers of two, two experts a token or ids in order); float64 within derived
bounds elsewhere.  The package itself has not been run.
"""

from __future__ import annotations

import itertools
import sys
import types
from contextlib import contextmanager

import fake_deep_ep
import pytest
import torch
import torch.distributed as dist
from small_runs import run_steps, small_config, small_engine, snapshot, unequal
from torch import Tensor

from interlace import ep
from interlace.ep import budget, nvidia_buffers, nvidia_hybridep, pending, windows
from interlace.train import doctor
from interlace.train.config_check import check
from interlace.train.config_read import load_config
from interlace.train.trace_command import trace_on_meta

E, H = 8, 16
EPS = torch.finfo(torch.bfloat16).eps  # a rounding is half of it
NVIDIA = {"backend": "hybridep_nvidia", "reduce": "rank", "padded": True}
OURS = {**NVIDIA, "backend": "hybridep"}
ROUTINGS = ["random", "all-to-one", "last", "empty-rank"]
_ep = torch.ops.ep


@contextmanager
def _stand_in():
    """The stand-in as the package, on a CPU; nothing of it stays."""
    fake_deep_ep.start_anew()
    sys.modules["deep_ep"] = fake_deep_ep
    nvidia_hybridep.DEVICES = ("cuda", "cpu")
    try:
        with fake_deep_ep.watch(pending):
            yield
    finally:
        nvidia_hybridep.DEVICES = ("cuda",)
        nvidia_buffers.close_buffers()
        del sys.modules["deep_ep"]


@contextmanager
def _group(rank: int, size: int):
    ep.register_group(ep.Group("ep", size, rank, "process", dist.group.WORLD))
    try:
        with _stand_in():
            yield {"group": "ep", "size": size, "rank": rank}
    finally:
        windows.close_windows("ep")
        ep.drop_group("ep")


def _problem(tokens: int, top_k: int, seed: int, routing: str, *, exact: bool = True):
    """x, ids, scores, factors of the experts, gradient; exact: products with scores are."""
    gen = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, E, generator=gen).argsort(1)[:, :top_k]
    if routing == "all-to-one":
        ids = torch.arange(top_k).expand(tokens, -1).contiguous()
    elif routing == "last":
        ids = torch.arange(E - top_k, E).expand(tokens, -1).contiguous()
    elif routing == "empty-rank":
        ids = torch.rand(tokens, E // 2, generator=gen).argsort(1)[:, :top_k] + E // 2
    x, g = (torch.randn(tokens, H, generator=gen).bfloat16() for _ in range(2))
    scores = torch.rand(tokens, top_k, generator=gen)
    if exact:
        scores = 2.0 ** -torch.randint(0, 5, (tokens, top_k), generator=gen)
    return x, ids, scores, torch.linspace(0.5, 2.0, E).bfloat16(), g


def _run(problem, exchange: ep.Exchange) -> tuple[list[Tensor], ep.Plan]:
    """Live rows, output and gradients of x and scores; dead rows are NaN on the way."""
    x, ids, scores, factors, g = problem
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    plan = ep.plan(ids, E, exchange)
    rows = ep.dispatch(x, plan)
    local = E // exchange.size
    mine = factors[exchange.rank * local : (exchange.rank + 1) * local]
    f = torch.full((rows.shape[0], 1), float("nan"), dtype=rows.dtype)
    f[: int(plan.live), 0] = torch.repeat_interleave(mine, plan.counts)
    out = ep.combine(rows * f, scores, plan)
    out.backward(g)
    assert pending.num_in_flight() == 0
    return [rows[: int(plan.live)].detach(), out.detach(), x.grad, scores.grad], plan


def _equals_ours(rank: int, size: int, tokens, top_k: int, routing: str, most=None) -> None:
    with _group(rank, size) as where:
        problem = _problem(tokens[rank], top_k, 7 + rank, routing)
        if top_k > 2:
            problem = (problem[0], problem[1].sort(1).values, *problem[2:])
        where["max_tokens"] = most
        (got, plan), (wanted, ours) = (
            _run(problem, ep.Exchange(**how, **where)) for how in (NVIDIA, OURS)
        )
        for name in ("counts", "offsets", "live", "overflow"):
            assert torch.equal(getattr(plan, name), getattr(ours, name)), name
        for name, a, b in zip(("rows", "out", "x", "scores"), got, wanted, strict=True):
            assert torch.equal(a, b), name
        assert [b.hidden_dim for b in fake_deep_ep.made] == [H, nvidia_hybridep.SCORE_WIDTH]
        # dispatch, scores, combine; then the gradients of output, scores and rows, all by handle
        assert fake_deep_ep.calls == [
            (0, "dispatch", False), (1, "dispatch", False), (0, "combine", True),
            (0, "dispatch", True), (1, "combine", True), (0, "combine", True),
        ]  # fmt: skip


@pytest.mark.parametrize(("routing", "top_k"), list(itertools.product(ROUTINGS, [1, 2, 4])))
def test_same_bits_as_ours(two_ranks, routing: str, top_k: int) -> None:
    two_ranks.run(_equals_ours, [6, 6], top_k, routing)


def test_one_token(two_ranks) -> None:
    two_ranks.run(_equals_ours, [1, 1], 2, "random")


@pytest.mark.parametrize("tokens", [[5, 8], [0, 3], [8, 0]])
def test_unequal_tokens_are_padded(two_ranks, tokens: list[int]) -> None:
    two_ranks.run(_equals_ours, tokens, 2, "random", 8)


def test_four_ranks(four_ranks) -> None:
    four_ranks.run(_equals_ours, [5] * 4, 2, "random")


def _near_fp64(rank: int, size: int, exchange: dict) -> None:
    """Each bound: half an EPS of the sum of magnitudes for each rounding, and a little of it.

    out: product, rank, sum.  x: score * gradient, its product in the expert, rank, sum.  scores: a
    float32 dot of H products.
    """
    with _group(rank, size) as where:
        problem = x, ids, scores, factors, g = _problem(9, 4, rank, "random", exact=False)
        (_, out, gx, gs), _ = _run(problem, ep.Exchange(**exchange, **where))
        f = factors[ids][:, :, None]
        y, s, g = (x[:, None] * f).double(), scores.double()[:, :, None], g.double()[:, None]
        for got, terms, roundings in ((out, s * y, 3), (gx, s * g * f.double(), 4)):
            bound = 1.05 * roundings * EPS / 2 * terms.abs().sum(1)
            assert ((got.double() - terms.sum(1)).abs() <= bound).all()
        bound = H * 2.0**-24 * (y * g).abs().sum(2)
        assert ((gs - (y * g).sum(2)).abs() <= bound).all()


def test_any_scores_are_near_fp64(two_ranks) -> None:
    two_ranks.run(_near_fp64, NVIDIA)


def _overflow(rank: int, size: int) -> None:
    """24 slots each, all for rank 0, which has 24 rows: the highest expert goes empty."""
    with _group(rank, size) as where:
        problem = x, _, scores, factors, g = _problem(12, 2, rank, "all-to-one")
        ex = ep.Exchange(**NVIDIA, **where, capacity_factor=1.0)
        (rows, out, gx, gs), plan = _run(problem, ex)
        flags = [t.handles[H][-1].tolist() for t in nvidia_buffers._tickets.values()]
        counts = [24, 0, 0, 0] if rank == 0 else [0, 0, 0, 0]
        assert plan.counts.tolist() == counts
        assert plan.offsets.tolist() == ([0, 24, 24, 24, 24] if rank == 0 else [0] * 5)
        assert plan.overflow.tolist() == ([12] if rank == 0 else [0])  # a peer
        assert flags == [plan.overflow.clamp(max=1).tolist()]
        assert torch.equal(out, x * factors[0] * scores[:, :1].bfloat16())
        assert torch.equal(gx, g * scores[:, :1].bfloat16() * factors[0])
        assert gs[:, 1].tolist() == [0.0] * 12
        dots = ((x * factors[0]).float() * g.float()).sum(1)
        torch.testing.assert_close(gs[:, 0], dots, rtol=1e-5, atol=1e-5)
        assert not rows.isnan().any()


def test_overflow_is_flagged_and_cuts_the_highest_experts(two_ranks) -> None:
    two_ranks.run(_overflow)


def _one_too_many(rank: int, size: int) -> None:
    """A row more than the plan gives out: the package delivers it, and nothing comes of it."""
    with _group(rank, size) as where:
        x, ids, scores, factors, g = _problem(4, 2, rank, "all-to-one")
        ids[-1] = torch.tensor([0, 4 + rank]) if rank else torch.tensor([4, 5])
        ids[:-1, 1] = torch.tensor([1, 5, 6])  # 5 + 3 rows
        if rank:
            ids[0] = torch.tensor([1, 2])
        ex = ep.Exchange(**NVIDIA, **where, capacity_factor=1.0)
        (_, out, gx, gs), plan = _run((x, ids, scores, factors, g), ex)
        assert plan.overflow.tolist() == ([1] if rank == 0 else [0])
        assert not any(t.isnan().any() for t in (out, gx, gs))


def test_a_cut_row_that_was_delivered_counts_for_nothing(two_ranks) -> None:
    two_ranks.run(_one_too_many)


def _exact_fit(rank: int, size: int, lost: int) -> list[bool]:
    """All rows of both ranks for rank 0; whether its first two are NaN."""
    with _group(rank, size) as where:
        fake_deep_ep.lost_rows = lost
        (rows, *_), plan = _run(_problem(6, 2, rank, "all-to-one"), ep.Exchange(**NVIDIA, **where))
        assert plan.overflow.tolist() == [0]
        assert plan.live.tolist() == [24 if rank == 0 else 0]
        return rows.isnan().any(1).tolist()[:2]


def test_an_exact_fit_fits_where_the_package_says_otherwise(two_ranks) -> None:
    assert two_ranks.run(_exact_fit, 1) == [[False, False], []]


def test_rows_that_the_package_loses_are_not_lost_in_silence(two_ranks) -> None:
    assert two_ranks.run(_exact_fit, 2) == [[True, False], []]


def _in_flight(rank: int, size: int) -> None:
    with _group(rank, size) as where:
        x, ids, *_ = _problem(6, 2, rank, "random")
        ex = ep.Exchange(**NVIDIA, **where)
        plans = [ep.plan(ids, E, ex) for _ in range(3)]

        def launch(i: int) -> tuple[Tensor, Tensor]:
            p = plans[i]
            name = "hybridep_nvidia"
            return _ep.dispatch_launch(i * x, None, p.meta, None, p.out_rows, -1, "ep", name)

        first, second = launch(1), launch(2)
        assert [c[0] for c in fake_deep_ep.calls] == [0, 1]
        one = _ep.wait(*first)
        third = launch(0)  # the first is free again
        two, none = _ep.wait(*second), _ep.wait(*third)
        assert [c[0] for c in fake_deep_ep.calls] == [0, 1, 0]
        live = int(plans[0].live)
        assert torch.equal(two[:live], 2 * one[:live])
        assert not none[:live].any()
        abandoned = launch(1)  # a step that is cut short leaves no buffer taken
        pending.forget_all()
        fake_deep_ep._flying.clear()
        assert _ep.wait(*launch(1)) is not None
        assert abandoned[0].shape == (plans[0].out_rows, H)
        assert len(fake_deep_ep.made) == 2
        held = fake_deep_ep.made[0]
        launch(1)
        with pytest.raises(RuntimeError, match="share a buffer and overlap"):
            held.combine_with_unpermute(hidden=one)
        pending.forget_all()
        fake_deep_ep._flying.clear()


def test_two_exchanges_in_flight_use_two_buffers(two_ranks) -> None:
    two_ranks.run(_in_flight)


def _budget(rank: int, size: int) -> None:
    with _group(rank, size) as where:
        problem, ex = _problem(4, 2, rank, "random"), ep.Exchange(**NVIDIA, **where)
        _run(problem, ex)
        with budget.bounded(7):
            _run(problem, ex)
            _run(problem, ex)
        assert [b.sms for b in fake_deep_ep.made] == [(None, None)] * 2 + [(7, 7)] * 2


def test_the_launch_budget_is_passed_on(two_ranks) -> None:
    two_ranks.run(_budget)


def _refusals(rank: int, size: int) -> None:
    with _group(rank, size) as where:
        x, ids, scores, *_ = _problem(4, 2, rank, "random")
        plan = ep.plan(ids, E, ep.Exchange(**NVIDIA, **where))
        for rows, size_ in ((x[:, :8], 16), (x.float(), 64)):
            with pytest.raises(ValueError, match=rf"{size_} bytes; expected bfloat16 and a mult"):
                ep.dispatch(rows, plan)
        with pytest.raises(ValueError, match="a combine of rows of 16 before any dispatch"):
            ep.combine(torch.zeros(plan.out_rows, H).bfloat16(), scores, plan)
        slot = ep.plan(ids, E, ep.Exchange(**{**NVIDIA, "reduce": "slot"}, **where))
        with pytest.raises(ValueError, match=r"brings sums of a rank's rows back .*set ep.reduce"):
            ep.combine(x.new_zeros(slot.out_rows, H), scores, slot)
        with pytest.raises(ValueError, match="no exact mode"):
            ep.plan(ids, E, ep.Exchange(**{**NVIDIA, "padded": False}, **where))
        meta = [*plan.meta[:-1], torch.tensor([10**9])]
        with pytest.raises(ValueError, match="plan 1000000000 is gone"):
            _ep.dispatch_launch(x, None, meta, None, 8, -1, "ep", "hybridep_nvidia")
        cuda, seen = torch.cuda, (torch.cuda.is_available, torch.cuda.is_current_stream_capturing)
        cuda.is_available = cuda.is_current_stream_capturing = lambda: True
        nvidia_buffers.close_buffers()
        try:
            with pytest.raises(ValueError, match="none can be made under capture; run the same"):
                ep.dispatch(x, plan)
        finally:
            cuda.is_available, cuda.is_current_stream_capturing = seen
        real = fake_deep_ep.HybridEPBuffer._handle
        fake_deep_ep.HybridEPBuffer._handle = lambda *args: real(*args)[:10]
        try:
            with pytest.raises(ValueError, match="ends in Config, not in an overflow flag"):
                ep.dispatch(x, plan)
        finally:
            fake_deep_ep.HybridEPBuffer._handle = real


def test_what_it_cannot_do_is_refused(two_ranks) -> None:
    two_ranks.run(_refusals)


def _handles_live(rank: int, size: int) -> list[int]:
    """Handles alive while a plan is held by the graph of autograd alone, and after it."""
    with _group(rank, size) as where:
        x, ids, *_ = _problem(4, 2, rank, "random")
        x.requires_grad_()
        before = len(nvidia_buffers._tickets)
        rows = ep.dispatch(x, ep.plan(ids, E, ep.Exchange(**NVIDIA, **where)))
        during = len(nvidia_buffers._tickets) - before
        rows[:1].sum().backward()
        del rows
        return [during, len(nvidia_buffers._tickets) - before]


def test_handles_live_as_long_as_their_plan(two_ranks) -> None:
    assert two_ranks.run(_handles_live) == [[1, 0]] * 2


@pytest.mark.parametrize("kind", ["loopback", "single", "abstract", "process"])
def test_it_needs_ranks_on_cuda(kind: str) -> None:
    where = ep.Group("lonely", 1 if kind == "single" else 2, 0, kind, object())
    ep.register_group(where)
    try:
        exchange = ep.Exchange("lonely", where.size, 0, **NVIDIA)
        with pytest.raises(ValueError, match=rf"of kind {kind} .* on cpu; expected at least two"):
            ep.plan(torch.zeros(2, 1, dtype=torch.int64), E, exchange)
    finally:
        ep.drop_group("lonely")


@pytest.mark.parametrize("module", [None, types.ModuleType("deep_ep")])
def test_the_absent_package_is_named(monkeypatch: pytest.MonkeyPatch, module) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    with pytest.raises(ValueError, match=r"needs the package deep_ep with HybridEPBuffer .*build"):
        nvidia_buffers.hybrid_ep_buffer()


# --- settings, doctor, graphs

FLAGS = ["--ep.backend", "hybridep_nvidia", "--ep.padded", "--ep.reduce", "rank"]
FLAGS += ["--training.dtype", "bfloat16", "--training.device", "cuda"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--ep.padded", "false"], "ep.backend=hybridep_nvidia needs ep.padded=true"),
        (["--ep.reduce", "slot"], "ep.backend=hybridep_nvidia needs ep.reduce=rank; got slot"),
        (["--training.dtype", "float32"], "needs training.dtype=bfloat16; got float32"),
        (["--ep.transport", "loopback"], "needs ep.transport=auto; got loopback"),
        (["--training.device", "cpu"], "two processes with a GPU each; got training.device=cpu"),
        (["--parallelism.expert_parallel_degree", "1"], "expert_parallel_degree=1. Use ep.backend"),
        ([], "needs the package deep_ep"),
    ],
)
def test_settings_that_cannot_run(
    more: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    config = load_config(["dsv3-tiny", *FLAGS])
    for flag, value in zip(more[::2], more[1::2], strict=True):
        config = load_config(["dsv3-tiny", *_with(flag, value)])
    with pytest.raises(ValueError, match=message):
        check(config, 1 if "loopback" in more else 2)


def _with(flag: str, value: str) -> list[str]:
    if flag == "--ep.padded":
        return [f for f in FLAGS if f != flag]
    if flag in FLAGS:
        return [*FLAGS[: FLAGS.index(flag) + 1], value, *FLAGS[FLAGS.index(flag) + 2 :]]
    return [*FLAGS, flag, value]


def test_settings_that_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", fake_deep_ep)
    check(load_config(["dsv3-tiny", *FLAGS]), 2)


def test_doctor_says_whether_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def line() -> doctor.Finding:
        return next(f for f in doctor.examine() if f.name == "DeepEP HybridEPBuffer")

    monkeypatch.setitem(sys.modules, "deep_ep", None)
    assert (line().ok, line().value) == (False, "absent")
    assert "for ep.backend=hybridep_nvidia" in line().why
    monkeypatch.setitem(sys.modules, "deep_ep", fake_deep_ep)
    assert (line().ok, line().value) == (True, "present")
    assert "for ep.backend=hybridep_nvidia" in line().why


BF16 = {"training__dtype": "bfloat16", "parallelism__expert_parallel_degree": 2}
SETTINGS = {**BF16, "ep__padded": True, "ep__reduce": "rank"}


@pytest.mark.slow
def test_a_step_is_traced_without_peers_or_package() -> None:
    """As many exchanges of each kind as ours has, and shapes of its own."""
    kinds = []
    for backend in ("hybridep", "hybridep_nvidia"):
        config = small_config("qwen3-tiny", **SETTINGS, ep__backend=backend)
        nodes = trace_on_meta(config).gm.graph.nodes
        kinds.append([str(n.target) for n in nodes if str(n.target).startswith("ep.")])
        rows = {n.meta["val"][0].shape[0] for n in nodes if n.target is _ep.stage_launch.default}
    assert kinds[0] == kinds[1]
    slots = 2 * config.training.local_batch_size * config.training.seq_len * config.model.top_k
    assert rows == {slots + 1}


def _train(rank: int, size: int, arm: str):
    changes = {**SETTINGS, "ep__backend": "hybridep_nvidia", "data__source": "stdlib"}
    config = small_config("qwen3-tiny", **changes, overlap__chunks=2 if "chunk" in arm else 1)
    with _stand_in():
        engine = small_engine(config, rank, size, arm)
        return run_steps(engine, 3), snapshot(engine), len(fake_deep_ep.made)


@pytest.mark.slow
@pytest.mark.parametrize("arms", [("eager", "scheduled"), ("chunk-eager", "chunk-scheduled")])
def test_graphs_train_as_plain_pytorch_does(two_ranks, arms: tuple[str, str]) -> None:
    """Oracle: the same steps in plain PyTorch, bitwise; with chunks, exchanges overlap."""
    plain, graph = (two_ranks.run(_train, arm, timeout=200) for arm in arms)
    for (losses, state, _), (wanted, wanted_state, _) in zip(graph, plain, strict=True):
        assert losses == wanted
        assert not unequal(state, wanted_state)
        assert losses[-1] < losses[0]
    assert plain[0][2] == 2
    assert graph[0][2] > 2 or "chunk" not in arms[0]
