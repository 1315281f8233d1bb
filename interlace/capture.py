"""A step as one CUDA graph: recorded once for each layout of its inputs, replayed with new ones.

What is captured never reads a size on the host: the exchange runs in padded mode.  Parameters and
buffers are read where they are, so an update between two replays is seen, and a tensor that moved
is an error; inputs are copied to fixed places.  Gradients lie in the graph's memory and hold until
the next replay, everything small that a replay returns is a copy.

Random numbers go on from replay to replay as they do from step to step without a graph: generators
are registered with the graph, and neither warm-up nor capture advances them.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from interlace.trace import StepResult
from interlace.trace.refusals import Layout, check_layout, layout_of

WARM_UPS = 3  # kernels are compiled and handles made before anything is recorded
MAX_LAYOUTS = 2  # of one step; a graph holds the memory of a whole step
Run = Callable[[Sequence[Tensor]], StepResult]

_live: weakref.WeakSet[Captured] = weakref.WeakSet()


@dataclass(eq=False)
class Captured:
    """Owns a CUDA graph, its inputs and its results; ``close`` before process groups go.

    ``state`` gives the tensors that the graph reads where they are, by name.
    """

    graph: torch.cuda.CUDAGraph | None
    inputs: tuple[Tensor, ...]
    result: StepResult
    state: Callable[[], Mapping[str, Tensor]] = dict
    addresses: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.addresses = _addresses(self.state())
        _live.add(self)

    def __call__(self, batch: Sequence[Tensor]) -> StepResult:
        """Replays the step on ``batch``.

        Raises: ValueError for other shapes or dtypes than those captured, or if a parameter moved;
                RuntimeError once closed.
        """
        if self.graph is None:
            raise RuntimeError("this captured step has been closed and cannot be replayed.")
        check_layout(layout_of(self.inputs), batch, "capture")
        check_addresses(self.addresses, self.state())
        for place, new in zip(self.inputs, batch, strict=True):
            place.copy_(new)
        self.graph.replay()
        result = self.result
        extra = {name: x.clone() for name, x in result.extra.items()}
        return StepResult(result.loss.clone(), dict(result.grads), extra)

    def close(self, *, wait: bool = True) -> None:
        """Releases the graph, which else keeps communicators alive at exit.

        ``wait`` for its last replay; not after an error, when a peer may never answer.
        """
        if self.graph is not None:
            if wait and any(x.is_cuda for x in self.inputs):
                torch.cuda.synchronize()
            self.graph.reset()
            self.graph = None


def close_all(*, wait: bool = True) -> None:
    """Closes every captured step of this process: before windows and process groups go."""
    for captured in list(_live):
        captured.close(wait=wait)


def check_addresses(captured: Mapping[str, int], state: Mapping[str, Tensor]) -> None:
    """ValueError that names the first tensor which is no longer where the graph reads it."""
    found = _addresses(state)
    if found == captured:
        return
    moved = sorted(n for n in {**found, **captured} if found.get(n) != captured.get(n))
    raise ValueError(
        f"{moved[0]} ({len(moved)} in all) was moved since the step was captured, and the graph "
        f"would go on reading its old memory; copy new values into the tensor (copy_, or "
        f"load_state_dict without assign), or capture the step again."
    )


def _addresses(state: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in state.items()}


def capture_step(
    run: Run,
    batch: Sequence[Tensor],
    *,
    state: Callable[[], Mapping[str, Tensor]] = dict,
    generators: Sequence[torch.Generator] = (),
) -> Captured:
    """Records one call of ``run``; all of its work must be on the device of ``batch``.

    ``state``: what ``run`` reads beside its inputs; those tensors must stay where they are.
    ``generators``: what it draws from beside the device's default generator.
    Ensures: no random state is advanced; other threads may use CUDA meanwhile.
    Raises: ValueError without CUDA.
    """
    device = batch[0].device
    if device.type != "cuda":
        raise ValueError(
            f"capture_step: a CUDA graph needs CUDA tensors, got {device.type}; move the model and "
            "the batch to a CUDA device, or run the step as it is (on the command line: "
            "--capture.no-enabled)."
        )
    inputs = tuple(x.clone() for x in batch)
    before = random_state(device, generators)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            run(inputs)
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    for generator in (_default_generator(device), *generators):
        graph.register_generator_state(generator)
    # A checkpoint may be on its way in another thread when a step is captured again.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = run(inputs)
    set_random_state(device, before, generators)
    return Captured(graph, inputs, result, state)


@dataclass
class ByLayout:
    """Owns a step that is built for one layout of its inputs at a time, and again for another.

    ``build`` makes the step for inputs like those it is given.  At most ``limit`` are kept; the one
    that was not used for longest is closed before another is built.
    """

    build: Callable[[Sequence[Tensor]], Run]
    limit: int = MAX_LAYOUTS
    kept: OrderedDict[Layout, Run] = field(default_factory=OrderedDict)

    def __call__(self, batch: Sequence[Tensor]) -> StepResult:
        """Runs the step that fits ``batch``, which is built now if there is none."""
        return self.prepare(batch)(batch)

    def prepare(self, batch: Sequence[Tensor]) -> Run:
        """The step that fits ``batch``; does not run it."""
        layout = layout_of(batch)
        if layout not in self.kept:
            while len(self.kept) >= self.limit:
                _close(self.kept.popitem(last=False)[1], wait=True)
            self.kept[layout] = self.build(batch)
        self.kept.move_to_end(layout)
        return self.kept[layout]

    def close(self, *, wait: bool = True) -> None:
        """Closes every step; the next call builds anew."""
        while self.kept:
            _close(self.kept.popitem()[1], wait=wait)


def _close(step: Any, *, wait: bool) -> None:
    if isinstance(step, Captured):
        step.close(wait=wait)


# --- random numbers -------------------------------------------------------------------------------


def random_state(
    device: torch.device, generators: Sequence[torch.Generator] = ()
) -> tuple[Tensor, ...]:
    """Where the random numbers stand: the CPU's, the device's, and those of ``generators``."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return tuple(states + [g.get_state() for g in generators])


