"""The numbers of a model, the presets, and the check of both.

One frozen dataclass serves both families; a number that belongs to the other family stays 0 (or 1
for groups).  Every message of :func:`check_model` names the setting as a user types it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

FAMILIES = ("deepseek_v3", "qwen3_moe")
ROUTINGS = "learned, balanced, skewed:<alpha>"


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a mixture-of-experts transformer.

    ``routing``: ``learned`` (the router chooses), ``balanced`` (every expert gets the same number
    of tokens) or ``skewed:<alpha>`` (expert e is drawn with weight (e + 1) ** -alpha; replayable).
    """

    name: str = "dsv3-tiny"
    family: str = "deepseek_v3"
    vocab_size: int = 256
    dim: int = 128
    num_layers: int = 3
    num_dense_layers: int = 0  # the first layers have a dense feed-forward instead of experts
    num_heads: int = 4
    # Multi-head latent attention (deepseek_v3); q_lora_rank 0 means a full query projection.
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    # Grouped-query attention (qwen3_moe).
    num_kv_heads: int = 0
    head_dim: int = 0
    # Feed-forward.
    dense_hidden_dim: int = 0
    expert_hidden_dim: int = 128
    num_experts: int = 8
    top_k: int = 2
    num_shared_experts: int = 0
    num_groups: int = 1  # deepseek_v3: experts are chosen from top_groups of num_groups groups
    top_groups: int = 1
    route_scale: float = 1.0
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    routing: str = "learned"
    balance_loss_weight: float = 0.0  # of the auxiliary loss that evens out the experts; 0 is off

    @property
    def rope_dim(self) -> int:
        """Leading or trailing channels of a head that carry the position."""
        return self.qk_rope_head_dim if self.family == "deepseek_v3" else self.head_dim

    @property
    def qk_head_dim(self) -> int:
        """Channels of a query or key head."""
        if self.family == "deepseek_v3":
            return self.qk_nope_head_dim + self.qk_rope_head_dim
        return self.head_dim

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.num_layers - self.num_dense_layers


def skew_alpha(routing: str) -> float | None:
    """The alpha of ``skewed:<alpha>``; None for any other text, and for an alpha that is none."""
    head, _, tail = routing.partition(":")
    if head != "skewed":
        return None
    try:
        alpha = float(tail)
    except ValueError:
        return None
    return alpha if math.isfinite(alpha) and alpha >= 0 else None


def check_model(config: ModelConfig) -> list[str]:
    """One message for every setting that cannot work; an empty list for a good model."""
    c = config
    if c.family not in FAMILIES:
        return [f"model.family: {c.family!r} is unknown; use one of {', '.join(FAMILIES)}."]
    problems = _check_positive(c)
    if problems:  # the relations below divide by these numbers
        return problems
    if not 0 <= c.num_dense_layers < c.num_layers:
        legal = min(max(c.num_dense_layers, 0), c.num_layers - 1)
        problems.append(
            f"model.num_dense_layers: {c.num_dense_layers} must be at least 0 and below "
            f"model.num_layers = {c.num_layers}, so that one layer has experts; use {legal}."
        )
    if c.num_dense_layers > 0 and c.dense_hidden_dim < 1:
        problems.append(
            f"model.dense_hidden_dim: {c.dense_hidden_dim} must be positive with "
            f"model.num_dense_layers = {c.num_dense_layers}; use {4 * c.dim}."
        )
    if c.rope_dim % 2:
        name = "qk_rope_head_dim" if c.family == "deepseek_v3" else "head_dim"
        problems.append(
            f"model.{name}: {c.rope_dim} must be a multiple of 2, as positions turn pairs of "
            f"channels; use {c.rope_dim + 1}."
        )
    if c.top_k > c.num_experts:
        problems.append(_too_large("top_k", c.top_k, "model.num_experts", c.num_experts))
    problems += _check_deepseek(c) if c.family == "deepseek_v3" else _check_qwen(c)
    if c.routing not in ("learned", "balanced") and skew_alpha(c.routing) is None:
        problems.append(
            f"model.routing: {c.routing!r} is unknown; use one of {ROUTINGS} with a number of at "
            "least 0 for alpha, for example skewed:1.0."
        )
    return problems


def preset(name: str) -> ModelConfig:
    """The preset of that name; ValueError lists the names there are."""
    if name not in MODELS:
        raise ValueError(f"model.name: {name!r} is unknown; use one of {', '.join(MODELS)}.")
    return MODELS[name]


