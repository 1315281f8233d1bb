"""The training loop: compute, apply, report."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import torch

from interlace.capture import set_allocator
from interlace.model.flops import flops_per_token
from interlace.train import overflow, watch
from interlace.train.arms import arm_of
from interlace.train.checkpoint import Checkpointer
from interlace.train.checkpoint_state import seed_rank
from interlace.train.config import Config
from interlace.train.console import Console
from interlace.train.data import Data
from interlace.train.data_open import global_batch_rows, last_step, open_evaluation_data
from interlace.train.engine import Engine, Outcome, apply, build_engine, compute
from interlace.train.evaluate import evaluate
from interlace.train.metrics import ep_imbalance, expert_load, peak_flops, peak_memory, step_record
from interlace.train.report import Report
from interlace.train.world import World, timeout_seconds


def train(config: Config, world: World) -> None:
    """Trains for ``training.steps`` steps, or goes on from the last checkpoint; writes metrics, the
    resolved settings, a loss curve and checkpoints.

    Raises: ValueError for data or a checkpoint that does not fit the settings, StepRefused on
            every rank for a step that must not be applied.
    """
    console = Console(rank=world.rank)
    if config.debug.deterministic:
        use_deterministic_kernels(warn_only=False)
    console.line(describe_run(config, world))
    with contextlib.ExitStack() as stack:
        engine = build_engine(config, world, arm_of(config), console.working)
        stack.push(lambda kind, *_: engine.close(wait=kind is None))
        _train(engine, console)


def _train(engine: Engine, console: Console) -> None:
    config, world = engine.config, engine.world
    seed_rank(config.debug.seed, world.rank)
    console.line(engine.data.describe())
    for note in engine.notes:
        console.line(f"note: {note}")
    if engine.num_nodes is not None:
        console.line(f"the step is one graph of {engine.num_nodes:,} nodes")
    checkpointer = Checkpointer(engine) if config.checkpoint.enabled else None
    if checkpointer and (resumed := checkpointer.resume()):
        console.line(resumed)
    last = last_step(config, engine.data, world)
    first = engine.progress.step
    if first >= last:
        console.line(f"nothing to do: step {first} of {last} is done; raise training.steps")
        return
    with contextlib.ExitStack() as stack:
        watch.start(timeout_seconds(config, world) if world.size > 1 else 0)
        if checkpointer:
            stack.push(lambda _, error, __: checkpointer.leave(error))
            stack.enter_context(engine.stop.on_sigterm())
        report = None
        if world.is_main:
            report = stack.enter_context(Report(config, first))
        stack.enter_context(console.steps(last, first=first))
        _run(engine, console, report, checkpointer, last)
        watch.stop()  # not after an error, whose message says where we were
    if engine.progress.step < last:
        console.line(
            f"stopped by SIGTERM after step {engine.progress.step}; the same command resumes"
        )
    elif report:
        console.line(report.summary())


def describe_run(config: Config, world: World) -> str:
    """One line: what runs where; loopback says so, and CUDA how its memory is managed."""
    t, degree = config.training, config.parallelism.expert_parallel_degree
    place = f"{world.size} process{'es' if world.size > 1 else ''} on {world.device.type}"
    transport = world.backend
    if world.loopback:
        transport = f"loopback (1 process stands for {degree} mirrored ranks)"
    allocator = f", {set_allocator()}" if world.device.type == "cuda" else ""
    return (
        f"{config.model.name}: {place}, EP {degree} over {transport}, {t.dtype}, {t.mode}, "
        f"{t.local_batch_size * world.size} x {t.seq_len} tokens a step, "
        f"routing {config.model.routing}{allocator}"
    )


def use_deterministic_kernels(*, warn_only: bool) -> None:
    """Asks torch for kernels that give the same bits each run.

    CUDA's matrix products read CUBLAS_WORKSPACE_CONFIG at the first one: call this before.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=warn_only)


