"""Causal attention within documents: latent (deepseek_v3) and grouped-query (qwen3_moe).

Legend: B sequences, S tokens a sequence, D hidden, H query heads, G key/value heads,
d channels of a query or key head, v channels of a value head, r half of the rotated channels,
C document boundaries a sequence.

``bounds`` says where documents end, and by its type which kernel runs; both forms keep the
sequences in dimension 0, so that a part of the batch is a plain slice of every input:

    bool (B, 1, S, S)  what a token may see      SDPA: CPU, meta, and float32 on CUDA
    int32 (B, C)       boundaries of each row    torch's varlen attention: half precision on CUDA
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interlace._compat import package_available
from interlace.model.config import ModelConfig
from interlace.model.layers import Linear, RMSNorm


def rope_tables(positions_BS: Tensor, rope_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position and frequency: two (B, S, r) float32 tensors."""
    exponents_r = torch.arange(
        0, rope_dim, 2, dtype=torch.float32, device=positions_BS.device
    ) / float(rope_dim)
    angles_BSr = positions_BS.float().unsqueeze(-1) * (1.0 / theta**exponents_r)
    return angles_BSr.cos(), angles_BSr.sin()


def rotate(x_BSHd: Tensor, cos_BSr: Tensor, sin_BSr: Tensor, *, interleaved: bool) -> Tensor:
    """Turns pairs of channels by the angle of their position, in float32.

    Pairs are neighbours (0, 1), (2, 3), ... when ``interleaved``, else (0, r), (1, r + 1), ...
    The result always holds all first members, then all second ones: queries and keys are
    permuted alike, so that their products do not change.
    """
    num_pairs = cos_BSr.shape[-1]
    split = x_BSHd.float().unflatten(-1, (num_pairs, 2) if interleaved else (2, num_pairs))
    a, b = split.unbind(-1 if interleaved else -2)
    cos, sin = cos_BSr.unsqueeze(2), sin_BSr.unsqueeze(2)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x_BSHd.dtype)


def attention_bounds(x_BSD: Tensor, cu_seqlens_BC: Tensor) -> Tensor:
    """``bounds`` for hidden states like x, once a forward.

    Varlen kernels exist for half precision on CUDA only; everything else gets the mask.
    """
    if x_BSD.device.type == "cuda" and x_BSD.dtype in (torch.bfloat16, torch.float16):
        return cu_seqlens_BC
    index_S = torch.arange(x_BSD.shape[1], device=x_BSD.device)
    # A token belongs to as many documents as have ended at or before it.
    document_BS = (index_S[None, :, None] >= cu_seqlens_BC[:, None, 1:]).sum(-1)
    same_BSS = document_BS[:, :, None] == document_BS[:, None, :]
    return (same_BSS & (index_S[:, None] >= index_S[None, :])).unsqueeze(1)


def attend(q_BSHd: Tensor, k_BSGd: Tensor, v_BSGv: Tensor, bounds: Tensor, scale: float) -> Tensor:
    """Attention of each token to the earlier ones of its document -> (B, S, H, v)."""
    if bounds.dtype == torch.bool:
        q, k, v = (x.transpose(1, 2) for x in (q_BSHd, k_BSGd, v_BSGv))
        num_repeats = q.shape[1] // k.shape[1]
        out = F.scaled_dot_product_attention(
            q, _repeat(k, num_repeats, 1), _repeat(v, num_repeats, 1), attn_mask=bounds, scale=scale
        )
        return out.transpose(1, 2)
    return _attend_varlen(q_BSHd, k_BSGd, v_BSGv, bounds, scale)


def _repeat(x: Tensor, times: int, dim: int) -> Tensor:
    """Repeats each head ``times`` times, next to itself."""
    return x if times == 1 else x.repeat_interleave(times, dim=dim)


def _attend_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_BC: Tensor, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    num_rows, seq_len = q.shape[:2]
    starts_B1 = torch.arange(num_rows, dtype=torch.int32, device=q.device).unsqueeze(1) * seq_len
    # Boundaries that repeat are documents without tokens: the count stays static.
    cu_seqlens = (cu_seqlens_BC + starts_B1).flatten()
    v_dim = v.shape[-1]
    v = F.pad(v, (0, q.shape[-1] - v_dim))  # the kernels know one head dimension
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}  # causal
    num_repeats = q.shape[2] // k.shape[2]
    if num_repeats > 1 and "enable_gqa" in _varlen_parameters():
        options["enable_gqa"] = True
    else:
        k, v = _repeat(k, num_repeats, 2), _repeat(v, num_repeats, 2)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, seq_len, seq_len, **options)
    return out.unflatten(0, (num_rows, seq_len))[..., :v_dim]


