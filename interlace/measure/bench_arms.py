"""Arms that can be run again and again on one model and one batch, each with its verdict.

A graph is traced once and shared by every budget, and by the captured form of its arm.  CUDA graphs
share one pool: arms run one after the other, and what a replay leaves behind nobody reads later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from interlace import ep
from interlace.ep import transport
from interlace.ep.backend import get_backend
from interlace.ep.budget import bounded
from interlace.ep.signals import check_timeouts
from interlace.measure.bench_plan import Cell, relevant
from interlace.measure.bench_update import build_update
from interlace.model import build_model, init_weights
from interlace.model.batch import IGNORED
from interlace.schedule import agree_on_order
from interlace.trace import Step, StepResult, Traced
from interlace.train import overflow
from interlace.train.arms import ARMS, Working, build_arm, reference_of
from interlace.train.config import Config
from interlace.train.data_open import open_training_data
from interlace.train.engine import build_exchange, exchange_over, step_of
from interlace.train.verify import digest
from interlace.train.world import World, gather

COMPUTE_ONLY = "compute only"
Digests = dict[str, tuple[int, int]]
_REFERENCES = ("eager", "chunk-eager")


@dataclass(frozen=True)
class Verdict:
    """Whether an arm gave the bits of ``against``; None where it is a reference itself."""

    equal: bool | None = None
    against: str | None = None
    differs_in: str | None = None  # the first tensor


@dataclass(frozen=True)
class Ready:
    """``run`` computes forward and backward of the batch, and whatever else is measured."""

    cell: Cell
    run: Callable[[], Any]
    traced: Traced | None
    verdict: Verdict
    peak_bytes: int | None = None


@dataclass
class Workbench:
    """Owns the model, the batch and everything built on them.

    batch: tokens, labels, positions (B, S), document boundaries (B, C), the number of labels.
    """

    config: Config
    world: World
    step: Step
    batch: tuple[Tensor, ...]
    working: Working
    arms: tuple[str, ...]
    pool: Any = None
    update: Callable[[StepResult], None] | None = None
    _runs: dict[Any, tuple[Any, Traced | None]] = field(default_factory=dict)
    _digests: dict[Any, Digests] = field(default_factory=dict)
    _graphs: list[torch.cuda.CUDAGraph] = field(default_factory=list)

    def build(self, cell: Cell) -> Ready:
        """Traces or captures an arm, and compares its first result with what it must equal.

        Raises: ValueError where the capacity of a padded exchange is too small for the batch.
        """
        plain, traced = self._plain(cell)
        expected = self._reference(cell)
        if not ARMS[cell.arm].captured:
            result, peak = self._measured(plain)
            verdict = self._judge(cell, result, expected)
            return Ready(cell, self._whole(plain), traced, verdict, peak)
        with self.working(f"capturing {cell.label}"):
            (graph, result), peak = self._measured(lambda: self._capture(plain))
            graph.replay()
            verdict = self._judge(cell, result, expected)
            del result  # other arms use its memory
            if self.update is not None:
                graph, _ = self._capture(self._whole(plain))
        return Ready(cell, graph.replay, traced, verdict, peak)

    def build_compute_only(self, control: Cell, *, captured: bool) -> Ready:
        """The control with transfers that move nothing: what hiding all of them would leave."""
        arm, traced = self._plain(control)

        def plain() -> Any:
            with _without_transfers():
                return arm()

        cell = replace(control, arm=COMPUTE_ONLY, budget=None)
        if not captured:
            return Ready(cell, plain, traced, Verdict())
        with self.working(f"capturing {cell.label}"):
            graph, _ = self._capture(plain)
        return Ready(cell, graph.replay, traced, Verdict())

    def _plain(self, cell: Cell) -> tuple[Callable[[], StepResult], Traced | None]:
        """The uncaptured arm under the cell's budget; its graph is made once for all budgets."""
        arm = replace(ARMS[cell.arm], captured=False)
        key = (arm.traced, arm.chunked, arm.scheduled, cell.values)
        if key not in self._runs:
            self._use_exchange(cell.config)
            name = replace(cell, budget=None).label

            def working(what: str) -> AbstractContextManager[None]:
                return self.working(f"{name}: {what}")

            self._runs[key] = build_arm(arm, self.step, self.batch, cell.config, working)
            traced = self._runs[key][1]
            if traced is not None and self.world.size > 1:
                agree_on_order(traced.gm)
        compute, traced = self._runs[key]

        def run() -> StepResult:
            if traced is None:
                self._use_exchange(cell.config)
            with bounded(cell.budget):
                return compute(self.batch)

        return run, traced

    def _whole(self, run: Callable[[], StepResult]) -> Callable[[], Any]:
        """What is timed: the run, and its update if that was asked for."""
        update = self.update
        return run if update is None else lambda: update(run())

    def _capture(self, run: Callable[[], Any]) -> tuple[Any, Any]:
        run()  # what a first call does cannot be recorded
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            result = run()
        self._graphs.append(graph)
        return graph, result

    def close(self) -> None:
        """Releases the CUDA graphs, before process groups go."""
        if self._graphs:
            torch.cuda.synchronize()
        while self._graphs:
            self._graphs.pop().reset()

    def _measured(self, work: Callable[[], Any]) -> tuple[Any, int | None]:
        """The result, and the most bytes that tensors took meanwhile; None on a CPU."""
        if self.world.device.type != "cuda":
            return work(), None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        result = work()
        torch.cuda.synchronize()
        return result, torch.cuda.max_memory_allocated()

    def _reference(self, cell: Cell) -> tuple[str, Digests] | None:
        names = [*_REFERENCES, *(a for a in self.arms if a not in _REFERENCES)]
        name = reference_of(cell.arm, names, cell.config)
        if name is None:
            return None
        key = name, relevant(ARMS[name], cell.values)
        if key not in self._digests:
            with self.working(f"{name}, which {cell.arm} must equal"):
                self._use_exchange(cell.config)
                arm = replace(ARMS[name], captured=False)
                run, _ = build_arm(arm, self.step, self.batch, cell.config, _silent)
                with bounded(cell.budget):
                    result = run(self.batch)
                _refuse(result, cell, self.world)
                self._digests[key] = digests(result)
        return name, self._digests[key]

    def _judge(
        self, cell: Cell, result: StepResult, expected: tuple[str, Digests] | None
    ) -> Verdict:
        _refuse(result, cell, self.world)
        mine = digests(result)
        self._digests.setdefault((cell.arm, cell.values), mine)
        if expected is None:
            return Verdict()
        against, theirs = expected
        differs = next((n for n in theirs if mine.get(n) != theirs[n]), None)
        first = next((name for name in gather(differs, self.world) if name is not None), None)
        return Verdict(first is None, against, first)

    def _use_exchange(self, config: Config) -> None:
        """The model holds the exchange's settings: a graph has them built in, eager arms do not."""
        name = "ep" if self.world.ep_size > 1 else "single"
        overflow.set_exchange(self.step.model, exchange_over(ep.get_group(name), config))


