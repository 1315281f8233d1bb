"""How many slots chose each expert before a slot did: the first step of where its row goes.

Legend: T tokens, K choices a token, N = T * K slots (slot t * K + k is choice k of token t),
        E experts, B blocks of slots.

CUDA C++: a warp goes through a block of slots in order and keeps a count of each expert, which
takes a vote among its lanes (``match``) that Triton does not have.  Positions come from order and
prefix sums, never from atomics: they are the same in every run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from interlace.kernels.cuda_source import cuda_kernel

BLOCK = 256  # slots that a warp goes through
_WARPS, _PREFIX_WARPS = 4, 32
_MAX_EXPERTS = 2048  # counts of _WARPS warps fit 32 KiB of shared memory


@dataclass(frozen=True)
class Ranked:
    """How many slots chose each expert, and which of them a slot is.

    Shapes: counts (E,) int32; within (N,) int32: earlier slots of the same block and expert;
            before (B, E) int32: slots of earlier blocks.  A block has ``BLOCK`` slots.
    """

    counts: Tensor
    within: Tensor
    before: Tensor


def rank_slots_ref(ids_TK: Tensor, num_experts: int) -> Ranked:
    """The specification."""
    ids_N = ids_TK.reshape(-1)
    num_blocks = max(-(-ids_N.numel() // BLOCK), 1)
    slot_N = torch.arange(ids_N.numel(), device=ids_N.device)
    key_N = slot_N // BLOCK * num_experts + ids_N
    counts_BE = torch.bincount(key_N, minlength=num_blocks * num_experts).view(num_blocks, -1)
    sorted_N, order_N = key_N.sort(stable=True)
    starts = torch.searchsorted(sorted_N, torch.arange(counts_BE.numel(), device=ids_N.device))
    within_N = torch.empty_like(ids_N, dtype=torch.int32)
    within_N[order_N] = (slot_N - starts[sorted_N]).to(torch.int32)
    before_BE = counts_BE.cumsum(0) - counts_BE
    return Ranked(counts_BE.sum(0).to(torch.int32), within_N, before_BE.to(torch.int32))


_SOURCE = r"""
typedef long long i64;
const unsigned FULL = 0xffffffffu;

extern "C" __global__ void __launch_bounds__(32 * WARPS) count_slots(
    const i64* ids, int* within, int* before, i64 num_slots, i64 num_blocks)
{
    __shared__ int seen_by_warp[WARPS][EXPERTS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 block = (i64)blockIdx.x * WARPS + warp;
    if (block >= num_blocks) return;
    int* seen = seen_by_warp[warp];
    for (int e = lane; e < EXPERTS; e += 32) seen[e] = 0;
    int expert[BLOCK / 32];  // all on their way at once
    for (int i = 0; i < BLOCK / 32; i++) {
        i64 slot = block * BLOCK + 32 * i + lane;
        expert[i] = slot < num_slots ? (int)ids[slot] : -1;
    }
    __syncwarp();
    for (int i = 0; i < BLOCK / 32; i++) {
        int e = expert[i];
        unsigned same = __match_any_sync(FULL, e);
        unsigned earlier = same & ((1u << lane) - 1);
        int base = e < 0 ? 0 : seen[e];
        __syncwarp();
        if (e >= 0) {
            within[block * BLOCK + 32 * i + lane] = base + __popc(earlier);
            if (!earlier) seen[e] = base + __popc(same);
        }
        __syncwarp();
    }
    for (int e = lane; e < EXPERTS; e += 32) before[block * EXPERTS + e] = seen[e];
}

// 32 experts a CTA, a lane each; a warp adds up its share of the blocks.
extern "C" __global__ void __launch_bounds__(32 * PREFIX_WARPS) add_up(
    int* before, int* counts, i64 num_blocks)
{
    __shared__ int sums[PREFIX_WARPS][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int expert = blockIdx.x * 32 + lane;
    i64 share = (num_blocks + PREFIX_WARPS - 1) / PREFIX_WARPS;
    i64 first = warp * share, last = first + share < num_blocks ? first + share : num_blocks;
    int sum = 0;
    if (expert < EXPERTS) {
        #pragma unroll 8
        for (i64 b = first; b < last; b++) sum += before[b * EXPERTS + expert];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    int running = 0;
    for (int w = 0; w < warp; w++) running += sums[w][lane];
    if (expert >= EXPERTS) return;
    if (warp == PREFIX_WARPS - 1) counts[expert] = running + sum;
    #pragma unroll 8
    for (i64 b = first; b < last; b++) {
        int found = before[b * EXPERTS + expert];
        before[b * EXPERTS + expert] = running;
        running += found;
    }
}
"""


@functools.cache
def source_of(num_experts: int) -> str:
    """Both kernels, for so many experts."""
    sizes = {"EXPERTS": num_experts, "BLOCK": BLOCK, "WARPS": _WARPS, "PREFIX_WARPS": _PREFIX_WARPS}
    return "".join(f"#define {name} {size}\n" for name, size in sizes.items()) + _SOURCE


def rank_slots(ids_TK: Tensor, num_experts: int) -> Ranked:
    """Counts each expert's slots and numbers them in slot order.

    Shapes:  ids (T, K) int64 in [0, E), not checked on CUDA.
    Sync:    none; safe under capture once it ran before.
    Raises:  ValueError for another type or more experts than the kernel has room for.
    Example: ids [[2], [0], [2]], E = 3 -> counts [1, 0, 2]; the slots are 0, 0, 1 of their experts.
    """
    if ids_TK.dtype != torch.int64 or ids_TK.dim() != 2:
        raise ValueError(
            f"rank_slots: ids is {ids_TK.dtype} {tuple(ids_TK.shape)}; expected int64 (T, K)."
        )
    if not ids_TK.is_cuda:
        return rank_slots_ref(ids_TK, num_experts)
    if num_experts > _MAX_EXPERTS:
        raise ValueError(
            f"rank_slots: {num_experts} experts are more than the {_MAX_EXPERTS} whose counts fit; "
            "use ep.backend=alltoall."
        )
    num_slots, device = ids_TK.numel(), ids_TK.device
    num_blocks = max(-(-num_slots // BLOCK), 1)
    counts, within, before = (
        torch.empty(shape, dtype=torch.int32, device=device)
        for shape in ((num_experts,), (num_slots,), (num_blocks, num_experts))
    )
    source = source_of(num_experts)
    count = cuda_kernel(source, "count_slots", device)
    count.launch(
        -(-num_blocks // _WARPS), 32 * _WARPS, ids_TK.contiguous(), within, before, num_slots,
        num_blocks,
    )  # fmt: skip
    add_up = cuda_kernel(source, "add_up", device)
    add_up.launch(-(-num_experts // 32), 32 * _PREFIX_WARPS, before, counts, num_blocks)
    return Ranked(counts, within, before)
