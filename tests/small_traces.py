"""Traces written by hand, for exact answers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

GEMM = "void cutlass::device_kernel<Gemm>(Params)"
A2A = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
BASE = 1_000_000.0


def kernel(
    name: str, start: float, dur: float, stream: int = 7, corr: int | None = None, **args: Any
) -> dict[str, Any]:
    more = {"device": 0, "stream": stream} | ({} if corr is None else {"correlation": corr}) | args
    return {
        "ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream,
        "ts": BASE + start, "dur": dur, "args": more,
    }  # fmt: skip


def host(
    category: str, name: str, start: float, dur: float, corr: int | None = None, tid: int = 1
) -> dict[str, Any]:
    args = {} if corr is None else {"correlation": corr}
    return {
        "ph": "X", "cat": category, "name": name, "pid": 99, "tid": tid,
        "ts": BASE + start, "dur": dur, "args": args,
    }  # fmt: skip


def launch(corr: int, start: float, name: str = "cudaLaunchKernel") -> dict[str, Any]:
    return host("cuda_runtime", name, start, 1, corr)


def said(name: str, start: float, end: float, tid: int = 1) -> dict[str, Any]:
    return host("user_annotation", name, start, end - start, tid=tid)


def trace(events: list[dict[str, Any]], rank: int | None = 0, world: int = 1) -> dict[str, Any]:
    info = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": world}}
    return {"schemaVersion": 1, **info, "traceEvents": events}


def write(path: Path, content: dict[str, Any] | list[Any] | str | bytes) -> Path:
    """Gzip where the name says so."""
    data = content if isinstance(content, bytes) else (
        content if isinstance(content, str) else json.dumps(content)
    ).encode()  # fmt: skip
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
