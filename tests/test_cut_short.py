"""Exchanges that go wrong: steps cut short, experts that do not exist, odd layouts."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from test_minimal_async import E, _group, _problem, _results

from interlace import ep
from interlace.ep import pending, signals


def _cut_short(rank: int, size: int, anew: bool) -> list[bool | str]:
    """Rank 0 stops between a plan and its dispatch; then both go on with another step."""
    torch.set_num_threads(1)
    with _group(rank, size):
        exchange = ep.Exchange("ep", size, rank, "minimal_async", padded=True)
        problem = _problem(6, 2, 8, torch.float32, rank, "random")
        _results(problem, exchange)  # buffers are open: nobody meets anybody for that
        found: list[bool | str] = []
        before = dict(signals.TIMEOUT_SECONDS)
        signals.limit_waits(0.3)
        try:
            plan = ep.plan(problem[1], E, exchange)
            if rank:
                ep.dispatch(problem[0], plan)
        except RuntimeError as error:
            found.append(str(error))
        dist.barrier()
        if anew:
            ep.reset()
        signals.limit_waits(5.0 if anew else 0.3)
        try:
            mine = _results(problem, exchange)
            theirs = _results(problem, ep.Exchange("ep", size, rank, padded=True))
            found.append(all(torch.equal(mine[n], theirs[n]) for n in ("out", "x.grad")))
        except RuntimeError as error:
            found.append(str(error))
        signals.TIMEOUT_SECONDS.update(before)
        pending.forget_all()
        dist.barrier()
        return found


def test_a_step_cut_short_is_told_and_reset_begins_anew(two_ranks) -> None:
    """And the wait lasts as long as it was told to."""
    (good,), (late, well) = two_ranks.run(_cut_short, True)
    assert good is True
    assert well is True
    assert re.search(r"rank 1 waited 0.3 s in minimal_async.dispatch.any for rank 0 \(at \d", late)
    assert "had a step cut short: then ep.reset" in late


def test_columns_of_another_tensor_are_rows_too() -> None:
    x, ids, scores, w, g = _problem(6, 2, 6, torch.float32, 0, "random")
    exchange = ep.Exchange(backend="minimal_async", padded=True)
    mine = _results((x.t().contiguous().t(), ids, scores, w, g), exchange)
    assert torch.equal(mine["out"], _results((x, ids, scores, w, g), exchange)["out"])


@pytest.mark.parametrize("backend", ["alltoall", "minimal_async", "hybridep"])
@pytest.mark.parametrize("wrong", [-1, E])
def test_experts_that_do_not_exist_are_refused(backend: str, wrong: int) -> None:
    ids = torch.tensor([[0, 1], [2, wrong]])
    with pytest.raises(ValueError, match=r"ids are in .*; expected experts from 0 to 7"):
        ep.plan(ids, E, ep.Exchange(backend=backend, padded=True))
