"""What a replay reads and what it leaves behind, with the stand-in for a CUDA graph
(tests/captures.py).

Oracle: plain PyTorch, bitwise; the model's own tensors.  (Field reports K1, K7.)
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from captures import batch_of, fake_capture
from small_runs import small_config, small_engine

from interlace.train import arms as arms_module
from interlace.train.arms import ARMS


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms_module, "capture_step", fake_capture)


@pytest.mark.slow
def test_a_replay_leaves_nothing_behind(fake: None) -> None:
    """Field report K1: twenty replays in turn on two batches, with weights that stay; each gives
    the bits that its batch gave first, and those of plain PyTorch."""
    config = small_config(ep__padded=True, training__mode="traced", training__microbatches=3)
    captured, plain = small_engine(config, arm="captured"), small_engine(config)
    batches = [batch_of(captured, step) for step in range(2)]
    expected = [plain.forward_backward(batch) for batch in batches]
    assert not torch.equal(expected[0].loss, expected[1].loss)
    for replay in range(20):
        found, wanted = captured.forward_backward(batches[replay % 2]), expected[replay % 2]
        assert torch.equal(found.loss, wanted.loss), replay
        for kind in ("grads", "extra"):
            for name, x in getattr(wanted, kind).items():
                assert torch.equal(getattr(found, kind)[name], x), (replay, name)


@pytest.mark.slow
def test_everything_that_a_graph_reads_has_a_fixed_place(fake: None) -> None:
    """Field report K7: a frozen parameter, one that two modules share, and buffers, each once."""
    engine = small_engine(small_config(ep__padded=True, training__mode="traced"), arm="control")
    model, config = engine.model, engine.config
    model.layers[0].attention_norm.weight.requires_grad_(False)
    model.layers[1].ffn_norm.weight = model.layers[1].attention_norm.weight
    runner = replace(engine.runner, arm=ARMS["captured"])
    batch = batch_of(engine, 0)
    runner.prepare(batch)
    (captured,) = runner.by_layout.kept.values()
    read = dict(model.named_parameters()) | dict(model.named_buffers())
    assert captured.addresses == {name: x.data_ptr() for name, x in read.items()}
    inputs = [n for n in runner.traced.gm.graph.nodes if n.op == "placeholder"]
    assert len(inputs) == len(read) + len(batch)
    router = model.layers[config.model.num_dense_layers].moe.router
    router.expert_bias = router.expert_bias.clone()
    with pytest.raises(ValueError, match=r"expert_bias \(1 in all\) was moved"):
        runner(batch)
