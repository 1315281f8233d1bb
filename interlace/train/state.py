"""What a run has done so far: everything that must survive an interruption beside the tensors of
model and optimizer.

Legend: L MoE layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Progress:
    """Counts of a run.  ``step`` is also the position in the data, which is a pure function of it.

    ``updates`` is the position in the learning-rate schedule: a skipped step takes its batch and
    nothing else.  ``load_LE`` are the tokens of each expert in the last update, ``tokens_LE`` those
    of all updates, both int64 and empty before the first.
    """

    step: int = 0
    updates: int = 0
    tokens_seen: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    load_LE: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int64))
    tokens_LE: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int64))

    def applied(self, counts_LE: Tensor) -> None:
        """An update was made; these tokens went to the experts."""
        self.updates += 1
        self.skipped_in_a_row = 0
        self.load_LE = counts_LE
        self.tokens_LE = self.tokens_LE + counts_LE if self.tokens_LE.numel() else counts_LE.clone()

    def passed_over(self) -> None:
        """A step was not applied: its batch is used up, all else stays."""
        self.skipped += 1
        self.skipped_in_a_row += 1


NUMBERS = ("step", "updates", "tokens_seen", "skipped", "skipped_in_a_row")


def progress_tensors(progress: Progress, num_layers: int, num_experts: int) -> dict[str, Tensor]:
    """The counts as tensors of fixed shapes, for a checkpoint."""
    tensors = {name: torch.tensor(getattr(progress, name)) for name in NUMBERS}
    for name in ("load_LE", "tokens_LE"):
        counts_LE = getattr(progress, name)
        empty = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=counts_LE.device)
        tensors[name] = counts_LE if counts_LE.numel() else empty
    return tensors


def restore_progress(progress: Progress, tensors: dict[str, Tensor]) -> None:
    """The inverse of :func:`progress_tensors`."""
    for name in NUMBERS:
        setattr(progress, name, int(tensors[name]))
    if progress.updates:
        progress.load_LE, progress.tokens_LE = tensors["load_LE"], tensors["tokens_LE"]
