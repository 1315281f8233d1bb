"""Field reports B2, E6, E7, E8 and F7 were met in pipelines, C4 in paging, which this trainer does
not have yet.  What has the same shape here: microbatches that add up, layers without experts behind
those that have them, settings that nobody offers, memory that an exchange holds.

Oracle of gradients: plain PyTorch over the whole batch in one piece, with torch's own mean over the
labels and the balance loss written out from its definition; no engine, no divisor of ours.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captures import batch_of
from small_runs import ROWS, SEQ_LEN, run_steps, small_config, small_engine, small_world
from torch import Tensor

from interlace.cli import main
from interlace.ep import pending
from interlace.model import build_model
from interlace.model.batch import IGNORED, Batch
from interlace.model.transformer import Block, MoETransformer
from interlace.train import engine as engine_module
from interlace.train.arms import ARMS as EVERY_ARM
from interlace.train.config import Config
from interlace.train.engine import Engine, Outcome, build_engine, compute

TOLERANCE = 1e-5  # of a gradient's largest element: float32 sums in another order
CHUNKS = {"overlap__chunks": 2, "overlap__chunk_dim": "sequence"}
SLOW = pytest.mark.slow


class ThirdIgnored:
    """Data of which a third of the labels is ignored: all of the first quarter of the rows, the
    rest here and there.  No two quarters have the same number of labels, and one has none."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def rows(self, step: int, **where: int) -> Batch:
        batch = self.data.rows(step, **where)
        labels = batch.labels_BS.clone()
        quarter = ROWS // 4
        labels[:quarter] = IGNORED
        labels[quarter, 1:9] = IGNORED
        labels[2 * quarter, 2:6] = IGNORED
        return replace(batch, labels_BS=labels)


def engine_of(config: Config, arm: str) -> Engine:
    engine = small_engine(config, arm=arm)
    return replace(engine, data=ThirdIgnored(engine.data))


def accumulated(microbatches: int, arm: str, **changes: Any) -> Engine:
    """Three layers, the first of them dense."""
    usual = {"training__microbatches": microbatches, "model__num_layers": 3}
    chunks = CHUNKS if "chunk" in arm else {}
    return engine_of(small_config(**usual | chunks | changes), arm)


def in_one_piece(engine: Engine, step: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """The oracle: loss and gradients of the whole batch, as anybody would write it in PyTorch."""
    model, weight = engine.model, engine.config.model.balance_loss_weight
    tokens, labels, positions, bounds, _ = batch_of(engine, step)
    with routers_watched(model) as inputs:
        hidden, _ = model(tokens, positions, bounds)
    loss = F.cross_entropy(
        model.logits(hidden).flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED
    )
    live = positions.flatten() >= 0
    routers = [layer.moe.router for layer in model.layers if layer.is_moe]
    for index, (router, x_TD) in enumerate(zip(routers, inputs, strict=True)):
        if not weight:
            break
        scores_TE = (x_TD @ router.gate.t()).sigmoid()
        share_E = (scores_TE / scores_TE.sum(-1, keepdim=True))[live].mean(0)
        load_E = engine.progress.load_LE[index].float()
        loss = loss + weight * len(load_E) * (load_E / load_E.sum() * share_E).sum()
    names, leaves = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, leaves)
    return loss.detach(), dict(zip(names, grads, strict=True))


@contextmanager
def routers_watched(model: MoETransformer) -> Iterator[list[Tensor]]:
    """Collects what each router is given, by layer."""
    inputs: list[Tensor] = []
    hooks = [
        layer.moe.router.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        for layer in model.layers
        if layer.is_moe
    ]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def check(outcome: Outcome, loss: Tensor, grads: dict[str, Tensor]) -> None:
    torch.testing.assert_close(outcome.loss, loss, rtol=1e-6, atol=0)
    assert outcome.grads.keys() == grads.keys()
    for name, wanted in grads.items():
        error = (outcome.grads[name] - wanted).abs().max() / wanted.abs().max()
        assert error < TOLERANCE, f"{name}: {error:.2e}"


# --- accumulation ---------------------------------------------------------------------------------

TRACED = pytest.param("control", marks=SLOW)
ARMS = ["eager", "chunk-eager", TRACED]


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("arm", [*ARMS, pytest.param("chunk-graph", marks=SLOW)])
def test_accumulated_gradients_are_those_of_one_piece(arm: str, microbatches: int) -> None:
    """Field reports E6 and E7: earlier sums are not scaled again, and the divisor is the number of
    labels of the whole step, before the backward."""
    engine = accumulated(microbatches, arm)
    labels = batch_of(engine, 0)[1]
    by_quarter = (labels != IGNORED).view(4, -1).sum(1)
    assert len(set(by_quarter.tolist())) == 4
    assert by_quarter.sum() == ROWS * SEQ_LEN * 2 / 3
    outcome = compute(engine, 0)
    assert outcome.num_valid == by_quarter.sum()
    check(outcome, *in_one_piece(engine))


@pytest.mark.parametrize("arm", ["eager", TRACED])
def test_every_layer_is_scaled_once(arm: str) -> None:
    """Field report E8: gradient of four microbatches over that of one, layer by layer."""
    one, four = (compute(accumulated(parts, arm), 0).grads for parts in (1, 4))
    for prefix in ("embedding", "layers.0", "layers.1", "layers.2", "head"):
        names = [n for n in one if n.startswith(f"{prefix}.")]
        a, b = (torch.cat([grads[n].flatten() for n in names]).double() for grads in (one, four))
        assert (a @ b / (a @ a)).item() == pytest.approx(1, abs=1e-5), prefix


