"""The whole benchmark on a CPU: arms in turn, verdicts, files, exit codes, several processes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from small_runs import small_world

from interlace.cli import main
from interlace.kernels import grouped_mm as grouped_mm_module
from interlace.measure import bench_arms
from interlace.measure.bench import bench
from interlace.measure.bench_plan import Cell
from interlace.measure.bench_request import DEFAULT_ARMS, Request, read_arms, read_settings

SIZE = (
    "--model.num_layers 1 --model.dim 32 --model.expert_hidden_dim 32 --training.seq_len 16 "
    "--training.local_batch_size 4 --data.source random"
).split()
LOOPBACK = ["qwen3-tiny", "--ep.transport", "loopback", *SIZE]
PROMISED = {
    "arm": str, "budget": int, "ms": float, "ms_p10": float, "ms_p90": float,
    "tokens_per_s": float, "mfu_percent": None, "equal": bool, "exposed_ms": None,
    "hidden_share": None, "exchange_ms": None, "peak_memory_gib": None, "clock_mhz": None,
    "power_w": None, "gain": float, "over_bound": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlace.measure.bench_timing._SAMPLE_SECONDS", 0.001)


@pytest.fixture
def figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Default arms with two budgets, by the command itself."""
    out, page = tmp_path / "b.json", tmp_path / "b.html"
    flags = ["--budgets", "1,8", "--rounds", "3", "--json", str(out), "--html", str(page)]
    assert main(["bench", *LOOPBACK, *flags]) == 0
    assert "<svg" in page.read_text()
    return json.loads(out.read_text()) | {"printed": capsys.readouterr().out}


def test_json_and_text_have_the_promised_shape(figures: dict[str, Any]) -> None:
    assert figures["preset"] == "qwen3-tiny"
    assert figures["settings"]["ep.transport"] == "loopback"
    assert "model.top_k" not in figures["settings"]
    assert figures["transport"] == "loopback"
    assert figures["torch"] == torch.__version__
    assert figures["machine"].startswith("CPU")
    assert (figures["tokens"], figures["rounds"]) == (64, 3)
    found = [(arm["arm"], arm["budget"], arm["equal"], arm["against"]) for arm in figures["arms"]]
    assert found == [
        ("control", 1, True, "eager"),
        ("control", 8, True, "eager"),
        ("scheduled", 1, True, "control"),
        ("scheduled", 8, True, "control"),
        ("chunk-scheduled", 1, True, "chunk-eager"),
        ("chunk-scheduled", 8, True, "chunk-eager"),
    ]
    for arm in figures["arms"]:
        for name, kind in PROMISED.items():
            assert arm[name] is None if kind is None else type(arm[name]) is kind, name
        assert arm["ms_p10"] <= arm["ms"] <= arm["ms_p90"]
        assert arm["tokens_per_s"] == pytest.approx(64e3 / arm["ms"], rel=0.01)
    assert [arm["gain"] for arm in figures["arms"][:2]] == [1.0, 1.0]
    assert [x["arm"] for x in figures["left_out"]] == [
        *("captured", "scheduled-captured", "chunk-captured")
    ]
    assert [bound["budget"] for bound in figures["ceilings"]] == [1, 8]
    assert all(bound["compute_only_ms"] > 0 for bound in figures["ceilings"])
    assert "With 8 CTAs, " in figures["recommendation"]
    for text in (
        "loopback: one process stands for all expert-parallel ranks",
        "not measured on a CPU",
        "left out captured: a CUDA graph needs a CUDA device",
        "overlap.chunks=1 here: chunked arms take two chunks of layers.*.moe",
        "a budget of CTAs changes nothing on a CPU",
        figures["recommendation"],
    ):
        assert text in figures["printed"]


def _request(*sweeps: str, arms: str, flags: list[str], rounds: int = 1) -> Request:
    settings, refused = read_settings(flags, sweeps, 1)
    return Request(*read_arms(arms), (), settings, rounds=rounds, refused=refused)


def _run(request: Request, path: Path) -> tuple[bool, dict[str, Any]]:
    good = bench(replace(request, json=path), small_loopback())
    return good, json.loads(path.read_text())


def small_loopback() -> Any:
    return replace(small_world(), ep_size=2, loopback=True)


@pytest.mark.slow
def test_two_runs_differ_in_times_alone(tmp_path: Path) -> None:
    request = _request(arms="control,scheduled", flags=[*LOOPBACK, "--ep.padded"], rounds=2)
    first, second = (_run(request, tmp_path / f"{n}.json")[1] for n in range(2))
    timed = {"ms", "ms_p10", "ms_p90", "tokens_per_s", "gain", "gain_p10", "gain_p90"}
    for one, other in zip(first["arms"], second["arms"], strict=True):
        assert list(one) == list(other)
        assert {k: v for k, v in one.items() if k not in timed} == {
            k: v for k, v in other.items() if k not in timed
        }
    different = ("arms", "ceilings", "recommendation")
    assert {k: v for k, v in first.items() if k not in different} == {
        k: v for k, v in second.items() if k not in different
    }


