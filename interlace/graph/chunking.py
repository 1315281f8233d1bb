"""What a chunked region is: one value that eager and graph chunking and the scheduler share."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

BATCH, SEQUENCE = 0, 1


@dataclass(frozen=True)
class Chunking:
    """Calls of the modules that match ``root`` run as ``num_chunks`` independent parts.

    ``root`` is a pattern over module paths, ``layers.*.moe`` or ``layers.*``, in which a star
    stands for one name.  ``dim`` is the dimension of the module's inputs that is split: 0 the
    batch, 1 the sequence.
    """

    root: str
    num_chunks: int
    dim: int = BATCH

    def root_of(self, layer: str) -> str | None:
        """The path of the region that a module path lies in, None outside of all."""
        parts, wanted = layer.split("."), self.root.split(".")
        if len(parts) < len(wanted):
            return None
        head = parts[: len(wanted)]
        if all(fnmatch.fnmatchcase(a, b) for a, b in zip(head, wanted, strict=True)):
            return ".".join(head)
        return None

    def is_root(self, layer: str) -> bool:
        """Whether a module path is a region itself."""
        return self.root_of(layer) == layer and layer != ""


def chunk_extent(what: str, extent: int, num_chunks: int) -> int:
    """Extent of one part; ValueError where the parts would not be equal."""
    if extent % num_chunks:
        legal = [n for n in range(2, extent + 1) if extent % n == 0]
        advice = f"use overlap.chunks of {', '.join(map(str, legal[:6]))}" if legal else "use 1"
        raise ValueError(
            f"{what} has an extent of {extent}, which does not split into {num_chunks} equal "
            f"chunks; {advice}."
        )
    return extent // num_chunks
