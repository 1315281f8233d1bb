"""Every example runs and proves what it says.

Oracles: the examples compare bitwise with plain PyTorch themselves and exit otherwise; losses of
one and of two processes are compared here, up to the order of one sum.
"""

from __future__ import annotations

import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import interlace
from interlace import ep

EXAMPLES = Path(__file__).parents[1] / "examples"
TESTED = {"own_model.py", "own_pass.py", "read_trace.py"}


def _run(name: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the example prints, run in this process as a script."""
    before, path = sys.argv, list(sys.path)
    sys.argv = [name, *arguments]
    sys.path.insert(0, str(EXAMPLES))  # as python does for a script
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before, path
        ep.drop_group("experts")
    return capsys.readouterr().out


def _losses(printed: str) -> list[float]:
    return [float(x) for x in re.findall(r"loss ([\d.]+)", printed)]


def test_each_example_is_tested() -> None:
    assert {p.name for p in EXAMPLES.glob("*.py")} == TESTED


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--loopback", "4")], ids=["single", "loopback"])
def test_own_model(arguments: tuple[str, ...], capsys) -> None:
    printed = _run("own_model.py", capsys, *arguments)
    assert printed.count("loss and 15 gradients bitwise equal") == 2
    first, last = _losses(printed)
    assert last < first - 1


def _torchrun(*arguments: str) -> str:
    """What two ranks print; hung ones are ended through their launcher."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command += [str(EXAMPLES / "own_model.py"), *arguments]
    environment, pipe = {**os.environ, "OMP_NUM_THREADS": "1"}, subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as ranks:
        try:
            out, err = ranks.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            ranks.terminate()
            out, err = ranks.communicate(timeout=20)
    assert ranks.returncode == 0, f"{out[-1000:]}\n{err[-3000:]}"
    return out


@pytest.mark.slow
def test_own_model_on_two_processes(capsys) -> None:
    printed = _torchrun()
    assert printed.count("loss and 15 gradients bitwise equal") == 2
    alone = _losses(_run("own_model.py", capsys))
    assert _losses(printed) == pytest.approx(alone, abs=2e-5)


@pytest.mark.multi_gpu
def test_own_model_on_two_gpus() -> None:
    printed = _torchrun("--device", "cuda", "--capture")
    assert printed.count("loss and 15 gradients bitwise equal") == 3


@pytest.mark.gpu
def test_own_model_captured(capsys) -> None:
    printed = _run("own_model.py", capsys, "--loopback", "2", "--device", "cuda", "--capture")
    assert printed.count("loss and 15 gradients bitwise equal") == 3
    first, last = _losses(printed)
    assert last < first - 1


@pytest.mark.slow
def test_own_pass(capsys) -> None:
    printed = _run("own_pass.py", capsys)
    sizes = re.search(r"share_twins: (\d+) -> (\d+) nodes", printed)
    assert sizes is not None
    assert int(sizes[2]) < int(sizes[1])
    assert "15 gradients bitwise equal to plain PyTorch" in printed
    before, after = printed.split("schedule:")
    covered = [
        [int(n) for n in re.findall(r"(\d+) operators under it", x)] for x in (before, after)
    ]
    assert [len(x) for x in covered] == [8, 8]  # 2 layers, 2 exchanges, 2 directions
    assert sum(covered[0]) < sum(covered[1])
    assert "refused: pass 'lose_a_wait' failed: side effects were lost" in printed


def test_public_names() -> None:
    """Each resolves to what its module has, however the modules were imported before."""
    for name in interlace.__all__:
        assert getattr(interlace, name) is not None
        assert name in dir(interlace)
    assert interlace.capture_step is importlib.import_module("interlace.capture").capture_step
    assert interlace.ep is ep
    with pytest.raises(AttributeError, match="module 'interlace' has no attribute 'trace_stp'"):
        _ = interlace.trace_stp


def test_importing_the_package_is_light() -> None:
    code = "import sys, interlace; dir(interlace); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_read_trace(capsys) -> None:
    printed = _run("read_trace.py", capsys)
    assert "rank 0: 1.797 of 10.869 ms of communication exposed" in printed
    assert re.findall(r"layer (\d): ", printed) == ["2", "0", "1"]
