"""A training step (forward, loss, gradients), run plainly or recorded as one flat graph.

Both forms run the same Python function over the same tensors, so the graph can be compared with
plain PyTorch bit by bit.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functional_call
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx

from interlace import _compat
from interlace.graph.chunking import Chunking
from interlace.graph.passes import Pass, PassReport, remove_dead_nodes, run_passes
from interlace.trace.backward import Sums, fill_unused, settle_tags, tagged_grad
from interlace.trace.draws import Draws, check_chunk_draws, repeated_draws, reuse_draws
from interlace.trace.eager_chunk import chunk_modules
from interlace.trace.functional import functionalise_temporaries
from interlace.trace.refusals import (
    Layout,
    check_layout,
    check_loss,
    layout_of,
    values_are_not_read,
)
from interlace.trace.regions import Regions

LossFn = Callable[..., tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class StepResult:
    """Loss (0-d float32), gradients by parameter name, further outputs by name.

    A gradient has the type that the parameter was computed in: a cast to float32 would only move
    bytes, and whoever sums gradients (microbatches, ranks) does that in float32.
    """

    loss: Tensor
    grads: dict[str, Tensor]
    extra: dict[str, Tensor]


@dataclass(frozen=True)
class Step:
    """What is computed: ``loss_fn(model, *batch) -> (loss, extra)``, for a model.

    ``compute_dtype`` is the dtype of the model's arithmetic; the parameters that are handed in stay
    float32 and are cast once a step, except those for which ``keep(name)`` is true.
    ``boundary(name)`` as in :meth:`Regions.of_modules`.  ``chunking`` runs matching modules in
    parts (eager chunking).
    """

    model: torch.nn.Module
    loss_fn: LossFn
    compute_dtype: torch.dtype = torch.float32
    keep: Callable[[str], bool] = lambda name: False
    boundary: Callable[[str], bool] = lambda name: False
    chunking: Chunking | None = None

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What is trained, and what is only read: frozen parameters (``requires_grad`` False) and
        buffers; the model's own tensors, each once however often it is used."""
        params = dict(self.model.named_parameters())
        trained = {n: p for n, p in params.items() if p.requires_grad}
        frozen = {n: p for n, p in params.items() if not p.requires_grad}
        return trained, {**frozen, **dict(self.model.named_buffers())}


def run_eager(
    step: Step,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    batch: Sequence[Tensor],
) -> StepResult:
    """Plain PyTorch: forward, loss, ``torch.autograd.grad``; no graph of ours."""
    leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
    return _compute(step, leaves, buffers, batch, None, None)


@dataclass(frozen=True)
class Traced:
    """A step as one graph: ``gm(*params, *buffers, *batch) -> [loss, *grads, *extra]``.

    Names as in :meth:`Step.state`; ``layout`` is that of the batch.
    """

    gm: fx.GraphModule
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    extra: tuple[str, ...]
    layout: Layout
    reports: tuple[PassReport, ...] = ()

    def __call__(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Sequence[Tensor]
    ) -> StepResult:
        """Runs the graph.

        Raises: ValueError for a batch of another layout, or a state with other names.
        """
        check_layout(self.layout, batch, "trace")
        if missing := [n for n in self.params if n not in params] + [
            n for n in self.buffers if n not in buffers
        ]:
            raise ValueError(
                f"the state has no {missing[0]} ({len(missing)} in all), or it was frozen or "
                "freed since the step was traced; hand in Step.state(), or trace it again."
            )
        with torch.no_grad():
            out = self.gm(
                *(params[n] for n in self.params), *(buffers[n] for n in self.buffers), *batch
            )
        num = len(self.params)
        return StepResult(
            out[0],
            dict(zip(self.params, out[1 : 1 + num], strict=True)),
            dict(zip(self.extra, out[1 + num :], strict=True)),
        )


