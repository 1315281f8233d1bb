"""``interlace trace``: the step of a preset as text, without memory, devices or peers."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interlace import ep
from interlace.model import build_model
from interlace.trace import Step, Traced
from interlace.trace.summary import graph_text, summarise
from interlace.train.arms import ARMS, Arm, arm_of, trace_arm
from interlace.train.config import Config
from interlace.train.console import Console
from interlace.train.engine import exchange_over, step_of


def trace_command(config: Config, out_dir: Path) -> None:
    """Writes ``graph.txt`` and ``summary.json`` to a folder and prints the summary.

    The graph is the one that a run with these settings would have, chunks and order included.
    """
    console = Console()
    if out_dir.exists() and not out_dir.is_dir():
        raise ValueError(f"--out {out_dir} is a file; name a folder.")
    if config.training.mode == "eager":
        console.line("training.mode is eager, which has no graph; shown is that of mode traced")
        config = replace(config, training=replace(config.training, mode="traced"))
    arm = arm_of(config)
    with console.working(f"tracing {config.preset}"):
        began = time.perf_counter()
        traced = trace_on_meta(config, arm)
        seconds = time.perf_counter() - began
    summary: dict[str, Any] = {"preset": config.preset, "arm": arm.name}
    summary |= {"seconds": round(seconds, 3)} | summarise(traced)
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "graph.txt").write_text(graph_text(traced.gm), encoding="utf-8")
    (out_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    for line in describe(summary):
        console.line(line)
    console.line(f"wrote {out_dir / 'graph.txt'} and {out_dir / 'summary.json'}")


def trace_on_meta(config: Config, arm: Arm = ARMS["control"]) -> Traced:
    """The microbatch of a configuration as rank 0 of its exchange group would trace it."""
    step, batch = step_on_meta(config)
    return trace_arm(arm, step, batch, config)


def step_on_meta(config: Config) -> tuple[Step, tuple[Tensor, ...]]:
    """The step and the microbatch of rank 0 of an exchange group, without memory or peers."""
    degree = config.parallelism.expert_parallel_degree
    group = ep.Group("planned", degree, 0, "abstract") if degree > 1 else ep.get_group("single")
    ep.register_group(group)
    exchange = exchange_over(group, config)
    rows = config.training.local_batch_size // config.training.microbatches
    with torch.device("meta"):
        model = build_model(config.model, exchange)
        tokens = torch.empty(rows, config.training.seq_len, dtype=torch.int64)
        bounds = torch.empty(rows, config.data.max_documents + 1, dtype=torch.int32)
        batch = (tokens, tokens, tokens, bounds, torch.empty(()))
    return step_of(model, config), batch


def describe(summary: dict[str, Any]) -> list[str]:
    """The summary in a few lines for a person."""
    gib = 1 << 30
    operators = list(summary["by_operator"].items())
    top = ", ".join(f"{name} {count}" for name, count in operators[:8])
    phases = ", ".join(f"{name} {count}" for name, count in summary["by_phase"].items())
    layers = list(summary["by_layer"].items())
    shown = layers if len(layers) <= 8 else [*layers[:4], ("...", "..."), *layers[-4:]]
    kinds = [e["name"] for e in summary["exchanges"]]
    sizes = [e["bytes"] for e in summary["exchanges"]]
    known = f"{sum(s or 0 for s in sizes) / gib:.3f} GiB"
    moved = known if None not in sizes else f"{known} plus what the routing decides"
    return [
        f"{summary['arm']}: {summary['nodes']:,} nodes in {summary['seconds']:.1f} s: {phases}",
        f"operators: {top}, and {max(0, len(operators) - 8)} more kinds",
        f"layers: {', '.join(f'{name} {count}' for name, count in shown)}",
        f"exchanges: {kinds.count('dispatch')} dispatches, {kinds.count('combine')} combines "
        f"({moved}); {summary['collectives']} collectives in all",
        f"parameters {summary['parameter_bytes'] / gib:.3f} GiB; results written "
        f"{summary['written_bytes'] / gib:.3f} GiB, {summary['unknown_sizes']} of unknown size",
        *(f"note: {note}" for report in summary["passes"] for note in report["notes"]),
    ]
