"""CUDA C++ compiled when it is first used: for kernels that Triton cannot express.

Those that claim shared memory without using it (why: ``bounded_copy.py``), or that need memory
orders and 64-bit addresses of other ranks.  The compiler is NVRTC, a library that CUDA builds of
torch bring along, so that no toolkit has to be installed; ``torch.cuda`` has such a call too, but
that one asks for a toolkit and passes whole numbers as 32 bits.  Sources include no header.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_OPTIN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN


@dataclass(frozen=True)
class CudaKernel:
    """A function loaded on one device; ``claim_bytes`` of shared memory belong to each CTA."""

    name: str
    device: torch.device
    function: ctypes.c_void_p
    claim_bytes: int

    def launch(self, num_ctas: int, num_threads: int, *args: Tensor | int | float | None) -> None:
        """Starts it on the current stream of its device.

        Arguments as the source declares them: tensors are pointers (None is a null pointer), whole
        numbers ``long long``, other numbers ``float``.  The caller keeps the tensors alive.
        """
        values = [_argument(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        with torch.cuda.device(self.device):
            _bind_context(self.device)
            stream = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
            sizes = (num_ctas, 1, 1, num_threads, 1, 1, self.claim_bytes)
            _call("cuLaunchKernel", self.function, *sizes, stream, pointers, None)


def cuda_kernel(source: str, name: str, device: torch.device, claim_bytes: int = 0) -> CudaKernel:
    """The function ``name`` of a CUDA C++ source, declared ``extern "C"``, ready for a device.

    Sync:   the first use of a source compiles it (tens of milliseconds to a second).
    Raises: RuntimeError with the compiler's log, and for a first use under CUDA graph capture.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return _loaded(source, name, index, claim_bytes)


@functools.cache
def _loaded(source: str, name: str, device: int, claim_bytes: int) -> CudaKernel:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name}: its first use on a device loads the kernel, and that cannot be captured. "
            "Run the step once before capturing it."
        )
    where = torch.device("cuda", device)
    with torch.cuda.device(where):
        _bind_context(where)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        image = compile_source(source, name, "sm_{}{}".format(*torch.cuda.get_device_capability()))
        _call("cuModuleLoadData", ctypes.byref(module), image)
        _call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        if claim_bytes:
            claim_bytes = _claim(name, where, claim_bytes)
            _call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, claim_bytes)
    return CudaKernel(name, where, function, claim_bytes)


def _claim(name: str, device: torch.device, claim_bytes: int) -> int:
    """As much of it as a CTA may have there; RuntimeError if two CTAs would still fit on an SM."""
    has = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    claim_bytes = min(claim_bytes, _most_shared(device))
    if 2 * claim_bytes <= has:
        raise RuntimeError(
            f"{name}: two CTAs with {claim_bytes} bytes of shared memory each fit on one SM of "
            f"{device}, which has {has}; N CTAs would not be N SMs. Leave the exchange unbounded."
        )
    return claim_bytes


def _most_shared(device: torch.device) -> int:
    """Bytes of shared memory that a CTA may have at most."""
    most = ctypes.c_int()
    _call("cuDeviceGetAttribute", ctypes.byref(most), _SHARED_OPTIN, _driver_device(device))
    return most.value


@functools.cache
def compile_source(source: str, name: str, arch: str) -> bytes:
    """The machine code of a source for ``arch`` (``sm_90``); needs NVRTC and no GPU."""
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None
    )
    if created:
        raise RuntimeError(f"{name}: NVRTC failed with error {created}.")
    flags = [f"--gpu-architecture={arch}".encode(), b"--fmad=false"]
    status = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
    if status:
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        raise RuntimeError(f"{name}: NVRTC failed with error {status}:\n{log.decode().strip()}")
    image = _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return image


def _text(size_of: Any, fill: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    fill(program, buffer)
    return buffer.raw


@functools.cache
def _nvrtc() -> Any:
    """The library of torch's own CUDA version, loaded already or beside torch's other libraries."""
    major = (torch.version.cuda or "13").partition(".")[0]
    beside = Path(torch.__file__).parents[1] / "nvidia"
    found = [str(path) for path in sorted(beside.glob(f"*/lib/libnvrtc.so.{major}*"))]
    for path in (f"libnvrtc.so.{major}", *found):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise RuntimeError(
        f"NVRTC of CUDA {major} was not found beside torch; install the package nvidia-cuda-nvrtc "
        "of that version."
    )


def _argument(value: Tensor | int | float | None) -> Any:
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_longlong(value) if isinstance(value, int) else ctypes.c_float(value)


def _bind_context(device: torch.device) -> None:
    """A thread that has not used CUDA yet has no context, and the driver's calls need one."""
    context = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    if not context.value:
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), _driver_device(device))
        _call("cuCtxSetCurrent", context)


def _driver_device(device: torch.device) -> ctypes.c_int:
    handle = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(handle), device.index)
    return handle


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args: Any) -> None:
    status = getattr(_driver(), name)(*args)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise RuntimeError(f"{name} failed with error {status}: {reason}.")
