"""Padding, ignored labels and balancing on several ranks, against one process.

Oracle: one process with the whole batch, or the same tokens without padding.  SGD, and every
parameter's gradient, so that nothing hides a scale (field reports A2, E5, E7, E9 to E11, F1 to F5).
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import (
    ROWS,
    documents_of_three,
    run_steps,
    small_config,
    small_engine,
    snapshot,
)

from interlace.model.batch import IGNORED, PADDING
from interlace.train import balance
from interlace.train.engine import apply, compute

TOLERANCE = 2e-5


def padded_config(folder: Path, **changes):
    """Half of every row is padding, and a third of the labels of the rest is ignored."""
    path = folder / "ids.npy"
    source = path if path.exists() else documents_of_three(path)
    plain = {
        "data__source": str(source),
        "data__separator": 0,
        "data__max_documents": 3,
        "optimizer__name": "SGD",
        "optimizer__lr": 0.1,
        "optimizer__max_norm": None,
    }
    return small_config(**(plain | changes))


def step_of(rank: int, size: int, config, steps: int = 1, arm: str = "eager"):
    """Gradients, counts, norms of the last step, weights and moments after it."""
    engine = small_engine(config, rank, size, arm)
    run_steps(engine, steps - 1)
    outcome = compute(engine, engine.progress.step)
    grads = {n: g.clone() for n, g in outcome.grads.items()}
    apply(engine, outcome, engine.progress.step)
    return {
        "grads": grads,
        "state": snapshot(engine),
        "counts": outcome.counts_LE.tolist(),
        "loss": outcome.loss.item(),
        "norm": outcome.grad_norm.item(),
        "tokens": outcome.num_valid,
        "experts": sorted(engine.expert_names),
    }


def check(results: list, degree: int, expected: dict, tolerance: float = TOLERANCE) -> None:
    """Every rank against the one process: counts exactly, the rest within float32 noise."""
    for rank, result in enumerate(results):
        for key in ("counts", "tokens", "experts"):
            assert result[key] == expected[key]
        assert result["loss"] == pytest.approx(expected["loss"], rel=tolerance)
        assert result["norm"] == pytest.approx(expected["norm"], rel=10 * tolerance)
        for kind in ("grads", "state"):
            assert result[kind].keys() == expected[kind].keys()
            for name, wanted in expected[kind].items():
                owner = name.removeprefix("model.").removeprefix("optimizer.")
                names = {owner, owner.rpartition(".")[0]}
                if names & set(result["experts"]) and wanted.dim():
                    wanted = wanted.chunk(degree)[rank % degree]
                scale = wanted.double().abs().max().clamp(min=1e-6)
                error = ((result[kind][name] - wanted).double().abs().max() / scale).item()
                assert error < 50 * tolerance, f"{kind} of {name} on rank {rank}: {error:.2e}"


# --- padding and ignored labels -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("microbatches", "arm", "degree"),
    [
        (1, "eager", 2),
        (3, "eager", 2),
        (3, "control", 2),
        (1, "chunk-eager", 4),
    ],
)
@pytest.mark.slow
def test_every_layout_against_one_process(
    four_ranks, tmp_path: Path, microbatches: int, arm: str, degree: int
) -> None:
    """EP 2 x DP 2 and EP 4 on four ranks, three steps (field report E11: pairs of features).

    A third of the labels is ignored, half of the places are padding, both balancings are on.
    """
    changes = {
        "training__microbatches": microbatches,
        "model__balance_loss_weight": 0.1,
        "optimizer__expert_bias_speed": 0.01,
    }
    expected = step_of(
        0, 1, padded_config(tmp_path, **(changes | {"training__microbatches": 1})), 3
    )
    overlap = {"overlap__chunks": 3, "overlap__chunk_root": "layers.*.moe"}
    overlap |= {"overlap__chunk_dim": "sequence"}
    changes |= overlap if "chunk" in arm else {}
    config = padded_config(tmp_path, parallelism__expert_parallel_degree=degree, **changes)
    results = four_ranks.run(step_of, config, 3, arm)
    check(results, degree, expected)
    # 12 rows of 2 documents of 3: 72 tokens, of which 48 have a label; top 2 in one MoE layer.
    assert expected["tokens"] == 48
    assert np.array(expected["counts"]).sum(-1).tolist() == [72 * 2]


@pytest.mark.parametrize("arm", ["eager", "control"])
@pytest.mark.slow
def test_what_lies_in_the_padding_does_not_matter(tmp_path: Path, arm: str) -> None:
    """Field report F5: other ids at padding change no count, loss, price, or gradient bit."""
    config = padded_config(tmp_path, model__balance_loss_weight=0.1)
    found = []
    for filler in (0, 77):
        engine = small_engine(config, arm=arm)
        rows = engine.data.rows

        def filled(step, rows=rows, filler=filler, **which):
            batch = rows(step, **which)
            is_padding = batch.positions_BS == PADDING
            assert is_padding.sum() == ROWS * 6
            assert (batch.labels_BS[is_padding] == IGNORED).all()
            return replace(batch, tokens_BS=batch.tokens_BS.masked_fill(is_padding, filler))

        engine = replace(engine, data=_WithRows(engine.data, filled))
        losses = run_steps(engine, 2)
        outcome = compute(engine, 2)
        found.append((losses, outcome.counts_LE.tolist(), outcome.grads))
    assert found[0][:2] == found[1][:2]
    for name, grad in found[0][2].items():
        # A weight's gradient is a sum over all places; zeros of padding may change its order.
        torch.testing.assert_close(found[1][2][name], grad, rtol=1e-5, atol=1e-7, msg=name)
    total = np.array(found[0][1]).sum(-1)
    assert total.tolist() == [72 * config.model.top_k]


class _WithRows:
    """Data with other rows."""

    def __init__(self, data, rows) -> None:
        self._data, self.rows = data, rows

    def __getattr__(self, name: str):
        return getattr(self._data, name)


def test_a_real_nan_surfaces_beside_padding(tmp_path: Path) -> None:
    """Field report D3: masked by position, never by value."""
    engine = small_engine(padded_config(tmp_path))
    token = int(compute_tokens(engine)[0, 0])
    with torch.no_grad():
        engine.model.embedding.weight[token] = float("nan")
    before = snapshot(engine)
    outcome = compute(engine, 0)
    assert outcome.grad_norm.isnan()
    with pytest.raises(RuntimeError, match=r"on rank 0 loss is nan, embedding\.weight is nan"):
        apply(engine, outcome, 0)
    after = snapshot(engine)
    assert all(torch.equal(after[n].isnan(), before[n].isnan()) for n in before)


def compute_tokens(engine):
    return engine.data.rows(0, global_batch_rows=ROWS, first=0, count=ROWS).tokens_BS


def test_microbatches_of_1_7_and_0_labels() -> None:
    """Field report E9: the token mean of the whole batch, whatever the microbatches hold."""
    config = small_config(optimizer__name="SGD", optimizer__max_norm=None)
    found = []
    for microbatches in (1, 3):
        engine = small_engine(
            replace(config, training=replace(config.training, microbatches=microbatches))
        )
        rows = engine.data.rows

        def few_labels(step, rows=rows, **which):
            batch = rows(step, **which)
            labels = batch.labels_BS.clone().flatten()
            kept = torch.zeros(labels.numel(), dtype=torch.bool)
            kept[5] = True  # one in the first third, seven in the second
            kept[50:57] = True
            return replace(
                batch, labels_BS=labels.masked_fill(~kept, IGNORED).view_as(batch.labels_BS)
            )

        engine = replace(engine, data=_WithRows(engine.data, few_labels))
        outcome = compute(engine, 0)
        assert outcome.num_valid == 8
        found.append(outcome)
    assert found[1].loss.item() == pytest.approx(found[0].loss.item(), rel=1e-6)
    for name, grad in found[0].grads.items():
        torch.testing.assert_close(found[1].grads[name], grad, rtol=1e-4, atol=1e-6, msg=name)


# --- balancing ------------------------------------------------------------------------------------


def balance_only(config, steps: int = 2, arm: str = "eager"):
    """Gradients of the balance loss alone: with and without it, subtracted in float64."""
    results = []
    for weight in (0.5, 0.0):
        model = replace(config.model, balance_loss_weight=weight)
        plain = replace(config, model=model, optimizer=_no_updates(config))
        engine = small_engine(plain, arm=arm)
        run_steps(engine, steps - 1)  # the load is that of the last update
        results.append(compute(engine, steps - 1))
    gates = [n for n in results[0].grads if n.endswith("router.gate")]
    return {n: (results[0].grads[n].double() - results[1].grads[n].double()) for n in gates}


def _no_updates(config):
    return replace(config.optimizer, lr=0.0, weight_decay=0.0, expert_bias_speed=0.0)


@pytest.mark.parametrize("preset", ["dsv3-tiny", "qwen3-tiny"])
@pytest.mark.slow
def test_the_balance_gradient_does_not_depend_on_the_split(preset: str) -> None:
    """Field report F4: the same tokens as 1, 3 and 12 microbatches, and with chunked layers; on
    several ranks: above."""
    config = small_config(preset)
    expected = balance_only(config)
    assert all(g.abs().max() > 1e-4 for g in expected.values())
    for parts, arm in ((3, "eager"), (12, "eager"), (1, "chunk-eager"), (3, "chunk-graph")):
        training = replace(config.training, microbatches=parts)
        found = balance_only(replace(config, training=training), arm=arm)
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=2e-3, atol=1e-6)


def test_prices_by_hand() -> None:
    """2 layers of 4 experts, 10 tokens: price = weight * E * load / tokens; a layer left out: 0."""
    model = torch.nn.Module()
    for name in ("a", "b"):
        router = torch.nn.Module()
        router.register_buffer("balance_price", torch.full((4,), 9.0))
        model.add_module(name, router)
    load_LE = torch.tensor([[10, 6, 4, 0], [1, 1, 1, 1]])
    balance.set_prices_(model, load_LE, torch.tensor(10), 0.5, frozenset({1}))
    torch.testing.assert_close(model.a.balance_price, torch.tensor([0.1, 0.06, 0.04, 0.0]))
    assert model.b.balance_price.tolist() == [0.0] * 4
    balance.set_prices_(model, torch.zeros(0, 0, dtype=torch.int64), torch.tensor(10), 0.5)
    torch.testing.assert_close(model.b.balance_price, torch.full((4,), 0.05))


def test_an_even_load_costs_the_weight_by_layer(tmp_path: Path) -> None:
    """Before the first update the load counts as even: the balance loss is weight x layers, and it
    is part of the loss."""
    changes = {"model__num_layers": 3, "model__num_dense_layers": 1}
    with_loss = small_engine(padded_config(tmp_path, model__balance_loss_weight=0.25, **changes))
    plain = small_engine(padded_config(tmp_path, **changes))
    outcome, without = compute(with_loss, 0), compute(plain, 0)
    assert outcome.balance.item() == pytest.approx(0.5, rel=1e-5)
    assert outcome.loss.item() == pytest.approx(without.loss.item() + 0.5, rel=1e-5)
    assert without.balance is None


@pytest.mark.parametrize("recomputed", [(1,), (0, 1, 2), ()])
def test_recomputed_layers_count_once(recomputed: tuple[int, ...]) -> None:
    """Field report F1: tokens x top-k in every layer, whichever of three run twice."""
    from torch.utils.checkpoint import checkpoint

    config = small_config(model__num_layers=3, model__num_dense_layers=0)
    plain, engine = small_engine(config), small_engine(config)
    for index in recomputed:
        layer = engine.model.layers[index]
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    expected, found = compute(plain, 0), compute(engine, 0)
    assert found.counts_LE.sum(-1).tolist() == [ROWS * 12 * 2] * 3
    assert torch.equal(found.counts_LE, expected.counts_LE)
    for name, grad in expected.grads.items():
        assert torch.equal(found.grads[name], grad), name
    run_steps(engine, 1)
    assert engine.progress.tokens_LE.sum(-1).tolist() == [ROWS * 12 * 2] * 3


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_exact_ties_are_recomputed_alike(seed: int) -> None:
    """Field report G1: experts in fours with one score, of which two are chosen; routing is
    recomputed in the backward."""
    from torch.utils.checkpoint import checkpoint

    found = []
    for recompute in (False, True):
        engine = small_engine(small_config("qwen3-tiny", debug__seed=seed))
        for layer in engine.model.layers:
            with torch.no_grad():
                gate_nmD = layer.moe.router.gate.view(2, 4, -1)
                gate_nmD[:, 1:] = gate_nmD[:, :1]
            if recompute:
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        found.append(compute(engine, 0))
    plain, again = found
    assert torch.equal(plain.counts_LE, again.counts_LE)
    for name, grad in plain.grads.items():
        assert torch.equal(again.grads[name], grad), name


@pytest.mark.parametrize("length", [11, 13, 24])
def test_other_lengths_are_refused_by_both_numbers(length: int) -> None:
    """Field report B7: never a stale graph, never a cut sequence."""
    engine = small_engine(small_config(), arm="control")
    other = small_engine(small_config(training__seq_len=length))
    engine = replace(engine, data=other.data)
    message = rf"12 sequences of {length} tokens, .* of training\.seq_len=12; pad or cut"
    with pytest.raises(ValueError, match=message):
        compute(engine, 0)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_the_bias_moves_once_a_step(microbatches: int) -> None:
    """Field report F3: by +-speed, whatever the number of microbatches."""
    engine = small_engine(small_config(training__microbatches=microbatches))
    counts = compute(engine, 0).counts_LE
    run_steps(engine, 1)
    expected = torch.zeros_like(counts[0], dtype=torch.float32)
    balance.update_expert_bias_(expected, counts[0], 1e-3)
    bias = engine.model.layers[1].moe.router.expert_bias
    assert torch.equal(bias, expected)
    assert bias.abs().max().item() == pytest.approx(1e-3)


def test_layers_may_be_left_unbalanced() -> None:
    config = small_config(
        model__num_layers=3, optimizer__unbalanced_layers="1", model__balance_loss_weight=0.1
    )
    engine = small_engine(config)
    run_steps(engine, 2)
    first, second = (engine.model.layers[i].moe.router for i in (1, 2))
    assert first.expert_bias.abs().max() > 0
    assert second.expert_bias.abs().max() == 0
    assert first.balance_price.max() > 0
    assert second.balance_price.max() == 0


# --- idle experts ---------------------------------------------------------------------------------


def _with_idle_experts(rank: int, size: int, config):
    """AdamW with decay, three steps in which half of the experts get no token."""
    engine = small_engine(config, rank, size)
    router = engine.model.layers[1].moe.router
    router.expert_bias[4:] = -100.0
    run_steps(engine, 3)
    outcome = compute(engine, 3)
    return {
        "grads": outcome.grads,
        "state": snapshot(engine),
        "counts": outcome.counts_LE.tolist(),
        "loss": outcome.loss.item(),
        "norm": outcome.grad_norm.item(),
        "tokens": outcome.num_valid,
        "experts": sorted(engine.expert_names),
    }


@pytest.mark.parametrize("degree", [2, 4])
def test_idle_experts_decay_as_in_one_process(four_ranks, degree: int) -> None:
    """Field report A2: weights and moments after three AdamW steps, idle ranks included."""
    changes = {
        "model__num_groups": 1,
        "model__top_groups": 1,
        "optimizer__expert_bias_speed": 0.0,
        "optimizer__lr": 1e-2,
    }
    expected = _with_idle_experts(0, 1, small_config(**changes))
    assert expected["counts"][0][4:] == [0, 0, 0, 0]
    moments = expected["state"]["optimizer.layers.1.moe.experts.w13.exp_avg"]
    assert moments[4:].abs().max() == 0
    assert moments[:4].abs().max() > 0
    weights = expected["state"]["model.layers.1.moe.experts.w13"]
    fresh = small_engine(small_config(**changes)).model.layers[1].moe.experts.w13
    lrs = (5e-3, 1e-2)  # decayed by every one of three steps, though no token came by
    assert (weights[4:].abs() < fresh[4:].abs() * (1 - 0.1 * sum(lrs))).float().mean() > 0.99
    results = four_ranks.run(
        _with_idle_experts, small_config(parallelism__expert_parallel_degree=degree, **changes)
    )
    check(results, degree, expected, tolerance=1e-4)
    assert all(r["grads"]["layers.1.moe.router.gate"].abs().max() > 0 for r in results)
