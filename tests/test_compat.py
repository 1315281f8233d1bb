"""Behaviour of every wrapper around a private torch name."""

from __future__ import annotations

import pytest
import torch

from interlace import _compat


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu130", "2.13.0+cpu"])
def test_supported_versions_pass(version: str) -> None:
    _compat._check_version(version)


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0", "1.13", "3.0"])
def test_other_versions_name_the_range(version: str) -> None:
    with pytest.raises(ImportError, match=rf"torch >= 2\.11 and < 2\.14, found {version}"):
        _compat._check_version(version)


def test_tree_round_trip() -> None:
    tree = {"a": [1, torch.ones(2)], "b": (None, 3)}
    leaves, spec = _compat.tree_flatten(tree)
    again = _compat.tree_unflatten(leaves, spec)
    assert again["b"] == (None, 3)
    assert again["a"][1] is tree["a"][1]
    doubled = _compat.tree_map_tensors(lambda t: t * 2, tree)
    assert doubled["a"][1].tolist() == [2.0, 2.0]
    assert doubled["b"] == (None, 3)


def test_add_each() -> None:
    targets, others = [torch.ones(2), torch.zeros(3)], [torch.ones(2), torch.ones(3)]
    _compat.add_each_(targets, others)
    assert targets[0].tolist() == [2, 2]
    assert targets[1].tolist() == [1, 1, 1]


def test_sequence_numbers_grow_in_creation_order() -> None:
    x = torch.ones(2, requires_grad=True)
    before = _compat.next_sequence_number()
    a = x * 2
    between = _compat.next_sequence_number()
    b = a.sum()
    first, second = _compat.sequence_number(a.grad_fn), _compat.sequence_number(b.grad_fn)
    assert before <= first < between <= second


def test_fake_tensors_have_shape_and_no_memory() -> None:
    with _compat.fake_mode() as mode:
        fake = _compat.to_fake(mode, torch.ones(3, 4))
        assert (fake @ fake.t()).shape == (3, 3)
    assert _compat.is_fake(fake)
    assert not _compat.is_fake(torch.ones(1))


def test_operator_properties() -> None:
    aten = torch.ops.aten
    assert _compat.op_is_mutable(aten.add_.Tensor)
    assert not _compat.op_is_mutable(aten.add.Tensor)
    assert _compat.op_is_random(aten.bernoulli.default)
    assert not _compat.op_is_random(aten.mul.Tensor)
    assert _compat.op_namespace(aten.add.Tensor) == "aten"
    assert _compat.op_namespace(len) == ""


def test_packages() -> None:
    assert _compat.package_available("torch")
    assert not _compat.package_available("no_such_package_here")
    assert not _compat.package_available("no_such_package_here.part")


def test_triton_is_for_cuda_and_for_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    for interpreted in (False, True):
        monkeypatch.setattr(_compat, "TRITON_INTERPRETED", interpreted)
        assert _compat.runs_triton("op", cpu) is interpreted
    monkeypatch.setattr(_compat, "HAS_TRITON", True)
    assert _compat.runs_triton("op", cuda) is True
    monkeypatch.setattr(_compat, "HAS_TRITON", False)
    with pytest.raises(RuntimeError, match=r"^gather_rows: a CUDA tensor needs Triton"):
        _compat.runs_triton("gather_rows", cuda)


def test_what_an_operator_shares_and_writes() -> None:
    """Against what torch's own schemas say in words: (a) shares, (a!) writes, -> * splits."""
    aten = torch.ops.aten

    def of(op) -> dict[str, tuple[bool, bool]]:
        return {name: (shares, writes) for name, shares, writes in _compat.op_memory(op)}

    assert of(aten.view.default) == {"self": (True, False), "size": (False, False)}
    assert of(aten.split.Tensor)["self"] == (True, False)
    assert of(aten.add_.Tensor)["self"] == (True, True)
    assert of(aten.add_.Tensor)["other"] == (False, False)
    assert of(aten._foreach_add_.List)["self"][1] is True
    assert not any(shares or writes for shares, writes in of(aten.mm.default).values())
    assert of(len) == {}


@pytest.mark.gpu
def test_gpu_sleep_holds_up_its_stream() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _compat.gpu_sleep(1, device)
    start.record()
    _compat.gpu_sleep(30, device)
    end.record()
    assert not end.query()
    torch.cuda.synchronize()
    assert 15 < start.elapsed_time(end) < 90


def _handles(rank: int, size: int, device_of_rank: list[int]) -> list[int]:
    import torch.distributed as dist

    device = torch.device("cuda", device_of_rank[rank])
    torch.cuda.set_device(device)
    mine = torch.zeros(4, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    handles = [None] * size
    dist.all_gather_object(handles, _compat.share_handle(mine))
    theirs = _compat.open_handle(handles[1 - rank], device)
    assert theirs.device == device
    theirs[rank] += 10 + rank  # a kernel of this rank's GPU
    torch.cuda.synchronize()
    dist.barrier()
    found = mine.tolist()
    dist.barrier()
    return found


@pytest.mark.gpu
def test_handles_of_one_gpu(two_ranks) -> None:
    assert two_ranks.run(_handles, [0, 0]) == [[0, 11, 0, 0], [10, 0, 0, 0]]


@pytest.mark.multi_gpu
def test_handles_of_two_gpus(two_ranks) -> None:
    assert two_ranks.run(_handles, [0, 1]) == [[0, 11, 0, 0], [10, 0, 0, 0]]


def _symmetric(rank: int, size: int) -> list[list[int]]:
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    buffers = _compat.symmetric_memory(4, torch.device("cuda", rank), dist.group.WORLD)
    for peer in buffers:
        peer[rank] = 10 + rank
    torch.cuda.synchronize()
    dist.barrier()
    return [b.tolist()[:size] for b in buffers]


@pytest.mark.multi_gpu
def test_symmetric_memory_is_written_by_every_rank(two_ranks) -> None:
    assert two_ranks.run(_symmetric) == [[[10, 11], [10, 11]]] * 2


def test_call_draws() -> None:
    """Attention is tagged as random and draws for its dropout alone."""
    aten, q = torch.ops.aten, torch.zeros(1, 1, 2, 4)
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert _compat.op_is_random(attention)
    assert not _compat.call_draws(attention, (q, q, q), {})
    assert not _compat.call_draws(attention, (q, q, q, 0.0, True), {})
    assert _compat.call_draws(attention, (q, q, q, 0.1, True), {})
    assert _compat.call_draws(attention, (q, q, q), {"dropout_p": 0.1})
    assert _compat.call_draws(aten.native_dropout.default, (q, 0.5, True), {})
    for op in (aten.rand.default, aten.normal_.default, aten.bernoulli.default):
        assert _compat.call_draws(op, (), {})
    assert not _compat.call_draws(aten.add.Tensor, (q, q), {})


def test_watched_calls() -> None:
    """Every operator, those of a backward too, before it runs."""
    seen: list[str] = []
    x = torch.ones(2, requires_grad=True)
    with _compat.watched_calls(lambda op, args, kwargs: seen.append(str(op))):
        (x * 2).sum().backward()
    assert seen[:2] == ["aten.mul.Tensor", "aten.sum.default"]
    assert "aten.expand.default" in seen[2:]
    assert torch.equal(x.grad, torch.full((2,), 2.0))
