"""Interlace trains mixture-of-experts models on PyTorch and hides what the GPUs would wait for.

The names below are what a model of your own needs (docs/own-model.md).  They are imported when they
are first used, so that ``import interlace`` stays light and help needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from interlace import ep
    from interlace.capture import Captured, capture_step
    from interlace.chunk import chunk_graph
    from interlace.graph import Pass, check_order, run_passes
    from interlace.graph.chunking import Chunking
    from interlace.kernels.grouped_mm import grouped_mm
    from interlace.overlap import trace_overlapped
    from interlace.regional import compile_regions
    from interlace.schedule import agree_on_order, schedule_graph
    from interlace.trace import Step, StepResult, Traced, run_eager, trace_step

# Where each name lives.
_LIVES_IN = {
    "Step": "trace",
    "StepResult": "trace",
    "Traced": "trace",
    "run_eager": "trace",
    "trace_step": "trace",
    "Pass": "graph",
    "check_order": "graph",
    "run_passes": "graph",
    "Chunking": "graph.chunking",
    "chunk_graph": "chunk",
    "compile_regions": "regional",
    "trace_overlapped": "overlap",
    "agree_on_order": "schedule",
    "schedule_graph": "schedule",
    "Captured": "capture",
    "capture_step": "capture",
    "grouped_mm": "kernels.grouped_mm",
}

__all__ = [
    "Captured",
    "Chunking",
    "Pass",
    "Step",
    "StepResult",
    "Traced",
    "agree_on_order",
    "capture_step",
    "check_order",
    "chunk_graph",
    "compile_regions",
    "ep",
    "grouped_mm",
    "run_eager",
    "run_passes",
    "schedule_graph",
    "trace_overlapped",
    "trace_step",
]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used."""
    if name == "ep":
        return import_module("interlace.ep")
    if name not in _LIVES_IN:
        raise AttributeError(f"module 'interlace' has no attribute {name!r}")
    value = getattr(import_module(f"interlace.{_LIVES_IN[name]}"), name)
    globals()[name] = value  # found at once the next time
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