def _check_positive(c: ModelConfig) -> list[str]:
    names = ["vocab_size", "dim", "num_layers", "num_heads", "num_experts", "top_k"]
    names += ["expert_hidden_dim", "num_groups", "top_groups"]
    if c.family == "deepseek_v3":
        names += ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
    else:
        names += ["num_kv_heads", "head_dim"]
    problems = [
        f"model.{name}: {getattr(c, name)} must be at least 1; use 1 or more."
        for name in names
        if getattr(c, name) < 1
    ]
    problems += [
        f"model.{name}: {getattr(c, name)} must be at least 0; use 0 or more."
        for name in ("q_lora_rank", "num_shared_experts")
        if getattr(c, name) < 0
    ]
    weight = c.balance_loss_weight
    if not (math.isfinite(weight) and weight >= 0):
        problems.append(f"model.balance_loss_weight: {weight} must be at least 0; use 0.0 (off).")
    problems += [
        f"model.{name}: {getattr(c, name)} must be a finite number above 0; use {default}."
        for name, default in (("rope_theta", 10_000.0), ("norm_eps", 1e-6), ("route_scale", 1.0))
        if not (math.isfinite(getattr(c, name)) and getattr(c, name) > 0)
    ]
    return problems


def _check_deepseek(c: ModelConfig) -> list[str]:
    problems = []
    if c.num_experts % c.num_groups:
        legal = _nearest_divisor(c.num_experts, c.num_groups)
        problems.append(
            f"model.num_groups: {c.num_groups} does not divide model.num_experts = "
            f"{c.num_experts}; use {legal}."
        )
    if c.top_groups > c.num_groups:
        problems.append(_too_large("top_groups", c.top_groups, "model.num_groups", c.num_groups))
    eligible = c.top_groups * (c.num_experts // c.num_groups)
    if not problems and eligible < c.top_k <= c.num_experts:
        what = f"the experts of {c.top_groups} of {c.num_groups} groups (model.top_groups) ="
        problems.append(_too_large("top_k", c.top_k, what, eligible, equals=""))
    return problems


def _check_qwen(c: ModelConfig) -> list[str]:
    problems = []
    if c.num_heads % c.num_kv_heads:
        legal = _nearest_divisor(c.num_heads, c.num_kv_heads)
        problems.append(
            f"model.num_kv_heads: {c.num_kv_heads} does not divide model.num_heads = "
            f"{c.num_heads}; use {legal}."
        )
    problems += [
        f"model.{name}: {getattr(c, name)} has no meaning in family qwen3_moe; use {legal}."
        for name, legal in (("num_groups", 1), ("top_groups", 1), ("route_scale", 1.0))
        if getattr(c, name) != legal
    ]
    return problems


def _too_large(name: str, value: int, bound: str, limit: int, equals: str = " =") -> str:
    return f"model.{name}: {value} is more than {bound}{equals} {limit}; use {limit}."


def _nearest_divisor(number: int, value: int) -> int:
    divisors = (d for d in range(1, number + 1) if number % d == 0)
    return min(divisors, key=lambda d: (abs(d - value), d))


_DSV3_TINY = ModelConfig(
    name="dsv3-tiny",
    family="deepseek_v3",
    vocab_size=256,
    dim=128,
    num_layers=3,
    num_dense_layers=1,
    num_heads=4,
    kv_lora_rank=64,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=32,
    dense_hidden_dim=256,
    expert_hidden_dim=128,
    num_experts=8,
    top_k=2,
    num_shared_experts=1,
    num_groups=4,
    top_groups=2,
)
_QWEN3_TINY = ModelConfig(
    name="qwen3-tiny",
    family="qwen3_moe",
    vocab_size=256,
    dim=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    expert_hidden_dim=128,
    num_experts=8,
    top_k=2,
)
_DSV3_16B = ModelConfig(
    name="dsv3-16b",
    family="deepseek_v3",
    vocab_size=102_400,
    dim=2048,
    num_layers=27,
    num_dense_layers=1,
    num_heads=16,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    dense_hidden_dim=10_944,
    expert_hidden_dim=1408,
    num_experts=64,
    top_k=6,
    num_shared_experts=2,
)
_QWEN3_30B = ModelConfig(
    name="qwen3-30b",
    family="qwen3_moe",
    vocab_size=151_936,
    dim=2048,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    expert_hidden_dim=768,
    num_experts=128,
    top_k=8,
    rope_theta=1e6,
)
_DSV3_671B = ModelConfig(
    name="dsv3-671b",
    family="deepseek_v3",
    vocab_size=129_280,
    dim=7168,
    num_layers=61,
    num_dense_layers=3,
    num_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    dense_hidden_dim=18_432,
    expert_hidden_dim=2048,
    num_experts=256,
    top_k=8,
    num_shared_experts=1,
    num_groups=8,
    top_groups=4,
    route_scale=2.5,
)

MODELS: dict[str, ModelConfig] = {
    model.name: model
    for model in (
        _DSV3_TINY,
        _QWEN3_TINY,
        _DSV3_16B,
        replace(_DSV3_16B, name="dsv3-16b-slim", num_layers=8),
        _QWEN3_30B,
        replace(_QWEN3_30B, name="qwen3-30b-slim", num_layers=8),
        _DSV3_671B,
    )
}
