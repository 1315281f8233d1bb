"""All microbatches of a step as one function: the same bits as one by one.

Oracle: microbatches run and added one at a time, bitwise.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captures import batch_of
from small_runs import small_config, small_engine

from interlace.trace import StepResult
from interlace.train.arms import ARMS, build_arm
from interlace.train.microbatches import over_microbatches, with_sums


def one_by_one(run: Any, batch: tuple[torch.Tensor, ...], rows: int) -> StepResult:
    """The oracle: each microbatch by itself, the first gradient as it is, in float32."""
    *tensors, number = batch
    total: StepResult | None = None
    for part in zip(*(x.split(rows) for x in tensors), strict=True):
        result = run((*part, number))
        grads = {n: g.clone().float() for n, g in result.grads.items()}
        if total is None:
            total = StepResult(result.loss, grads, dict(result.extra))
            continue
        extra = {n: total.extra[n] + x for n, x in result.extra.items()}
        extra["overflow"] = torch.maximum(total.extra["overflow"], result.extra["overflow"])
        sums = {n: total.grads[n] + g for n, g in grads.items()}
        total = StepResult(total.loss + result.loss, sums, extra)
    assert total is not None
    return total


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("preset", "arm", "dtype"),
    [
        ("dsv3-tiny", "eager", "float32"),
        ("dsv3-tiny", "eager", "bfloat16"),
        ("dsv3-tiny", "scheduled", "bfloat16"),
        pytest.param("dsv3-tiny", "scheduled", "float32", marks=SLOW),
        pytest.param("dsv3-tiny", "chunk-scheduled", "float32", marks=SLOW),
        pytest.param("qwen3-tiny", "chunk-scheduled", "bfloat16", marks=SLOW),
        pytest.param("qwen3-tiny", "scheduled", "float32", marks=SLOW),
    ],
)
def test_the_sum_is_that_of_one_by_one(preset: str, arm: str, dtype: str) -> None:
    config = small_config(
        preset, training__microbatches=3, ep__padded=True, training__dtype=dtype,
        overlap__chunk_root="layers.*",
        model__balance_loss_weight=0.0 if ARMS[arm].chunked else 0.01,
    )  # fmt: skip
    engine = small_engine(config, arm=arm)
    batch = batch_of(engine, 0)
    microbatch = (*(x[:4] for x in batch[:-1]), batch[-1])
    runner = engine.runner
    run, _ = build_arm(runner.arm, runner.step, microbatch, config, runner.working)
    expected, actual = one_by_one(run, batch, 4), engine.forward_backward(batch)
    assert torch.equal(actual.loss, expected.loss)
    assert (
        actual.grads.keys() == expected.grads.keys() == dict(engine.model.named_parameters()).keys()
    )
    for name, grad in expected.grads.items():
        assert actual.grads[name].dtype == torch.float32
        assert torch.equal(actual.grads[name], grad), name
    assert {"counts", "overflow"} <= set(actual.extra)
    for name, x in expected.extra.items():
        assert torch.equal(actual.extra[name], x), name


def test_one_microbatch_is_handed_on_as_it_is() -> None:
    result = StepResult(torch.ones(()), {"a": torch.ones(2, dtype=torch.bfloat16)}, {})
    assert over_microbatches(lambda batch: result, 4)((torch.zeros(4, 1), torch.ones(()))) is result


def test_gradients_that_share_memory_are_added_to_apart() -> None:
    """Two biases of one sum get the same tensor from autograd; a constant's is one element."""
    number = torch.ones(())

    def run(batch):
        both = batch[0].sum(0)
        return StepResult(both.sum(), {"a": both, "b": both, "c": number.expand(3)}, {})

    batch = (torch.arange(12.0).view(4, 3), number)
    result = over_microbatches(run, 2)(batch)
    assert torch.equal(result.grads["a"], batch[0].sum(0))
    assert torch.equal(result.grads["b"], batch[0].sum(0))
    assert result.grads["c"].tolist() == [2.0, 2.0, 2.0]
    assert number == 1


def test_sums_never_write_into_an_input() -> None:
    """A gradient that is an input itself: a function that hands on what it saved, say."""
    weight = torch.ones(3)

    def run(batch: Any) -> StepResult:
        return StepResult(torch.zeros(()), {"w": batch[0][0], "v": weight}, {})

    inputs = (torch.arange(6.0).view(2, 3), torch.ones(()))
    total = over_microbatches(run, 1)(inputs)
    assert total.grads["w"].tolist() == [3.0, 5.0, 7.0]
    assert total.grads["v"].tolist() == [2.0] * 3
    assert inputs[0].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert weight.tolist() == [1.0] * 3


def test_gradients_are_added_where_they_are_made() -> None:
    """The order of all other nodes stays; no gradient is held while another is computed."""
    engine = small_engine(small_config(training__microbatches=2, ep__padded=True), arm="scheduled")
    traced = engine.runner.traced
    assert traced is not None
    added = with_sums(traced)
    nodes = list(added.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    additions = [n for n in nodes if n.target is torch.ops.aten.add_.Tensor]
    assert len(additions) == len(traced.params)
    for node in additions:
        total, grad = node.args
        assert total.op == "placeholder"
        assert place[node] == place[grad] + 1
        assert not [u for u in grad.users if u.op == "output"]
    own = {*additions, *(n.args[0] for n in additions)}
    same = [n.name for n in nodes if n not in own and n.op != "output"]
    assert same == [n.name for n in traced.gm.graph.nodes if n.op != "output"]
