"""Data: packing against a slow plain-Python oracle, sources, order and shards."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.model.batch import Batch
from interlace.train.data import Data, open_data
from interlace.train.data_pack import build_row, plan_rows, single_document_row
from interlace.train.data_source import read_stdlib

MakeSource = Callable[[Path], str]  # writes a source, gives its name


def slow_rows(documents: list[list[int]], seq_len: int, max_documents: int) -> list[list[list]]:
    """Oracle, token by token: rows as lists of pieces, a piece as (token, label or None) pairs.

    Windows of seq_len are filled first; a window with too many pieces is dealt out over rows.
    """
    windows: list[list[list]] = []
    used = seq_len
    for document in documents:
        labels = [*document[1:], None]
        is_new_piece = True
        for pair in zip(document, labels, strict=True):
            if used == seq_len:
                windows.append([])
                used, is_new_piece = 0, True
            if is_new_piece:
                windows[-1].append([])
                is_new_piece = False
            windows[-1][-1].append(pair)
            used += 1
    rows = []
    for window in windows:
        is_short = sum(map(len, window)) < seq_len
        if len(window) + is_short <= max_documents:
            rows.append(window)
            continue
        while window:
            rows.append(window[: max_documents - 1])
            window = window[max_documents - 1 :]
    return rows


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    seq_len=st.integers(1, 9),
    max_documents=st.integers(2, 5),
)
def test_packing_equals_slow_oracle(lengths: list[int], seq_len: int, max_documents: int) -> None:
    flat = np.arange(sum(lengths), dtype=np.uint16) + 1  # each token is unique
    starts = np.cumsum(lengths) - lengths
    documents = [flat[a : a + n].tolist() for a, n in zip(starts, lengths, strict=True)]
    cuts = plan_rows(starts, len(flat), seq_len=seq_len, max_documents=max_documents)
    expected = slow_rows(documents, seq_len, max_documents)
    assert len(cuts) - 1 == len(expected)

    for pieces, begin, end in zip(expected, cuts[:-1], cuts[1:], strict=True):
        row = build_row(
            flat,
            starts,
            int(begin),
            int(end),
            seq_len=seq_len,
            max_documents=max_documents,
            padding_id=0,
        )
        pairs = [pair for piece in pieces for pair in piece]
        padding = seq_len - len(pairs)
        assert row.tokens_S.tolist() == [token for token, _ in pairs] + [0] * padding
        labels = [-100 if label is None else label for _, label in pairs]
        assert row.labels_S.tolist() == labels + [-100] * padding
        sizes = [len(piece) for piece in pieces]
        positions = [i for size in sizes for i in range(size)]
        assert row.positions_S.tolist() == positions + [-1] * padding
        sizes += [padding] if padding else []
        bounds = [0, *np.cumsum(sizes).tolist()]
        columns = max_documents + 1
        assert row.cu_seqlens_C.tolist() == bounds + [seq_len] * (columns - len(bounds))


def test_worked_example_of_the_docstring() -> None:
    cuts = plan_rows(np.array([0, 2, 4, 6, 8]), 12, seq_len=8, max_documents=3)
    assert cuts.tolist() == [0, 4, 8, 12]


def test_a_plan_with_too_many_documents_cannot_pass_silently() -> None:
    with pytest.raises(ValueError):
        build_row(np.arange(4), np.arange(4), 0, 4, seq_len=4, max_documents=2, padding_id=0)


def write_tokens(path: Path, tokens: list[int], dtype: type = np.uint16) -> Path:
    array = np.array(tokens, dtype=dtype)
    if path.suffix == ".npy":
        np.save(path, array)
    else:
        array.tofile(path)
    return path


def open_ids(path: Path, **changes: object) -> Data:
    options = {"vocab_size": 1000, "seq_len": 4, "max_documents": 3, "seed": 7, "separator": 0}
    return open_data(str(path), **(options | changes))


def valid_tokens(batch: Batch) -> list[int]:
    """Tokens without the padding, whose id here is 0 like the separator's: drop both."""
    return batch.tokens_BS[batch.tokens_BS != 0].tolist()


@pytest.mark.parametrize(("name", "dtype"), [("a.bin", np.uint16), ("a.npy", np.uint32)])
def test_every_token_once_per_epoch(tmp_path: Path, name: str, dtype: type) -> None:
    """Oracle: the multiset of the file's own tokens (all unique but the separator)."""
    tokens = [0 if i % 7 == 6 else i + 1 for i in range(101)]
    data = open_ids(write_tokens(tmp_path / name, tokens, dtype))
    assert (data.num_tokens, data.num_documents) == (101, 15)
    seen = [
        Counter(valid_tokens(data.rows(s, global_batch_rows=1, first=0, count=1)))
        for s in range(2 * data.num_rows)
    ]
    expected = Counter(t for t in tokens if t)
    first, second = seen[: data.num_rows], seen[data.num_rows :]
    assert sum(first, Counter()) == expected
    assert sum(second, Counter()) == expected
    assert first != second  # another order in each epoch
    assert data.num_padding == data.num_rows * 4 - 101


