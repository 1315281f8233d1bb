"""bounded_copy: bit-exact copies (oracle: the source), and a bound that it keeps or raises."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cuda_sources import nvrtc_found, usage_of

from interlace.kernels import bounded_copy as module
from interlace.kernels import cuda_source
from interlace.kernels.bounded_copy import bounded_copy, num_vectors

NUM_BYTES = [0, 1, 15, 16, 17, 8191, 8192, 32768 * 3 + 5, (1 << 20) + 48]


def check_copies(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in NUM_BYTES:
        # Views that start off 16 bytes, or end before the buffer does, must leave the rest alone.
        for dst_start, src_start in ((0, 0), (16, 32), (1, 0), (3, 3)):
            pool = torch.randint(256, (size + 64,), dtype=torch.uint8, generator=generator)
            src = pool.to(device)[src_start : src_start + size]
            buffer = torch.full((size + 64,), 123, dtype=torch.uint8, device=device)
            for num_ctas in (1, 3, 132):
                buffer.fill_(123)
                bounded_copy(buffer[dst_start : dst_start + size], src, num_ctas)
                assert torch.equal(buffer[dst_start : dst_start + size], src)
                assert (buffer[:dst_start] == 123).all()
                assert (buffer[dst_start + size :] == 123).all()
    x = torch.randn(37, 131, generator=generator).to(device, torch.bfloat16)
    y = torch.full_like(x, float("nan"))
    bounded_copy(y, x, 2)
    assert torch.equal(x, y)


def test_copies_on_cpu() -> None:
    check_copies("cpu")


@pytest.mark.gpu
def test_copies_on_gpu() -> None:
    check_copies("cuda")


@pytest.mark.gpu
def test_captured_copy_reads_what_the_source_holds_at_replay() -> None:
    src = torch.randn(100_003, device="cuda")
    dst = torch.empty_like(src)
    bounded_copy(dst, src, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bounded_copy(dst, src, 8)
    for _ in range(2):
        src.normal_()
        dst.fill_(float("nan"))
        graph.replay()
        assert torch.equal(dst, src)


def test_whole_vectors_need_16_byte_ends() -> None:
    pool = torch.empty(256, dtype=torch.uint8)
    start = -pool.data_ptr() % 16
    at = [pool[start + i : start + i + 100] for i in range(17)]
    assert num_vectors(at[0], at[16]) == 6
    assert num_vectors(at[1], at[0]) == num_vectors(at[0], at[8]) == 0


@pytest.mark.skipif(not nvrtc_found(), reason="needs NVRTC, which CUDA builds of torch bring")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_source_compiles_without_spills(arch: str, tmp_path: Path) -> None:
    usage = usage_of(module._SOURCE, "bounded_copy", arch, tmp_path)
    assert usage["REG"] <= 64
    assert usage["STACK"] == usage["LOCAL"] == 0


@pytest.mark.parametrize(
    ("of_sm", "of_block", "claimed"),
    [(228, 227, 120), (164, 163, 120), (100, 99, 99), (256, 227, None)],
)
def test_a_bound_that_cannot_be_kept_raises(
    of_sm: int, of_block: int, claimed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KiB of an H200, an A100, an L40S, and an SM so large that two CTAs fit."""
    has = SimpleNamespace(shared_memory_per_multiprocessor=of_sm * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: has)
    monkeypatch.setattr(cuda_source, "_most_shared", lambda _: of_block * 1024)
    device = torch.device("cuda", 0)
    if claimed is None:
        with pytest.raises(RuntimeError, match=r"two CTAs with 122880 bytes .* of cuda:0, which"):
            cuda_source._claim("bounded_copy", device, module.CLAIM_BYTES)
        return
    found = cuda_source._claim("bounded_copy", device, module.CLAIM_BYTES)
    assert found == claimed * 1024
    assert 2 * found > of_sm * 1024


def test_bad_arguments_are_named() -> None:
    x = torch.ones(4, 3)
    with pytest.raises(
        ValueError, match=r"dst is torch.float32 \(4, 2\) on cpu, src is .* \(4, 3\)"
    ):
        bounded_copy(x[:, :2], x, 1)
    with pytest.raises(ValueError, match=r"src is torch.float64"):
        bounded_copy(x, x.double(), 1)
    with pytest.raises(ValueError, match=r"strides of dst are \(3, 1\), of src \(1, 4\)"):
        bounded_copy(x.clone(), torch.ones(3, 4).t(), 1)
    with pytest.raises(ValueError, match="num_ctas is 0; expected at least 1"):
        bounded_copy(x.clone(), x, 0)
