"""JSONL, parquet and tokenizer files as sources.  Oracle: the documents that were written."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from interlace.train.data import Data, open_data

TEXTS = ["one two", "three", "", "two two one"]


def open_small(path: Path, **changes: Any) -> Data:
    plain = {"vocab_size": 256, "seq_len": 8, "max_documents": 4, "seed": 0}
    return open_data(str(path), **(plain | changes))


def documents(data: Data, separator: int) -> list[tuple[int, ...]]:
    """All documents of one epoch, put together from rows in their order in the source."""
    batch = data.rows(0, global_batch_rows=data.num_rows, first=0, count=data.num_rows)
    places = zip(
        batch.tokens_BS.flatten().tolist(), batch.positions_BS.flatten().tolist(), strict=True
    )
    found: list[tuple[int, ...]] = []
    current: list[int] = []
    for token, position in places:
        if position < 0:
            continue
        current.append(token)
        if token == separator:
            found.append(tuple(current))
            current = []
    return sorted(found)


def jsonl(tmp_path: Path, field: str = "text") -> Path:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({field: text, "n": i}) for i, text in enumerate(TEXTS)]
    path.write_text("\n".join([*lines, "", ""]))
    return path


@pytest.mark.parametrize("field", ["text", "body"])
def test_jsonl_as_bytes(tmp_path: Path, field: str) -> None:
    data = open_small(jsonl(tmp_path, field), seq_len=16, text_field=field)
    expected = sorted((*text.encode(), 0) for text in TEXTS if text)
    assert documents(data, 0) == expected
    assert data.num_documents == 3


def tokenizer_file(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<end>": 0, "one": 1, "two": 2, "three": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<end>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


def test_a_tokenizer_file(tmp_path: Path) -> None:
    name = str(tokenizer_file(tmp_path))
    data = open_small(jsonl(tmp_path), vocab_size=4, tokenizer=name, separator=0)
    assert documents(data, 0) == sorted([(1, 2, 0), (3, 0), (2, 2, 1, 0)])
    text = tmp_path / "b.txt"
    text.write_text("three two")
    assert documents(open_small(text, vocab_size=4, tokenizer=name, separator=0), 0) == [(3, 2, 0)]
    other = open_small(jsonl(tmp_path), vocab_size=9, tokenizer=name, separator=7)
    assert other.fingerprint != data.fingerprint


def test_parquet_by_a_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow's calls as its manual has them; two batches of a column."""

    class Column:
        def __init__(self, values: list[Any]) -> None:
            self.to_pylist = lambda: values
            self.column = lambda index: self

    class ParquetFile:
        def __init__(self, path: Path) -> None:
            self.schema_arrow = types.SimpleNamespace(names=["text", "n"])

        def iter_batches(self, columns: list[str]) -> list[Column]:
            assert columns == ["text"]
            return [Column(TEXTS[:2]), Column(TEXTS[2:])]

    package, module = types.ModuleType("pyarrow"), types.ModuleType("pyarrow.parquet")
    package.parquet, module.ParquetFile = module, ParquetFile
    monkeypatch.setitem(sys.modules, "pyarrow", package)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)
    path = tmp_path / "a.parquet"
    path.write_bytes(b"")
    expected = sorted((*text.encode(), 0) for text in TEXTS if text)
    assert documents(open_small(path, seq_len=16), 0) == expected
    with pytest.raises(ValueError, match=r"has no column data\.text_field=body; it has text, n"):
        open_small(path, text_field="body")


def test_real_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": TEXTS}), path)
    expected = sorted((*text.encode(), 0) for text in TEXTS if text)
    assert documents(open_small(path, seq_len=16), 0) == expected
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match="is no parquet file"):
        open_small(tmp_path / "bad.parquet")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"text": "a"}\n{"text": ', r"line 2 is no JSON: "),
        ('{"body": "a"}', r"line 1 has no data\.text_field=text; it has body"),
        ("[1, 2]", r"line 1 has no data\.text_field=text; it has no object"),
        ('{"text": 3}', r"row 1 has int in data\.text_field=text, expected text"),
        ('{"text": "a\\u0000b"}', r"row 1 has the character 0"),
        ('{"text": ""}', r"no row has a document"),
        (b'{"text": "\xff"}', r"line 1 is no JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, lines: str | bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines if isinstance(lines, bytes) else lines.encode())
    with pytest.raises(ValueError, match=message):
        open_small(path)


def test_bad_tokenizers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, name = jsonl(tmp_path), str(tokenizer_file(tmp_path))
    with pytest.raises(ValueError, match=r"needs data\.separator"):
        open_small(path, tokenizer=name)
    with pytest.raises(ValueError, match=r"has 4 ids, but model\.vocab_size=3; nearest: "):
        open_small(path, tokenizer=name, separator=0, vocab_size=3)
    with pytest.raises(ValueError, match="is no file; use bytes or"):
        open_small(path, tokenizer="none.json", separator=0)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match="is no tokenizers file"):
        open_small(path, tokenizer=str(tmp_path / "bad.json"), separator=0)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="needs the package tokenizers; run: pip install"):
        open_small(path, tokenizer=name, separator=0)
