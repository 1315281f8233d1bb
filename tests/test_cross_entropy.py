"""Cross entropy against float64; the kernels in Triton's interpreter and on the GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_gather_rows import ROUNDING, run_interpreted

from interlace.kernels import cross_entropy as module
from interlace.kernels.cross_entropy import cross_entropy

SIZES = [(5, 7), (3, 4096), (4, 4099), (2, 9000), (1, 1), (0, 5)]


def check_cross_entropy(device: str, sizes: list[tuple[int, int]] = SIZES) -> None:
    """Oracle: torch in float64, loss and gradient, a third of the tokens without a label."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for num_tokens, vocab in sizes:
            logits = (4 * torch.randn(num_tokens, vocab, generator=generator)).to(dtype)
            labels = torch.randint(vocab, (num_tokens,), generator=generator)
            labels[::3] = -100
            weight = torch.rand(num_tokens, generator=generator)
            exact = logits.double().requires_grad_()
            expected = F.cross_entropy(exact, labels, ignore_index=-100, reduction="none")
            (expected * weight.double()).sum().backward()
            ours = logits.to(device).requires_grad_()
            nll = cross_entropy(ours, labels.to(device))
            (nll * weight.to(device)).sum().backward()
            assert nll.dtype == torch.float32
            assert ours.grad.dtype == dtype
            torch.testing.assert_close(
                nll.detach().cpu().double(), expected.detach(), rtol=1e-5, atol=2e-5
            )
            error = (ours.grad.cpu().double() - exact.grad).abs()
            assert (error <= ROUNDING[dtype] * exact.grad.abs() + 1e-6).all()
            assert not ours.grad[::3].any()


def test_against_float64() -> None:
    check_cross_entropy("cpu")


def test_kernels_in_the_interpreter() -> None:
    run_interpreted("test_cross_entropy", "check_cross_entropy('cpu')")


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    check_cross_entropy("cuda", [*SIZES, (64, 102400)])


def test_a_row_of_minus_infinity_but_one() -> None:
    """Masked vocabularies: probability one on what is left, gradient zero."""
    logits = torch.full((1, 5), float("-inf"))
    logits[0, 2] = 3.0
    logits.requires_grad_()
    nll = cross_entropy(logits, torch.tensor([2]))
    nll.sum().backward()
    assert nll.item() == 0
    assert torch.equal(logits.grad, torch.zeros(1, 5))


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"logits are \(2, 3\) and labels \(3,\)"):
        cross_entropy(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"labels are torch\.int32"):
        cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32))


def test_fakes_have_the_shapes_of_the_results() -> None:
    logits, labels = torch.randn(4, 6), torch.tensor([0, 1, -100, 5])
    arguments = (logits.requires_grad_(), labels)
    torch.library.opcheck(torch.ops.interlace.cross_entropy.default, arguments)
    assert module.cross_entropy_ref(logits, labels)[0][2] == 0
