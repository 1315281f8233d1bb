"""Graph chunking against eager chunking, bitwise, and everything it must refuse."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from interlace import ep
from interlace.chunk import ChunkReport, chunk_graph
from interlace.graph import check_invariants, comm_of, is_wait, tag_of
from interlace.graph.chunking import BATCH, SEQUENCE, Chunking, chunk_extent
from interlace.kernels.grouped_mm import grouped_mm
from interlace.trace import Step, Traced, run_eager, trace_step

B, S, D, E, K = 12, 12, 8, 4, 2


class MoE(nn.Module):
    """Router, experts, a shared feed-forward; ``extra`` is called with x and the result."""

    def __init__(self, exchange: ep.Exchange, extra=None) -> None:
        super().__init__()
        self.exchange, self.extra = exchange, extra
        self.gate = nn.Linear(D, E, bias=False)
        self.w = nn.Parameter(torch.randn(E // exchange.size, D, D) * 0.3)
        self.shared = nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, 1)
        scores, ids = self.gate(flat).softmax(-1).topk(K, -1)
        counts = (ids.reshape(-1, 1) == torch.arange(E)).sum(0)
        plan = ep.plan(ids, E, self.exchange)
        rows = F.silu(grouped_mm(ep.dispatch(flat, plan), self.w, plan.offsets[1:]))
        out = (ep.combine(rows, scores, plan) + self.shared(flat)).unflatten(0, x.shape[:2])
        return (self.extra(x, out) if self.extra else out), counts


class Block(nn.Module):
    def __init__(self, exchange: ep.Exchange, extra=None, norm=None) -> None:
        super().__init__()
        self.mix = nn.Linear(D, D)
        self.norm = norm or nn.RMSNorm(D)
        self.moe = MoE(exchange, extra)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.mix(x).tanh()
        out, counts = self.moe(self.norm(x))
        return x + out, counts


class Sorted(nn.Module):
    """Its result is one item of an operator that has several, as a fused norm's is."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sort(-1).values


class Net(nn.Module):
    """Two blocks; ``norm`` makes what feeds the region; ``recompute``: checkpointed."""

    def __init__(self, exchange, extra=None, norm=None, recompute=False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(exchange, extra, norm and norm()) for _ in range(2))
        self.head = nn.Linear(D, 5)
        self.recompute = recompute

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        counts = []
        for layer in self.layers:
            if self.recompute:
                x, c = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x, c = layer(x)
            counts.append(c)
        return self.head(x), torch.stack(counts)


def _loss(model: nn.Module, x: Tensor, target: Tensor, norm: Tensor):
    y, counts = model(x)
    return (y - target).square().sum() / norm, {"counts": counts}


def _batch(b: int = B, s: int = S, seed: int = 0):
    gen = torch.Generator().manual_seed(seed)
    make = [torch.randn(b, s, n, generator=gen) for n in (D, 5)]
    return (*make, torch.tensor(float(B * S)))


def _exchange(size: int = 2, padded: bool = False) -> ep.Exchange:
    if size > 1:
        ep.register_group(ep.Group("mirror", size, 0, "loopback"))
        return ep.Exchange("mirror", size, 0, padded=padded)
    return ep.Exchange(padded=padded)


