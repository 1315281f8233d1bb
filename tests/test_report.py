"""Figures of hand-written traces.  Oracle: worked out on paper, beside each trace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_traces import A2A, GEMM, kernel, launch, said, trace, write

from interlace.measure.intervals import concurrency, cover, owned
from interlace.measure.names import is_communication, own_pattern, short
from interlace.measure.report import build_report


def figures(tmp_path: Path, events: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    own = own_pattern(options.pop("comm", []))
    path = write(tmp_path / "trace.json", trace(events, **options))
    (rank,) = build_report([path], own).figures["ranks"]
    assert rank["compute_us"] + rank["exposed_us"] + rank["idle_us"] == rank["span_us"]
    assert rank["busy_us"] == rank["compute_us"] + rank["exposed_us"]
    assert 0 <= rank["hidden_share"] <= 1
    return rank


def warnings(rank: dict[str, Any]) -> str:
    return " ".join(note["text"] for note in rank["notes"] if note["level"] == "warning")


# --- intervals ------------------------------------------------------------------------------------

_intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda x: (x[0], x[0] + x[1])),
    max_size=12,
)


def _points(intervals: list[tuple[int, int]]) -> set[int]:
    return {t for start, end in intervals for t in range(start, end)}


def _arrays(intervals: list[tuple[int, int]]) -> tuple[Any, Any]:
    pairs = np.array(intervals, np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


@given(_intervals, _intervals, st.integers(0, 80), st.integers(0, 80))
def test_covers_are_sets_of_points(
    left: list[tuple[int, int]], right: list[tuple[int, int]], a: int, b: int
) -> None:
    mine, other, first, last = cover(*_arrays(left)), cover(*_arrays(right)), min(a, b), max(a, b)
    assert mine.total == len(_points(left))
    assert mine.minus(other).total == len(_points(left) - _points(right))
    assert mine.common(other).total == len(_points(left) & _points(right))
    inside = mine.within(np.array([first]), np.array([last]))
    assert int(inside[0]) == len(_points(left) & set(range(first, last)))
    start, end = owned(*_arrays(left))
    parts = [set(range(s, e)) for s, e in zip(start, end, strict=True)]
    assert sum(map(len, parts)) == len(set().union(*parts)) == len(_points(left))
    for part, (s, e) in zip(parts, left, strict=True):
        assert part <= set(range(s, e))
    most = max([sum(s <= t < e for s, e in left) for t in range(80)])
    assert concurrency(*_arrays(left)) >= most


# --- exact answers --------------------------------------------------------------------------------


def test_all_to_all_with_its_exact_answers(tmp_path: Path) -> None:
    # compute [0, 100) [150, 250) [300, 400): 300; dispatch [50, 170), combine [240, 330): 210.
    # Exposed: [100, 150) and [250, 300).  Span 400, no idle time.
    events = [
        *(kernel(GEMM, at, 100) for at in (0, 150, 300)),
        kernel("void deep_ep::intranode::dispatch<8>(Args)", 50, 120, 20),
        kernel("void deep_ep::intranode::combine<8>(Args)", 240, 90, 20),
    ]
    rank = figures(tmp_path, events)
    assert {k: rank[k] for k in ("span_us", "busy_us", "compute_us", "comm_us", "exposed_us")} == {
        "span_us": 400, "busy_us": 400, "compute_us": 300, "comm_us": 210, "exposed_us": 100,
    }  # fmt: skip
    assert rank["hidden_share"] == 110 / 210
    assert rank["by_kind"] == {
        "ep_dispatch": {"comm_us": 120, "exposed_us": 50, "kernels": 1},
        "ep_combine": {"comm_us": 90, "exposed_us": 50, "kernels": 1},
    }
    assert [w["start_us"] for w in rank["windows"]] == [100, 250]
    assert [w["ended_by"] for w in rank["windows"]] == [GEMM, GEMM]
    assert rank["max_concurrency"] == 2
    assert rank["reliable"]
    assert not rank["notes"]


def test_unions_not_sums(tmp_path: Path) -> None:
    # N3.  Kernels [0, 10) and [5, 15) on two streams, comm [8, 20) with another nested [9, 12).
    # Summed durations would give 35 of a span of 20.
    events = [
        kernel(GEMM, 0, 10), kernel(GEMM, 5, 10, 8),
        kernel(A2A, 8, 12, 20), kernel(A2A, 9, 3, 21),
    ]  # fmt: skip
    rank = figures(tmp_path, events)
    assert (rank["compute_us"], rank["comm_us"], rank["exposed_us"]) == (15, 12, 5)
    assert rank["busy_us"] == rank["span_us"] == 20
    assert rank["idle_us"] == 0
    assert rank["max_concurrency"] == 4
    assert rank["by_kind"]["p2p"] == {"comm_us": 12, "exposed_us": 5, "kernels": 2}


def test_partly_overlapping_kernels_of_one_stream_count_once(tmp_path: Path) -> None:
    # N7.  [0, 10) and [9, 19) on one stream: both are kept, 19 in the union.
    rank = figures(tmp_path, [kernel(GEMM, 0, 10), kernel("other", 9, 10)])
    assert rank["compute_us"] == 19
    assert rank["kernels"] == 2


def test_shared_exposed_time_is_split_without_counting_twice(tmp_path: Path) -> None:
    # Dispatch [0, 10), reduce [4, 20), compute [15, 25): dispatch owns [0, 10), reduce [10, 15).
    events = [
        kernel("deep_ep::dispatch", 0, 10, 20), kernel("ncclDevKernel_AllReduce_Sum", 4, 16, 21),
        kernel(GEMM, 15, 10),
    ]  # fmt: skip
    rank = figures(tmp_path, events)
    assert rank["by_kind"]["ep_dispatch"]["exposed_us"] == 10
    assert rank["by_kind"]["data_parallel"] == {"comm_us": 16, "exposed_us": 5, "kernels": 1}
    by_end = {(e["kind"], e["ended_by"]): e["exposed_us"] for e in rank["ended_by"]}
    name = short(GEMM)
    assert by_end == {("ep_dispatch", name): 10, ("data_parallel", name): 5}


@pytest.mark.parametrize(
    "name",
    ["ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)", "ncclDevKernel_Generic(Args<4096ul>)",
     "NCCLDEVKERNEL_SENDRECV", "rcclGenericKernel<false>(Args)", "void mscclpp::allreduce<4>(int)",
     "nvshmemi_transfer_rma", "void deep_ep::internode_ll::dispatch<false>(Args)", "bounded_copy",
     "page_stash_kernel", "ncclSymkDevKernel_AllGather"],
)  # fmt: skip
def test_names_old_and_new_of_any_case_are_communication(tmp_path: Path, name: str) -> None:
    # N1: comm [0, 10) beside compute [6, 12).
    assert is_communication(name)
    rank = figures(tmp_path, [kernel(name, 0, 10, 20), kernel(GEMM, 6, 6)], world=8)
    assert (rank["comm_us"], rank["exposed_us"], rank["hidden_share"]) == (10, 6, 0.4)


@pytest.mark.parametrize(
    "name",
    ["void flash_fwd_splitkv_combine_kernel<T>(P)", "void f<ncclDataType_t>(int)",
     "paged_attention", "void at::native::(anonymous namespace)::cat<4>(ncclComm*)", 
     "Memcpy DtoD", "broadcast_add"],
)  # fmt: skip
def test_what_only_looks_like_communication_is_compute(name: str) -> None:
    assert not is_communication(name)


def test_whatever_is_neither_communication_nor_copy_is_compute(tmp_path: Path) -> None:
    # N10: an unknown kernel [0, 10); a copy [10, 14) alone; a range with a kernel's name counts
    # nowhere.
    copy = kernel("Memcpy HtoD", 10, 4) | {"cat": "gpu_memcpy"}
    annotation = kernel(A2A, 0, 14) | {"cat": "gpu_user_annotation"}
    rank = figures(tmp_path, [kernel("zorp_kernel_17", 0, 10), copy, annotation])
    assert (rank["compute_us"], rank["comm_us"], rank["span_us"]) == (10, 0, 14)
    assert (rank["copy_us"], rank["copy_alone_us"], rank["idle_us"]) == (4, 4, 4)


def test_own_pattern_and_the_note_that_asks_for_it(tmp_path: Path) -> None:
    # Stream 20 carries NCCL [0, 10) and my_transport [10, 30); compute [0, 40).
    events = [kernel(A2A, 0, 10, 20), kernel("my_transport", 10, 20, 20), kernel(GEMM, 0, 40)]
    rank = figures(tmp_path, events)
    assert "communication stream 20" in warnings(rank)
    assert "my_transport" in warnings(rank)
    rank = figures(tmp_path, events, comm=["^my_"])
    assert rank["comm_us"] == 30
    assert not warnings(rank)
    with pytest.raises(ValueError, match=r"--comm '\(' is not a regular expression"):
        own_pattern(["("])


def test_no_communication_among_several_ranks_is_no_good_news(tmp_path: Path) -> None:
    rank = figures(tmp_path, [kernel("strange_collective", 0, 10)], world=8)
    assert rank["hidden_share"] == 0
    assert not rank["reliable"]
    assert "no communication kernel was found although there are 8 ranks" in warnings(rank)


def test_serialised_streams_are_named(tmp_path: Path) -> None:
    # N11: comm [10, 20) between compute [0, 10) and [20, 30), never together.
    events = [kernel(GEMM, 0, 10), kernel(A2A, 10, 10, 20), kernel(GEMM, 20, 10)]
    rank = figures(tmp_path, events)
    assert rank["max_concurrency"] == 1
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in warnings(rank)
    rank = figures(tmp_path, [kernel(GEMM, 0, 11), *events[1:]])
    assert rank["max_concurrency"] == 2
    assert not warnings(rank)


# --- labels ---------------------------------------------------------------------------------------


def test_layers_phases_and_kinds_from_annotations(tmp_path: Path) -> None:
    # Launches at 1, 11, 21, 31 inside ranges; backward is said on the main thread and runs on 2.
    events = [
        said("layers.3 forward", 0, 10), said("moe dispatch", 0.5, 3), launch(1, 1),
        said("layers.3 forward", 10.5, 20), said("combine", 10.6, 13), launch(2, 11),
        said("backward", 20, 40), launch(3, 21) | {"tid": 2}, said("layers.12.mlp", 20.5, 25, 2),
        said("nccl:all_reduce", 30, 35), launch(4, 31),
        kernel(A2A, 100, 10, 20, 1), kernel(A2A, 110, 10, 20, 2), kernel(A2A, 120, 10, 20, 3),
        kernel("ncclDevKernel_Generic", 130, 10, 20, 4), kernel(GEMM, 0, 5),
    ]  # fmt: skip
    rank = figures(tmp_path, events)
    kinds = {kind: part["comm_us"] for kind, part in rank["by_kind"].items()}
    assert kinds == {"ep_dispatch": 10, "ep_combine": 10, "p2p": 10, "data_parallel": 10}
    layers = {layer: part["exposed_us"] for layer, part in rank["by_layer"].items()}
    assert layers == {"3": 20, "12": 10, "unknown": 10}
    phases = {phase: part["exposed_us"] for phase, part in rank["by_phase"].items()}
    assert phases == {"forward": 20, "backward": 20}


def test_what_nccl_says_of_a_collective_decides(tmp_path: Path) -> None:
    names = {"Collective name": "all_to_allv", "Process Group Description": "ep_group"}
    events = [
        kernel(A2A, 0, 10, 20, **names), kernel(A2A, 10, 10, 20, **{"Collective name": "send"}),
        kernel(A2A, 20, 10, 20, **{"Process Group Description": "expert_parallel"}),
    ]  # fmt: skip
    rank = figures(tmp_path, events)
    assert {kind: part["kernels"] for kind, part in rank["by_kind"].items()} == {"ep": 2, "p2p": 1}


def test_replayed_kernels_get_their_labels_by_order(tmp_path: Path) -> None:
    # An annotated step with two exchanges and a GEMM, then two replays of it.
    step = [said("ProfilerStep#0", 0, 50)]
    for index, text in enumerate(["layers.0 forward dispatch", "layers.1 backward combine"]):
        step += [said(text, 10 * index, 10 * index + 5), launch(index, 10 * index + 1)]
        step.append(kernel(A2A, 100 + 20 * index, 10, 20, index))
    replays = []
    for corr in (50, 51):
        at = 200 + 100 * (corr - 50)
        replays += [launch(corr, at - 50, "cudaGraphLaunch")]
        replays += [kernel(A2A, at + 20 * n, 10, 33, corr) for n in range(2)]
        replays += [kernel(GEMM, at + n, 1, 34, corr) for n in range(10)]
    rank = figures(tmp_path, step + replays)
    assert {k: v["kernels"] for k, v in rank["by_kind"].items()} == {
        "ep_dispatch": 3, "ep_combine": 3,
    }  # fmt: skip
    assert {k: v["kernels"] for k, v in rank["by_layer"].items()} == {"0": 3, "1": 3}
    assert "4 of 24 kernels of graph replays have a layer" in rank["notes"][0]["text"]
    assert rank["reliable"]


@pytest.mark.parametrize(("second_at", "kinds"), [
    (20, {"ep_dispatch": 2, "ep_combine": 2}),  # one after the other, on streams of the graph's own
    (9.25, {"ep_dispatch": 2, "ep_combine": 2}),  # the same, by time stamps that are a little off
    (5, {"p2p": 2, "ep_dispatch": 1, "ep_combine": 1}),  # at once: who was first is chance
])  # fmt: skip
def test_a_chain_over_several_streams_of_a_replay_keeps_its_order(
    tmp_path: Path, second_at: float, kinds: dict[str, int]
) -> None:
    step = [said("ProfilerStep#0", 0, 50)]
    for index, text in enumerate(["layers.0 forward dispatch", "layers.1 backward combine"]):
        step += [said(text, 10 * index, 10 * index + 5), launch(index, 10 * index + 1)]
        step.append(kernel(A2A, 100 + 20 * index, 10, 20, index))
    replay = [launch(50, 150, "cudaGraphLaunch")]
    replay += [kernel(A2A, 200 + second_at * n, 10, 33 + n, 50) for n in range(2)]
    rank = figures(tmp_path, step + replay)
    assert {k: v["kernels"] for k, v in rank["by_kind"].items()} == kinds


def test_streams_of_a_replay_are_no_communication_streams(tmp_path: Path) -> None:
    # Two replays whose exchange shares a stream with products, and a product on another stream.
    events = []
    for number, at in enumerate((0, 1000)):
        events.append(launch(50 + number, at, "cudaGraphLaunch"))
        events += [kernel(A2A, at + 100, 40, 33, 50 + number)]
        events += [kernel(GEMM, at + 200 + 20 * n, 10, 33, 50 + number) for n in range(10)]
        events += [kernel(GEMM, at + 110 + 20 * n, 15, 34, 50 + number) for n in range(20)]
    rank = figures(tmp_path, events)
    assert not [note for note in rank["notes"] if note["level"] == "warning"]
    plain = [
        e | {"name": "cudaLaunchKernel"} if e["name"] == "cudaGraphLaunch" else e for e in events
    ]
    rank = figures(tmp_path, plain)
    assert "on communication stream 33 match no communication pattern" in str(rank["notes"])


# --- several ranks --------------------------------------------------------------------------------


def test_wait_and_transfer_across_ranks(tmp_path: Path) -> None:
    # First all-reduce: rank 0 at 0 for 30, rank 1 at 20 for 10: rank 0 waits 20.
    # Second: rank 0 at 60 for 10, rank 1 at 55 for 15: rank 1 waits 5.  Base times differ by 1 ms.
    name = "ncclDevKernel_AllReduce_Sum"
    one = trace([kernel(name, 0, 30, 20), kernel(name, 60, 10, 20), kernel(GEMM, 0, 70)], 0, 2)
    two = trace([kernel(name, 20, 10, 20), kernel(name, 55, 15, 20), kernel(GEMM, 0, 70)], 1, 2)
    for event in two["traceEvents"]:
        event["ts"] -= 1000
    one["baseTimeNanoseconds"], two["baseTimeNanoseconds"] = 10**18, 10**18 + 10**6
    paths = [write(tmp_path / f"{i}.json", t) for i, t in enumerate((one, two))]
    ranks = build_report(paths).figures["ranks"]
    assert [r["waiting"]["wait_us"] for r in ranks] == [20, 5]
    assert [r["waiting"]["transfer_us"] for r in ranks] == [20, 20]
    assert ranks[0]["waiting"]["by_kind"]["data_parallel"]["kernels"] == 2


def test_unequal_numbers_of_collectives_are_not_matched(tmp_path: Path) -> None:
    name = "ncclDevKernel_AllGather"
    one = trace([kernel(name, 0, 30, 20), kernel(name, 60, 10, 20)], 0, 2)
    two = trace([kernel(name, 20, 10, 20)], 1, 2)
    paths = [write(tmp_path / f"{i}.json", t) for i, t in enumerate((one, two))]
    report = build_report(paths).figures
    assert report["ranks"][0]["waiting"]["kernels"] == 0
    assert "3 communication kernel(s) have no counterpart" in report["notes"][0]["text"]


def test_two_devices_of_one_file_are_two_entries(tmp_path: Path) -> None:
    other = kernel(A2A, 0, 10, 7) | {"pid": 1}
    other["args"] = {"device": 1, "stream": 7}
    path = write(tmp_path / "t.json", trace([kernel(GEMM, 0, 10), other]))
    ranks = build_report([path]).figures["ranks"]
    assert [(r["device"], r["compute_us"], r["exposed_us"]) for r in ranks] == [
        ("0", 10, 0), ("1", 0, 10),
    ]  # fmt: skip


def test_short_names() -> None:
    assert short(GEMM) == "device_kernel<Gemm>"
    assert short("void at::native::(anonymous namespace)::cat<4>(int)") == "cat<4>"
    assert re.fullmatch(r".{59}…", short("x" * 90))
