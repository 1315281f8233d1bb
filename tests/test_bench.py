"""What a benchmark is asked for, and what its figures mean: pure functions, answers by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from small_runs import small_world

from interlace.measure.bench_plan import plan_cells
from interlace.measure.bench_request import (
    Request,
    check_files,
    read_arms,
    read_budgets,
    read_settings,
)
from interlace.measure.bench_text import HEAD, cells
from interlace.measure.bench_timing import DeviceState, Spread, read_state, spread, take_turns
from interlace.measure.bench_verdict import failure, over_bound, paired_gain, recommend

LOOPBACK = ["qwen3-tiny", "--ep.transport", "loopback"]


def request(*sweeps: str, arms: str | None = None, flags: tuple[str, ...] = ()) -> Request:
    settings, refused = read_settings([*LOOPBACK, *flags], sweeps, 1)
    return Request(*read_arms(arms), (), settings, refused=refused)


def row(arm: str, ms: float, around: float = 0.0, **more: Any) -> dict[str, Any]:
    known = {
        "setting": {}, "budget": None, "equal": True, "against": "eager", "differs_in": None,
        "ms_p10": ms - around, "ms_p90": ms + around, "gain": 1.0, "hidden_share": None,
        "exposed_ms": None, "compute_ms": None, "exchange_ms": None, "tokens_per_s": 1e6 / ms,
        "mfu_percent": None, "peak_memory_gib": None, "clock_mhz": None, "power_w": None,
        "over_bound": None,
    }  # fmt: skip
    return {"arm": arm, "ms": ms, **known, **more}


# --- the request ----------------------------------------------------------------------------------


def test_arms_by_name_by_default_and_all() -> None:
    plain = ("control", "scheduled", "chunk-scheduled")
    default = (*plain, "captured", "scheduled-captured", "chunk-captured")
    assert read_arms(None) == (default, True)
    assert read_arms("all")[1]
    assert len(read_arms("all")[0]) == 9
    assert read_arms("control,eager,control") == (("control", "eager"), False)
    with pytest.raises(ValueError, match=r"unknown arm 'controll', .*; did you mean control"):
        read_arms("controll")
    with pytest.raises(ValueError, match="--arms names no arm"):
        read_arms(",")


def test_budgets() -> None:
    assert read_budgets(None) == ()
    assert read_budgets("1,2, 8,1") == (1, 2, 8)
    for text in ("0", "1,,2", "133", "two"):
        with pytest.raises(ValueError, match=r"is no whole number from 1 to 132"):
            read_budgets(text)


def test_a_sweep_is_the_product_of_its_values_with_their_types() -> None:
    settings, refused = read_settings(
        LOOPBACK, ["overlap.chunks=1,2,4", "ep.padded=true,false"], world_size=1
    )
    assert [s.values for s in settings] == [
        (("overlap.chunks", chunks), ("ep.padded", padded))
        for chunks in (1, 2, 4)
        for padded in (True, False)
    ]
    assert [s.config.overlap.chunks for s in settings] == [1, 1, 2, 2, 4, 4]
    assert settings[0].config.ep.padded
    assert refused == ()
    roots, _ = read_settings(LOOPBACK, ["overlap.chunk_root=layers.*,layers.*.moe"], 1)
    assert [s.config.overlap.chunk_root for s in roots] == ["layers.*", "layers.*.moe"]
    factors, _ = read_settings([*LOOPBACK, "--ep.padded"], ["--ep.capacity-factor=1,1.25"], 1)
    assert [dict(s.values)["ep.capacity_factor"] for s in factors] == [1.0, 1.25]


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("training.seq_len=8,16", r"training.seq_len: cannot be swept, arms of one run share"),
        ("ep.transport=auto", r"ep.transport: cannot be swept, arms of one run share"),
        ("overlap.chunk=1,2", r"overlap.chunk: cannot be swept, no setting; did you mean"),
        ("overlap.chunks", r"write NAME=VALUE,VALUE"),
        ("overlap.chunks=2,,4", r"write NAME=VALUE,VALUE"),
        ("ep.padded=yes", r"ep.padded is a switch; write ep.padded=true,false"),
        ("overlap.chunks=3", r"does not split into overlap.chunks=3 equal chunks"),
    ],
)
def test_what_cannot_be_swept_is_one_clear_error(sweep: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_settings(LOOPBACK, [sweep], 1)


def test_combinations_that_are_not_legal_are_left_out_with_the_reason() -> None:
    asked = request(
        "ep.backend=alltoall,hybridep", "ep.reduce=slot,rank", arms="control",
        flags=("--ep.padded",),
    )  # fmt: skip
    found, left_out = plan_cells(asked, [8], "cuda", "nccl")
    assert [dict(cell.values) for cell in found] == [
        {"ep.backend": backend, "ep.reduce": reduce}
        for backend, reduce in (("alltoall", "slot"), ("hybridep", "slot"), ("hybridep", "rank"))
    ]
    assert [(x.arm, dict(x.values)) for x in left_out] == [
        ("every arm", {"ep.backend": "alltoall", "ep.reduce": "rank"})
    ]
    assert "ep.reduce=rank needs ep.backend=hybridep" in left_out[0].reason
    with pytest.raises(ValueError, match=r"'alltoal' for argument 'ep\.backend'"):
        request("ep.backend=alltoal,hybridep", "ep.reduce=slot,rank", flags=("--ep.padded",))
    with pytest.raises(ValueError, match=r"no combination is legal: ep.reduce=rank needs"):
        request("ep.backend=alltoall,minimal_async", "ep.reduce=rank", flags=("--ep.padded",))


def test_a_setting_swept_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"overlap.chunks is given twice"):
        read_settings(LOOPBACK, ["overlap.chunks=2", "overlap.chunks=4"], 1)


def test_files_and_numbers_are_checked_before_anything_runs(tmp_path: Path) -> None:
    good = request()
    check_files(replace(good, json=tmp_path / "a.json", html=tmp_path / "a.html"))
    for bad, message in (
        (replace(good, json=tmp_path), "--json .*: no file can be written there"),
        (replace(good, html=tmp_path / "no" / "a.html"), "--html .*: no file can be written"),
        (replace(good, trace=Path(__file__)), "--trace .* is a file; name a folder"),
        (replace(good, rounds=0), "--rounds 0 must be at least 1"),
        (replace(good, min_gain=0.0), "--min-gain 0 must be a ratio"),
    ):
        with pytest.raises(ValueError, match=message):
            check_files(bad)


# --- the plan -------------------------------------------------------------------------------------


def test_a_control_serves_all_chunk_counts_and_one_chunk_is_left_out() -> None:
    found, left_out = plan_cells(
        request("overlap.chunks=1,2,4", arms="chunk-scheduled"), [1, 8], "cpu", "none"
    )
    assert [(c.arm, c.values, c.budget) for c in found] == [
        ("control", (), 1),
        ("control", (), 8),
        *[
            ("chunk-scheduled", (("overlap.chunks", chunks),), budget)
            for chunks in (2, 4)
            for budget in (1, 8)
        ],
    ]
    assert {c.control for c in found} == {("control", (), 1), ("control", (), 8)}
    assert [(x.arm, x.values) for x in left_out] == [("chunk-scheduled", (("overlap.chunks", 1),))]
    assert found[-1].label == "chunk-scheduled overlap.chunks=4 8 CTAs"


def test_settings_of_the_exchange_have_their_own_control() -> None:
    asked = request("ep.capacity_factor=1.0,2.0", arms="chunk-graph", flags=("--ep.padded",))
    found, _ = plan_cells(asked, [None], "cpu", "none")
    assert [(c.arm, dict(c.values)["ep.capacity_factor"]) for c in found] == [
        ("control", 1.0), ("control", 2.0), ("chunk-graph", 1.0), ("chunk-graph", 2.0),
    ]  # fmt: skip
    assert found[3].control == found[1].key
    assert found[3].config.overlap.chunks == 2  # the settings have one, which is no chunking


def test_arms_that_cannot_run_are_an_error_by_name_and_left_out_by_default() -> None:
    found, left_out = plan_cells(request(), [None], "cpu", "none")
    assert [c.arm for c in found] == ["control", "scheduled", "chunk-scheduled"]
    assert [(x.arm, "needs a CUDA device" in x.reason) for x in left_out] == [
        ("captured", True), ("scheduled-captured", True), ("chunk-captured", True),
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"captured cannot run here: a CUDA graph needs a CUDA"):
        plan_cells(request(arms="captured"), [None], "cpu", "none")
    with pytest.raises(ValueError, match=r"captured cannot run here: the exact exchange .*padded"):
        plan_cells(request(arms="captured"), [None], "cuda", "none")
    padded = request(arms="captured", flags=("--ep.padded",))
    assert len(plan_cells(padded, [None], "cuda", "none")[0]) == 2
    with pytest.raises(ValueError, match="gloo carries the exchange through the host"):
        plan_cells(padded, [None], "cuda", "gloo")
    odd = request(arms="chunk-scheduled", flags=("--training.local_batch_size", "3"))
    with pytest.raises(ValueError, match=r"= 3 does not split into overlap.chunks=2"):
        plan_cells(odd, [None], "cpu", "none")


# --- figures --------------------------------------------------------------------------------------


def test_spread_is_two_samples_that_were_seen() -> None:
    assert spread([5, 1, 4, 2, 3]) == Spread(3, 1, 5)
    assert spread([float(n) for n in range(11)]) == Spread(5, 1, 9)
    assert spread([2, 4]) == Spread(3, 2, 4)
    assert spread([7]) == Spread(7, 7, 7)
    with pytest.raises(ValueError, match="no samples"):
        spread([])


def test_gain_is_paired_round_by_round() -> None:
    """A machine that slows down by half in the second round does not change the gain."""
    assert paired_gain([4, 6], [2, 2]) == Spread(2.5, 2, 3)
    assert paired_gain([10, 20], [5, 10]) == Spread(2, 2, 2)


def test_over_bound() -> None:
    assert over_bound(30, 20, 10) == 1.5
    assert over_bound(30, 10, 20) == 1.5
    assert over_bound(30, None, 20) is None
    assert over_bound(30, 20, None) is None


def test_state_of_the_device_as_nvidia_smi_writes_it() -> None:
    assert read_state("1905, 632.57\n") == DeviceState(1905, 632.57)
    assert read_state("1905, [N/A]\n") == DeviceState(1905, None)
    assert read_state("") == DeviceState(None, None)
    assert read_state("No devices were found") == DeviceState(None, None)


def test_arms_take_turns_there_and_back() -> None:
    order: list[str] = []
    runs = [lambda: order.append("a"), lambda: order.append("b")]
    slow = [lambda run=run: (run(), __import__("time").sleep(0.21)) for run in runs]
    samples = take_turns(slow, 2, small_world(), print)
    assert "".join(order) == "ab" + "ab" + "ba"  # once unmeasured, then two rounds
    assert [len(mine) for mine in samples] == [2, 2]
    assert all(ms > 200 for mine in samples for ms in mine)


def _turns(rank: int, size: int) -> list[list[float]]:
    import time

    return take_turns([lambda: time.sleep(0.02 * (1 + rank))], 2, small_world(rank, size), print)


@pytest.mark.slow
def test_times_are_the_slowest_ranks(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(_turns)
    assert first == second
    assert all(ms >= 40 for ms in first[0])


# --- the recommendation ---------------------------------------------------------------------------


def test_overlap_is_recommended_if_it_is_faster_by_more_than_the_spread() -> None:
    rows = [
        row("control", 460.4, 2),
        row("captured", 450, 2),
        row("chunk-captured", 363.6, 1, hidden_share=0.85, setting={"overlap.chunks": 2}),
    ]
    assert recommend(rows) == (
        "Use chunk-captured with overlap.chunks=2 (363.6 ms): 1.24x as fast as captured "
        "(450.0 ms), 85% of its exchange is hidden."
    )  # fmt: skip


def test_overlap_is_left_off_with_its_reason() -> None:
    plain = row("captured", 306, 1, exposed_ms=23.8, compute_ms=283.6)
    over = row("chunk-captured", 309.3, 1, exposed_ms=2.1, compute_ms=306.6)
    assert recommend([plain, over]) == (
        "Leave overlap off: chunk-captured (309.3 ms) is no faster than captured (306.0 ms); it "
        "hides 21.7 ms of exchange and pays 23.0 ms of compute."
    )
    unknown = [row("control", 100, 1), row("chunk-scheduled", 110, 1)]
    assert recommend(unknown).endswith("it is slower by more than the spread.")
    near = [row("control", 100, 5), row("chunk-scheduled", 98, 5)]
    assert recommend(near).endswith("the difference is within the spread.")
    assert "no exchange to hide" in recommend(near, exchanges=False)


def test_a_capture_without_overlap_is_no_gain_of_overlap() -> None:
    """Faster than the control alone: what a user would run without overlap is the captured arm."""
    rows = [row("control", 120), row("captured", 100), row("chunk-captured", 110)]
    assert recommend(rows).startswith("Leave overlap off: chunk-captured (110.0 ms) is no faster")


def test_every_budget_has_its_sentence() -> None:
    rows = [
        row("control", 20, budget=1),
        row("control", 10, budget=8),
        row("chunk-scheduled", 15, budget=1),
        row("chunk-scheduled", 11, budget=8),
    ]
    slow, fast = recommend(rows).split(". With")
    assert slow.startswith("With 1 CTA, use chunk-scheduled (15.0 ms): 1.33x as fast as control")
    assert fast.startswith(" 8 CTAs, leave overlap off: chunk-scheduled (11.0 ms)")  # fmt: skip


def test_an_arm_that_gave_other_bits_does_not_count() -> None:
    wrong = row("chunk-scheduled", 50, equal=False, against="chunk-eager", differs_in="embed")
    rows = [row("control", 100), wrong]
    assert recommend(rows) == (
        "chunk-scheduled gave other bits than chunk-eager in embed: its speed counts for nothing "
        "until that is understood. No recommendation: no overlapping arm with the right bits was "
        "measured."
    )
    assert failure(rows, None) == recommend(rows).split(" No rec")[0]


def test_the_gate_is_the_best_arm_under_every_budget() -> None:
    rows = [row("control", 20, budget=1), row("control", 10, budget=8),
            row("scheduled", 15, budget=1, gain=1.3), row("chunk-graph", 19, budget=1, gain=1.05),
            row("scheduled", 11, budget=8, gain=0.9)]  # fmt: skip
    assert failure(rows, None) is None
    assert failure(rows, 0.9) is None
    assert failure(rows, 1.1) == (
        "with 8 CTAs the best arm, scheduled, gains 0.900x over the control, less than "
        "--min-gain 1.1."
    )
    assert "cannot be judged" in (failure(rows[:1], 1.1) or "")


def test_a_line_says_what_is_not_known() -> None:
    known = row(
        "chunk-captured", 363.6, 1, budget=1, gain=1.266, hidden_share=0.8512, exposed_ms=33.9,
        exchange_ms=181.8, over_bound=1.35, peak_memory_gib=55.04, clock_mhz=1905.0, power_w=632.6,
        mfu_percent=21.66, against="chunk-eager", setting={"overlap.chunks": 2},
    )  # fmt: skip
    line = dict(zip(HEAD, cells(known), strict=True))
    assert line["arm"] == "chunk-captured chunks=2"
    assert line["10 to 90%"] == "362.60 to 364.60"
    assert line["hidden"] == "85.1%"
    assert line["bits"] == "= chunk-eager"
    assert line["clock, power"] == "1905 MHz, 633 W"
    assert line["memory"] == "55.0 GiB"
    unknown = dict(zip(HEAD, cells(row("control", 1.0, equal=None)), strict=True))
    assert [unknown[name] for name in ("MFU", "exposed", "hidden", "clock, power", "bits")] == [
        "N/A", "N/A", "N/A", "N/A", "reference",
    ]  # fmt: skip
