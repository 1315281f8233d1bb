"""Models as a whole: documents, presets, initial weights, attention kernels, bad settings."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from interlace import ep
from interlace._compat import fake_mode
from interlace.model import (
    MODELS,
    MoETransformer,
    attention,
    build_model,
    check_model,
    cross_entropy_sum,
    init_weights,
    preset,
)

SINGLE = ep.Exchange()
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TINY = ["dsv3-tiny", "qwen3-tiny"]


def build(name: str, seed: int = 0, **changes: Any) -> MoETransformer:
    torch.set_num_threads(1)
    model = build_model(replace(MODELS[name], **changes), SINGLE)
    init_weights(model, seed, SINGLE)
    return model


def packed(rows: list[list[int]], num_columns: int = 5) -> tuple[Tensor, Tensor]:
    """positions_BS and cu_seqlens_BC of rows that are given by the lengths of their documents."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])
    seq_len = positions.shape[1]
    bounds = [torch.tensor([0, *lengths]).cumsum(0).tolist() for lengths in rows]
    padded = [b + [seq_len] * (num_columns - len(b)) for b in bounds]
    return positions, torch.tensor(padded, dtype=torch.int32)


def random_tokens(*shape: int, seed: int = 5) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


# --- documents


@pytest.mark.parametrize("name", TINY)
def test_a_document_sees_no_other_document(name: str) -> None:
    """Bitwise.  Routing is forced so that the experts' matrices keep their shapes."""
    model = build(name, routing="balanced")
    positions, cu_seqlens = packed([[20, 17, 27], [64]])
    tokens = random_tokens(2, 64)
    changed = tokens.clone()
    changed[0, :20] = random_tokens(20, seed=6)
    before, _ = model(tokens, positions, cu_seqlens)
    after, _ = model(changed, positions, cu_seqlens)
    assert torch.equal(before[0, 20:], after[0, 20:])
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0, :20], after[0, :20])


@pytest.mark.parametrize("name", TINY)
def test_attention_is_causal(name: str) -> None:
    """Bitwise, with the last token changed."""
    model = build(name, routing="balanced")
    positions, cu_seqlens = packed([[40]])
    tokens = random_tokens(1, 40)
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 256
    before, _ = model(tokens, positions, cu_seqlens)
    after, _ = model(changed, positions, cu_seqlens)
    assert torch.equal(before[0, :-1], after[0, :-1])
    assert not torch.equal(before[0, -1], after[0, -1])


@pytest.mark.parametrize("name", TINY)
def test_packed_documents_equal_separate_ones(name: str) -> None:
    """The oracle is each document alone in its row; float32 sums may be ordered otherwise."""
    model = build(name)
    lengths = [20, 17, 27]
    tokens = random_tokens(1, 64)
    hidden, routed = model(tokens, *packed([lengths]))
    parts = [model(part, *packed([[part.shape[1]]])) for part in tokens.split(lengths, dim=1)]
    torch.testing.assert_close(hidden, torch.cat([h for h, _ in parts], 1), rtol=1e-4, atol=1e-5)
    assert torch.equal(routed.counts_LE, sum(r.counts_LE for _, r in parts))


# --- forward


@pytest.mark.parametrize("name", TINY)
def test_initial_loss_is_that_of_a_guess(name: str) -> None:
    model = build(name)
    tokens, labels = random_tokens(4, 65)[:, :-1], random_tokens(4, 65)[:, 1:]
    hidden, routed = model(tokens, *packed([[64]] * 4))
    counts = routed.counts_LE
    loss = cross_entropy_sum(model, hidden, labels) / labels.numel()
    assert abs(loss.item() - math.log(256)) < 0.1
    config = model.config
    assert counts.shape == (config.num_moe_layers, config.num_experts)
    assert counts.dtype == torch.int64
    assert routed.overflow_L.tolist() == [0] * config.num_moe_layers
    assert counts.sum(1).tolist() == [tokens.numel() * config.top_k] * config.num_moe_layers