def test_an_arm_that_gives_other_bits_is_named_and_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bit of one expert's gradient, in the scheduled arm only."""
    real, name = bench_arms.build_arm, "layers.0.moe.experts.w2"

    def faulty(arm, *args):
        run, traced = real(arm, *args)
        if arm.name != "scheduled":
            return run, traced

        def broken(batch):
            result = run(batch)
            bits = result.grads[name].clone().view(torch.int32)
            bits[1, 2, 3] ^= 1
            return replace(result, grads={**result.grads, name: bits.view(torch.float32)})

        return broken, traced

    monkeypatch.setattr(bench_arms, "build_arm", faulty)
    good, found = _run(_request(arms="control,scheduled", flags=LOOPBACK), tmp_path / "b.json")
    assert not good
    control, scheduled = found["arms"]
    assert (control["equal"], scheduled["equal"]) == (True, False)
    assert (scheduled["against"], scheduled["differs_in"]) == ("control", name)
    printed = capsys.readouterr()
    assert f"DIFFERS: {name}" in printed.out
    assert printed.err.strip() == (
        f"interlace bench: scheduled gave other bits than control in {name}: its speed counts for "
        f"nothing until that is understood."
    )


@pytest.mark.slow
def test_the_gate_fails_the_command_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = _request(arms="scheduled", flags=LOOPBACK)
    assert not _run(replace(request, min_gain=500.0), tmp_path / "b.json")[0]
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert "less than --min-gain 500" in printed.err
    assert "control was added" in printed.out


@pytest.mark.slow
def test_each_setting_of_the_exchange_has_its_own_control_and_ceiling(tmp_path: Path) -> None:
    flags = [*LOOPBACK, "--ep.padded", "--model.routing", "balanced"]
    request = _request("ep.capacity_factor=1.0,2.0", arms="control,chunk-graph", flags=flags)
    good, found = _run(request, tmp_path / "b.json")
    assert good
    factors = [(a["arm"], a["setting"]["ep.capacity_factor"], a["gain"]) for a in found["arms"]]
    assert [x[:2] for x in factors] == [
        ("control", 1.0), ("control", 2.0), ("chunk-graph", 1.0), ("chunk-graph", 2.0),
    ]  # fmt: skip
    assert [x[2] for x in factors[:2]] == [1.0, 1.0]
    assert [c["setting"]["ep.capacity_factor"] for c in found["ceilings"]] == [1.0, 2.0]


def test_a_batch_that_overflows_is_refused(tmp_path: Path) -> None:
    flags = [*LOOPBACK, "--ep.padded", "--ep.capacity_factor", "1.0"]
    request = _request(arms="control", flags=flags)
    with pytest.raises(ValueError, match=r"control: a rank had .* Use ep.capacity_factor=.*none"):
        _run(request, tmp_path / "b.json")


@pytest.mark.slow
def test_one_expert_parallel_rank_has_nothing_to_hide(tmp_path: Path) -> None:
    flags = [*LOOPBACK, "--parallelism.expert_parallel_degree", "1"]
    path = tmp_path / "b.json"
    request = replace(_request(arms="control,scheduled", flags=flags), json=path)
    assert bench(request, small_world())
    found = json.loads(path.read_text())
    assert found["transport"] == "none"
    assert found["ceilings"][0]["compute_only_ms"] is None
    assert found["recommendation"].startswith("Leave overlap off: with one expert-parallel rank")


