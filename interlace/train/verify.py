"""The promise as a command: the same step, run in several ways, gives the same bits.

Each arm starts from the same seed and takes the same batches; loss, gradient norm and every
gradient of every step are compared on every rank.  Arms run one after the other, so that memory
never holds two models; a gradient is kept as a 128-bit digest of its bits.  Where two digests
differ the two arms run once more up to that step and the first differing element is shown.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from interlace import ep
from interlace.train.arms import ARMS, reference_of
from interlace.train.config import Config
from interlace.train.console import Console
from interlace.train.engine import Engine, Outcome, apply, build_engine, compute
from interlace.train.loop import describe_run, use_deterministic_kernels
from interlace.train.world import World, gather


@dataclass(frozen=True)
class Difference:
    """The first tensor that differs between two arms: where, and both values."""

    step: int
    rank: int
    tensor: str
    index: list[int] = field(default_factory=list)
    value: float | None = None
    expected: float | None = None


@dataclass(frozen=True)
class ArmResult:
    """One arm against the first; ``losses`` and ``grad_norms`` have one entry a step."""

    name: str
    against: str | None
    equal: bool
    losses: list[float]
    grad_norms: list[float]
    first_difference: Difference | None = None


def verify(
    config: Config, world: World, arms: list[str], steps: int, json_path: Path | None
) -> bool:
    """Runs the arms, prints a table, writes JSON; True when all are bitwise equal to the first."""
    if len(arms) < 2:
        raise ValueError(
            f"--arms: {', '.join(arms) or 'none'} given; give at least two of {', '.join(ARMS)}."
        )
    console = Console(rank=world.rank)
    console.line(f"verify {describe_run(config, world)}; {steps} steps, arms {', '.join(arms)}")
    results = None
    try:
        use_deterministic_kernels(warn_only=False)
        try:
            results = _run_arms(config, world, arms, steps, console)
        except RuntimeError as error:
            if "deterministic implementation" not in str(error):
                raise
            console.line(f"note: {str(error).splitlines()[0]} The arms run without that promise.")
        if results is None:  # not inside of the handler, whose traceback holds the first model
            ep.reset()
            use_deterministic_kernels(warn_only=True)
            results = _run_arms(config, world, arms, steps, console)
    finally:
        torch.use_deterministic_algorithms(False)
    _print_table(results, steps, console)
    if world.is_main and json_path is not None:
        report = {
            "preset": config.preset,
            "world_size": world.size,
            "transport": "loopback" if world.loopback else world.backend,
            "steps": steps,
            "arms": [asdict(r) for r in results],
        }
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return all(r.equal for r in results)


def _run_arms(
    config: Config, world: World, arms: list[str], steps: int, console: Console
) -> list[ArmResult]:
    records = {arm: _run_arm(config, world, arm, steps, console) for arm in dict.fromkeys(arms)}
    return [
        _compare(config, world, reference_of(arm, arms, config), arm, records, console)
        for arm in records
    ]


@dataclass(frozen=True)
class _Record:
    losses: list[float]
    norms: list[float]
    digests: list[dict[str, tuple[int, int]]]  # a step: tensor name -> digest


def _run_arm(config: Config, world: World, arm: str, steps: int, console: Console) -> _Record:
    losses, norms, digests = [], [], []
    with console.working(f"arm {arm}: {steps} steps"):
        with _engine(config, world, arm) as engine:
            for note in engine.notes:
                console.line(f"note: {note}")
            for step in range(steps):
                outcome = compute(engine, step)
                named = _named(outcome)
                digests.append({name: digest(x) for name, x in named.items()})
                losses.append(outcome.loss.item())
                norms.append(outcome.grad_norm.item())
                apply(engine, outcome, step)
            del outcome, named
        del engine
        _free()
    return _Record(losses, norms, digests)


@contextmanager
def _engine(config: Config, world: World, arm: str) -> Iterator[Engine]:
    """An arm's engine, closed at the end; after an error without waiting for anyone."""
    engine = build_engine(config, world, ARMS[arm])
    try:
        yield engine
    except BaseException:
        engine.close(wait=False)
        raise
    engine.close()


