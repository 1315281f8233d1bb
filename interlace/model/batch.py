"""One microbatch of one rank, as plain tensors.

Legend: B sequences, S tokens a sequence, C document boundaries a sequence (a static number).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100  # a label that takes no part in the loss
PADDING = -1  # the position of a place without a token


@dataclass(frozen=True)
class Batch:
    """Shapes: tokens_BS, labels_BS, positions_BS int64; cu_seqlens_BC int32.

    ``positions_BS`` restarts at 0 with each document; PADDING there, and nowhere else, says that a
    place holds no token.  ``cu_seqlens_BC`` holds the boundaries of the documents of each row:
    column 0 is 0, the last document ends at S, the rest is padded with S, so that its shape never
    depends on the data.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    positions_BS: Tensor
    cu_seqlens_BC: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four tensors in the order of the traced step's inputs."""
        return self.tokens_BS, self.labels_BS, self.positions_BS, self.cu_seqlens_BC
