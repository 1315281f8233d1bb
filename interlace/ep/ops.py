"""The exchange as operators: plan, launch, wait, finish.  Graph passes see these with any backend.

Legend: T tokens, K choices, N = T * K slots, E experts, e local experts, W ranks, H hidden,
        S rows that return, R expert-major rows.

``reduce`` says how rows return: ``slot``, each by itself; ``rank``, those of a token summed by each
rank, times their staged scores; ``stage``, y is such sums already.  ``stage_launch`` is a dispatch
that leaves tokens as they arrived, one row for all local experts, and ``row_grad`` makes of them
the gradients of expert rows and staged scores.

No schema declares that a result aliases an argument: ``wait`` returns its input as torch's own
collectives do, because custom operators that say so are refused by functionalisation.  Backward
issues launch and wait as well, so that a schedule can pull them apart there too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from interlace.ep import (  # noqa: F401 - they register themselves
    alltoall,
    hybridep,
    minimal_async,
    pending,
    pooled,
)
from interlace.ep.backend import Sizes, expert_side_of, get_backend
from interlace.ep.transport import get_group
from interlace.graph.comm import CommSpec, register_blocking, register_comm

_lib = torch.library.Library("ep", "DEF")
_lib.define(
    "plan(Tensor topk_ids, int num_experts, int? block_rows, str group, str backend, *,"
    " int? max_tokens=None)"
    " -> (Tensor counts, Tensor offsets, Tensor live, Tensor overflow, Tensor[] meta)"
)
_lib.define(
    "dispatch_launch(Tensor x, Tensor? scores, Tensor[] meta, Tensor? reuse, SymInt out_rows,"
    " int buffer_set, str group, str backend) -> (Tensor pending, Tensor token)"
)
_lib.define(
    "combine_launch(Tensor y, Tensor[] meta, Tensor? reuse, SymInt out_rows,"
    " int buffer_set, str group, str backend, *, Tensor? scores=None, str reduce='slot')"
    " -> (Tensor pending, Tensor token)"
)
_lib.define(
    "stage_launch(Tensor x, Tensor[] meta, Tensor? reuse, SymInt out_rows, int buffer_set,"
    " str group, str backend) -> (Tensor pending, Tensor token)"
)
_lib.define("wait(Tensor pending, Tensor token) -> Tensor")
_lib.define(
    "combine_finish(Tensor slots, Tensor? scores, Tensor[] meta, int top_k, str backend, *,"
    " str reduce='slot') -> Tensor"
)
_lib.define(
    "score_grad(Tensor slots, Tensor grad, Tensor[] meta, int top_k, str backend) -> Tensor"
)
_lib.define(
    "row_grad(Tensor y, Tensor stage, Tensor scores, Tensor[] meta, str backend)"
    " -> (Tensor y_grad, Tensor scores_grad)"
)


def _plan(
    ids: Tensor,
    num_experts: int,
    block_rows: int | None,
    group: str,
    backend: str,
    *,
    max_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    # On CUDA a look at the ids would cost a wait for the device.
    if not ids.is_cuda and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_experts:
        raise ValueError(
            f"ep.plan: ids are in {int(ids.min())} .. {int(ids.max())}; expected experts from 0 to "
            f"{num_experts - 1}."
        )
    most = ids.shape[0] if max_tokens is None else max_tokens
    return get_backend(backend).plan(ids, num_experts, block_rows, get_group(group), most)


def _dispatch_launch(
    x: Tensor,
    scores: Tensor | None,
    meta: list[Tensor],
    reuse: Tensor | None,
    out_rows: int,
    buffer_set: int,
    group: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    launch = get_backend(backend).dispatch_launch
    return launch(x, scores, meta, out_rows, buffer_set=buffer_set, group=get_group(group))


def _combine_launch(
    y: Tensor,
    meta: list[Tensor],
    reuse: Tensor | None,
    out_rows: int,
    buffer_set: int,
    group: str,
    backend: str,
    *,
    scores: Tensor | None = None,
    reduce: str = "slot",
) -> tuple[Tensor, Tensor]:
    where = get_group(group)
    if reduce == "rank":
        reduced = expert_side_of(backend).reduce_launch
        return reduced(y, scores, meta, out_rows, buffer_set=buffer_set, group=where)
    whole = reduce == "slot"
    launch = get_backend(backend).combine_launch if whole else expert_side_of(backend).return_launch
    return launch(y, meta, out_rows, buffer_set=buffer_set, group=where)


def _stage_launch(
    x: Tensor,
    meta: list[Tensor],
    reuse: Tensor | None,
    out_rows: int,
    buffer_set: int,
    group: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    launch = expert_side_of(backend).stage_launch
    return launch(x, meta, out_rows, buffer_set=buffer_set, group=get_group(group))


def _wait(value: Tensor, token: Tensor) -> Tensor:
    pending.finish(token)
    return value


def _combine_finish(
    slots: Tensor,
    scores: Tensor | None,
    meta: list[Tensor],
    top_k: int,
    backend: str,
    *,
    reduce: str = "slot",
) -> Tensor:
    if reduce == "rank":
        return expert_side_of(backend).reduce_finish(slots, meta, top_k)
    return get_backend(backend).combine_finish(slots, scores, meta, top_k)


def _score_grad(
    slots: Tensor, grad: Tensor, meta: list[Tensor], top_k: int, backend: str
) -> Tensor:
    return get_backend(backend).score_grad(slots, grad, meta, top_k)


def _row_grad(
    y: Tensor, stage: Tensor, scores: Tensor, meta: list[Tensor], backend: str
) -> tuple[Tensor, Tensor]:
    return expert_side_of(backend).row_grad(y, stage, scores, meta)


for _name, _fn in {
    "plan": _plan,
    "dispatch_launch": _dispatch_launch,
    "combine_launch": _combine_launch,
    "stage_launch": _stage_launch,
    "wait": _wait,
    "combine_finish": _combine_finish,
    "score_grad": _score_grad,
    "row_grad": _row_grad,
}.items():
    for _key in ("CPU", "CUDA"):
        _lib.impl(_name, _fn, _key)


def sizes_of(meta: list[Tensor], top_k: int, backend: str, max_tokens: int | None = None) -> Sizes:
    """What a plan's index vectors say about its sizes."""
    return (get_backend(backend).sizes or alltoall.sizes)(meta, top_k, max_tokens)


