"""Configurations by name: ``-tiny`` for two CPU processes, ``-slim`` for two GPUs, the real shapes.

The slim ones have the layers of the real model, eight of them.  ``dsv3-671b`` is for planning.
"""

from __future__ import annotations

from interlace.model.config import MODELS
from interlace.train.config import (
    Config,
    DataConfig,
    LRSchedulerConfig,
    MetricsConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
)


def _tiny(name: str) -> Config:
    """Learns bytes of real text in about a minute on two cores."""
    return Config(
        preset=name,
        model=MODELS[name],
        training=TrainingConfig(
            steps=150, seq_len=128, local_batch_size=8, dtype="float32", device="cpu"
        ),
        parallelism=ParallelismConfig(expert_parallel_degree=2),
        optimizer=OptimizerConfig(lr=3e-3),
        lr_scheduler=LRSchedulerConfig(warmup_steps=10),
        metrics=MetricsConfig(folder=f"runs/{name}"),
    )


def _real(name: str, *, degree: int, local_batch_size: int, seq_len: int = 4096) -> Config:
    """bfloat16 on GPUs; text still read as bytes until a token file is named."""
    return Config(
        preset=name,
        model=MODELS[name],
        training=TrainingConfig(
            steps=100, seq_len=seq_len, local_batch_size=local_batch_size, dtype="bfloat16"
        ),
        parallelism=ParallelismConfig(expert_parallel_degree=degree),
        optimizer=OptimizerConfig(lr=3e-4),
        lr_scheduler=LRSchedulerConfig(warmup_steps=10),
        data=DataConfig(max_documents=64),
        metrics=MetricsConfig(log_freq=1, folder=f"runs/{name}"),
    )


PRESETS: dict[str, Config] = {
    config.preset: config
    for config in (
        _tiny("dsv3-tiny"),
        _tiny("qwen3-tiny"),
        _real("dsv3-16b-slim", degree=2, local_batch_size=4),
        _real("qwen3-30b-slim", degree=2, local_batch_size=4),
        _real("dsv3-16b", degree=8, local_batch_size=4),
        _real("qwen3-30b", degree=8, local_batch_size=2),
        _real("dsv3-671b", degree=64, local_batch_size=1),
    )
}
