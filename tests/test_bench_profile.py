"""Exposed time of a benchmark's profiles: traces by hand, and the named ranges of a real graph."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from small_traces import GEMM, kernel, launch, said, trace, write

from interlace.graph.comm import comm_of
from interlace.graph.tag import tag_of
from interlace.measure.bench_arms import Ready, Workbench, open_workbench
from interlace.measure.bench_plan import Cell
from interlace.measure.bench_profile import (
    exposure_of,
    profile_runs,
    range_name,
    run_annotated,
)
from interlace.train.config_read import load_config
from interlace.train.world import init_world

COPY, PUSH, AWAIT = "bounded_copy", "push_rows_kernel(Params)", "ep_signal_rows"
FLAGS = [
    "dsv3-tiny",
    *("--ep.transport", "loopback", "--model.num_layers", "2", "--model.dim", "32"),
    *("--training.seq_len", "16", "--training.local_batch_size", "4", "--data.source", "random"),
]


def _replay(begin: float, corr: int) -> list[dict[str, Any]]:
    """9 products of 10 us, every 20 us.  The copy [5, 15) is bare for 5 us, the push [100, 130)
    between two products for 10 us, the wait [130, 132) for all of its 2 us.

    Exchange 10 + 30 + 2 = 42, exposed 5 + 10 + 2 = 17, compute 90 us.
    """
    events = [kernel(GEMM, begin + 20 * n, 10, corr=corr) for n in range(9)]
    events += [
        kernel(COPY, begin + 5, 10, 20, corr), kernel(PUSH, begin + 100, 30, 20, corr),
        kernel(AWAIT, begin + 130, 2, 20, corr),
    ]  # fmt: skip
    return [launch(corr, begin - 50, "cudaGraphLaunch"), *events]


def _named() -> list[dict[str, Any]]:
    """The same kernels, launched one by one inside ranges as run_annotated opens them."""
    events: list[dict[str, Any]] = []
    place = itertools.count(1)

    def one(name: str, text: str, stream: int = 7) -> None:
        n = next(place)
        events.extend([
            said(text, 10 * n, 10 * n + 5), launch(n, 10 * n + 1),
            kernel(name, 10 * n + 2, 5, stream, n),
        ])  # fmt: skip

    one(COPY, "layers.0.moe forward dispatch", 20)
    for layer in range(9):
        one(GEMM, f"layers.{layer}.moe forward")
    one(PUSH, "layers.1.moe backward combine part 1", 20)
    one(AWAIT, "layers.1.moe backward combine part 1", 20)
    return events


def test_figures_of_two_replays_are_those_of_one(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", trace([*_replay(1000, 1), *_replay(2000, 2)]))
    found = exposure_of(path)
    assert not found.doubts
    assert (found.exchange_ms, found.exposed_ms, found.compute_ms) == (0.042, 0.017, 0.090)
    assert found.hidden_share == pytest.approx(25 / 42, abs=1e-12)
    assert found.num_kernels == len(_replay(1000, 1)) - 1  # all but the launch
    assert found.exposed_by_layer == {}


def test_a_named_trace_gives_replays_their_layers_and_kinds(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", trace([*_replay(1000, 1), *_replay(2000, 2)]))
    found = exposure_of(path, annotated=write(tmp_path / "named.json", trace(_named())))
    assert (found.exchange_ms, found.exposed_ms, found.compute_ms) == (0.042, 0.017, 0.090)
    assert found.exposed_by_kind == {"ep_dispatch": 0.005, "ep_combine": 0.012}
    assert found.exposed_by_layer == {"0": 0.005, "1": 0.012}


def test_without_an_exchange_no_share_of_it_is_hidden(tmp_path: Path) -> None:
    only = [e for n in (1, 2) for e in _replay(1000 * n, n) if e["args"].get("stream") != 20]
    found = exposure_of(write(tmp_path / "a.json", trace(only)))
    assert (found.exchange_ms, found.exposed_ms, found.hidden_share) == (0, 0, None)


def test_lost_kernels_are_a_doubt(tmp_path: Path) -> None:
    lost = [*_replay(1000, 1), *_replay(2000, 2)[:-1]]
    found = exposure_of(write(tmp_path / "a.json", trace(lost)))
    assert any("graph replays differ in their kernels" in doubt for doubt in found.doubts)


def test_a_trace_without_kernels_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no GPU kernels"):
        exposure_of(write(tmp_path / "a.json", trace([launch(1, 0)])))


# --- the named ranges of a real step --------------------------------------------------------------


@pytest.fixture(scope="module")
def step() -> tuple[Workbench, Ready]:
    config = load_config(FLAGS)
    bench = open_workbench(
        config, init_world(config), ("control",), lambda what: nullcontext(), optimizer=False
    )
    return bench, bench.build(Cell("control", (), None, config))


@pytest.fixture(scope="module")
def profiled(step: tuple[Workbench, Ready], tmp_path_factory: pytest.TempPathFactory) -> dict:
    bench, arm = step
    path = tmp_path_factory.mktemp("named") / "cpu.json"
    profile_runs(lambda: run_annotated(arm.traced, bench.step, bench.batch), path, 1, ranges=True)
    return json.loads(path.read_text())


def test_ranges_follow_the_tags_of_the_graph(step: tuple[Workbench, Ready], profiled: dict) -> None:
    """Oracle: the graph's own nodes, neighbours of one name taken together."""
    nodes = step[1].traced.gm.graph.nodes
    expected = [name for name, _ in itertools.groupby(map(range_name, nodes)) if name]
    ranges = [e for e in profiled["traceEvents"] if e.get("cat") == "user_annotation"]
    ranges = sorted(ranges, key=lambda e: e["ts"])
    found = [e["name"] for e in ranges if not e["name"].startswith("ProfilerStep")]
    assert found == expected
    for name in ("layers.1.moe forward dispatch", "layers.1.moe backward combine", "step forward"):
        assert name in found


