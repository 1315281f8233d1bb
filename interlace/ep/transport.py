"""What carries the bytes of an exchange: a process group, a mirror of this process, or nothing.

Groups are registered by name, because an operator's schema can carry a string and not a process
group.  Kinds of group:

``single``    one rank; there is no exchange.
``process``   a torch process group (NCCL, gloo).
``loopback``  this process stands for W ranks that mirror it: what rank 0 would send to rank r comes
              back as what rank r sends to rank 0.  Same buffers, bytes, launches and waits.
``abstract``  sizes only, for tracing without peers; running it is an error.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from interlace.ep.budget import max_ctas
from interlace.kernels.bounded_copy import bounded_copy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Group:
    """A named set of ranks that exchange tokens; ``kind`` as in the module's docstring."""

    name: str
    size: int
    rank: int
    kind: str
    process_group: ProcessGroup | None = None
    counts_group: ProcessGroup | None = None  # for the plans; None: the same as for the rows


_groups: dict[str, Group] = {"single": Group("single", 1, 0, "single")}


def register_group(group: Group) -> None:
    """Makes a group known under its name; registering the name again replaces it."""
    kinds = ("single", "process", "loopback", "abstract")
    if group.kind not in kinds:
        raise ValueError(f"register_group: unknown kind {group.kind!r}; one of {', '.join(kinds)}.")
    if group.kind == "process" and group.process_group is None:
        raise ValueError(f"register_group: group {group.name!r} of kind process has no group.")
    _groups[group.name] = group


def drop_group(name: str) -> None:
    """Forgets a group, before its process group is destroyed."""
    if name != "single":
        _groups.pop(name, None)


@atexit.register
def _forget_groups() -> None:
    """At exit: a process group that is held longer keeps its threads, which may abort Python."""
    for name in list(_groups):
        drop_group(name)


def get_group(name: str) -> Group:
    """The group of that name; ValueError lists the known ones."""
    if name not in _groups:
        raise ValueError(
            f"exchange group {name!r} is unknown; known: {', '.join(sorted(_groups))}."
        )
    return _groups[name]


def all_to_all(
    out: Tensor,
    source: Tensor,
    group: Group,
    out_splits: list[int] | None = None,
    in_splits: list[int] | None = None,
    *,
    counts: bool = False,
) -> Callable[[], None]:
    """Starts an all-to-all of rows; the result must be called before ``out`` is read.

    Shapes: dim 0 of ``source`` is split by ``in_splits`` (equal parts when None), one part a rank;
            ``out`` receives ``out_splits`` likewise.  ``counts``: over the group for plans.
    Sync:   CUDA: the current stream, the host is not blocked.  CPU: the call of the result blocks.
    """
    if not counts and not moves_rows():
        return _nothing
    if group.kind in ("single", "loopback"):
        _mirror(out, source, group, max_ctas() if not counts else None)
        return _nothing
    if group.kind == "abstract":
        raise ValueError(
            f"exchange group {group.name!r} has sizes only and cannot move tokens; "
            "it serves tracing and planning. Use loopback or start the processes."
        )
    import torch.distributed as dist

    carrier = group.counts_group if counts and group.counts_group else group.process_group
    work = dist.all_to_all_single(out, source, out_splits, in_splits, group=carrier, async_op=True)
    return lambda: work.wait() and None


def _mirror(out: Tensor, source: Tensor, group: Group, bound: int | None) -> None:
    """What this rank keeps is copied at full speed; rows that would leave it cross the budget.

    Counts are a few bytes and cross no bound.  So every bounded copy is an exchange of rows, on
    its stream, and a report can tell by their order which is which.
    """
    if bound is None or not out.is_cuda or group.kind == "single":
        out.copy_(source)
        return
    local = source.shape[0] // group.size
    out[:local].copy_(source[:local])
    bounded_copy(out[local:], source[local:], bound)


_transfers_enabled = True


def transfers(*, enabled: bool) -> None:
    """Turns transfers of rows off and on, at all ranks alike: what a step costs without them.

    For measuring only: rows that were not sent are whatever the memory held.  Plans still agree,
    and ranks still wait for each other where the backend has them wait.
    """
    global _transfers_enabled
    _transfers_enabled = enabled


def moves_rows() -> bool:
    """Whether rows are moved at all; False while :func:`transfers` has them off."""
    return _transfers_enabled


def _nothing() -> None:
    return None
