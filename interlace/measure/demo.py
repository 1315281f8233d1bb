"""The small trace of ``interlace report --demo``, made by a schedule on paper; no GPU took part.

    python -m interlace.measure.demo        # writes demo.json.gz beside this file

Two steps of a model with three MoE layers, each cut into two chunks: while one chunk's tokens
travel, the other computes.  Streams run in order; an operation starts when its stream is free and
what it needs is done.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMPUTE, EXCHANGE, REDUCE, PAGE = 7, 20, 24, 28
_NAMES = {
    "attention": "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64>>(Flash_fwd_params)",
    "attention_grad": "void flash_bwd_kernel<Flash_bwd_kernel_traits<128, 64>>(Flash_bwd_params)",
    "router": "triton_per_fused_topk_sigmoid_2",
    "experts": "void cutlass::device_kernel<GroupedGemm<bf16, 128, 256, 64>>(Params)",
    "experts_grad": "void cutlass::device_kernel<GroupedGemmWgrad<bf16, 128, 256, 64>>(Params)",
    "adam": "void at::native::multi_tensor_apply_kernel<FusedAdamMath<float, 4>>(TensorList)",
    "exchange": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    "reduce": "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "stash": "page_stash_kernel",
    "reload": "page_reload_kernel",
}
_NUM_LAYERS, _NUM_CHUNKS = 3, 2
_HOST = {"pid": 4000, "tid": 4000}


@dataclass
class _Paper:
    """Events so far, and when each stream is free."""

    events: list[dict[str, Any]] = field(default_factory=list)
    free: dict[int, float] = field(default_factory=dict)
    host: float = 1000.0
    launches: int = 0

    def run(self, name: str, stream: int, us: float, *after: float, said: str = "") -> float:
        """Launch a kernel, inside an annotation if one is given; when it will be done."""
        self.launches += 1
        start = max(self.host + 6, self.free.get(stream, 0.0), *after)
        number, args = self.launches, {"device": 0, "stream": stream}
        self.event("cuda_runtime", "cudaLaunchKernel", self.host, 3, _HOST, {"correlation": number})
        if said:
            self.event("user_annotation", said, self.host - 0.5, 4, _HOST, {})
        place = {"pid": 0, "tid": stream}
        self.event("kernel", _NAMES[name], start, us, place, args | {"correlation": number})
        self.host += 5
        self.free[stream] = start + us
        return start + us

    def event(
        self,
        cat: str,
        name: str,
        ts: float,
        dur: float,
        place: dict[str, int],
        args: dict[str, int],
    ) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, **place, "ts": round(ts, 3),
             "dur": round(dur, 3), "args": args}
        )  # fmt: skip


def _forward(paper: _Paper, layer: int, ready: list[float], skew: float) -> list[float]:
    begin, text = paper.host, f"layers.{layer} forward"
    sent = []
    for chunk in range(_NUM_CHUNKS):
        done = paper.run("attention", COMPUTE, 210, ready[chunk])
        done = paper.run("router", COMPUTE, 24.5, done)
        sent.append(paper.run("exchange", EXCHANGE, 190 * skew, done, said=f"{text} dispatch"))
    back = []
    for chunk in range(_NUM_CHUNKS):
        done = paper.run("experts", COMPUTE, 165.25 * skew, sent[chunk])
        paper.run("stash", PAGE, 40, done, said=f"{text} page_stash")
        back.append(paper.run("exchange", EXCHANGE, 205 * skew, done, said=f"{text} combine"))
    paper.event("user_annotation", text, begin - 1, paper.host - begin, _HOST, {})
    return back


def _backward(paper: _Paper, layer: int, ready: list[float], skew: float) -> list[float]:
    begin, text = paper.host, f"layers.{layer} backward"
    sent = []
    for chunk in range(_NUM_CHUNKS):
        sent.append(
            paper.run("exchange", EXCHANGE, 205 * skew, ready[chunk], said=f"{text} dispatch")
        )
    back = []
    for chunk in range(_NUM_CHUNKS):
        pages = paper.run("reload", PAGE, 42, said=f"{text} page_reload")
        done = paper.run("experts", COMPUTE, 165.25 * skew, sent[chunk], pages)
        back.append(paper.run("exchange", EXCHANGE, 190 * skew, done, said=f"{text} combine"))
        paper.run("experts_grad", COMPUTE, 150.5 * skew, done)
    ended = [paper.run("attention_grad", COMPUTE, 380, at) for at in back]
    paper.run("reduce", REDUCE, 260, ended[-1], said=f"{text} nccl:_reduce_scatter_base")
    paper.event("user_annotation", text, begin - 1, paper.host - begin, _HOST, {})
    return ended


def demo_trace() -> dict[str, Any]:
    """A trace in the form of torch.profiler."""
    paper = _Paper()
    for step in range(2):
        paper.host = max([paper.host, *paper.free.values()]) + 50
        begin, ready = paper.host, [paper.host] * _NUM_CHUNKS
        skews = (1.0, 1.35, 0.9) if step else (1.1, 1.2, 1.0)
        for layer in range(_NUM_LAYERS):
            ready = _forward(paper, layer, ready, skews[layer])
        for layer in reversed(range(_NUM_LAYERS)):
            ready = _backward(paper, layer, ready, skews[layer])
        last = paper.run("adam", COMPUTE, 120, paper.free[REDUCE], said="Optimizer.step#AdamW.step")
        paper.event("user_annotation", f"ProfilerStep#{step}", begin - 10, last - begin, _HOST, {})
    return {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},
        "displayTimeUnit": "ms",
        "traceEvents": paper.events,
    }


def demo_bytes() -> bytes:
    """The file's content, before compression."""
    return json.dumps(demo_trace(), separators=(",", ":")).encode()


if __name__ == "__main__":
    Path(__file__).with_name("demo.json.gz").write_bytes(gzip.compress(demo_bytes(), mtime=0))
