"""The traced step: equal to plain PyTorch, every node owned by the right call."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from interlace.graph import tag_of
from interlace.trace import Step, Traced, run_eager, trace_step


class Block(nn.Module):
    """A feed-forward of a width that no other block has, behind a residual."""

    def __init__(self, dim: int, width: int, calls: int = 1) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up, self.down = nn.Linear(dim, width, bias=False), nn.Linear(width, dim, bias=False)
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = x + self.down(F.silu(self.up(self.norm(x))))
        return x


class Net(nn.Module):
    def __init__(self, widths=(20, 24, 28), *, twice=(), recompute=(), tied=True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 12)
        self.layers = nn.ModuleList(
            Block(12, w, 2 if i in twice else 1) for i, w in enumerate(widths)
        )
        self.norm = nn.RMSNorm(12)
        self.head = nn.Linear(12, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(1.5))
        self.recompute = set(recompute)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for i, layer in enumerate(self.layers):
            if i in self.recompute:
                x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x)
        return self.head(self.norm(x))


def _loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(tokens)
    return F.cross_entropy(logits, labels, reduction="sum") / 7, {"largest": logits.amax()}


def _batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(11, (9,), generator=gen), torch.randint(11, (9,), generator=gen)


def _trace(model: nn.Module, loss=_loss, **kw) -> tuple[Step, Traced]:
    step = Step(model, loss, **kw)
    return step, trace_step(step, _batch())


def _assert_equal_to_eager(step: Step, traced: Traced, batch=None) -> None:
    params, buffers = step.state()
    batch = batch or _batch(5)  # other values than the traced ones
    expected, actual = run_eager(step, params, buffers, batch), traced(params, buffers, batch)
    assert torch.equal(actual.loss, expected.loss)
    assert actual.grads.keys() == expected.grads.keys() == params.keys()
    for name, grad in expected.grads.items():
        assert torch.equal(actual.grads[name], grad), name
    for name, value in expected.extra.items():
        assert torch.equal(actual.extra[name], value), name


VARIANTS = {
    "plain": {},
    "untied": {"tied": False},
    "a module called twice": {"twice": (1,)},
    "recompute in the middle": {"recompute": (1,)},
    "recompute everywhere": {"recompute": (0, 1, 2), "twice": (2,)},
    "one layer": {"widths": (20,), "recompute": (0,)},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_plain_pytorch(variant: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    step, traced = _trace(Net(**VARIANTS[variant]), compute_dtype=dtype)
    _assert_equal_to_eager(step, traced)
    assert all(g.dtype == dtype for g in traced(*step.state(), _batch()).grads.values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_width_that_one_block_has_is_seen_in_that_block_only(variant: str) -> None:
    """Oracle: the shapes.  Every node with a block's own width belongs to a call in that block."""
    model = Net(**VARIANTS[variant])
    _, traced = _trace(model)
    owner = {layer.up.out_features: f"layers.{i}" for i, layer in enumerate(model.layers)}
    seen = Counter()
    for node in traced.gm.graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor):
            continue
        for width in set(value.shape) & owner.keys():
            assert tag_of(node).layer.startswith(owner[width]), (node.name, str(tag_of(node)))
            seen[width, tag_of(node).phase] += 1
    for i, width in enumerate(owner):
        assert seen[width, "forward"] > 0
        assert seen[width, "backward"] > 0
        assert (seen[width, "recompute"] > 0) == (i in model.recompute)


def test_calls_of_one_module_are_told_apart() -> None:
    _, traced = _trace(Net(twice=(1,)))
    tags = [tag_of(n) for n in traced.gm.graph.nodes]
    for phase in ("forward", "backward"):
        calls = {t.call for t in tags if t.layer == "layers.1.up" and t.phase == phase}
        assert calls == {0, 1}
        assert {t.call for t in tags if t.layer == "layers.0.up" and t.phase == phase} == {0}


def test_recomputed_calls_repeat_the_number_of_the_call() -> None:
    _, traced = _trace(Net(twice=(1,), recompute=(1,)))
    tags = [tag_of(n) for n in traced.gm.graph.nodes]
    for phase in ("forward", "recompute", "backward"):
        assert {t.call for t in tags if t.layer == "layers.1.up" and t.phase == phase} == {0, 1}
    sources = {t.phase: t.source for t in tags}
    assert sources == {"io": "", "forward": "0F", "recompute": "0B", "backward": "0B"}


