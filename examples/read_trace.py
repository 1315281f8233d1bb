"""The figures of `interlace report` in your own script: which layer exposes most.

    python examples/read_trace.py                   # the bundled demo trace
    python examples/read_trace.py rank0.json.gz     # yours, from torch.profiler

Needs no GPU and never imports torch.
"""

import sys
from importlib.resources import as_file, files
from pathlib import Path

from interlace.measure.report import build_report


def main(paths: list[Path]) -> None:
    figures = build_report(paths).figures
    for note in figures["notes"]:
        print(f"note: {note['text']}")
    for rank in figures["ranks"]:
        exposed, comm = rank["exposed_us"] / 1e3, rank["comm_us"] / 1e3
        print(f"rank {rank['rank']}: {exposed:.3f} of {comm:.3f} ms of communication exposed")
        if not rank["reliable"]:
            print("  not to be believed; see the warnings of `interlace report`")
        layers = sorted(rank["by_layer"].items(), key=lambda item: -item[1]["exposed_us"])
        for name, part in layers[:3]:
            share = part["exposed_us"] / part["comm_us"]
            print(f"  layer {name}: {part['exposed_us'] / 1e3:.3f} ms, {share:.0%} of its own")


if __name__ == "__main__":
    if sys.argv[1:]:
        main([Path(argument) for argument in sys.argv[1:]])
    else:
        with as_file(files("interlace.measure").joinpath("demo.json.gz")) as demo:
            main([demo])
