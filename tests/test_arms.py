"""Every arm of verification against its reference on two gloo processes, bitwise, step after step.

Oracle: plain PyTorch, for the chunked arms with chunked modules.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_layouts import _world

from interlace.train.config_read import load_config
from interlace.train.verify import verify

CHUNKED = ["chunk-eager", "chunk-graph", "chunk-scheduled"]
PLAIN = ["eager", "control", "scheduled"]
MOE_BATCH = ["--overlap.chunk_root", "layers.*.moe"]
MOE_SEQUENCE = [*MOE_BATCH, "--overlap.chunk_dim", "sequence"]
LAYERS = ["--overlap.chunk_root", "layers.*"]


def _flags(preset: str, routing: str, chunks: int, *more: str) -> list[str]:
    return [
        preset,
        *("--model.num_layers", "2"),
        *("--model.dim", "32"),
        *("--model.routing", routing),
        *("--training.seq_len", "24"),
        *("--training.local_batch_size", "12"),
        *("--optimizer.lr", "0.03"),  # so that a few steps learn something
        *("--overlap.chunks", str(chunks)),
        *more,
    ]


def _verify(rank: int, size: int, flags: list[str], arms: list[str], steps: int, out: str):
    config = load_config(flags)
    path = Path(out) if rank == 0 else None
    return verify(config, _world(rank, size, 2, "cpu"), arms, steps, path)


def _check(ranks, tmp_path: Path, flags: list[str], arms: list[str], steps: int) -> None:
    out = tmp_path / "v.json"
    assert ranks.run(_verify, flags, arms, steps, str(out), timeout=200) == [True, True]
    report = json.loads(out.read_text())
    references = {a["name"]: a["against"] for a in report["arms"]}
    assert [a["name"] for a in report["arms"]] == arms
    assert all(a["equal"] and len(a["losses"]) == steps for a in report["arms"])
    if arms == CHUNKED:
        assert set(references.values()) == {None, "chunk-eager"}
    first, last = report["arms"][0]["losses"][0], report["arms"][0]["losses"][-1]
    assert last < first - 0.1  # it learned: the arms are equal in something


CASES = [
    pytest.param("dsv3-tiny", "learned", 2, LAYERS, marks=pytest.mark.slow),
    pytest.param("dsv3-tiny", "learned", 2, MOE_BATCH, marks=pytest.mark.slow),
    pytest.param("qwen3-tiny", "learned", 3, MOE_SEQUENCE, marks=pytest.mark.slow),
    pytest.param("dsv3-tiny", "balanced", 4, LAYERS, marks=pytest.mark.slow),
    pytest.param("qwen3-tiny", "balanced", 3, LAYERS, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("preset", "routing", "chunks", "root"), CASES)
def test_chunked_arms(two_ranks, tmp_path, preset, routing, chunks, root) -> None:
    _check(two_ranks, tmp_path, _flags(preset, routing, chunks, *root), CHUNKED, 4)


@pytest.mark.parametrize(
    "preset", ["dsv3-tiny", pytest.param("qwen3-tiny", marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_plain_arms(two_ranks, tmp_path, preset) -> None:
    _check(two_ranks, tmp_path, _flags(preset, "learned", 1, "--ep.padded"), PLAIN, 4)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["dsv3-tiny", "qwen3-tiny"])
def test_with_compiled_regions(two_ranks, tmp_path, preset) -> None:
    flags = _flags(preset, "learned", 2, *LAYERS, "--compile.regional")
    _check(two_ranks, tmp_path, flags, CHUNKED, 5)
    _check(two_ranks, tmp_path, flags, ["control", "scheduled"], 5)


def test_eager_is_no_reference_for_compiled_regions() -> None:
    from interlace.train.arms import reference_of

    arms = [*PLAIN, *CHUNKED]
    plain = load_config(["dsv3-tiny"])
    compiled = load_config(["dsv3-tiny", "--compile.regional"])
    assert [reference_of(a, arms, plain) for a in arms] == [
        None,
        "eager",
        "control",
        None,
        "chunk-eager",
        "chunk-eager",
    ]
    assert reference_of("control", arms, compiled) is None
    assert reference_of("scheduled", ["eager", "scheduled"], plain) == "eager"
    assert reference_of("chunk-scheduled", ["chunk-graph", "chunk-scheduled"], plain) == (
        "chunk-graph"
    )