def test_gradient_sums_belong_to_the_innermost_call_that_holds_all_uses() -> None:
    """x of a block is used twice in its norm and once by the residual: both sums are the block's.
    The tied weight is used by the embedding and the head: its sum is the step's."""
    _, traced = _trace(Net())
    owners = [tag_of(n).layer for n in traced.gm.graph.nodes if tag_of(n).role == "accum"]
    sums = [layer for layer in owners if not layer.endswith("norm")]  # those have sums of their own
    assert Counter(sums) == {"": 1, "layers.0": 2, "layers.1": 2, "layers.2": 2}


def test_casts_of_parameters_belong_to_their_owner() -> None:
    _, traced = _trace(Net(), compute_dtype=torch.bfloat16)
    casts = {
        tag_of(n).layer
        for n in traced.gm.graph.nodes
        if tag_of(n).role == "cast" and tag_of(n).phase == "forward"
    }
    inner = {f"layers.{i}.{part}" for i in range(3) for part in ("norm", "up", "down")}
    assert casts == inner | {"embedding", "norm"}


def test_no_dead_code_and_no_constants() -> None:
    _, traced = _trace(Net(recompute=(1,)))
    for node in traced.gm.graph.nodes:
        assert node.op != "get_attr"
        assert node.users or node.op in ("output", "placeholder"), node.name


def test_weights_loaded_after_tracing_are_used() -> None:
    step, traced = _trace(Net())
    with torch.no_grad():
        for p in step.model.parameters():
            p.copy_(torch.randn_like(p))
        step.model.scale.fill_(-2.0)
    _assert_equal_to_eager(step, traced)


def test_unused_parameter_has_zero_gradient() -> None:
    model = Net()
    model.spare = nn.Parameter(torch.ones(3))
    step, traced = _trace(model)
    _assert_equal_to_eager(step, traced)
    assert torch.equal(traced(*step.state(), _batch()).grads["spare"], torch.zeros(3))


class Odd(nn.Module):
    """Returns a tuple, a dict and None, and leaves a value by a side door."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(12, 12)

    def forward(self, x: Tensor, *, again: Tensor | None = None):
        y = self.lin(x)
        self.side = y.sin().mean()
        return (y, {"z": y * 2}, None)


class OddNet(Net):
    def __init__(self) -> None:
        super().__init__(widths=(20,))
        self.odd = Odd()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers[0](self.embedding(tokens))
        y, more, nothing = self.odd(x, again=None)
        assert nothing is None
        return self.head(y + more["z"]) * (1 + self.odd.side)


def test_modules_may_return_anything_and_use_side_doors() -> None:
    step, traced = _trace(OddNet())
    _assert_equal_to_eager(step, traced)
    cosines = [n for n in traced.gm.graph.nodes if "cos" in str(n.target)]
    assert [(tag_of(n).layer, tag_of(n).phase) for n in cosines] == [("odd", "backward")]


def test_a_tensor_hook_is_tagged_as_one() -> None:
    class Hooked(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.layers[0](self.embedding(tokens))
            x.register_hook(lambda g: g * 0.5)
            return self.head(x)

    step, traced = _trace(Hooked(widths=(20,)))
    _assert_equal_to_eager(step, traced)
    (hook,) = [n for n in traced.gm.graph.nodes if tag_of(n).role == "hook"]
    assert "mul" in str(hook.target)


def test_boundary_sums_inside_before_outside() -> None:
    """A region's input that is the residual too: with a boundary its own uses are summed first."""

    class Raw(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            return self.head(x + self.layers[0](x) + x.tanh())

    step, traced = _trace(Raw(widths=(20,)), boundary=lambda name: name == "layers.0")
    assert any(n.target is torch.ops.aten.alias.default for n in traced.gm.graph.nodes)
    # The aliased input needs the same sums in plain PyTorch to be comparable: values agree closely.
    params, buffers = step.state()
    expected, actual = (f(params, buffers, _batch(5)) for f in (_eager(step), traced))
    for name, grad in expected.grads.items():
        torch.testing.assert_close(actual.grads[name], grad)


def _eager(step: Step):
    return lambda params, buffers, batch: run_eager(step, params, buffers, batch)


def test_a_constant_tensor_is_refused_by_name() -> None:
    table = torch.arange(12.0)

    def loss(model: nn.Module, tokens: Tensor, labels: Tensor):
        return (model(tokens).sum() * table.to(torch.float64).sum()).float(), {}

    with pytest.raises(ValueError, match="became constants of the graph; make them buffers"):
        trace_step(Step(Net(), loss), _batch())


def test_nothing_of_the_trace_stays_on_the_model() -> None:
    model = Net(recompute=(1,))
    _trace(model)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


# --- what a user's step may do wrong --------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "kind"),
    [
        (lambda loss: loss, "Tensor"),
        (lambda loss: (loss, loss), r"\(Tensor, Tensor\)"),
        (lambda loss: (loss,), r"\(Tensor\)"),
        (lambda loss: (loss, {"size": 1.0}), "a float as size"),
        (lambda loss: None, "NoneType"),
    ],
)
def test_what_loss_fn_returns_is_checked(returned, kind: str) -> None:
    step = Step(Net(), lambda model, *batch: returned(_loss(model, *batch)[0]))
    message = rf"loss_fn returned {kind}; expected \(loss, extra\)"
    with pytest.raises(ValueError, match=message):
        trace_step(step, _batch())
    with pytest.raises(ValueError, match=message):
        run_eager(step, *step.state(), _batch())


