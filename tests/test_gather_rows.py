"""gather_rows: copies bit-exact, products against float64; the kernel in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from interlace import _compat
from interlace.kernels import gather_rows as module
from interlace.kernels.gather_rows import gather_rows

# (source rows, gathered rows, hidden): odd rows and widths, more columns than a block, zero rows
SIZES = [(3, 7, 5), (9, 40, 64), (4, 5, 2049), (2, 0, 8), (5, 3, 1), (3, 2, 0)]
DTYPES = [torch.bfloat16, torch.float32]
# One float32 product, rounded once: a unit in the last place covers it; half of one to bfloat16,
# which Triton's interpreter (3.6, 3.7) cuts off instead of rounding.
ROUNDING = {torch.bfloat16: 2.0 ** -(7 + (not _compat.TRITON_INTERPRETED)), torch.float32: 2.0**-23}
NAN = float("nan")


def check_gather_rows(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        for num_sources, num_rows, hidden in SIZES:
            x = torch.randn(num_sources, hidden, generator=generator).to(device, dtype)
            index = torch.randint(num_sources, (num_rows,), generator=generator).to(device)
            scale = torch.randn(num_rows, generator=generator).to(device)
            poisoned = torch.full((num_rows, hidden), NAN, dtype=dtype, device=device)
            assert torch.equal(gather_rows(x, index), x[index])
            assert gather_rows(x, index, out=poisoned) is poisoned
            assert torch.equal(poisoned, x[index])
            exact = x[index].double() * scale[:, None].double()
            poisoned.fill_(NAN)
            gather_rows(x, index, scale, poisoned)
            assert ((poisoned.double() - exact).abs() <= ROUNDING[dtype] * exact.abs()).all()
            assert torch.equal(gather_rows(x, index, scale), poisoned)
    x = torch.randn(6, 4, generator=generator).to(device)
    assert torch.equal(gather_rows(x.t(), index[:0] + 1), x.t()[index[:0] + 1])
    assert torch.equal(gather_rows(x[::2], index * 0 + 2), x[[4] * len(index)])


def run_interpreted(test: str, call: str) -> None:
    """Runs ``call`` of a test module in a process whose kernels Triton interprets on the CPU."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {test}; {test}.{call}"],
        cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ".."},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def compile_for_h100(kernel, signature: dict[str, str], constants: dict[str, object], **options):
    """What Triton's compiler makes for an accelerator that need not be here: PTX and resources."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = kernel.arg_names
    pointers = [n for n in names if signature.get(n, "").startswith("*")]
    source = ASTSource(
        kernel,
        {n: signature.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in pointers},
    )
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def check_interpreted() -> None:
    assert _compat.runs_triton("gather_rows", torch.device("cpu"))
    module.gather_rows_ref = None  # the kernel does it, or nobody
    check_gather_rows("cpu")


def test_reference() -> None:
    check_gather_rows("cpu")


def test_kernel_in_the_interpreter() -> None:
    run_interpreted("test_gather_rows", "check_interpreted()")


@pytest.mark.gpu
def test_kernel_on_gpu() -> None:
    check_gather_rows("cuda")


@pytest.mark.parametrize(("hidden", "wide"), [(2048, True), (2888, True), (2881, False)])
def test_rows_are_moved_16_bytes_at_a_time(
    hidden: int, wide: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2888 is a multiple of 8 and not of 16, the only alignment that Triton sees by itself."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = compile_for_h100(
        module._gather_rows_kernel,
        {"x": "*bf16", "index": "*i64", "out": "*bf16", "num_rows": "i32"},
        {"scale": None, "H": hidden, "BLOCK_R": 4, "BLOCK_H": 2048},
        num_warps=4,
    )
    assert ("ld.global.v4.b32" in compiled.asm["ptx"]) is wide
    assert ("st.global.v4.b32" in compiled.asm["ptx"]) is wide


def test_bad_arguments_are_named() -> None:
    x, index, scale = torch.ones(3, 4), torch.zeros(2, dtype=torch.int64), torch.ones(2)
    with pytest.raises(ValueError, match=r"x is \(4,\) and index is torch.int64 \(2,\)"):
        gather_rows(x[0], index)
    with pytest.raises(ValueError, match=r"index is torch.int32 \(2,\); expected .* int64 \(R,\)"):
        gather_rows(x, index.int())
    with pytest.raises(ValueError, match=r"scale is torch.float64 \(2,\); expected torch.float32"):
        gather_rows(x, index, scale.double())
    with pytest.raises(ValueError, match=r"scale is torch.float32 \(1,\)"):
        gather_rows(x, index, scale[:1])
    with pytest.raises(ValueError, match=r"out is torch.float32 \(3, 4\)"):
        gather_rows(x, index, out=x.clone())
    with pytest.raises(ValueError, match=r"strides \(1, 2\); expected contiguous"):
        gather_rows(x, index, out=torch.empty(4, 2).t())
    with pytest.raises(ValueError, match="tensors on cpu, meta; use one device"):
        gather_rows(x, index.to("meta"))