@functools.cache
def _varlen_parameters() -> frozenset[str]:
    """What this torch's varlen attention can be told: 2.13 has enable_gqa, 2.11 does not."""
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


@functools.cache
def activate_flash_attention(head_dim: int) -> str | None:
    """Makes torch use FlashAttention 4 (Blackwell) or 3 (Hopper) where the package is installed.

    The name of the implementation that was activated, or None: torch's own kernels then run.
    FlashAttention 4 is left alone for heads above 128 channels, which it lacks, and before torch
    2.13, whose backward through it refuses causal documents.
    """
    from torch.nn import attention as torch_attention

    activate = getattr(torch_attention, "activate_flash_attention_impl", None)
    if activate is None or not torch.cuda.is_available():
        return None
    major = torch.cuda.get_device_capability()[0]
    has_gqa = "enable_gqa" in _varlen_parameters()  # torch 2.13
    if major == 10 and head_dim <= 128 and has_gqa and package_available("flash_attn.cute"):
        name = "FA4"
    elif major == 9 and package_available("flash_attn_interface"):
        name = "FA3"
    else:
        return None
    activate(name)
    return name


class LatentAttention(nn.Module):
    """Multi-head latent attention: keys and values are expanded from one small latent.

    ``kv_a`` gives the latent and one rotated key that all heads share; ``kv_b`` expands the latent
    into the unrotated keys and the values of every head.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = self.config = config
        if c.q_lora_rank:
            self.q_a = Linear(c.dim, c.q_lora_rank)
            self.q_norm = RMSNorm(c.q_lora_rank, c.norm_eps)
            self.q_b = Linear(c.q_lora_rank, c.num_heads * c.qk_head_dim)
        else:
            self.q = Linear(c.dim, c.num_heads * c.qk_head_dim)
        self.kv_a = Linear(c.dim, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_norm = RMSNorm(c.kv_lora_rank, c.norm_eps)
        self.kv_b = Linear(c.kv_lora_rank, c.num_heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.out = Linear(c.num_heads * c.v_head_dim, c.dim)

    def forward(self, x_BSD: Tensor, cos_BSr: Tensor, sin_BSr: Tensor, bounds: Tensor) -> Tensor:
        c = self.config
        q = self.q_b(self.q_norm(self.q_a(x_BSD))) if c.q_lora_rank else self.q(x_BSD)
        q_nope, q_rope = q.unflatten(-1, (c.num_heads, c.qk_head_dim)).split(
            [c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1
        )
        latent, k_rope = self.kv_a(x_BSD).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        kv = self.kv_b(self.kv_norm(latent)).unflatten(-1, (c.num_heads, -1))
        k_nope, v_BSHv = kv.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        q_rope = rotate(q_rope, cos_BSr, sin_BSr, interleaved=True)
        k_rope = rotate(k_rope.unsqueeze(2), cos_BSr, sin_BSr, interleaved=True)
        q_BSHd = torch.cat((q_nope, q_rope), dim=-1)
        k_BSHd = torch.cat((k_nope, k_rope.expand(-1, -1, c.num_heads, -1)), dim=-1)
        out_BSHv = attend(q_BSHd, k_BSHd, v_BSHv, bounds, c.qk_head_dim**-0.5)
        return self.out(out_BSHv.flatten(2))


class GroupedAttention(nn.Module):
    """Grouped-query attention, with queries and keys normalised head by head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = self.config = config
        self.q = Linear(c.dim, c.num_heads * c.head_dim)
        self.k = Linear(c.dim, c.num_kv_heads * c.head_dim)
        self.v = Linear(c.dim, c.num_kv_heads * c.head_dim)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps)
        self.out = Linear(c.num_heads * c.head_dim, c.dim)

    def forward(self, x_BSD: Tensor, cos_BSr: Tensor, sin_BSr: Tensor, bounds: Tensor) -> Tensor:
        heads = (-1, self.config.head_dim)
        q_BSHd = self.q_norm(self.q(x_BSD).unflatten(-1, heads))
        k_BSGd = self.k_norm(self.k(x_BSD).unflatten(-1, heads))
        v_BSGd = self.v(x_BSD).unflatten(-1, heads)
        q_BSHd = rotate(q_BSHd, cos_BSr, sin_BSr, interleaved=False)
        k_BSGd = rotate(k_BSGd, cos_BSr, sin_BSr, interleaved=False)
        out_BSHd = attend(q_BSHd, k_BSGd, v_BSGd, bounds, self.config.head_dim**-0.5)
        return self.out(out_BSHd.flatten(2))
