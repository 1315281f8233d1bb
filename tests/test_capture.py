"""A whole step as one CUDA graph: every replay equals plain PyTorch, bitwise.

On a CPU a stand-in replays the graph by running it again into the same memory (tests/captures.py),
so that all but the graph itself is tested there.  (Field reports B7, K1, K3 to K6.)
"""

from __future__ import annotations

import gc
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from captures import FakeGraph, batch_of, fake_capture
from small_runs import run_steps, small_config, small_engine, small_world, snapshot, unequal

from interlace import capture as capture_module
from interlace.capture import (
    ByLayout,
    Captured,
    capture_step,
    check_addresses,
    close_all,
    set_allocator,
)
from interlace.model.batch import Batch
from interlace.trace import StepResult
from interlace.trace.refusals import check_layout, layout_of
from interlace.train import arms as arms_module
from interlace.train import loop, overflow, world
from interlace.train.arms import ARMS
from interlace.train.config_read import load_config
from interlace.train.data_open import open_evaluation_data
from interlace.train.engine import Engine, apply, build_engine, compute
from interlace.train.evaluate import evaluate
from interlace.train.loop import train, use_deterministic_kernels
from interlace.train.world import init_world


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms_module, "capture_step", fake_capture)


# --- refusals -------------------------------------------------------------------------------------


def test_without_cuda_capture_is_refused() -> None:
    with pytest.raises(ValueError, match=r"CUDA tensors, got cpu.*move the model and the batch"):
        capture_step(lambda batch: StepResult(batch[0], {}, {}), (torch.ones(1),))


def test_other_shapes_are_refused_by_both_numbers() -> None:
    held = layout_of((torch.ones(2, 3), torch.ones(4)))
    check_layout(held, (torch.zeros(2, 3), torch.zeros(4)), "capture")
    with pytest.raises(
        ValueError, match=r"captured for \(4,\) torch.float32 as input 1 and got \(5,"
    ):
        check_layout(held, (torch.zeros(2, 3), torch.zeros(5)), "capture")
    with pytest.raises(ValueError, match="captured for 2 inputs and got 1"):
        check_layout(held, (torch.zeros(2, 3),), "capture")


def test_exact_exchange_and_eager_mode_are_refused() -> None:
    from interlace.train.config_check import check

    with pytest.raises(ValueError, match=r"capture.enabled=true needs ep.padded=true"):
        check(load_config(["dsv3-tiny", "--capture.enabled"]), 2)
    flags = ["dsv3-tiny", "--capture.enabled", "--ep.padded", "--training.mode", "eager"]
    with pytest.raises(ValueError, match=r"needs training.mode=traced; got eager"):
        check(load_config(flags), 2)


def test_a_closed_step_says_so() -> None:
    closed = Captured(None, (), StepResult(torch.ones(1), {}, {}))
    closed.close()
    with pytest.raises(RuntimeError, match="has been closed"):
        closed(())


# --- captured, with a stand-in for the graph ------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "arm"),
    [
        ("dsv3-tiny", "captured"),
        pytest.param("dsv3-tiny", "chunk-captured", marks=pytest.mark.slow),
        pytest.param("qwen3-tiny", "chunk-captured", marks=pytest.mark.slow),
    ],
)
def test_replays_train_as_plain_pytorch_does(preset: str, arm: str, fake: None) -> None:
    """Field reports K3 to K5: five updates with other tokens and another learning rate each time,
    an evaluation between: losses, weights, moments, bias, counts."""
    config = small_config(
        preset, training__microbatches=3, ep__padded=True, training__mode="traced",
        overlap__chunk_root="layers.*", lr_scheduler__warmup_steps=3, evaluation__interval=1,
        evaluation__batches=1, model__balance_loss_weight=0.0 if ARMS[arm].chunked else 0.01,
    )  # fmt: skip
    captured = small_engine(config, arm=arm)
    plain = small_engine(config, arm="chunk-eager" if ARMS[arm].chunked else "eager")
    for _ in range(3):
        assert run_steps(captured, 2) == run_steps(plain, 2)
        evaluate(captured, captured.data, held_out=True)
    assert unequal(snapshot(captured), snapshot(plain)) == []


