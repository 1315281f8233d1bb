"""Kernels of the hybridep backend: index vectors exact, rows bit-exact, sums against float64; in
Triton's interpreter, compiled for an H100 that need not be here, and on a GPU."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from test_gather_rows import ROUNDING, compile_for_h100, run_interpreted
from torch import Tensor

from interlace import _compat
from interlace.kernels import expand_rows as expand_module
from interlace.kernels import row_grad as grad_module
from interlace.kernels import stage_index as index_module
from interlace.kernels.expand_rows import expand_rows
from interlace.kernels.row_grad import row_grad
from interlace.kernels.stage_index import receive_index, send_index

NAN = float("nan")
# (stage rows, choices, rows, live rows, hidden): odd widths, more columns than a block, none live
SIZES = [
    (5, 3, 12, 9, 7),
    (40, 8, 96, 64, 300),
    (3, 1, 3, 3, 2049),
    (4, 2, 6, 0, 8),
    (0, 2, 0, 0, 4),
]
SUM_ERROR = 1e-6  # of the sum of magnitudes, in float32


def draw(sizes: tuple[int, ...], dtype: torch.dtype, device: str):
    """Stage and scores as views with padded rows, slots in any order, -1 past the live ones."""
    num_stage, top_k, num_rows, live, hidden = sizes
    gen = torch.Generator().manual_seed(sum(sizes))
    stage = torch.full((num_stage, hidden + 5), NAN)
    stage[:, :hidden] = torch.randn(num_stage, hidden, generator=gen)
    scores = torch.full((num_stage, top_k + 2), NAN)
    scores[:, :top_k] = torch.rand(num_stage, top_k, generator=gen)
    slot = torch.full((num_rows,), -1)
    slot[:live] = torch.randperm(num_stage * top_k, generator=gen)[:live]
    y = torch.randn(num_rows, hidden, generator=gen)
    y[live:] = NAN
    stage, y = (t.to(device, dtype) for t in (stage, y))
    slot, scores = slot.to(device), scores.to(device)
    at = torch.tensor([live], device=device)
    return stage[:, :hidden], slot, scores[:, :top_k], y, at


def check_rows(device: str) -> None:
    for dtype, sizes in itertools.product(ROUNDING, SIZES):
        stage, slot, scores, y, live = draw(sizes, dtype, device)
        top_k, used = sizes[1], slot[: sizes[3]]
        poisoned = torch.full_like(y, NAN)
        assert expand_rows(stage, slot, top_k, live, None, poisoned) is poisoned
        assert torch.equal(poisoned[: len(used)], stage[used // top_k])
        assert poisoned[len(used) :].isnan().all()  # left as they were
        scale = scores.reshape(-1)[used][:, None]
        exact = stage[used // top_k].double() * scale.double()
        scaled = expand_rows(stage, slot, top_k, live, scores)[: len(used)]
        assert scaled.dtype == dtype
        assert ((scaled.double() - exact).abs() <= ROUNDING[dtype] * exact.abs()).all()
        y_grad, scores_grad = row_grad(y, stage, slot, scores, live)
        assert torch.equal(y_grad[: len(used)], scaled)  # the same product of the same numbers
        products = y[: len(used)].double() * stage[used // top_k].double()
        expected = torch.zeros(scores.numel(), dtype=torch.float64, device=device)
        bound = expected.clone()
        expected[used], bound[used] = products.sum(1), SUM_ERROR * products.abs().sum(1)
        assert ((scores_grad.view(-1) - expected).abs() <= bound).all()  # 0 where no row is
        assert torch.equal(scores_grad, row_grad(y, stage, slot, scores, live)[1])


def check_index(device: str) -> None:
    """Against the definition, token by token and row by row."""
    gen = torch.Generator().manual_seed(3)
    for (num_tokens, top_k, size), mirrored in itertools.product(
        [(5, 3, 2), (300, 8, 4), (1, 1, 1), (0, 2, 2)], [False, True]
    ):
        rank, rows, num_stage = size - 1, num_tokens * top_k, size * num_tokens
        if mirrored:
            rank = 0
        peer = torch.randint(size, (num_tokens, top_k), generator=gen)
        target = peer * rows + torch.arange(rows).view(num_tokens, top_k)
        cut = torch.rand(target.shape, generator=gen) < 0.2
        target[cut], peer[cut] = -1, -1
        there, take, back = send_index(target.to(device), size, rows, rank, mirrored=mirrored)
        for t, p in itertools.product(range(num_tokens), range(size)):
            sent, home = bool((peer[t] == p).any()), p if mirrored else rank
            wanted = (p * num_stage + home * num_tokens + t, p * num_tokens + t)
            found = (int(there[t * size + p]), int(back[t, p]))
            assert found == (wanted if sent else (-1, -1))
            assert int(take[t * size + p]) == t
        origin = torch.full((num_stage * top_k,), -1)
        live = torch.randperm(num_stage * top_k, generator=gen)[: num_stage * top_k // 2]
        origin[: len(live)] = live
        rows_SK, back_S = receive_index(
            origin.to(device), (num_tokens, top_k), size, rank, mirrored=mirrored
        )
        expected = torch.full((num_stage * top_k,), -1)
        expected[live] = torch.arange(len(live))
        assert rows_SK.cpu().tolist() == expected.view(num_stage, top_k).tolist()
        for s in range(num_stage):
            source, t = divmod(s, num_tokens)
            home = source if mirrored else rank
            wanted = source * num_stage + home * num_tokens + t
            assert int(back_S[s]) == (wanted if int(rows_SK[s].max()) >= 0 else -1)


def check_interpreted() -> None:
    assert _compat.runs_triton("expand_rows", torch.device("cpu"))
    expand_module.expand_rows_ref = grad_module.row_grad_ref = None  # the kernels, or nobody
    index_module.send_index_ref = index_module.receive_index_ref = None
    check_rows("cpu")
    check_index("cpu")


def test_references() -> None:
    check_rows("cpu")
    check_index("cpu")


@pytest.mark.slow
def test_kernels_in_the_interpreter() -> None:
    run_interpreted("test_stage_kernels", "check_interpreted()")


@pytest.mark.gpu
def test_kernels_on_gpu() -> None:
    check_rows("cuda")
    check_index("cuda")


def test_worked_examples() -> None:
    t, live = torch.tensor, torch.tensor([2])
    rows = expand_rows(t([[1.0], [2.0]]), t([3, 2, 0]), 2, live, t([[9.0, 9.0], [1.0, 10.0]]))
    assert rows[:2].tolist() == [[20.0], [2.0]]
    stage, scores = t([[0.0, 0.0], [3.0, 4.0]]), t([[5.0], [10.0]])
    y_grad, scores_grad = row_grad(t([[1.0, 2.0]]), stage, t([1]), scores, t([1]))
    assert (y_grad.tolist(), scores_grad.tolist()) == ([[30.0, 40.0]], [[0.0], [11.0]])
    there, take, back = send_index(t([[0, 5], [-1, 2]]), 2, 4, 0)
    assert (there.tolist(), take.tolist()) == ([0, 4, 1, -1], [0, 0, 1, 1])
    assert back.tolist() == [[0, 2], [1, -1]]
    rows_SK, back_S = receive_index(t([3, 1, 2]), (1, 2), 2, 1)
    assert (rows_SK.tolist(), back_S.tolist()) == ([[-1, 1], [2, 0]], [1, 3])


@pytest.mark.slow
def test_compiled_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16-byte accesses where a row allows them; index kernels compile at all."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    row = {"slot": "*i64", "live": "*i64", "stage": "*bf16"}
    ptx = compile_for_h100(
        expand_module._expand_rows_kernel,
        row | {"scale": "*fp32", "out": "*bf16"},
        {"K": 8, "STRIDE": 2048, "SCALE_STRIDE": 8, "H": 2048, "BLOCK_R": 4, "BLOCK_H": 2048},
        num_warps=4,
    ).asm["ptx"]
    assert ptx.count("ld.global.v4.b32") == 8
    assert ptx.count("st.global.v4.b32") == 8
    ptx = compile_for_h100(
        grad_module._row_grad_kernel,
        row | {"y": "*bf16", "scores": "*fp32", "y_grad": "*bf16", "scores_grad": "*fp32"},
        {"K": 8, "STRIDE": 2048, "SCORE_STRIDE": 8, "H": 2048, "BLOCK_R": 8, "BLOCK_H": 512},
        num_warps=4,
    ).asm["ptx"]
    assert ptx.count("ld.global.v4.b32") >= 8
    assert ptx.count("st.global.v4.b32") >= 4
    numbers = dict.fromkeys(("num_tokens", "num_stage", "num_rows", "rows_per_rank", "rank"), "i32")
    pointers = ("target", "there", "take", "back", "origin", "rows")
    for mirrored in (False, True):
        sizes = {"W": 2, "K": 8, "MIRRORED": mirrored, "W_PAD": 2, "BLOCK": 128}
        for kernel in (index_module._send_kernel, index_module._return_kernel):
            names = kernel.arg_names
            compile_for_h100(
                kernel,
                {n: "*i64" if n in pointers else numbers[n] for n in names if n not in sizes},
                {n: v for n, v in sizes.items() if n in names},
                num_warps=4,
            )
    compile_for_h100(
        index_module._scatter_kernel,
        {"origin": "*i64", "rows": "*i64", "num_rows": "i32"},
        {"BLOCK": 1024},
        num_warps=4,
    )


def _staged() -> tuple[Tensor, ...]:
    return draw(SIZES[0], torch.float32, "cpu")


def test_bad_arguments_are_named() -> None:
    stage, slot, scores, y, live = _staged()
    with pytest.raises(ValueError, match=r"expand_rows: stage is \(7, 5\) with strides .* contig"):
        expand_rows(stage.t(), slot, 3, live)
    with pytest.raises(ValueError, match=r"expand_rows: slot is torch.int32 \(12,\) and live"):
        expand_rows(stage, slot.int(), 3, live)
    with pytest.raises(ValueError, match=r"the factors are torch.float32 \(5, 3\); .* \(5, 2\)"):
        expand_rows(stage, slot, 2, live, scores)
    with pytest.raises(ValueError, match=r"expand_rows: tensors on cpu, meta; use one device"):
        expand_rows(stage, slot.to("meta"), 3, live)
    with pytest.raises(ValueError, match=r"row_grad: y is torch.float32 \(11, 7\); .* \(12, 7\)"):
        row_grad(y[1:], stage, slot, scores, live)
    with pytest.raises(ValueError, match=r"send_index: the index is torch.int64 \(12,\); expected"):
        send_index(slot, 2, 4, 0)
