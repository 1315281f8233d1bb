"""One CUDA graph for the step: every replay with another routing equals plain PyTorch, bitwise."""

from __future__ import annotations

import gc

import pytest
import torch

from interlace import ep
from interlace.capture import Captured, capture, check_inputs
from interlace.model import build_model, cross_entropy_sum, init_weights, preset
from interlace.trace import Step, StepResult, run_eager
from interlace.train.arms import ARMS, trace_arm
from interlace.train.config_read import load_config


def _loss(model, tokens, labels, positions, bounds, num_valid):
    hidden, routed = model(tokens, positions, bounds)
    return cross_entropy_sum(model, hidden, labels) / num_valid, {"counts": routed.counts_LE}


def _batch(seed: int, rows: int = 4, length: int = 64, device: str = "cuda"):
    gen = torch.Generator().manual_seed(seed)
    tokens = torch.randint(256, (rows, length), generator=gen)
    if seed % 3 == 2:
        tokens[:] = seed  # one token everywhere: all rows go to the same experts
    positions = torch.arange(length).expand(rows, -1).contiguous()
    bounds = torch.tensor([[0, length // 2, length]], dtype=torch.int32).expand(rows, -1)
    batch = (tokens, tokens.roll(-1, 1), positions, bounds.contiguous(), torch.tensor(256.0))
    return tuple(x.to(device) for x in batch)


def test_without_cuda_capture_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a CUDA graph needs CUDA tensors, got cpu"):
        capture(lambda batch: StepResult(batch[0], {}, {}), (torch.ones(1),))


def test_other_shapes_are_refused_by_both_numbers() -> None:
    held = (torch.ones(2, 3), torch.ones(4))
    check_inputs(held, (torch.zeros(2, 3), torch.zeros(4)))
    with pytest.raises(
        ValueError, match=r"captured for \(4,\) torch.float32 as input 1 and got \(5,"
    ):
        check_inputs(held, (torch.zeros(2, 3), torch.zeros(5)))


def test_exact_exchange_and_eager_mode_are_refused() -> None:
    from interlace.train.config import check

    with pytest.raises(ValueError, match=r"capture.enabled=true needs ep.padded=true"):
        check(load_config(["dsv3-tiny", "--capture.enabled"]), 2)
    flags = ["dsv3-tiny", "--capture.enabled", "--ep.padded", "--training.mode", "eager"]
    with pytest.raises(ValueError, match=r"needs training.mode=traced; got eager"):
        check(load_config(flags), 2)


def test_a_closed_step_says_so() -> None:
    closed = Captured(None, (), StepResult(torch.ones(1), {}, {}))
    closed.close()
    with pytest.raises(RuntimeError, match="has been closed"):
        closed(())


@pytest.mark.gpu
@pytest.mark.parametrize("arm", ["control", "chunk-scheduled"])
@pytest.mark.parametrize("name", ["dsv3-tiny", "qwen3-tiny"])
def test_replays_equal_plain_pytorch(arm: str, name: str) -> None:
    """Field reports K3, K4: other inputs each time, collection and cache emptying between."""
    ep.register_group(ep.Group("mirror", 2, 0, "loopback"))
    exchange = ep.Exchange("mirror", 2, 0, padded=True)
    with torch.device("cuda"):
        model = build_model(preset(name), exchange)
    init_weights(model, 0, exchange)
    config = load_config([name, "--overlap.chunks", "2", "--overlap.chunk_root", "layers.*"])
    step = Step(model, _loss, compute_dtype=torch.bfloat16, keep=lambda n: n.endswith("gate"))
    traced = trace_arm(ARMS[arm], step, _batch(0), config)
    params, buffers = step.state()
    reference = step
    if ARMS[arm].chunked:
        from dataclasses import replace

        from interlace.train.arms import chunking_of

        reference = replace(step, chunking=chunking_of(config))
    torch.use_deterministic_algorithms(True)
    try:
        captured = capture(lambda batch: traced(params, buffers, batch), _batch(0))
        for seed in range(20):
            batch = _batch(seed)
            if seed == 7:
                with torch.no_grad():  # an update in place between two replays is seen
                    for p in model.parameters():
                        p.mul_(1.01)
            if seed % 5 == 4:
                gc.collect()
                torch.cuda.empty_cache()
            expected = run_eager(reference, params, buffers, batch)
            actual = captured(batch)
            assert torch.equal(actual.loss, expected.loss), seed
            for n, grad in expected.grads.items():
                assert torch.equal(actual.grads[n], grad), (seed, n)
        with pytest.raises(ValueError, match="capture it again for the new shape"):
            captured(_batch(1, rows=2))
        captured.close()
    finally:
        torch.use_deterministic_algorithms(False)
