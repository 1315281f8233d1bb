"""One call from a step to its chunked and scheduled graph.

Oracle: plain PyTorch with chunked modules, bitwise; for buffers the sets that the launches carry.
"""

from __future__ import annotations

import pytest
import torch
from test_chunk import LAYER, MOE, B, Net, S, _batch, _exchange, _loss

import interlace
from interlace import ep
from interlace.graph import comm_of, count_effects
from interlace.graph.chunking import SEQUENCE, Chunking
from interlace.overlap import trace_overlapped
from interlace.trace import Step, Traced, run_eager

CLEAN_UP = ["remove_dead_nodes", "functionalise_temporaries"]


def _names(traced: Traced) -> list[str]:
    return [report.name for report in traced.reports]


def _equals_eager(step: Step, traced: Traced, chunking: Chunking | None) -> bool:
    reference = Step(step.model, _loss, chunking=chunking)
    batch = _batch(seed=7)
    expected = run_eager(reference, *reference.state(), batch)
    actual = traced(*step.state(), batch)
    return torch.equal(actual.loss, expected.loss) and all(
        torch.equal(actual.grads[n], g) for n, g in expected.grads.items()
    )


@pytest.mark.parametrize(
    ("chunking", "scheduler"),
    [
        (Chunking(LAYER, 2), "policy"),
        (Chunking(MOE, 3, SEQUENCE), "cost"),
        (Chunking(MOE, 2), "off"),
        (Chunking(MOE, 1), "policy"),
        (None, "policy"),
    ],
    ids=str,
)
def test_equal_to_eager_chunking(chunking: Chunking | None, scheduler: str) -> None:
    torch.manual_seed(1)
    step = Step(Net(_exchange()), _loss)
    traced = trace_overlapped(step, _batch(), chunking, scheduler)
    is_cut = chunking is not None and chunking.num_chunks > 1
    assert _equals_eager(step, traced, chunking if is_cut else None)
    passes = ["chunk_graph"] * is_cut + ["assign_buffers"] + ["schedule"] * (scheduler != "off")
    assert _names(traced) == CLEAN_UP + passes
    launches = count_effects(traced.gm)["ep.dispatch_launch.default"]
    assert launches == 4 * (chunking.num_chunks if chunking else 1)  # two layers, two directions


def test_a_backend_that_owns_buffers_gets_sets() -> None:
    ep.register_group(ep.Group("mirror", 2, 0, "loopback"))
    step = Step(Net(ep.Exchange("mirror", 2, 0, "minimal_async", padded=True)), _loss)
    traced = trace_overlapped(step, _batch(), Chunking(LAYER, 2))
    launches = [n for n in traced.gm.graph.nodes if comm_of(n)]
    assert min(n.args[comm_of(n).buffer_set_arg] for n in launches) == 0
    assert _equals_eager(step, traced, Chunking(LAYER, 2))


def test_notes_name_what_sees_one_chunk_only() -> None:
    step = Step(Net(_exchange(), lambda x, out: out - out.mean((0, 1), keepdim=True)), _loss)
    traced = trace_overlapped(step, _batch(), Chunking(MOE, 2))
    (report,) = [r for r in traced.reports if r.name == "chunk_graph"]
    assert report.notes
    assert all(
        "mean" in n and n.endswith("sees the tokens of its chunk only") for n in report.notes
    )


def test_refusals() -> None:
    step = Step(Net(_exchange()), _loss)
    with pytest.raises(ValueError, match=rf"dimension 0 of the batch has an extent of {B}, which"):
        trace_overlapped(step, _batch(), Chunking(LAYER, 5))
    with pytest.raises(ValueError, match=rf"dimension 1 of the batch has an extent of {S}, which"):
        trace_overlapped(step, _batch(), Chunking(MOE, 5, SEQUENCE))
    with pytest.raises(ValueError, match=r"scheduler='fast': use one of policy, cost, off"):
        trace_overlapped(step, _batch(), None, "fast")
    with pytest.raises(ValueError, match=r"the batch has no tensor with a dimension 1 to chunk"):
        trace_overlapped(step, (torch.ones(B),), Chunking(MOE, 2, SEQUENCE))


def test_source_lines_name_the_model() -> None:
    branches = Net(_exchange(), lambda x, out: out.cos() if x.shape[0] > 6 else out.sin())
    with pytest.raises(ValueError, match=r"cos.* in layers.0.moe at test_chunk.py:\d+ at full"):
        trace_overlapped(Step(branches, _loss), _batch(), Chunking(MOE, 2), source_lines=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of Inductor itself
def test_regions_are_compiled_before_anything_moves() -> None:
    step = Step(Net(_exchange()), _loss)
    traced = trace_overlapped(step, _batch(), Chunking(LAYER, 2), regional=True)
    passes = ["chunk_graph", "compile_regions", "assign_buffers", "schedule"]
    assert _names(traced) == CLEAN_UP + passes
    assert sum(getattr(n.target, "__name__", "") == "compiled_region"
               for n in traced.gm.graph.nodes) > 4  # fmt: skip


def test_public_name() -> None:
    assert interlace.trace_overlapped is trace_overlapped
