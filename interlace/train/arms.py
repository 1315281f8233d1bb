"""The ways to run one and the same step, by name: what `verify` compares and `train` chooses from.

eager            plain PyTorch
control          the traced step, unscheduled
scheduled        the traced step, reordered
chunk-eager      plain PyTorch with chunked modules
chunk-graph      the traced step, chunked on the graph
chunk-scheduled  that, reordered
captured         the traced step as one CUDA graph, all microbatches of it
scheduled-captured  that, reordered
chunk-captured   the traced step, chunked and reordered, as one CUDA graph

With ``compile.regional`` plain PyTorch has no compiled regions to compare with: the references are
then the traced step, and the trace of eager chunking, with the same regions as every other arm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from torch import Tensor

from interlace.capture import ByLayout, Run, capture_step
from interlace.graph.chunking import BATCH, SEQUENCE, Chunking
from interlace.overlap import trace_overlapped
from interlace.trace import Step, StepResult, Traced, run_eager
from interlace.train.config import Config
from interlace.train.microbatches import added_on_the_way, over_microbatches

ForwardBackward = Callable[[Sequence[Tensor]], StepResult]
Working = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Arm:
    """``against`` is the arm that it must equal bitwise, None where it is a reference itself."""

    name: str
    against: str | None
    traced: bool
    chunked: bool = False
    scheduled: bool = False
    captured: bool = False


ARMS = {
    arm.name: arm
    for arm in (
        Arm("eager", None, traced=False),
        Arm("control", "eager", traced=True),
        Arm("scheduled", "control", traced=True, scheduled=True),
        Arm("chunk-eager", None, traced=False, chunked=True),
        Arm("chunk-graph", "chunk-eager", traced=True, chunked=True),
        Arm("chunk-scheduled", "chunk-eager", traced=True, chunked=True, scheduled=True),
        Arm("captured", "control", traced=True, captured=True),
        Arm("scheduled-captured", "control", traced=True, scheduled=True, captured=True),
        Arm("chunk-captured", "chunk-eager", True, chunked=True, scheduled=True, captured=True),
    )
}


def arm_of(config: Config) -> Arm:
    """The arm that the settings ask a training run to be."""
    chunked, scheduled = config.overlap.chunks > 1, config.overlap.scheduler != "off"
    if config.training.mode == "eager":
        return ARMS["chunk-eager" if chunked else "eager"]
    names = {
        (False, False): "control",
        (False, True): "scheduled",
        (True, False): "chunk-graph",
        (True, True): "chunk-scheduled",
    }
    arm = ARMS[names[chunked, scheduled]]
    return replace(arm, captured=config.capture.enabled)


def chunking_of(config: Config, *, at_least: int = 1) -> Chunking:
    """How regions are chunked; verification takes two chunks where the settings have one."""
    o = config.overlap
    dim = BATCH if o.chunk_dim == "batch" else SEQUENCE
    return Chunking(o.chunk_root, max(o.chunks, at_least), dim)


@dataclass
class Runner:
    """Owns what runs a step: forward and backward of all microbatches of a rank's batch.

    It is built when first called, and again for a batch of another layout or after :meth:`rebuild`;
    parameters and their updates are no part of it.  ``rows``: sequences of a microbatch.
    ``agreed`` is called with every graph, before it runs: all ranks build at the same time.
    """

    arm: Arm
    step: Step
    config: Config
    rows: int
    working: Working
    agreed: Callable[[Traced], None] = lambda traced: None
    traced: Traced | None = None
    by_layout: ByLayout = field(init=False)

    def __post_init__(self) -> None:
        self.by_layout = ByLayout(self._build)
        if self.arm.captured:
            check_capturable(self.config)

    def __call__(self, batch: Sequence[Tensor]) -> StepResult:
        """``batch``: tokens, labels, positions (B, S), document boundaries (B, C), a scalar.

        Of a captured step the gradients hold until the next call.
        """
        return self.by_layout(batch)

    def prepare(self, batch: Sequence[Tensor]) -> None:
        """Traces and captures for batches like this one; its values are not read."""
        self.by_layout.prepare(batch)

    def rebuild(self) -> None:
        """Lets go of what was built: the next call builds for the model as it then is."""
        self.close()

    def close(self, *, wait: bool = True) -> None:
        """Frees graphs and their memory, before windows and process groups go."""
        self.by_layout.close(wait=wait)
        self.traced = None

    def _build(self, batch: Sequence[Tensor]) -> Run:
        *tensors, number = batch
        microbatch = (*(x[: self.rows] for x in tensors), number)
        run, traced = build_arm(self.arm, self.step, microbatch, self.config, self.working)
        adder = None
        if traced is not None:
            self.traced = traced
            self.agreed(traced)
            if len(tensors[0]) > self.rows:
                adder = added_on_the_way(traced, *self.step.state())
        whole = over_microbatches(run, self.rows, adder)
        if not self.arm.captured:
            return whole
        with self.working("capturing the step"):
            return capture_step(whole, batch, state=self._state)

    def _state(self) -> dict[str, Tensor]:
        params, buffers = self.step.state()
        return params | buffers


def build_arm(
    arm: Arm, step: Step, batch: Sequence[Tensor], config: Config, working: Working
) -> tuple[ForwardBackward, Traced | None]:
    """The function that computes a microbatch of ``batch``'s shapes, and the graph if there is one.

    ``batch``: tokens, labels, positions (B, S), document boundaries (B, C), a scalar.  Capture is
    the :class:`Runner`'s.
    """
    if arm.chunked:
        step = replace(step, chunking=chunking_of(config, at_least=2))
    params, buffers = step.state()
    if not (arm.traced or (arm.chunked and config.compile.regional)):
        return lambda tensors: run_eager(step, params, buffers, tensors), None
    with working("tracing the step"):
        traced = trace_arm(arm, step, batch, config)
    return lambda tensors: traced(params, buffers, tensors), traced


def check_capturable(config: Config) -> None:
    """ValueError where a captured step would have to read a size on the host."""
    if not config.ep.padded:
        raise ValueError(
            "capture.enabled: the exact exchange reads sizes on the host, which a CUDA graph "
            "cannot; use --ep.padded."
        )


def trace_arm(arm: Arm, step: Step, batch: Sequence[Tensor], config: Config) -> Traced:
    """The graph of an arm; passes are run and reported in order.

    What chunking refuses is traced once more, to name the line of the model at fault.
    """
    try:
        return _trace_arm(arm, step, batch, config, source_lines=False)
    except ValueError:
        if not arm.chunked:
            raise
    return _trace_arm(arm, step, batch, config, source_lines=True)


def _trace_arm(
    arm: Arm, step: Step, batch: Sequence[Tensor], config: Config, *, source_lines: bool
) -> Traced:
    scheduler = "off"
    if arm.scheduled:
        scheduler = "policy" if config.overlap.scheduler == "off" else config.overlap.scheduler
    return trace_overlapped(
        step,
        batch,
        chunking_of(config, at_least=2) if arm.chunked and arm.traced else None,
        scheduler,
        config.compile.regional,
        source_lines,
    )


def reference_of(arm: str, arms: Sequence[str], config: Config) -> str | None:
    """The arm among ``arms`` that this one must equal; None for a reference.

    Where the arm that it is defined against does not run, the first of its kind takes its place.
    """
    wanted = ARMS[arm].against
    if config.compile.regional and wanted == "eager":
        return None
    kind = [a for a in arms if ARMS[a].chunked == ARMS[arm].chunked]
    if config.compile.regional:
        kind = [a for a in kind if a != "eager"]
    if wanted is None or kind[0] == arm:
        return None
    return wanted if wanted in arms else kind[0]
