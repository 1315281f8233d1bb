"""How compiling grows with depth: time and nodes of dsv3-16b from 4 to 27 layers, no device needed.

    python benchmarks/trace_scaling.py --arm chunk-scheduled --out benchmarks/results/FILE.json

Meta tensors and a group of sizes only; each depth is traced three times, the median counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch

from interlace.train.arms import ARMS
from interlace.train.presets import PRESETS
from interlace.train.trace_command import trace_on_meta

DEPTHS = (4, 8, 16, 27)
REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="dsv3-16b")
    parser.add_argument("--arm", default="control", choices=list(ARMS))
    parser.add_argument("--root", default="layers.*", help="what a chunked arm chunks")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = PRESETS[args.preset]
    config = replace(config, overlap=replace(config.overlap, chunks=2, chunk_root=args.root))
    arm = ARMS[args.arm]
    trace_on_meta(replace(config, model=replace(config.model, num_layers=2)), arm)  # warm up
    rows = []
    for depth in DEPTHS:
        shallow = replace(config, model=replace(config.model, num_layers=depth))
        seconds = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            traced = trace_on_meta(shallow, arm)
            seconds.append(time.perf_counter() - began)
        nodes = len(traced.gm.graph.nodes)
        passes = {r.name: round(r.seconds, 3) for r in traced.reports}
        rows.append(
            {
                "layers": depth,
                "nodes": nodes,
                "seconds": round(statistics.median(seconds), 3),
                "seconds_spread": [round(min(seconds), 3), round(max(seconds), 3)],
                "passes_seconds": passes,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    for kind in ("nodes", "seconds"):
        growth = [
            round((b[kind] - a[kind]) / (b["layers"] - a["layers"]), 3) for a, b in pairwise(rows)
        ]
        print(f"{kind} a layer, from depth to depth: {growth}")
    if args.out:
        report = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, no GPU",
            "torch": torch.__version__,
            "preset": args.preset,
            "arm": args.arm,
            "root": args.root if arm.chunked else None,
            "rows": rows,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