def test_labels_cross_rows_but_not_documents(tmp_path: Path) -> None:
    data = open_ids(write_tokens(tmp_path / "a.bin", [1, 2, 3, 4, 5, 6, 0, 8, 9, 10, 11, 12]))
    batch = data.rows(0, global_batch_rows=3, first=0, count=3)
    rows = sorted(zip(batch.tokens_BS.tolist(), batch.labels_BS.tolist(), strict=True))
    assert rows == [
        ([1, 2, 3, 4], [2, 3, 4, 5]),
        ([5, 6, 0, 8], [6, 0, -100, 9]),
        ([9, 10, 11, 12], [10, 11, 12, -100]),
    ]
    row = batch.tokens_BS[:, 0].tolist().index(5)
    assert batch.positions_BS[row].tolist() == [0, 1, 2, 0]
    assert batch.cu_seqlens_BC[row].tolist() == [0, 3, 4, 4]


def test_global_batch_is_the_same_for_any_number_of_ranks(tmp_path: Path) -> None:
    """Oracle: the one-rank batch, bitwise; it includes the end of an epoch."""
    data = open_ids(write_tokens(tmp_path / "a.bin", list(range(1, 103))))
    assert data.num_rows == 26
    for step in (0, 3, 9):
        whole = data.rows(step, global_batch_rows=8, first=0, count=8)
        for ranks in (2, 4, 8):
            own = 8 // ranks
            parts = [
                data.rows(step, global_batch_rows=8, first=r * own, count=own) for r in range(ranks)
            ]
            for i, tensor in enumerate(whole.tensors()):
                assert torch.equal(tensor, torch.cat([part.tensors()[i] for part in parts]))


def test_pure_function_of_step_and_seed(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a.bin", list(range(1, 401)))
    first, again, other = open_ids(path), open_ids(path), open_ids(path, seed=8)
    late = first.rows(5, global_batch_rows=4, first=0, count=4)
    first.rows(200, global_batch_rows=4, first=0, count=4)
    for data in (first, again):
        same = data.rows(5, global_batch_rows=4, first=0, count=4)
        assert all(torch.equal(a, b) for a, b in zip(late.tensors(), same.tensors(), strict=True))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert not torch.equal(
        late.tokens_BS, other.rows(5, global_batch_rows=4, first=0, count=4).tokens_BS
    )
    assert first.epoch(50, 4) == 2.0


def test_dtypes_and_shapes(tmp_path: Path) -> None:
    data = open_ids(write_tokens(tmp_path / "a.bin", list(range(1, 50))))
    batch = data.rows(0, global_batch_rows=2, first=0, count=2)
    assert [tuple(t.shape) for t in batch.tensors()] == [(2, 4)] * 3 + [(2, 4)]
    assert [t.dtype for t in batch.tensors()] == [torch.int64] * 3 + [torch.int32]


def test_random_is_one_document_a_row() -> None:
    data = open_data("random", vocab_size=50, seq_len=6, max_documents=1, seed=3)
    batch = data.rows(4, global_batch_rows=4, first=1, count=2)
    assert torch.equal(batch.labels_BS[:, :-1], batch.tokens_BS[:, 1:])
    assert int(batch.tokens_BS.max()) < 50
    assert int(batch.labels_BS.min()) >= 0
    assert batch.positions_BS.tolist() == [list(range(6))] * 2
    assert batch.cu_seqlens_BC.tolist() == [[0, 6]] * 2
    assert "random" in data.describe()
    assert data.epoch(9, 4) == 0.0
    assert not torch.equal(batch.tokens_BS[0], batch.tokens_BS[1])


def test_single_document_row_pads_bounds() -> None:
    row = single_document_row(np.array([5, 6, 7]), max_documents=3)
    assert (row.tokens_S.tolist(), row.labels_S.tolist()) == ([5, 6], [6, 7])
    assert row.cu_seqlens_C.tolist() == [0, 2, 2, 2]


def test_stdlib_is_text_of_this_python() -> None:
    """Oracle: a known module's source stands in the stream as a document of its own."""
    source = read_stdlib()
    text = source.tokens_N.tobytes()
    assert 4_000_000 < len(text) <= 8_000_000
    ends = np.append(source.starts_D[1:], len(text)) - 1
    assert set(source.tokens_N[ends].tolist()) == {0}
    module = Path(bisect.__file__).read_bytes()
    at = text.index(module + b"\0")
    assert at in source.starts_D
    assert text.count(b"\0") == len(source.starts_D)
    assert read_stdlib(1_000_000).tokens_N.tobytes() == text[: len(read_stdlib(1_000_000).tokens_N)]


def test_stdlib_needs_hardly_any_padding() -> None:
    data = open_data("stdlib", vocab_size=256, seq_len=256, max_documents=16, seed=0)
    assert data.num_padding < 0.01 * data.num_tokens
    assert "0.0% padding" in data.describe()
    assert data.skipped == ()


def test_text_folder_is_read_in_path_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "no.txt").write_text("hidden")
    (tmp_path / "b" / "x.md").write_text("zwei")
    (tmp_path / "a.txt").write_text("eins é", encoding="utf-8")
    (tmp_path / "c.txt").write_text("")
    (tmp_path / "d.jpg").write_bytes(b"\xff\xd8")
    data = open_data(str(tmp_path), vocab_size=256, seq_len=64, max_documents=4, seed=0)
    batch = data.rows(0, global_batch_rows=1, first=0, count=1)
    text = "eins é".encode() + b"\0zwei\0"
    assert bytes(batch.tokens_BS[0, : len(text)].tolist()) == text
    assert batch.cu_seqlens_BC.tolist() == [[0, 8, 13, 64, 64]]
    single = open_data(str(tmp_path / "a.txt"), vocab_size=256, seq_len=4, max_documents=2, seed=0)
    assert single.num_tokens == 8


