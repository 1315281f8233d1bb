"""The training loop: compute, apply, report."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from interlace.model.flops import flops_per_token
from interlace.train.config import Config
from interlace.train.config_read import to_toml
from interlace.train.console import Console
from interlace.train.curve import loss_curve_svg
from interlace.train.engine import Engine, apply, build_engine, compute
from interlace.train.metrics import (
    MetricsFile,
    ep_imbalance,
    peak_flops,
    peak_memory,
    step_record,
)
from interlace.train.world import World


def train(config: Config, world: World) -> None:
    """Trains for ``training.steps`` steps; writes metrics, the resolved settings and a loss curve.

    Raises: ValueError for data that does not fit the settings, RuntimeError on every rank for a
            step that must not be applied.
    """
    console = Console(rank=world.rank)
    if config.debug.deterministic:
        use_deterministic_kernels(warn_only=False)
    console.line(describe_run(config, world))
    engine = build_engine(config, world, config.training.mode, console.working)
    console.line(engine.data.describe())
    if engine.num_nodes is not None:
        console.line(f"the step is one graph of {engine.num_nodes:,} nodes")
    folder = Path(config.metrics.folder)
    if not world.is_main:
        _run(engine, console, None)
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    metrics_path = folder / "metrics.jsonl"
    metrics_path.unlink(missing_ok=True)  # a new run starts a new history
    with MetricsFile(metrics_path) as metrics:
        losses = _run(engine, console, metrics)
    curve = folder / "loss.svg"
    title = f"{config.model.name}: loss"
    curve.write_text(loss_curve_svg(range(1, len(losses) + 1), losses, title), encoding="utf-8")
    last = losses[-min(10, len(losses)) :]
    console.line(
        f"loss {losses[0]:.3f} -> {sum(last) / len(last):.3f} (mean of the last {len(last)} steps)"
        f"; metrics {metrics.path}, curve {curve}"
    )


def describe_run(config: Config, world: World) -> str:
    """One line: what runs where; loopback says so."""
    t, degree = config.training, config.parallelism.expert_parallel_degree
    place = f"{world.size} process{'es' if world.size > 1 else ''} on {world.device.type}"
    transport = world.backend
    if world.loopback:
        transport = f"loopback (1 process stands for {degree} mirrored ranks)"
    return (
        f"{config.model.name}: {place}, EP {degree} over {transport}, {t.dtype}, {t.mode}, "
        f"{t.local_batch_size * world.size} x {t.seq_len} tokens a step, "
        f"routing {config.model.routing}"
    )


def use_deterministic_kernels(*, warn_only: bool) -> None:
    """Asks torch for kernels that give the same bits each run.

    CUDA's matrix products read CUBLAS_WORKSPACE_CONFIG at the first one: call this before.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=warn_only)


def _run(engine: Engine, console: Console, metrics: MetricsFile | None) -> list[float]:
    config, world = engine.config, engine.world
    t = config.training
    per_token = flops_per_token(config.model, t.seq_len)
    peak = None
    if world.device.type == "cuda" and t.dtype == "bfloat16":
        peak = peak_flops(torch.cuda.get_device_name(world.device))
    losses: list[float] = []
    tokens_seen = 0
    with console.steps(t.steps):
        for step in range(t.steps):
            began = time.perf_counter()
            outcome = compute(engine, step)
            lr = apply(engine, outcome, step)
            losses.append(outcome.loss.item())
            tokens_seen += outcome.num_tokens
            record = step_record(
                step=step + 1,
                loss=losses[-1],
                grad_norm=outcome.grad_norm.item(),
                lr=lr,
                tokens=outcome.num_tokens,
                tokens_seen=tokens_seen,
                seconds=time.perf_counter() - began,
                data_seconds=outcome.data_seconds,
                num_devices=world.size,
                memory=peak_memory(world.device),
                flops_per_token=per_token,
                peak_flops_per_device=peak,
                imbalance=ep_imbalance(outcome.counts_LE),
                graph="eager" if engine.num_nodes is None else "traced",
            )
            if world.loopback:
                record["transport"] = "loopback"
            if metrics:
                metrics.write(record)
            is_logged = step == 0 or (step + 1) % config.metrics.log_freq == 0
            console.step(record, log=is_logged or step + 1 == t.steps)
    return losses