@pytest.mark.parametrize("name", TINY)
def test_every_parameter_gets_a_gradient_and_no_buffer_changes(name: str) -> None:
    model = build(name)
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    tokens = random_tokens(2, 64)
    hidden, _ = model(tokens, *packed([[64], [30, 34]]))
    cross_entropy_sum(model, hidden, tokens).backward()
    missing = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert missing == []
    assert all(torch.equal(value, buffers[key]) for key, value in model.named_buffers())


def test_loss_sums_over_valid_tokens_in_float32() -> None:
    model = build("dsv3-tiny").to(torch.bfloat16)
    hidden = torch.randn(2, 8, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = random_tokens(2, 8)
    labels[0, :5] = -100
    loss = cross_entropy_sum(model, hidden, labels)
    log_probs = model.logits(hidden).float().log_softmax(-1)
    picked = log_probs.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(loss, -picked[labels >= 0].sum())
    assert loss.dtype == torch.float32
    nothing = cross_entropy_sum(model, hidden, torch.full_like(labels, -100))
    assert nothing.item() == 0.0


@pytest.mark.parametrize("name", TINY)
def test_bfloat16_forward_stays_bfloat16_and_near_float32(name: str) -> None:
    model = build(name, routing="balanced")
    tokens, inputs = random_tokens(2, 64), packed([[64], [64]])
    expected, _ = model(tokens, *inputs)
    actual, _ = model.to(torch.bfloat16)(tokens, *inputs)
    assert actual.dtype == torch.bfloat16
    assert ((actual.float() - expected).norm() / expected.norm()).item() < 0.02


@pytest.mark.parametrize("name", TINY)
def test_a_layer_can_be_recomputed(name: str) -> None:
    """Gradients with and without activation checkpointing are equal to the bit."""
    from torch.utils.checkpoint import checkpoint

    inputs = (random_tokens(2, 32), *packed([[32], [11, 21]]))
    gradients = []
    for recompute in (False, True):
        model = build(name)
        if recompute:
            for layer in model.layers:
                plain = layer.forward
                layer.forward = lambda *args, f=plain: checkpoint(f, *args, use_reentrant=False)
        hidden, _ = model(*inputs)
        cross_entropy_sum(model, hidden, inputs[0]).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# --- attention kernels


def attention_inputs(q_dim: int, v_dim: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 24, 4, q_dim), (2, 24, kv_heads, q_dim), (2, 24, kv_heads, v_dim)]
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def varlen_in_python(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    **options: Any,
) -> Tensor:
    """What torch's varlen attention computes, one sequence at a time."""
    assert (max_q, max_k, options.pop("window_size")) == (24, 24, (-1, 0))
    assert torch.equal(cu_q, cu_k)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    gqa = options.pop("enable_gqa", False)
    assert gqa or q.shape[1] == k.shape[1]
    scale = options.pop("scale")
    assert not options
    parts = []
    for start, end in zip(cu_q.tolist(), cu_q[1:].tolist(), strict=False):
        heads = [x[start:end].transpose(0, 1) for x in (q, k, v)]
        part = torch.nn.functional.scaled_dot_product_attention(
            *heads, is_causal=True, scale=scale, enable_gqa=gqa
        )
        parts.append(part.transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("has_gqa", [True, False], ids=["torch-2.13", "torch-2.11"])
@pytest.mark.parametrize(("q_dim", "v_dim", "kv_heads"), [(12, 8, 4), (8, 8, 2), (8, 8, 1)])
def test_varlen_call_equals_masked_attention(
    monkeypatch: pytest.MonkeyPatch, q_dim: int, v_dim: int, kv_heads: int, has_gqa: bool
) -> None:
    """Boundaries, padding of v and repeated heads, with the kernel replaced by its definition."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_in_python)
    names = frozenset({"enable_gqa"} if has_gqa else ())
    monkeypatch.setattr(attention, "_varlen_parameters", lambda: names)
    q, k, v = attention_inputs(q_dim, v_dim, kv_heads)
    _, cu_seqlens = packed([[10, 14], [3, 4, 17]])
    mask = attention.attention_bounds(torch.empty(2, 24, 1), cu_seqlens)
    expected = attention.attend(q, k, v, mask, 0.3)
    actual = attention.attend(q, k, v, cu_seqlens, 0.3)
    assert actual.shape == (2, 24, 4, v_dim)
    torch.testing.assert_close(actual, expected)


def test_mask_is_causal_within_documents() -> None:
    _, cu_seqlens = packed([[2, 1], [3]], num_columns=4)
    mask = attention.attention_bounds(torch.empty(2, 3, 1), cu_seqlens)
    assert mask.squeeze(1).int().tolist() == [
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]],
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]],
    ]


def test_rotation_depends_on_distances_only() -> None:
    """Products of rotated vectors are equal when both positions move alike, in both layouts."""
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0)).unbind(0)

    def product(q_position: int, k_position: int, interleaved: bool) -> Tensor:
        rotated = []
        for x, position in ((q, q_position), (k, k_position)):
            cos, sin = attention.rope_tables(torch.tensor([[position]]), 8, 100.0)
            rotated.append(attention.rotate(x, cos, sin, interleaved=interleaved))
        return (rotated[0] * rotated[1]).sum()

    for interleaved in (False, True):
        near, far = product(5, 2, interleaved), product(105, 102, interleaved)
        torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-5)
        assert (product(5, 3, interleaved) - near).abs() > 1e-3
        torch.testing.assert_close(product(0, 0, interleaved), (q * k).sum())


def test_the_kernel_follows_device_and_type() -> None:
    """Varlen in half precision on CUDA, the mask elsewhere; a fake GPU is enough to ask."""
    cu_seqlens = torch.zeros(2, 4, dtype=torch.int32)
    with fake_mode():
        half = torch.empty(2, 8, 16, dtype=torch.bfloat16, device="cuda")
        assert attention.attention_bounds(half, cu_seqlens) is cu_seqlens
    for device, dtype in (
        ("cpu", torch.bfloat16),
        ("meta", torch.bfloat16),
        ("meta", torch.float32),
    ):
        x = torch.empty(2, 8, 16, dtype=dtype, device=device)
        bounds = attention.attention_bounds(x, cu_seqlens.to(device))
        assert (bounds.dtype, bounds.shape) == (torch.bool, (2, 1, 8, 8))


@pytest.mark.parametrize("name", ["dsv3-16b-slim", "qwen3-30b-slim"])
def test_attention_runs_on_meta(name: str) -> None:
    """Forward and backward of the real shapes, without memory."""
    attend_on("meta", name, torch.bfloat16)


@needs_cuda
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["dsv3-16b-slim", "qwen3-30b-slim"])
def test_attention_runs_on_a_fake_gpu(name: str, dtype: torch.dtype) -> None:
    """A torch without CUDA cannot slice a fake CUDA tensor, hence the tier."""
    with fake_mode():
        attend_on("cuda", name, dtype)


def attend_on(device: str, name: str, dtype: torch.dtype) -> None:
    """Runs one attention layer forward and backward, and checks shapes and types."""
    config = MODELS[name]
    latent = config.family == "deepseek_v3"
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            layer = (attention.LatentAttention if latent else attention.GroupedAttention)(config)
            x = torch.empty(2, 64, config.dim, requires_grad=True)
            positions = torch.zeros(2, 64, dtype=torch.int64)
            bounds = attention.attention_bounds(x, torch.zeros(2, 4, dtype=torch.int32))
            tables = attention.rope_tables(positions, config.rope_dim, config.rope_theta)
            out = layer(x, *tables, bounds)
            out.sum().backward()
    finally:
        torch.set_default_dtype(previous)
    assert out.shape == x.grad.shape == x.shape
    assert (out.dtype, out.device.type) == (dtype, device)


@needs_cuda
@pytest.mark.gpu
@pytest.mark.parametrize(("q_dim", "v_dim", "kv_heads"), [(192, 128, 4), (128, 128, 2)])
def test_varlen_kernel_equals_masked_attention(q_dim: int, v_dim: int, kv_heads: int) -> None:
    """Outputs and gradients in bfloat16 against float32 attention with the mask."""
    inputs = [x.cuda().bfloat16() for x in attention_inputs(q_dim, v_dim, kv_heads)]
    cu_seqlens = packed([[10, 14], [3, 4, 17]])[1].cuda()
    mask = attention.attention_bounds(torch.empty(2, 24, 1, device="cuda"), cu_seqlens)
    results = []
    for dtype, bounds in ((torch.float32, mask), (torch.bfloat16, cu_seqlens)):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = attention.attend(*leaves, bounds, q_dim**-0.5)
        out.float().square().sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    for expected, actual in zip(*results, strict=True):
        assert ((actual.float() - expected).norm() / expected.norm()).item() < 0.02


# --- presets


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("dsv3-tiny", 0.0012),
        ("qwen3-tiny", 0.0014),
        ("dsv3-16b", 15.71),
        ("dsv3-16b-slim", 4.594),
        ("qwen3-30b", 30.53),
        ("qwen3-30b-slim", 5.607),
        ("dsv3-671b", 671.0),
    ],
)
def test_presets_have_the_published_size(name: str, billions: float) -> None:
    assert check_model(MODELS[name]) == []
    with torch.device("meta"):
        model = build_model(preset(name), SINGLE)
    count = sum(p.numel() for p in model.parameters())
    assert count / 1e9 == pytest.approx(billions, rel=0.02)
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize("name", list(MODELS))
def test_expert_parameters_are_split_over_ranks(name: str) -> None:
    with torch.device("meta"):
        whole = build_model(preset(name), SINGLE)
        part = build_model(preset(name), ep.Exchange("ep", size=4, rank=1))
    expert_names = whole.expert_parameters()
    assert len(expert_names) == 2 * whole.config.num_moe_layers
    parts = dict(part.named_parameters())
    for key, parameter in whole.named_parameters():
        expected = parameter.shape[0] // 4 if key in expert_names else parameter.shape[0]
        assert parts[key].shape == (expected, *parameter.shape[1:])


# --- initial weights


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("size", [2, 4])
def test_initial_weights_do_not_depend_on_the_layout(name: str, size: int) -> None:
    whole = dict(build(name, seed=3).named_parameters())
    for rank in range(size):
        exchange = ep.Exchange("ep", size=size, rank=rank)
        model = build_model(MODELS[name], exchange)
        init_weights(model, 3, exchange)
        experts = set(model.expert_parameters())
        for key, actual in model.named_parameters():
            expected = whole[key].chunk(size)[rank] if key in experts else whole[key]
            assert torch.equal(actual, expected), key


def test_initial_weights_have_the_documented_spread() -> None:
    model = build("dsv3-tiny")
    residual = 0.02 / math.sqrt(2 * model.config.num_layers)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(weight, torch.ones_like(weight)), name
            continue
        is_residual = name.endswith(("attention.out.weight", ".w2.weight", ".w2"))
        expected = residual if is_residual else 1.0 if name == "embedding.weight" else 0.02
        assert weight.std().item() == pytest.approx(expected, rel=0.05), name
    w13 = model.layers[1].moe.experts.w13
    assert not torch.equal(w13[0], w13[1])
    assert not torch.equal(w13, model.layers[2].moe.experts.w13)


def test_routers_tell_tokens_apart_at_the_start() -> None:
    """Random tokens: the busiest of 64 experts gets 3 times its share, not all tokens (8 times)."""
    config = replace(MODELS["qwen3-tiny"], dim=512, num_experts=64, top_k=8, num_layers=3)
    model = build_model(config, SINGLE)
    init_weights(model, 0, SINGLE)
    tokens = torch.randint(config.vocab_size, (1, 512), generator=torch.Generator().manual_seed(0))
    routed = model(tokens, torch.arange(512)[None], torch.tensor([[0, 512]]).int())[1]
    counts_LE = routed.counts_LE.double()
    assert (counts_LE.amax(-1) / counts_LE.mean(-1)).max() < 3


def test_initial_weights_follow_the_seed_and_not_the_global_generator() -> None:
    first = build("qwen3-tiny", seed=1).head.weight
    torch.manual_seed(99)
    assert torch.equal(first, build("qwen3-tiny", seed=1).head.weight)
    assert not torch.equal(first, build("qwen3-tiny", seed=2).head.weight)


def test_init_weights_refuses_the_meta_device() -> None:
    with torch.device("meta"):
        model = build_model(preset("dsv3-tiny"), SINGLE)
    with pytest.raises(ValueError, match=r"embedding\.weight is on the meta device.*to_empty"):
        init_weights(model, 0, SINGLE)


# --- bad settings

DSV3_PROBLEMS = [
    ({"family": "llama"}, "model.family: 'llama' is unknown; use one of deepseek_v3, qwen3_moe."),
    ({"top_k": 9}, "model.top_k: 9 is more than model.num_experts = 8; use 8."),
    ({"top_k": 0}, "model.top_k: 0 must be at least 1; use 1 or more."),
    (
        {"top_k": 5},
        "model.top_k: 5 is more than the experts of 2 of 4 groups (model.top_groups) = 4; use 4.",
    ),
    ({"num_groups": 3}, "model.num_groups: 3 does not divide model.num_experts = 8; use 2."),
    ({"top_groups": 5}, "model.top_groups: 5 is more than model.num_groups = 4; use 4."),
    (
        {"qk_rope_head_dim": 15},
        "model.qk_rope_head_dim: 15 must be a multiple of 2, as positions turn pairs of channels; "
        "use 16.",
    ),
    (
        {"num_dense_layers": 3},
        "model.num_dense_layers: 3 must be at least 0 and below model.num_layers = 3, so that one "
        "layer has experts; use 2.",
    ),
    (
        {"dense_hidden_dim": 0},
        "model.dense_hidden_dim: 0 must be positive with model.num_dense_layers = 1; use 512.",
    ),
    ({"kv_lora_rank": 0}, "model.kv_lora_rank: 0 must be at least 1; use 1 or more."),
    ({"q_lora_rank": -1}, "model.q_lora_rank: -1 must be at least 0; use 0 or more."),
    (
        {"num_shared_experts": -2},
        "model.num_shared_experts: -2 must be at least 0; use 0 or more.",
    ),
    (
        {"route_scale": math.nan},
        "model.route_scale: nan must be a finite number above 0; use 1.0.",
    ),
    *(
        (
            {"routing": routing},
            f"model.routing: {routing!r} is unknown; use one of learned, balanced, "
            "skewed:<alpha> with a number of at least 0 for alpha, for example skewed:1.0.",
        )
        for routing in ("random", "skewed", "skewed:x", "skewed:-1", "skewed:nan")
    ),
]
QWEN3_PROBLEMS = [
    ({"num_kv_heads": 3}, "model.num_kv_heads: 3 does not divide model.num_heads = 4; use 2."),
    ({"num_kv_heads": 9}, "model.num_kv_heads: 9 does not divide model.num_heads = 4; use 4."),
    (
        {"head_dim": 31},
        "model.head_dim: 31 must be a multiple of 2, as positions turn pairs of channels; use 32.",
    ),
    ({"num_groups": 2}, "model.num_groups: 2 has no meaning in family qwen3_moe; use 1."),
    ({"route_scale": 2.0}, "model.route_scale: 2.0 has no meaning in family qwen3_moe; use 1.0."),
]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [("dsv3-tiny", *case) for case in DSV3_PROBLEMS]
    + [("qwen3-tiny", *case) for case in QWEN3_PROBLEMS],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_bad_settings_name_the_setting_and_a_legal_value(
    name: str, changes: dict[str, Any], message: str
) -> None:
    config = replace(MODELS[name], **changes)
    assert check_model(config) == [message]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build_model(config, SINGLE)


def test_unknown_preset_lists_the_presets() -> None:
    with pytest.raises(ValueError, match=r"model\.name: 'gpt' is unknown; use one of dsv3-tiny,"):
        preset("gpt")


def test_experts_that_the_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="8 experts cannot be split over 3"):
        build_model(preset("dsv3-tiny"), ep.Exchange("ep", size=3, rank=0))
