"""The gradient norm of any layout against one process's norm; clipping."""

from __future__ import annotations

import math
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from interlace.train.norms import clip_factor, global_norm, scale_

EXPERTS = {"w1", "w2"}


def make_grads(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"dense": (5, 7), "gain": (7,), "w1": (4, 3, 5), "w2": (4, 5, 3)}
    return {n: torch.randn(s, generator=generator) for n, s in shapes.items()}


def shard(grads: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    return {n: g.chunk(ranks)[rank].clone() if n in EXPERTS else g for n, g in grads.items()}


def on_all_ranks(grads: dict[str, Tensor], ranks: int, norm_type: float) -> list[Tensor]:
    """Each rank's result with a fake gather: the first pass collects what the ranks would send."""
    sent: list[Tensor] = []

    def collect(value: Tensor) -> Tensor:
        sent.append(value)
        return value

    shards = [shard(grads, rank, ranks) for rank in range(ranks)]
    for part in shards:
        global_norm(part, EXPERTS, expert_group=collect, norm_type=norm_type)
    gathered = torch.cat(sent)
    return [
        global_norm(part, EXPERTS, expert_group=lambda _: gathered, norm_type=norm_type)
        for part in shards
    ]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_layout_does_not_change_the_norm(ranks: int, norm_type: float) -> None:
    """Oracle: fp64 vector_norm of all gradients in one process; layouts agree bitwise."""
    grads = make_grads()
    flat = torch.cat([g.double().flatten() for g in grads.values()])
    expected = torch.linalg.vector_norm(flat, norm_type).float()
    alone = global_norm(grads, EXPERTS, norm_type=norm_type)
    assert (alone.dtype, alone.ndim) == (torch.float32, 0)
    torch.testing.assert_close(alone, expected, rtol=1e-6, atol=0)
    for norm in on_all_ranks(grads, ranks, norm_type):
        assert torch.equal(norm, alone)


def test_squares_are_added_not_averaged() -> None:
    """Expert gradients of squared norms 20 and 100 on two ranks give sqrt(120)."""
    grads = {"w1": torch.tensor([[4.0, 2.0], [6.0, 8.0]])}
    norms = [
        global_norm(
            {"w1": grads["w1"][r : r + 1]},
            {"w1"},
            expert_group=lambda _: torch.tensor([20.0, 100.0], dtype=torch.float64),
        )
        for r in range(2)
    ]
    assert norms[0].item() == norms[1].item() == pytest.approx(math.sqrt(120), rel=1e-7)
    assert global_norm(grads, {"w1"}).item() == norms[0].item()


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["dense", "w2"])
def test_a_bad_element_shows_on_every_rank(name: str, value: float, norm_type: float) -> None:
    grads = make_grads()
    grads[name].view(-1)[-1] = value  # for w2: on the last rank only
    for norm in on_all_ranks(grads, 2, norm_type):
        assert str(norm.item()) == str(value)


def test_bf16_and_empty_gradients() -> None:
    """Oracle: fp64 norm of the bf16 values; bf16 accumulation would be off by 1e-2."""
    grads = {"a": torch.full((1000,), 0.1, dtype=torch.bfloat16), "b": torch.zeros(0, 3)}
    expected = torch.linalg.vector_norm(grads["a"].double()).float()
    torch.testing.assert_close(global_norm(grads, {"b"}), expected, rtol=1e-6, atol=0)
    assert global_norm(grads, {"b"}, norm_type=math.inf).item() == grads["a"][0].item()
    assert global_norm({}, set()).item() == 0.0


def test_clip_scales_all_or_nothing() -> None:
    """Oracle: the definition; below the limit bitwise unchanged."""
    grads = make_grads() | {"half": torch.ones(3, dtype=torch.bfloat16)}
    before = {name: grad.clone() for name, grad in grads.items()}
    norm = global_norm(grads, EXPERTS)
    scale_(grads, clip_factor(norm, float(norm) * 2))
    assert all(torch.equal(grads[name], before[name]) for name in grads)
    scale_(grads, clip_factor(norm, 1.0))
    for name, grad in grads.items():
        torch.testing.assert_close(grad, (before[name] / norm).to(grad.dtype))
        assert grad.dtype == before[name].dtype
    assert global_norm(grads, EXPERTS).item() == pytest.approx(1.0, rel=1e-3)


def test_clip_of_zero_gradients_gives_zero() -> None:
    grads = {"a": torch.zeros(3)}
    scale_(grads, clip_factor(global_norm(grads, set()), 1.0))
    assert grads["a"].tolist() == [0.0, 0.0, 0.0]


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="norm_type=0 must be above 0"):
        global_norm(make_grads(), EXPERTS, norm_type=0)
    with pytest.raises(ValueError, match=r"no gradient for expert parameters w9 \(1 in all\)"):
        global_norm(make_grads(), {"w9"})
    with pytest.raises(ValueError, match=r"max_norm=0\.0 must be above 0"):
        clip_factor(torch.ones(()), 0.0)


def gloo_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    grads = shard(make_grads(), rank, 2)
    norm = global_norm(grads, EXPERTS, expert_group=dist.group.WORLD)
    scale_(grads, clip_factor(norm, 1.0))
    torch.save({"norm": norm, **grads}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_equal_one(tmp_path: Path) -> None:
    """Oracle: one process, bitwise: norm, clipped dense and expert gradients."""
    context = mp.spawn(gloo_rank, (str(tmp_path),), nprocs=2, join=False)
    deadline = time.monotonic() + 60
    try:
        while not context.join(timeout=1):  # False as long as one runs; raises what one raised
            assert time.monotonic() < deadline, "gloo ranks hang"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    grads = make_grads()
    norm = global_norm(grads, EXPERTS)
    scale_(grads, clip_factor(norm, 1.0))
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name, tensor in {"norm": norm, **shard(grads, rank, 2)}.items():
            assert torch.equal(found[name], tensor), name
