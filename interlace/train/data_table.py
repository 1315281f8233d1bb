"""Documents from tables (JSONL, parquet), and text as the ids of a tokenizer.

Legend: N tokens of the whole source, D documents.

Both keep their result in memory; for more than that, tokenise once into a token file.
"""

from __future__ import annotations

import importlib
import json
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from interlace.train.data_source import BYTE_SEPARATOR, Source, from_texts

TABLE_SUFFIXES = (".jsonl", ".parquet")


def read_table(path: Path, field: str) -> Source:
    """One document a row, from the text in ``field``; empty documents are left out.

    Raises: ValueError that names the row for what is no text.
    """
    texts = []
    rows = _read_jsonl(path, field) if path.suffix == ".jsonl" else _read_parquet(path, field)
    for row, text in rows:
        if not isinstance(text, str):
            raise ValueError(
                f"data.source={path}: row {row} has {type(text).__name__} in data.text_field="
                f"{field}, expected text; correct the row or name another field."
            )
        raw = text.encode("utf-8", "surrogatepass")
        if bytes([BYTE_SEPARATOR]) in raw:
            raise ValueError(
                f"data.source={path}: row {row} has the character 0, which separates documents; "
                f"remove it."
            )
        if raw:
            texts.append(raw)
    if not texts:
        raise ValueError(f"data.source={path}: no row has a document; give a file that has one.")
    return from_texts(str(path), texts, ())


def tokenize(source: Source, tokenizer: str, *, vocab_size: int, separator: int | None) -> Source:
    """The documents of a text source as ids; each ends with ``separator``.

    Raises: ValueError for a missing package or file, or ids beyond ``model.vocab_size``.
    """
    if separator is None:
        raise ValueError(
            f"data.tokenizer={tokenizer} needs data.separator, the id that ends a document; see "
            f"the tokenizer's end-of-text token."
        )
    encode, size = _load_tokenizer(tokenizer)
    if size > vocab_size:
        raise ValueError(
            f"data.tokenizer={tokenizer} has {size} ids, but model.vocab_size={vocab_size}; "
            f"nearest: model.vocab_size={size}."
        )
    tokens, starts, length = [], [], 0
    for text in _documents(source):
        ids = np.array([*encode(text), separator], dtype=np.uint32)
        starts.append(length)
        tokens.append(ids)
        length += len(ids)
    tokens_N = np.concatenate(tokens)
    return Source(
        name=source.name,
        tokens_N=tokens_N,
        starts_D=np.array(starts, dtype=np.int64),
        padding_id=separator,
        fingerprint=zlib.crc32(tokens_N.data),
        skipped=source.skipped,
    )


def _documents(source: Source) -> Iterator[str]:
    bounds = [*source.starts_D.tolist(), len(source.tokens_N)]
    for begin, end in pairwise(bounds):
        yield source.tokens_N[begin : end - 1].tobytes().decode("utf-8", "surrogatepass")


def _load_tokenizer(name: str) -> tuple[Any, int]:
    path = Path(name).expanduser()
    if not path.is_file():
        raise ValueError(f"data.tokenizer={name} is no file; use bytes or a tokenizers JSON file.")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ValueError(
            f"data.tokenizer={name} needs the package tokenizers; run: pip install "
            f"'interlace[tokenizers]', or use bytes."
        ) from error
    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise ValueError(f"data.tokenizer={name} is no tokenizers file: {error}.") from error
    return (lambda text: loaded.encode(text, add_special_tokens=False).ids), loaded.get_vocab_size()


def _read_jsonl(path: Path, field: str) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for row, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                document = json.loads(line)
            except ValueError as error:  # a UnicodeDecodeError is one too
                raise ValueError(
                    f"data.source={path}: line {row} is no JSON: {error}; correct or remove it."
                ) from error
            if not isinstance(document, dict) or field not in document:
                found = ", ".join(document) if isinstance(document, dict) else "no object"
                raise ValueError(
                    f"data.source={path}: line {row} has no data.text_field={field}; it has "
                    f"{found}."
                )
            yield row, document[field]


def _read_parquet(path: Path, field: str) -> Iterator[tuple[int, Any]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ValueError(
            f"data.source={path} needs the package pyarrow; run: pip install 'interlace[parquet]', "
            f"or give a .jsonl file."
        ) from error
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"data.source={path} is no parquet file: {error}.") from error
    names = file.schema_arrow.names
    if field not in names:
        raise ValueError(
            f"data.source={path} has no column data.text_field={field}; it has {', '.join(names)}."
        )
    row = 0
    for batch in file.iter_batches(columns=[field]):
        for text in batch.column(0).to_pylist():
            row += 1
            yield row, text
