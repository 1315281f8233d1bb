"""Rows that do not fit: every rank decides the same, and the decision leaves the trace it should.

Oracles: the state before the step, bitwise; a run whose capacity was large enough from the start,
bitwise; rows counted by hand.  (Field reports C1, C2, C3, C5.)
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from captures import fake_capture
from small_runs import ROWS, SEQ_LEN, run_steps, small_config, small_world, snapshot, unequal

from interlace import ep
from interlace.model.batch import Batch
from interlace.train import arms as arms_module
from interlace.train import overflow
from interlace.train.arms import ARMS
from interlace.train.config import Config
from interlace.train.engine import Engine, build_engine, compute
from interlace.train.evaluate import evaluate
from interlace.train.loop import train
from interlace.train.stopping import StepRefused
from interlace.train.world import World

MICROBATCHES = 2
TOKENS = ROWS * SEQ_LEN // MICROBATCHES  # of one microbatch of one process


def config_of(policy: str, factor: float | None, **changes: object) -> Config:
    usual = {
        "parallelism__expert_parallel_degree": 2,
        "training__microbatches": MICROBATCHES,
        "training__mode": "traced",
        "ep__padded": True,
    }
    own = {"ep__capacity_factor": factor, "ep__overflow": policy}
    return small_config(**usual | own | changes)


def loopback(degree: int = 2) -> World:
    """One process for several ranks that mirror it: an exchange with a capacity."""
    return replace(small_world(0, 1, degree), loopback=True)


def engine_of(config: Config, arm: str = "eager") -> Engine:
    torch.set_num_threads(1)
    return build_engine(config, loopback(config.parallelism.expert_parallel_degree), ARMS[arm])


def noisy(engine: Engine) -> Engine:
    """The same engine, whose every run draws a random number, as dropout would."""
    plain = engine.forward_backward

    def run(batch):
        result = plain(batch)
        noise = 1 + 0.1 * torch.rand(())
        return replace(result, grads={n: g * noise for n, g in result.grads.items()})

    return replace(engine, forward_backward=run)


# --- how much room --------------------------------------------------------------------------------


def test_room_is_what_was_needed_with_slack_and_never_more_than_the_worst_case() -> None:
    exchange = ep.Exchange("x", 2, 0, padded=True, capacity_factor=0.5)
    load = overflow.Load(num_tokens=48, top_k=2, num_experts=8)
    assert load.rows(exchange) == 24
    assert overflow.enough(exchange, 8, load) == 0.75  # 32 of 48, times 1.1: 0.733
    assert overflow.enough(exchange, 58, load) is None  # 2.0 would be every row there can be
    for missing in range(1, 73):
        factor = overflow.enough(exchange, missing, load)
        rows = load.rows(replace(exchange, capacity_factor=factor))
        assert 24 + missing <= rows <= max(96, (24 + missing) * overflow.SLACK + 6)


def test_no_more_room_than_tokens_exist() -> None:
    """Field report C2: 2 tokens, 8 experts, capacity factor 4, drop."""
    exchange = ep.Exchange("mirror", 2, 0, padded=True, capacity_factor=4.0)
    ep.register_group(ep.Group("mirror", 2, 0, "loopback"))
    load = overflow.Load(num_tokens=2, top_k=2, num_experts=8)
    assert load.rows(exchange) == 4
    plan = ep.plan(torch.tensor([[0, 1], [2, 3]]), 8, exchange)
    assert int(plan.overflow) == 0
    assert int(plan.live) == 4
    assert overflow.enough(replace(exchange, capacity_factor=1.0), 1, load) is None


# --- one process ----------------------------------------------------------------------------------


def test_error_is_the_default_and_says_what_would_do() -> None:
    assert small_config().ep.overflow == "error"
    engine = engine_of(config_of("error", 1.0))
    before = snapshot(engine)
    with pytest.raises(StepRefused, match=r"no rank has changed a weight\. Use ep\.capacity") as e:
        run_steps(engine, 1)
    assert unequal(snapshot(engine), before) == []
    factor = float(str(e.value).partition("Use ep.capacity_factor=")[2].split()[0])
    run_steps(engine_of(config_of("error", factor)), 1)  # and it does


def test_skip_leaves_no_trace_but_the_count(capsys: pytest.CaptureFixture[str]) -> None:
    """Weights, moments, expert bias, load, schedule: bitwise as before the step."""
    engine = engine_of(config_of("skip", 1.0))
    before, lr = snapshot(engine), engine.optimizer.param_groups[0]["lr"]
    run_steps(engine, 2)
    assert unequal(snapshot(engine), before) == [
        "progress.skipped", "progress.skipped_in_a_row", "progress.step", "progress.tokens_seen",
    ]  # fmt: skip
    assert (engine.progress.updates, engine.progress.skipped) == (0, 2)
    assert engine.optimizer.param_groups[0]["lr"] == lr
    said = capsys.readouterr().err
    assert "step 1: a rank had " in said
    assert "untouched; skipped" in said


def test_skip_goes_on_as_if_the_batch_had_not_been() -> None:
    """Oracle: a run with room that is never given the batch which overflows."""
    config = config_of("skip", 1.0)
    engine, roomy = engine_of(config), engine_of(config_of("error", None))
    skipped = []
    for step in range(5):
        factor = None if step in (0, 3) else 1.0  # room in some steps: the others overflow
        set_factor(engine, factor)
        count = engine.progress.skipped
        run_steps(engine, 1)
        if engine.progress.skipped > count:
            skipped.append(step)
            roomy.progress.step += 1
        else:
            run_steps(roomy, 1)
    assert skipped == [1, 2, 4]
    own = {"progress.skipped", "progress.skipped_in_a_row", "progress.tokens_seen"}
    assert set(unequal(snapshot(engine), snapshot(roomy))) <= own


def set_factor(engine: Engine, factor: float | None) -> None:
    exchange = replace(overflow.exchange_of(engine.model), capacity_factor=factor)
    overflow.set_exchange(engine.model, exchange)
    engine.runner.rebuild()


def test_skipping_has_an_end() -> None:
    engine = engine_of(config_of("skip", 1.0, training__max_skipped_steps=2))
    run_steps(engine, 1)
    with pytest.raises(StepRefused, match=r"last of training\.max_skipped_steps=2.*overflow=redo"):
        run_steps(engine, 1)


@pytest.mark.parametrize(
    "arm",
    ["eager", "control", pytest.param("captured", marks=pytest.mark.slow),
     pytest.param("chunk-captured", marks=pytest.mark.slow)],
)  # fmt: skip
def test_redo_is_the_run_that_had_room_from_the_start(
    arm: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four steps, random numbers drawn in each: weights, moments, bias, counts, losses, and where
    the random numbers stand.  The captured arms with a stand-in for the graph."""
    monkeypatch.setattr(arms_module, "capture_step", fake_capture)
    small = noisy(engine_of(config_of("redo", 1.0), arm))
    torch.manual_seed(7)
    losses, state = run_steps(small, 4), torch.get_rng_state()
    factor = overflow.exchange_of(small.model).capacity_factor
    said = capsys.readouterr().err
    assert "done again with room for " in said
    large = noisy(engine_of(config_of("error", factor), arm))
    torch.manual_seed(7)
    assert run_steps(large, 4) == losses
    assert torch.equal(torch.get_rng_state(), state)
    assert unequal(snapshot(small), snapshot(large)) == []
    assert (small.progress.step, small.progress.updates, small.progress.skipped) == (4, 4, 0)
    assert capsys.readouterr().err == ""