def test_what_a_replay_returns_small_stays(fake: None) -> None:
    """A step that is left out must not change the load of the last update, which prices read."""
    config = small_config(
        ep__padded=True, training__mode="traced", training__nonfinite="skip",
        model__balance_loss_weight=0.01,
    )  # fmt: skip
    engine = small_engine(config, arm="captured")
    run_steps(engine, 1)
    load = engine.progress.load_LE.clone()
    with torch.no_grad():
        engine.model.head.weight[0, 0] = float("nan")
    run_steps(engine, 1)
    assert engine.progress.skipped == 1
    assert torch.equal(engine.progress.load_LE, load)


def test_a_parameter_that_moved_is_an_error(fake: None) -> None:
    """Field report K3: weights that are loaded between two replays."""
    engine = small_engine(small_config(ep__padded=True, training__mode="traced"), arm="captured")
    run_steps(engine, 1)
    state = {n: x.clone() for n, x in engine.model.state_dict().items()}
    engine.model.load_state_dict(state)  # copies: fine
    run_steps(engine, 1)
    engine.model.norm.weight.data = engine.model.norm.weight.data.clone()
    with pytest.raises(ValueError, match=r"norm\.weight \(1 in all\) was moved since the step was"):
        run_steps(engine, 1)
    engine.model.load_state_dict(state, assign=True)
    with pytest.raises(ValueError, match=r"in all\) was moved"):
        run_steps(engine, 1)
    with pytest.raises(ValueError, match=r"b \(1 in all\)"):
        check_addresses({"a": 1, "b": 2}, {"a": _at(1)})


def _at(address: int) -> Any:
    class Place:
        def data_ptr(self) -> int:
            return address

    return Place()


# --- other shapes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", [pytest.param("control", marks=pytest.mark.slow), "captured"])
def test_other_lengths_are_traced_and_captured_again(arm: str, fake: None) -> None:
    """Field report B7: lengths 8, 9, 8, 12, 9; never a stale graph, and no more than two kept."""
    engine = small_engine(small_config(ep__padded=True, training__microbatches=2), arm=arm)
    plain = small_engine(small_config(training__microbatches=2))
    kept = engine.runner.by_layout.kept
    for length in (8, 9, 8, 12, 9):
        *tensors, number = batch_of(engine, 0)
        cut = tuple(x[:, :length].contiguous() for x in tensors[:3])
        batch = (*cut, tensors[3].clamp(max=length), number)
        actual, expected = engine.forward_backward(batch), plain.forward_backward(batch)
        assert torch.equal(actual.loss, expected.loss), length
        for name, grad in expected.grads.items():
            assert torch.equal(actual.grads[name], grad), (length, name)
        assert len(kept) <= 2
    assert [layout[0][0][1] for layout in kept] == [12, 9]


def test_the_least_used_is_closed_before_another_is_built() -> None:
    events: list[str] = []

    def build(batch):
        events.append(f"build {len(batch[0])}")
        graph = FakeGraph(run, batch, run(batch))
        graph.log = events
        return Captured(graph, tuple(x.clone() for x in batch), graph.result)  # type: ignore[arg-type]

    def run(batch):
        return StepResult(batch[0].sum(), {}, {})

    step = ByLayout(build, limit=2)
    for length in (1, 2, 1, 3, 2):
        step((torch.ones(length),))
    assert events == ["build 1", "build 2", "graph", "build 3", "graph", "build 2"]
    step.close()
    assert events[-2:] == ["graph", "graph"]
    assert not step.kept


# --- the end --------------------------------------------------------------------------------------


def train_config(folder: Path, **changes: Any) -> Any:
    return small_config(
        ep__padded=True, training__mode="traced", training__steps=3, capture__enabled=True,
        overlap__scheduler="off", metrics__folder=str(folder), metrics__log_freq=100, **changes,
    )  # fmt: skip


def events_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens at the end, in order: graphs, windows, groups."""
    events: list[str] = []
    plain = Captured.close

    def close(self: Captured, *, wait: bool = True) -> None:
        if self.graph is not None:
            events.append("graph" if wait else "graph, at once")
        plain(self, wait=wait)

    monkeypatch.setattr(Captured, "close", close)
    monkeypatch.setattr(world, "close_windows", lambda: events.append("windows"))
    monkeypatch.setattr(world, "drop_group", lambda name: events.append(f"group {name}"))
    monkeypatch.setattr(
        "torch.distributed.destroy_process_group", lambda: events.append("process groups")
    )
    return events


def leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command does last, as one of two ranks."""
    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.is_initialized", lambda: True)
        world.close_world(replace(small_world(), size=2))


