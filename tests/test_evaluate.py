"""Evaluation leaves no trace, and measures what it says (field report F6).

Oracles: the run without evaluations, bitwise; one process for several; the training loss itself.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import (
    ROWS,
    documents_of_three,
    run_steps,
    small_config,
    small_engine,
    small_world,
    snapshot,
    unequal,
)

from interlace.train.config import Config
from interlace.train.data_open import open_evaluation_data
from interlace.train.engine import compute
from interlace.train.evaluate import evaluate
from interlace.train.loop import train


@pytest.mark.parametrize("preset", ["dsv3-tiny", "qwen3-tiny"])
def test_no_trace(preset: str) -> None:
    """Train 2, evaluate, train 1: weights, moments, bias, counters, random numbers, losses."""
    config = small_config(preset, evaluation__interval=1, evaluation__batches=2)
    engine, plain = small_engine(config), small_engine(config)
    run_steps(engine, 2)
    run_steps(plain, 2)
    before, state = snapshot(engine), torch.get_rng_state()
    found = evaluate(engine, engine.data, held_out=True)
    assert unequal(snapshot(engine), before) == []
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in engine.model.parameters())
    assert run_steps(engine, 1) == run_steps(plain, 1)
    assert unequal(snapshot(engine), snapshot(plain)) == []
    assert found.num_tokens == 2 * ROWS * 12


def test_before_the_first_step() -> None:
    config = small_config(evaluation__interval=1, model__balance_loss_weight=0.1)
    engine = small_engine(config)
    first = evaluate(engine, engine.data, held_out=True)
    assert first == evaluate(engine, engine.data, held_out=True)  # the same rows each time
    run_steps(engine, 6)
    assert evaluate(engine, engine.data, held_out=True).loss != first.loss


def test_the_loss_is_that_of_a_training_step(tmp_path: Path) -> None:
    """On the rows of step 0, padding and ignored labels included, before any update."""
    source = documents_of_three(tmp_path / "ids.npy")
    config = small_config(
        data__source=str(source), data__separator=0, data__max_documents=3,
        evaluation__source=str(source), evaluation__interval=1, evaluation__batches=1,
        training__microbatches=3,
    )  # fmt: skip
    engine = small_engine(config)
    data, held_out = open_evaluation_data(config, engine.data)
    assert not held_out
    found, outcome = evaluate(engine, data, held_out=held_out), compute(engine, 0)
    assert found.loss == pytest.approx(outcome.loss.item(), rel=1e-6)
    assert found.num_tokens == outcome.num_valid == 48


def test_held_out_rows_are_in_no_epoch(tmp_path: Path) -> None:
    """Oracle: sets of rows by their tokens, which are unique; all rows together are the source."""
    source = documents_of_three(tmp_path / "ids.npy")
    config = small_config(
        data__source=str(source), data__separator=0, evaluation__interval=1, evaluation__batches=2
    )
    data = small_engine(config).data
    assert (data.num_rows, data.num_held_out) == (100 - 2 * ROWS, 2 * ROWS)

    def keys(batch) -> list[tuple[int, ...]]:
        return [tuple(row) for row in batch.tokens_BS.tolist()]

    kept = keys(data.held_out_rows(0, 24))
    epoch = keys(data.rows(0, global_batch_rows=76, first=0, count=76))
    second = keys(data.rows(1, global_batch_rows=76, first=0, count=76))
    assert sorted(epoch) == sorted(second)
    assert epoch != second
    assert len(set(kept)) == 24
    assert not set(kept) & set(epoch)
    everything = small_engine(replace(config, evaluation=Config("", config.model).evaluation)).data
    assert sorted(kept + epoch) == sorted(
        keys(everything.rows(0, global_batch_rows=100, first=0, count=100))
    )


def test_all_rows_held_out_is_refused(tmp_path: Path) -> None:
    source = documents_of_three(tmp_path / "ids.npy")
    config = small_config(
        data__source=str(source), data__separator=0, evaluation__interval=1, evaluation__batches=9
    )
    with pytest.raises(
        ValueError, match=r"100 rows of 12 tokens, of which an evaluation would keep"
    ):
        small_engine(config)


def _evaluate(rank: int, size: int, degree: int):
    config = small_config(
        evaluation__interval=1,
        evaluation__batches=2,
        parallelism__expert_parallel_degree=degree,
        training__dtype="float32",
    )
    engine = small_engine(config, rank, size)
    run_steps(engine, 1)
    return evaluate(engine, engine.data, held_out=True)


@pytest.mark.parametrize("degree", [1, 2])
def test_two_ranks_find_what_one_finds(two_ranks, degree: int) -> None:
    alone = _evaluate(0, 1, 1)
    first, second = two_ranks.run(_evaluate, degree)
    assert first == second
    assert first.num_tokens == alone.num_tokens
    assert first.loss == pytest.approx(alone.loss, rel=1e-5)


def test_bfloat16_weights_are_cast_for_the_evaluation_alone() -> None:
    engine = small_engine(small_config(training__dtype="bfloat16", evaluation__interval=1))
    full = small_engine(small_config(evaluation__interval=1))
    found = evaluate(engine, engine.data, held_out=True).loss
    assert found == pytest.approx(evaluate(full, full.data, held_out=True).loss, rel=1e-2)
    assert all(p.dtype == torch.float32 for p in engine.model.parameters())


def test_the_loop_writes_it_into_the_step_s_record(tmp_path: Path) -> None:
    import json

    config = small_config(
        training__steps=5, evaluation__interval=2, evaluation__batches=1,
        metrics__folder=str(tmp_path), metrics__log_freq=100,
    )  # fmt: skip
    train(config, small_world())
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "evaluation/loss" in r] == [2, 4, 5]
    assert len(records) == 5
