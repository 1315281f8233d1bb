"""Write rows straight into the windows of other ranks: gather, scale, send and place in one kernel.

Legend: S source rows, M rows to push, H width, W ranks.

CUDA C++ and not Triton, because a bounded launch claims shared memory that it never touches (why:
``bounded_copy.py``) and Triton allocates only what a kernel uses.  A warp carries a row at a time,
each lane four loads of 16 bytes before their stores.  Where rows come in an order of their own
(``take`` is given) they are taken in that order; else they lie sorted by expert and source rank, so
that neighbours go to the same peer, and CTAs take rows from all over instead.
"""

from __future__ import annotations

import functools
import math
from typing import Protocol

import torch
from torch import Tensor

from interlace.kernels.bounded_copy import CLAIM_BYTES
from interlace.kernels.cuda_source import cuda_kernel

NUM_THREADS = 512
DEFAULT_CTAS = 32
SELF_CTAS = 264  # rows that stay in this GPU are no exchange: two CTAs an SM
ALL, SELF, REMOTE = range(3)
_ELEMENTS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


class Windows(Protocol):
    """What is needed of :class:`interlace.ep.windows.Windows`."""

    @property
    def mine(self) -> Tensor: ...
    @property
    def peers(self) -> tuple[Tensor, ...]: ...
    @property
    def addresses(self) -> Tensor: ...
    @property
    def rank(self) -> int: ...


def push_rows_ref(
    source_SH: Tensor,
    take_M: Tensor | None,
    target_M: Tensor,
    windows: Windows,
    rows_per_rank: int,
    scale_M: Tensor | None = None,
) -> None:
    """The specification."""
    for rank, peer in enumerate(windows.peers):
        first = rank * rows_per_rank
        (moved,) = ((target_M >= first) & (target_M < first + rows_per_rank)).nonzero(as_tuple=True)
        rows = source_SH.index_select(0, moved if take_M is None else take_M[moved])
        if scale_M is not None:
            rows = (rows.float() * scale_M[moved][:, None]).to(rows.dtype)
        peer.index_copy_(0, target_M[moved] - first, rows)


def push_rows(
    source_SH: Tensor,
    take_M: Tensor | None,
    target_M: Tensor,
    windows: Windows,
    rows_per_rank: int,
    scale_M: Tensor | None = None,
    max_ctas: int | None = None,
) -> None:
    """``peers[t // rows_per_rank][t % rows_per_rank] = source[take[m]]`` for each t = target[m].

    Shapes:   source (S, H) contiguous rows; take (M,) int64 in [0, S), None is m itself; target
              (M,) int64 in [0, W * rows_per_rank), negative where a row goes nowhere; scale (M,)
              float32.  No two rows have one target.  Indices are not checked on CUDA.
    Units:    moves 2 * M * H * itemsize bytes.  ``max_ctas``: N CTAs, each with an SM to itself,
              carry the rows to other ranks; None is about 32 without that claim, for all rows.
              Rows that stay in this GPU are not bounded; in loopback those for rank 0.
    Numerics: without a scale bit-exact; with one, one float32 product, rounded once.
    Sync:     none; safe under capture once it ran before.  Peers see the rows after a ``publish``.
    Raises:   ValueError for shapes, types or devices that do not fit.
    Example:  rows_per_rank = 4, target = [5, -1, 0]: row 0 becomes row 1 of rank 1, row 2 row 0 of
              rank 0.
    """
    _check(source_SH, take_M, target_M, windows, scale_M)
    if not source_SH.is_cuda:
        push_rows_ref(source_SH, take_M, target_M, windows, rows_per_rank, scale_M)
        return
    if target_M.numel() == 0 or source_SH.shape[1] == 0:
        return
    args = (source_SH, take_M, target_M, windows, rows_per_rank, scale_M)
    if len(windows.peers) == 1:
        _launch(*args, num_ctas=SELF_CTAS, claim_bytes=0, which=ALL)
    elif max_ctas is None:
        _launch(*args, num_ctas=DEFAULT_CTAS, claim_bytes=0, which=ALL)
    else:
        _launch(*args, num_ctas=SELF_CTAS, claim_bytes=0, which=SELF)
        _launch(*args, num_ctas=max_ctas, claim_bytes=CLAIM_BYTES, which=REMOTE)


