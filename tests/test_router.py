"""The router against a loop in plain Python, and the forced routings against counting."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from interlace.model import MODELS, ModelConfig
from interlace.model.router import Router, balanced_ids, limit_groups, skewed_ids

DSV3 = replace(MODELS["dsv3-tiny"], num_experts=16, num_groups=4, top_groups=2, top_k=4)
QWEN3 = replace(MODELS["qwen3-tiny"], num_experts=16, top_k=4)
CPU = torch.device("cpu")


def make_router(config: ModelConfig, seed: int = 0) -> Router:
    router = Router(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        router.gate.normal_(0.0, 0.1, generator=generator)
        if router.expert_bias is not None:
            router.expert_bias.normal_(0.0, 0.2, generator=generator)
    return router


def hidden(num_tokens: int, config: ModelConfig, seed: int = 1) -> Tensor:
    return torch.randn(num_tokens, config.dim, generator=torch.Generator().manual_seed(seed))


def choose_in_python(scores: list[float], bias: list[float], c: ModelConfig) -> set[int]:
    """Group-limited top-k of one token, as the paper says it."""
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    size = c.num_experts // c.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(c.num_groups)]
    value = [sum(sorted((choice[e] for e in group), reverse=True)[:2]) for group in groups]
    best = sorted(range(c.num_groups), key=lambda g: -value[g])[: c.top_groups]
    eligible = [e for g in best for e in groups[g]]
    return set(sorted(eligible, key=lambda e: -choice[e])[: c.top_k])


def test_group_limited_choice_equals_the_python_oracle() -> None:
    router, x = make_router(DSV3), hidden(64, DSV3)
    ids, scores, counts, _ = router(x)
    all_scores = (x.double() @ router.gate.double().T).sigmoid()
    for t in range(len(x)):
        expected = choose_in_python(all_scores[t].tolist(), router.expert_bias.tolist(), DSV3)
        assert set(ids[t].tolist()) == expected
        weights = all_scores[t][ids[t]]
        torch.testing.assert_close(scores[t].double(), weights / weights.sum(), rtol=1e-5, atol=0)
    assert counts.tolist() == [(ids == e).sum().item() for e in range(16)]
    assert (ids.dtype, scores.dtype, counts.dtype) == (torch.int64, torch.float32, torch.int64)


def test_softmax_choice_is_the_renormalised_top_k() -> None:
    router, x = make_router(QWEN3), hidden(64, QWEN3)
    ids, scores, counts, _ = router(x)
    value, expected = (x @ router.gate.T).softmax(-1).topk(4)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(scores, value / value.sum(-1, keepdim=True))
    assert counts.sum().item() == 64 * 4


def test_limit_groups_of_single_experts_keeps_the_best_experts() -> None:
    limited = limit_groups(torch.tensor([[0.1, 0.4, 0.3, 0.2]]), num_groups=4, top_groups=2)
    assert torch.isinf(limited).tolist() == [[True, False, False, True]]


def test_route_scale_multiplies_the_normalised_weights() -> None:
    config = replace(DSV3, route_scale=2.5)
    _, scores, _, _ = make_router(config)(hidden(8, config))
    torch.testing.assert_close(scores.sum(-1), torch.full((8,), 2.5))


def test_bias_changes_the_choice_and_not_the_weights() -> None:
    config = replace(DSV3, num_groups=1, top_groups=1)
    router, x = make_router(config), hidden(32, config)
    router.expert_bias.zero_()
    free_ids, _, _, _ = router(x)
    assert not (free_ids == 3).any(dim=1).all()
    router.expert_bias[3] = 10.0
    ids, scores, counts, _ = router(x)
    assert (ids == 3).any(dim=1).all()
    assert counts[3].item() == 32
    learned = (x @ router.gate.T).sigmoid().gather(1, ids)
    torch.testing.assert_close(scores, learned / learned.sum(-1, keepdim=True))


def test_forward_changes_no_buffer_and_bias_gets_no_gradient() -> None:
    router, x = make_router(DSV3), hidden(8, DSV3)
    before = router.expert_bias.clone()
    _, scores, _, _ = router(x)
    (scores * torch.arange(4.0)).sum().backward()
    assert torch.equal(router.expert_bias, before)
    assert router.gate.grad.abs().sum() > 0


@pytest.mark.parametrize("config", [DSV3, QWEN3], ids=lambda c: c.family)
def test_routing_is_float32_under_bfloat16(config: ModelConfig) -> None:
    """The oracle is the float32 router on the same, rounded, numbers: equal to the bit."""
    x = hidden(64, config).bfloat16()
    half = make_router(config).to(torch.bfloat16)
    full = make_router(config)
    with torch.no_grad():
        full.gate.copy_(half.gate)
        if full.expert_bias is not None:
            full.expert_bias.copy_(half.expert_bias)
    for actual, expected in zip(half(x)[:3], full(x.float())[:3], strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("config", [DSV3, QWEN3], ids=lambda c: c.family)
def test_balanced_is_exactly_balanced_and_keeps_learned_weights(config: ModelConfig) -> None:
    config = replace(config, routing="balanced")
    router, x = make_router(config), hidden(64, config)
    ids, scores, counts, _ = router(x)
    assert counts.tolist() == [64 * 4 // 16] * 16
    assert ids[5].tolist() == [(5 * 4 + k) % 16 for k in range(4)]
    logits = x @ router.gate.T
    learned = logits.sigmoid() if config.family == "deepseek_v3" else logits.softmax(-1)
    learned = learned.gather(1, ids)
    torch.testing.assert_close(scores, learned / learned.sum(-1, keepdim=True))


def test_balanced_never_repeats_an_expert_in_a_token() -> None:
    ids = balanced_ids(40, 6, 5, CPU)
    assert all(len(set(row)) == 5 for row in ids.tolist())


def test_skewed_is_replayable_distinct_and_independent_of_the_generator() -> None:
    torch.manual_seed(0)
    first = skewed_ids(256, 16, 4, 1.0, CPU)
    torch.manual_seed(1)
    assert torch.equal(first, skewed_ids(256, 16, 4, 1.0, CPU))
    assert all(len(set(row)) == 4 for row in first.tolist())
    # The choice of a token does not depend on how many follow it.
    assert torch.equal(first[:64], skewed_ids(64, 16, 4, 1.0, CPU))


def test_skewed_first_choices_follow_zipf() -> None:
    """The largest key is a plain draw: its frequencies are the normalised weights."""
    num_tokens = 20_000
    ids = skewed_ids(num_tokens, 8, 2, 1.0, CPU)
    weights = 1.0 / torch.arange(1, 9, dtype=torch.float64)
    weights /= weights.sum()
    frequency = torch.bincount(ids[:, 0], minlength=8) / num_tokens
    assert (frequency - weights).abs().max() < 0.012  # over three standard deviations


def test_skewed_grows_with_alpha() -> None:
    spread = [
        torch.bincount(skewed_ids(4000, 16, 2, alpha, CPU).flatten(), minlength=16)
        for alpha in (0.0, 0.5, 1.5)
    ]
    assert spread[0].max() / spread[0].min() < 1.3
    shares = [(counts.max() / counts.sum()).item() for counts in spread]
    assert shares == sorted(shares)
    assert shares[-1] > 3 * shares[0]


def test_skewed_router_counts_its_choice() -> None:
    config = replace(DSV3, routing="skewed:1.2")
    ids, scores, counts, _ = make_router(config)(hidden(128, config))
    assert torch.equal(ids, skewed_ids(128, 16, 4, 1.2, CPU))
    assert torch.equal(counts, torch.bincount(ids.flatten(), minlength=16))
    torch.testing.assert_close(scores.sum(-1), torch.ones(128))
