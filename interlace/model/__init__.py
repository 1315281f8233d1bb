"""Mixture-of-experts models in plain PyTorch; they know nothing of graphs.

The numbers (``config``) come without torch, the rest on first use: a settings error must not wait
for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from interlace.model.config import MODELS, ModelConfig, check_model, preset

if TYPE_CHECKING:
    from interlace.model.batch import IGNORED, Batch
    from interlace.model.init import init_weights
    from interlace.model.loss import cross_entropy_sum
    from interlace.model.transformer import MoETransformer, Routed, build_model, is_expert_parameter

__all__ = [
    "IGNORED",
    "MODELS",
    "Batch",
    "MoETransformer",
    "ModelConfig",
    "Routed",
    "build_model",
    "check_model",
    "cross_entropy_sum",
    "init_weights",
    "is_expert_parameter",
    "preset",
]

_HOMES = {
    "IGNORED": "batch",
    "Batch": "batch",
    "init_weights": "init",
    "cross_entropy_sum": "loss",
    "MoETransformer": "transformer",
    "Routed": "transformer",
    "build_model": "transformer",
    "is_expert_parameter": "transformer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
