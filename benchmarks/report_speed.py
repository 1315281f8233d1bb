"""Time and memory of ``interlace report`` on a large synthetic trace.

    python benchmarks/report_speed.py [--mb 250] [--keep FILE]

Writes a trace like Kineto's (operators, launches, flows, kernels with their arguments, eight steps)
of the given size, runs the command on it in a process of its own, prints one line: size, events,
wall seconds, peak resident memory, and the command's own exit code.  Gzip is timed too.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_LONG = "at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, " * 2


def _group(index: int, step: int, ts: float) -> str:
    """An operator, its launch, the flow, and its kernel: about 1.5 kB; every eighth exchanges."""
    comm = index % 8 == 7
    name = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)" if comm else f"void {_LONG}"
    stream, dur = (20, 30.25) if comm else (7, 8.125)
    return (
        f'{{"ph": "X", "cat": "cpu_op", "name": "aten::op_{index % 97}", "pid": 4242, "tid": 4242,'
        f' "ts": {ts:.3f}, "dur": 6.5, "args": {{"External id": {index}, "Record function id": 0, '
        f'"Sequence number": {index}, "Fwd thread id": 0, "Ev Idx": {index}}}}},\n'
        f'{{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 4242, '
        f'"tid": 4242, "ts": {ts + 1:.3f}, "dur": 3.1, "args": {{"External id": {index}, '
        f'"cbid": 211, "correlation": {index}}}}},\n'
        f'{{"ph": "s", "id": {index}, "pid": 4242, "tid": 4242, "ts": {ts + 1:.3f}, '
        f'"cat": "ac2g", "name": "ac2g"}},\n'
        f'{{"ph": "X", "cat": "kernel", "name": "{name}", "pid": 0, "tid": {stream}, '
        f'"ts": {ts + 5:.3f}, "dur": {dur}, "args": {{"External id": {index}, "queued": 0, '
        f'"device": 0, "context": 1, "stream": {stream}, "correlation": {index}, '
        f'"registers per thread": 32, "shared memory": 0, "blocks per SM": 4.848485, '
        f'"warps per SM": 38.787880, "grid": [640, 1, 1], "block": [256, 1, 1], '
        f'"est. achieved occupancy %": 61}}}},\n'
        f'{{"ph": "f", "id": {index}, "pid": 0, "tid": {stream}, "ts": {ts + 5:.3f}, '
        f'"cat": "ac2g", "name": "ac2g", "bp": "e"}},\n'
    )


def write_trace(path: Path, num_bytes: int, num_steps: int = 8) -> int:
    """A trace of about that many bytes; how many events it has."""
    size, index, events, start = 0, 0, 0, 5_000_000_000.0
    each = num_bytes / num_steps
    with open(path, "w") as file:
        file.write(
            '{"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": 0, '
            '"world_size": 8},\n"traceEvents": [\n'
        )
        for step in range(num_steps):
            begin = start + index * 10
            while size < each * (step + 1):
                size += file.write(_group(index, step, start + index * 10))
                index, events = index + 1, events + 5
            file.write(
                f'{{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#{step}", '
                f'"pid": 4242, "tid": 4242, "ts": {begin:.3f}, '
                f'"dur": {start + index * 10 - begin:.3f}, "args": {{}}}},\n'
            )
        file.write('{"ph": "M", "name": "process_name", "pid": 0, "ts": 0, "args": {}}\n')
        file.write('], "displayTimeUnit": "ms", "baseTimeNanoseconds": 1767189312000000000}\n')
    return events + num_steps + 1


# VmHWM begins anew with the program; the kernel's other figure (ru_maxrss) remembers the parent's.
_CHILD = """
import re, sys
from pathlib import Path
from interlace.measure.command import report_command
code = report_command([Path(sys.argv[1])], json_path=Path(sys.argv[2]), html_path=Path(sys.argv[3]),
    against=None, max_exposed_ms=None, comm_patterns=[], demo=False)
peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())
Path(sys.argv[4]).write_text(peak[1])
sys.exit(code)
"""


def measure(path: Path) -> tuple[float, float, int]:
    """Wall seconds, peak MiB and exit code of the command in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        out = [str(Path(folder, name)) for name in ("r.json", "r.html", "peak")]
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, str(path), *out],
            stdout=subprocess.DEVNULL,
            cwd=Path(__file__).parents[1],
        )
        seconds = time.perf_counter() - start
        peak_kib = int(Path(out[2]).read_text()) if done.returncode == 0 else 0
    return seconds, peak_kib / 1024, done.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mb", type=int, default=250)
    parser.add_argument("--keep", type=Path, help="write the trace here and leave it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.keep or Path(folder, "trace.json")
        events = write_trace(path, options.mb * 1_000_000)
        size = path.stat().st_size / 1e6
        for form in ("plain", "gzip"):
            if form == "gzip":
                packed = Path(folder, "trace.json.gz")
                with open(path, "rb") as source, gzip.open(packed, "wb", compresslevel=1) as out:
                    shutil.copyfileobj(source, out)
                path = packed
            seconds, peak, code = measure(path)
            print(
                f"{form}: {size:.0f} MB, {events} events: {seconds:.2f} s, peak {peak:.0f} MiB, "
                f"exit {code}"
            )


if __name__ == "__main__":
    main()
