"""Where tokens come from: the standard library's source, text folders, token files.

Legend: N tokens of the whole source, D documents.

A source is one flat run of tokens, cut into documents.  Text is read as bytes: a token is a byte,
and byte 0 ends each document, so that a model learns where a document stops.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BYTE_VOCAB = 256
BYTE_SEPARATOR = 0
TEXT_SUFFIXES = (".md", ".py", ".rst", ".tex", ".txt")
TOKEN_SUFFIXES = (".bin", ".npy")
STDLIB_LIMIT_BYTES = 8_000_000
_STDLIB_SKIPPED = frozenset(
    ("__pycache__", "dist-packages", "idlelib", "site-packages", "test", "tests")
)
_SCAN_TOKENS = 1 << 22  # 8 to 16 MB at a time: a token file may exceed the memory


@dataclass(frozen=True)
class Source:
    """Shapes: tokens_N of any unsigned type (maybe mapped from disk); starts_D int64, first is 0.

    ``fingerprint`` is a checksum of the tokens: ranks (or a resumed run) with another one read
    other data.  ``skipped`` names files that were left out.
    """

    name: str
    tokens_N: NDArray[Any]
    starts_D: NDArray[np.int64]
    padding_id: int
    fingerprint: int
    skipped: tuple[str, ...] = ()


def read_stdlib(limit_bytes: int = STDLIB_LIMIT_BYTES) -> Source:
    """The ``.py`` files of this Python's standard library, in the order of their paths.

    Tests, idlelib and installed packages are left out, and so is a file that is not UTF-8 (named
    in ``skipped``).  Whole files are taken until the next would exceed ``limit_bytes``.
    The text depends on the Python version, hence so does ``fingerprint``.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: list[bytes] = []
    skipped: list[str] = []
    room = limit_bytes
    for path in _walk(root, (".py",), _STDLIB_SKIPPED):
        text = _read(path)
        if not text:
            continue
        if len(text) + 1 > room:
            break
        if _text_fault(text) is not None:
            skipped.append(path.relative_to(root).as_posix())
            continue
        texts.append(text)
        room -= len(text) + 1
    if not texts:
        raise ValueError(
            f"data.source=stdlib: found no .py file under {root}; this Python has its standard "
            f"library elsewhere. Give a folder of text files instead."
        )
    return from_texts("stdlib", texts, tuple(skipped))


def read_text(path: Path) -> Source:
    """A text file, or all text files of a folder and below, in the order of their paths.

    Raises: ValueError for a file that is not UTF-8 or holds byte 0, naming the byte offset.
    """
    files = list(_walk(path, TEXT_SUFFIXES, frozenset())) if path.is_dir() else [path]
    texts = []
    for file in files:
        text = _read(file)
        if (fault := _text_fault(text)) is not None:
            offset, why = fault
            raise ValueError(
                f"data.source={path}: {file} {why} at byte offset {offset}; text must be UTF-8. "
                f"Convert the file or remove it."
            )
        if text:
            texts.append(text)
    if not texts:
        raise ValueError(
            f"data.source={path}: expected at least one non-empty file ending in "
            f"{', '.join(TEXT_SUFFIXES)}, found none among {len(files)}. "
            f"Token files ({', '.join(TOKEN_SUFFIXES)}) are given one by one, not as a folder."
        )
    return from_texts(str(path), texts, ())


def read_token_file(path: Path, *, vocab_size: int, separator: int | None) -> Source:
    """A memory-mapped ``.npy`` (1-D uint16 or uint32) or ``.bin`` (raw native uint16).

    The file is read through once, to find the documents and any id that does not fit.
    A document ends *with* its separator; without ``separator`` the file is one document.
    """
    tokens_N = _map_npy(path) if path.suffix == ".npy" else _map_bin(path)
    if not len(tokens_N):
        raise ValueError(f"data.source={path}: the file has no tokens; give one that has.")
    starts: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
    checksum = 0
    for begin in range(0, len(tokens_N), _SCAN_TOKENS):
        part = np.ascontiguousarray(tokens_N[begin : begin + _SCAN_TOKENS])
        checksum = zlib.crc32(part.data, checksum)
        if int(part.max()) >= vocab_size:
            at = int(np.argmax(part >= vocab_size))
            raise ValueError(
                f"data.source={path}: token {begin + at} has id {int(part[at])}, but "
                f"model.vocab_size is {vocab_size} (ids 0 to {vocab_size - 1}). "
                f"Use a vocab_size of at least {int(part.max()) + 1} or another file."
            )
        if separator is not None:
            starts.append(np.flatnonzero(part == separator) + (begin + 1))
    starts_D = np.concatenate(starts)
    return Source(
        name=str(path),
        tokens_N=tokens_N,
        starts_D=starts_D[starts_D < len(tokens_N)],
        padding_id=separator or 0,
        fingerprint=checksum,
    )


def _walk(root: Path, suffixes: Iterable[str], skipped: frozenset[str]) -> Iterator[Path]:
    """Files below ``root`` in the order of their relative paths; hidden folders are left out."""
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [x for x in folders if x not in skipped and not x.startswith(".")]
        found += [Path(folder, file) for file in files if file.endswith(tuple(suffixes))]
    return iter(sorted(found, key=lambda path: path.relative_to(root).as_posix()))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"data.source: cannot read {path}: {error.strerror}; make it readable or remove it."
        ) from error


def _text_fault(text: bytes) -> tuple[int, str] | None:
    """Byte offset and nature of the first thing that is no text.

    A zero byte is legal UTF-8 but would pass for a separator; UTF-16 is full of them.
    """
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start, f"is not UTF-8 ({error.reason})"
    zero = text.find(BYTE_SEPARATOR)
    return None if zero < 0 else (zero, "has the byte 0, which separates documents,")


def from_texts(name: str, texts: list[bytes], skipped: tuple[str, ...]) -> Source:
    """Documents of bytes, each ended by byte 0."""
    lengths = np.array([len(text) + 1 for text in texts], dtype=np.int64)
    joined = bytes([BYTE_SEPARATOR]).join([*texts, b""])
    return Source(
        name=name,
        tokens_N=np.frombuffer(joined, dtype=np.uint8),
        starts_D=np.cumsum(lengths) - lengths,
        padding_id=BYTE_SEPARATOR,
        fingerprint=zlib.crc32(joined),
        skipped=skipped,
    )


def _map_npy(path: Path) -> NDArray[Any]:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(
            f"data.source={path}: not a readable .npy file ({error}); "
            f"write it with numpy.save from a 1-D uint16 or uint32 array."
        ) from error
    if tokens.ndim != 1 or tokens.dtype not in (np.dtype(np.uint16), np.dtype(np.uint32)):
        raise ValueError(
            f"data.source={path}: expected a 1-D array of uint16 or uint32, found "
            f"{tokens.ndim}-D {tokens.dtype}; convert it with numpy and save it again."
        )
    return tokens


def _map_bin(path: Path) -> NDArray[Any]:
    size = path.stat().st_size
    if size % 2:
        raise ValueError(
            f"data.source={path}: a .bin file is raw uint16, but {size} bytes is an odd size; "
            f"the file is cut short or of another type."
        )
    # An empty file cannot be mapped.
    return np.memmap(path, dtype=np.uint16, mode="r") if size else np.zeros(0, np.uint16)