def test_the_report_names_every_exchange_of_a_captured_step(
    step: tuple[Workbench, Ready], profiled: dict, tmp_path: Path
) -> None:
    """A real named trace of a CPU; what a GPU would add is made up: for each operator a launch and
    a kernel of 2 us, an exchange on another stream, and two replays of the same kernels.

    Oracle: launches of the graph by layer and kind; none is hidden, so each exposes its 2 us.
    """
    events = list(profiled["traceEvents"])
    wanted = ("ep::dispatch_launch", "ep::combine_launch", "aten::mm")
    ops = [e for e in events if e.get("cat") == "cpu_op" and e["name"] in wanted]
    ops.sort(key=lambda e: e["ts"])
    kernels = []
    for number, op in enumerate(ops, 1):
        exchange = op["name"].endswith("_launch")
        name, stream = (COPY, 20) if exchange else (GEMM, 7)
        at = {"ts": op["ts"] + op["dur"] / 2, "pid": op["pid"], "tid": op["tid"]}
        events.append(launch(number, 0) | at)
        events.append(kernel(name, 0, 2, stream, number) | {"ts": op["ts"] + op["dur"]})
        kernels.append((name, stream))
    named = write(tmp_path / "named.json", profiled | {"traceEvents": events})
    replays = []
    for n in (1, 2):
        replays.append(launch(n, 10000 * n, "cudaGraphLaunch"))
        for place, (name, stream) in enumerate(kernels):
            replays.append(kernel(name, 10000 * n + 3 * place + 10, 2, stream, n))
    found = exposure_of(write(tmp_path / "a.json", trace(replays)), annotated=named)

    launches = [node for node in step[1].traced.gm.graph.nodes if comm_of(node)]
    kinds = Counter(f"ep_{comm_of(node).name}" for node in launches)
    layers = Counter(tag_of(node).layer.split(".")[1] for node in launches)
    assert kinds["ep_dispatch"] == kinds["ep_combine"] == 2  # one MoE layer, forward and backward
    assert found.exposed_by_kind == {kind: 0.002 * n for kind, n in kinds.items()}
    assert found.exposed_by_layer == {layer: 0.002 * n for layer, n in layers.items()}
    assert found.exchange_ms == found.exposed_ms == pytest.approx(0.002 * len(launches))
