"""The exchange by itself: dispatch, combine and plan, beside a bare copy of the same bytes.

    python benchmarks/exchange.py --out FILE.json                     # one GPU, loopback
    torchrun --nproc-per-node 2 benchmarks/exchange.py --out FILE.json    # two GPUs

Everything runs in CUDA graphs, rows in bfloat16, in the buffers of set 0.  Routing is balanced to
the last row, so that every backend moves the rows that it asks for and no padding.  Columns:

    wire     GB/s of the rows that leave the rank, as this backend sends them
    logical  GB/s of all T * K rows, whoever they are for
    copy     GB/s of a bare copy with the same CTAs of the rows that leave in a flat exchange; then
             the backend's time over that of this copy and an unbounded one of the rows that stay

Kinds: ``dispatch``; ``combine``, a row a slot; ``reduce``, the combine of ``reduce="rank"`` where a
backend has one: each rank sums its rows of a token, which is in the time, and sends one; ``plan``.

One of W parts of the rows stays here and is copied at full speed; the others cross the bound.
Between processes NCCL has its own bound, so that ``alltoall`` has one line.  First all
results are compared with those of ``alltoall``, bitwise, rank sums within their rounding.  Takes
about a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from interlace import ep
from interlace.ep import hybridep, signals
from interlace.ep.backend import get_backend
from interlace.ep.budget import bounded
from interlace.ep.windows import close_windows, open_windows
from interlace.kernels.bounded_copy import bounded_copy

ROUNDS = 5
GRAPH_BYTES = 1 << 30  # about what one graph moves, so that a replay is neither too short nor long
_ops = torch.ops.ep


@dataclass(frozen=True)
class Shape:
    """One exchange: tokens, choices, experts, hidden size, ranks."""

    tokens: int
    top_k: int
    experts: int
    hidden: int
    ranks: int

    @property
    def row_bytes(self) -> int:
        return 2 * self.hidden

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    @property
    def remote_rows(self) -> int:
        return self.rows * (self.ranks - 1) // self.ranks


@dataclass(frozen=True)
class Row:
    """A line of the table; times in microseconds, medians over replays."""

    backend: str
    kind: str
    tokens: int
    ctas: int | None
    us: float
    spread_us: float
    wire_gb_s: float
    logical_gb_s: float
    copy_gb_s: float | None = None
    over_copy: float | None = None


class Bench:
    """One group, the sources of every size, and the timer."""

    def __init__(self, group: ep.Group, device: torch.device, args: argparse.Namespace) -> None:
        self.group, self.device, self.args = group, device, args

    def shape(self, tokens: int) -> Shape:
        a = self.args
        return Shape(tokens, a.top_k, a.experts, a.hidden, self.group.size)

    def ids(self, shape: Shape) -> Tensor:
        """Choices spread evenly over ranks and experts: each expert gets T * K / E slots.

        Choice k of token t is k steps of E / K from a start that differs from token to token.
        """
        step = shape.experts // shape.top_k
        start = torch.arange(shape.tokens, device=self.device)[:, None] % step
        return start + step * torch.arange(shape.top_k, device=self.device)

    def exchange(self, backend: str, reduce: str = "slot") -> ep.Exchange:
        g = self.group
        return ep.Exchange(g.name, g.size, g.rank, backend, True, 1.0, reduce=reduce)

    def microseconds(self, run: Callable[[int], Any], repeats: int) -> tuple[float, float]:
        """Median and half of the range of one of ``repeats`` calls in a graph."""
        for i in range(3):
            run(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(repeats):
                run(i)
        graph.replay()
        torch.cuda.synchronize()
        times = []
        for _ in range(ROUNDS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.meet()
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / repeats)
        graph.reset()
        return statistics.median(times), (max(times) - min(times)) / 2

    def meet(self) -> None:
        """Ranks begin together, or the first waits for the last inside the graph."""
        if self.group.kind == "process":
            dist.barrier(group=self.group.counts_group)
            torch.cuda.synchronize()

    def check(self, backend: str, shape: Shape) -> None:
        """Dispatch, combine and the sum at the origin, bitwise those of ``alltoall``.

        Rank sums, where there are any, are three roundings apart from these, each of a value no
        larger than the sum of magnitudes; what float32 adds is far below the fourth.
        """
        torch.manual_seed(self.group.rank)
        x = torch.randn(shape.tokens, shape.hidden, device=self.device).bfloat16()
        scores = torch.rand(shape.tokens, shape.top_k, device=self.device)
        ids = torch.rand(shape.tokens, shape.experts, device=self.device).argsort(1)
        ids = ids[:, : shape.top_k].contiguous()

        def results(x: Tensor, exchange: ep.Exchange) -> tuple[Tensor, Tensor, Tensor]:
            plan = ep.plan(ids, shape.experts, exchange)
            rows = ep.dispatch(x, plan)
            out = ep.combine(rows * 2, scores, plan)
            return rows[: int(plan.live)], out, plan.offsets

        expected = results(x, self.exchange("alltoall"))
        for a, b in zip(results(x, self.exchange(backend)), expected, strict=True):
            if not torch.equal(a, b):
                raise SystemExit(f"benchmarks/exchange.py: {backend} differs from alltoall.")
        if get_backend(backend).expert_side is None:
            return
        magnitude = results(x.abs(), self.exchange("alltoall"))[1].float()
        sums = results(x, self.exchange(backend, "rank"))[1]
        bound = 2 * torch.finfo(x.dtype).eps * magnitude  # a rounding is half of eps at most
        if ((sums.float() - expected[1].float()).abs() > bound).any():
            raise SystemExit(f"benchmarks/exchange.py: rank sums of {backend} are wrong.")

    def copies(self, shape: Shape, ctas: int) -> tuple[float, float]:
        """Microseconds of a bare copy of the flat exchange's bytes: those that leave, and all."""
        rows, away = shape.rows, shape.remote_rows
        source = torch.empty(rows, shape.hidden, dtype=torch.bfloat16, device=self.device)
        windows = open_windows(
            self.group, "benchmark.copy", rows, shape.hidden, torch.bfloat16, self.device
        )
        peer = windows.peers[(self.group.rank + 1) % self.group.size]

        def leave(_: int) -> None:
            bounded_copy(peer[:away], source[:away], ctas)

        def move(i: int) -> None:
            windows.mine[away:].copy_(source[away:])
            leave(i)

        leaving, _ = self.microseconds(leave, self.repeats(shape))
        moving, _ = self.microseconds(move, self.repeats(shape))
        return leaving, moving

    def repeats(self, shape: Shape) -> int:
        return min(max(GRAPH_BYTES // (shape.rows * shape.row_bytes), 1), 20)

    def exchanges(self, backend: str, shape: Shape, ctas: int | None) -> list[Row]:
        """Times of dispatch, combine and, if the backend has it, reduce under a bound."""
        exchange, repeats = self.exchange(backend), self.repeats(shape)
        plan = ep.plan(self.ids(shape), shape.experts, exchange)
        sources = {
            "dispatch": torch.randn(shape.tokens, shape.hidden, device=self.device).bfloat16(),
            "combine": torch.randn(plan.out_rows, shape.hidden, device=self.device).bfloat16(),
        }
        where = (exchange.group, backend)

        def dispatch(_: int) -> None:
            x = sources["dispatch"]
            _ops.wait(*_ops.dispatch_launch(x, None, plan.meta, None, plan.out_rows, 0, *where))

        def combine(_: int) -> None:
            y = sources["combine"]
            _ops.wait(*_ops.combine_launch(y, plan.meta, None, plan.sent_rows, 0, *where))

        def reduce(_: int) -> None:
            args = sources["combine"], plan.meta, None, plan.stage_rows, 0, *where
            _ops.wait(*_ops.combine_launch(*args, scores=staged, reduce="rank"))

        kinds = {"dispatch": dispatch, "combine": combine}
        flat = wire = shape.remote_rows * shape.row_bytes
        if backend == "hybridep":
            wire = hybridep.traffic(plan.meta, shape.row_bytes, self.group.rank).wire
            staged = torch.rand(plan.stage_rows, shape.top_k, device=self.device)
            kinds["reduce"] = reduce
        moved = {"dispatch": wire, "combine": flat, "reduce": wire}
        rows = []
        with bounded(ctas):
            for kind, run in kinds.items():
                us, spread = self.microseconds(run, repeats)
                logical = shape.rows * shape.row_bytes
                rows.append(
                    Row(backend, kind, shape.tokens, ctas, round(us, 1), round(spread, 1),
                        round(moved[kind] / us / 1e3, 1), round(logical / us / 1e3, 1))
                )  # fmt: skip
        return rows

    def plans(self, backend: str, shape: Shape) -> Row:
        """The time of a plan: metadata and the exchange of counts."""
        ids, exchange = self.ids(shape), self.exchange(backend)
        us, spread = self.microseconds(lambda _: ep.plan(ids, shape.experts, exchange), 10)
        return Row(backend, "plan", shape.tokens, None, round(us, 1), round(spread, 1), 0.0, 0.0)


def run_all(bench: Bench, backends: list[str], args: argparse.Namespace) -> list[Row]:
    """Every line, printed as it comes."""
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        if bench.group.rank == 0:
            print(line(row), flush=True)

    for tokens in args.tokens:
        shape = bench.shape(tokens)
        for backend in backends:
            add(bench.plans(backend, shape))
        for ctas in args.ctas:
            leaving_us, moving_us = bench.copies(shape, ctas)
            copy_gb_s = shape.remote_rows * shape.row_bytes / leaving_us / 1e3
            for backend in backends:
                nccl = backend == "alltoall" and bench.group.kind == "process"
                if nccl and ctas != args.ctas[0]:
                    continue
                for row in bench.exchanges(backend, shape, None if nccl else ctas):
                    over = round(row.us / moving_us, 3)
                    add(Row(**{**asdict(row), "copy_gb_s": round(copy_gb_s, 1), "over_copy": over}))
        close_windows()
        torch.cuda.empty_cache()
    return rows


def line(row: Row) -> str:
    """A row of the table as text."""
    text = f"{row.backend:<14}{row.kind:<9}{row.tokens:>7}{row.ctas or '-':>5}{row.us:>10.1f} us"
    if row.kind == "plan":
        return text
    return (
        f"{text}{row.wire_gb_s:>9.1f} wire{row.logical_gb_s:>9.1f} logical"
        f"{row.copy_gb_s:>9.1f} copy{row.over_copy:>8.3f} of its time"
    )


def open_group(num_ranks: int) -> tuple[ep.Group, torch.device]:
    """The processes of torchrun, or this one as ``num_ranks`` mirrored ranks."""
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if size == 1:
        group = ep.Group("bench", num_ranks, 0, "loopback")
    else:
        shared = size > torch.cuda.device_count()  # NCCL refuses two ranks on one GPU
        dist.init_process_group("gloo" if shared else "nccl")
        group = ep.Group("bench", size, rank, "process", dist.group.WORLD, dist.new_group())
    ep.register_group(group)
    return group, device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ranks", type=int, default=2, help="mirrored ranks in loopback")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384, 32768])
    parser.add_argument("--ctas", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top_k", type=int, default=8)
    parser.add_argument("--backends", nargs="+", default=["alltoall", "minimal_async", "hybridep"])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/exchange.py: needs a CUDA device.")
    began = time.perf_counter()
    group, device = open_group(args.ranks)
    bench = Bench(group, device, args)
    for backend in args.backends:
        bench.check(backend, bench.shape(512))
    rows = run_all(bench, args.backends, args)
    signals.check_timeouts()
    seconds = round(time.perf_counter() - began, 1)
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transport": group.kind,
        "ranks": group.size,
        "shape": {k: getattr(args, k) for k in ("hidden", "experts", "top_k")},
        "dtype": "bfloat16",
        "rounds": ROUNDS,
        "seconds": seconds,
        "rows": [asdict(row) for row in rows],
    }
    if group.rank == 0:
        print(f"done in {seconds} s", flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(report, indent=2) + "\n")
    close_windows()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