@pytest.mark.slow
def test_an_update_leaves_the_weights_and_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a learning rate of 0 every arm goes on with the weights of the first."""
    opened = []
    real = bench_arms.open_workbench

    def opening(*args, **kwargs):
        opened.append(real(*args, **kwargs))
        before.update({n: p.clone() for n, p in opened[0].step.model.named_parameters()})
        return opened[0]

    before: dict[str, torch.Tensor] = {}
    monkeypatch.setattr("interlace.measure.bench.open_workbench", opening)
    request = replace(_request(arms="control,scheduled", flags=LOOPBACK), optimizer=True)
    good, found = _run(request, tmp_path / "b.json")
    assert good
    assert found["optimizer"]
    assert found["ceilings"][0]["compute_only_ms"] is None
    after = dict(opened[0].step.model.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n].view(torch.int32), p.view(torch.int32))
               for n, p in after.items())  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--arms", "captured"], "captured cannot run here: a CUDA graph needs a CUDA device"),
        (["--arms", "controll"], "did you mean control?"),
        (["--sweep", "training.seq_len=8"], "cannot be swept"),
        (["--budgets", "0"], "is no whole number from 1 to 132"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_built(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *LOOPBACK, *flags]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert "building" not in printed.out


def _on_two(rank: int, size: int, path: str, fault: bool, backend: str = "alltoall") -> bool:
    from interlace.measure import bench_timing

    bench_timing._SAMPLE_SECONDS = 0.001
    torch.set_num_threads(1)
    flags = ["qwen3-tiny", *SIZE, "--ep.padded", "--ep.backend", backend]
    request = Request(
        *read_arms("control" if fault else "control,chunk-scheduled"), (),
        read_settings(flags, [], size)[0], rounds=2, json=Path(path),
    )  # fmt: skip
    real = bench_arms.build_arm
    if fault and rank == 1:  # the other rank has to learn of it

        def faulty(arm, *args):
            run, traced = real(arm, *args)
            if arm.name != "control":
                return run, traced

            def broken(batch):
                result = run(batch)  # once: it is a collective
                return replace(result, loss=result.loss + 1)

            return broken, traced

        bench_arms.build_arm = faulty
    try:
        return bench(request, small_world(rank, size, degree=2))
    finally:
        bench_arms.build_arm = real


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["alltoall", "minimal_async", "hybridep"])
def test_two_processes_agree_on_times_and_verdicts(
    two_ranks: Ranks, tmp_path: Path, backend: str
) -> None:
    path = tmp_path / "b.json"
    assert two_ranks.run(_on_two, str(path), False, backend) == [True, True]
    found = json.loads(path.read_text())
    assert (found["transport"], found["world_size"]) == ("gloo", 2)
    assert [arm["equal"] for arm in found["arms"]] == [True, True]
    assert found["ceilings"][0]["compute_only_ms"] > 0


def _rows_computed(rank: int, size: int, backend: str) -> list[tuple[int, int]]:
    """Live rows of this rank's experts by layer, in the control and in its ceiling."""
    torch.set_num_threads(1)
    flags = ["qwen3-tiny", *SIZE, "--ep.padded", "--ep.backend", backend]
    (setting,), _ = read_settings([*flags, "--model.routing", "skewed:1.2"], [], size)
    world = small_world(rank, size, degree=2)
    bench = bench_arms.open_workbench(
        setting.config, world, ("control",), lambda what: nullcontext(), optimizer=False
    )
    cell = Cell("control", (), None, setting.config)
    rows: list[int] = []
    real = grouped_mm_module._mm

    def counted(x, w, ends):
        rows.append(int(ends[-1]))
        return real(x, w, ends)

    library = torch.library.Library("interlace", "IMPL")
    library.impl("grouped_mm", counted, "CPU", allow_override=True)
    found = []
    for run in (bench.build(cell).run, bench.build_compute_only(cell, captured=False).run):
        rows.clear()
        run()
        found.append(tuple(rows))
    bench.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["alltoall", "minimal_async"])
def test_the_ceiling_computes_what_the_control_computes(two_ranks: Ranks, backend: str) -> None:
    """Skewed routing: each rank has the rows of its own experts, sent or not."""
    ranks = two_ranks.run(_rows_computed, backend)
    assert ranks[0][0] != ranks[1][0]
    for control, ceiling in ranks:
        assert control == ceiling


@pytest.mark.slow
def test_what_differs_on_one_rank_fails_all(two_ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    assert two_ranks.run(_on_two, str(path), True) == [False, False]
    (control,) = json.loads(path.read_text())["arms"]
    assert (control["equal"], control["differs_in"]) == (False, "loss")


@pytest.mark.gpu
def test_captured_arms_on_a_gpu(tmp_path: Path) -> None:
    """Exposure is measured, captured kernels have layer and kind, every arm has its bits."""
    out, traces = tmp_path / "b.json", tmp_path / "traces"
    flags = (
        "--training.device cuda --training.dtype bfloat16 --training.seq_len 256 --model.dim 256 "
        "--ep.padded --ep.capacity_factor 1.0 --model.routing balanced --budgets 1,8 --rounds 2"
    )
    files = ["--json", str(out), "--trace", str(traces)]
    assert main(["bench", *LOOPBACK, *flags.split(), *files]) == 0
    found = json.loads(out.read_text())
    assert [(a["arm"], a["budget"]) for a in found["arms"]] == [
        (arm, budget) for arm in DEFAULT_ARMS for budget in (1, 8)
    ]
    moves = {}
    for arm in found["arms"]:
        assert arm["equal"] is True, arm
        assert 0 <= arm["exposed_ms"] <= arm["exchange_ms"] * 1.0001
        assert 0 <= arm["hidden_share"] <= 1
        assert arm["peak_memory_gib"] > 0
        assert arm["over_bound"] > 0
        moves[arm["arm"], arm["budget"]] = arm["exchange_ms"]
        if "captured" in arm["arm"]:
            assert set(arm["exposed_by_kind"]) <= {"ep_dispatch", "ep_combine", "ep_plan"}
            assert set(arm["exposed_by_layer"]) == {"0"}
    assert moves["captured", 1] > 1.5 * moves["captured", 8]  # a budget is what it says
    assert all(bound["compute_only_ms"] > 0 for bound in found["ceilings"])
    kept = sorted(path.name for path in traces.iterdir())
    assert "captured_8_CTAs.rank0.json.gz" in kept
    captured = [arm for arm in DEFAULT_ARMS if "captured" in arm]
    assert sum(".named." in name for name in kept) == len(captured)  # for all budgets
