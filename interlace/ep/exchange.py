"""Who exchanges tokens with whom, and how: plain data that a model hands to the exchange."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Exchange:
    """One expert-parallel exchange as a layer sees it.

    ``group`` names a group of :mod:`interlace.ep.transport`; ``size`` and ``rank`` are this
    process's place in it.  Exact mode reads the sizes of a step on the host; ``padded`` has a block
    of rows for each peer instead, static shapes and counts on the device.

    ``buffer_set`` picks the buffers of a backend that owns some: what arrives in set 0 and above
    stays valid until the next launch of that kind and set; -1, for whoever assigns no sets, gives
    every launch a result of its own.

    ``reduce``: ``slot`` brings every expert's row back and sums at the origin, in slot order: the
    same bits with every backend.  ``rank`` sums on each rank first, in slot order, rounds, and the
    origin sums the ranks: one row a rank on the way, its own rounding.
    ``scores_at``: where a row meets its score.  ``rank`` needs it at the ``expert`` and puts it
    there; with ``slot`` only gradients of scores are worked out there, from rows that need not
    travel or be kept at the origin.

    ``max_tokens``: the most tokens that any rank brings to one plan, the same number on all ranks;
    they may then bring any numbers up to it, none too.  Padded blocks and windows have room for so
    many.  A part of a batch is a plan like any other and gets that room as well, not its part of
    it.  None: every rank brings as many as this one.  Exact mode does without.
    """

    group: str = "single"
    size: int = 1
    rank: int = 0
    backend: str = "alltoall"
    padded: bool = False
    capacity_factor: float | None = None
    buffer_set: int = -1
    reduce: str = "slot"
    scores_at: str = "origin"
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, legal in (("reduce", ("slot", "rank")), ("scores_at", ("origin", "expert"))):
            if (value := getattr(self, name)) not in legal:
                raise ValueError(f"ep.{name}: {value!r} is unknown; one of {', '.join(legal)}.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(
                f"ep.max_tokens: {self.max_tokens} tokens; expected at least 1, or None where "
                "every rank brings as many as this one."
            )

    @property
    def at_experts(self) -> bool:
        """Whether scores travel to the experts."""
        return self.reduce == "rank" or self.scores_at == "expert"

    def num_local_experts(self, num_experts: int) -> int:
        """Experts that this rank holds: E / W; expert j lives on rank j // (E / W)."""
        if num_experts % self.size:
            raise ValueError(
                f"{num_experts} experts cannot be split over {self.size} expert-parallel ranks; "
                f"use a degree that divides {num_experts}."
            )
        return num_experts // self.size

    def block_rows(self, num_tokens: int, top_k: int, num_experts: int) -> int | None:
        """Rows that one rank may send to one peer in padded mode; None in exact mode.

        Without a capacity factor it is the worst case, which never overflows: T * min(K, E / W).
        A factor f is f times the balanced share T * K / W, never more than the worst case.  It
        follows from the number of tokens, so a part of a batch has its part of the rows; with
        ``max_tokens`` it follows from that.
        """
        if not self.padded:
            return None
        if self.max_tokens is not None:
            if num_tokens > self.max_tokens:
                raise ValueError(
                    f"ep.max_tokens={self.max_tokens}: rank {self.rank} of group {self.group!r} "
                    f"brings {num_tokens} tokens to one plan; raise it on all ranks."
                )
            num_tokens = self.max_tokens
        worst = num_tokens * min(top_k, self.num_local_experts(num_experts))
        if not self.capacity_factor:
            return worst
        return min(worst, math.ceil(num_tokens * top_k * self.capacity_factor / self.size))
