"""Copy with a bounded part of the GPU: N CTAs on N SMs, whatever else is running.

A bounded launch stands for a slower link on one GPU, and keeps an exchange from taking the compute
beside it.  Without a claim the scheduler piles the CTAs of such a launch on one SM as soon as other
work fills the rest (seen on an H200, 2026-11-29), so each CTA asks for more than half of
an SM's shared memory and never touches it.  Triton allocates only what a kernel uses, and compiling
CUDA at run time needs a toolkit; PTX and the driver's launch are always there: the kernel is PTX.

Legend: a vector is 16 bytes; a round is what all CTAs move before they move on.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

NUM_THREADS = 512
CLAIM_BYTES = 120 * 1024  # 200 KiB was slower: loads in flight need the L1 cache beside it
_VECTOR_BYTES = 16

# Each thread has 4 vectors in flight, 32 KiB a CTA: about 40 GB/s on an H200.  The loads of a round
# come before its stores, because the assembler must assume that src and dst overlap.
_PTX = """
.version 7.0
.target sm_80
.address_size 64

.visible .entry bounded_copy(
    .param .u64 p_dst, .param .u64 p_src, .param .u64 p_vectors, .param .u64 p_bytes)
.maxntid 512, 1, 1
{
    .reg .u64 dst, src, vectors, bytes, tid, cta, ctas, i0, i1, i2, i3, step, d, s, at;
    .reg .u32 t, a<4>, b<4>, c<4>, e<4>;
    .reg .u16 byte;
    .reg .pred p, p1, p2, p3;

    ld.param.u64 dst, [p_dst];          cvta.to.global.u64 dst, dst;
    ld.param.u64 src, [p_src];          cvta.to.global.u64 src, src;
    ld.param.u64 vectors, [p_vectors];  ld.param.u64 bytes, [p_bytes];
    mov.u32 t, %tid.x;                  cvt.u64.u32 tid, t;
    mov.u32 t, %ctaid.x;                cvt.u64.u32 cta, t;
    mov.u32 t, %nctaid.x;               cvt.u64.u32 ctas, t;

    mad.lo.u64 i0, cta, 2048, tid;      // 4 * 512 vectors a CTA and round
    mul.lo.u64 step, ctas, 2048;
ROUND:
    setp.ge.u64 p, i0, vectors;
    @p bra REST;
    add.u64 i1, i0, 512;                setp.lt.u64 p1, i1, vectors;
    add.u64 i2, i0, 1024;               setp.lt.u64 p2, i2, vectors;
    add.u64 i3, i0, 1536;               setp.lt.u64 p3, i3, vectors;
    shl.b64 at, i0, 4;
    add.u64 s, src, at;
    add.u64 d, dst, at;
    ld.global.v4.u32 {a0, a1, a2, a3}, [s];
    @p1 ld.global.v4.u32 {b0, b1, b2, b3}, [s + 8192];
    @p2 ld.global.v4.u32 {c0, c1, c2, c3}, [s + 16384];
    @p3 ld.global.v4.u32 {e0, e1, e2, e3}, [s + 24576];
    st.global.v4.u32 [d], {a0, a1, a2, a3};
    @p1 st.global.v4.u32 [d + 8192], {b0, b1, b2, b3};
    @p2 st.global.v4.u32 [d + 16384], {c0, c1, c2, c3};
    @p3 st.global.v4.u32 [d + 24576], {e0, e1, e2, e3};
    add.u64 i0, i0, step;
    bra ROUND;
REST:                                   // bytes that fill no vector, one by one
    mad.lo.u64 i0, cta, 512, tid;
    mad.lo.u64 i0, vectors, 16, i0;
    mul.lo.u64 step, ctas, 512;
BYTE:
    setp.ge.u64 p, i0, bytes;
    @p bra DONE;
    add.u64 s, src, i0;
    add.u64 d, dst, i0;
    ld.global.u8 byte, [s];
    st.global.u8 [d], byte;
    add.u64 i0, i0, step;
    bra BYTE;
DONE:
    ret;
}
"""

_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_OPTIN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_functions: dict[int, tuple[ctypes.c_void_p, int]] = {}  # by device: the kernel and its claim


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
    with torch.cuda.device(dst.device):
        _bind_context(dst.device.index)
        function, claim_bytes = _function(dst.device.index)
        args = (dst.data_ptr(), src.data_ptr(), num_vectors(dst, src), num_bytes)
        values = [ctypes.c_uint64(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream(dst.device).cuda_stream)
        sizes = (num_ctas, 1, 1, NUM_THREADS, 1, 1, claim_bytes)
        _call("cuLaunchKernel", function, *sizes, stream, pointers, None)


def num_vectors(dst: Tensor, src: Tensor) -> int:
    """Whole vectors that a copy can move: none when either end is off 16 bytes."""
    if (dst.data_ptr() | src.data_ptr()) % _VECTOR_BYTES:
        return 0
    return dst.numel() * dst.element_size() // _VECTOR_BYTES


def _function(device: int) -> tuple[ctypes.c_void_p, int]:
    if device not in _functions:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "bounded_copy: its first use on a device loads the kernel, and that cannot be "
                "captured. Run the step once before capturing it."
            )
        _functions[device] = _load(device)
    return _functions[device]


def _load(device: int) -> tuple[ctypes.c_void_p, int]:
    """The kernel, allowed its claim; RuntimeError if two CTAs would still fit on one SM."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    optin, resident = ctypes.c_int(), ctypes.c_int()
    _call("cuModuleLoadData", ctypes.byref(module), _PTX.encode())
    _call("cuModuleGetFunction", ctypes.byref(function), module, b"bounded_copy")
    _call("cuDeviceGetAttribute", ctypes.byref(optin), _SHARED_OPTIN, _driver_device(device))
    claim_bytes = min(CLAIM_BYTES, optin.value)
    _call("cuFuncSetAttribute", function, _DYNAMIC_SHARED_BYTES, claim_bytes)
    _call(
        "cuOccupancyMaxActiveBlocksPerMultiprocessor",
        ctypes.byref(resident),
        function,
        NUM_THREADS,
        ctypes.c_size_t(claim_bytes),
    )
    if resident.value != 1:
        raise RuntimeError(
            f"bounded_copy: {resident.value} CTAs with {claim_bytes} bytes of shared memory fit on "
            f"one SM of cuda:{device}; expected 1. N CTAs would not be N SMs: leave the exchange "
            "unbounded on this device."
        )
    return function, claim_bytes


def _bind_context(device: int) -> None:
    """A thread that has not used CUDA yet has no context, and the driver's calls need one."""
    context = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    if not context.value:
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), _driver_device(device))
        _call("cuCtxSetCurrent", context)


def _driver_device(device: int) -> ctypes.c_int:
    handle = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(handle), device)
    return handle


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"bounded_copy: the CUDA driver could not be loaded: {error}") from error


def _call(name: str, *args: Any) -> None:
    status = getattr(_driver(), name)(*args)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise RuntimeError(f"bounded_copy: {name} failed with error {status}: {reason}.")
