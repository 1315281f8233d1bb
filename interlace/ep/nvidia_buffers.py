"""What ``hybridep_nvidia`` holds on the host: the package, its buffers, and the handles of plans.

Buffers.  A HybridEPBuffer carries one exchange at a time, from its launch to its wait.  Each launch
takes the first that is free of its set and kind (width of rows, tokens, experts, launch budget), or
makes one: a collective that maps memory, so it happens at first use and never under capture.  What
arrives are tensors of its own.  They belong to the exchange stream, which allocates only in a
launch, behind all that read them.

Handles.  The first dispatch of a plan makes a handle that serves all that follows: device memory,
which captured kernels fill again at each replay.  A number on the host, in a tensor of the plan,
leads to it; the handles live as long as the memory of that tensor.
"""

from __future__ import annotations

import atexit
import importlib
import itertools
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interlace.ep import pending
from interlace.ep.budget import max_ctas
from interlace.ep.transport import Group, moves_rows

NAME = "hybridep_nvidia"


def hybrid_ep_buffer() -> Any:
    """The package's class; ValueError where it is absent or is another branch."""
    try:
        found = importlib.import_module("deep_ep")
    except ImportError as error:
        fault = str(error)
    else:
        if hasattr(found, "HybridEPBuffer"):
            return found.HybridEPBuffer
        fault = "deep_ep has no HybridEPBuffer"
    raise ValueError(
        f"ep.backend={NAME} needs the package deep_ep with HybridEPBuffer ({fault}); build the "
        "branch hybrid-ep of DeepEP, or use ep.backend=hybridep, which needs no package."
    )


class Ticket(bytearray):
    """A plan's number as the memory of a tensor, which so keeps the plan's handles alive."""

    def __init__(self, number: int, overflow: Tensor) -> None:
        super().__init__(struct.pack("=q", number))
        self.overflow = overflow
        self.handles: dict[int, tuple[Any, ...]] = {}  # by the width of rows


_tickets: weakref.WeakValueDictionary[int, Ticket] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def new_ticket(overflow: Tensor) -> Tensor:
    """A plan without handles so far: its number, int64 (1,) on the host."""
    number = next(_numbers)
    ticket = _tickets[number] = Ticket(number, overflow)
    return torch.frombuffer(ticket, dtype=torch.int64)


def ticket_of(number: Tensor) -> Ticket:
    """ValueError for a plan of which nothing is left."""
    ticket = _tickets.get(int(number))
    if ticket is None:
        raise ValueError(f"ep.backend={NAME}: plan {int(number)} is gone; keep its index vectors.")
    return ticket


def handle_of(ticket: Ticket, width: int) -> tuple[Any, ...]:
    """What the dispatch of rows of that width has made; ValueError where there was none."""
    if width not in ticket.handles:
        raise ValueError(
            f"ep.backend={NAME}: a combine of rows of {width} before any dispatch of such rows "
            "with its plan; dispatch first."
        )
    return ticket.handles[width]


class _Lease:
    """Held by an exchange in flight."""


@dataclass
class _Buffer:
    carrier: Any  # a HybridEPBuffer
    lease: Callable[[], _Lease | None] = lambda: None


_buffers: dict[tuple[Any, ...], list[_Buffer]] = {}


@atexit.register
def close_buffers(group_name: str | None = None) -> None:
    """Forgets the buffers of a group, or all, on every rank of it alike: after a step that was cut
    short, and at exit."""
    for key in [k for k in _buffers if group_name in (None, k[0].name)]:
        del _buffers[key]


def launch(
    send: Callable[[Any], Tensor],
    width: int,
    shape: tuple[int, int],
    plan_shape: tuple[int, int],
    operands: tuple[Any, ...],
    *,
    buffer_set: int,
    group: Group,
) -> tuple[Tensor, Tensor]:
    """Runs ``send`` with a free buffer for rows of ``width`` on the exchange stream.

    Shapes: the result is of ``shape``; ``plan_shape``: tokens and experts.
    Returns the result, of which the first operand gives type and device, and the token.
    """
    source = operands[0]
    if not moves_rows():
        return source.new_empty(shape), pending.start(_nothing)
    num_tokens, num_experts = plan_shape
    key = (group, buffer_set, width, num_tokens, num_experts // group.size, max_ctas())
    buffer, lease, made = _free_buffer(key), _Lease(), list[Tensor]()
    buffer.lease = weakref.ref(lease)

    def run() -> None:
        made.append(send(buffer.carrier))

    if source.is_cuda:
        token = pending.launch(source.device, run, lease, *operands)
    else:
        run()
        token = pending.start(_nothing, lease)
    return made[0], token


def _free_buffer(key: tuple[Any, ...]) -> _Buffer:
    """The first of its kind that no exchange in flight has; else a new one, a collective."""
    known = _buffers.setdefault(key, [])
    for buffer in known:
        if buffer.lease() is None:
            return buffer
    group, _, width, num_tokens, num_local, budget = key
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"ep.backend={NAME}: exchange {len(known) + 1} in flight at once needs a buffer, and "
            "none can be made under capture; run the same step once without capture before."
        )
    sms = {} if budget is None else {f"num_sms_{k}_api": budget for k in ("dispatch", "combine")}
    carrier = hybrid_ep_buffer()(
        group=group.process_group,
        hidden_dim=width,
        max_num_of_tokens_per_rank=num_tokens,
        num_local_experts=num_local,
        **sms,
    )
    known.append(_Buffer(carrier))
    return known[-1]


def _nothing() -> None:
    return None
