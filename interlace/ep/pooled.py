"""The ``pooled`` backend: the all-to-all into buffers that are used again, poisoned at each reuse.

A reference for backends that own their buffers.  A launch overwrites what the last launch of the
same kind, group and buffer set left behind, first with NaN; whoever still reads that gets NaN, so a
reuse edge that is missing shows on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from interlace.ep import alltoall
from interlace.ep.backend import Backend, register_backend
from interlace.ep.transport import Group

_pool: dict[tuple[Any, ...], Tensor] = {}


def _pooled(kind: str, launch: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    def run(*args: Any, buffer_set: int, group: Group) -> tuple[Tensor, Tensor]:
        source = args[0]
        result, token = launch(*args, buffer_set=buffer_set, group=group)
        key = (kind, group.name, buffer_set, source.dtype, source.device, result.shape[1])
        buffer = _pool.get(key)
        if buffer is None or buffer.shape[0] < result.shape[0]:
            buffer = _pool[key] = torch.empty_like(result)
        buffer.fill_(float("nan"))
        # The transfer itself may still run; on this reference backend it is simply waited for.
        alltoall.pending.finish(token)
        held = buffer[: result.shape[0]]
        held.copy_(result)
        return held, alltoall.pending.start(lambda: None, result)

    return run


register_backend(
    Backend(
        "pooled",
        alltoall.plan,
        _pooled("dispatch", alltoall.dispatch_launch),
        _pooled("combine", alltoall.combine_launch),
        alltoall.combine_finish,
        alltoall.score_grad,
        owns_buffers=True,
    )
)
