"""Copy with a bounded part of the GPU: N CTAs on N SMs, whatever else is running.

A bounded launch stands for a slower link on one GPU, and keeps an exchange from taking the compute
beside it.  Without a claim the scheduler piles the CTAs of such a launch on one SM as soon as other
work fills the rest (seen on an H200, 2026-11-29), so each CTA asks for more than half of
an SM's shared memory and never touches it.  Triton allocates only what a kernel uses, hence CUDA.
"""

from __future__ import annotations

from torch import Tensor

from interlace.kernels.cuda_source import cuda_kernel

NUM_THREADS = 512
CLAIM_BYTES = 120 * 1024  # 200 KiB was slower: loads in flight need the L1 cache beside it
_VECTOR_BYTES = 16

# Each thread has 4 vectors of 16 bytes in flight, 32 KiB a CTA: about 40 GB/s on an H200.
_SOURCE = r"""
typedef long long i64;
struct __align__(16) Vector { unsigned word[4]; };

extern "C" __global__ void __launch_bounds__(512) bounded_copy(
    char* __restrict__ dst, const char* __restrict__ src, i64 vectors, i64 bytes)
{
    const Vector* s = (const Vector*)src;
    Vector* d = (Vector*)dst;
    i64 thread = threadIdx.x, threads = 512;
    for (i64 i = blockIdx.x * 4 * threads + thread; i < vectors; i += gridDim.x * 4 * threads) {
        Vector a, b, c, e;
        bool p1 = i + threads < vectors, p2 = i + 2 * threads < vectors;
        bool p3 = i + 3 * threads < vectors;
        a = s[i];
        if (p1) b = s[i + threads];
        if (p2) c = s[i + 2 * threads];
        if (p3) e = s[i + 3 * threads];
        d[i] = a;
        if (p1) d[i + threads] = b;
        if (p2) d[i + 2 * threads] = c;
        if (p3) d[i + 3 * threads] = e;
    }
    // Bytes that fill no vector, one by one.
    for (i64 i = 16 * vectors + blockIdx.x * threads + thread; i < bytes; i += gridDim.x * threads)
        dst[i] = src[i];
}
"""


def bounded_copy(dst: Tensor, src: Tensor, num_ctas: int) -> None:
    """Copies ``src`` into ``dst`` with ``num_ctas`` CTAs, no two of them on one SM.

    Shapes:   equal, of equal type, both contiguous and apart; on CPU a plain copy.
    Units:    moves 2 * numel * itemsize bytes; memory off 16 bytes is copied byte by byte, slowly.
    Numerics: bit-exact.
    Sync:     none; on the current stream.  Safe under capture once it ran on that device before.
              The caller keeps both tensors alive until it has run.
    Raises:   ValueError for tensors or a bound that do not fit; RuntimeError where the bound cannot
              be kept: it never copies unbounded instead.
    """
    if (dst.shape, dst.dtype, dst.device) != (src.shape, src.dtype, src.device):
        raise ValueError(
            f"bounded_copy: dst is {dst.dtype} {tuple(dst.shape)} on {dst.device}, src is "
            f"{src.dtype} {tuple(src.shape)} on {src.device}; expected the same of both."
        )
    if not (dst.is_contiguous() and src.is_contiguous()):
        raise ValueError(
            f"bounded_copy: strides of dst are {dst.stride()}, of src {src.stride()}; "
            "both must be contiguous. Gather the rows first."
        )
    if num_ctas < 1:
        raise ValueError(f"bounded_copy: num_ctas is {num_ctas}; expected at least 1.")
    if not dst.is_cuda:
        dst.copy_(src)
        return
    num_bytes = dst.numel() * dst.element_size()
    if num_bytes == 0:
        return
    kernel = cuda_kernel(_SOURCE, "bounded_copy", dst.device, CLAIM_BYTES)
    kernel.launch(num_ctas, NUM_THREADS, dst, src, num_vectors(dst, src), num_bytes)


def num_vectors(dst: Tensor, src: Tensor) -> int:
    """Whole vectors that a copy can move: none when either end is off 16 bytes."""
    if (dst.data_ptr() | src.data_ptr()) % _VECTOR_BYTES:
        return 0
    return dst.numel() * dst.element_size() // _VECTOR_BYTES