def test_overflow_while_warming_up_is_nobody_s_business(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field report C1: warm-up and capture run on zeros, which all go to the same experts."""
    seen = []

    def watched(run, batch, **more):
        captured = fake_capture(run, batch, **more)
        seen.append(int(captured.result.extra["overflow"].max()))
        return captured

    monkeypatch.setattr(arms_module, "capture_step", watched)
    engine = engine_of(config_of("error", 1.9, model__num_experts=8, model__top_k=1), "captured")
    assert seen[0] > 0
    run_steps(engine, 1)
    assert engine.progress.updates == 1


def rows_by_hand(config: Config, step: int) -> int:
    """Rows of the only MoE layer beyond the room of each peer, over all microbatches of a step."""
    engine = engine_of(replace(config, ep=replace(config.ep, capacity_factor=None)), "eager")
    t = config.training
    batch = engine.data.rows(
        step, global_batch_rows=t.local_batch_size, first=0, count=t.local_batch_size
    )
    room = overflow.Load(TOKENS, config.model.top_k, config.model.num_experts).rows(
        replace(overflow.exchange_of(engine.model), capacity_factor=config.ep.capacity_factor)
    )
    total = 0
    for part in zip(*(x.split(ROWS // MICROBATCHES) for x in batch.tensors()), strict=True):
        with torch.no_grad():
            _, routed = engine.model(part[0], part[2], part[3])
        degree = config.parallelism.expert_parallel_degree
        for peer in routed.counts_LE[0].view(degree, -1).sum(-1).tolist():
            total += max(0, peer - room)
    return total


def test_drop_counts_every_row_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the routing of the first step, counted by hand; metrics and last line agree."""
    config = config_of("drop", 1.0, training__steps=3, metrics__folder=str(tmp_path))
    expected = rows_by_hand(config, 0)
    assert expected > 0
    assert compute(engine_of(config, "eager"), 0).cut_L.tolist() == [expected]
    train(config, loopback())
    records = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    cut = [r["ep/cut_rows"] for r in records]
    assert cut[0] == [expected]
    total = sum(c[0] for c in cut)
    said = capsys.readouterr().out
    assert f"note: step 1 ran without {expected} rows that did not fit (ep.overflow=drop)" in said
    share = total / (3 * ROWS * SEQ_LEN * config.model.top_k)
    assert f"rows cut by MoE layer (ep.overflow=drop): {total}, at most {share:.2%} of a" in said


@pytest.mark.parametrize("backend", ["alltoall", "minimal_async"])
def test_rows_for_several_full_peers_all_count(backend: str) -> None:
    config = config_of("drop", 1.0, parallelism__expert_parallel_degree=4, ep__backend=backend)
    assert compute(engine_of(config), 0).cut_L.tolist() == [rows_by_hand(config, 0)]


def test_rows_that_were_cut_count_as_zero() -> None:
    """With no room at all to speak of, what the experts add is next to nothing, never garbage."""
    config = config_of("drop", 1e-6)
    engine = engine_of(config)
    outcome = compute(engine, 0)
    rows = MICROBATCHES * TOKENS * config.model.top_k
    assert 0 < int(outcome.cut_L) < rows
    assert all(g.isfinite().all() for g in outcome.grads.values())


def test_without_drop_nothing_is_cut_and_nothing_counted() -> None:
    outcome = compute(engine_of(config_of("error", None)), 0)
    assert outcome.cut_L is None
    assert compute(engine_of(config_of("drop", None)), 0).cut_L.tolist() == [0]


def test_an_evaluation_has_room_for_everything(tmp_path: Path) -> None:
    """In the loop it runs with the exact exchange, here after a step that was left out; its loss is
    that of the same weights without a capacity."""
    changes = {"evaluation__interval": 1, "evaluation__batches": 2}
    own = {"training__steps": 1, "training__mode": "eager", "metrics__folder": str(tmp_path)}
    train(config_of("skip", 1.0, **changes, **own), loopback())
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record["skipped_steps"] == 1
    roomy = engine_of(config_of("error", None, **changes))
    assert record["evaluation/loss"] == evaluate(roomy, roomy.data, held_out=True).loss
    engine = engine_of(config_of("error", 1.0, evaluation__interval=1))
    before = overflow.exchange_of(engine.model)
    with pytest.raises(StepRefused, match=r"evaluation: .* rows did not fit ep.capacity_factor"):
        evaluate(engine, engine.data, held_out=True)  # by itself it says what it lacks
    with overflow.room_for_all(engine.model):
        evaluate(engine, engine.data, held_out=True)
    assert overflow.exchange_of(engine.model) == before


# --- two ranks ------------------------------------------------------------------------------------


class OneTokenEverywhere:
    """Data in which one microbatch of one rank in one step is a single token, over and over."""

    def __init__(self, data, token: int, step: int, rank: int) -> None:
        self.data, self.token, self.step, self.rank = data, token, step, rank

    def rows(self, step: int, *, global_batch_rows: int, first: int, count: int) -> Batch:
        batch = self.data.rows(step, global_batch_rows=global_batch_rows, first=first, count=count)
        if step != self.step or first != count * self.rank:
            return batch
        tokens = batch.tokens_BS.clone()
        tokens[count // MICROBATCHES :] = self.token
        return replace(batch, tokens_BS=tokens)


def token_for_one_rank(config: Config) -> int:
    """A token whose experts all live on one of two ranks, as the seed has made them."""
    model = engine_of(replace(config, ep=replace(config.ep, capacity_factor=None)), "eager").model
    positions = torch.arange(SEQ_LEN).view(1, -1)
    bounds = torch.tensor([[0, *[SEQ_LEN] * config.data.max_documents]], dtype=torch.int32)
    for token in range(config.model.vocab_size):
        with torch.no_grad():
            _, routed = model(torch.full((1, SEQ_LEN), token), positions, bounds)
        if 0 in routed.counts_LE[0].view(2, -1).sum(-1).tolist():
            return token
    raise AssertionError("no such token")


def _one_rank_overflows(
    rank: int, size: int, policy: str, factor: float | None, backend: str = "alltoall"
):
    """Rank 1 overflows in its second microbatch of step 2, nobody else ever."""
    config = config_of(policy, factor, optimizer__lr=1e-6, ep__backend=backend)
    token = token_for_one_rank(config)
    t = replace(config.training, local_batch_size=ROWS // size)
    arm = ARMS["eager" if backend == "alltoall" else "control"]
    engine = build_engine(replace(config, training=t), small_world(rank, size, 2), arm)
    plain, seen = engine.forward_backward, []

    def watched(batch):
        result = plain(batch)
        seen.append(int(result.extra["overflow"].max()) > 0)
        return result

    data = OneTokenEverywhere(engine.data, token, 1, 1)
    engine = replace(engine, data=data, forward_backward=watched)
    text, p = "no error", engine.progress
    try:
        run_steps(engine, 3)
    except StepRefused as error:
        text = str(error)
    factor = overflow.exchange_of(engine.model).capacity_factor
    return seen, (p.step, p.updates, p.skipped), factor, snapshot(engine), text


def test_all_ranks_skip_what_one_could_not_hold(two_ranks) -> None:
    """Field report C3."""
    results = two_ranks.run(_one_rank_overflows, "skip", 1.75)
    assert [r[0] for r in results] == [[False, False, False], [False, True, False]]
    assert [r[1] for r in results] == [(3, 2, 1)] * 2
    for name, mine in results[0][3].items():
        if "experts" not in name:
            assert torch.equal(mine, results[1][3][name]), name


@pytest.mark.parametrize(
    "backend", ["alltoall", pytest.param("minimal_async", marks=pytest.mark.slow)]
)
def test_all_ranks_redo_what_one_could_not_hold(two_ranks, backend: str) -> None:
    """Field report C3, against a run that had the room: bitwise, counts included."""
    results = two_ranks.run(_one_rank_overflows, "redo", 1.75, backend)
    assert [r[0] for r in results] == [[False] * 4, [False, True, False, False]]
    assert [r[1] for r in results] == [(3, 3, 0)] * 2
    factors = {r[2] for r in results}
    assert len(factors) == 1
    roomy = two_ranks.run(_one_rank_overflows, "error", factors.pop(), backend)
    for mine, theirs in zip(results, roomy, strict=True):
        assert unequal(mine[3], theirs[3]) == []
        assert theirs[0] == [False] * 3


def test_the_error_is_the_same_on_every_rank(two_ranks) -> None:
    results = two_ranks.run(_one_rank_overflows, "error", 1.75)
    assert [r[1] for r in results] == [(1, 1, 0)] * 2
    assert results[0][4] == results[1][4]
    text = "a rank had 9 rows too many: for one peer ep.capacity_factor=1.75 has room for 63; no "
    assert text in results[0][4]
