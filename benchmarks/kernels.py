"""The local kernels of an exchange on one GPU: right first, then fast.

    python benchmarks/kernels.py --out FILE.json

1. Checks on fresh random inputs, poisoned outputs, even and odd widths, cut slots and zero rows,
   eagerly and inside a CUDA graph; a failure ends the run.
2. Each kernel at T=16384, H=2048, K=8 in bfloat16 against the torch operators that it replaces:
   largest error against float64, median and spread of CUDA-event times, GB/s, and the percentage of
   this device's own copy speed.  Bytes: each row once in, each row once out.
3. ``bounded_copy`` of 64 MiB: alone, in a CUDA graph, and beside matrix products that fill the GPU.
   GB/s of payload, as a link would give them.

Inputs rotate among sets that together exceed the L2 cache.  Takes about a minute.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interlace import _compat
from interlace.kernels.bounded_copy import bounded_copy
from interlace.kernels.gather_rows import gather_rows, gather_rows_ref
from interlace.kernels.slot_grad import slot_grad, slot_grad_ref
from interlace.kernels.slot_reduce import slot_reduce, slot_reduce_ref

TOKENS, HIDDEN, TOP_K = 16384, 2048, 8
REPEATS, WARM_UP = 30, 3
CTAS = (1, 2, 4, 8, 16, 132)
EXPECTED_GB_S = {1: 48, 2: 75, 4: 151, 8: 300, 16: 577}  # a Triton copy
COPY_BYTES = 64 << 20
# Against float64: half a unit of bfloat16, a unit of float32, each of the result's own size, and
# what float32 sums may lose of the sum of magnitudes.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-23}
SUM_ERROR = 1e-6
NAN = float("nan")


# --- 1. right


def draw_slots(num_tokens: int, top_k: int, hidden: int, dtype: torch.dtype, cut: float) -> Any:
    """Slots in random order, positions with a part of them cut, scores and a gradient."""
    num_slots = num_tokens * top_k
    slots = torch.randn(num_slots, hidden, device="cuda").to(dtype)
    pos = torch.randperm(num_slots, device="cuda").view(num_tokens, top_k)
    pos = pos.masked_fill(torch.rand(pos.shape, device="cuda") < cut, -1)
    scores = torch.rand(num_tokens, top_k, device="cuda")
    grad = torch.randn(num_tokens, hidden, device="cuda").to(dtype)
    return slots, pos, scores, grad


def exact_terms(slots: Tensor, pos: Tensor, k: int) -> Tensor:
    """The float64 rows of choice k; zero where it was cut."""
    if slots.shape[0] == 0:
        return slots.new_zeros(pos.shape[0], slots.shape[1], dtype=torch.float64)
    return slots[pos[:, k].clamp(min=0)].double().masked_fill(pos[:, k, None] < 0, 0.0)


def reduce_error(out: Tensor, slots: Tensor, pos: Tensor, scores: Tensor | None) -> float:
    """Largest error of a slot sum, as a multiple of what rounding allows."""
    exact, size = (torch.zeros(out.shape, dtype=torch.float64, device="cuda") for _ in range(2))
    for k in range(pos.shape[1]):
        term = exact_terms(slots, pos, k)
        if scores is not None:
            term *= scores[:, k, None].double()
        exact += term
        size += term.abs()
    return excess(out, exact, ROUNDING[out.dtype] * exact.abs() + SUM_ERROR * size)


def grad_error(out: Tensor, slots: Tensor, pos: Tensor, grad: Tensor) -> float:
    """Largest error of the dot products, as a multiple of what rounding allows."""
    worst = 0.0
    for k in range(pos.shape[1]):
        products = exact_terms(slots, pos, k) * grad.double()
        allowed = SUM_ERROR * products.abs().sum(1)
        worst = max(worst, excess(out[:, k], products.sum(1), allowed))
    return worst


def gather_error(out: Tensor, x: Tensor, index: Tensor, scale: Tensor | None) -> float:
    """0 for an exact copy; for products the largest error in units of what rounding allows."""
    if scale is None:
        return 0.0 if torch.equal(out, x[index]) else float("inf")
    exact = x[index].double() * scale[:, None].double()
    return excess(out, exact, ROUNDING[out.dtype] * exact.abs())


def excess(out: Tensor, exact: Tensor, allowed: Tensor) -> float:
    """Largest ``|out - exact| / allowed``; infinite for NaN and where nothing is allowed."""
    if out.numel() == 0:
        return 0.0
    error = (out.double() - exact).abs()
    ratio = torch.where(error == 0, 0.0, error / allowed).nan_to_num(nan=torch.inf)
    return float(ratio.max())


def require(what: str, error: float) -> None:
    if not error <= 1.0:
        raise SystemExit(
            f"benchmarks/kernels.py: {what} is wrong: {error} times what it may differ."
        )


def poison_free_memory(most_bytes: int = 1 << 25) -> None:
    """Leaves NaN in the blocks that the next allocations get."""
    sizes = [*(1 << n for n in range(8, 23)), most_bytes // 4]
    blocks = [torch.full((size,), NAN, device="cuda") for size in sizes]
    del blocks


def check_kernels() -> int:
    cases = 0
    widths = ((2048, 16), (2881, 16), (2888, 16), (1030, 32), (1, 16), (7168, 16))
    for (hidden, bits), num_tokens, top_k in itertools.product(widths, (0, 77), (6, 8)):
        dtype = torch.bfloat16 if bits == 16 else torch.float32
        slots, pos, scores, grad = draw_slots(num_tokens, top_k, hidden, dtype, cut=0.2)
        name = f"H={hidden} T={num_tokens} K={top_k} {dtype}"
        x = torch.randn(50, hidden, device="cuda").to(dtype)
        index = torch.randint(50, (num_tokens * top_k,), device="cuda")
        for scale in (None, torch.randn(index.shape, device="cuda")):
            poison_free_memory()
            require(
                f"gather_rows {name}", gather_error(gather_rows(x, index, scale), x, index, scale)
            )
            out = torch.full((len(index), hidden), NAN, device="cuda").to(dtype)
            gather_rows(x, index, scale, out)
            require(f"gather_rows out= {name}", gather_error(out, x, index, scale))
        for weight in (None, scores):
            poison_free_memory()
            out = slot_reduce(slots, pos, weight)
            require(f"slot_reduce {name}", reduce_error(out, slots, pos, weight))
            if not torch.equal(out, slot_reduce_ref(slots, pos, weight)):
                raise SystemExit(f"slot_reduce {name}: not the bits of its reference")
        poison_free_memory()
        out = slot_grad(slots, pos, grad)
        require(f"slot_grad {name}", grad_error(out, slots, pos, grad))
        if not torch.equal(out, slot_grad(slots, pos, grad)):
            raise SystemExit(f"slot_grad {name}: other bits in a second run")
        cases += 7
    return cases


def check_bounded_copy() -> int:
    cases = 0
    sizes = (1, 15, 16, 17, 8191, 32768 * 3 + 5, (1 << 20) + 48)
    ends = ((0, 0), (16, 32), (1, 0), (3, 3))
    for size, (to, at), num_ctas in itertools.product(sizes, ends, (1, 3, 132)):
        src = torch.randint(256, (size + 64,), dtype=torch.uint8, device="cuda")[at : at + size]
        buffer = torch.full((size + 64,), 123, dtype=torch.uint8, device="cuda")
        bounded_copy(buffer[to : to + size], src, num_ctas)
        untouched = torch.cat([buffer[:to], buffer[to + size :]]) == 123
        if not (torch.equal(buffer[to : to + size], src) and untouched.all()):
            raise SystemExit(f"bounded_copy: {size} bytes, starts {to} and {at}: wrong")
        cases += 1
    return cases


def check_graph() -> int:
    """All kernels captured once; replays follow what the inputs hold and equal the eager run."""
    slots, pos, scores, grad = draw_slots(512, TOP_K, HIDDEN, torch.bfloat16, cut=0.1)
    x, copied = torch.randn_like(grad), torch.empty_like(slots)
    index, scale = torch.randint(512, (512 * TOP_K,), device="cuda"), scores.flatten().clone()

    def run() -> list[Tensor]:
        bounded_copy(copied, slots, 8)
        sums, dots = slot_reduce(copied, pos, scores), slot_grad(copied, pos, grad)
        return [gather_rows(x, index, scale), gather_rows(x, index), sums, dots, copied]

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        for tensor in (slots, scores, grad, x, scale):
            tensor.normal_()
        index.random_(512)
        pos.copy_(torch.randperm(pos.numel(), device="cuda").view_as(pos))
        for tensor in captured:
            tensor.fill_(NAN)
        graph.replay()
        replayed = [tensor.clone() for tensor in captured]
        if not all(torch.equal(a, b) for a, b in zip(replayed, run(), strict=True)):
            raise SystemExit("a replayed CUDA graph differs from the eager run")
    return 3


# --- 2. fast


def time_us(calls: list[Callable[[], Any]], repeats: int = REPEATS) -> list[float]:
    """Sorted times of single calls, in turns over ``calls``, queued ahead of the GPU."""
    for i in range(WARM_UP):
        calls[i % len(calls)]()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    for i in range(repeats):
        marks[2 * i].record()
        calls[i % len(calls)]()
        marks[2 * i + 1].record()
    torch.cuda.synchronize()
    return sorted(1e3 * a.elapsed_time(b) for a, b in zip(marks[::2], marks[1::2], strict=True))


def figures(times: list[float], num_bytes: int) -> dict[str, float]:
    median = statistics.median(times)
    return {
        "us": round(median, 1),
        "us_p10": round(times[len(times) // 10], 1),
        "us_p90": round(times[len(times) * 9 // 10], 1),
        "gb_s": round(num_bytes / median / 1e3),
    }


def time_kernels() -> list[dict[str, Any]]:
    num_slots = TOKENS * TOP_K
    sets = [draw_slots(TOKENS, TOP_K, HIDDEN, torch.bfloat16, cut=0.0) for _ in range(2)]
    token = [torch.argsort(pos.flatten()) // TOP_K for _, pos, _, _ in sets]
    order = [torch.randperm(num_slots, device="cuda") for _ in sets]
    scale = [torch.rand(num_slots, device="cuda") for _ in sets]
    out = torch.empty_like(sets[0][0])
    all_rows, token_rows = (n * HIDDEN * 2 for n in (num_slots, TOKENS))

    copies = time_us([lambda s=s: out.copy_(s[0]) for s in sets])
    rows = [{"kernel": "copy_ (ceiling)", "form": "torch", **figures(copies, 2 * all_rows)}]
    ceiling = rows[0]["gb_s"]

    def gather(index: list[Tensor], scaled: bool, full: bool) -> list[tuple[Any, ...]]:
        return [
            (s[0] if full else s[3], i, f if scaled else None)
            for s, i, f in zip(sets, index, scale, strict=True)
        ]

    reduce_args = [(slots, pos, scores) for slots, pos, scores, _ in sets]
    plain_args = [(slots, pos, None) for slots, pos, _, _ in sets]
    grad_args = [(slots, pos, grad) for slots, pos, _, grad in sets]
    indices = num_slots * 8
    table = [
        # name, kernel, torch form, arguments of each set, bytes, error against float64
        ("gather_rows: pack", gather_rows, gather_rows_ref, gather(token, False, False),
         all_rows + token_rows + indices, gather_error),
        ("gather_rows: pack * score", gather_rows, gather_rows_ref, gather(token, True, False),
         all_rows + token_rows + indices, gather_error),
        ("gather_rows: unpack", gather_rows, gather_rows_ref, gather(order, False, True),
         2 * all_rows + indices, gather_error),
        ("slot_reduce", slot_reduce, slot_reduce_ref, reduce_args,
         all_rows + token_rows + indices, reduce_error),
        ("slot_reduce, no scores", slot_reduce, slot_reduce_ref, plain_args,
         all_rows + token_rows + indices, reduce_error),
        ("slot_grad", slot_grad, slot_grad_ref, grad_args,
         all_rows + token_rows + indices, grad_error),
    ]  # fmt: skip
    for name, kernel, reference, args, num_bytes, error in table:
        for form, fn in (("triton", kernel), ("torch", reference)):
            poison_free_memory(all_rows)
            worst = error(fn(*args[0]), *args[0])
            if form == "triton":
                require(name, worst)
            got = figures(time_us([lambda a=a, fn=fn: fn(*a) for a in args]), num_bytes)
            rows.append(
                {"kernel": name, "form": form, "error_of_allowed": round(worst, 3), **got}
                | {"percent_of_copy": round(100 * got["gb_s"] / ceiling, 1)}
            )
    return rows


# --- 3. bounded


def time_bounded_copies() -> list[dict[str, Any]]:
    buffers = [
        torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device="cuda") for _ in range(8)
    ]
    pairs = list(zip(buffers[:4], buffers[4:], strict=True))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    products_us = statistics.median(time_us([lambda: torch.mm(a, b, out=product)], 10))
    rows = []
    for num_ctas in CTAS:
        calls = [lambda p=p, n=num_ctas: bounded_copy(p[0], p[1], n) for p in pairs]
        alone = figures(time_us(calls), COPY_BYTES)
        row: dict[str, Any] = {"ctas": num_ctas, "alone": alone}
        if num_ctas in EXPECTED_GB_S:
            row["expected_gb_s"] = EXPECTED_GB_S[num_ctas]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        replays = time_us([graph.replay], 10)
        row["in_graph"] = figures(replays, COPY_BYTES * len(calls))
        row["beside_products"] = beside_products(calls, alone["us"], a, b, product, products_us)
        row["kept"] = round(row["beside_products"]["gb_s"] / alone["gb_s"], 3)
        if not all(torch.equal(dst, src) for dst, src in pairs):
            raise SystemExit(f"bounded_copy: wrong beside matrix products, {num_ctas} CTAs")
        for dst, _ in pairs:
            dst.fill_(0)
        rows.append(row)
    return rows


def beside_products(
    calls: list[Callable[[], None]],
    alone_us: float,
    a: Tensor,
    b: Tensor,
    product: Tensor,
    products_us: float,
) -> dict[str, Any]:
    """Copies on a high-priority stream while products run; counts those wholly beside them."""
    side, main = torch.cuda.Stream(priority=-1), torch.cuda.current_stream()
    num_products = 16
    num_copies = min(int(0.8 * num_products * products_us / alone_us) + 1, 300)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * num_copies)]
    ticks = [torch.cuda.Event(enable_timing=True) for _ in range(num_products + 1)]
    for _ in range(6):  # keeps the GPU busy until both streams are queued
        torch.mm(a, b, out=product)
    ticks[0].record()
    side.wait_stream(main)
    for tick in ticks[1:]:
        torch.mm(a, b, out=product)
        tick.record()
    with torch.cuda.stream(side):
        for i in range(num_copies):
            marks[2 * i].record()
            calls[i % len(calls)]()
            marks[2 * i + 1].record()
    torch.cuda.synchronize()
    inside = [
        1e3 * begin.elapsed_time(end)
        for begin, end in zip(marks[::2], marks[1::2], strict=True)
        if end.elapsed_time(ticks[-1]) > 0
    ]
    last = ticks[0].elapsed_time(marks[-1])
    slowed = [
        1e3 * begin.elapsed_time(end)
        for begin, end in itertools.pairwise(ticks)
        if ticks[0].elapsed_time(end) < last
    ]
    result: dict[str, Any] = {"copies": len(inside), "gb_s": 0}
    if inside:
        result |= figures(sorted(inside), COPY_BYTES)
    result["product_us_alone"] = round(products_us, 1)
    result["product_us_beside"] = round(statistics.median(slowed), 1) if slowed else None
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31)
    args = parser.parse_args()
    if not torch.cuda.is_available() or not _compat.HAS_TRITON:
        raise SystemExit("benchmarks/kernels.py: needs a CUDA device and Triton.")
    began = time.perf_counter()
    torch.manual_seed(args.seed)
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seed": args.seed,
        "shape": {"tokens": TOKENS, "hidden": HIDDEN, "top_k": TOP_K, "dtype": "bfloat16"},
        "repeats": REPEATS,
    }
    report["cases_checked"] = check_kernels() + check_bounded_copy() + check_graph()
    report["seconds_of_checks"] = round(time.perf_counter() - began, 1)
    print(f"{report['cases_checked']} cases right, {report['seconds_of_checks']} s", flush=True)
    report["kernels"] = time_kernels()
    for row in report["kernels"]:
        print(json.dumps(row), flush=True)
    torch.cuda.empty_cache()
    report["bounded_copy_64_mib"] = time_bounded_copies()
    for row in report["bounded_copy_64_mib"]:
        print(json.dumps(row), flush=True)
    report["seconds"] = round(time.perf_counter() - began, 1)
    print(f"done in {report['seconds']} s", flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
