"""What this machine can run, and why not."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from interlace._compat import TORCH_BELOW, TORCH_MIN, package_available
from interlace.train.world import num_cores

_GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One thing that a machine has or lacks; ``why`` explains a lack and what it means."""

    name: str
    ok: bool
    value: str
    why: str = ""


def doctor(*, as_json: bool = False, stream: TextIO | None = None) -> int:
    """Print all findings: a table on a terminal, plain lines elsewhere.  Always 0."""
    stream = stream or sys.stdout
    findings = examine()
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2), file=stream)
    elif stream.isatty():
        _print_table(findings, stream)
    else:
        for item in findings:
            why = f" ({item.why})" if item.why else ""
            print(f"{'yes' if item.ok else 'no ':3}  {item.name}: {item.value}{why}", file=stream)
    return 0


def examine() -> list[Finding]:
    """Every finding; a probe that fails is a finding, never an error."""
    return [
        *_machine(),
        *_devices(),
        *_distributed(),
        *_kernels(),
        *_packages(),
        *_abilities(),
    ]


def _machine() -> list[Finding]:
    low, below = (".".join(map(str, version)) for version in (TORCH_MIN, TORCH_BELOW))
    return [
        Finding("python", sys.version_info >= (3, 11), platform.python_version()),
        Finding(
            "torch", True, torch.__version__, f"supported: {low} up to, not including, {below}"
        ),
        Finding("CPU cores", True, str(num_cores())),
        Finding("memory", True, f"{_memory_bytes() / _GIB:.1f} GiB"),
    ]


