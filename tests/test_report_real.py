"""Real traces, large traces.

The files are in the folder ``shared/traces`` beside the checkout, which is not part of the project;
where it is missing these tests are skipped, and tests/test_report.py and the demo trace stand in.
Oracle: the figures of its README, and bounds that hold for any trace.
"""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import SHARED

from interlace.measure import reading
from interlace.measure.demo import demo_bytes
from interlace.measure.report import build_report

TRACES = SHARED / "traces"
needs_traces = pytest.mark.skipif(
    not TRACES.is_dir(), reason="needs the folder shared/traces beside the checkout"
)
REFERENCE = {  # us: communication, compute, busy, exposed
    "hta-sampled_rank-0": ("396199", "210320", "547303", "336983"),
    "hta-sampled_rank-1": ("379053", "271973", "575496", "303523"),
    "hta-nccl_data": ("46876.492", "115655.843", "", "39559.466"),
}
OTHERS = {  # kernels, and whether one may rely on the figures
    "hta-ns-resolution": (4350, True),
    "hta-triton_example": (1, True),
    "tracelens-mi300-resnet": (2995, True),
    "tracelens-graph-execution": (425, False),
    "tracelens-compile-triton": (12, True),
}


def one(name: str) -> dict[str, Any]:
    (rank,) = build_report([TRACES / f"{name}.json.gz"]).figures["ranks"]
    bounds(rank)
    return rank


def bounds(rank: dict[str, Any]) -> None:
    assert 0 <= rank["exposed_us"] <= rank["comm_us"] <= rank["busy_us"] <= rank["span_us"]
    assert 0 <= rank["hidden_share"] <= 1
    assert rank["compute_us"] + rank["exposed_us"] + rank["idle_us"] == rank["span_us"]
    for table in ("by_kind", "by_layer", "by_phase"):
        parts = [part["exposed_us"] for part in rank[table].values()]
        assert not parts or sum(parts) == rank["exposed_us"]
    assert sum(stream["exposed_us"] for stream in rank["streams"]) == rank["exposed_us"]


@needs_traces
@pytest.mark.parametrize("name", REFERENCE)
def test_reference_figures_to_the_last_digit(name: str) -> None:
    rank = one(name)
    keys = ("comm_us", "compute_us", "busy_us", "exposed_us")
    for key, text in zip(keys, REFERENCE[name], strict=True):
        digits = len(text.partition(".")[2])
        assert not text or f"{rank[key]:.{digits}f}" == text, key
    assert rank["reliable"]
    assert not rank["notes"]


@needs_traces
@pytest.mark.parametrize("name", OTHERS)
def test_other_real_traces_have_plausible_figures(name: str) -> None:
    rank = one(name)
    assert (rank["kernels"], rank["reliable"]) == OTHERS[name]
    assert 0 < rank["compute_us"] <= rank["span_us"]


@needs_traces
def test_generic_kernels_of_rocm_are_told_apart_by_annotations() -> None:
    rank = one("tracelens-mi300-resnet")
    assert {kind: part["kernels"] for kind, part in rank["by_kind"].items()} == {
        "data_parallel": 12, "other": 5,
    }  # fmt: skip
    assert [step["step"] for step in rank["steps"]] == [15, 16, 17]


@needs_traces
def test_two_real_ranks_split_wait_from_transfer() -> None:
    paths = [TRACES / f"hta-sampled_rank-{n}.json.gz" for n in (0, 1)]
    ranks = build_report(paths).figures["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    for rank in ranks:
        bounds(rank)
        waiting = rank["waiting"]
        assert waiting["kernels"] == 10
        assert waiting["wait_us"] + waiting["transfer_us"] == rank["comm_us"]  # none overlap
        assert 0 <= waiting["wait_us"] <= rank["comm_us"]


@needs_traces
def test_pieces_give_the_answer_of_the_whole_file(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = one("hta-sampled_rank-1")
    monkeypatch.setattr(reading, "_BLOCK_BYTES", 50_000)
    assert one("hta-sampled_rank-1") == whole


def test_the_demo_trace_is_what_its_script_makes() -> None:
    path = Path(reading.__file__).with_name("demo.json.gz")
    assert path.stat().st_size < 100_000
    assert gzip.decompress(path.read_bytes()) == demo_bytes()
    (rank,) = build_report([path]).figures["ranks"]
    bounds(rank)
    assert {"ep_dispatch", "ep_combine", "page", "data_parallel"} == set(rank["by_kind"])
    assert set(rank["by_layer"]) == {"0", "1", "2"}


def _benchmark() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "report_speed.py"
    spec = importlib.util.spec_from_file_location("report_speed", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_large_trace_is_quick_and_memory_bounded(tmp_path: Path) -> None:
    # N12.  The same trace twice as long needs about the same memory; 250 MB: the script itself.
    module = _benchmark()
    peaks = []
    for mb in (25, 50):
        path = tmp_path / f"{mb}.json"
        module.write_trace(path, mb * 1_000_000)
        seconds, peak, code = module.measure(path)
        assert code == 0
        assert seconds < 10  # 1.2 s on an idle machine; tests share theirs
        peaks.append(peak)
    assert peaks[1] < 400
    assert peaks[1] - peaks[0] < 40