def bad_text(tmp_path: Path) -> str:
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    return str(tmp_path)


def zero_text(tmp_path: Path) -> str:
    (tmp_path / "wide.txt").write_bytes("ab".encode("utf-16-le"))
    return str(tmp_path)


def make(name: str, tokens: list[int], dtype: type = np.uint16) -> MakeSource:
    return lambda tmp_path: str(write_tokens(tmp_path / name, tokens, dtype))


def raw(name: str, content: bytes) -> MakeSource:
    def write(tmp_path: Path) -> str:
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    return write


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        (bad_text, {}, r"bad\.txt is not UTF-8 .* at byte offset 3; text must be UTF-8"),
        (zero_text, {}, r"wide\.txt has the byte 0.* at byte offset 1"),
        (lambda p: str(p), {}, r"at least one non-empty file ending in \.md"),
        (lambda p: str(p / "gone"), {}, "no such file or folder. Use stdlib, random"),
        (
            make("a.bin", [3, 4, 999]),
            {"vocab_size": 256},
            r"a\.bin: token 2 has id 999, but model\.vocab_size is 256 .* at least 1000",
        ),
        (make("a.npy", [1.0], np.float32), {}, "1-D array of uint16 or uint32, found 1-D float32"),
        (make("a.npy", [[1, 2]]), {}, "found 2-D uint16"),
        (make("a.npy", []), {}, "the file has no tokens"),
        (make("a.bin", [0, 0, 0]), {}, "3 tokens in 3 documents; no token has a next one"),
        (raw("a.npy", b"nothing"), {}, "not a readable .npy file"),
        (raw("a.bin", b"abc"), {}, "3 bytes is an odd size"),
        (raw("a.bin", b""), {}, "the file has no tokens"),
        (lambda p: "stdlib", {"vocab_size": 255}, "vocab_size=255: .* takes 256 ids"),
        (lambda p: "stdlib", {"max_documents": 1}, r"data\.max_documents=1: .* at least 2"),
        (lambda p: "random", {"seq_len": 0}, r"training\.seq_len=0: expected at least 1"),
        (lambda p: "random", {"seed": -1}, r"debug\.seed=-1: expected at least 0"),
        (lambda p: "random", {"separator": 1000}, r"data\.separator=1000: .* from 0 to 999"),
    ],
)
def test_bad_sources(tmp_path: Path, source: MakeSource, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_ids(source(tmp_path), **changes)


@pytest.mark.parametrize("block", [(0, 5), (-1, 2), (3, 2), (0, 0)])
def test_rows_outside_of_the_global_batch(block: tuple[int, int]) -> None:
    data = open_data("random", vocab_size=50, seq_len=6, max_documents=1, seed=3)
    with pytest.raises(ValueError, match="do not lie in a global batch of 4 rows"):
        data.rows(0, global_batch_rows=4, first=block[0], count=block[1])
