"""What overlap buys: one step, control against chunked and scheduled, same process, arms in turn.

    INTERLACE_EP_MAX_CTAS=8 python benchmarks/overlap.py qwen3-30b-slim --out FILE.json

Loopback on one GPU; the exchange is a copy bounded to INTERLACE_EP_MAX_CTAS thread blocks on a
high-priority stream (1 is about a 400 Gb/s network card, 8 are about NVLink).  Forward, loss and
backward of one microbatch; no optimizer.  Arms:

compute only      the control with transfers that move nothing: the ceiling of hiding all of it
control           traced, unscheduled: every exchange is waited for at once
chunk-scheduled   chunked and scheduled, by whole layers and by MoE layers

Rounds alternate the arms; figures are medians over rounds with their 10th and 90th percentile.
Exposed time is what of the exchange's kernels no other kernel overlaps, from the profiler.  Results
are compared bitwise: the control with plain PyTorch, chunked arms with eager chunking.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from interlace.ep import transport
from interlace.ep.budget import MAX_CTAS
from interlace.model import build_model, init_weights
from interlace.train.arms import ARMS, build_arm
from interlace.train.config import check
from interlace.train.config_read import load_config
from interlace.train.data import open_data
from interlace.train.engine import build_exchange, step_of
from interlace.train.loop import use_deterministic_kernels
from interlace.train.verify import digest
from interlace.train.world import init_world

FORMS = {
    "compute only": ("control", {}),
    "control": ("control", {}),
    "chunk-scheduled layers.*": ("chunk-scheduled", {"chunk_root": "layers.*"}),
    "chunk-scheduled layers.*.moe": ("chunk-scheduled", {"chunk_root": "layers.*.moe"}),
}


class Runner:
    """One model and batch, and every arm over them."""

    def __init__(
        self, preset: str, overrides: list[str], forms: list[str], capture: bool, equality: bool
    ) -> None:
        flags = ["--ep.transport", "loopback", "--ep.padded", "--ep.capacity_factor", "1.0"]
        flags += ["--model.routing", "balanced", "--data.source", "random", "--overlap.chunks", "2"]
        self.config = load_config([preset, *flags, "--data.max_documents", "1", *overrides])
        check(self.config, 1)
        self.world = init_world(self.config)
        exchange = build_exchange(self.config, self.world)
        with self.world.device:
            model = build_model(self.config.model, exchange)
        init_weights(model, 0, exchange)
        self.step = step_of(model, self.config)
        t, d = self.config.training, self.config.data
        data = open_data(
            "random",
            vocab_size=self.config.model.vocab_size,
            seq_len=t.seq_len,
            max_documents=d.max_documents,
            seed=0,
        )
        rows = t.local_batch_size
        batch = data.rows(0, global_batch_rows=rows, first=0, count=rows)
        tokens = torch.tensor(float(rows * t.seq_len))
        self.batch = tuple(x.to(self.world.device) for x in (*batch.tensors(), tokens))
        self.capture = capture
        self.pool = torch.cuda.graph_pool_handle()
        self.equal: dict[str, bool | None] = {}
        self.runs = {name: self._build(name, equality) for name in forms}

    def _build(self, name: str, equality: bool) -> Any:
        arm, overlap = FORMS[name]
        config = replace(self.config, overlap=replace(self.config.overlap, **overlap))
        began = time.perf_counter()
        run, traced = build_arm(ARMS[arm], self.step, self.batch, config, lambda _: nullcontext())
        seconds = time.perf_counter() - began
        nodes = len(traced.gm.graph.nodes) if traced else 0
        print(f"  {name}: {nodes} nodes, compiled in {seconds:.1f} s", flush=True)

        def plain() -> Any:
            transport.transfers(enabled=name != "compute only")
            try:
                return run(self.batch)
            finally:
                transport.transfers(enabled=True)

        expected = self._reference(name) if equality and name != "compute only" else None
        torch.cuda.empty_cache()
        if self.capture:
            return self._captured(name, plain, expected)
        self.equal[name] = None if expected is None else digests(plain()) == expected
        return plain

    def _captured(self, name: str, run: Any, expected: Any) -> Any:
        """The step as one CUDA graph.  Arms run one after the other and share one pool, so what a
        replay leaves behind holds until the next arm's."""
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            result = run()
        graph.replay()
        self.equal[name] = None if expected is None else digests(result) == expected
        return graph.replay

    def _reference(self, name: str) -> Any:
        """Digests of what the arm has to equal, from plain PyTorch."""
        arm, overlap = FORMS[name]
        config = replace(self.config, overlap=replace(self.config.overlap, **overlap))
        reference = ARMS[arm].against or "eager"
        run, _ = build_arm(ARMS[reference], self.step, self.batch, config, lambda _: nullcontext())
        return digests(run(self.batch))