def test_another_layout_than_the_traced_one_is_refused() -> None:
    step, traced = _trace(Net())
    state, (tokens, labels) = step.state(), _batch()
    message = (
        r"the step was traced for \(9,\) torch.int64 as input 1 and got \(5,\) torch.int64; trace"
    )
    with pytest.raises(ValueError, match=message):
        traced(*state, (tokens, labels[:5]))
    with pytest.raises(ValueError, match=r"as input 0 and got \(9,\) torch.int32; trace it again"):
        traced(*state, (tokens.int(), labels))
    with pytest.raises(ValueError, match="traced for 2 inputs and got 1; hand it"):
        traced(*state, (tokens,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_parameters_get_no_gradient(dtype: torch.dtype) -> None:
    """A frozen block, and a frozen tensor that two modules share."""
    torch.manual_seed(0)
    model = Net(recompute=(1,))
    model.layers[1].requires_grad_(False)
    model.embedding.weight.requires_grad_(False)
    step, traced = _trace(model, compute_dtype=dtype)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert 0 < len(trained) < len(dict(model.named_parameters()))
    params, buffers = step.state()
    assert params.keys() == trained
    assert {"scale", "embedding.weight", "layers.1.up.weight"} <= buffers.keys()
    _assert_equal_to_eager(step, traced)
    model.requires_grad_(True)  # all of them: the gradients of the others are the same
    every = run_eager(step, *step.state(), _batch(5))
    for name, grad in traced(params, buffers, _batch(5)).grads.items():
        assert torch.equal(grad, every.grads[name]), name
    with pytest.raises(ValueError, match=r"has no embedding.weight \(4 in all\), .* it again"):
        traced(*step.state(), _batch())


class Decides(nn.Module):
    """Its graph would depend on a value."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() if x.sum() > 0 else x


@pytest.mark.parametrize("recompute", [(), (1,)], ids=["plain", "recomputed"])
def test_a_branch_on_a_value_names_its_module(recompute: tuple[int, ...]) -> None:
    model = Net(recompute=recompute)
    model.layers[1].norm = nn.Sequential(nn.RMSNorm(12), Decides())
    message = (
        r"layers\.1\.norm\.1 at test_trace.py:\d+ depends on the value of a tensor.*torch\.where"
    )
    with pytest.raises(ValueError, match=message) as caught:
        trace_step(Step(model, _loss), _batch())
    assert "Could not guard on data-dependent" in str(caught.value.__cause__)
    assert "\n" not in str(caught.value)


def test_a_branch_in_the_loss_is_named_too() -> None:
    def loss(model: nn.Module, tokens: Tensor, labels: Tensor):
        total, extra = _loss(model, tokens, labels)
        return (total * 2 if total > 1 else total), extra

    with pytest.raises(ValueError, match=r"the loss at test_trace.py:\d+ depends on the value"):
        trace_step(Step(Net(), loss), _batch())