def _named(outcome: Outcome) -> dict[str, Tensor]:
    """What is compared."""
    named = {"loss": outcome.loss, "grad_norm": outcome.grad_norm, **outcome.grads}
    return named | {"expert counts": outcome.counts_LE}


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def digest(tensor: Tensor) -> tuple[int, int]:
    """128 bits of a tensor's bits and their places: equal tensors have equal digests, and two
    that differ in any element differ here with overwhelming probability.

    Exact integer arithmetic that wraps, so the order of the sum does not matter.  Works in pieces
    of 2**24 elements to bound its memory.
    """
    bits = _bits(tensor.detach()).view(-1)
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), 1 << 24):
        x = bits[start : start + (1 << 24)].to(torch.int64)
        x += torch.arange(start, start + x.numel(), device=x.device) * 0x1E3779B97F4A7C15
        for half in range(2):
            x = (x ^ (x >> 29)) * (0x3F58476D1CE4E5B9 + 2 * half)
            x = (x ^ (x >> 32)) * (0x14D049BB133111EB + 2 * half)
            total[half] += x.sum()
    first, second = total.tolist()
    return first, second


def _compare(
    config: Config,
    world: World,
    first: str | None,
    arm: str,
    records: dict[str, _Record],
    console: Console,
) -> ArmResult:
    record = records[arm]
    if first is None:
        return ArmResult(arm, None, True, record.losses, record.norms)
    mine = _first_difference(records[first], record, world.rank)
    found = [d for d in gather(mine, world) if d is not None]
    where = min(found, key=lambda d: (d.step, d.rank)) if found else None
    if where is not None:
        where = _look_closer(config, world, first, arm, where, console)
    return ArmResult(arm, first, where is None, record.losses, record.norms, where)


def _first_difference(expected: _Record, actual: _Record, rank: int) -> Difference | None:
    for step, (a, b) in enumerate(zip(expected.digests, actual.digests, strict=True)):
        for name in a:
            if a[name] != b.get(name):
                return Difference(step + 1, rank, name)
    return None


def _look_closer(
    config: Config, world: World, first: str, arm: str, where: Difference, console: Console
) -> Difference:
    """Both arms once more up to the differing step, to show the first element that differs."""
    values = []
    with console.working(f"looking for the first differing element of {where.tensor}"):
        for name in (first, arm):
            with _engine(config, world, name) as engine:
                for step in range(where.step):
                    outcome = compute(engine, step)
                    if step + 1 < where.step:
                        apply(engine, outcome, step)
                values.append(_named(outcome)[where.tensor].detach().cpu().clone())
                del outcome
            del engine
            _free()
    shown = where
    if world.rank == where.rank:
        unequal = _bits(values[0]) != _bits(values[1])
        if unequal.any():
            index = [int(i) for i in unequal.nonzero()[0]]
            a, b = (float(v[tuple(index)]) for v in values)
            shown = Difference(where.step, where.rank, where.tensor, index, b, a)
    return next(d for d in gather(shown, world) if d.rank == where.rank and d is not None)


def _bits(tensor: Tensor) -> Tensor:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(width[tensor.element_size()])


def _print_table(results: list[ArmResult], steps: int, console: Console) -> None:
    console.line(f"{'arm':<18}{'against':<12}{'first loss':>12}{'last loss':>12}  verdict")
    for r in results:
        first, last = r.losses[0], r.losses[-1]
        verdict = "reference" if r.against is None else f"bitwise equal, {steps} steps"
        if r.first_difference is not None:
            d = r.first_difference
            verdict = f"DIFFERS: {d.tensor} at step {d.step}, rank {d.rank}"
            if d.value is not None:
                verdict += f", element {d.index}: {d.value!r} instead of {d.expected!r}"
        console.line(f"{r.name:<18}{r.against or '-':<12}{first:>12.6f}{last:>12.6f}  {verdict}")
    num = len(results[0].losses)
    if all(r.equal for r in results):
        console.line(f"bitwise equal: loss, gradient norm and every gradient of {num} steps")
