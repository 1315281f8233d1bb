"""Optimizer, learning rate and expert bias against torch's own rules and hand-worked numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from test_gather_rows import run_interpreted
from torch import nn

from interlace.kernels import adamw as adamw_module
from interlace.train import optim as optim_module
from interlace.train.balance import update_expert_bias_
from interlace.train.optim import (
    build_optimizer,
    complete,
    fill_moments,
    learning_rate,
    set_learning_rate,
    update,
)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.experts = nn.Parameter(torch.randn(2, 3, 4, generator=generator))
        self.experts_bias = nn.Parameter(torch.randn(2, 4, generator=generator))
        self.norm = nn.LayerNorm((2, 2))
        self.proj = nn.Linear(3, 3)


def test_decay_only_on_matrices() -> None:
    optimizer = build_optimizer(Tiny().named_parameters(), lr=0.1, weight_decay=0.3)
    by_decay = {g["weight_decay"]: set(g["param_names"]) for g in optimizer.param_groups}
    assert by_decay == {
        0.3: {"experts", "proj.weight"},
        0.0: {"experts_bias", "norm.weight", "norm.bias", "proj.bias"},
    }
    assert isinstance(optimizer, torch.optim.AdamW)
    assert all(group["foreach"] for group in optimizer.param_groups)


def test_idle_expert_decays_like_the_reference() -> None:
    """Oracle: torch's AdamW on a gradient of explicit zeros, bitwise, over three steps."""
    ours, reference = Tiny(), Tiny()
    optimizer = build_optimizer(ours.named_parameters(), lr=0.1, weight_decay=0.3)
    oracle = torch.optim.AdamW([reference.experts], lr=0.1, betas=(0.9, 0.95), weight_decay=0.3)
    before = ours.experts.detach().clone()
    for _ in range(3):
        update(optimizer, ours.named_parameters(), {"proj.weight": torch.ones(3, 3)})
        reference.experts.grad = torch.zeros(2, 3, 4)
        oracle.step()
    assert torch.equal(ours.experts, reference.experts)
    torch.testing.assert_close(ours.experts.detach(), before * (1 - 0.1 * 0.3) ** 3)
    assert optimizer.state[ours.experts]["step"] == 3
    assert torch.equal(ours.experts_bias, Tiny().experts_bias)


def test_complete_takes_the_given_gradients_and_rejects_unknown() -> None:
    model = Tiny()
    grad = torch.full((3, 3), 2.0)
    found = complete(model.named_parameters(), {"proj.weight": grad, "proj.bias": None})
    by_id = {id(p): g for p, g in found}
    assert by_id[id(model.proj.weight)] is grad
    assert torch.equal(by_id[id(model.proj.bias)], torch.zeros(3))
    with pytest.raises(ValueError, match=r"gradients for head .* no such parameter"):
        complete(model.named_parameters(), {"head": grad})


def test_half_gradients_and_a_factor_change_nothing_but_their_product() -> None:
    """Oracle: float32 gradients scaled before the step, bitwise."""
    grads = {n: torch.randn_like(p).bfloat16() for n, p in Tiny().named_parameters()}
    factor = torch.tensor(0.37)
    torch.manual_seed(0)
    first = Tiny()
    models = first, copy.deepcopy(first)
    for model, given, by in (
        (models[0], grads, factor),
        (models[1], {n: g.float() * factor for n, g in grads.items()}, None),
    ):
        optimizer = build_optimizer(model.named_parameters(), lr=0.1)
        update(optimizer, model.named_parameters(), given, by)
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(a, b)


