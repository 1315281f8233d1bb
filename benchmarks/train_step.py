"""Eager against traced: speed, memory and equality of a preset's training step on one machine.

    python benchmarks/train_step.py qwen3-30b-slim dsv3-16b-slim --steps 20 --out FILE.json

Each preset runs in loopback (one GPU stands for its expert-parallel ranks): both arms from the same
seed on the same batches, one after the other as memory holds one model, with deterministic kernels.
Loss, norm and every gradient are compared bitwise by digest.  Speeds are medians with their 10th
and 90th percentile over the steps after the warm-up; digests are taken outside of the clock.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from interlace.model.flops import flops_per_token
from interlace.train.arms import ARMS
from interlace.train.config_check import check
from interlace.train.config_read import load_config
from interlace.train.engine import apply, build_engine, compute
from interlace.train.loop import describe_run, use_deterministic_kernels
from interlace.train.metrics import peak_flops
from interlace.train.verify import digest
from interlace.train.world import init_world

WARM_UP = 5


def measure(config: Any, world: Any, mode: str, steps: int) -> tuple[dict[str, Any], list[Any]]:
    """One arm: its figures, and the digests of every step."""
    torch.cuda.reset_peak_memory_stats()
    engine = build_engine(config, world, ARMS[mode])
    seconds, losses, digests = [], [], []
    for step in range(steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        outcome = compute(engine, step)
        torch.cuda.synchronize()
        middle = time.perf_counter()
        named = {"loss": outcome.loss, "norm": outcome.grad_norm, **outcome.grads}
        digests.append({name: digest(x) for name, x in named.items()})
        torch.cuda.synchronize()
        resumed = time.perf_counter()
        apply(engine, outcome, step)
        torch.cuda.synchronize()
        seconds.append(middle - began + time.perf_counter() - resumed)
        losses.append(outcome.loss.item())
        tokens = outcome.num_tokens
    timed = sorted(seconds[WARM_UP:])
    median = statistics.median(timed)
    peak = peak_flops(torch.cuda.get_device_name())
    flops = flops_per_token(config.model, config.training.seq_len) * tokens / median
    figures = {
        "mode": mode,
        "step_ms": round(1e3 * median, 2),
        "step_ms_p10": round(1e3 * timed[len(timed) // 10], 2),
        "step_ms_p90": round(1e3 * timed[len(timed) * 9 // 10], 2),
        "tokens_per_s": round(tokens / median),
        "mfu_percent": round(100 * flops / peak, 2) if peak else None,
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "graph_nodes": engine.num_nodes,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
    del engine, outcome, named
    gc.collect()
    torch.cuda.empty_cache()
    return figures, digests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("presets", nargs="+")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args, overrides = parser.parse_known_args()
    use_deterministic_kernels(warn_only=False)
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "steps": args.steps,
        "warm_up": WARM_UP,
        "runs": [],
    }
    for preset in args.presets:
        config = load_config([preset, "--ep.transport", "loopback", *overrides])
        check(config, 1)
        world = init_world(config)
        print(describe_run(config, world), flush=True)
        arms, records = [], []
        for mode in ("eager", "control"):
            figures, digests = measure(config, world, mode, args.steps)
            arms.append(figures)
            records.append(digests)
            print(json.dumps(figures), flush=True)
        differing = [
            (step + 1, name)
            for step, (a, b) in enumerate(zip(*records, strict=True))
            for name in a
            if a[name] != b[name]
        ]
        verdict = "bitwise equal" if not differing else f"DIFFERS first at {differing[0]}"
        print(f"{preset}: {verdict}, {args.steps} steps", flush=True)
        t = config.training
        report["runs"].append(
            {
                "preset": preset,
                "transport": "loopback",
                "expert_parallel_degree": config.parallelism.expert_parallel_degree,
                "tokens_a_step": t.local_batch_size * t.seq_len,
                "routing": config.model.routing,
                "dtype": t.dtype,
                "equal": not differing,
                "arms": arms,
            }
        )
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
