"""The figures of a benchmark as its JSON holds them, from samples, profiles and verdicts."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from interlace.measure.bench_arms import Ready, result_shape
from interlace.measure.bench_plan import CONTROL, LeftOut, relevant
from interlace.measure.bench_profile import Exposure
from interlace.measure.bench_request import Values
from interlace.measure.bench_timing import DeviceState, Spread, spread
from interlace.measure.bench_verdict import over_bound, paired_gain
from interlace.model.flops import flops_per_token
from interlace.train.arms import ARMS
from interlace.train.config import Config, walk
from interlace.train.metrics import GIB, peak_flops
from interlace.train.presets import PRESETS
from interlace.train.world import World, gather, num_cores


@dataclass(frozen=True)
class Line:
    """What was measured of one arm: milliseconds of each round, and the rest if it was."""

    ready: Ready
    samples: list[float]
    state: DeviceState
    exposure: Exposure | None


def figures_of(
    config: Config,
    world: World,
    lines: Sequence[Line],
    compute_only: Mapping[Values, Spread],
    left_out: Sequence[LeftOut],
) -> dict[str, Any]:
    """``compute_only``: milliseconds of the ceiling by the swept values of its control.

    Collective: all ranks call it.
    """
    controls = {line.ready.cell.key: line for line in lines if line.ready.cell.arm == CONTROL}
    sequences, length = result_shape(config)
    rows = [
        _row(line, controls[line.ready.cell.control], compute_only, config, world)
        for line in lines
    ]  # fmt: skip
    return {
        "date": time.strftime("%Y-%m-%d"),
        "preset": config.preset,
        "settings": changed_settings(config),
        "machine": machine_of(world),
        "torch": str(torch.__version__),
        "transport": transport_of(world),
        "world_size": world.size,
        "expert_parallel_degree": world.ep_size,
        "routing": config.model.routing,
        "tokens": sequences * length,
        "sequences": sequences,
        "rounds": len(lines[0].samples),
        "arms": rows,
        "ceilings": [_ceiling(line, compute_only) for line in controls.values()],
        "left_out": [
            {"arm": each.arm, "setting": dict(each.values), "reason": each.reason}
            for each in left_out
        ],
    }


def changed_settings(config: Config) -> dict[str, Any]:
    """What is set otherwise than in the preset of that name, by dotted name; all without one."""
    base = PRESETS.get(config.preset)
    before = {} if base is None else {setting.name: setting.value for setting in walk(base)}
    return {
        s.name: s.value for s in walk(config) if s.name not in before or before[s.name] != s.value
    }


def _row(
    line: Line, control: Line, compute_only: Mapping[Values, Spread], config: Config, world: World
) -> dict[str, Any]:
    cell, verdict, mine = line.ready.cell, line.ready.verdict, spread(line.samples)
    sequences, length = result_shape(config)
    tokens_per_s = 1e3 * sequences * length / mine.median
    gain = paired_gain(control.samples, line.samples)
    ceiling = compute_only.get(relevant(ARMS[CONTROL], cell.values))
    bound = over_bound(mine.median, ceiling.median if ceiling else None, _alone(control))
    peaks = [peak for peak in gather(line.ready.peak_bytes, world) if peak is not None]
    return _rounded({
        "arm": cell.arm,
        "setting": dict(cell.values),
        "budget": cell.budget,
        "ms": mine.median,
        "ms_p10": mine.p10,
        "ms_p90": mine.p90,
        "tokens_per_s": tokens_per_s,
        "mfu_percent": mfu_percent(tokens_per_s, config, world),
        "equal": verdict.equal,
        "against": verdict.against,
        "differs_in": verdict.differs_in,
        **_exposed(line.exposure),
        "peak_memory_gib": max(peaks) / GIB if peaks else None,
        "clock_mhz": line.state.clock_mhz,
        "power_w": line.state.power_w,
        "gain": gain.median,
        "gain_p10": gain.p10,
        "gain_p90": gain.p90,
        "over_bound": bound,
    })  # fmt: skip


def _ceiling(control: Line, compute_only: Mapping[Values, Spread]) -> dict[str, Any]:
    cell = control.ready.cell
    found = compute_only.get(cell.values)
    return _rounded({
        "setting": dict(cell.values),
        "budget": cell.budget,
        "compute_only_ms": found.median if found else None,
        "compute_only_ms_p10": found.p10 if found else None,
        "compute_only_ms_p90": found.p90 if found else None,
        "exchange_only_ms": _alone(control),
    })  # fmt: skip


def _alone(control: Line) -> float | None:
    """Milliseconds of the exchange while nothing runs beside it: those of the control."""
    exposure = control.exposure
    return None if exposure is None or exposure.doubts else exposure.exchange_ms


def _exposed(exposure: Exposure | None) -> dict[str, Any]:
    """None where nothing was measured, or the profiler lost kernels."""
    keys = ("exposed_ms", "hidden_share", "exchange_ms", "compute_ms", "num_kernels")
    parts = ("exposed_by_kind", "exposed_by_layer")
    if exposure is None or exposure.doubts:
        return dict.fromkeys(keys) | {part: {} for part in parts}
    return {key: getattr(exposure, key) for key in (*keys, *parts)}


def mfu_percent(tokens_per_s: float, config: Config, world: World) -> float | None:
    """Of the device's dense bf16 peak; None where that is unknown or the arithmetic is another."""
    if world.device.type != "cuda" or config.training.dtype != "bfloat16":
        return None
    peak = peak_flops(torch.cuda.get_device_name(world.device))
    flops = flops_per_token(config.model, config.training.seq_len)
    return None if peak is None else 100 * tokens_per_s * flops / peak


def transport_of(world: World) -> str:
    """What carries the exchange: loopback, gloo, nccl, or none."""
    if world.loopback:
        return "loopback"
    return world.backend if world.ep_size > 1 else "none"


def machine_of(world: World) -> str:
    """The GPU's name, or what is known of the CPU."""
    if world.device.type == "cuda":
        return str(torch.cuda.get_device_name(world.device))
    return f"CPU ({platform.machine()}, {num_cores()} cores)"


def _rounded(value: Any) -> Any:
    """Numbers to 4 decimals, in tables too."""
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return round(value, 4) if isinstance(value, float) else value