def _run(
    engine: Engine,
    console: Console,
    report: Report | None,
    checkpointer: Checkpointer | None,
    last: int,
) -> None:
    """Steps until ``last``, or until a rank was asked to stop."""
    config, progress = engine.config, engine.progress
    evaluation, interval = config.evaluation, config.checkpoint.interval
    stall_seconds: float | None = None
    held: tuple[Data, bool] | None = None
    if evaluation.interval:
        held = open_evaluation_data(config, engine.data)
    is_first, has_cut = True, False
    while progress.step < last:
        began = time.perf_counter()
        outcome = compute(engine, progress.step)
        lr = apply(engine, outcome, progress.step)
        progress.step += 1
        progress.tokens_seen += outcome.num_tokens
        record = _record(engine, outcome, lr, time.perf_counter() - began)
        if stall_seconds is not None:
            record["checkpoint/stall(s)"] = stall_seconds
            stall_seconds = None
        ends = progress.step == last or outcome.stop
        if held and (progress.step % evaluation.interval == 0 or progress.step == last):
            record |= _evaluate(engine, *held)
        watch.enter("writing metrics", progress.step - 1)
        if report:
            report.write(record)
        is_logged = is_first or ends or progress.step % config.metrics.log_freq == 0
        console.step(record, log=is_logged)
        is_first = False
        if not has_cut and any(record.get("ep/cut_rows", ())):
            has_cut = True
            console.line(
                f"note: step {progress.step} ran without {sum(record['ep/cut_rows'])} rows that "
                f"did not fit (ep.overflow=drop); from here on see ep/cut_rows in the metrics"
            )
        if checkpointer:
            checkpointer.poll()
            if ends or progress.step % interval == 0:
                watch.enter("saving a checkpoint", progress.step - 1)
                if report:
                    report.sync()
                stall_seconds = checkpointer.save(wait=ends)
                console.line(f"checkpoint at step {progress.step}: held up {stall_seconds:.3f} s")
        if outcome.stop and checkpointer:
            break
    if checkpointer:
        checkpointer.finish()


def _evaluate(engine: Engine, data: Data, held_out: bool) -> dict[str, Any]:
    began = time.perf_counter()
    with overflow.room_for_all(engine.model):
        found = evaluate(engine, data, held_out=held_out)
    return {
        "evaluation/loss": found.loss,
        "evaluation/tokens": found.num_tokens,
        "time_metrics/evaluation(s)": time.perf_counter() - began,
    }


def _record(engine: Engine, outcome: Outcome, lr: float | None, seconds: float) -> dict[str, Any]:
    """The metrics of a step; reads the device."""
    config, world, progress = engine.config, engine.world, engine.progress
    t = config.training
    peak = None
    if world.device.type == "cuda" and t.dtype == "bfloat16":
        peak = peak_flops(torch.cuda.get_device_name(world.device))
    record = step_record(
        step=progress.step,
        loss=outcome.loss.item(),
        grad_norm=outcome.grad_norm.item(),
        lr=lr,
        tokens=outcome.num_tokens,
        tokens_seen=progress.tokens_seen,
        seconds=seconds,
        data_seconds=outcome.data_seconds,
        num_devices=world.size,
        memory=peak_memory(world.device),
        flops_per_token=flops_per_token(config.model, t.seq_len),
        peak_flops_per_device=peak,
        imbalance=ep_imbalance(outcome.counts_LE),
        graph="eager" if engine.num_nodes is None else "traced",
    )
    record |= expert_load(outcome.counts_LE)
    record["data/first_row"] = (progress.step - 1) * global_batch_rows(config, world)
    if outcome.balance is not None:
        record["balance_loss"] = outcome.balance.item()
    if progress.skipped:
        record["skipped_steps"] = progress.skipped
    if config.ep.padded and config.ep.overflow == "redo":
        record["ep/capacity_factor"] = overflow.exchange_of(engine.model).capacity_factor
    if outcome.cut_L is not None:
        record["ep/cut_rows"] = outcome.cut_L.tolist()
    if world.loopback:
        record["transport"] = "loopback"
    return record
