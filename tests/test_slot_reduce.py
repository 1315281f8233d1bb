"""slot_reduce and slot_grad against float64; the kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_gather_rows import DTYPES, ROUNDING, compile_for_h100, run_interpreted

from interlace import _compat
from interlace.kernels import slot_grad as grad_module
from interlace.kernels import slot_reduce as reduce_module
from interlace.kernels.slot_grad import slot_grad
from interlace.kernels.slot_reduce import slot_reduce

# (slots, tokens, choices, hidden): odd widths, more columns than a block, zero tokens, zero slots
SIZES = [(24, 5, 3, 7), (40, 6, 8, 300), (9, 2, 1, 2049), (6, 0, 2, 8), (0, 3, 2, 5), (4, 3, 2, 0)]
SUM_ERROR = 1e-6  # of the sum of magnitudes, in float32; then ROUNDING to the type of the result
NAN = float("nan")


def draw(sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str):
    """Slots, positions with a fifth of them cut, scores and a gradient."""
    num_slots, num_tokens, top_k, hidden = sizes
    generator = torch.Generator().manual_seed(sum(sizes))
    slots = torch.randn(num_slots, hidden, generator=generator).to(device, dtype)
    pos = torch.randint(max(num_slots, 1), (num_tokens, top_k), generator=generator)
    pos[torch.rand(pos.shape, generator=generator) < (0.2 if num_slots else 2.0)] = -1
    scores = torch.rand(num_tokens, top_k, generator=generator)
    grad = torch.randn(num_tokens, hidden, generator=generator).to(device, dtype)
    return slots, pos.to(device), scores.to(device), grad


def rows_fp64(slots: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """(T, K, H), zero where the position is -1: one zero row behind the last does it."""
    return torch.cat([slots.double(), slots.new_zeros(1, slots.shape[1]).double()])[pos]


def check_slot_kernels(device: str) -> None:
    for dtype in DTYPES:
        for sizes in SIZES:
            slots, pos, scores, grad = draw(sizes, dtype, device)
            rows = rows_fp64(slots, pos)
            for weight in (None, scores):
                terms = rows if weight is None else rows * weight[:, :, None].double()
                got = slot_reduce(slots, pos, weight)
                bound = ROUNDING[dtype] * terms.sum(1).abs() + SUM_ERROR * terms.abs().sum(1)
                assert got.dtype == dtype
                assert ((got.double() - terms.sum(1)).abs() <= bound).all()
                # The same bits as the reference: no fused multiply-add, the same order.
                if dtype == torch.float32 or not _compat.TRITON_INTERPRETED:
                    assert torch.equal(got, reduce_module.slot_reduce_ref(slots, pos, weight))
            products = rows * grad[:, None, :].double()
            got = slot_grad(slots, pos, grad)
            assert got.dtype == torch.float32
            assert ((got - products.sum(2)).abs() <= SUM_ERROR * products.abs().sum(2)).all()
            assert not got[pos < 0].any()
            assert torch.equal(got, slot_grad(slots, pos, grad))


def check_cut_slots(device: str) -> None:
    """What lies in row 0 or anywhere else must not leak through a position of -1."""
    slots = torch.full((2, 3), NAN, device=device)
    pos = torch.tensor([[-1, -1]], device=device)
    ones = torch.ones(1, 2, device=device)
    assert slot_reduce(slots, pos, ones).tolist() == [[0.0, 0.0, 0.0]]
    assert slot_grad(slots, pos, torch.ones(1, 3, device=device)).tolist() == [[0.0, 0.0]]


def check_interpreted() -> None:
    assert _compat.runs_triton("slot_reduce", torch.device("cpu"))
    for kernel in (reduce_module._slot_reduce_kernel, grad_module._slot_grad_kernel):
        assert type(kernel).__name__ == "InterpretedFunction"
    grad_module.slot_grad_ref = None
    check_slot_kernels("cpu")
    check_cut_slots("cpu")


def test_reference() -> None:
    check_slot_kernels("cpu")
    check_cut_slots("cpu")


def test_worked_examples() -> None:
    slots = torch.tensor([[1.0], [2.0]])
    scores = torch.tensor([[5.0, 1.0], [3.0, 9.0]])
    assert slot_reduce(slots, torch.tensor([[1, 0], [0, -1]]), scores).tolist() == [[11], [3]]
    slots = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert slot_grad(slots, torch.tensor([[1, -1]]), torch.tensor([[10.0, 1.0]])).tolist() == [
        [34, 0]
    ]


def test_kernels_in_the_interpreter() -> None:
    run_interpreted("test_slot_reduce", "check_interpreted()")


@pytest.mark.gpu
def test_kernels_on_gpu() -> None:
    check_slot_kernels("cuda")
    check_cut_slots("cuda")


def test_compiled_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16-byte accesses; the sum without fused multiply-add; the dots without a block barrier."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ptx = compile_for_h100(
        reduce_module._slot_reduce_kernel,
        {"slots": "*bf16", "pos": "*i64", "scores": "*fp32", "out": "*bf16"},
        {"H": 2048, "K": 8, "BLOCK_H": 2048},
        num_warps=4,
        enable_fp_fusion=False,
    ).asm["ptx"]
    assert ptx.count("ld.global.v4.b32") == 16
    assert ptx.count("st.global.v4.b32") == 2
    assert "fma." not in ptx
    ptx = compile_for_h100(
        grad_module._slot_grad_kernel,
        {"slots": "*bf16", "pos": "*i64", "grad": "*bf16", "out": "*fp32"},
        {"H": 2048, "K": 8, "BLOCK_K": 8, "BLOCK_H": 256},
        num_warps=1,
    ).asm["ptx"]
    assert ptx.count("ld.global.v4.b32") >= 9
    assert "bar.sync" not in ptx


def test_bad_arguments_are_named() -> None:
    slots, pos, scores, grad = draw((6, 3, 2, 4), torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"slot_reduce: slots is \(6, 4\) and pos is torch.int32"):
        slot_reduce(slots, pos.int(), scores)
    with pytest.raises(
        ValueError, match=r"slot_reduce: scores is torch.float32 \(3, 1\); expected"
    ):
        slot_reduce(slots, pos, scores[:, :1])
    with pytest.raises(ValueError, match=r"slot_reduce: tensors on cpu, meta"):
        slot_reduce(slots, pos.to("meta"))
    with pytest.raises(ValueError, match=r"slot_grad: slots is \(6,\) and pos is"):
        slot_grad(slots[:, 0], pos, grad)
    with pytest.raises(ValueError, match=r"slot_grad: grad is \(2, 4\) on cpu; expected \(3, 4\)"):
        slot_grad(slots, pos, grad[:2])
