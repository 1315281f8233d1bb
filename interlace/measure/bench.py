"""``interlace bench``: what overlap buys, on this machine, for these settings.

Arms take turns in one process on the same weights and batch: forward, loss and backward of one
microbatch.  Beside each time stands whether the arm gave the bits that it must give.
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from interlace import ep
from interlace.ep.budget import MAX_CTAS, bounded
from interlace.ep.signals import check_timeouts
from interlace.measure.bench_arms import Ready, Workbench, open_workbench
from interlace.measure.bench_figures import Line, figures_of
from interlace.measure.bench_html import render
from interlace.measure.bench_plan import CONTROL, Cell, LeftOut, plan_cells
from interlace.measure.bench_profile import Exposure, exposure_of, profile_runs, run_annotated
from interlace.measure.bench_request import Request
from interlace.measure.bench_text import lines
from interlace.measure.bench_timing import DeviceState, spread, take_turns, watch_device
from interlace.measure.bench_verdict import failure, recommend
from interlace.train.arms import ARMS
from interlace.train.console import Console
from interlace.train.launch import report_failure
from interlace.train.loop import describe_run, use_deterministic_kernels
from interlace.train.world import World, gather

LOOPBACK_BUDGET = 8  # about NVLink; without a bound a mirror's copies are like any other copy


def bench(request: Request, world: World) -> bool:
    """Runs, prints and writes what was asked for; False if an arm or the gate failed.

    Collective: all ranks call it; rank 0 prints and writes.
    Raises:     ValueError for an arm that was named and cannot run here.
    """
    console = Console(rank=world.rank)
    config = request.settings[0].config
    budgets = _budgets(request, world, console)
    cells, left_out = plan_cells(request, budgets, world.device.type, world.backend)
    console.line(
        f"bench {describe_run(config, world)}; {len(cells)} lines, {request.rounds} rounds"
    )
    for note in _notes(request, world, left_out):
        console.line(f"note: {note}")
    run = functools.partial(_run, cells, left_out, request, world, console)
    figures = None
    try:
        figures = run(warn_only=False)
    except RuntimeError as error:
        if "deterministic implementation" not in str(error):
            raise
        console.line(f"note: {str(error).splitlines()[0]} The arms run without that promise.")
    if figures is None:  # not inside of the handler, whose traceback holds the first model
        ep.reset()
        figures = run(warn_only=True)
    for line in lines(figures):
        console.line(line)
    if world.is_main:
        _write(request, figures)
    problem = failure(figures["arms"], request.min_gain)
    if problem:  # every rank, whichever of them the launcher sees ending first
        report_failure(f"interlace bench: {problem}", expected=True)
    return problem is None


def _budgets(request: Request, world: World, console: Console) -> list[int | None]:
    if request.budgets:
        return list(request.budgets)
    if world.device.type == "cuda" and world.loopback and MAX_CTAS is None:
        console.line(f"note: --budgets {LOOPBACK_BUDGET}, about NVLink, since none was given")
        return [LOOPBACK_BUDGET]
    return [MAX_CTAS]


def _notes(request: Request, world: World, left_out: list[LeftOut]) -> list[str]:
    found = []
    if CONTROL not in request.arms:
        found.append("control was added, gains are over it")
    if world.device.type != "cuda" and request.budgets:
        found.append("a budget of CTAs changes nothing on a CPU")
    if world.device.type != "cuda" and request.trace:
        found.append("--trace writes nothing on a CPU, where nothing is profiled")
    if request.optimizer:
        found.append("with --optimizer there is no compute-only ceiling")
    config = request.settings[0].config
    swept = dict(request.settings[0].values)
    chunked = any(ARMS[arm].chunked for arm in request.arms)
    if chunked and config.overlap.chunks == 1 and "overlap.chunks" not in swept:
        root = config.overlap.chunk_root
        found.append(f"overlap.chunks=1 here: chunked arms take two chunks of {root}")
    for each in left_out:
        values = "".join(f" {name}={value}" for name, value in each.values)
        found.append(f"left out {each.arm}{values}: {each.reason}")
    return found


def _run(
    cells: list[Cell],
    left_out: list[LeftOut],
    request: Request,
    world: World,
    console: Console,
    *,
    warn_only: bool,
) -> dict[str, Any]:
    config, arms = request.settings[0].config, tuple(dict.fromkeys(cell.arm for cell in cells))
    with _deterministic(warn_only=warn_only):
        bench = open_workbench(config, world, arms, console.working, optimizer=request.optimizer)
        with contextlib.closing(bench):
            ready = [bench.build(cell) for cell in cells]
            # Rows that were not sent are whatever the memory held, perhaps NaN: no update then.
            has_ceiling = world.ep_size > 1 and not request.optimizer
            ceilings = _ceilings(bench, cells) if has_ceiling else []
            runs = [arm.run for arm in (*ready, *ceilings)]
            with console.working(f"timing {len(runs)} lines"):
                samples = take_turns(runs, request.rounds, world, console.line)
            check_timeouts()  # a rank that no longer waits is fast and wrong
            states: list[DeviceState] = [DeviceState()] * len(ready)
            exposures: list[Exposure | None] = [None] * len(ready)
            if world.device.type == "cuda":
                with console.working("clocks and power"):
                    states = [watch_device(arm.run, world) for arm in ready]
                with console.working("profiles"):
                    exposures = _profile(bench, ready, request.trace)
    for arm, exposure in zip(ready, exposures, strict=True):
        for doubt in exposure.doubts if exposure else ():
            console.line(f"note: exposed time of {arm.cell.label} is not shown: {doubt}")
    measured = [
        Line(*each)
        for each in zip(ready, samples[: len(ready)], states, exposures, strict=True)
    ]  # fmt: skip
    compute_only = {
        arm.cell.values: spread(mine)
        for arm, mine in zip(ceilings, samples[len(ready) :], strict=True)
    }
    figures = figures_of(config, world, measured, compute_only, left_out)
    figures["optimizer"] = request.optimizer
    figures["recommendation"] = recommend(figures["arms"], exchanges=world.ep_size > 1)
    return figures


def _ceilings(bench: Workbench, cells: list[Cell]) -> list[Ready]:
    """Compute only, once for each setting of the exchange; captured if any arm is."""
    captured = any(ARMS[cell.arm].captured for cell in cells)
    controls = {cell.values: cell for cell in cells if cell.arm == CONTROL}
    return [bench.build_compute_only(cell, captured=captured) for cell in controls.values()]


def _profile(bench: Workbench, ready: list[Ready], keep: Path | None) -> list[Exposure | None]:
    """The exposure of each arm on its slowest rank; one named trace a graph serves all budgets."""
    world, named, found = bench.world, dict[int, Path](), []
    ending = f"rank{world.rank}.json" + (".gz" if keep else "")
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for arm in ready:
            stem, names = _file_name(arm.cell.label), None
            if ARMS[arm.cell.arm].captured and arm.traced is not None:
                names = named.get(id(arm.traced))
                if names is None:
                    names = named[id(arm.traced)] = folder / f"{stem}.named.{ending}"
                    run = functools.partial(run_annotated, arm.traced, bench.step, bench.batch)
                    with bounded(arm.cell.budget):  # a bound splits pushes in two, in replays too
                        profile_runs(run, names, 1, ranges=True)
            path = folder / f"{stem}.{ending}"
            profile_runs(arm.run, path)
            try:
                mine = exposure_of(path, annotated=names)
            except ValueError as error:  # a bad profile must not cost the times that stand
                mine = Exposure(0.0, 0.0, 0.0, (str(error),))
            all_ranks = gather(mine, world)
            found.append(max(all_ranks, key=lambda x: (bool(x.doubts), x.exposed_ms)))
    return found


def _file_name(label: str) -> str:
    return "".join(c if c.isalnum() or c in "-=." else "_" for c in label)


@contextlib.contextmanager
def _deterministic(*, warn_only: bool) -> Iterator[None]:
    """The same bits each run, without the cost of filling memory that is written anyway."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    use_deterministic_kernels(warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def _write(request: Request, figures: dict[str, Any]) -> None:
    outputs = []
    if request.json:
        text = json.dumps(figures, indent=2, allow_nan=False) + "\n"
        outputs.append(("--json", request.json, text))
    if request.html:
        outputs.append(("--html", request.html, render(figures)))
    for option, path, text in outputs:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"{option} {path} cannot be written: {error.strerror}; name another path."
            ) from None
