"""Every rank launches the same collectives in the same order, whatever the timing of each
(field reports I1, I2).

Oracle: the list of rank 0, over all groups together; and the losses of a run without delays.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from unittest import mock

import pytest
import torch.distributed as dist
from small_runs import run_steps, small_config, small_engine

from interlace.train.evaluate import evaluate

NAMES = ("all_reduce", "all_gather", "all_to_all_single", "all_gather_object")


def _watched(rank: int, size: int, arm: str, seed: int | None):
    """Collectives by name and kind of group, with random sleeps before each; and the losses."""
    config = small_config(
        parallelism__expert_parallel_degree=2, training__microbatches=3, evaluation__interval=1,
        evaluation__batches=1,
    )  # fmt: skip
    engine = small_engine(config, rank, size, arm)
    kinds = {engine.world.ep_group: "ep", engine.world.replica_group: "replicas"}
    rng, launched = random.Random(None if seed is None else seed + rank), []

    def noting(name: str):
        real = getattr(dist, name)

        def call(*args, **kwargs):
            launched.append((name, kinds.get(kwargs.get("group"), "all")))
            if seed is not None:
                time.sleep(rng.random() * 0.004)
            return real(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(mock.patch.object(dist, name, noting(name)))
        losses = run_steps(engine, 2)
        losses.append(evaluate(engine, engine.data, held_out=True).loss)
    return launched, losses


@pytest.mark.parametrize(("arm", "runs"), [("eager", 3), ("control", 1)])
@pytest.mark.slow
def test_the_order_does_not_depend_on_timing(four_ranks, arm: str, runs: int) -> None:
    plain = four_ranks.run(_watched, arm, None)
    expected, losses = plain[0]
    assert {kind for _, kind in expected} == {"all", "ep", "replicas"}
    assert len(expected) > 50
    for seed in range(runs):
        for launched, found in four_ranks.run(_watched, arm, 100 * seed):
            assert launched == expected
            assert found == losses