# UNIT bytes are moved at a time: 16, or less where rows do not start or end at such multiples.
# ELEMENT is the type for scaling, 0 for none.  Indices of a batch of rows are loaded by the lanes
# of a warp at once: most rows of a buffer of worst-case size go nowhere and must cost little.
_SOURCE = r"""
typedef long long i64;
typedef unsigned short u16;
#if UNIT == 16
struct __align__(16) Unit { unsigned word[4]; };
#elif UNIT == 8
struct __align__(8) Unit { unsigned word[2]; };
#elif UNIT == 4
struct __align__(4) Unit { unsigned word[1]; };
#elif UNIT == 2
struct __align__(2) Unit { u16 half; };
#else
struct Unit { unsigned char byte; };
#endif

__device__ u16 scaled16(u16 bits, float scale) {
    float value;
    u16 result;
#if ELEMENT == 2
    value = __uint_as_float((unsigned)bits << 16);
    value = __fmul_rn(value, scale);
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
#else
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    value = __fmul_rn(value, scale);
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
#endif
    return result;
}

__device__ Unit scaled(Unit unit, float scale) {
#if ELEMENT == 1
    for (int i = 0; i < UNIT / 4; i++)
        unit.word[i] = __float_as_uint(__fmul_rn(__uint_as_float(unit.word[i]), scale));
#elif ELEMENT > 1 && UNIT == 2
    unit.half = scaled16(unit.half, scale);
#elif ELEMENT > 1
    for (int i = 0; i < UNIT / 4; i++)
        unit.word[i] = scaled16(unit.word[i] & 0xffff, scale)
            | (unsigned)scaled16(unit.word[i] >> 16, scale) << 16;
#endif
    return unit;
}

struct Row { const char* from; char* to; float factor; };  // to is 0: goes nowhere

extern "C" __global__ void __launch_bounds__(512) push_rows(
    const char* source, i64 source_stride, const i64* take, const i64* target, const float* scale,
    const i64* addresses, i64 num_rows, i64 spread, i64 batch, i64 row_units, i64 rows_per_rank,
    i64 window_stride, i64 self, i64 which)
{
    const unsigned FULL = 0xffffffffu;
    int lane = threadIdx.x & 31;
    i64 warp = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    i64 step = (i64)gridDim.x * (blockDim.x / 32) * batch;
    auto row_at = [&](i64 i) {
        Row row = {0, 0, 1.0f};
        if (lane >= batch || i >= num_rows) return row;
        i64 m = i * spread % num_rows;
        i64 t = target[m];
        i64 rank = t < 0 ? -1 : t / rows_per_rank;
        if (rank < 0 || (which != 0 && (which == 1) != (rank == self))) return row;
        row.from = source + (take ? take[m] : m) * source_stride;
        row.to = (char*)addresses[rank] + (t - rank * rows_per_rank) * window_stride;
        if (scale) row.factor = scale[m];
        return row;
    };
    Row next = row_at(warp * batch + lane);
    for (i64 first = warp * batch; first < num_rows; first += step) {
        const char* from = next.from;
        char* to = next.to;
        float factor = next.factor;
        next = row_at(first + step + lane);  // on its way while this batch moves
        if (row_units == 1) {  // a row is a number: a lane carries one by itself
            if (to) *(Unit*)to = scaled(*(const Unit*)from, factor);
            continue;
        }
        unsigned live = __ballot_sync(FULL, to != 0);
        while (live) {
            int owner = __ffs(live) - 1;
            live &= live - 1;
            const Unit* s = (const Unit*)__shfl_sync(FULL, (i64)from, owner);
            Unit* d = (Unit*)__shfl_sync(FULL, (i64)to, owner);
            float x = __shfl_sync(FULL, factor, owner);
            for (i64 j = lane; j < row_units; j += 128) {
                Unit a, b, c, e;
                bool p1 = j + 32 < row_units, p2 = j + 64 < row_units, p3 = j + 96 < row_units;
                a = s[j];
                if (p1) b = s[j + 32];
                if (p2) c = s[j + 64];
                if (p3) e = s[j + 96];
                d[j] = scaled(a, x);
                if (p1) d[j + 32] = scaled(b, x);
                if (p2) d[j + 64] = scaled(c, x);
                if (p3) d[j + 96] = scaled(e, x);
            }
        }
    }
}
"""


