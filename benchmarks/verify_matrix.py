"""Bitwise equality of every arm over families, routings, chunk counts and roots, on CPU.

    python benchmarks/verify_matrix.py --out benchmarks/results/FILE.json

Each row is one `interlace verify` of 20 steps, two gloo processes: two layers, width 32, 12
sequences of 24 tokens a rank.  Plain arms against plain PyTorch, chunked arms against plain PyTorch
with chunked modules; with compiled regions against the unscheduled trace of each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

SMALL = "--model.num_layers 2 --model.dim 32 --training.seq_len 24 --training.local_batch_size 12"
ROOTS = {
    "layers.*.moe by batch": "--overlap.chunk_root layers.*.moe",
    "layers.*.moe by sequence": "--overlap.chunk_root layers.*.moe --overlap.chunk_dim sequence",
    "layers.* by batch": "--overlap.chunk_root layers.*",
}
CHUNKED = "chunk-eager,chunk-graph,chunk-scheduled"


def rows() -> list[dict[str, Any]]:
    """What is verified: name, arms and flags of each row."""
    found = []
    for preset, routing in itertools.product(("dsv3-tiny", "qwen3-tiny"), ("learned", "balanced")):
        base = {"preset": preset, "routing": routing, "compiled": False}
        found.append({**base, "arms": "eager,control,scheduled", "root": None, "n": 1, "flags": ""})
        for (root, flags), n in itertools.product(ROOTS.items(), (2, 3, 4)):
            found.append({**base, "arms": CHUNKED, "root": root, "n": n, "flags": flags})
        compiled = {**base, "compiled": True}
        arms = "control,scheduled"
        found.append({**compiled, "arms": arms, "root": None, "n": 1, "flags": ""})
        root = "layers.* by batch"
        found.append({**compiled, "arms": CHUNKED, "root": root, "n": 2, "flags": ROOTS[root]})
    return found


def verify(row: dict[str, Any], steps: int, folder: str) -> dict[str, Any]:
    """Runs one row; its verdicts by arm."""
    out = Path(folder) / "verify.json"
    command = [sys.executable, "-m", "interlace", "verify", row["preset"], "--arms", row["arms"]]
    command += ["--steps", str(steps), "--json", str(out), *SMALL.split(), *row["flags"].split()]
    command += ["--model.routing", row["routing"], "--overlap.chunks", str(row["n"])]
    command += ["--compile.regional"] if row["compiled"] else []
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    arms = json.loads(out.read_text())["arms"]
    verdicts = {a["name"]: a["equal"] for a in arms if a["against"]}
    described = {k: v for k, v in row.items() if k not in ("flags", "arms")}
    return described | {"equal": verdicts, "seconds": round(time.perf_counter() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--compiled", action="store_true", help="the rows with compiled regions only"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for row in (r for r in rows() if r["compiled"] or not args.compiled):
            results.append(verify(row, args.steps, folder))
            print(json.dumps(results[-1]), flush=True)
    wrong = [r for r in results if not all(r["equal"].values())]
    print(f"{len(results)} rows, {sum(len(r['equal']) for r in results)} comparisons", end=", ")
    print(f"{len(wrong)} rows differ" if wrong else "all bitwise equal")
    if args.out:
        report = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{platform.machine()}, no GPU, 2 gloo processes",
            "torch": torch.__version__,
            "steps": args.steps,
            "rows": results,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
