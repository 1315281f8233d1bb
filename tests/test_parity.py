"""Both families against transformers: logits and every parameter gradient, in float32.

The oracle is an independent implementation with the same weights; the numbers differ by the order
of float32 sums only.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from interlace import ep
from interlace.model import ModelConfig, MoETransformer, build_model, cross_entropy_sum

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip(
        "transformers", reason="parity needs transformers; install the extra 'test'"
    )

SEQ_LEN = 24
RELATIVE = 1e-5  # at most 1.3e-6 seen
SHAPE = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}


def hf_deepseek(q_lora_rank: int | None) -> Any:
    config = transformers.DeepseekV3Config(
        **SHAPE,
        intermediate_size=48,
        moe_intermediate_size=20,
        num_key_value_heads=4,
        n_shared_experts=2,
        n_routed_experts=8,
        routed_scaling_factor=2.5,
        kv_lora_rank=16,
        q_lora_rank=q_lora_rank,
        qk_rope_head_dim=8,
        qk_nope_head_dim=12,
        v_head_dim=10,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        first_k_dense_replace=1,
        num_mtp_layers=0,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return transformers.DeepseekV3ForCausalLM(config)


def hf_qwen3() -> Any:
    config = transformers.Qwen3MoeConfig(
        **SHAPE,
        head_dim=12,
        num_key_value_heads=2,
        moe_intermediate_size=20,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return transformers.Qwen3MoeForCausalLM(config)


def our_config(family: str, q_lora_rank: int | None) -> ModelConfig:
    common: dict[str, Any] = {
        "name": "parity",
        "family": family,
        "vocab_size": 96,
        "dim": 32,
        "num_layers": 3,
        "num_heads": 4,
        "expert_hidden_dim": 20,
        "num_experts": 8,
        "top_k": 3,
    }
    if family == "qwen3_moe":
        return ModelConfig(**common, num_kv_heads=2, head_dim=12, rope_theta=1e6)
    return ModelConfig(
        **common,
        num_dense_layers=1,
        q_lora_rank=q_lora_rank or 0,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        dense_hidden_dim=48,
        num_shared_experts=2,
        num_groups=4,
        top_groups=2,
        route_scale=2.5,
    )


RENAMED = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "q_a_proj": "q_a",
    "q_b_proj": "q_b",
    "q_a_layernorm": "q_norm",
    "kv_a_proj_with_mqa": "kv_a",
    "kv_a_layernorm": "kv_norm",
    "kv_b_proj": "kv_b",
    "o_proj": "out",
    "q_norm": "q_norm",
    "k_norm": "k_norm",
}


def translate(theirs: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Their tensors, weights or gradients, under our names and in our layout."""
    ours = {
        "embedding.weight": theirs["model.embed_tokens.weight"],
        "norm.weight": theirs["model.norm.weight"],
        "head.weight": theirs["lm_head.weight"],
    }
    for i in range(config.num_layers):
        layer, source = f"layers.{i}.", f"model.layers.{i}."
        ours[layer + "attention_norm.weight"] = theirs[source + "input_layernorm.weight"]
        ours[layer + "ffn_norm.weight"] = theirs[source + "post_attention_layernorm.weight"]
        for name, tensor in theirs.items():
            if name.startswith(source + "self_attn."):
                part = RENAMED[name.removeprefix(source + "self_attn.").removesuffix(".weight")]
                ours[f"{layer}attention.{part}.weight"] = tensor
        if i < config.num_dense_layers:
            ours |= translate_dense(theirs, source + "mlp.", layer + "ffn.")
            continue
        experts = source + "mlp.experts."
        ours[layer + "moe.experts.w13"] = theirs[experts + "gate_up_proj"].transpose(1, 2)
        ours[layer + "moe.experts.w2"] = theirs[experts + "down_proj"].transpose(1, 2)
        ours[layer + "moe.router.gate"] = theirs[source + "mlp.gate.weight"]
        bias = source + "mlp.gate.e_score_correction_bias"
        if bias in theirs:
            ours[layer + "moe.router.expert_bias"] = theirs[bias]
        if config.num_shared_experts:
            ours |= translate_dense(theirs, source + "mlp.shared_experts.", layer + "moe.shared.")
    return ours


def translate_dense(theirs: dict[str, Tensor], source: str, target: str) -> dict[str, Tensor]:
    gate, up, down = (theirs[f"{source}{part}_proj.weight"] for part in ("gate", "up", "down"))
    return {target + "w13.weight": torch.cat((gate, up)), target + "w2.weight": down}


def randomise(model: Any) -> None:
    """Weights large enough that every path matters, norms and expert bias included."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            centre = 1.0 if "norm" in name else 0.0
            tensor.copy_(centre + 0.15 * torch.randn(tensor.shape, generator=generator))


def run_ours(
    model: MoETransformer, tokens: Tensor, labels: Tensor, lengths: list[int]
) -> tuple[Tensor, dict[str, Tensor]]:
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    padded = torch.cat((ends, torch.tensor([SEQ_LEN] * 2))).int().unsqueeze(0)
    hidden, _ = model(tokens, positions, padded)
    cross_entropy_sum(model, hidden, labels).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return model.logits(hidden).detach(), gradients


def run_theirs(
    model: Any, tokens: Tensor, labels: Tensor, lengths: list[int]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Each document alone; gradients add up."""
    logits = []
    for ids, targets in zip(tokens.split(lengths, 1), labels.split(lengths, 1), strict=True):
        out = model(input_ids=ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(out[0], targets[0], reduction="sum").backward()
        logits.append(out.detach())
    return torch.cat(logits, 1), {name: p.grad for name, p in model.named_parameters()}


def assert_near(name: str, actual: Tensor, expected: Tensor) -> None:
    error = ((actual - expected).norm() / expected.norm()).item()
    assert error < RELATIVE, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("lengths", [[SEQ_LEN], [5, 12, 7]], ids=["one-document", "packed"])
@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v3+q_lora", "qwen3_moe"])
def test_logits_and_gradients_equal_transformers(kind: str, lengths: list[int]) -> None:
    torch.set_num_threads(1)
    family, _, lora = kind.partition("+")
    q_lora_rank = 14 if lora else None
    theirs = hf_qwen3() if family == "qwen3_moe" else hf_deepseek(q_lora_rank)
    randomise(theirs)
    config = our_config(family, q_lora_rank)
    ours = build_model(config, ep.Exchange())
    ours.load_state_dict(translate(theirs.state_dict(), config), strict=True)

    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, 96, (2, 1, SEQ_LEN), generator=generator)
    logits, gradients = run_ours(ours, tokens, labels, lengths)
    expected_logits, their_gradients = run_theirs(theirs, tokens, labels, lengths)
    expected = translate(their_gradients, config)

    assert_near("logits", logits, expected_logits)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert expected[name].norm() > 0, f"{name} has no gradient to compare"
        assert_near(name, gradient, expected[name])
