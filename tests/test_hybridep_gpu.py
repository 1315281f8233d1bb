"""The hybridep backend on GPUs: loopback on one, two processes on one over CUDA IPC, two GPUs.

Oracles: the padded ``alltoall`` on the same device, bitwise (``slot``); the same exchange on CPU,
bitwise but for the dots of score gradients, whose order differs (``rank``, scores at the experts).
"""

from __future__ import annotations

import os
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from interlace import _compat, ep
from interlace.ep import budget, pending, signals
from interlace.ep.windows import close_windows, poison_on_reuse

E, TOKENS, TOP_K, HIDDEN = 8, 64, 3, 72
ROUTINGS = ["random", "all-to-one", "last"]
MODES = [("slot", "origin"), ("slot", "expert"), ("rank", "expert")]
NAMES = ["rows", "out", "x.grad", "counts", "offsets", "overflow", "scores.grad"]


def _problem(device: torch.device, rank: int, seed: int) -> list[Tensor]:
    """x, ids, scores, gradient; another routing with every seed."""
    gen = torch.Generator().manual_seed(50 * seed + rank)
    routing = ROUTINGS[seed % len(ROUTINGS)]
    ids = torch.rand(TOKENS, E, generator=gen).argsort(1)[:, :TOP_K]
    if routing != "random":
        first = 0 if routing == "all-to-one" else E - TOP_K
        ids = torch.arange(first, first + TOP_K).repeat(TOKENS, 1)
    x, g = (torch.randn(TOKENS, HIDDEN, generator=gen).bfloat16() for _ in range(2))
    scores = torch.rand(TOKENS, TOP_K, generator=gen)
    return [t.contiguous().to(device) for t in (x, ids, scores, g)]


def _step(x, ids, scores, g, exchange: ep.Exchange, *, slow: bool = False) -> list[Tensor]:
    """Forward and backward through both exchanges, with sleeps before what arrived is read."""

    def late() -> None:
        if slow:
            _compat.gpu_sleep(2, x.device)

    x, scores = x.detach().requires_grad_(), scores.detach().requires_grad_()
    plan = ep.plan(ids, E, exchange)
    rows = ep.dispatch(x, plan)
    late()
    live = torch.arange(plan.out_rows, device=x.device)[:, None] < plan.offsets[-1]
    out = ep.combine(torch.where(live, rows * 1.5, float("nan")), scores, plan)
    late()
    g_x, g_scores = torch.autograd.grad(out, (x, scores), g)
    kept = torch.where(live, rows, 0).detach()
    return [kept, out.detach(), g_x, plan.counts, plan.offsets, plan.overflow, g_scores]


def _wrong(actual: list[Tensor], expected: list[Tensor], *, exact: bool) -> list[str]:
    """Names of results that are not as expected; the last ones only near if not ``exact``."""
    pairs = list(zip(NAMES, actual, (e.to(actual[0].device) for e in expected), strict=True))
    name, a, e = pairs[-1]
    same = torch.equal(a, e) if exact else torch.allclose(a, e, rtol=1e-5, atol=1e-4)
    return [n for n, a, e in pairs[:-1] if not torch.equal(a, e)] + [name] * (not same)


def _expected(problem: list[Tensor], exchange: ep.Exchange) -> list[Tensor]:
    """By ``alltoall`` on the device where every bit is promised, else by the CPU's hybridep."""
    if not exchange.at_experts:
        where = (exchange.group, exchange.size, exchange.rank)
        plain = ep.Exchange(*where, "alltoall", True, exchange.capacity_factor)
        return _step(*problem, plain)
    return _step(*(t.cpu() for t in problem), exchange)


def _exchange(group: str, size: int, rank: int, mode: tuple[str, str], buffer_set: int, factor):
    reduce, at = mode
    return ep.Exchange(group, size, rank, "hybridep", True, factor, buffer_set, reduce, at)


def _compare(
    device: torch.device, exchange: ep.Exchange, iterations: int, replays: int, slow: int = -1
) -> list[str]:
    """Eager steps, then one captured step replayed with other inputs; what came out wrong."""
    rank, exact, wrong = exchange.rank, not exchange.at_experts, []
    for i in range(iterations):
        problem = _problem(device, rank, i)
        actual = _step(*problem, exchange, slow=slow == rank)
        wrong += _wrong(actual, _expected(problem, exchange), exact=exact)
    if device.type == "cpu":
        return wrong
    static = _problem(device, rank, 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = _step(*static, exchange, slow=slow == rank)
    for i in range(replays):
        problem = _problem(device, rank, 1000 + i)
        for place, value in zip(static, problem, strict=True):
            place.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        wrong += _wrong(result, _expected(problem, exchange), exact=exact)
    signals.check_timeouts()
    assert pending.num_in_flight() == 0
    if dist.is_initialized():
        dist.barrier()
    graph.reset()
    return wrong


@contextmanager
def _poisoned():
    poison_on_reuse(enabled=True)
    try:
        yield
    finally:
        poison_on_reuse(enabled=False)
        close_windows()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("buffer_set", [-1, 0])
@pytest.mark.parametrize("max_ctas", [None, 4])
def test_loopback_on_gpu(mode, buffer_set: int, max_ctas: int | None) -> None:
    ep.register_group(ep.Group("mirror", 4, 0, "loopback"))
    device = torch.device("cuda", torch.cuda.current_device())
    for factor in (None, 1.25):
        with _poisoned(), budget.bounded(max_ctas):
            exchange = _exchange("mirror", 4, 0, mode, buffer_set, factor)
            assert _compare(device, exchange, 4, 10) == []


def _on_gpus(rank: int, size: int, shared: bool, mode, buffer_set: int, slow: int) -> list[str]:
    device = torch.device("cuda", 0 if shared else rank)
    torch.cuda.set_device(device)
    signals.TIMEOUT_SECONDS["cuda"] = 20.0
    ep.register_group(ep.Group("ep", size, rank, "process", dist.group.WORLD))
    try:
        with _poisoned():
            return _compare(
                device, _exchange("ep", size, rank, mode, buffer_set, None), 6, 10, slow
            )
    finally:
        ep.drop_group("ep")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("slow", [-1, 0, 1])
def test_two_processes_on_one_gpu(two_ranks, mode, slow: int) -> None:
    for buffer_set in (-1, 0):
        wrong = two_ranks.run(_on_gpus, True, mode, buffer_set, slow, timeout=200)
        assert wrong == [[], []]


def _set_mapping(rank: int, size: int, mapping: str) -> None:
    os.environ["INTERLACE_EP_MAPPING"] = mapping


@pytest.mark.multi_gpu
@pytest.mark.parametrize("mapping", ["symmetric", "ipc"])
@pytest.mark.parametrize("mode", MODES)
def test_two_gpus(two_ranks, mode, mapping: str) -> None:
    two_ranks.run(_set_mapping, mapping)
    assert two_ranks.run(_on_gpus, False, mode, 0, 1, timeout=200) == [[], []]
    two_ranks.run(_set_mapping, "")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("buffer_set", [-1, 0])
def test_the_gpu_tests_own_steps_on_cpu(mode, buffer_set: int) -> None:
    """What the tests above run, so that a fault of the tests themselves shows without a GPU."""
    ep.register_group(ep.Group("mirror", 4, 0, "loopback"))
    with _poisoned():
        for factor in (None, 1.25):
            exchange = _exchange("mirror", 4, 0, mode, buffer_set, factor)
            assert _compare(torch.device("cpu"), exchange, 3, 0) == []
