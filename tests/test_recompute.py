"""Checkpointed layers of a user's own model, traced: attention, random numbers, memory (field
reports G3, G4, G5).  Oracle: plain PyTorch from the same seed, bitwise; counts by layer.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import interlace
from interlace import Chunking, Step, ep
from interlace.graph import tag_of
from interlace.trace import Traced, run_eager, trace_step
from interlace.trace.summary import exchanges

B, S, D, HIDDEN, V, E, K = 4, 8, 16, 24, 31, 4, 2
LAYER, MOE = Chunking("layers.*", 2), Chunking("layers.*.moe", 2, dim=1)
Noise = Callable[[Tensor], Tensor]


class MoE(nn.Module):
    def __init__(self, exchange: ep.Exchange, noise: Noise) -> None:
        super().__init__()
        self.exchange, self.noise, e = exchange, noise, exchange.num_local_experts(E)
        self.router = nn.Linear(D, E, bias=False)
        self.up = nn.Parameter(torch.empty(e, D, HIDDEN))
        self.down = nn.Parameter(torch.empty(e, HIDDEN, D))

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_TD = x_BSD.flatten(0, 1)
        scores_TK, ids_TK = self.router(self.noise(x_TD)).softmax(-1).topk(K)
        plan = ep.plan(ids_TK, E, self.exchange)
        rows_RD = ep.dispatch(x_TD, plan)
        rows_RF = F.silu(interlace.grouped_mm(rows_RD, self.up, plan.offsets[1:]))
        rows_RD = interlace.grouped_mm(rows_RF, self.down, plan.offsets[1:])
        return ep.combine(rows_RD, scores_TK, plan).view_as(x_BSD)


class Block(nn.Module):
    def __init__(self, exchange: ep.Exchange, noise: Noise) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(D), nn.Linear(D, 3 * D, bias=False)
        self.ffn_norm, self.moe = nn.RMSNorm(D), MoE(exchange, noise)

    def forward(self, x_BSD: Tensor) -> Tensor:
        heads = (
            h.unflatten(-1, (2, -1)).transpose(1, 2)
            for h in self.qkv(self.norm(x_BSD)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(*heads, dropout_p=0.0, is_causal=True)
        x_BSD = x_BSD + mixed.transpose(1, 2).flatten(2)
        return x_BSD + self.moe(self.ffn_norm(x_BSD))


class Model(nn.Module):
    """``layers`` blocks, all of them checkpointed or none."""

    def __init__(
        self,
        layers: int = 2,
        noise: Noise = lambda x: x,
        recompute: bool = True,
        padded: bool = True,
        **kw: bool,
    ) -> None:
        super().__init__()
        self.recompute, self.how = recompute, {"use_reentrant": False} | kw
        ep.register_group(ep.Group("recompute", 2, 0, "loopback"))
        exchange = ep.Exchange("recompute", 2, 0, padded=padded)
        self.embedding, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.layers = nn.ModuleList(Block(exchange, noise) for _ in range(layers))
        gen = torch.Generator().manual_seed(0)
        for weight in self.parameters():
            weight.data.copy_(torch.randn(weight.shape, generator=gen) * D**-0.5)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = self.embedding(tokens_BS)
        for layer in self.layers:
            x_BSD = checkpoint(layer, x_BSD, **self.how) if self.recompute else layer(x_BSD)
        return self.head(x_BSD)


def _loss(model: nn.Module, tokens_BS: Tensor, labels_BS: Tensor):
    logits_TV = model(tokens_BS).flatten(0, 1)
    return F.cross_entropy(logits_TV, labels_BS.flatten(), reduction="sum") / labels_BS.numel(), {}


def _batch(sequences: int = B) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(V, (sequences, S + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _trace(model: nn.Module, chunking: Chunking | None = None, **kw) -> tuple[Step, Traced]:
    """The traced step, and the step in plain PyTorch that it must equal."""
    step = Step(model, _loss)
    if chunking is None:
        return step, trace_step(step, _batch(), **kw)
    return replace(step, chunking=chunking), interlace.trace_overlapped(step, _batch(), chunking)


def _assert_equal(step: Step, traced: Traced, steps: int = 3) -> None:
    """Some steps from one seed: every loss and gradient, and the random state that they leave."""
    state, batch = step.state(), _batch()
    torch.manual_seed(5)
    expected = [run_eager(step, *state, batch) for _ in range(steps)]
    left = torch.get_rng_state()
    torch.manual_seed(5)
    for number, reference in enumerate(expected):
        actual = traced(*state, batch)
        assert torch.equal(actual.loss, reference.loss), number
        for name, grad in reference.grads.items():
            assert torch.equal(actual.grads[name], grad), (number, name)
    assert torch.equal(torch.get_rng_state(), left)


def _count(traced: Traced, name: str, phase: str | None = None) -> int:
    nodes = traced.gm.graph.nodes
    return sum(name in str(n.target) and phase in (None, tag_of(n).phase) for n in nodes)


# --- attention without dropout (G3)


@pytest.mark.parametrize("chunking", [None, LAYER, MOE], ids=str)
def test_attention_without_dropout_is_recomputed(chunking: Chunking | None) -> None:
    """Its operator is tagged as random, and draws nothing."""
    step, traced = _trace(Model(), chunking)
    (attention,) = {
        n.target for n in traced.gm.graph.nodes
        if "attention" in str(n.target) and "backward" not in str(n.target)
    }  # fmt: skip
    assert torch.Tag.nondeterministic_seeded in attention.tags
    chunks = 2 if chunking is LAYER else 1
    assert _count(traced, str(attention), "forward") == 2 * chunks
    assert _count(traced, str(attention), "recompute") == 2 * chunks
    launches = Counter(e.name for e in exchanges(traced.gm))
    assert set(launches.values()) == {6 * (2 if chunking else 1)}  # forward, again, backward
    _assert_equal(step, traced, steps=1)


def test_exact_sizes_cannot_be_recomputed() -> None:
    """Torch compares the sizes of the recomputed rows, which only the run will tell."""
    _assert_equal(*_trace(Model(1, recompute=False, padded=False)))
    with pytest.raises(
        ValueError, match=r"a checkpointed part .* give its ep\.Exchange padded=True"
    ):
        _trace(Model(1, padded=False))


# --- random numbers (G4)


def _written_later(x: Tensor) -> Tensor:
    noise = torch.rand_like(x)
    first = x * noise.exp()
    noise[:, :3].mul_(0.5)
    return first + noise


def _seen_through_a_view(x: Tensor) -> Tensor:
    noise = torch.ones_like(x)
    view = noise.view(-1)
    noise[:, 1:5].normal_()
    return x * view.view_as(x)


NOISES: dict[str, Noise] = {
    "rand": lambda x: x * (0.9 + 0.2 * torch.rand_like(x)),
    "dropout": lambda x: F.dropout(x, 0.2),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.8)),
    "normal_": lambda x: x * torch.empty_like(x).normal_(1, 0.1),
    "uniform_": lambda x: x * torch.empty_like(x).uniform_(0.9, 1.1),
    "gumbel": lambda x: x + F.gumbel_softmax(x),
    "multinomial": lambda x: x + torch.multinomial(x.softmax(-1), 1),
    "written later": _written_later,
    "seen through a view": _seen_through_a_view,
}
OFTEN = ("rand", "dropout", "normal_", "written later")
SOME = [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in NOISES]


@pytest.mark.parametrize("noise", SOME)
def test_noise_is_recomputed_as_it_was_drawn(noise: str) -> None:
    step, traced = _trace(Model(noise=NOISES[noise]))
    _assert_equal(step, traced)
    first, second = (traced(*step.state(), _batch()) for _ in range(2))
    assert not torch.equal(first.loss, second.loss)  # fresh numbers in each step


@pytest.mark.parametrize(
    "recompute", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["recompute", "kept"]
)
@pytest.mark.parametrize("chunking", [LAYER, pytest.param(MOE, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    "noise", [SOME[0], *(pytest.param(n, marks=pytest.mark.slow) for n in list(NOISES)[1:])]
)
def test_chunks_draw_as_eager_chunks_do(noise: str, chunking: Chunking, recompute: bool) -> None:
    _assert_equal(*_trace(Model(noise=NOISES[noise], recompute=recompute), chunking))


@pytest.mark.parametrize(
    "noise", ["rand", *(pytest.param(n, marks=pytest.mark.slow) for n in ("dropout", "normal_"))]
)
def test_noise_without_recompute(noise: str) -> None:
    _assert_equal(*_trace(Model(noise=NOISES[noise], recompute=False)))


class Nested(Model):
    def forward(self, tokens_BS: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, **self.how)
            return x * torch.rand_like(x)

        return self.head(checkpoint(body, self.embedding(tokens_BS), **self.how))


@pytest.mark.parametrize("noise", ["rand", "written later"])
def test_recomputed_twice_is_drawn_once(noise: str) -> None:
    step, traced = _trace(Nested(noise=NOISES[noise]))
    _assert_equal(step, traced)
    assert _count(traced, "aten.rand") == 3  # two layers, and the body around them


def test_only_what_is_written_later_is_copied() -> None:
    assert _count(_trace(Model(noise=NOISES["rand"]))[1], "aten.clone") == 0
    assert _count(_trace(Model(noise=_written_later))[1], "aten.clone") == 2


class NoisyGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * torch.rand_like(grad)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_backward_may_draw(recompute: bool) -> None:
    _assert_equal(*_trace(Model(noise=NoisyGrad.apply, recompute=recompute)))


def test_no_dropout_draws_nothing() -> None:
    step, traced = _trace(Model(noise=nn.Dropout(0.0), preserve_rng_state=False))
    _assert_equal(step, traced, steps=1)
    assert torch.equal(torch.get_rng_state(), torch.manual_seed(5).get_state())


def test_a_trace_leaves_the_random_state_alone() -> None:
    model, refused = Model(noise=NOISES["rand"]), Model(noise=_own_generator)
    before = torch.manual_seed(3).get_state()
    _trace(model, LAYER)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match="generator of its own"):
        _trace(refused)
    assert torch.equal(torch.get_rng_state(), before)


def _own_generator(x: Tensor) -> Tensor:
    return x * torch.rand(x.shape, generator=torch.Generator().manual_seed(0))


def _seeded(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x * torch.rand_like(x)


def _forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=()):
        return x * torch.rand_like(x)


REFUSED = {
    "own generator": (_own_generator, r"layers\.0\.moe \(aten.rand.generator\) draws from a gen"),
    "seeded": (_seeded, r"layers\.0\.moe \(aten.rand_like.default\) finds a random state that was"),
    "forked": (_forked, "random state that was set inside of the step .* seed outside"),
    "Python": (
        lambda x: x * random.random(),
        "with Python's random, which .* draw them with torch",
    ),
}


@pytest.mark.parametrize("noise", REFUSED)
@pytest.mark.parametrize("recompute", [False, True])
def test_what_a_graph_cannot_draw_again_is_refused(noise: str, recompute: bool) -> None:
    """Each was traced without a word before, and repeated one number or drew another."""
    function, message = REFUSED[noise]
    with pytest.raises(ValueError, match=message):
        _trace(Model(noise=function, recompute=recompute))


def test_numpy_is_refused() -> None:
    numpy = pytest.importorskip("numpy")
    with pytest.raises(
        ValueError, match=r"with numpy\.random, which would be the same in every run"
    ):
        _trace(Model(noise=lambda x: x * float(numpy.random.rand())))


@pytest.mark.parametrize("noise", ["rand", "dropout", "normal_"])
def test_other_numbers_in_the_recompute_are_refused(noise: str) -> None:
    """preserve_rng_state=False: plain PyTorch computes gradients of another forward."""
    with pytest.raises(
        ValueError, match=r"layers\.1\.moe .* draws other random numbers when it is recomputed .* "
        "leave preserve_rng_state=True",
    ):  # fmt: skip
        _trace(Model(noise=NOISES[noise], preserve_rng_state=False))


@pytest.mark.parametrize("chunking", [LAYER, MOE], ids=str)
@pytest.mark.parametrize(
    "noise", [lambda x: x * torch.rand(D), lambda x: x + torch.empty(D).normal_()]
)
def test_numbers_that_chunks_would_share_are_refused(noise: Noise, chunking: Chunking) -> None:
    """Whole: equal to plain PyTorch.  In chunks each would draw its own."""
    model = Model(1, noise)
    _assert_equal(*_trace(model))
    with pytest.raises(ValueError, match=r"in layers\.0\.moe draws random numbers whose shape is"):
        _trace(model, chunking)


@pytest.mark.gpu
@pytest.mark.parametrize("noise", ["rand", "dropout", "normal_"])
@pytest.mark.parametrize("chunking", [None, LAYER], ids=str)
def test_noise_on_a_gpu(noise: str, chunking: Chunking | None) -> None:
    step = Step(Model(noise=NOISES[noise]).cuda(), _loss)
    batch = tuple(x.cuda() for x in _batch())
    traced = interlace.trace_overlapped(step, batch, chunking)
    state, reference = step.state(), replace(step, chunking=chunking)
    torch.manual_seed(5)
    expected = [run_eager(reference, *state, batch) for _ in range(3)]
    torch.manual_seed(5)
    for one in expected:
        actual = traced(*state, batch)
        assert torch.equal(actual.loss, one.loss)
        assert all(torch.equal(actual.grads[n], g) for n, g in one.grads.items())


# --- writes to temporaries, which recomputed draws made visible


def _looked_at_before(x: Tensor) -> Tensor:
    sums = torch.zeros_like(x)
    view = sums.view(-1)
    sums.add_(x).mul_(2)
    return view.view_as(x)


def test_a_write_behind_a_write_is_seen_through_an_older_view() -> None:
    _assert_equal(*_trace(Model(1, _looked_at_before)), steps=1)


# --- memory (G5)


def _by_layer(traced: Traced) -> dict[str, tuple[int, int, int]]:
    """Of each layer: what its forward makes and later phases read, what they read of other
    forwards, and the operators that are recomputed."""
    layer = {n: ".".join(tag_of(n).layer.split(".")[:2]) for n in traced.gm.graph.nodes}
    found = {}
    for name in sorted({x for x in layer.values() if x.startswith("layers.")}):
        mine = [n for n in traced.gm.graph.nodes if layer[n] == name]
        later = [n for n in mine if tag_of(n).phase in ("recompute", "backward")]
        read = {s for n in later for s in n.all_input_nodes if tag_of(s).phase == "forward"}
        inside = sum(layer[s] == name for s in read)
        again = sum(tag_of(n).phase == "recompute" for n in mine)
        found[name] = (inside, len(read) - inside, again)
    return found


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_every_layer_saves_its_input_alone(layers: int) -> None:
    step, traced = _trace(Model(layers))
    counts = _by_layer(traced)
    assert len(counts) == layers
    assert set(counts.values()) == {(0, 1, counts["layers.0"][2])}
    for name in ("_scaled_dot_product", "grouped_mm", "ep.plan", "silu"):
        forward = _count(traced, name, "forward")
        assert _count(traced, name, "recompute") == forward > 0, name
    _assert_equal(step, traced, steps=1)


@pytest.mark.parametrize("layers", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("chunking", [LAYER, pytest.param(MOE, marks=pytest.mark.slow)], ids=str)
def test_every_chunked_layer_is_alike(layers: int, chunking: Chunking) -> None:
    step, traced = _trace(Model(layers), chunking)
    counts = _by_layer(traced)
    assert len(counts) == layers
    assert len({again for _, _, again in counts.values()}) == 1
    # The input, once or in its chunks; the first layer cuts it itself.
    saved = 2 if chunking is LAYER else 1
    assert all(inside + outside == saved for inside, outside, _ in counts.values())
    _assert_equal(step, traced, steps=1)


class Peak(fx.Interpreter):
    """Runs a graph and knows the most bytes that were alive at once, inputs left out."""

    def run_node(self, n: fx.Node):
        result = super().run_node(n)
        if n.op == "call_function":
            alive = [*self.env.values(), result]
            tensors = [t for v in alive for t in (v if isinstance(v, (tuple, list)) else [v])]
            storages = (t.untyped_storage() for t in tensors if isinstance(t, Tensor))
            sizes = {s.data_ptr(): s.nbytes() for s in storages}
            self.peak = max(self.peak, sum(b for p, b in sizes.items() if p not in self.given))
        return result

    def measure(self, *args: Tensor) -> int:
        self.peak, self.given = 0, {x.untyped_storage().data_ptr() for x in args}
        with torch.no_grad():
            self.run(*args)
        return self.peak


def _peak(layers: int, chunking: Chunking | None, scheduler: str, recompute: bool) -> int:
    step, batch = Step(Model(layers, recompute=recompute), _loss), _batch(32)
    traced = interlace.trace_overlapped(step, batch, chunking, scheduler)
    params, buffers = step.state()
    return Peak(traced.gm).measure(*params.values(), *buffers.values(), *batch)


FORMS = [(None, "off"), (None, "policy"), (LAYER, "off"), (MOE, "policy")]


@pytest.mark.slow
@pytest.mark.parametrize(("chunking", "scheduler"), FORMS, ids=str)
def test_a_further_layer_costs_its_input(chunking: Chunking | None, scheduler: str) -> None:
    """Bytes counted by hand; without recompute a layer keeps more than thirty times as much."""
    two, three = (_peak(n, chunking, scheduler, True) for n in (2, 3))
    assert three - two == 32 * S * D * 4
    two, three = (_peak(n, chunking, scheduler, False) for n in (2, 3))
    assert three - two > 30 * 32 * S * D * 4
