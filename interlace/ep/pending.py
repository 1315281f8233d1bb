"""Exchanges in flight: from the token that a launch returns to what its wait must do.

A launch returns a tensor that is not filled yet and a token, a host integer in a tensor.  Until the
wait, this table keeps every tensor alive that the transfer reads or writes: without that the
allocator hands their memory to the next kernel under the running copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Pending:
    finish: Callable[[], None]
    keep_alive: tuple[Any, ...]


_table: dict[int, _Pending] = {}
_ids = itertools.count(1)
_streams: dict[torch.device, torch.cuda.Stream] = {}


def exchange_stream(device: torch.device) -> torch.cuda.Stream:
    """The high-priority stream that carries every exchange of a device."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device, priority=-1)
    return _streams[device]


def start(finish: Callable[[], None], *keep_alive: Any) -> Tensor:
    """Enters an exchange into the table and returns its token, a CPU int64 tensor (1,)."""
    token = next(_ids)
    _table[token] = _Pending(finish, keep_alive)
    return torch.tensor([token])


def launch(device: torch.device, run: Callable[[], Any], *keep_alive: Any) -> Tensor:
    """Runs ``run`` on the exchange stream, after all that the compute stream holds so far.

    Returns the token; its wait holds back the compute stream, not the host.  Memory of the compute
    stream is safe without ``record_stream``: the table holds it, and what ``run`` returned, until
    the wait, and kernels that may get it afterwards come behind the wait's event.  What ``run``
    allocates belongs to the exchange stream, which uses it again in its own order.
    """
    stream = exchange_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        made = run()
        done = torch.cuda.Event()
        done.record(stream)
    return start(lambda: torch.cuda.current_stream(device).wait_event(done), made, *keep_alive)


def finish(token: Tensor) -> None:
    """Completes an exchange once; RuntimeError for a token that is not in flight."""
    pending = _table.pop(int(token), None)
    if pending is None:
        raise RuntimeError(
            f"ep::wait: exchange {int(token)} is not in flight; each launch has exactly one wait."
        )
    pending.finish()


def num_in_flight() -> int:
    """Launches without a wait so far; 0 between steps."""
    return len(_table)


def forget_all() -> None:
    """Drops what an aborted step left behind."""
    _table.clear()