@functools.cache
def source_of(unit_bytes: int, element: int) -> str:
    """The kernel for rows of such units; ``element`` 0 does not scale."""
    return f"#define UNIT {unit_bytes}\n#define ELEMENT {element}\n{_SOURCE}"


def unit_bytes(address: int, stride_bytes: int, row_bytes: int) -> int:
    """The widest access that fits every row: a power of two up to 16 that divides all of these."""
    return math.gcd(16, address, stride_bytes, row_bytes)


def _launch(
    source: Tensor,
    take: Tensor | None,
    target: Tensor,
    windows: Windows,
    rows_per_rank: int,
    scale: Tensor | None,
    *,
    num_ctas: int,
    claim_bytes: int,
    which: int,
) -> None:
    size, num_rows = source.element_size(), target.numel()
    stride_bytes, row_bytes = source.stride(0) * size, source.shape[1] * size
    unit = unit_bytes(source.data_ptr(), stride_bytes, row_bytes)
    element = 0 if scale is None else _ELEMENTS[source.dtype]
    kernel = cuda_kernel(source_of(unit, element), "push_rows", source.device, claim_bytes)
    num_warps = num_ctas * NUM_THREADS // 32
    kernel.launch(
        num_ctas, NUM_THREADS, source, stride_bytes, take, target, scale, windows.addresses,
        num_rows, spread_of(num_rows) if take is None else 1, min(-(-num_rows // num_warps), 32),
        row_bytes // unit, rows_per_rank, windows.mine.stride(0) * size, windows.rank, which,
    )  # fmt: skip


def spread_of(num_rows: int) -> int:
    """A step that visits every row once and neighbours far apart: near the golden section."""
    step = max(int(num_rows * 0.618), 1)
    while math.gcd(step, num_rows) > 1:
        step += 1
    return step


def _check(
    source_SH: Tensor,
    take_M: Tensor | None,
    target_M: Tensor,
    windows: Windows,
    scale_M: Tensor | None,
) -> None:
    if source_SH.dim() != 2 or (source_SH.shape[1] > 1 and source_SH.stride(1) != 1):
        raise ValueError(
            f"push_rows: source is {tuple(source_SH.shape)} with strides {source_SH.stride()}; "
            "expected (S, H) with contiguous rows."
        )
    window = windows.mine
    if (window.dtype, window.shape[1], window.device) != (
        source_SH.dtype, source_SH.shape[1], source_SH.device,
    ):  # fmt: skip
        raise ValueError(
            f"push_rows: source has rows of {source_SH.shape[1]} {source_SH.dtype} on "
            f"{source_SH.device}, the windows of {window.shape[1]} {window.dtype} on "
            f"{window.device}; open windows of that width and type."
        )
    for name, index in (("take", take_M), ("target", target_M)):
        if index is not None and (index.dtype != torch.int64 or index.shape != target_M.shape
                                  or index.dim() != 1):  # fmt: skip
            raise ValueError(
                f"push_rows: {name} is {index.dtype} {tuple(index.shape)}; expected int64 "
                f"{tuple(target_M.shape[:1])}."
            )
    if scale_M is not None and (
        scale_M.dtype != torch.float32
        or scale_M.shape != target_M.shape
        or source_SH.dtype not in _ELEMENTS
    ):
        raise ValueError(
            f"push_rows: scale is {scale_M.dtype} {tuple(scale_M.shape)} for rows of "
            f"{source_SH.dtype}; expected torch.float32 {tuple(target_M.shape)}, one factor a row, "
            "for float32, bfloat16 or float16."
        )
