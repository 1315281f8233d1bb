"""Floating-point operations of a token, counted from the numbers of a model."""

from __future__ import annotations

from interlace.model.config import ModelConfig


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Forward and backward operations of one token of a full causal sequence.

    Counts matrix products only, two operations a multiply-add, backward twice the forward; what is
    recomputed is not counted, the router and the head are.  Attention counts its causal half.
    """
    c = config
    if c.family == "deepseek_v3":
        rank = c.q_lora_rank
        q_in = c.dim * rank + rank * c.num_heads * c.qk_head_dim
        q = q_in if rank else c.dim * c.num_heads * c.qk_head_dim
        kv_heads = c.num_heads * (c.qk_nope_head_dim + c.v_head_dim)
        kv = c.dim * (c.kv_lora_rank + c.qk_rope_head_dim) + c.kv_lora_rank * kv_heads
        v_dim = c.v_head_dim
    else:
        q = c.dim * c.num_heads * c.head_dim
        kv = 2 * c.dim * c.num_kv_heads * c.head_dim
        v_dim = c.head_dim
    attention = q + kv + c.num_heads * v_dim * c.dim
    scores = c.num_heads * (c.qk_head_dim + v_dim) * seq_len / 2
    dense = 3 * c.dim * c.dense_hidden_dim
    experts = 3 * c.dim * c.expert_hidden_dim * (c.top_k + c.num_shared_experts)
    moe = experts + c.dim * c.num_experts
    multiply_adds = (
        c.num_layers * (attention + scores)
        + c.num_dense_layers * dense
        + c.num_moe_layers * moe
        + c.dim * c.vocab_size
    )
    return 6.0 * multiply_adds
