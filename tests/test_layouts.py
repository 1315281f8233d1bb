"""The same step on one, two and four ranks: every parameter's gradient, the loss and the norm.

Oracle: one process with the whole batch.  Gradients before the optimizer, so that nothing hides a
scale (field reports E1, E2, E5, E9, E10).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from small_runs import small_world

from interlace.train.arms import ARMS
from interlace.train.config import Config
from interlace.train.engine import Engine, apply, build_engine, compute, sum_gradients_
from interlace.train.presets import PRESETS
from interlace.train.world import World

ROWS, SEQ_LEN = 12, 16


def _config(preset: str, degree: int, num_ranks: int, microbatches: int, padded: bool) -> Config:
    c = PRESETS[preset]
    return replace(
        c,
        model=replace(c.model, num_layers=2, num_dense_layers=min(1, c.model.num_dense_layers)),
        training=replace(
            c.training,
            steps=4,
            seq_len=SEQ_LEN,
            local_batch_size=ROWS // num_ranks,
            microbatches=microbatches,
        ),
        parallelism=replace(c.parallelism, expert_parallel_degree=degree),
        ep=replace(c.ep, padded=padded),
        optimizer=replace(c.optimizer, name="SGD", lr=0.1, max_norm=1.0),
        data=replace(c.data, max_documents=3),
    )


def _world(rank: int, size: int, degree: int, device: str) -> World:
    ep_group = replica_group = None
    if degree > 1:
        for first in range(0, size, degree):
            group = dist.new_group(list(range(first, first + degree)))
            ep_group = group if first <= rank < first + degree else ep_group
    if size > degree:
        for first in range(degree):
            group = dist.new_group(list(range(first, size, degree)))
            replica_group = group if rank % degree == first else replica_group
    return World(
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        device=torch.device(device),
        backend="gloo" if size > 1 else "none",
        ep_rank=rank % degree,
        ep_size=degree,
        ep_group=ep_group,
        replica_group=replica_group,
    )


def _two_steps(rank, size, degree, preset, microbatches=1, padded=False, device="cpu"):
    """Loss, norm, gradients and counts of step 0, and the parameters after two steps."""
    if device == "cpu":
        torch.set_num_threads(1)
    config = _config(preset, degree, size, microbatches, padded)
    engine: Engine = build_engine(config, _world(rank, size, degree, device), ARMS["control"])
    first = compute(engine, 0)
    result = {
        "loss": first.loss.item(),
        "norm": first.grad_norm.item(),
        "counts": first.counts_LE.tolist(),
        "grads": {n: g.clone().cpu() for n, g in first.grads.items()},
    }
    apply(engine, first, 0)
    apply(engine, compute(engine, 1), 1)
    result["params"] = {n: p.detach().cpu().clone() for n, p in engine.model.named_parameters()}
    result["experts"] = sorted(engine.expert_names)
    return result


def check_layout(results: list, degree: int, reference: dict, tolerance: float = 2e-5) -> None:
    for rank, result in enumerate(results):
        assert result["counts"] == reference["counts"]
        assert result["loss"] == pytest.approx(reference["loss"], rel=tolerance)
        assert result["norm"] == pytest.approx(reference["norm"], rel=10 * tolerance)
        for kind in ("grads", "params"):
            for name, expected in reference[kind].items():
                if name in result["experts"]:
                    expected = expected.chunk(degree)[rank % degree]
                actual = result[kind][name]
                scale = expected.abs().max().clamp(min=1e-6)
                error = ((actual - expected).abs().max() / scale).item()
                assert error < 50 * tolerance, f"{kind} of {name} on rank {rank}: {error:.2e}"
    for name in reference["params"].keys() - set(reference["experts"]):
        for result in results[1:]:  # dense weights are bitwise the same on every rank
            assert torch.equal(result["params"][name], results[0]["params"][name]), name


@pytest.fixture(scope="module")
def references() -> dict:
    return {p: _two_steps(0, 1, 1, p) for p in ("dsv3-tiny", "qwen3-tiny")}


@pytest.mark.parametrize("preset", ["dsv3-tiny", "qwen3-tiny"])
@pytest.mark.parametrize(
    ("microbatches", "padded"),
    [(1, False), (2, True), pytest.param(3, False, marks=pytest.mark.slow)],
)
def test_two_ranks_share_the_experts(two_ranks, references, preset, microbatches, padded) -> None:
    results = two_ranks.run(_two_steps, 2, preset, microbatches, padded)
    check_layout(results, 2, references[preset])


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_four_ranks_in_every_layout(four_ranks, references, degree: int) -> None:
    results = four_ranks.run(_two_steps, degree, "dsv3-tiny")
    check_layout(results, degree, references["dsv3-tiny"])


@pytest.mark.parametrize("microbatches", [2, 3, 4])
@pytest.mark.slow
def test_microbatches_add_up(references, microbatches: int) -> None:
    check_layout([_two_steps(0, 1, 1, "qwen3-tiny", microbatches)], 1, references["qwen3-tiny"])


@pytest.mark.gpu
def test_two_processes_on_one_gpu(two_ranks) -> None:
    reference = _two_steps(0, 1, 1, "dsv3-tiny", device="cuda")
    results = two_ranks.run(_two_steps, 2, "dsv3-tiny", 1, False, "cuda:0", timeout=180)
    check_layout(results, 2, reference, tolerance=1e-4)


def _drops_a_rank(rank: int, size: int):
    config = _config("dsv3-tiny", 2, 2, 1, True)
    config = replace(config, ep=replace(config.ep, capacity_factor=0.25))
    engine = build_engine(config, _world(rank, size, 2, "cpu"), ARMS["control"])
    before = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
    try:
        compute(engine, 0)
    except RuntimeError as error:
        assert all(torch.equal(before[n], p) for n, p in engine.model.named_parameters())
        return str(error)
    return "no error"


def test_overflow_is_an_error_on_every_rank_before_any_update(two_ranks) -> None:
    first, second = two_ranks.run(_drops_a_rank)
    assert first == second
    assert "ep.capacity_factor=0.25 has room for 24; no rank has changed a weight. Use " in first


def _summed(rank: int, size: int) -> tuple[float, torch.dtype, torch.dtype]:
    grads = {
        "head": torch.tensor([1.0 if rank == 0 else 2.0**-9]).bfloat16(),
        "expert": torch.ones(1).bfloat16(),
    }
    sum_gradients_(grads, {"expert"}, small_world(rank, size, degree=2))
    return grads["head"].item(), grads["head"].dtype, grads["expert"].dtype


def test_gradients_of_ranks_add_up_in_float32(two_ranks) -> None:
    """In half precision the smaller one would be lost; what is not summed keeps its type."""
    expected = (1 + 2.0**-9, torch.float32, torch.bfloat16)
    assert two_ranks.run(_summed) == [expected, expected]