END = ["windows", "group ep", "process groups"]


def test_graphs_go_before_windows_and_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: None
) -> None:
    """Field report K6: at a normal end, after SIGTERM, and at once after an error."""
    close_all()
    events, one = events_of(monkeypatch), small_world()
    train(train_config(tmp_path / "normal"), one)
    leave(monkeypatch)
    assert events == ["graph", *END]

    events.clear()
    plain = loop.compute

    def asked(engine, step):
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(engine, step)

    monkeypatch.setattr(loop, "compute", asked)
    train(train_config(tmp_path / "stopped", checkpoint__enabled=True), one)
    leave(monkeypatch)
    assert events == ["graph", *END]

    events.clear()
    monkeypatch.setattr(loop, "compute", lambda engine, step: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(train_config(tmp_path / "broken"), one)
    assert events == ["graph, at once"]


def test_a_forgotten_graph_goes_with_the_groups(
    monkeypatch: pytest.MonkeyPatch, fake: None
) -> None:
    close_all()
    events = events_of(monkeypatch)
    engine = small_engine(small_config(ep__padded=True, training__mode="traced"), arm="captured")
    leave(monkeypatch)
    assert events == ["graph", *END]
    with pytest.raises(RuntimeError, match="has been closed"):
        run_steps(engine, 1)


# --- the allocator --------------------------------------------------------------------------------

REUSE = "graph_capture_record_stream_reuse"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": f"{REUSE}:True"}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:True,{REUSE}:True"},
        ),
        (
            {"PYTORCH_ALLOC_CONF": "a:1,", "PYTORCH_CUDA_ALLOC_CONF": f"{REUSE}:False"},
            {
                "PYTORCH_ALLOC_CONF": f"a:1,{REUSE}:True",
                "PYTORCH_CUDA_ALLOC_CONF": f"{REUSE}:False",
            },
        ),
        (
            {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"},
            {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"},
        ),
    ],
)  # fmt: skip
def test_the_allocator_keeps_what_the_user_set(given: dict, expected: dict) -> None:
    """The other variable stays unset where the user set one: it might hide the user's."""
    variables = dict(given)
    text = set_allocator(variables)
    assert variables == expected
    assert text == " ".join(f"{name}={value}" for name, value in sorted(expected.items()))
    assert set_allocator(variables) == text


# --- one GPU --------------------------------------------------------------------------------------


