"""Numbers of a training step: names, units and the JSONL file.

The keys are those that the field already reads.  Units are in the key where it has any.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

GIB = 1024**3

# Dense bf16 FLOP/s from the vendor's data sheets (without sparsity), most specific first:
# the words that must all be in the device's name.  No entry means unknown, never a guess.
PEAK_FLOPS: tuple[tuple[frozenset[str], float], ...] = (
    (frozenset(("H200", "NVL")), 835e12),
    (frozenset(("H200",)), 989e12),
    (frozenset(("H100", "NVL")), 835e12),
    (frozenset(("H100", "PCIE")), 756e12),
    (frozenset(("H100",)), 989e12),
    (frozenset(("B200",)), 2.25e15),
    (frozenset(("A100",)), 312e12),
)
_SLICES = frozenset(("MIG", "GRID", "VGPU"))  # a part of a device has a part of its peak


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device by its name, None when unknown.

    Whole words are compared: a GH200 is no H200.
    """
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if words & _SLICES:
        return None
    return next((flops for needed, flops in PEAK_FLOPS if needed <= words), None)


def peak_memory(device: torch.device) -> tuple[str, float]:
    """Key and GiB: what the allocator reserved at most on CUDA, the process's peak on CPU.

    A CPU process has no allocator to ask, so its figure (Python, libraries and all) has a key
    of its own.
    """
    if device.type == "cuda":
        return "memory/max_reserved(GiB)", torch.cuda.max_memory_reserved(device) / GIB
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return "memory/max_rss(GiB)", peak * unit_bytes / GIB


def ep_imbalance(counts_LE: Tensor) -> float | None:
    """Tokens of the busiest expert over the mean, in the worst layer; 1.0 is perfect balance.

    None for a model without MoE layers, or when no token was routed.  Reads the counts (sync).
    """
    if not counts_LE.numel():
        return None
    counts_LE = counts_LE.double()
    mean_L = counts_LE.mean(-1)
    ratio_L = counts_LE.amax(-1)[mean_L > 0] / mean_L[mean_L > 0]
    return float(ratio_L.max()) if ratio_L.numel() else None


def expert_load(counts_LE: Tensor) -> dict[str, list[float] | list[int]]:
    """By MoE layer: tokens of the busiest expert over the mean, and experts without a token.

    Computed on the counts' device, read once.  A layer without tokens has imbalance 0.
    """
    mean_L = counts_LE.double().mean(-1)
    imbalance_L = counts_LE.amax(-1) / mean_L.clamp(min=1e-300)
    dead_L = (counts_LE == 0).sum(-1)
    both = torch.stack((imbalance_L, dead_L.double())).tolist()
    return {
        "expert_load/imbalance": [round(x, 4) for x in both[0]],
        "expert_load/dead": [int(x) for x in both[1]],
    }


def step_record(
    *,
    step: int,
    loss: float,
    grad_norm: float,
    lr: float | None,
    tokens: int,
    tokens_seen: int,
    seconds: float,
    data_seconds: float,
    num_devices: int,
    memory: tuple[str, float],
    flops_per_token: float | None = None,
    peak_flops_per_device: float | None = None,
    imbalance: float | None = None,
    graph: str | None = None,
) -> dict[str, Any]:
    """The metrics of one step, in the order of the log line.

    ``tokens`` were taken in ``seconds`` by all ``num_devices`` together, ``data_seconds`` of them
    waiting for data; ``flops_per_token`` covers forward and backward.  tps and tflops are per
    device; what cannot be known is None.
    """
    tps = tokens / seconds / num_devices if seconds > 0 else None
    tflops = tps * flops_per_token / 1e12 if tps is not None and flops_per_token else None
    mfu = None
    if tflops is not None and peak_flops_per_device:
        mfu = 100 * tflops * 1e12 / peak_flops_per_device
    return {
        "step": step,
        "loss": loss,
        "grad_norm": grad_norm,
        memory[0]: memory[1],
        "throughput(tps)": tps,
        "tflops": tflops,
        "mfu(%)": mfu,
        "ep_imbalance": imbalance,
        "graph": graph,
        "lr": lr,
        "tokens_seen": tokens_seen,
        "time_metrics/end_to_end(s)": seconds,
        "time_metrics/data_loading(s)": data_seconds,
        "time_metrics/data_loading(%)": 100 * data_seconds / seconds if seconds > 0 else None,
    }


def to_json(record: Mapping[str, Any]) -> str:
    """One line of strict JSON: a number that is not finite becomes "nan", "inf" or "-inf"."""
    return json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def read_history(path: Path, last_step: int) -> list[dict[str, Any]]:
    """The records of the first ``last_step`` steps; the file is cut to them.

    A killed run may have written beyond the checkpoint that it resumes from, or half a line.
    """
    kept: list[tuple[str, dict[str, Any]]] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and record.get("step", math.inf) <= last_step:
                kept.append((line, record))
        fresh = path.with_suffix(".cut")
        fresh.write_text("".join(f"{line}\n" for line, _ in kept), encoding="utf-8")
        os.replace(fresh, path)
    return [record for _, record in kept]


class MetricsFile:
    """Owns a JSONL file: one record a line, on disk before the next step starts.

    An existing file is continued, so that a resumed run keeps its history.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one record and hands it to the operating system."""
        self._file.write(to_json(record) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Waits until all of it is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file; twice is fine."""
        self._file.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
