"""A bad step changes nothing on any rank, and the message says where it came from.

Oracle: the state before the step, bitwise; the run that never had the step.  (Field reports D1, D3,
E1 to E3.)
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from small_runs import run_steps, small_config, small_engine, snapshot, unequal

from interlace.train import health
from interlace.train.engine import apply, compute

EXPERT, GATE, HEAD = "layers.1.moe.experts.w13", "layers.1.moe.router.gate", "head.weight"


def with_fault(engine, name: str, value: float, *, step: int, index: int = 0):
    """The same engine; in ``step`` (from 0) its own gradient of ``name``, or its loss, is bad."""
    plain = engine.forward_backward

    def broken(batch):
        result = plain(batch)
        if engine.progress.step != step:
            return result
        if name == "loss":
            return replace(result, loss=result.loss * value)
        grads = {n: g.clone() for n, g in result.grads.items()}
        grads[name].view(len(grads[name]), -1)[index, 1] = value
        return replace(result, grads=grads)

    return replace(engine, forward_backward=broken)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [EXPERT, HEAD, "loss"])
def test_stop_is_the_default_and_leaves_no_trace(name: str, value: float) -> None:
    """Field report D1: checked in every step and before the update, logged or not."""
    engine = with_fault(small_engine(small_config(metrics__log_freq=10)), name, value, step=2)
    run_steps(engine, 2)
    before, lr = snapshot(engine), engine.optimizer.param_groups[0]["lr"]
    where = {EXPERT: r"w13 \(expert 0\) is", HEAD: r"head\.weight is", "loss": "loss is"}[name]
    message = f"step 3: the gradient norm is .*: on rank 0 {'.*' if name == EXPERT else ''}{where}"
    with pytest.raises(RuntimeError, match=message):
        run_steps(engine, 1)
    after = snapshot(engine)
    assert unequal(before, after) == ["progress.skipped", "progress.skipped_in_a_row"]
    assert engine.optimizer.param_groups[0]["lr"] == lr


def test_skip_goes_on_as_if_the_batch_had_not_been(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: a run without a fault that is never given batch 2; learning rates included."""
    config = small_config(training__nonfinite="skip")
    engine = with_fault(small_engine(config), HEAD, math.nan, step=2)
    run_steps(engine, 3)
    assert "step 3" in capsys.readouterr().err
    assert (engine.progress.step, engine.progress.updates) == (3, 2)
    assert (engine.progress.skipped, engine.progress.skipped_in_a_row) == (1, 1)
    run_steps(engine, 3)
    other = small_engine(config)
    run_steps(other, 2)
    for step in (3, 4, 5):
        apply(other, compute(other, step), step)
    own = ("progress.step", "progress.tokens_seen", "progress.skipped")
    assert set(unequal(snapshot(engine), snapshot(other))) <= set(own)
    assert engine.progress.skipped_in_a_row == 0
    assert engine.progress.updates == 5


def test_skipping_has_an_end() -> None:
    config = small_config(training__nonfinite="skip", training__max_skipped_steps=2)
    engine = small_engine(config)
    with torch.no_grad():
        engine.model.head.weight[0, 0] = math.nan
    run_steps(engine, 1)
    with pytest.raises(RuntimeError, match=r"last of training\.max_skipped_steps=2 such"):
        run_steps(engine, 1)


def test_finite_elements_whose_norm_is_not() -> None:
    text = health.describe([], 2.0, math.inf)
    assert text.endswith("every element is finite: the norm is beyond float32")


def test_many_faults_are_cut_short() -> None:
    faults = [health.Fault(r, f"p{i}", math.nan) for r in (1, 0) for i in range(6)]
    text = health.describe(faults, math.nan, math.nan)
    assert "on rank 0 p0 is nan, p1 is nan, p2 is nan, p3 is nan and 2 more; on rank 1" in text


def test_the_source_comes_before_those_that_caught_it() -> None:
    """A bad token of rank 1 reaches rank 0's experts in the exchange; rank 1's own loss is bad."""
    faults = [
        health.Fault(0, "w (expert 2)", math.nan, is_expert=True),
        health.Fault(1, "loss", math.nan),
    ]
    text = health.describe(faults, math.nan, math.nan)
    assert text.endswith(": on rank 1 loss is nan; on rank 0 w (expert 2) is nan")


# --- two ranks ------------------------------------------------------------------------------------


def _faulty(rank: int, size: int, degree: int, name: str, policy: str):
    """The fault is on rank 1 alone, in its second expert or row, in step 2."""
    config = small_config(training__nonfinite=policy, parallelism__expert_parallel_degree=degree)
    engine = small_engine(config, rank, size)
    bad = with_fault(engine, name, math.nan, step=1, index=1) if rank == 1 else engine
    run_steps(bad, 1)
    before = snapshot(bad)
    try:
        run_steps(bad, 1)
        text = "no error"
    except RuntimeError as error:
        text = str(error)
    changed = unequal(before, snapshot(bad))
    if policy == "skip":
        run_steps(bad, 1)  # and nobody waits for anybody
    return text, changed, bad.progress.updates


@pytest.mark.parametrize(
    ("degree", "name", "where"),
    [
        (2, EXPERT, "on rank 1 layers.1.moe.experts.w13 (expert 5) is nan"),
        (1, EXPERT, "on rank 1 layers.1.moe.experts.w13 (expert 1) is nan"),
        (2, GATE, "on rank 1 layers.1.moe.router.gate is nan"),
        (1, HEAD, "on rank 1 head.weight is nan"),
        (2, "loss", "on rank 1 loss is nan"),
    ],
)
def test_all_ranks_stop_and_name_the_rank(two_ranks, degree: int, name: str, where: str) -> None:
    """Also with replicas, whose sum has the NaN on both: it was rank 1 that brought it."""
    results = two_ranks.run(_faulty, degree, name, "stop")
    for text, changed, updates in results:
        assert where in text
        assert "on rank 0" not in text
        assert set(changed) == {"progress.skipped", "progress.skipped_in_a_row"}
        assert updates == 1
    assert results[0][0] == results[1][0]


def test_all_ranks_skip_together(two_ranks) -> None:
    for text, changed, updates in two_ranks.run(_faulty, 2, EXPERT, "skip"):
        assert text == "no error"
        assert not [n for n in changed if not n.startswith("progress.")]
        assert updates == 2


def _norms(rank: int, size: int, degree: int, norm_type: float):
    config = small_config(
        optimizer__norm_type=norm_type,
        optimizer__max_norm=0.01,
        optimizer__name="SGD",
        parallelism__expert_parallel_degree=degree,
    )
    engine = small_engine(config, rank, size)
    outcome = compute(engine, 0)
    norm = outcome.grad_norm.item()
    apply(engine, outcome, 0)
    return norm, outcome.grads[HEAD].clone(), engine.model.head.weight.detach().clone()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_every_norm_over_every_mesh(four_ranks, norm_type: float) -> None:
    """Field reports E1 to E3: DP 4, EP 2 x DP 2, EP 4 against one process, clipped at 0.01; dense
    weights are bitwise the same on all ranks."""
    norm, clipped, weight = _norms(0, 1, 1, norm_type)
    assert norm > 0.01
    for degree in (1, 2, 4):
        results = four_ranks.run(_norms, degree, norm_type)
        for other in results:
            assert other[0] == pytest.approx(norm, rel=1e-4)
            torch.testing.assert_close(other[1], clipped, rtol=1e-3, atol=1e-6)
            assert torch.equal(other[2], results[0][2])
            torch.testing.assert_close(other[2], weight, rtol=1e-5, atol=1e-6)
