"""All microbatches of a step as one function, run directly or captured as one graph.

The first microbatch's gradients become the sums, in float32; each later gradient is added as soon
as it is there and freed, so that the gradients of two microbatches never lie side by side.  With
one microbatch nothing is copied or added.

Legend: B sequences of a rank's batch, b of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, fx

from interlace import _compat
from interlace.trace import StepResult, Traced

Run = Callable[[Sequence[Tensor]], StepResult]
# Adds the gradients of one more microbatch to sums; returns its loss and further outputs.
Adder = Callable[[Sequence[Tensor], dict[str, Tensor]], StepResult]
MAXIMA = frozenset({"overflow"})  # outputs of which the step has the largest; of others the sum


def over_microbatches(run: Run, rows: int, adder: Adder | None = None) -> Run:
    """The step over a whole batch, ``rows`` sequences at a time.

    The last input is a number for all of them, every other one has the sequences in dimension 0.
    Numerics: sums in the order of the microbatches, gradients in float32; the first is taken as is.
    """
    add = adder or added_afterwards(run)

    def whole(batch: Sequence[Tensor]) -> StepResult:
        *tensors, number = batch
        parts = zip(*(x.split(rows) for x in tensors), strict=True)
        result = run((*next(parts), number))
        for index, part in enumerate(parts):
            if index == 0:
                result = StepResult(result.loss, _widened(result.grads), result.extra)
            other = add((*part, number), result.grads)
            extra = {name: _joined(name, x, other.extra[name]) for name, x in result.extra.items()}
            result = StepResult(result.loss + other.loss, result.grads, extra)
        return result

    return whole


def _widened(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums to add to, each in memory of its own, whatever a gradient is a view of.

    Takes the gradients out one by one: no more than one is there twice.
    """
    form = torch.contiguous_format
    return {
        name: grads.pop(name).to(torch.float32, copy=True, memory_format=form)
        for name in list(grads)
    }


def _joined(name: str, total: Tensor, other: Tensor) -> Tensor:
    return torch.maximum(total, other) if name in MAXIMA else total + other


def added_afterwards(run: Run) -> Adder:
    """For a step that is no graph: its gradients are added once all are there."""

    def add(inputs: Sequence[Tensor], sums: dict[str, Tensor]) -> StepResult:
        result = run(inputs)
        _compat.add_each_([sums[n] for n in result.grads], list(result.grads.values()))
        return StepResult(result.loss, {}, result.extra)

    return add


def added_on_the_way(
    traced: Traced, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> Adder:
    """For a traced step: the same graph, in which each gradient is added where it is made."""
    gm = with_sums(traced)

    def add(inputs: Sequence[Tensor], sums: dict[str, Tensor]) -> StepResult:
        with torch.no_grad():
            loss, *extra = gm(
                *(params[n] for n in traced.params),
                *(buffers[n] for n in traced.buffers),
                *inputs,
                *(sums[n] for n in traced.params),
            )
        return StepResult(loss, {}, dict(zip(traced.extra, extra, strict=True)))

    return add


def with_sums(traced: Traced) -> fx.GraphModule:
    """``gm(*params, *buffers, *batch, *sums) -> [loss, *extra]``: adds each gradient to its sum.

    Contract: the nodes of the step and their order are those of ``traced``; behind the node that
    makes a gradient stands its addition, so that it is freed there.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    outputs = graph.graph_copy(traced.gm.graph, copies)
    assert isinstance(outputs, (list, tuple))
    loss, grads = outputs[0], outputs[1 : 1 + len(traced.params)]
    last_input = [n for n in graph.nodes if n.op == "placeholder"][-1]
    for index, grad in enumerate(grads):
        assert isinstance(grad, fx.Node)
        with graph.inserting_after(last_input):
            last_input = graph.placeholder(f"sum_of_gradient_{index}")  # unlike any operator
        behind = last_input if grad.op == "placeholder" else grad
        with graph.inserting_after(behind):
            graph.call_function(torch.ops.aten.add_.Tensor, (last_input, grad))
    graph.output([loss, *outputs[1 + len(traced.params) :]])
    return fx.GraphModule(traced.gm, graph)