# --- balance loss without experts in the last layers ----------------------------------------------


@pytest.fixture
def experts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of which the first layer alone has experts; the settings have them in the last."""

    def build(config: Any, exchange: Any) -> MoETransformer:
        model = build_model(config, exchange)
        dense = replace(config, num_dense_layers=config.num_layers)
        for index in range(1, config.num_layers):
            model.layers[index] = Block(dense, index, exchange)
        return model

    monkeypatch.setattr(engine_module, "build_model", build)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("arm", [*ARMS, pytest.param("chunk-graph", marks=SLOW)])
def test_a_balance_loss_far_from_the_main_loss(
    experts_first: None, arm: str, microbatches: int
) -> None:
    """Field report F7: dense layers follow the only router; its gradient has both losses, each by
    its own divisor, in the second step, when the load is known."""
    engine = accumulated(
        microbatches, arm, model__num_dense_layers=0, model__balance_loss_weight=0.5
    )
    assert [layer.is_moe for layer in engine.model.layers] == [True, False, False]
    run_steps(engine, 1)
    check(compute(engine, 1), *in_one_piece(engine, 1))


# --- what a step leaves in memory -----------------------------------------------------------------


@pytest.mark.parametrize("arm", ["eager", pytest.param("chunk-scheduled", marks=SLOW)])
def test_twenty_steps_leave_no_tensor_behind(arm: str) -> None:
    """Field report C4: sorting in the router, transposed views as consumers, and 20 steps."""
    config = small_config(training__microbatches=2, parallelism__expert_parallel_degree=2)
    engine = build_engine(config, replace(small_world(0, 1, 2), loopback=True), EVERY_ARM[arm])
    live = []
    for steps in (3, 17):
        run_steps(engine, steps)
        gc.collect()
        live.append(sum(issubclass(type(x), Tensor) for x in gc.get_objects()))
    assert live[0] == live[1]
    assert pending.num_in_flight() == 0


# --- settings that are not offered ----------------------------------------------------------------

# What a user would type, and what the one line must name.
NOT_OFFERED = [
    (["--parallelism.pipeline_parallel_degree", "2"], "parallelism.pipeline_parallel_degree"),
    (["--parallelism.pipeline-parallel-degree=2"], "parallelism.pipeline_parallel_degree"),
    (["--parallelism.pipeline_parallel_schedule=1F1B"], "parallelism.pipeline_parallel_schedule"),
    (["--pipeline.microbatches", "1"], "pipeline.microbatches"),
    (["--training.microbatches", "9"], "training.microbatches=9 equal parts; nearest: "),
    (["--overlap.chunks", "16"], "overlap.chunks=16 equal chunks; nearest: overlap.chunks=8"),
]
COMMANDS = ["train", "verify", "bench", "trace", "schedule"]


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*args: Any, **more: Any) -> int:
        raise AssertionError("processes were started")

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("interlace.cli.launch", start)
    monkeypatch.setattr("interlace.train.trace_command.trace_command", start)
    monkeypatch.setattr("interlace.train.schedule_command.schedule_command", start)


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command says before it ends with 2."""
    assert main(argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("interlace: error: ")
    assert said.err.count("\n") == 1
    return said.err


def folder_for(command: str, folder: Path) -> list[str]:
    return ["--out", str(folder / "out")] if command in ("trace", "schedule") else []


@pytest.mark.parametrize(("flags", "named"), NOT_OFFERED, ids=lambda v: str(v)[:60])
@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_not_offered_is_one_error(
    command: str,
    flags: list[str],
    named: str,
    nothing_starts: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Field report B2: fewer microbatches than stages hung; here stages cannot be asked for, nor
    more parts than there are rows, and every command says so before anything starts."""
    out = folder_for(command, tmp_path)
    assert named in refused([command, "dsv3-tiny", *flags, *out], capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_not_offered_in_a_file(
    command: str, nothing_starts: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text('preset = "dsv3-tiny"\n[parallelism]\npipeline_parallel_degree = 2\n')
    said = refused([command, str(path), *folder_for(command, tmp_path)], capsys)
    assert "unknown setting 'parallelism.pipeline_parallel_degree'" in said


DEGREE = "parallelism.pipeline_parallel_degree"


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["report", f"--{DEGREE}", "2"], f"unknown argument --{DEGREE}"),
        (["doctor", f"--{DEGREE}", "2"], f"unknown argument --{DEGREE}"),
        (["verify", "dsv3-tiny", "--arms", "pipeline"], "unknown arm 'pipeline'"),
        (["bench", "dsv3-tiny", "--arms", "pipeline"], "unknown arm 'pipeline'"),
        (["bench", "dsv3-tiny", "--sweep", f"{DEGREE}=1,2"], f"{DEGREE}: cannot be swept"),
        (["bench", "dsv3-tiny", "--sweep", "overlap.chunks=1,16"], "overlap.chunks=16 equal"),
    ],
    ids=lambda v: str(v)[:60],
)
def test_what_is_not_offered_elsewhere(
    argv: list[str], named: str, nothing_starts: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in refused(argv, capsys)
