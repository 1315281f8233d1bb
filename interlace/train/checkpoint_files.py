"""The folder of checkpoints: what is complete, what is newest, what may go.

A checkpoint is written under a hidden name and renamed when every byte is on disk, marker last, so
that a folder of the form ``step-00000100`` with a readable marker is complete, whenever the writer
was killed.  Everything else is ignored, and removed by the next save.  One process calls this.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

MARKER = "interlace.json"
_PARTIAL, _OLD = ".partial-", ".old-"


def complete(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of every complete checkpoint, oldest first."""
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        match = re.fullmatch(r"step-(\d{8,})", path.name)
        if match and read_marker(path) is not None:
            found.append((int(match[1]), path))
    return sorted(found)


def read_marker(path: Path) -> dict[str, Any] | None:
    """What a checkpoint says of itself; None if it is not complete."""
    try:
        about = json.loads((path / MARKER).read_bytes())
    except (OSError, ValueError):
        return None
    return about if isinstance(about, dict) else None


def begin(folder: Path, step: int) -> Path:
    """A fresh hidden folder to write to; leftovers of killed saves are removed.

    Raises: ValueError if the folder cannot be written.
    """
    partial = folder / f"{_PARTIAL}{_name(step)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.iterdir():
            if leftover.name.startswith((_PARTIAL, _OLD)):
                shutil.rmtree(leftover)
        partial.mkdir()
    except OSError as error:
        raise ValueError(
            f"checkpoint.folder={folder} cannot be written: {error.strerror} "
            f"({error.filename}); make room, or name another folder."
        ) from error
    return partial


def publish(partial: Path, step: int, about: dict[str, Any]) -> Path:
    """Makes a written folder a complete checkpoint, in one step that cannot be seen half done."""
    final = partial.parent / _name(step)
    with (partial / MARKER).open("w", encoding="utf-8") as file:
        json.dump(about, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(partial)
    if final.exists():  # of the same step: incomplete, or from before a resume further back
        os.rename(final, partial.parent / f"{_OLD}{_name(step)}")
    os.rename(partial, final)
    _sync_folder(final.parent)
    return final


def prune(folder: Path, keep_latest: int) -> list[Path]:
    """Removes complete checkpoints beyond the newest ``keep_latest``; 0 keeps all."""
    old = [path for _, path in complete(folder)][:-keep_latest] if keep_latest else []
    for path in old:
        hidden = folder / f"{_OLD}{path.name}"
        os.rename(path, hidden)  # a kill during the removal leaves no half checkpoint
        shutil.rmtree(hidden)
    return old


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
