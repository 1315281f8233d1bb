"""Training with the hybridep backend on two processes, and its settings.

Oracles: for ``reduce="slot"`` the same run with the padded ``alltoall``, bitwise, losses, weights,
moments and counts; for ``reduce="rank"`` plain PyTorch with the same exchange, bitwise, and
``alltoall`` within rounding.
"""

from __future__ import annotations

import json
import sys
import types

import pytest
from small_runs import run_steps, small_config, small_engine, snapshot, unequal

from interlace.ep.transport import get_group
from interlace.ep.windows import close_windows, poison_on_reuse
from interlace.train import doctor
from interlace.train.config_read import load_config
from interlace.train.engine import exchange_over

PRESETS = ["dsv3-tiny", "qwen3-tiny"]
ARMS = ["eager", "scheduled", "chunk-graph", "chunk-scheduled"]


def _train(rank: int, size: int, preset: str, arm: str, steps: int, changes: dict):
    config = small_config(
        preset,
        ep__padded=True,
        parallelism__expert_parallel_degree=size,
        overlap__chunks=2 if "chunk" in arm else 1,
        data__source="stdlib",
        **changes,
    )
    poison_on_reuse(enabled=True)
    try:
        engine = small_engine(config, rank, size, arm)
        return run_steps(engine, steps), snapshot(engine)
    finally:
        poison_on_reuse(enabled=False)
        close_windows()


def _run(ranks, preset: str, arm: str, steps: int, **changes):
    return ranks.run(_train, preset, arm, steps, changes, timeout=200)


def _assert_same(actual, expected) -> None:
    for (losses, state), (wanted, wanted_state) in zip(actual, expected, strict=True):
        assert losses == wanted
        assert not unequal(state, wanted_state)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("arm", ARMS)
def test_twenty_steps_equal_alltoall(two_ranks, preset: str, arm: str) -> None:
    expected = _run(two_ranks, preset, arm, 20, ep__backend="alltoall")
    _assert_same(_run(two_ranks, preset, arm, 20, ep__backend="hybridep"), expected)
    losses, _ = expected[0]
    assert losses[-1] < losses[0] - 0.05  # it learned: the runs are equal in something


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_rank_sums_train(two_ranks, preset: str) -> None:
    """Every arm as plain PyTorch does it, chunked or not; and near the sums in slot order."""
    how = {"ep__backend": "hybridep", "ep__reduce": "rank"}
    plain, chunked = (_run(two_ranks, preset, arm, 20, **how) for arm in ("eager", "chunk-eager"))
    _assert_same(_run(two_ranks, preset, "scheduled", 20, **how), plain)
    for arm in ("chunk-graph", "chunk-scheduled"):
        _assert_same(_run(two_ranks, preset, arm, 20, **how), chunked)
    slots = _run(two_ranks, preset, "eager", 20, ep__backend="alltoall")
    for (losses, _), (wanted, _) in zip(plain, slots, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert losses[-1] < losses[0] - 0.05


@pytest.mark.slow
def test_scores_at_the_experts_train(two_ranks) -> None:
    how = {"ep__backend": "hybridep", "ep__scores_at": "expert"}
    plain, graph = (_run(two_ranks, "dsv3-tiny", arm, 8, **how) for arm in ("eager", "scheduled"))
    _assert_same(graph, plain)
    slots = _run(two_ranks, "dsv3-tiny", "eager", 8, ep__backend="alltoall")
    for (losses, _), (wanted, _) in zip(plain, slots, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-5)


# --- settings


def _flags(*more: str) -> list[str]:
    return ["dsv3-tiny", *more]


def test_settings_reach_the_exchange() -> None:
    config = load_config(_flags("--ep.backend", "hybridep", "--ep.padded", "--ep.reduce", "rank"))
    assert (config.ep.backend, config.ep.reduce, config.ep.scores_at) == (
        "hybridep", "rank", "origin",
    )  # fmt: skip
    small = small_config(ep__backend="hybridep", ep__padded=True, ep__reduce="rank")
    exchange = exchange_over(get_group("single"), small)
    assert (exchange.reduce, exchange.at_experts, exchange.buffer_set) == ("rank", True, -1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ep.backend", "hybridep"], r"ep.backend=hybridep needs ep.padded=true"),
        (["--ep.backend", "minimal_async"], r"ep.backend=minimal_async needs ep.padded=true"),
        (["--ep.reduce", "rank"], r"ep.reduce=rank needs ep.backend=hybridep, but ep.backend=all"),
        (
            ["--ep.backend", "minimal_async", "--ep.padded", "--ep.scores_at", "expert"],
            r"ep.scores_at=expert needs ep.backend=hybridep, but ep.backend=minimal_async",
        ),
        (["--ep.backend", "pigeon"], r"pigeon"),
    ],
)
def test_what_cannot_run_is_refused(flags: list[str], message: str) -> None:
    from interlace.train.config_check import check

    with pytest.raises((ValueError, SystemExit), match=message):
        check(load_config(_flags(*flags)), 2)


# --- doctor


def _deep_ep_line() -> doctor.Finding:
    return next(f for f in doctor.examine() if f.name == "DeepEP HybridEPBuffer")


def test_doctor_says_whose_hybridep_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _deep_ep_line()
    assert (found.ok, found.value) == (False, "absent")
    assert "not needed: ep.backend=hybridep is interlace's own" in found.why
    monkeypatch.setattr(doctor, "package_available", lambda name: True)
    monkeypatch.setitem(sys.modules, "deep_ep", types.ModuleType("deep_ep"))
    assert _deep_ep_line().value == "deep_ep without it"
    sys.modules["deep_ep"].HybridEPBuffer = object
    found = _deep_ep_line()
    assert (found.ok, found.value) == (True, "present")
    assert "also with it" in found.why
    monkeypatch.setitem(sys.modules, "deep_ep", None)  # importing it fails
    assert _deep_ep_line().value == "cannot be imported"


def test_doctor_as_json_has_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.doctor(as_json=True) == 0
    names = [f["name"] for f in json.loads(capsys.readouterr().out)]
    assert "DeepEP HybridEPBuffer" in names