def trace_step(
    step: Step,
    batch: Sequence[Tensor],
    passes: Sequence[Pass] = (),
    *,
    source_lines: bool = False,
) -> Traced:
    """Records the step for the shapes of ``batch``; the values are not read.

    ``source_lines`` keeps the line of the model that made each node: slower, for error messages.

    Ensures: static shapes but for sizes that depend on routing, which stay symbols; a tag on every
             node; no dead code; parameters are inputs.
    Raises:  ValueError that names the pass or the module at fault.
    """
    with without_collection():
        return _trace(step, batch, passes, source_lines)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """No cycle collection inside: it would walk all nodes made so far again and again, which makes
    the time of a trace grow faster than the graph."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _trace(
    step: Step, batch: Sequence[Tensor], passes: Sequence[Pass], source_lines: bool
) -> Traced:
    params, buffers = step.state()
    regions, sums = Regions(), Sums()
    extra_names: list[str] = []

    def record(*flat: Tensor) -> list[Tensor]:
        p = dict(zip(params, flat, strict=False))
        b = dict(zip(buffers, flat[len(params) :], strict=False))
        regions.publish()
        with Draws(regions).watched():
            result = _compute(step, p, b, flat[len(params) + len(buffers) :], regions, sums)
        extra_names.extend(result.extra)
        return [result.loss, *result.grads.values(), *result.extra.values()]

    with contextlib.ExitStack() as stack:
        mode = stack.enter_context(_compat.fake_mode())
        fake = [
            _compat.to_fake(mode, t.detach()).requires_grad_(i < len(params))
            for i, t in enumerate([*params.values(), *buffers.values(), *batch])
        ]
        stack.enter_context(traceback.preserve_node_meta())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(values_are_not_read(step.model))
        gm = make_fx(record, tracing_mode="real", record_stack_traces=source_lines)(*fake)
    roles = [("param", n.rpartition(".")[0]) for n in params]
    roles += [("buffer", n.rpartition(".")[0]) for n in buffers] + [("arg", "")] * len(batch)
    repeats = repeated_draws(gm)
    settle_tags(gm, roles, sums)
    _reject_baked_tensors(gm)
    clean_up = [
        Pass("remove_dead_nodes", remove_dead_nodes),
        Pass("functionalise_temporaries", functionalise_temporaries, keeps_effects=False),
    ]
    if repeats:
        reuse = partial(reuse_draws, repeats=repeats)
        clean_up.append(Pass("reuse_draws", reuse, keeps_effects=False))
    reports = run_passes(gm, [*clean_up, *passes])
    check_chunk_draws(gm, step.boundary)
    names = tuple(params), tuple(buffers), tuple(extra_names)
    return Traced(gm, *names, layout_of(batch), tuple(reports))


class _Body(torch.nn.Module):
    """Forward and backward inside one forward(), so that the swapped parameters are still in place
    while checkpointed layers are recomputed."""

    def __init__(self, model: torch.nn.Module, body: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.body = model, body

    def forward(self, *batch: Tensor) -> Any:
        return self.body(*batch)


def _compute(
    step: Step,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    batch: Sequence[Tensor],
    regions: Regions | None,
    sums: Sums | None,
) -> StepResult:
    weights = {n: _cast(step, n, p, regions).requires_grad_() for n, p in params.items()}
    frozen = {n for n, _ in step.model.named_parameters()} - weights.keys()
    read = {n: _cast(step, n, b, regions) if n in frozen else b for n, b in buffers.items()}
    leaves, state = list(weights.values()), {**weights, **read}

    def body(*batch: Tensor) -> StepResult:
        with contextlib.ExitStack() as stack:
            if step.chunking is not None:
                stack.enter_context(chunk_modules(step.model, step.chunking, regions))
            return run(*batch)

    def run(*batch: Tensor) -> StepResult:
        if regions is None or sums is None:
            loss, extra = check_loss(step.loss_fn(step.model, *batch))
            grads = fill_unused(leaves, torch.autograd.grad(loss, leaves, allow_unused=True))
        else:
            with regions.of_modules(step.model, step.boundary):
                loss, extra = check_loss(step.loss_fn(step.model, *batch))
                grads = tagged_grad(regions, loss, leaves, sums)
        return StepResult(
            loss.detach(),
            dict(zip(params, grads, strict=True)),
            {n: x.detach() for n, x in extra.items()},
        )

    swap = _every_name(step.model, state)
    return functional_call(_Body(step.model, body), swap, tuple(batch), tie_weights=False)


def _cast(step: Step, name: str, param: Tensor, regions: Regions | None) -> Tensor:
    if step.keep(name) or param.dtype == step.compute_dtype:
        return param
    inside = regions.region(name.rpartition(".")[0], role="cast") if regions else None
    with inside or contextlib.nullcontext(), torch.no_grad():
        return param.to(step.compute_dtype)


def _every_name(model: torch.nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One entry an owner: a tied tensor has each of its names, a shared module counts once."""
    first = {id(t): n for n, t in [*model.named_parameters(), *model.named_buffers()]}
    names = {}
    for prefix, module in model.named_modules():
        for own in (module.named_parameters, module.named_buffers):
            for n, t in own(recurse=False):
                full = f"{prefix}.{n}" if prefix else n
                names[f"model.{full}"] = state[first[id(t)]]
    return names


def _reject_baked_tensors(gm: fx.GraphModule) -> None:
    """A tensor that became a constant of the graph would keep the traced batch's values."""
    baked = [n.name for n in gm.graph.nodes if n.op == "get_attr"]
    if baked:
        raise ValueError(
            f"trace_step: {', '.join(baked[:5])} became constants of the graph; make them buffers "
            "of the model or compute them from its inputs."
        )