class Routings:
    """Data whose routing is another in every step: random, one token everywhere, two tokens."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def rows(self, step: int, **where: int) -> Batch:
        batch = self.data.rows(step, **where)
        tokens = batch.tokens_BS
        if step % 3 == 1:
            tokens = torch.full_like(tokens, step % 256)
        if step % 3 == 2:
            tokens = tokens % 2
        return replace(batch, tokens_BS=tokens)


def gpu_engine(preset: str, arm: str, *flags: str) -> Engine:
    config = load_config(
        [
            preset, "--ep.transport", "loopback", "--ep.padded", "--training.device", "cuda",
            "--training.dtype", "bfloat16", "--training.local_batch_size", "12",
            "--training.microbatches", "3", "--training.seq_len", "64", "--data.source", "random",
            "--data.max_documents", "2", "--overlap.chunks", "2", "--overlap.chunk_root",
            "layers.*", "--evaluation.interval", "1", "--evaluation.batches", "1",
            "--lr_scheduler.warmup_steps", "4", *flags,
        ]
    )  # fmt: skip
    engine = build_engine(config, init_world(config), ARMS[arm])
    return replace(engine, data=Routings(engine.data))


def check_replays(preset: str, arm: str, steps: int) -> None:
    """Three microbatches in one graph, AdamW between replays, evaluations, collection, an emptied
    cache: every loss, norm and gradient, and the weights at the end, against the reference arm."""
    use_deterministic_kernels(warn_only=False)
    try:
        plain = "chunk-eager" if ARMS[arm].chunked else "eager"
        pair = [gpu_engine(preset, name) for name in (arm, plain)]
        held = open_evaluation_data(pair[0].config, pair[0].data.data)
        for step in range(steps):
            mine, theirs = (compute(engine, step) for engine in pair)
            assert torch.equal(mine.loss, theirs.loss), step
            assert torch.equal(mine.grad_norm, theirs.grad_norm), step
            assert torch.equal(mine.counts_LE, theirs.counts_LE), step
            for name, grad in theirs.grads.items():
                assert torch.equal(mine.grads[name], grad), (step, name)
            if step % 4 == 0:  # and a replay of the same
                mine, theirs = (compute(engine, step) for engine in pair)
            for outcome, engine in zip((mine, theirs), pair, strict=True):
                assert apply(engine, outcome, step) is not None
            del mine, theirs, outcome, grad
            if step % 4 == 1:
                losses = [evaluate(e, held[0], held_out=held[1]).loss for e in pair]
                assert losses[0] == losses[1]
            if step % 4 == 3:
                gc.collect()
                torch.cuda.empty_cache()
        assert unequal(snapshot(pair[0]), snapshot(pair[1])) == []
        for engine in pair:
            engine.close()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("arm", ["captured", "chunk-captured"])
@pytest.mark.parametrize("preset", ["dsv3-tiny", "qwen3-tiny"])
def test_replays_equal_plain_pytorch(preset: str, arm: str) -> None:
    """Field reports K3 to K5: ten replays with another routing and learning rate each."""
    check_replays(preset, arm, 10)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("preset", ["dsv3-tiny", "qwen3-tiny"])
def test_two_hundred_replays(preset: str) -> None:
    """Field report K1."""
    check_replays(preset, "chunk-captured", 200)


@pytest.mark.gpu
def test_random_numbers_go_on_as_without_a_graph() -> None:
    """Oracle: the same draws without capture; the default generator and one of our own."""
    own = torch.Generator("cuda")

    def run(batch):
        (x,) = batch
        kept = torch.nn.functional.dropout(x, 0.5)
        noise = torch.rand(x.shape, device=x.device, generator=own)
        return StepResult((kept * noise).sum(), {"x": kept + noise}, {})

    def start() -> None:
        torch.manual_seed(5)
        own.manual_seed(6)

    x = torch.ones(1000, device="cuda")
    start()
    expected = [run((x,)).grads["x"].clone() for _ in range(5)]
    start()
    captured = capture_step(run, (x,), generators=(own,))
    actual = [captured((x,)).grads["x"].clone() for _ in range(5)]
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
    state = capture_module.random_state(x.device, (own,))
    again = captured((x,)).grads["x"].clone()
    capture_module.set_random_state(x.device, state, (own,))
    assert torch.equal(captured((x,)).grads["x"], again)  # as a step that is done again needs it
    captured.close()


@pytest.mark.gpu
def test_a_captured_step_is_done_again_with_more_room() -> None:
    """Captured again in the middle of a run; bitwise the run that had the room from the start."""
    use_deterministic_kernels(warn_only=False)
    try:
        redo = ("--ep.capacity_factor", "1.0", "--ep.overflow", "redo")
        small = gpu_engine("dsv3-tiny", "captured", *redo)
        losses = run_steps(small, 1)
        factor = overflow.exchange_of(small.model).capacity_factor
        assert factor != 1.0
        large = gpu_engine("dsv3-tiny", "captured", "--ep.capacity_factor", str(factor).lower())
        assert losses == run_steps(large, 1)
        assert unequal(snapshot(small), snapshot(large)) == []
        run_steps(small, 2)  # one token everywhere, then two: more room still
        assert small.progress.updates == 3
        small.close()
        large.close()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_one_graph_holds_no_second_set_of_gradients() -> None:
    """Three microbatches need the memory of one, the sums in float32 beside, and little more."""
    peaks = []
    for microbatches in ("1", "3"):
        rows = str(4 * int(microbatches))
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine = gpu_engine(
            "dsv3-tiny", "captured", "--training.microbatches", microbatches,
            "--training.local_batch_size", rows, "--model.dim", "512",
            "--model.expert_hidden_dim", "1024",
        )  # fmt: skip
        run_steps(engine, 2)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        num_bytes = sum(4 * p.numel() for p in engine.model.parameters())
        engine.close()
        del engine
    assert peaks[1] - peaks[0] < 0.8 * num_bytes  # 4 bytes a parameter more, 2 less
