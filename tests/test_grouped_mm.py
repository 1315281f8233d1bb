"""grouped_mm against its loop (oracle: the reference, fp32) and against poisoned memory."""

from __future__ import annotations

import pytest
import torch

from interlace.kernels.grouped_mm import grouped_mm, grouped_mm_ref

NAN = float("nan")
CASES = [(12, [3, 3, 9]), (9, [0, 0, 0]), (0, [0, 0, 0]), (12, [12, 12, 12]), (7, [1, 2, 7])]


def _run(rows: int, ends: list[int], dtype: torch.dtype, tail: float, device: str = "cpu"):
    gen = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 16, generator=gen).to(device, dtype)
    w = torch.randn(3, 16, 24, generator=gen).to(device, dtype).requires_grad_()
    g = torch.randn(rows, 24, generator=gen).to(device, dtype)
    x[ends[-1] :], g[ends[-1] :] = tail, tail
    x.requires_grad_()
    return x, w, g, torch.tensor(ends, dtype=torch.int32, device=device)


def _poison_freed_memory(device: str = "cpu") -> None:
    """Field report A3: rows that nobody writes hold what the memory held before."""
    blocks = [torch.full((n,), NAN, device=device) for n in (64, 192, 288, 384, 1152, 4096)]
    del blocks


def check_against_reference(dtype: torch.dtype, tolerance: float, device: str = "cpu") -> None:
    for rows, ends in CASES:
        for tail in (0.0, NAN):
            x, w, g, e = _run(rows, ends, dtype, tail, device)
            _poison_freed_memory(device)
            y = grouped_mm(x, w, e)
            _poison_freed_memory(device)
            gx, gw = torch.autograd.grad(y, (x, w), g)
            x0, w0, g0, _ = _run(rows, ends, dtype, 0.0, device)
            y0 = grouped_mm_ref(x0, w0, e)
            gx0, gw0 = torch.autograd.grad(y0, (x0, w0), g0)
            live = ends[-1]
            for actual, expected in ((y, y0), (gx, gx0)):
                torch.testing.assert_close(
                    actual[:live], expected[:live], rtol=tolerance, atol=tolerance
                )
            torch.testing.assert_close(gw, gw0, rtol=tolerance, atol=tolerance)
            assert gw.isfinite().all()


def test_fp32_matches_reference() -> None:
    check_against_reference(torch.float32, 1e-5)


def test_bf16_matches_reference() -> None:
    check_against_reference(torch.bfloat16, 5e-2)


@pytest.mark.gpu
def test_bf16_matches_reference_on_gpu() -> None:
    check_against_reference(torch.bfloat16, 5e-2, "cuda")


def test_expert_without_rows_has_zero_gradient_not_none() -> None:
    x, w, g, e = _run(12, [3, 3, 9], torch.float32, 0.0)
    (gw,) = torch.autograd.grad(grouped_mm(x, w, e), w, g)
    assert torch.equal(gw[1], torch.zeros(16, 24))


def test_bad_arguments_are_named() -> None:
    x, w, _, e = _run(12, [3, 3, 9], torch.float32, 0.0)
    with pytest.raises(ValueError, match=r"x is \(12, 15\) and w is \(3, 16, 24\)"):
        grouped_mm(x[:, :15], w, e)
    with pytest.raises(TypeError, match=r"ends is torch.int64 \(3,\); expected int32 \(3,\)"):
        grouped_mm(x, w, e.long())
