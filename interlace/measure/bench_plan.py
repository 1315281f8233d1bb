"""Which arms run under which settings and budgets; pure functions over names.

A cell is one line of the table.  What does not matter to an arm is no part of its cell: the control
is one cell however many chunk counts are swept, and every chunked cell is compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from interlace.measure.bench_request import Request, Setting, Values
from interlace.train.arms import ARMS, Arm
from interlace.train.config import Config
from interlace.train.config_check import check

CONTROL = "control"


@dataclass(frozen=True)
class Cell:
    """An arm under the swept values that matter to it, with a budget of CTAs (None: no bound)."""

    arm: str
    values: Values
    budget: int | None
    config: Config = field(compare=False, repr=False)

    @property
    def control(self) -> tuple[str, Values, int | None]:
        """The cell that this one is compared with."""
        return CONTROL, relevant(ARMS[CONTROL], self.values), self.budget

    @property
    def key(self) -> tuple[str, Values, int | None]:
        return self.arm, self.values, self.budget

    @property
    def label(self) -> str:
        """For people and file names: ``chunk-scheduled overlap.chunks=4 8 CTAs``."""
        parts = [self.arm, *(f"{name}={value}" for name, value in self.values)]
        return " ".join([*parts, f"{self.budget} CTAs"] if self.budget else parts)


@dataclass(frozen=True)
class LeftOut:
    arm: str
    values: Values
    reason: str


def plan_cells(
    request: Request, budgets: Sequence[int | None], device: str, backend: str
) -> tuple[list[Cell], list[LeftOut]]:
    """Cells in the order in which they are built, references first; and what was left out.

    ``device`` cpu or cuda, ``backend`` as :class:`~interlace.train.world.World` has it.
    Raises: ValueError for an arm that was asked for by name and cannot run here.
    """
    cells: dict[Cell, None] = {}
    left_out = {LeftOut("every arm", values, why): None for values, why in request.refused}
    arms = [ARMS[name] for name in ARMS if name in request.arms or name == CONTROL]
    for arm in arms:
        for setting in request.settings:
            values, config = relevant(arm, setting.values), _with_chunks(arm, setting)
            single = arm.chunked and config.overlap.chunks == 1
            reason = why_not(arm, config, device, backend)
            if single:
                reason = "one chunk is no overlap, it is the control's line"
            if reason and not (request.optional or single):
                raise ValueError(f"--arms: {arm.name} cannot run here: {reason}.")
            if reason:
                left_out[LeftOut(arm.name, values, reason)] = None
                continue
            for budget in budgets:
                cells[Cell(arm.name, values, budget, config)] = None
    return list(cells), list(left_out)


def relevant(arm: Arm, values: Values) -> Values:
    """The swept values that change what an arm does."""
    matters = {"overlap.chunk": arm.chunked, "overlap.scheduler": arm.scheduled}
    return tuple(
        (name, value)
        for name, value in values
        if next((yes for prefix, yes in matters.items() if name.startswith(prefix)), True)
    )


def why_not(arm: Arm, config: Config, device: str, backend: str) -> str | None:
    """Why an arm cannot run, or None."""
    if arm.captured and device != "cuda":
        return "a CUDA graph needs a CUDA device, and this runs on a CPU"
    if arm.captured and not config.ep.padded:
        return "the exact exchange reads sizes on the host, which a CUDA graph cannot; --ep.padded"
    if arm.captured and backend == "gloo" and config.ep.backend == "alltoall":
        return "gloo carries the exchange through the host, which a CUDA graph cannot record"
    if arm.chunked:
        try:
            check(replace(config, ep=replace(config.ep, transport="loopback")), 1)
        except ValueError as error:
            return str(error).rstrip(".")
    return None


def _with_chunks(arm: Arm, setting: Setting) -> Config:
    """Chunked arms take two chunks where neither settings nor sweep say how many."""
    config, swept = setting.config, dict(setting.values)
    if not arm.chunked or "overlap.chunks" in swept or config.overlap.chunks > 1:
        return config
    return replace(config, overlap=replace(config.overlap, chunks=2))