def set_random_state(
    device: torch.device, states: Sequence[Tensor], generators: Sequence[torch.Generator] = ()
) -> None:
    """The inverse of :func:`random_state`."""
    remaining = list(states)
    torch.set_rng_state(remaining.pop(0))
    if device.type == "cuda":
        torch.cuda.set_rng_state(remaining.pop(0), device)
    for generator, state in zip(generators, remaining, strict=True):
        generator.set_state(state)


def _default_generator(device: torch.device) -> torch.Generator:
    torch.cuda.init()  # fills the tuple below
    return torch.cuda.default_generators[device.index or 0]


# --- the allocator --------------------------------------------------------------------------------

_REUSE = "graph_capture_record_stream_reuse"
# All supported versions of torch read both names, but which one first has changed between them, and
# the second is then ignored: a name that the user left out must stay unset if the other is there.
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def set_allocator(environment: MutableMapping[str, str] | None = None) -> str:
    """Lets memory of several streams be used again inside a capture; returns what holds.

    Every arm of a comparison gets the same, captured or not.  Call it before CUDA is used: the
    variables are read once.  What the user set stays, this setting included.
    Example: PYTORCH_ALLOC_CONF=expandable_segments:True, without the other variable ->
             PYTORCH_ALLOC_CONF=expandable_segments:True,graph_capture_record_stream_reuse:True
    """
    variables = os.environ if environment is None else environment
    given = [name for name in _VARIABLES if variables.get(name)] or [_VARIABLES[0]]
    for name in given:
        text = variables.get(name, "")
        is_other_backend = "backend:cudaMallocAsync" in text.replace(" ", "")
        if _REUSE not in text and not is_other_backend:
            variables[name] = ",".join(filter(None, (text.strip(" ,"), f"{_REUSE}:True")))
    return " ".join(f"{name}={variables[name]}" for name in given)
