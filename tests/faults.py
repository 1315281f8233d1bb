"""Puts each fault of docs/field-reports.md into a copy of the package and shows a test that fails.

    python tests/faults.py            # all, half an hour
    python tests/faults.py F5 L2      # some

A test that no fault can break proves nothing.  The faults are in faults_table.py.  Exit code 1 if
one goes unseen or its place in the source is gone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from faults_table import FAULTS, Fault

ROOT = Path(__file__).parents[1]


def seen(fault: Fault) -> str:
    """How the tests answer the fault: "seen" and by which test, or what is wrong."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary)
        for name in ("interlace", "tests"):
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, ignore=ignore)
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, copy / name)
        path = copy / "interlace" / fault.file
        source = path.read_text()
        if source.count(fault.old) != 1:
            return f"STALE: found {source.count(fault.old)} times in {fault.file}"
        path.write_text(source.replace(fault.old, fault.new))
        command = f"{sys.executable} -m pytest -x -q -p no:cacheprovider --tb=no " + " ".join(
            f"tests/{part}" if part.endswith(".py") else part for part in fault.tests.split(" ")
        )
        done = subprocess.run(
            command, shell=True, cwd=copy, capture_output=True, text=True, timeout=400
        )
    if done.returncode == 1:
        lines = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
        return f"seen  {lines[0].removeprefix('FAILED tests/')[:110]}"
    return "NOT SEEN" if done.returncode == 0 else f"BROKEN:\n{done.stdout[-2000:]}{done.stderr}"


def main() -> int:
    wanted = set(sys.argv[1:])
    chosen = [f for f in FAULTS if not wanted or wanted & set(f.report.split())]
    if unknown := wanted.difference(*(f.report.split() for f in FAULTS)):
        print(f"no fault of {', '.join(sorted(unknown))}")
        return 1
    bad = 0
    for fault in chosen:
        answer = seen(fault)
        bad += not answer.startswith("seen")
        print(f"{fault.report:7}{fault.what:52}{answer}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} faults are seen")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