def _chunked(model: nn.Module, chunking: Chunking, loss=_loss) -> tuple[Traced, ChunkReport]:
    step = Step(model, loss, boundary=chunking.is_root)
    n, dim = chunking.num_chunks, chunking.dim
    extent = (B, S)[dim]
    full = trace_step(step, _batch())
    small = trace_step(step, _batch(B // n, S) if dim == BATCH else _batch(B, S // n))
    report = chunk_graph(full.gm, small.gm, chunking, extent)
    check_invariants(full.gm)
    full.gm.recompile()
    return full, report


def _assert_equals_eager_chunking(model, traced: Traced, chunking: Chunking, loss=_loss) -> None:
    step = Step(model, loss, chunking=chunking)
    params, buffers = step.state()
    batch = _batch(seed=7)
    expected, actual = run_eager(step, params, buffers, batch), traced(params, buffers, batch)
    assert torch.equal(actual.loss, expected.loss)
    for name, grad in expected.grads.items():
        assert torch.equal(actual.grads[name], grad), name
    assert torch.equal(actual.extra["counts"], expected.extra["counts"])


MOE, LAYER = "layers.*.moe", "layers.*"
ALL_FORMS = [
    Chunking(root, n, dim)
    for root, dim in ((MOE, BATCH), (MOE, SEQUENCE), (LAYER, BATCH))
    for n in (2, 3, 4)
]


FORMS = [c if c.num_chunks == 2 else pytest.param(c, marks=pytest.mark.slow) for c in ALL_FORMS]


@pytest.mark.parametrize("chunking", FORMS, ids=lambda c: f"{c.root}-{c.num_chunks}-{c.dim}")
@pytest.mark.parametrize(
    "kind",
    [
        "recompute",
        *(
            pytest.param(k, marks=pytest.mark.slow)
            for k in ("plain", "raw", "item", "padded", "one rank")
        ),
    ],
)
def test_bitwise_equal_to_eager_chunking(chunking: Chunking, kind: str) -> None:
    torch.manual_seed(1)
    # Recomputing an exact plan would need new sizes for the same rows; padded ones are fixed.
    exchange = _exchange(1 if kind == "one rank" else 2, padded=kind in ("padded", "recompute"))
    norm = {"raw": nn.Identity, "item": Sorted}.get(kind)
    model = Net(exchange, norm=norm, recompute=kind == "recompute")
    traced, report = _chunked(model, chunking)
    assert not report.cross_token
    _assert_equals_eager_chunking(model, traced, chunking)


@pytest.mark.parametrize("chunking", FORMS[:6], ids=lambda c: f"{c.root}-{c.num_chunks}-{c.dim}")
def test_exchanges_and_tags_of_a_chunked_graph(chunking: Chunking) -> None:
    traced, report = _chunked(Net(_exchange()), chunking)
    n = chunking.num_chunks
    launches = [x for x in traced.gm.graph.nodes if comm_of(x)]
    kinds = Counter((comm_of(x).name, tag_of(x).phase, tag_of(x).chunk) for x in launches)
    assert kinds == {
        (name, phase, c): 2
        for name in ("dispatch", "combine")
        for phase in ("forward", "backward")
        for c in range(n)
    }
    waits = [x for x in traced.gm.graph.nodes if is_wait(x)]
    assert len(waits) == len(launches)
    assert [(r, p) for r, p, _ in report.regions] == [
        (f"layers.{i}.moe", p) for p, i in (("forward", 0), ("forward", 1))
    ] + [(f"layers.{i}.moe", "backward") for i in (1, 0)]


def test_autograd_adds_the_last_chunk_first() -> None:
    """Oracle: the order in which autograd sums; four float32 terms do not commute."""
    traced, _ = _chunked(Net(_exchange()), Chunking(MOE, 4))
    merges = [
        n
        for n in traced.gm.graph.nodes
        if tag_of(n).role == "merge" and tag_of(n).layer == "layers.0.moe.shared"
    ]
    chunks = []
    for node in merges:
        if "add" in str(node.target):
            chunks += [tag_of(a).chunk for a in node.args if tag_of(a).chunk is not None]
    assert chunks == [3, 2, 1, 0]


def test_chunks_flow_from_block_to_block_without_being_joined() -> None:
    traced, _ = _chunked(Net(_exchange()), Chunking(LAYER, 2))
    cats = [n for n in traced.gm.graph.nodes if n.target is torch.ops.aten.cat.default]
    owners = Counter((tag_of(n).layer.split(".")[0], tag_of(n).phase) for n in cats)
    # forward: the last block's result; backward: nothing, the batch's own gradient is not asked for
    assert owners == {("layers", "forward"): 1}


def test_uneven_extents_are_refused_by_name() -> None:
    model = Net(_exchange())
    step = Step(model, _loss, chunking=Chunking(MOE, 5))
    with pytest.raises(ValueError, match=r"layers.0.moe, dimension 0 .* an extent of 12, which"):
        run_eager(step, *step.state(), _batch())
    with pytest.raises(ValueError, match=r"training.seq_len .* 7 equal chunks; use .* of 2, 3, 4"):
        chunk_extent("training.seq_len", 12, 7)


def test_a_pattern_without_modules_or_exchange_is_refused() -> None:
    model = Net(_exchange())
    step = Step(model, _loss, chunking=Chunking("blocks.*", 2))
    with pytest.raises(ValueError, match=r"chunk_root=blocks.\* matches no module"):
        run_eager(step, *step.state(), _batch())
    with pytest.raises(
        ValueError, match=r"matches no module with a token exchange; .* layers.0.moe"
    ):
        _chunked(model, Chunking("layers.*.mix", 2))


def _refused(match: str, extra=None, model=None, chunking=ALL_FORMS[0]) -> None:
    with pytest.raises(ValueError, match=match):
        _chunked(model or Net(_exchange(), extra), chunking)


def test_a_branch_on_the_extent_is_refused() -> None:
    def branches(x, out):
        return out.cos() if x.shape[0] > 6 else out.sin()

    _refused(r"operators of the step depend on the chunk extent; cos.* in layers.0.moe", branches)


def test_parts_of_extent_one_that_differ_say_so() -> None:
    def heads_first(x, out):
        heads = out.unflatten(-1, (2, D // 2)).transpose(1, 2)
        return (
            heads.reshape(-1, x.shape[1], D // 2)
            .view(-1, 2, x.shape[1], D // 2)
            .transpose(1, 2)
            .reshape(x.shape)
        )

    _refused(r"Parts of extent 1 .* use fewer than 12 chunks", heads_first, None, Chunking(MOE, 12))


def test_refusals_name_the_line_of_the_model() -> None:
    def branches(x, out):
        return out.cos() if x.shape[0] > 6 else out.sin()

    model, chunking = Net(_exchange(), branches), ALL_FORMS[0]
    step = Step(model, _loss, boundary=chunking.is_root)
    full = trace_step(step, _batch(), source_lines=True)
    small = trace_step(step, _batch(B // 2), source_lines=True)
    line = (
        r"cos.* in layers.0.moe at test_chunk.py:\d+ at full extent is sin.* at test_chunk.py:\d+"
    )
    with pytest.raises(ValueError, match=line):
        chunk_graph(full.gm, small.gm, chunking, B)


def test_a_trace_without_a_boundary_is_refused() -> None:
    step, chunking = Step(Net(_exchange()), _loss), Chunking(MOE, 2)
    full, small = trace_step(step, _batch()), trace_step(step, _batch(B // 2))
    with pytest.raises(
        ValueError, match=r"layers.0.moe has no boundary .* boundary=chunking.is_root"
    ):
        chunk_graph(full.gm, small.gm, chunking, B)


def test_a_loop_over_the_extent_is_refused() -> None:
    def loops(x, out):
        for _ in range(x.shape[0] // 6):
            out = out * 2
        return out

    _refused("operators of the step depend on the chunk extent", loops)


def test_the_extent_in_two_dimensions_is_refused() -> None:
    def attends(x, out):
        flat = out.flatten(0, 1)
        return (flat @ flat.t() @ flat).unflatten(0, x.shape[:2])

    _refused(r"mm.* in layers.0.moe.* in several dimensions: \[144, 144\] .* \[72, 72\]", attends)


def test_a_cross_token_statistic_is_reported_and_may_not_leave() -> None:
    def centred(x, out):
        return out - out.mean((0, 1), keepdim=True)

    model = Net(_exchange(), centred)
    traced, report = _chunked(model, Chunking(MOE, 2))
    assert any("mean" in line and "layers.0.moe" in line for line in report.cross_token)
    _assert_equals_eager_chunking(model, traced, Chunking(MOE, 2))

    class Leaks(Net):
        def forward(self, x):
            y, counts = super().forward(x)
            return y * self.layers[0].moe.mean, counts

    means = {
        "mean": lambda out: out.mean(),
        "div": lambda out: out.sum() / out.numel(),  # a sum, but over a number of tokens
        "mul": lambda out: out.sum() * (1 / out.shape[0]),
    }

    def keeping(moe, mean):
        def extra(x, out):
            moe.mean = mean(out)
            return out

        return extra

    for name, mean in means.items():
        leaking = Leaks(_exchange())
        leaking.layers[0].moe.extra = keeping(leaking.layers[0].moe, mean)
        _refused(
            rf"{name}.* in layers.0.moe.* leaves the region layers.0.moe to .* neither a slice",
            None,
            leaking,
        )


def test_a_proven_sum_may_leave() -> None:
    """Tokens of each expert leave as a sum over chunks; compared by hand."""
    model = Net(_exchange())
    traced, _ = _chunked(model, Chunking(MOE, 3))
    counts = traced(*Step(model, _loss).state(), _batch()).extra["counts"]
    assert counts.sum(1).tolist() == [B * S * K] * 2


def test_a_foreign_collective_is_refused() -> None:
    def reduces(x, out):
        total = torch.ops._c10d_functional.all_reduce(out, "sum", "0")
        return torch.ops._c10d_functional.wait_tensor(total)

    _refused(r"all_reduce.* in layers.0.moe.* is a collective inside of the region", reduces)


def test_a_module_called_twice_is_refused() -> None:
    class Twice(Net):
        def forward(self, x):
            y, c = self.layers[0](x)
            y, d = self.layers[0](y)
            return self.head(y), torch.stack([c, d])

    _refused("layers.0.moe is called more than once in a step", None, Twice(_exchange()))


def test_an_extent_folded_into_another_is_refused() -> None:
    class Folded(Block):
        def forward(self, x):
            out, counts = self.moe(x.flatten(0, 1).unsqueeze(0))
            return x + out.unflatten(1, x.shape[:2])[0], counts

    model = Net(_exchange())
    model.layers = nn.ModuleList(Folded(_exchange()) for _ in range(2))
    _refused("extent 12 folded into a dimension of 144", None, model, Chunking(MOE, 2, SEQUENCE))


def test_a_constant_of_the_extent_is_the_chunks_own_and_reported() -> None:
    def averages(x, out):
        return out / x.shape[0]

    model = Net(_exchange(), averages)
    traced, _ = _chunked(model, Chunking(MOE, 2))
    _assert_equals_eager_chunking(model, traced, Chunking(MOE, 2))


@pytest.mark.parametrize(
    ("pattern", "layer", "root"),
    [
        (MOE, "layers.3.moe.router", "layers.3.moe"),
        (MOE, "layers.3.moe", "layers.3.moe"),
        (MOE, "layers.3.moefoo", None),
        (MOE, "layers.3", None),
        (LAYER, "layers.3.moe.router", "layers.3"),
        (LAYER, "norm", None),
        (MOE, "", None),
    ],
)
def test_roots_by_pattern(pattern: str, layer: str, root: str | None) -> None:
    assert Chunking(pattern, 2).root_of(layer) == root
