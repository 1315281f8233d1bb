"""How fast a whole training step is in itself: forward, backward, clipping, optimizer; one GPU.

    python benchmarks/step_speed.py dsv3-16b-slim --steps 20 --out FILE.json

No exchange (expert parallelism of 1), 2 sequences of 4096 tokens, balanced routing, random tokens,
float32 weights and AdamW states, compiled regions, the step captured.  Prints the median step with
its spread, and where the time goes: the longest kernels of one step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from interlace.model.flops import flops_per_token
from interlace.train.arms import arm_of
from interlace.train.config_check import check
from interlace.train.config_read import load_config
from interlace.train.engine import Engine, apply, build_engine, compute
from interlace.train.metrics import peak_flops
from interlace.train.world import init_world

WARM_UP = 5
FLAGS = (
    "--parallelism.expert_parallel_degree 1 --training.local_batch_size 2 --training.seq_len 4096 "
    "--model.routing balanced --data.source random --data.max_documents 1 "
    "--ep.padded --capture.enabled --compile.regional"
)


def one_step(engine: Engine, step: int) -> tuple[float, float, Any]:
    """Milliseconds of forward and backward, of the update, and the outcome."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    outcome = compute(engine, step)
    torch.cuda.synchronize()
    middle = time.perf_counter()
    apply(engine, outcome, step)
    torch.cuda.synchronize()
    return 1e3 * (middle - began), 1e3 * (time.perf_counter() - middle), outcome


def kernels(engine: Engine, step: int, top: int) -> tuple[dict[str, float], int]:
    """Milliseconds of the longest kernels of one step, by name, and the number of kernels."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as prof:
        one_step(engine, step)
    by_name: Counter[str] = Counter()
    count = 0
    for event in prof.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            by_name[event.name[:200]] += event.time_range.elapsed_us() / 1e3
            count += 1
    return {n: round(ms, 2) for n, ms in by_name.most_common(top)}, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("preset")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kernels", type=int, default=40)
    parser.add_argument("--out", type=Path)
    args, overrides = parser.parse_known_args()
    config = load_config([args.preset, *FLAGS.split(), *overrides])
    check(config, 1)
    world = init_world(config)
    began = time.perf_counter()
    engine = build_engine(config, world, arm_of(config))
    print(f"built in {time.perf_counter() - began:.1f} s, {engine.num_nodes} nodes", flush=True)
    runs = [one_step(engine, step) for step in range(WARM_UP + args.steps)]
    times = sorted(a + b for a, b, _ in runs[WARM_UP:])
    median = statistics.median(times)
    t = config.training
    tokens = t.local_batch_size * t.seq_len
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"]
    peak = peak_flops(torch.cuda.get_device_name())
    flops = flops_per_token(config.model, t.seq_len) * tokens
    by_name, count = kernels(engine, len(runs), args.kernels)
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "preset": args.preset,
        "overrides": overrides,
        "parameters": sum(p.numel() for p in engine.model.parameters()),
        "tokens_a_step": tokens,
        "step_ms": round(median, 2),
        "step_ms_p10": round(times[len(times) // 10], 2),
        "step_ms_p90": round(times[len(times) * 9 // 10], 2),
        "forward_backward_ms": round(statistics.median(a for a, _, _ in runs[WARM_UP:]), 2),
        "update_ms": round(statistics.median(b for _, b, _ in runs[WARM_UP:]), 2),
        "tokens_per_s": round(1e3 * tokens / median),
        "tflop_a_step": round(flops / 1e12, 2),
        "mfu_percent": round(1e5 * flops / median / peak, 2) if peak else None,
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "losses": [runs[0][2].loss.item(), runs[-1][2].loss.item()],
        "clock_and_power": subprocess.run(query, capture_output=True, text=True).stdout.strip(),
        "num_kernels": count,
        "kernels_ms": by_name,
    }
    print(json.dumps(report, indent=2), flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
