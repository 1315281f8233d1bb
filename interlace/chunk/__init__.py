"""Independent chunks of a region of a traced step."""

from interlace.chunk.apply import ChunkReport, chunk_graph

__all__ = ["ChunkReport", "chunk_graph"]
