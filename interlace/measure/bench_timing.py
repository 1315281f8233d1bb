"""Times of arms that take turns, and what the device was doing meanwhile."""

from __future__ import annotations

import math
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from interlace.train.world import World, gather

Run = Callable[[], Any]
_SAMPLE_SECONDS = 0.2  # a sample is at least so long, if that takes more than one run
_MAX_ITERATIONS = 50
_PROGRESS_SECONDS = 2.0
_SETTLE_SECONDS = 0.25  # how long an arm runs before the device is asked


@dataclass(frozen=True)
class Spread:
    """Median of the samples, and two of them: the 10th and the 90th percentile, rounded outwards.

    Example: of 5 samples the smallest and the largest, of 11 the second and the second last.
    """

    median: float
    p10: float
    p90: float


def spread(samples: Sequence[float]) -> Spread:
    """Raises: ValueError without samples."""
    ordered = sorted(samples)
    if not ordered:
        raise ValueError("spread: no samples.")
    last = len(ordered) - 1
    low, high = math.floor(0.1 * last), math.ceil(0.9 * last)
    return Spread(statistics.median(ordered), ordered[low], ordered[high])


def take_turns(
    runs: Sequence[Run], rounds: int, world: World, say: Callable[[str], None]
) -> list[list[float]]:
    """Milliseconds of each run in each round; the slowest rank's.

    Each runs once unmeasured; that says how many iterations a sample has.  Every other round goes
    backwards, so that a drift of the clock meets the arms alike.
    """
    first = [_slowest([_ms(run, 1, world)], world)[0] for run in runs]
    iterations = [
        max(1, min(_MAX_ITERATIONS, math.ceil(1e3 * _SAMPLE_SECONDS / max(ms, 1e-3))))
        for ms in first
    ]
    samples: list[list[float]] = [[] for _ in runs]
    said = time.monotonic()
    for number in range(rounds):
        order = range(len(runs)) if number % 2 == 0 else reversed(range(len(runs)))
        for index in order:
            samples[index].append(_ms(runs[index], iterations[index], world))
        if time.monotonic() - said > _PROGRESS_SECONDS:
            say(f"round {number + 1} of {rounds}")
            said = time.monotonic()
    return [_slowest(mine, world) for mine in samples]


def _slowest(samples: list[float], world: World) -> list[float]:
    return [max(each) for each in zip(*gather(samples, world), strict=True)]


def _ms(run: Run, iterations: int, world: World) -> float:
    """Milliseconds of one iteration; ranks begin together."""
    if world.size > 1:
        import torch.distributed as dist

        dist.barrier(device_ids=[world.device.index] if world.backend == "nccl" else None)
    if world.device.type != "cuda":
        began = time.perf_counter()
        for _ in range(iterations):
            run()
        return 1e3 * (time.perf_counter() - began) / iterations
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(iterations):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / iterations


@dataclass(frozen=True)
class DeviceState:
    """Clock of the SMs and power while an arm runs; None where nvidia-smi does not tell."""

    clock_mhz: float | None = None
    power_w: float | None = None


def watch_device(run: Run, world: World) -> DeviceState:
    """Asks nvidia-smi while the arm runs; over ranks the lowest clock and the highest power.

    Asked outside of the measured rounds, because the driver may hold up launches meanwhile.
    """
    if world.device.type != "cuda":
        return DeviceState()
    began = time.monotonic()
    while True:  # ranks leave together, after as many runs
        run()
        torch.cuda.synchronize()
        if all(gather(time.monotonic() - began > _SETTLE_SECONDS, world)):
            break
    asked = _ask(f"GPU-{torch.cuda.get_device_properties(world.device).uuid}")
    while True:
        run()
        torch.cuda.synchronize()
        if all(gather(asked is None or asked.poll() is not None, world)):
            break
    states = gather(read_state(asked.communicate()[0] if asked else ""), world)
    clocks = [state.clock_mhz for state in states if state.clock_mhz is not None]
    powers = [state.power_w for state in states if state.power_w is not None]
    return DeviceState(min(clocks, default=None), max(powers, default=None))


def _ask(device: str) -> subprocess.Popen[str] | None:
    command = [
        *("nvidia-smi", f"--id={device}", "--format=csv,noheader,nounits"),
        "--query-gpu=clocks.sm,power.draw",
    ]
    try:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return None


def read_state(text: str) -> DeviceState:
    """Of a line such as ``1905, 632.57``; what is no number is unknown."""
    values: list[float | None] = []
    for part in text.strip().split("\n")[0].split(","):
        try:
            values.append(float(part))
        except ValueError:
            values.append(None)
    return DeviceState(*values) if len(values) == 2 else DeviceState()
