"""push_rows: copies bit-exact, products against float64, on odd widths and unaligned memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_sources import nvrtc_found, usage_of
from torch import Tensor

from interlace.ep.transport import Group
from interlace.ep.windows import Windows, close_windows, open_windows
from interlace.kernels import cuda_source
from interlace.kernels import push_rows as module
from interlace.kernels.push_rows import push_rows, source_of, spread_of, unit_bytes

WIDTHS = [1, 3, 8, 13, 64, 2049]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}


def _windows(num_ranks: int, rows: int, width: int, dtype: torch.dtype, device: str) -> Windows:
    """Buffers of several ranks, all in this process."""
    groups = [Group(f"rank{r}", 1, 0, "single") for r in range(num_ranks)]
    parts = [open_windows(g, "x", rows, width, dtype, torch.device(device)) for g in groups]
    for part in parts:
        part.mine.fill_(-1)
    return Windows(
        parts[0].mine,
        tuple(p.mine for p in parts),
        torch.cat([p.addresses for p in parts]),
        rank=0,
    )


def check_push_rows(device: str) -> None:
    gen = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        for width in WIDTHS:
            for num_ranks, rows, num_pushed in ((1, 5, 3), (2, 40, 50), (3, 400, 1000)):
                windows = _windows(num_ranks, rows, width, dtype, device)
                places = torch.randperm(num_ranks * rows, generator=gen)[:num_pushed]
                dead = torch.rand(num_pushed, generator=gen) < 0.3
                target = places.masked_fill(dead, -1)
                for max_ctas in (None, 1, 5):
                    source = torch.randn(num_pushed, width, generator=gen).to(device, dtype)
                    take = torch.randint(num_pushed, (num_pushed,), generator=gen)
                    scale = torch.randn(num_pushed, generator=gen)
                    for t, f in ((None, None), (take, None), (take, scale), (None, scale)):
                        args = [None if a is None else a.to(device) for a in (t, target, f)]
                        push_rows(source, args[0], args[1], windows, rows, args[2], max_ctas)
                        moved = source.cpu() if t is None else source.cpu()[t]
                        _check(windows, moved, target, f, rows, dtype)
    close_windows()


def _check(
    windows: Windows, moved: Tensor, target: Tensor, scale: Tensor | None, rows: int, dtype
) -> None:
    found = torch.cat([p.cpu() for p in windows.peers])
    live = target >= 0
    untouched = torch.ones(len(found), dtype=torch.bool)
    untouched[target[live]] = False
    assert (found[untouched] == -1).all()
    actual, expected = found[target[live]], moved[live]
    if scale is None:
        assert torch.equal(actual, expected)
        return
    exact = expected.double() * scale[live][:, None].double()
    error = (actual.double() - exact).abs()
    tiny = 2.0**-25 if dtype == torch.float16 else 0.0  # half of a subnormal
    assert (error <= ROUNDING[dtype] * exact.abs() + tiny).all()
    assert torch.equal(actual, (expected.float() * scale[live][:, None]).to(dtype))


def test_rows_on_cpu() -> None:
    check_push_rows("cpu")


@pytest.mark.gpu
def test_rows_on_gpu() -> None:
    check_push_rows("cuda")


@pytest.mark.gpu
def test_strided_and_unaligned_sources_on_gpu() -> None:
    windows = _windows(2, 8, 16, torch.bfloat16, "cuda")
    pool = torch.randn(8 * 40 + 1, device="cuda").bfloat16()
    for start, stride in ((0, 40), (1, 40), (4, 20), (0, 16)):
        source = pool[start:].as_strided((8, 16), (stride, 1))
        target = torch.tensor([9, 0, -1, 3, 15, 8, 1, 2], device="cuda")
        push_rows(source, None, target, windows, 8)
        found = torch.cat(windows.peers)
        assert torch.equal(found[target[target >= 0]], source[target >= 0])
    close_windows()


@pytest.mark.gpu
def test_a_captured_push_reads_what_is_there_at_replay() -> None:
    windows = _windows(2, 64, 2048, torch.bfloat16, "cuda")
    source = torch.randn(100, 2048, device="cuda").bfloat16()
    target = torch.randperm(128, device="cuda")[:100]
    for max_ctas in (None, 4):
        push_rows(source, None, target, windows, 64, None, max_ctas)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            push_rows(source, None, target, windows, 64, None, max_ctas)
        for _ in range(3):
            source.normal_()
            target.copy_(torch.randperm(128, device="cuda")[:100])
            graph.replay()
            assert torch.equal(torch.cat(windows.peers)[target], source)
    close_windows()


@pytest.mark.gpu
def test_a_bounded_launch_has_its_sms_to_itself() -> None:
    kernel = cuda_source.cuda_kernel(
        source_of(16, 0), "push_rows", torch.device("cuda"), module.CLAIM_BYTES
    )
    properties = torch.cuda.get_device_properties()
    assert 2 * kernel.claim_bytes > properties.shared_memory_per_multiprocessor


def test_units_fit_every_row() -> None:
    assert unit_bytes(1024, 4096, 4096) == 16
    assert unit_bytes(1024, 4096 + 8, 4096) == 8
    assert unit_bytes(1024, 26, 26) == 2
    assert unit_bytes(1028, 4096, 4096) == 4


@pytest.mark.parametrize("num_rows", [1, 2, 3, 6, 64, 1000, 131072])
def test_spread_visits_every_row_once(num_rows: int) -> None:
    step = spread_of(num_rows)
    assert sorted(i * step % num_rows for i in range(num_rows)) == list(range(num_rows))


@pytest.mark.skipif(not nvrtc_found(), reason="needs NVRTC, which CUDA builds of torch bring")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_source_compiles_without_spills(arch: str, tmp_path: Path) -> None:
    """For every unit and type; four loads before their stores; registers for 512 threads."""
    for unit, element in ((16, 0), (16, 1), (16, 2), (16, 3), (8, 2), (4, 1), (2, 2), (2, 0)):
        usage = usage_of(source_of(unit, element), "push_rows", arch, tmp_path)
        assert usage["REG"] <= 64
        assert usage["STACK"] == usage["LOCAL"] == 0


def test_bad_arguments_are_named() -> None:
    windows = _windows(1, 4, 3, torch.float32, "cpu")
    x, target = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"source is \(3, 2\) with strides \(1, 3\)"):
        push_rows(torch.ones(2, 3).t(), None, target, windows, 4)
    with pytest.raises(ValueError, match=r"rows of 3 torch.float64 on cpu, the windows of 3 "):
        push_rows(x.double(), None, target, windows, 4)
    with pytest.raises(ValueError, match=r"take is torch.int32 \(2,\); expected int64 \(2,\)"):
        push_rows(x, target.int(), target, windows, 4)
    with pytest.raises(ValueError, match=r"scale is torch.float32 \(1,\)"):
        push_rows(x, None, target, windows, 4, torch.ones(1))
    close_windows()


@pytest.mark.gpu
def test_an_error_of_the_compiler_is_shown() -> None:
    nonsense = 'extern "C" __global__ void nonsense() { x = 1; }'
    with pytest.raises(RuntimeError, match=r"nonsense: NVRTC failed with error \d+:(.|\n)*identif"):
        cuda_source.compile_source(nonsense, "nonsense", "sm_90")
