"""`verify` must find a difference where there is one: one bit, one tensor, one rank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.train import verify as module
from interlace.train.config_read import load_config
from interlace.train.engine import Engine
from interlace.train.verify import digest, verify
from interlace.train.world import init_world

FLAGS = [
    "qwen3-tiny",
    *("--model.num_layers", "2"),
    *("--model.dim", "32"),
    *("--training.seq_len", "16"),
    *("--training.local_batch_size", "2"),
    *("--ep.transport", "loopback"),
]


def test_one_flipped_bit_is_found_named_and_located(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second arm's gradient of one expert differs in its last bit from step 2 on."""
    real = module.build_engine
    name = "layers.1.moe.experts.w2"

    def faulty(config, world, arm, *args) -> Engine:
        engine = real(config, world, arm, *args)
        if arm.name != "control":
            return engine
        calls = []

        def forward_backward(batch):
            result = engine.forward_backward(batch)
            calls.append(1)
            if len(calls) == 2:
                bits = result.grads[name].clone().view(torch.int32)
                bits[1, 2, 3] ^= 1
                grads = {**result.grads, name: bits.view(torch.float32)}
                result = replace(result, grads=grads)
            return result

        return replace(engine, forward_backward=forward_backward)

    monkeypatch.setattr(module, "build_engine", faulty)
    config = load_config(FLAGS)
    assert not verify(config, init_world(config), ["eager", "control"], 3, tmp_path / "v.json")
    eager, control = json.loads((tmp_path / "v.json").read_text())["arms"]
    assert eager["equal"]
    assert not control["equal"]
    difference = control["first_difference"]
    assert difference["step"] == 2
    assert difference["tensor"] == name
    assert difference["index"] == [1, 2, 3]
    assert difference["value"] != difference["expected"]
    assert difference["value"] == pytest.approx(difference["expected"], rel=1e-5, abs=1e-12)
    assert f"DIFFERS: {name} at step 2, rank 0, element [1, 2, 3]" in capsys.readouterr().out


def test_one_arm_is_refused() -> None:
    config = load_config(FLAGS)
    with pytest.raises(ValueError, match="--arms: eager given; give at least two of eager"):
        verify(config, init_world(config), ["eager"], 1, None)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 40), st.sampled_from(["f4", "bf16", "i8"]), st.data())
def test_digest_sees_every_bit_and_every_swap(n: int, kind: str, data) -> None:
    gen = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    dtype = {"f4": torch.float32, "bf16": torch.bfloat16, "i8": torch.int64}[kind]
    x = (torch.randn(n, generator=gen) * 100).to(dtype)
    same = x.clone()
    assert digest(x) == digest(same)
    place = data.draw(st.integers(0, n - 1))
    bits = same.view({4: torch.int32, 2: torch.int16, 8: torch.int64}[x.element_size()])
    bits[place] ^= 1 << data.draw(st.integers(0, 8 * x.element_size() - 2))
    assert digest(x) != digest(same)
    other = data.draw(st.integers(0, n - 1))
    swapped = x.clone()
    swapped[[place, other]] = x[[other, place]]
    assert (digest(swapped) == digest(x)) == torch.equal(swapped, x)


@pytest.mark.slow
def test_digest_tells_minus_zero_and_works_in_pieces() -> None:
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    long = torch.zeros((1 << 24) + 3, dtype=torch.uint8)
    later = long.clone()
    later[-1] = 1
    assert digest(long) != digest(later)
