"""Who exchanges tokens with whom, and how: plain data that a model hands to the exchange."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exchange:
    """One expert-parallel exchange as a layer sees it.

    ``group`` names a group of :mod:`interlace.ep.transport`; ``size`` and ``rank`` are this
    process's place in it.  ``block_rows`` None is the exact mode (the sizes of a step are read on
    the host); a number is the padded mode: that many rows for each peer, static shapes, counts on
    the device.  ``buffer_set`` picks the buffers of a backend that owns some.
    """

    group: str = "single"
    size: int = 1
    rank: int = 0
    backend: str = "alltoall"
    block_rows: int | None = None
    buffer_set: int = 0

    def num_local_experts(self, num_experts: int) -> int:
        """Experts that this rank holds: E / W; expert j lives on rank j // (E / W)."""
        if num_experts % self.size:
            raise ValueError(
                f"{num_experts} experts cannot be split over {self.size} expert-parallel ranks; "
                f"use a degree that divides {num_experts}."
            )
        return num_experts // self.size