def digests(result: Any) -> dict[str, tuple[int, int]]:
    named = {"loss": result.loss, **result.grads, **result.extra}
    return {name: digest(x) for name, x in named.items()}


def time_ms(run: Any, iterations: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(iterations):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / iterations


def exposed_ms(run: Any, num_kernels: int) -> tuple[dict[str, float], dict[str, float]]:
    """Unions of kernel intervals of one step: the exchange's, all others', and what is bare; and
    the summed milliseconds of the longest kernels."""
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        run()
        torch.cuda.synchronize()
    exchange, other, by_name = [], [], Counter()
    for event in prof.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        span = (event.time_range.start, event.time_range.end)
        (exchange if "bounded_copy" in event.name else other).append(span)
        by_name[event.name] += (span[1] - span[0]) / 1e3
    exchange, other = union(exchange), union(other)
    total = sum(b - a for a, b in exchange)
    hidden = overlap_of(exchange, other)
    figures = {
        "exchange_ms": total / 1e3,
        "exposed_ms": (total - hidden) / 1e3,
        "hidden_share": hidden / total if total else 0.0,
        "other_kernels_ms": sum(b - a for a, b in other) / 1e3,
    }
    return figures, dict(by_name.most_common(num_kernels))


def union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for a, b in sorted(spans):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(b, merged[-1][1]))
        else:
            merged.append((a, b))
    return merged


def overlap_of(left: list[tuple[float, float]], right: list[tuple[float, float]]) -> float:
    total, j = 0.0, 0
    for a, b in left:
        while j < len(right) and right[j][1] <= a:
            j += 1
        k = j
        while k < len(right) and right[k][0] < b:
            total += min(b, right[k][1]) - max(a, right[k][0])
            k += 1
    return total


def clocks() -> str:
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("preset")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--capture", action="store_true", help="each arm as one CUDA graph")
    parser.add_argument("--kernels", type=int, default=0, help="the N longest kernels of each arm")
    parser.add_argument("--no-equality", action="store_true")
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--out", type=Path)
    args, overrides = parser.parse_known_args()
    use_deterministic_kernels(warn_only=False)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(0)
    equality = not args.no_equality
    runner = Runner(args.preset, overrides, args.forms, args.capture, equality)
    t = runner.config.training
    tokens = t.local_batch_size * t.seq_len
    print(f"{args.preset}: loopback EP 2, {tokens} tokens, {MAX_CTAS} CTAs", flush=True)

    for name, verdict in runner.equal.items():
        if verdict is not None:
            print(f"  {name}: {'bitwise equal' if verdict else 'DIFFERS'}", flush=True)
    arms = runner.runs
    samples: dict[str, list[float]] = {name: [] for name in arms}
    state: dict[str, str] = {}
    for run in arms.values():
        run()
    for _ in range(args.rounds):
        for name, run in arms.items():
            samples[name].append(time_ms(run, args.iterations))
            state[name] = clocks()
    rows = []
    for name, run in arms.items():
        times = sorted(samples[name])
        torch.cuda.reset_peak_memory_stats()
        profiled, profiled_kernels = exposed_ms(run, args.kernels)
        rows.append(
            {
                "arm": name,
                "ms": round(statistics.median(times), 2),
                "ms_p10": round(times[len(times) // 10], 2),
                "ms_p90": round(times[len(times) * 9 // 10], 2),
                "tokens_per_s": round(1e3 * tokens / statistics.median(times)),
                "equal": runner.equal.get(name),
                **{k: round(v, 3) for k, v in profiled.items()},
                "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
                "clock_and_power": state[name],
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        if args.kernels:
            for kernel, ms in profiled_kernels.items():
                print(f"      {ms:8.2f} ms  {kernel[:90]}", flush=True)
    by_name = {r["arm"]: r for r in rows}
    control = by_name["control"]
    for row in rows:
        row["gain"] = round(control["ms"] / row["ms"], 3)
        if "compute only" in by_name:
            bound = max(by_name["compute only"]["ms"], control["exchange_ms"])
            row["over_bound"] = round(row["ms"] / bound, 3)
        print(f"  {row['arm']}: {row['gain']}x of the control", row.get("over_bound"), flush=True)
    if args.out:
        report = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "preset": args.preset,
            "transport": "loopback",
            "overrides": overrides,
            "tokens": tokens,
            "ctas": MAX_CTAS,
            "captured": args.capture,
            "rows": rows,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
