"""Exposed time of an arm from a profile of its runs, through the analysis of `interlace report`.

A captured step is one launch, so its kernels say no layer.  The same graph is therefore profiled
once more, node by node inside named ranges; the report carries the names over by order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from interlace.graph.comm import comm_of
from interlace.graph.tag import tag_of
from interlace.measure.report import build_report
from interlace.trace import Step, Traced

NUM_REPLAYS = 2  # with one, nothing would show whether all kernels were recorded
# Kernels of our own exchange besides those that the report knows by itself.
EXCHANGE_KERNELS = re.compile(r"push_rows|ep_signal")


@dataclass(frozen=True)
class Exposure:
    """Milliseconds of one run, as unions of intervals; ``doubts`` as the report has them.

    exchange: kernels that communicate; compute: all others; exposed: exchange without compute.
    """

    exchange_ms: float
    exposed_ms: float
    compute_ms: float
    doubts: tuple[str, ...] = ()  # why the figures cannot be relied on
    exposed_by_kind: dict[str, float] = field(default_factory=dict)
    exposed_by_layer: dict[str, float] = field(default_factory=dict)
    num_kernels: float | None = None  # arms of one graph, reordered, have as many

    @property
    def hidden_share(self) -> float | None:
        """None where there is nothing to hide."""
        return 1 - self.exposed_ms / self.exchange_ms if self.exchange_ms else None


def profile_runs(
    run: Callable[[], Any], path: Path, num_runs: int = NUM_REPLAYS, *, ranges: bool = False
) -> None:
    """Writes a trace of ``num_runs`` runs; one more before it is not recorded, because profilers
    lose the first kernels of a session.

    Kernels and their launches, and with ``ranges`` the named ranges that a run opens, which makes
    launches slower.
    """
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CUDA] if on_gpu else []
    if ranges:
        activities.append(ProfilerActivity.CPU)
    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=1, active=num_runs, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        acc_events=True,  # torch warns without
    ) as profiler:
        for _ in range(1 + num_runs):
            run()
            if on_gpu:
                torch.cuda.synchronize()
            profiler.step()


def exposure_of(path: Path, num_runs: int = NUM_REPLAYS, annotated: Path | None = None) -> Exposure:
    """Of the runs in a trace; ``annotated`` is a trace that names their kernels.

    Raises: ValueError if a file is no trace or has no kernels.
    """
    paths = [path] if annotated is None else [path, annotated]
    ranks = build_report(paths, EXCHANGE_KERNELS).figures["ranks"]
    figures = next((rank for rank in ranks if rank["file"] == str(path)), None)
    if figures is None:
        raise ValueError(f"{path} has no GPU kernels; nothing can be said of the exchange.")

    doubts = (
        ()
        if figures["reliable"]
        else tuple(note["text"] for note in figures["notes"] if note["level"] == "warning")
    )

    def exposed(parts: dict[str, Any]) -> dict[str, float]:
        return {name: part["exposed_us"] / 1e3 / num_runs for name, part in parts.items()}

    return Exposure(
        figures["comm_us"] / 1e3 / num_runs,
        figures["exposed_us"] / 1e3 / num_runs,
        figures["compute_us"] / 1e3 / num_runs,
        doubts,
        exposed(figures["by_kind"]),
        exposed(figures["by_layer"]),
        figures["kernels"] / num_runs,
    )


# --- named ranges ---------------------------------------------------------------------------------


def range_name(node: fx.Node) -> str:
    """``layers.3.moe forward dispatch``: layer, phase, and the exchange if it is one.

    Empty for inputs and outputs.
    """
    tag = tag_of(node)
    if tag.phase == "io":
        return ""
    words = [tag.layer or "step", tag.phase]
    if spec := comm_of(node):
        # A stage goes from the tokens' ranks to the experts', as a dispatch does.
        words.append("dispatch stage" if spec.name == "stage" else spec.name)
    elif str(node.target) == "ep.plan.default":
        words.append("ep plan")
    if tag.chunk is not None:
        words.append(f"part {tag.chunk}")
    return " ".join(words)


class _Annotated(fx.Interpreter):
    """Runs a graph node by node; neighbours of one name share a range."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.name = ""
        self.range: AbstractContextManager[Any] | None = None

    def run_node(self, node: fx.Node) -> Any:
        self.enter(range_name(node))
        return super().run_node(node)

    def enter(self, name: str) -> None:
        """Ends the open range and begins the next, unless it is the same."""
        if name == self.name:
            return
        if self.range is not None:
            self.range.__exit__(None, None, None)
        self.name, self.range = name, record_function(name) if name else None
        if self.range is not None:
            self.range.__enter__()


def run_annotated(traced: Traced, step: Step, batch: tuple[Tensor, ...]) -> None:
    """The traced step, uncaptured, every node inside a range that names it."""
    params, buffers = step.state()
    interpreter = _Annotated(traced.gm)
    inputs = [*(params[n] for n in traced.params), *(buffers[n] for n in traced.buffers), *batch]
    try:
        with torch.no_grad():
            interpreter.run(*inputs)
    finally:
        interpreter.enter("")