def open_workbench(
    config: Config, world: World, arms: tuple[str, ...], working: Working, *, optimizer: bool
) -> Workbench:
    """Model, weights and one microbatch from the settings' seed."""
    exchange = build_exchange(config, world)
    with working(f"building {config.model.name} and its batch"):
        with world.device:
            model = build_model(config.model, exchange)
        init_weights(model, config.debug.seed, exchange)
        rows = config.training.local_batch_size // config.training.microbatches
        data = open_training_data(config, world)
        batch = data.rows(
            0, global_batch_rows=rows * world.size, first=rows * world.rank, count=rows
        )
    mine = int((batch.labels_BS != IGNORED).sum())
    num_valid = torch.tensor(float(max(1, sum(gather(mine, world)))))
    tensors = tuple(x.to(world.device) for x in (*batch.tensors(), num_valid))
    pool = torch.cuda.graph_pool_handle() if world.device.type == "cuda" else None
    update = build_update(model, config, world) if optimizer else None
    return Workbench(config, world, step_of(model, config), tensors, working, arms, pool, update)


def digests(result: StepResult) -> Digests:
    """128 bits of each tensor of a step, by name."""
    named = {"loss": result.loss, **result.grads, **result.extra}
    return {name: digest(x) for name, x in named.items()}


@contextmanager
def _without_transfers() -> Iterator[None]:
    """No row moves between ranks; plans are made as ever, so every rank has the rows to compute
    that it has in the control."""
    transport.transfers(enabled=False)
    try:
        yield
    finally:
        transport.transfers(enabled=True)


def _refuse(result: StepResult, cell: Cell, world: World) -> None:
    """ValueError on every rank for a result without all of its rows."""
    config = cell.config
    if get_backend(config.ep.backend).owns_buffers:
        check_timeouts()
    if not config.ep.padded or not config.ep.capacity_factor or config.ep.overflow == "drop":
        return
    if missing := overflow.agree(result.extra["overflow"], world):
        o, m = config.overlap, config.model
        parts = o.chunks if ARMS[cell.arm].chunked else 1
        load = overflow.Load(math.prod(result_shape(config)) // parts, m.top_k, m.num_experts)
        here = exchange_over(ep.get_group("ep"), config)
        raise ValueError(
            f"{cell.label}: {overflow.describe(here, missing, load)}, and a step that drops rows "
            f"is no benchmark. {overflow.advice(here, missing, load)}, or model.routing=balanced."
        )


def result_shape(config: Config) -> tuple[int, int]:
    """Sequences and tokens a sequence of the microbatch that is measured."""
    t = config.training
    return t.local_batch_size // t.microbatches, t.seq_len


def _silent(what: str) -> AbstractContextManager[None]:
    return nullcontext()
