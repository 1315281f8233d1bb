"""Checkpoints of a large run on one GPU, and a bad gradient on one of two processes.

    python benchmarks/checkpoint.py stall qwen3-30b-slim --folder /tmp/ckpt --out FILE.json
    python benchmarks/checkpoint.py nan dsv3-tiny --out FILE.json

``stall``: one GPU in loopback.  For each mode two saves of the whole state, the first of which also
gets its host memory; one checkpoint at a time is on disk.  Seconds that training stood still,
seconds until the checkpoint was complete, bytes, step times before and during the background write.
Then the last checkpoint is loaded over the run, which has gone on: digests of every tensor as they
were at the save, and the losses of the next steps, must come back bit for bit.
Needs about 12 bytes of disk and of host memory a parameter that the GPU holds (pinned memory up to
twice that), 36 GB for qwen3-30b-slim.

``nan``: two processes on this GPU over gloo; in step 2 rank 1 has a NaN in one expert's gradient.
Both must stop with the same message and leave every tensor as it was; with skip both go on.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shutil
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from interlace.train.arms import arm_of
from interlace.train.checkpoint import Checkpointer
from interlace.train.checkpoint_files import complete
from interlace.train.checkpoint_state import run_tensors
from interlace.train.config_check import check
from interlace.train.config_read import load_config
from interlace.train.engine import Engine, apply, build_engine, compute
from interlace.train.launch import run_workers
from interlace.train.loop import describe_run, use_deterministic_kernels
from interlace.train.verify import digest
from interlace.train.world import close_world, gather, init_world

MODES = ("disabled", "async", "async_with_pinned_mem")
STEPS_AFTER = 3


def steps(engine: Engine, count: int) -> tuple[list[float], list[float]]:
    """Losses and milliseconds of so many steps."""
    losses, times = [], []
    for _ in range(count):
        _settle()
        began = time.perf_counter()
        outcome = compute(engine, engine.progress.step)
        apply(engine, outcome, engine.progress.step)
        _settle()
        times.append(1e3 * (time.perf_counter() - began))
        engine.progress.step += 1
        losses.append(outcome.loss.item())
    return losses, times


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def digests(engine: Engine) -> dict[str, Any]:
    """A digest of every tensor of the state."""
    return {name: digest(tensor.reshape(-1)) for name, tensor in run_tensors(engine).items()}


def save_twice(engine: Engine, mode: str, folder: Path) -> dict[str, Any]:
    """Two saves in one mode; what they cost."""
    checkpoint = replace(engine.config.checkpoint, async_mode=mode, keep_latest_k=1)
    engine = replace(engine, config=replace(engine.config, checkpoint=checkpoint))
    shutil.rmtree(folder, ignore_errors=True)
    saver = Checkpointer(engine, folder)
    found: dict[str, Any] = {"mode": mode, "saves": []}
    for _ in range(2):
        shutil.rmtree(folder, ignore_errors=True)
        steps(engine, 1)
        began = time.perf_counter()
        stall = saver.save()
        times = []
        while saver.is_writing:
            times += steps(engine, 1)[1]
        saver.finish()
        seconds = time.perf_counter() - began
        path = complete(folder)[-1][1]
        size = sum(file.stat().st_size for file in path.iterdir())
        save = {
            "stall_s": round(stall, 3),
            "complete_after_s": round(seconds, 3),
            "gb": round(size / 1e9, 3),
            "gb_per_s": round(size / 1e9 / seconds, 3),
            "steps_meanwhile": len(times),
            "step_ms_meanwhile": round(statistics.median(times), 2) if times else None,
        }
        found["saves"].append(save)
        print(mode, json.dumps(save), flush=True)
    return found


def comes_back(engine: Engine, folder: Path) -> dict[str, Any]:
    """Saves in the background, goes on, loads, and compares bits."""
    checkpoint = replace(engine.config.checkpoint, async_mode="async", keep_latest_k=1)
    engine = replace(engine, config=replace(engine.config, checkpoint=checkpoint))
    shutil.rmtree(folder, ignore_errors=True)
    saver = Checkpointer(engine, folder)
    before = digests(engine)
    saver.save()
    losses, _ = steps(engine, STEPS_AFTER)
    saver.finish()
    moved = digests(engine)
    saver.load(complete(folder)[-1][1])
    after = digests(engine)
    again, _ = steps(engine, STEPS_AFTER)
    return {
        "tensors": len(before),
        "tensors_that_training_had_changed": sum(moved[n] != before[n] for n in before),
        "tensors_that_differ_after_loading": sum(after[n] != before[n] for n in before),
        "losses": losses,
        "losses_after_loading": again,
        "equal": after == before and again == losses,
    }


def stall(args: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """The first part."""
    use_deterministic_kernels(warn_only=False)
    config = load_config([args.preset, "--ep.transport", "loopback", *overrides])
    check(config, 1)
    world = init_world(config)
    print(describe_run(config, world), flush=True)
    engine = build_engine(config, world, arm_of(config))
    steps(engine, 3)
    quiet = statistics.median(steps(engine, 5)[1])
    report: dict[str, Any] = {
        "preset": args.preset,
        "transport": "loopback",
        "parameters": sum(p.numel() for p in engine.model.parameters()),
        "step_ms_quiet": round(quiet, 2),
        "modes": [],
    }
    for mode in MODES:
        report["modes"].append(save_twice(engine, mode, args.folder))
        gc.collect()
    report["resume"] = comes_back(engine, args.folder)
    print(json.dumps(report["resume"]), flush=True)
    shutil.rmtree(args.folder, ignore_errors=True)
    return report


def nan_worker(args: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """The second part, in one of two processes."""
    name = "layers.1.moe.experts.w13"
    report: dict[str, Any] = {"preset": args.preset, "policies": {}}
    config = load_config([args.preset, "--training.device", "cuda", *overrides])
    world = init_world(config)
    for policy in ("stop", "skip"):
        training = replace(config.training, nonfinite=policy)
        engine = build_engine(replace(config, training=training), world, arm_of(config))
        plain = engine.forward_backward

        def broken(batch: Any, plain: Any = plain, engine: Engine = engine) -> Any:
            result = plain(batch)
            if world.rank != 1 or engine.progress.step != 1:
                return result
            grads = {n: g.clone() for n, g in result.grads.items()}
            grads[name][2, 0, 0] = math.nan
            return replace(result, grads=grads)

        bad = replace(engine, forward_backward=broken)
        steps(bad, 1)
        before, message = digests(bad), ""
        try:
            steps(bad, 1)
        except RuntimeError as error:
            message = str(error)
        untouched = digests(bad) == before
        if policy == "skip":
            steps(bad, 1)
        mine = {"message": message, "untouched": untouched, "updates": bad.progress.updates}
        report["policies"][policy] = gather(mine, world)
    close_world(world)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=("stall", "nan"))
    parser.add_argument("preset")
    parser.add_argument("--folder", type=Path, default=Path("checkpoint-benchmark"))
    parser.add_argument("--out", type=Path)
    args, overrides = parser.parse_known_args()
    if args.part == "nan" and "RANK" not in os.environ:
        sys.exit(run_workers([sys.executable, __file__, *sys.argv[1:]], 2))
    report = nan_worker(args, overrides) if args.part == "nan" else stall(args, overrides)
    report |= {
        "date": time.strftime("%Y-%m-%d"),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
    }
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(report, indent=2))
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
