"""A stand-in for the package ``deep_ep``: what HybridEPBuffer documents, over gloo on a CPU.

Arguments, shapes, types, order and drops are those of its guide for the permuting calls in
non-blocking mode; what would go wrong on a GPU without a word raises here.  Written from that
description, no line of it is theirs.

    order      by local expert, then source rank, then token; rows past the last one are NaN
    overflow   rows from ``num_permuted_tokens`` on are dropped and flagged
    combine    a rank sums a token's rows in float32, in expert order, and rounds; then the token's
               rank sums the ranks, ascending, and rounds
    buffers    no growth, and one exchange at a time: see :func:`watch`
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

made: list[HybridEPBuffer] = []
calls: list[tuple[int, str, bool]] = []  # which buffer, which method, whether with a handle
lost_rows = 0  # rows of room that it does not use; 1: an exact fit is an overflow
_last: HybridEPBuffer | None = None
_flying: dict[int, HybridEPBuffer] = {}


def start_anew() -> None:
    global lost_rows, _last
    made.clear(), calls.clear(), _flying.clear()
    lost_rows, _last = 0, None


@contextlib.contextmanager
def watch(pending: Any) -> Iterator[None]:
    """Inside: a call occupies its buffer until the wait for the token that is entered next."""
    real_start, real_finish = pending.start, pending.finish

    def start(*args: Any) -> Tensor:
        global _last
        token = real_start(*args)
        if _last is not None:
            _flying[int(token)], _last = _last, None
        return token

    def finish(token: Tensor) -> None:
        _flying.pop(int(token), None)
        real_finish(token)

    pending.start, pending.finish = start, finish
    try:
        yield
    finally:
        pending.start, pending.finish = real_start, real_finish
        _flying.clear()


@dataclass(frozen=True)
class Config:
    hidden_dim: int


class HybridEPBuffer:
    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        use_shared_buffer: bool = True,
    ) -> None:
        self.group, self.size, self.rank = group, group.size(), group.rank()
        if self.size < 2:
            raise AssertionError("needs at least two ranks")
        if hidden_dim % 16 or (num_local_experts * self.size) % 4:
            raise AssertionError("invalid config")
        self.hidden_dim, self.most = hidden_dim, max(max_num_of_tokens_per_rank, 512)
        self.local, self.sms = num_local_experts, (num_sms_dispatch_api, num_sms_combine_api)
        self._same((hidden_dim, self.most, num_local_experts))
        made.append(self)

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: tuple[Any, ...] | None = None,
        non_blocking: bool = False,
    ) -> tuple[Any, ...]:
        self._begin("dispatch", handle)
        if not non_blocking or num_permuted_tokens is None:
            raise NotImplementedError("the stand-in has the non-blocking mode only")
        self._check_rows(hidden)
        if handle is None:
            handle = self._handle(hidden, routing_map, num_permuted_tokens)
        elif handle[9].hidden_dim != hidden.shape[1] or handle[8] != hidden.shape[0]:
            raise AssertionError("the handle is of other rows")
        row_id_map = handle[6]
        rows = hidden.new_full((num_permuted_tokens, hidden.shape[1]), float("nan"))
        row_probs = torch.full((num_permuted_tokens,), float("nan"))
        token, expert = row_id_map.nonzero(as_tuple=True)
        place = row_id_map[token, expert].long() - 1
        rows[place] = self._gather(hidden).flatten(0, 1)[token]
        if probs is not None:
            if probs.dtype != torch.float32 or probs.shape != (handle[8], self.local * self.size):
                raise AssertionError("probs is float32, a number for each token and expert")
            mine = self._gather(probs).flatten(0, 1)[:, self.rank * self.local :]
            row_probs[place] = mine[token, expert]
        return rows, None if probs is None else row_probs, None, handle[7], handle

    def _handle(self, hidden: Tensor, routing_map: Tensor | None, room: int) -> tuple[Any, ...]:
        num_tokens, num_experts = hidden.shape[0], self.local * self.size
        if routing_map is None or routing_map.dtype != torch.bool:
            raise AssertionError("a boolean routing_map is needed without a handle")
        if routing_map.shape != (num_tokens, num_experts):
            raise AssertionError(f"routing_map is {tuple(routing_map.shape)}")
        if num_tokens > self.most or hidden.shape[1] > self.hidden_dim:
            raise RuntimeError("the buffer would have to grow")
        self._same((num_tokens, room))
        all_WTE = self._gather(routing_map)
        sent_to = routing_map.view(num_tokens, self.size, self.local).any(2)
        local = all_WTE.flatten(0, 1)[:, self.rank * self.local : (self.rank + 1) * self.local]
        counts = local.sum(0)
        starts = counts.cumsum(0) - counts
        row_id_map = torch.where(local, local.cumsum(0) + starts, 0)
        dropped = row_id_map > room - lost_rows
        row_id_map.masked_fill_(dropped, 0)
        nothing = torch.empty(0)
        return (
            sent_to, nothing, nothing, local.any(1).sum().int().view(1), local, nothing,
            row_id_map.int(), counts.int(), num_tokens, Config(hidden.shape[1]),
            dropped.any().int().view(1),
        )  # fmt: skip

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: tuple[Any, ...] | None = None,
        pad_multiple: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        self._begin("combine", handle)
        if handle is None:
            raise AssertionError("the handle is necessary for a combine")
        self._check_rows(hidden)
        if handle[9].hidden_dim != hidden.shape[1]:
            raise AssertionError("the handle is of other rows")
        row_id_map, num_tokens, sent_to = handle[6].long(), handle[8], handle[0]
        if int(row_id_map.max()) > hidden.shape[0]:
            raise AssertionError("reads past the end of hidden")
        sums = torch.zeros(row_id_map.shape[0], hidden.shape[1])
        for e in range(self.local):
            used = row_id_map[:, e] > 0
            sums[used] += hidden[row_id_map[used, e] - 1].float()
        arrived = self._mine(sums.bfloat16(), num_tokens)
        out = torch.zeros(num_tokens, hidden.shape[1])
        for rank in range(self.size):
            out[sent_to[:, rank]] += arrived[rank][sent_to[:, rank]].float()
        if probs is None:
            return out.bfloat16(), None
        if probs.dtype != torch.float32 or probs.shape != hidden.shape[:1]:
            raise AssertionError("probs is float32, a number for each row")
        back = torch.zeros(row_id_map.shape[0], self.local * self.size)
        token, expert = row_id_map.nonzero(as_tuple=True)
        back[token, self.rank * self.local + expert] = probs[row_id_map[token, expert] - 1]
        return out.bfloat16(), self._mine(back, num_tokens).sum(0)

    def _begin(self, name: str, handle: Any) -> None:
        global _last
        if self in _flying.values():
            raise RuntimeError("two exchanges share a buffer and overlap")
        calls.append((made.index(self), name, handle is not None))
        _last = self

    def _check_rows(self, hidden: Tensor) -> None:
        if hidden.dtype != torch.bfloat16 or not hidden.is_contiguous():
            raise AssertionError("rows are contiguous bfloat16")

    def _gather(self, source: Tensor) -> Tensor:
        """(W, ...): that of each rank."""
        sent = source.contiguous().view(torch.uint8)
        got = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(got, sent, group=self.group)
        return torch.stack(got).view(source.dtype)

    def _mine(self, source: Tensor, num_tokens: int) -> Tensor:
        """(W, T, ...): what each rank holds for my tokens."""
        first = self.rank * num_tokens
        return self._gather(source)[:, first : first + num_tokens]

    def _same(self, numbers: tuple[int, ...]) -> None:
        all_ranks = self._gather(torch.tensor([numbers]))
        if bool((all_ranks != all_ranks[0]).any()):
            raise RuntimeError(f"ranks differ in {all_ranks.flatten(1).tolist()}; they would hang")