def check_adamw(device: str) -> None:
    """Oracle: torch's AdamW in float64, three steps, odd sizes, half-precision gradients."""
    generator = torch.Generator().manual_seed(3)
    for shape in ((7,), (3, 5, 11), (2, 1025), (0, 4)):
        start = torch.randn(shape, generator=generator)
        exact = nn.Parameter(start.double())
        oracle = torch.optim.AdamW([exact], lr=0.03, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
        param = start.to(device, copy=True)
        moments = [torch.zeros_like(param) for _ in range(2)]
        factor = torch.tensor(0.25)
        for step in range(1, 4):
            grad = torch.randn(shape, generator=generator).bfloat16()
            exact.grad = grad.double() * 0.25
            oracle.step()
            numbers = {"lr": 0.03, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
            adamw_module.adamw_(
                param, grad.to(device), *moments, factor.to(device), step=step, **numbers
            )
        state = oracle.state[exact]
        torch.testing.assert_close(param.cpu().double(), exact.detach(), rtol=1e-5, atol=1e-6)
        for ours, key in zip(moments, ("exp_avg", "exp_avg_sq"), strict=True):
            torch.testing.assert_close(ours.cpu().double(), state[key], rtol=1e-5, atol=1e-7)


def test_adamw_against_float64() -> None:
    check_adamw("cpu")


def test_adamw_kernel_in_the_interpreter() -> None:
    run_interpreted("test_optim", "check_adamw('cpu')")


@pytest.mark.gpu
def test_adamw_on_the_gpu() -> None:
    check_adamw("cuda")


@pytest.mark.gpu
def test_update_on_the_gpu_keeps_the_layout_of_the_state() -> None:
    """Oracle: torch's own AdamW on the CPU, within float32 rounding; state under the same names."""
    reference = Tiny()
    ours = copy.deepcopy(reference).cuda()
    grads = {n: torch.randn_like(p) for n, p in reference.named_parameters()}
    pair = [build_optimizer(m.named_parameters(), lr=0.1) for m in (ours, reference)]
    for _ in range(2):
        update(pair[0], ours.named_parameters(), {n: g.cuda() for n, g in grads.items()})
        update(pair[1], reference.named_parameters(), {n: g.clone() for n, g in grads.items()})
    for a, b in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-6)
        assert pair[0].state[a].keys() == pair[1].state[b].keys()
        assert pair[0].state[a]["step"] == pair[1].state[b]["step"] == 2


@pytest.mark.parametrize(("other", "fits"), [
    ({}, True), ({"amsgrad": True}, False), ({"maximize": True}, False),
])  # fmt: skip
def test_only_what_the_kernel_computes_goes_through_it(other: dict[str, bool], fits: bool) -> None:
    class OnCuda(nn.Parameter):
        is_cuda = True

    class Own(torch.optim.AdamW):
        pass

    parameters = [OnCuda(torch.zeros(2, 3))]
    assert optim_module._fits_kernel(torch.optim.AdamW(parameters, **other), parameters) is fits
    assert not optim_module._fits_kernel(Own(parameters), parameters)
    assert not optim_module._fits_kernel(torch.optim.SGD(parameters), parameters)
    half = [OnCuda(torch.zeros(2, 3, dtype=torch.bfloat16))]
    assert not optim_module._fits_kernel(torch.optim.AdamW(half), half)


def test_adamw_refuses_what_does_not_fit() -> None:
    x, numbers = torch.zeros(2, 3), {"lr": 1.0, "betas": (0, 0), "eps": 0, "weight_decay": 0}
    with pytest.raises(ValueError, match=r"parameter \(2, 3\), gradient \(3, 2\)"):
        adamw_module.adamw_(x, torch.zeros(3, 2), x, x, step=1, **numbers)


def test_moments_are_there_before_the_first_step() -> None:
    model = Tiny()
    optimizer = build_optimizer(model.named_parameters(), lr=0.1)
    fill_moments(optimizer)
    state = optimizer.state[model.experts]
    assert state["step"] == 0
    assert not state["exp_avg"].any()


def test_sgd_is_plain() -> None:
    """Oracle: p - lr * g."""
    model = Tiny()
    before = model.proj.weight.detach().clone()
    optimizer = build_optimizer(model.named_parameters(), name="SGD", lr=0.5, weight_decay=0.3)
    for _ in range(2):
        update(optimizer, model.named_parameters(), {"proj.weight": torch.ones(3, 3)})
    torch.testing.assert_close(model.proj.weight.detach(), before - 1.0)


def test_bad_optimizers() -> None:
    with pytest.raises(ValueError, match=r"optimizer\.name=Lion: .* AdamW, SGD"):
        build_optimizer(Tiny().named_parameters(), name="Lion", lr=0.1)
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer([], lr=0.1)


@pytest.mark.parametrize(
    ("warmup", "total", "minimum", "expected"),
    [
        (2, 4, 0.0, [0.5, 1.0, 0.5, 0.0, 0.0]),
        (0, 3, 0.1, [1.0, 0.55, 0.1, 0.1]),
        (4, 4, 0.0, [0.25, 0.5, 0.75, 1.0]),
        (0, 1, 0.0, [1.0]),
        (1, 5, 0.0, [1.0, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, 0.0]),
        (10, 3, 0.0, [0.1, 0.2, 0.3]),
    ],
)
def test_learning_rate(warmup: int, total: int, minimum: float, expected: list[float]) -> None:
    rates = [
        learning_rate(s, base=3.0, warmup_steps=warmup, total_steps=total, min_factor=minimum)
        for s in range(len(expected))
    ]
    assert rates == pytest.approx([3.0 * e for e in expected], abs=1e-12)


def test_set_learning_rate_reaches_all_groups() -> None:
    optimizer = build_optimizer(Tiny().named_parameters(), lr=0.1)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_expert_bias_follows_the_sign() -> None:
    bias = torch.tensor([1.0, 1.0, 1.0])
    update_expert_bias_(bias, torch.tensor([1, 3, 2]), 0.25)
    assert bias.tolist() == [1.25, 0.75, 1.0]


def test_expert_bias_of_layers_and_huge_counts() -> None:
    """Counts whose fp32 mean would be rounded: exact integers decide."""
    bias = torch.zeros(2, 2)
    update_expert_bias_(bias, torch.tensor([[2**40, 2**40 + 1], [5, 5]]), 0.5)
    assert bias.tolist() == [[0.5, -0.5], [0.0, 0.0]]


def test_expert_bias_depends_on_the_sum_of_microbatches_only() -> None:
    """Oracle: one update from the summed counts; four updates would give another bias."""
    counts = torch.tensor([[4, 0], [0, 1], [0, 1], [0, 1]])
    once, four_times = torch.zeros(2), torch.zeros(2)
    update_expert_bias_(once, counts.sum(0), 0.5)
    for part in counts:
        update_expert_bias_(four_times, part, 0.5)
    assert once.tolist() == [-0.5, 0.5]
    assert four_times.tolist() == [1.0, -1.0]


def test_expert_bias_rejects_wrong_types() -> None:
    with pytest.raises(TypeError, match="keep the bias in fp32"):
        update_expert_bias_(torch.zeros(2, dtype=torch.bfloat16), torch.ones(2).long(), 0.1)
    with pytest.raises(ValueError, match=r"shape \(2,\), the counts \(3,\)"):
        update_expert_bias_(torch.zeros(2), torch.ones(3).long(), 0.1)


def test_frozen_parameters_are_left_alone() -> None:
    model = Tiny()
    model.experts.requires_grad_(False)
    before = model.experts.detach().clone()
    optimizer = build_optimizer(model.named_parameters(), lr=0.1, weight_decay=0.3)
    found = complete(model.named_parameters(), {})
    assert all(p is not model.experts for p, _ in found)
    assert len(found) == len(list(model.parameters())) - 1
    update(optimizer, model.named_parameters(), {"proj.weight": torch.ones(3, 3)})
    assert torch.equal(model.experts, before)
    assert model.experts.grad is None
    with pytest.raises(
        ValueError, match=r"gradients for experts .* no such parameter that is trained"
    ):
        complete(model.named_parameters(), {"experts": torch.ones(2, 3, 4)})
