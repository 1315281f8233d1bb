"""Routing metadata against loops over slots in Python; the kernels in Triton's interpreter."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from cuda_sources import nvrtc_found, usage_of
from test_gather_rows import compile_for_h100, run_interpreted
from torch import Tensor

from interlace import _compat
from interlace.kernels import rank_slots as counting
from interlace.kernels import route as module
from interlace.kernels.rank_slots import BLOCK, rank_slots
from interlace.kernels.route import lay_out, origins, place_slots, share_counts

# (tokens, choices, experts): none, one, less and more than a block, odd numbers of experts
SIZES = [(0, 2, 4), (1, 1, 2), (7, 3, 6), (90, 4, 12), (130, 2, 40)]


def _ids(num_tokens: int, top_k: int, num_experts: int, seed: int) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, num_experts, generator=gen).argsort(1)[:, :top_k].contiguous()


def check_rank_slots(device: str) -> None:
    for i, (num_tokens, top_k, num_experts) in enumerate(SIZES):
        ids = _ids(num_tokens, top_k, num_experts, i)
        ranked = rank_slots(ids.to(device), num_experts)
        seen = [0] * num_experts
        position = []
        for expert in ids.reshape(-1).tolist():
            position.append(seen[expert])
            seen[expert] += 1
        assert ranked.counts.tolist() == seen
        within, before = ranked.within.tolist(), ranked.before.tolist()
        found = [within[n] + before[n // BLOCK][e] for n, e in enumerate(ids.reshape(-1).tolist())]
        assert found == position


def _rows_of(all_ids: list[Tensor], num_ranks: int, num_experts: int, block_rows: int, d: int):
    """Rank d's rows as (expert, source rank, slot), in order; slots beyond a block are cut."""
    local = num_experts // num_ranks
    found = []
    for s, ids in enumerate(all_ids):
        flat = ids.reshape(-1).tolist()
        sent = sorted((e, n) for n, e in enumerate(flat) if e // local == d)
        found += [(e, s, n) for e, n in sent[:block_rows]]
    return sorted(found)


def check_places(device: str) -> None:
    """Every rank with as many tokens, and the last with a third of the others' (0 of 1)."""
    for (num_tokens, top_k, num_experts), num_ranks, factor, last in itertools.product(
        SIZES, (1, 2), (1.0, 0.4), (1, 3)
    ):
        local, num_slots = num_experts // num_ranks, num_tokens * top_k
        block_rows = int(num_tokens * min(top_k, local) * factor)
        capacity = num_ranks * block_rows
        all_ids = [_ids(num_tokens, top_k, num_experts, 7 + r) for r in range(num_ranks)]
        all_ids[-1] = all_ids[-1][: num_tokens // last]
        apart = None if last == 1 else num_slots
        counts = torch.full((num_ranks, num_experts + 2), -1, dtype=torch.int32, device=device)
        ranked = [rank_slots(ids.to(device), num_experts) for ids in all_ids]
        at = torch.tensor([counts.data_ptr()], device=device)
        for r in range(num_ranks):
            share_counts(ranked[r].counts, block_rows, num_slots, (counts,), at, r)
        assert counts[:, num_experts:].tolist() == [[block_rows, num_slots]] * num_ranks
        windows = [
            torch.full((1, capacity), -7, dtype=torch.int32, device=device)
            for _ in range(num_ranks)
        ]
        addresses = torch.tensor([w.data_ptr() for w in windows], device=device)
        expected = [
            _rows_of(all_ids, num_ranks, num_experts, block_rows, d) for d in range(num_ranks)
        ]
        for r in range(num_ranks):
            layout = lay_out(counts[:, :num_experts], num_ranks, r, block_rows)
            target, token, place = place_slots(
                all_ids[r].to(device), ranked[r], layout, tuple(windows), addresses, r,
                slots_per_rank=apart,
            )  # fmt: skip
            goals = {
                (s, n): d * capacity + row
                for d in range(num_ranks)
                for row, (_, s, n) in enumerate(expected[d])
            }
            wanted = [goals.get((r, n), -1) for n in range(all_ids[r].numel())]
            assert target.tolist() == wanted
            assert token.tolist() == [n // top_k for n in range(all_ids[r].numel())]
            assert place.tolist() == [n if t >= 0 else -1 for n, t in enumerate(wanted)]
            mine = [e - r * local for e, _, _ in expected[r]]
            assert layout.counts.tolist() == [mine.count(e) for e in range(local)]
            assert layout.offsets.tolist() == [sum(e < j for e in mine) for j in range(local + 1)]
            assert layout.live.tolist() == [len(mine)]
            wanted = [
                sum(e // local == d for e in all_ids[r].reshape(-1).tolist())
                for d in range(num_ranks)
            ]
            assert layout.overflow.tolist() == [sum(max(n - block_rows, 0) for n in wanted)]
            assert layout.overflow.dtype == layout.offsets.dtype == torch.int32
        for r in range(num_ranks):
            wanted = [s * num_slots + n for _, s, n in expected[r]]
            back = origins(windows[r][0], torch.tensor([len(wanted)], device=device))
            assert back.tolist() == wanted + [-1] * (capacity - len(wanted))


def check_mirror(device: str) -> None:
    """What rank 0 sends to rank s comes back as what rank s sends: as if all had its tokens."""
    ids = _ids(20, 3, 12, 5)
    ranked, capacity = rank_slots(ids.to(device), 12), 4 * 60
    counts = torch.empty(1, 14, dtype=torch.int32, device=device)
    at = torch.tensor([counts.data_ptr()], device=device)
    share_counts(ranked.counts, 60, 60, (counts,), at, 0)
    layout = lay_out(counts[:, :12], 4, 0, 60, mirrored=True)
    window = torch.full((1, capacity), -7, dtype=torch.int32, device=device)
    addresses = torch.tensor([window.data_ptr()] * 4, device=device)
    target, *_ = place_slots(
        ids.to(device), ranked, layout, (window,) * 4, addresses, 0, mirrored=True
    )
    rows = sorted((e % 3, e // 3, n) for n, e in enumerate(ids.reshape(-1).tolist()))
    wanted = {n: s * capacity + row for row, (_, s, n) in enumerate(rows)}
    assert target.tolist() == [wanted[n] for n in range(60)]
    assert window[0].tolist() == [s * 60 + n for _, s, n in rows] + [-7] * (capacity - 60)
    assert layout.live.tolist() == [60]


def check_all(device: str) -> None:
    check_rank_slots(device)
    check_places(device)
    check_mirror(device)


def check_interpreted() -> None:
    assert _compat.runs_triton("route", torch.device("cpu"))
    module.lay_out_ref = module.place_slots_ref = None
    check_all("cpu")


def test_reference() -> None:
    check_all("cpu")


def test_kernels_in_the_interpreter() -> None:
    run_interpreted("test_route", "check_interpreted()")


@pytest.mark.gpu
def test_kernels_on_gpu() -> None:
    check_all("cuda")
    for num_tokens, top_k, num_experts in ((16384, 8, 128), (33000, 1, 33), (5000, 6, 2048)):
        ids = _ids(num_tokens, top_k, num_experts, 0)  # many blocks: each warp adds up several
        expected, actual = rank_slots(ids, num_experts), rank_slots(ids.cuda(), num_experts)
        for name in ("counts", "within", "before"):
            assert torch.equal(getattr(actual, name).cpu(), getattr(expected, name)), name


COMPILED = [
    ("_share_kernel", {"counts": "*i32", "addresses": "*i64", "first": "i32", "block_rows": "i32",
                       "num_slots": "i32"}, {"E": 128, "E_PAD": 128}),
    ("_lay_out_kernel", {"counts": "*i32", "first": "*i64", "kept": "*i32", "counts_out": "*i64",
                         "offsets": "*i32", "live": "*i64", "overflow": "*i32", "stride": "i32",
                         "rank": "i32", "block_rows": "i32"},
     {"W": 8, "LOCAL": 16, "MIRRORED": False, "W_PAD": 8, "LOCAL_PAD": 16}),
    ("_place_kernel", {"ids": "*i64", "within": "*i32", "before": "*i32", "first": "*i64",
                       "kept": "*i32", "addresses": "*i64", "target": "*i64", "token": "*i64",
                       "place": "*i64", "num_slots": "i32", "num_experts": "i32", "rank": "i32",
                       "rows_per_rank": "i32", "slots_per_rank": "i32"},
     {"K": 8, "MIRRORED": False, "BLOCK": BLOCK}),
    ("_origins_kernel", {"arrived": "*i32", "live": "*i64", "out": "*i64", "num_rows": "i32"},
     {"BLOCK": 1024}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "signature", "constants"), COMPILED, ids=[c[0] for c in COMPILED])
def test_kernels_compile_without_spills(
    name, signature, constants, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = compile_for_h100(getattr(module, name), signature, constants, num_warps=4)
    assert ".local" not in compiled.asm["ptx"]


@pytest.mark.skipif(not nvrtc_found(), reason="needs NVRTC, which CUDA builds of torch bring")
@pytest.mark.parametrize(("name", "most"), [("count_slots", 128), ("add_up", 64)])
def test_sources_compile_without_spills(name: str, most: int, tmp_path: Path) -> None:
    usage = usage_of(counting.source_of(128), name, "sm_90", tmp_path)
    assert usage["REG"] <= most
    assert usage["STACK"] == usage["LOCAL"] == 0


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"ids is torch.int32 \(2, 1\); expected int64 \(T, K\)"):
        rank_slots(torch.zeros(2, 1, dtype=torch.int32), 4)
    with pytest.raises(ValueError, match=r"\(3, 8\) for 2 ranks; expected int32 \(2, E\)"):
        lay_out(torch.zeros(3, 8, dtype=torch.int32), 2, 0, 4)
