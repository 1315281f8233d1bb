"""Runs small enough to be had by the dozen: a configuration, a world, data with padding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from interlace.train.arms import ARMS
from interlace.train.config import Config
from interlace.train.engine import Engine, apply, build_engine, compute
from interlace.train.presets import PRESETS
from interlace.train.world import World

ROWS, SEQ_LEN = 12, 12

_groups: dict[tuple[int, int], Any] = {}  # of this process: making them takes time


def small_config(preset: str = "dsv3-tiny", **changes: Any) -> Config:
    """A layer or two, eager; ``changes`` by dotted name with ``__``, such as training__steps=3."""
    c = PRESETS[preset]
    model = {"dim": 32, "num_heads": 2, "expert_hidden_dim": 32, "num_layers": 2}
    if preset == "dsv3-tiny":
        model |= {"kv_lora_rank": 16, "v_head_dim": 16, "dense_hidden_dim": 32}
    c = replace(
        c,
        model=replace(c.model, **model),
        training=replace(c.training, steps=8, seq_len=SEQ_LEN, local_batch_size=ROWS, mode="eager"),
        parallelism=replace(c.parallelism, expert_parallel_degree=1),
        data=replace(c.data, source="random", max_documents=4),
        lr_scheduler=replace(c.lr_scheduler, warmup_steps=2),
    )
    for name, value in changes.items():
        section, _, key = name.partition("__")
        c = replace(c, **{section: replace(getattr(c, section), **{key: value})})
    return c


def documents_of_three(path: Path, num_documents: int = 400) -> Path:
    """A token file of documents a, b, 0: a third of the labels is ignored, and rows of 12 tokens
    with at most 4 documents (data.max_documents) have padding."""
    rng = np.random.default_rng(5)
    tokens = rng.integers(1, 255, (num_documents, 3)).astype(np.uint16)
    tokens[:, 2] = 0
    np.save(path, tokens.reshape(-1))
    return path


def small_world(rank: int = 0, size: int = 1, degree: int = 1) -> World:
    """As init_world makes it, over the default group that the test's processes have."""
    ep_group = replica_group = None
    if size > 1 and (size, degree) not in _groups:
        for first in range(0, size, degree) if degree > 1 else ():
            group = dist.new_group(list(range(first, first + degree)))
            ep_group = group if first <= rank < first + degree else ep_group
        for first in range(degree) if size > degree else ():
            group = dist.new_group(list(range(first, size, degree)))
            replica_group = group if rank % degree == first else replica_group
        _groups[size, degree] = ep_group, replica_group
    ep_group, replica_group = _groups.get((size, degree), (None, None))
    return World(
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        device=torch.device("cpu"),
        backend="gloo" if size > 1 else "none",
        ep_rank=rank % degree,
        ep_size=degree,
        ep_group=ep_group,
        replica_group=replica_group,
    )


def small_engine(config: Config, rank: int = 0, size: int = 1, arm: str = "eager") -> Engine:
    """The engine of one of ``size`` ranks; the batch of all ranks stays the same."""
    torch.set_num_threads(1)
    degree = config.parallelism.expert_parallel_degree
    rows = config.training.local_batch_size // size
    config = replace(config, training=replace(config.training, local_batch_size=rows))
    return build_engine(config, small_world(rank, size, degree), ARMS[arm])


def run_steps(engine: Engine, steps: int) -> list[float]:
    """So many steps, counted as the loop counts them; their losses."""
    losses = []
    for _ in range(steps):
        outcome = compute(engine, engine.progress.step)
        apply(engine, outcome, engine.progress.step)
        engine.progress.step += 1
        engine.progress.tokens_seen += outcome.num_tokens
        losses.append(outcome.loss.item())
    return losses


def snapshot(engine: Engine) -> dict[str, Tensor]:
    """Copies of weights, buffers, moments and counts of this rank."""
    from interlace.train.checkpoint_state import count_tensors, run_tensors

    tensors = run_tensors(engine) | count_tensors(engine, engine.progress)
    return {name: tensor.clone() for name, tensor in tensors.items()}


def unequal(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names of tensors that differ in any bit, or that one side lacks."""
    return sorted(
        name for name in {**a, **b} if name not in a or name not in b or not _same(a[name], b[name])
    )


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
