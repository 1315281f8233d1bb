"""bounded_copy: bit-exact copies (oracle: the source), and a bound that it keeps or raises."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
import torch

from interlace.kernels import bounded_copy as module
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


@pytest.mark.gpu
def test_no_two_ctas_fit_on_one_sm() -> None:
    bounded_copy(torch.empty(4, device="cuda"), torch.ones(4, device="cuda"), 1)
    _, claim_bytes = module._functions[torch.cuda.current_device()]
    properties = torch.cuda.get_device_properties()
    assert 2 * claim_bytes > properties.shared_memory_per_multiprocessor


def test_whole_vectors_need_16_byte_ends() -> None:
    pool = torch.empty(256, dtype=torch.uint8)
    start = -pool.data_ptr() % 16
    at = [pool[start + i : start + i + 100] for i in range(17)]
    assert num_vectors(at[0], at[16]) == 6
    assert num_vectors(at[1], at[0]) == num_vectors(at[0], at[8]) == 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_ptx_assembles_without_spills(arch: str, tmp_path: Path) -> None:
    """Registers of 512 threads must fit: at most 128 a thread."""
    import triton

    source = tmp_path / "copy.ptx"
    source.write_text(module._PTX)
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    done = subprocess.run(
        [assembler, "-v", f"-arch={arch}", source, "-o", tmp_path / "copy.cubin"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr
    assert int(re.search(r"Used (\d+) registers", done.stderr).group(1)) <= 128


class _FakeDriver:
    """Answers every call with success; the occupancy query says ``resident``."""

    def __init__(self, resident: int, status: int = 0) -> None:
        self.resident, self.status, self.calls = resident, status, []

    def __getattr__(self, name: str):
        def call(*args):
            self.calls.append(name)
            if name == "cuDeviceGetAttribute":
                args[0]._obj.value = 227 * 1024
            if name == "cuOccupancyMaxActiveBlocksPerMultiprocessor":
                args[0]._obj.value = self.resident
            if name == "cuGetErrorString":
                args[1]._obj.value = b"invalid image"
            return self.status

        return call


def test_a_bound_that_cannot_be_kept_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_driver", lambda: _FakeDriver(resident=2))
    with pytest.raises(
        RuntimeError, match=r"2 CTAs with 122880 bytes .* one SM of cuda:0; expected 1"
    ):
        module._load(0)
    monkeypatch.setattr(module, "_driver", lambda: _FakeDriver(resident=1))
    function, claim_bytes = module._load(0)
    assert isinstance(function, ctypes.c_void_p)
    assert claim_bytes == 120 * 1024
    monkeypatch.setattr(module, "_driver", lambda: _FakeDriver(resident=1, status=200))
    with pytest.raises(RuntimeError, match="cuModuleLoadData failed with error 200: invalid image"):
        module._load(0)


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