# --- shapes without values.  In exact mode the number of rows is a size that only the run tells.


@torch.library.register_fake("ep::plan", lib=_lib)
def _plan_fake(
    ids: Tensor,
    num_experts: int,
    block_rows: int | None,
    group: str,
    backend: str,
    *,
    max_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    where = get_group(group)
    local = num_experts // where.size
    most = ids.shape[0] if max_tokens is None else max_tokens
    meta = (get_backend(backend).meta_fake or alltoall.meta_fake)(
        ids, num_experts, block_rows, where, most
    )
    return (
        ids.new_empty(local),
        ids.new_empty(local + 1, dtype=torch.int32),
        ids.new_empty(1),
        ids.new_empty(1, dtype=torch.int32),
        meta,
    )


@torch.library.register_fake("ep::dispatch_launch", lib=_lib)
def _dispatch_launch_fake(
    x: Tensor,
    scores: Tensor | None,
    meta: list[Tensor],
    reuse: Tensor | None,
    out_rows: Any,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(out_rows, x.shape[1]), _token_fake()


@torch.library.register_fake("ep::combine_launch", lib=_lib)
def _combine_launch_fake(
    y: Tensor, meta: list[Tensor], reuse: Tensor | None, out_rows: Any, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    return y.new_empty(out_rows, y.shape[1]), _token_fake()


@torch.library.register_fake("ep::stage_launch", lib=_lib)
def _stage_launch_fake(
    x: Tensor, meta: list[Tensor], reuse: Tensor | None, out_rows: Any, *_: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty(out_rows, x.shape[1]), _token_fake()


def _token_fake() -> Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


@torch.library.register_fake("ep::wait", lib=_lib)
def _wait_fake(value: Tensor, token: Tensor) -> Tensor:
    return torch.empty_like(value)


@torch.library.register_fake("ep::combine_finish", lib=_lib)
def _combine_finish_fake(
    slots: Tensor,
    scores: Tensor | None,
    meta: list[Tensor],
    top_k: int,
    backend: str,
    *,
    reduce: str = "slot",
) -> Tensor:
    return slots.new_empty(sizes_of(meta, top_k, backend).num_tokens, slots.shape[1])


@torch.library.register_fake("ep::score_grad", lib=_lib)
def _score_grad_fake(
    slots: Tensor, grad: Tensor, meta: list[Tensor], top_k: int, backend: str
) -> Tensor:
    return grad.new_empty(grad.shape[0], top_k, dtype=torch.float32)


@torch.library.register_fake("ep::row_grad", lib=_lib)
def _row_grad_fake(
    y: Tensor, stage: Tensor, scores: Tensor, meta: list[Tensor], backend: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), torch.empty_like(scores)


_ops = torch.ops.ep
register_blocking(_ops.plan.default, "ep")
register_comm(
    CommSpec(
        "dispatch", _ops.dispatch_launch.default, _ops.wait.default, "ep", 5, 3, token_exchange=True
    )
)
register_comm(
    CommSpec(
        "combine", _ops.combine_launch.default, _ops.wait.default, "ep", 4, 2, token_exchange=True
    )
)
register_comm(
    CommSpec("stage", _ops.stage_launch.default, _ops.wait.default, "ep", 4, 2, token_exchange=True)
)
