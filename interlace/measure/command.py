"""``interlace report``: exposed communication of any PyTorch trace."""

from __future__ import annotations

import sys
import time
from importlib.resources import as_file, files
from pathlib import Path

import msgspec

from interlace.measure.html import render
from interlace.measure.names import own_pattern
from interlace.measure.report import Report, build_report, difference, title
from interlace.measure.text import lines, ms

_EXCEEDED = 1
_PROGRESS_SECONDS = 1.0


def report_command(
    traces: list[Path],
    *,
    json_path: Path | None,
    html_path: Path | None,
    against: Path | list[Path] | None,
    max_exposed_ms: float | None,
    comm_patterns: list[str],
    demo: bool,
) -> int:
    """Print the report, write it where asked, and judge it; the exit code.

    Raises: ValueError, one line, if a file or an option is unusable.
    """
    bases = [against] if isinstance(against, Path) else against or []
    _check(traces, bases, json_path, html_path, max_exposed_ms, demo)
    own = own_pattern(comm_patterns)
    progress = _Progress() if sys.stderr.isatty() else None
    if demo:
        with as_file(files("interlace.measure").joinpath("demo.json.gz")) as path:
            report = build_report([path], own, progress)
        for rank in report.figures["ranks"]:
            rank["file"] = "the demo trace: two steps on paper, no GPU took part"
    else:
        report = build_report(traces, own, progress)
    if bases:
        base = build_report(bases, own, progress)
        report.figures["against"] = difference(report.figures, base.figures)
    print("\n".join(lines(report.figures)))
    if json_path:
        _write(json_path, "--json", msgspec.json.format(msgspec.json.encode(report.figures)))
    if html_path:
        _write(html_path, "--html", render(report).encode())
    return 0 if max_exposed_ms is None else _judge(report, max_exposed_ms)


def _check(
    traces: list[Path],
    bases: list[Path],
    json_path: Path | None,
    html_path: Path | None,
    max_exposed_ms: float | None,
    demo: bool,
) -> None:
    if demo and traces:
        raise ValueError(f"--demo brings its own trace; leave out {traces[0]}, or --demo.")
    if not demo and not traces:
        raise ValueError("interlace report: no trace given; name a file, or try --demo.")
    for path in [*traces, *bases]:
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise ValueError(f"{path} {what}; name a trace file of torch.profiler.")
    for option, target in (("--json", json_path), ("--html", html_path)):
        if target and (target.is_dir() or not target.absolute().parent.is_dir()):
            raise ValueError(f"{option} {target}: no file can be written there; name another path.")
        if target and any(target.exists() and target.samefile(p) for p in [*traces, *bases]):
            raise ValueError(f"{option} {target} is one of the traces; name another path.")
    if max_exposed_ms is not None and not max_exposed_ms >= 0:
        raise ValueError(f"--max-exposed-ms {max_exposed_ms} must be at least 0; nearest: 0.")


def _write(path: Path, option: str, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ValueError(
            f"{option} {path} cannot be written: {error.strerror}; name another path."
        ) from None


def _judge(report: Report, max_exposed_ms: float) -> int:
    """One line on stderr and 1 if a rank exposes more, or if its figures cannot be trusted."""
    ranks = report.figures["ranks"]
    worst = max(ranks, key=lambda rank: rank["exposed_us"])
    if worst["exposed_us"] > 1000 * max_exposed_ms:
        reason = (
            f"{title(worst, ranks)} exposes {ms(worst['exposed_us'])} ms of communication, more "
            f"than --max-exposed-ms {max_exposed_ms:g}."
        )
    elif doubtful := [rank for rank in ranks if not rank["reliable"]]:
        reason = (
            f"--max-exposed-ms {max_exposed_ms:g} cannot be judged: the figures of "
            f"{title(doubtful[0], ranks)} are unreliable, see its warnings."
        )
    else:
        return 0
    print(f"interlace report: {reason}", file=sys.stderr)
    return _EXCEEDED


class _Progress:
    """How much has been read, once a second, on a terminal."""

    def __init__(self) -> None:
        self.next = time.monotonic() + _PROGRESS_SECONDS

    def __call__(self, num_bytes: int) -> None:
        if time.monotonic() >= self.next:
            self.next = time.monotonic() + _PROGRESS_SECONDS
            print(f"read {num_bytes / 1e6:.0f} MB", file=sys.stderr)