def _memory_bytes() -> int:
    """What the machine, or the container we are in, has."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(total, int(text)) if text.isdecimal() else total


def _devices() -> list[Finding]:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = (
            f"torch is built for CUDA {built}, no device answers" if built else "CPU build of torch"
        )
        return [Finding("CUDA", False, "no device", why)]
    found = []
    for i in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(i)
        found.append(
            Finding(
                f"cuda:{i}",
                True,
                f"{card.name}, {card.total_memory / _GIB:.0f} GiB, "
                f"capability {card.major}.{card.minor}, {card.multi_processor_count} SMs",
            )
        )
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    found.append(Finding("bfloat16 on CUDA", bf16, "native" if bf16 else "none"))
    return [*found, _peer_access()]


def _peer_access() -> Finding:
    """Direct access between all GPUs: what symmetric memory and CUDA IPC stand on."""
    count = torch.cuda.device_count()
    if count < 2:
        why = "one GPU: use ep.transport=loopback, or two processes through gloo"
        return Finding("P2P between GPUs", False, "no peer", why)
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    closed = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    why = f"for example cuda:{closed[0][0]} to cuda:{closed[0][1]}" if closed else ""
    value = f"{len(pairs) - len(closed)} of {len(pairs)} directions"
    return Finding("P2P between GPUs", not closed, value, why)


def _distributed() -> list[Finding]:
    import torch.distributed as dist

    if not dist.is_available():
        why = "this build of torch lacks it; one process and ep.transport=loopback work"
        return [Finding("torch.distributed", False, "absent", why)]
    nccl = dist.is_nccl_available()
    version = "absent"
    if nccl and torch.cuda.is_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))
    elif nccl:
        version = "present, no GPU to use it"
    return [
        Finding(
            "gloo", dist.is_gloo_available(), "present" if dist.is_gloo_available() else "absent"
        ),
        Finding("NCCL", nccl, version, "" if nccl else "needed for GPUs of their own per process"),
        _symmetric_memory(nccl),
    ]


def _symmetric_memory(nccl: bool) -> Finding:
    """From what it stands on; whether buffers can be mapped shows when they are."""
    name = "symmetric memory"
    if not torch.cuda.is_available():
        return Finding(name, False, "no", "needs CUDA")
    if not _peer_access().ok:
        return Finding(name, False, "no", "needs P2P between GPUs")
    return Finding(name, nccl, "possible" if nccl else "no", "" if nccl else "needs NCCL")


def _kernels() -> list[Finding]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [
        _try(f"grouped_mm, bfloat16 on {device}", lambda: _grouped_mm(device, torch.bfloat16)),
        _try("grouped_mm, float32 on cpu", lambda: _grouped_mm("cpu", torch.float32)),
        _varlen_attention(device),
        _package("triton", "triton", "needed for the kernels on CUDA; CPU uses the references"),
    ]


def _try(name: str, run: Callable[[], Tensor]) -> Finding:
    try:
        finite = bool(run().isfinite().all())
    except (RuntimeError, NotImplementedError, AttributeError, ValueError) as error:
        return Finding(name, False, "fails", str(error).splitlines()[0][:120])
    return Finding(name, finite, "works" if finite else "wrong result")


def _grouped_mm(device: str, dtype: torch.dtype) -> Tensor:
    x_RD = torch.ones(32, 16, device=device, dtype=dtype)
    w_eDF = torch.ones(2, 16, 16, device=device, dtype=dtype)
    ends_e = torch.tensor([16, 32], device=device, dtype=torch.int32)
    return torch.nn.functional.grouped_mm(x_RD, w_eDF, offs=ends_e)


def _varlen_attention(device: str) -> Finding:
    name = "varlen attention"
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return Finding(name, False, "absent", "this torch has no torch.nn.attention.varlen")
    if device == "cpu":
        return Finding(name, False, "needs CUDA", "CPU uses scaled_dot_product_attention")
    return _try(name, _run_varlen)


def _run_varlen() -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    x_THC = torch.ones(32, 2, 64, device="cuda", dtype=torch.bfloat16)
    bounds = torch.tensor([0, 16, 32], device="cuda", dtype=torch.int32)
    return varlen_attn(x_THC, x_THC, x_THC, bounds, bounds, 16, 16)


def _packages() -> list[Finding]:
    return [
        _package("FlashAttention 4", "flash_attn.cute", "optional, for Blackwell", "flash-attn-4"),
        _package(
            "FlashAttention 3", "flash_attn_interface", "optional, for Hopper", "flash-attn-3"
        ),
        _deep_ep(),
    ]


def _deep_ep() -> Finding:
    """NVIDIA's exchange library, for a backend that is tested with a stand-in for it."""
    name, native = "DeepEP HybridEPBuffer", "ep.backend=hybridep is interlace's own, also with it"
    wanted = "for ep.backend=hybridep_nvidia"
    if not package_available("deep_ep"):
        return Finding(name, False, "absent", f"{wanted}; else not needed: {native}")
    try:
        deep_ep = importlib.import_module("deep_ep")
    except Exception as error:  # an extension built for another CUDA or torch may raise anything
        return Finding(name, False, "cannot be imported", f"{str(error)[:80]}; {wanted}")
    if not hasattr(deep_ep, "HybridEPBuffer"):
        return Finding(name, False, "deep_ep without it", f"another branch of DeepEP; {wanted}")
    return Finding(name, True, "present", f"{wanted}, not yet run with it; {native}")


def _package(name: str, module: str, why: str, distribution: str | None = None) -> Finding:
    try:
        found = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        return Finding(name, False, "absent", why)
    try:
        version = importlib.metadata.version(distribution or module)
    except importlib.metadata.PackageNotFoundError:
        version = "present"
    return Finding(name, True, version)


def _abilities() -> list[Finding]:
    """The answer that people came for."""
    import torch.distributed as dist

    several = dist.is_available() and dist.is_gloo_available()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    no_gpu = "no CUDA device"
    return [
        Finding(
            "run: -tiny presets on CPU",
            True,
            "several processes" if several else "one process",
            "" if several else "no gloo: use ep.transport=loopback",
        ),
        Finding(
            "run: -slim presets, loopback",
            gpus > 0,
            "one GPU" if gpus else "no",
            "" if gpus else no_gpu,
        ),
        Finding(
            "run: -slim presets, expert parallel",
            gpus > 1 and several,
            f"{gpus} GPUs over NCCL" if gpus > 1 else "no",
            "" if gpus > 1 else "needs two GPUs" if gpus else no_gpu,
        ),
    ]


def _print_table(findings: list[Finding], stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "what", "found", "why, or what it means", box=None, header_style="bold")
    for item in findings:
        mark = "[green]yes[/]" if item.ok else "[yellow]no[/]"
        table.add_row(mark, item.name, item.value, item.why)
    Console(file=stream).print(table)
