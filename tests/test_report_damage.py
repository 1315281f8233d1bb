"""Damaged, odd and incomplete traces (field reports N4, N5, N6, N8, N9, N12).

Oracle: the figures of the undamaged trace, or those worked out beside each case.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from small_traces import A2A, BASE, GEMM, kernel, launch, said, trace, write

from interlace.measure import reading
from interlace.measure.demo import demo_bytes
from interlace.measure.report import build_report


def one(path: Path) -> dict[str, Any]:
    (rank,) = build_report([path]).figures["ranks"]
    return rank


def texts(rank: dict[str, Any], level: str = "warning") -> str:
    return " ".join(note["text"] for note in rank["notes"] if note["level"] == level)


# compute [0, 30), comm [20, 40): exposed 10, span 40
EVENTS = [kernel(GEMM, 0, 30), kernel(A2A, 20, 20, 20)]


def check(rank: dict[str, Any]) -> None:
    assert (rank["compute_us"], rank["comm_us"], rank["exposed_us"], rank["span_us"]) == (
        30, 20, 10, 40,
    )  # fmt: skip


# --- N6: invalid JSON -----------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".txt"])
@pytest.mark.parametrize(
    ("spoiled", "told"),
    [
        (rb'"C:\Users\me\trace"', "1 piece(s) of invalid JSON were mended"),
        (b'"a\x01b\tc"', "mended"),
        (b'"\xff\xfe"', ""),
        (b"123456789012345678901234567890", ""),
        (b"-1e999", ""),
    ],
)
def test_broken_values_are_mended(tmp_path: Path, suffix: str, spoiled: bytes, told: str) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "SPOILED", "ts": 1, "dur": 1, "args": {}}
    data = json.dumps(trace([*EVENTS, event])).encode().replace(b'"args": {}', b'"args": ' + b"{}")
    for place in (b'"SPOILED"', b'"args": {}'):
        other = b'{"Extra": %s}' % spoiled if place != b'"SPOILED"' else spoiled
        new = place.replace(b"{}", other) if b"{}" in place else other
        content = data.replace(place, new)
        path = tmp_path / f"trace{suffix}"
        path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
        rank = one(path)
        check(rank)
        if place != b'"SPOILED"':
            assert told in texts(rank)


def test_unreadable_events_are_left_out_and_counted(tmp_path: Path) -> None:
    good = [json.dumps(event) for event in EVENTS]
    bad = '{"ph": "X", "cat" "kernel", "name": "x", "ts": 1, "dur": 5}'
    text = f'{{"traceEvents": [{good[0]}, {bad}, {good[1]}], "traceName": "C:\\run"}}'
    rank = one(write(tmp_path / "t.json", text))
    check(rank)
    at = text.index(bad)
    assert f"1 unreadable event(s) were left out, the first at byte {at}" in texts(rank)


def test_truncated_files_give_what_was_read(tmp_path: Path) -> None:
    text = json.dumps(trace([*EVENTS, kernel(GEMM, 50, 10)]))
    cut = text.index('"ts"', text.rindex('"cat"'))
    rank = one(write(tmp_path / "t.json", text[:cut]))
    check(rank)
    assert "cut short at byte" in texts(rank)
    assert "2 events were read" in texts(rank)
    assert not rank["reliable"]
    packed = gzip.compress(text.encode() + random.Random(0).randbytes(60).hex().encode())
    path = tmp_path / "t.json.gz"
    path.write_bytes(packed[:-30])
    assert "the gzip data is cut short after byte" in texts(one(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"hello", r"expected JSON with traceEvents, found invalid character at byte \d"),
        (b'{"a": 1}', "has no traceEvents list"),
        (b'{"traceEvents": [', "ends at byte 17 before its first whole event"),
        (b'{"traceEvents": [{"ph": "X", "na', "ends at byte .* before its first whole event"),
        (b'{"deviceProp', r"found the end of the data at byte 12"),
        (b'{"a": ' + b"[" * 10**5, "expected JSON with traceEvents, found .*recursion"),
        (b"[1, 2]", "no event can be read, the first at byte 1"),
        (b"PK\x03\x04zip", "is a zip archive"),
        (b"\x1f\x8bnot gzip", "gzip data is damaged after byte 0"),
        (b'{"traceEvents": []}', "has no GPU kernels; record the trace with ProfilerActivity.CUDA"),
    ],
)
def test_what_is_no_trace_gives_one_clear_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        build_report([path])
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_fuzzed_files_give_figures_or_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Property: no other exception, the figures stay consistent.
    rng, data, path = random.Random(3), demo_bytes(), tmp_path / "t.json"
    outcomes = {"figures": 0, "error": 0}
    for _ in range(60):
        monkeypatch.setattr(reading, "_BLOCK_BYTES", rng.choice([700, 5000, 1 << 23]))
        spoiled = bytearray(data)
        for _ in range(rng.choice([1, 1, 5])):
            spoiled[rng.randrange(len(spoiled))] = rng.randrange(256)
        if rng.random() < 0.5:
            spoiled = bytearray(gzip.compress(bytes(spoiled), 1))
            spoiled[rng.randrange(len(spoiled))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.4:
            del spoiled[rng.randrange(len(spoiled)) :]
        path.write_bytes(spoiled)
        try:
            rank = one(path)
        except ValueError as error:
            outcomes["error"] += str(error).count("\n") == 0
            continue
        outcomes["figures"] += 1
        assert rank["compute_us"] + rank["exposed_us"] + rank["idle_us"] == rank["span_us"]
        assert 0 <= rank["exposed_us"] <= rank["comm_us"]
    assert min(outcomes.values()) > 3, outcomes
    assert sum(outcomes.values()) == 60


def test_small_pieces_give_the_same_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # N12: memory is bounded by the piece; oracle: the whole file at once.
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(demo_bytes()))
    whole = one(path)
    for size in (97, 1000, 4096):
        monkeypatch.setattr(reading, "_BLOCK_BYTES", size)
        assert one(path) == whole


# --- forms of JSON, times -------------------------------------------------------------------------


def test_the_bare_list_and_odd_spacing(tmp_path: Path) -> None:
    text = json.dumps(trace(EVENTS), indent=1)
    _, events = text.rsplit('"traceEvents"', 1)
    one_event = [kernel(GEMM, 0, 30)]
    forms = [
        json.dumps(EVENTS),
        "\ufeff \n" + json.dumps(EVENTS, indent=3) + "\n",
        text,
        '{"traceEvents"' + events[:-2].rstrip() + ', "z": [{}, {}]}',
        json.dumps(trace([*EVENTS, {"ph": "M", "args": {"l": [{"a": 1}, {"b": 2}, {"c": [{}]}]}}])),
    ]
    for form in forms:
        rank = one(write(tmp_path / "t.json", form))
        check(rank)
        assert not texts(rank), form
    rank = one(write(tmp_path / "t.json.gz", one_event))
    assert (rank["compute_us"], texts(rank)) == (30, "")
    unclosed = json.dumps(EVENTS)[:-1] + ",\n"  # what old Chrome tracing writes
    assert "cut short" in texts(one(write(tmp_path / "e.json", unclosed)))


def test_times_as_texts_fractions_and_large_numbers(tmp_path: Path) -> None:
    # N9.  1/1024 us is the grid; 0.3 us is 307 of them.
    events = [kernel(GEMM, 0, 30), kernel(A2A, 20, 20, 20)]
    events[0] |= {"ts": str(BASE), "dur": "30"}
    check(one(write(tmp_path / "a.json", trace(events))))
    text = json.dumps(trace([kernel(GEMM, 0, 30.3)])).replace(str(BASE), "1712195495505582.988")
    assert "1712195495505582.988" in text
    assert one(write(tmp_path / "b.json", text))["compute_us"] == round(30.3 * 1024) / 1024
    # At today's microseconds a float64 is 0.25 us coarse: kept as written it is exact.
    start = "1712195495505582"
    near = [kernel(GEMM, 0, 0.5), kernel(GEMM, 7, 0.5)]
    text = json.dumps({"displayTimeUnit": "ns", **trace(near)})
    text = text.replace(str(BASE), start + ".125").replace(str(BASE + 7), start + ".750")
    assert one(write(tmp_path / "c.json", text))["span_us"] == 1.125


def test_zero_times_are_left_out_and_counted(tmp_path: Path) -> None:
    late = [event | {"ts": event["ts"] + 4e9} for event in EVENTS]
    lost = [kernel(GEMM, 5, 0) | {"ts": late[0]["ts"]}, kernel(GEMM, 0, 9) | {"ts": 0}]
    broken = kernel(GEMM, 0, 1) | {"ts": "soon"}
    rank = one(write(tmp_path / "t.json", trace([*late, *lost, broken])))
    check(rank)
    assert "2 device events at time zero or of zero length were left out" in texts(rank)
    assert "1 device events without a readable time were left out" in texts(rank)
    # A trace that begins at zero is no trace with lost times.
    early = [event | {"ts": event["ts"] - BASE} for event in EVENTS]
    check(one(write(tmp_path / "u.json", trace(early))))


# --- N8: what a file does not say -----------------------------------------------------------------


def test_missing_rank_and_device_are_said(tmp_path: Path) -> None:
    events = [dict(event) for event in EVENTS]
    for event in events:
        event["args"] = {}
        del event["pid"]
    rank = one(write(tmp_path / "t.json", trace(events, rank=None)))
    check(rank)
    assert rank["rank"] is None
    assert "does not say its rank" in texts(rank, "note")
    assert "do not say their device" in texts(rank, "note")
    rank = one(write(tmp_path / "run_rank-5.json", trace(EVENTS, rank=None)))
    assert rank["rank"] == 5
    assert "5 is from its name" in texts(rank, "note")


def test_a_file_without_kernels_beside_others_is_named(tmp_path: Path) -> None:
    cpu_only = write(tmp_path / "cpu.json", trace([said("forward", 0, 10)]))
    report = build_report([cpu_only, write(tmp_path / "t.json", trace(EVENTS))])
    assert len(report.figures["ranks"]) == 1
    assert f"{cpu_only} has no GPU kernels" in report.figures["notes"][0]["text"]


# --- N4, N5: incomplete traces --------------------------------------------------------------------


def _step(number: int, start: float, lost: int = 0) -> list[dict[str, Any]]:
    """Compute 10 and communication 10, of which 5 exposed; the first ``lost`` kernels are gone."""
    events = [said(f"ProfilerStep#{number}", start, start + 90)]
    kernels = [
        kernel(GEMM, start + 50, 10, 7, 10 * number),
        kernel(A2A, start + 55, 10, 20, 10 * number + 1),
    ]
    events += [launch(10 * number + n, start + 10 * n + 1) for n in range(2)]
    return events + kernels[lost:]


def test_incomplete_steps_are_flagged_and_left_out(tmp_path: Path) -> None:
    events = [*_step(1, 0, lost=1), *_step(2, 100), *_step(3, 200)]
    rank = one(write(tmp_path / "t.json", trace(events)))
    assert [step["complete"] for step in rank["steps"]] == [False, True, True]
    assert [step["missing"] for step in rank["steps"]] == [1, 0, 0]
    assert "step" in texts(rank)
    assert "1 (1 of 2 launches without a kernel)" in texts(rank)
    # Steps 2 and 3 only: [150, 165) and [250, 265).
    assert (rank["span_us"], rank["compute_us"], rank["exposed_us"]) == (115, 20, 10)
    assert rank["reliable"]


def test_an_incomplete_step_in_the_middle_leaves_no_idle_time(tmp_path: Path) -> None:
    # Steps 1 and 3 are [50, 65) and [250, 265); what lies between counts as nothing.
    events = [*_step(1, 0), *_step(2, 100, lost=1), *_step(3, 200)]
    rank = one(write(tmp_path / "t.json", trace(events)))
    assert (rank["span_us"], rank["idle_us"], rank["exposed_us"]) == (30, 0, 10)


def test_where_all_steps_are_incomplete_nothing_is_reliable(tmp_path: Path) -> None:
    rank = one(write(tmp_path / "t.json", trace(_step(1, 0, lost=1))))
    assert not rank["reliable"]
    assert "every step is incomplete" in texts(rank)
    assert rank["comm_us"] == 10


def test_launches_into_a_capture_need_no_kernels(tmp_path: Path) -> None:
    capture = [
        launch(900, 5, "cudaStreamBeginCapture"), launch(901, 6), launch(902, 7),
        launch(903, 8, "cudaStreamEndCapture"),
    ]  # fmt: skip
    rank = one(write(tmp_path / "t.json", trace([*_step(1, 0), *capture])))
    assert [(s["launches"], s["missing"]) for s in rank["steps"]] == [(2, 0)]


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ([0, 40], "few kernels were recorded under graph replay|replays differ"),
        ([2, 3, 2], "few kernels were recorded"),
        ([40], "with one replay nothing shows"),
        ([40, 12], "replays differ"),
        ([40, 40], ""),
    ],
)
def test_few_kernels_under_graph_replay(tmp_path: Path, counts: list[int], told: str) -> None:
    events = []
    for corr, count in enumerate(counts):
        events.append(launch(corr, 1000 * corr, "cudaGraphLaunch"))
        events += [kernel(GEMM, 1000 * corr + 10 * n, 5, 7, corr) for n in range(count)]
    rank = one(write(tmp_path / "t.json", trace(events)))
    assert rank["reliable"] is (not told)
    assert any(part in texts(rank) for part in told.split("|"))
