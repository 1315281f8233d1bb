"""Batches of packed sequences as a pure function of the step.

Legend: B rows of a batch, S tokens a row, C document boundaries a row (static).

The rows of all steps form one endless line: step s takes the next ``global_batch_rows`` of it, and
each epoch is a seeded permutation of all rows of the source.  A rank asks for a contiguous block
of the global batch, so that the set of rows of a step is the same for any number of ranks, and a
resumed run needs nothing but the step number.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from interlace.model.batch import Batch
from interlace.train.data_pack import Row, build_row, plan_rows, single_document_row
from interlace.train.data_source import (
    BYTE_VOCAB,
    TOKEN_SUFFIXES,
    Source,
    read_stdlib,
    read_text,
    read_token_file,
)
from interlace.train.data_table import TABLE_SUFFIXES, read_table, tokenize

_SPLIT = 0x5117  # the stream of random numbers that chooses held-out rows


@dataclass(frozen=True)
class Data:
    """An open source.  ``num_*`` speak of one epoch; a random source has no end and no epoch.

    ``num_padding`` counts padding tokens, ``fingerprint`` is a checksum of source and packing
    (compare it across ranks and on resume), ``skipped`` names files that were left out.
    """

    name: str
    seq_len: int
    max_documents: int
    num_rows: int | None
    num_tokens: int | None
    num_documents: int | None
    num_padding: int
    fingerprint: int
    skipped: tuple[str, ...]
    num_held_out: int  # rows that are in no epoch: read_held_out gives them
    read_held_out: Callable[[int], Row]  # place among them -> row
    read_row: Callable[[int], Row]  # place in the endless line of rows -> row

    def rows(self, step: int, *, global_batch_rows: int, first: int, count: int) -> Batch:
        """Rows [first, first + count) of the global batch of ``step`` (from 0), on the CPU.

        A pure function of its arguments.  Shapes: those of Batch, B = count.
        """
        if step < 0 or count < 1 or first < 0 or first + count > global_batch_rows:
            raise ValueError(
                f"Data.rows: rows {first} to {first + count - 1} of step {step} do not lie in a "
                f"global batch of {global_batch_rows} rows; use count >= 1, first >= 0 and "
                f"first + count <= {global_batch_rows}."
            )
        begin = step * global_batch_rows + first
        return _to_batch([self.read_row(begin + i) for i in range(count)])

    def held_out_rows(self, first: int, count: int) -> Batch:
        """Rows [first, first + count) of those kept out of the training."""
        return _to_batch([self.read_held_out(first + i) for i in range(count)])

    def num_steps(self, global_batch_rows: int) -> int | None:
        """Whole batches of the first epoch; None where there is no end.  The rest of an epoch that
        fills no batch belongs to a run that wraps."""
        return None if self.num_rows is None else self.num_rows // global_batch_rows

    def epoch(self, step: int, global_batch_rows: int) -> float:
        """How many times the source has been seen before ``step``; 0 for a random source."""
        return step * global_batch_rows / self.num_rows if self.num_rows else 0.0

    def describe(self) -> str:
        """One line for the log."""
        if self.num_rows is None:
            return f"data {self.name}: endless random tokens, one document a row"
        num_rows = self.num_rows + self.num_held_out
        share = 100 * self.num_padding / (num_rows * self.seq_len)
        line = (
            f"data {self.name}: {self.num_tokens:,} tokens, {self.num_documents:,} documents, "
            f"{num_rows:,} rows of {self.seq_len} ({share:.1f}% padding)"
        )
        if self.num_held_out:
            line += f", {self.num_held_out:,} of them for evaluation"
        return line + (f", {len(self.skipped)} files not UTF-8 skipped" if self.skipped else "")


def open_data(
    source: str,
    *,
    vocab_size: int,
    seq_len: int,
    max_documents: int,
    seed: int,
    separator: int | None = None,
    text_field: str = "text",
    tokenizer: str = "bytes",
    held_out_rows: int = 0,
) -> Data:
    """Opens ``stdlib``, ``random``, a text file or folder, a table of documents (.jsonl, .parquet)
    or a token file (.npy, .bin).

    ``separator`` is the id that ends a document of a token file; without it such a file is one
    document.  Text read as bytes uses byte 0; with a ``tokenizer`` file it needs ``separator``.
    ``max_documents`` bounds the documents of a row, padding included (see data_pack).
    ``held_out_rows`` rows, chosen by the seed, are left out of every epoch.
    Raises: ValueError that names the setting and the legal values.
    """
    _check_numbers(vocab_size, seq_len, max_documents, seed, separator)
    if source == "random":
        return _random_data(vocab_size, seq_len, max_documents, seed, held_out_rows)
    if max_documents < 2:
        raise ValueError(
            f"data.max_documents={max_documents}: packed rows need at least 2, one of them for "
            f"padding. Use data.max_documents=2 or more."
        )
    path = Path(source).expanduser()
    if source == "stdlib":
        opened = read_stdlib()
    elif not path.exists():
        raise ValueError(
            f"data.source={source}: no such file or folder. Use stdlib, random, a text file, a "
            f"folder of text files, or a token file ({', '.join(TOKEN_SUFFIXES)})."
        )
    elif path.suffix in TOKEN_SUFFIXES and path.is_file():
        opened = read_token_file(path, vocab_size=vocab_size, separator=separator)
        return _packed_data(opened, seq_len, max_documents, seed, held_out_rows)
    elif path.suffix in TABLE_SUFFIXES and path.is_file():
        opened = read_table(path, text_field)
    else:
        opened = read_text(path)
    if tokenizer != "bytes":
        opened = tokenize(opened, tokenizer, vocab_size=vocab_size, separator=separator)
    elif vocab_size < BYTE_VOCAB:
        raise ValueError(
            f"model.vocab_size={vocab_size}: text is read as bytes, which takes {BYTE_VOCAB} ids. "
            f"Use model.vocab_size={BYTE_VOCAB} or more."
        )
    return _packed_data(opened, seq_len, max_documents, seed, held_out_rows)


def _packed_data(
    source: Source, seq_len: int, max_documents: int, seed: int, held_out_rows: int
) -> Data:
    num_tokens, num_documents = len(source.tokens_N), len(source.starts_D)
    if num_tokens == num_documents:
        raise ValueError(
            f"data.source={source.name}: {num_tokens} tokens in {num_documents} documents; no "
            f"token has a next one to predict. Use longer documents or another separator."
        )
    cuts = plan_rows(source.starts_D, num_tokens, seq_len=seq_len, max_documents=max_documents)
    num_held_out, num_rows = held_out_rows, len(cuts) - 1 - held_out_rows
    if num_rows < 1:
        raise ValueError(
            f"data.source={source.name}: {len(cuts) - 1} rows of {seq_len} tokens, of which an "
            f"evaluation would keep {num_held_out}; use fewer evaluation.batches or name an "
            f"evaluation.source."
        )
    # Without held-out rows the order of an epoch is a permutation of the rows themselves.
    shuffled = np.arange(len(cuts) - 1)
    if num_held_out:
        shuffled = np.random.default_rng((seed, _SPLIT)).permutation(shuffled)

    # Two epochs, for the step that lies across the end of one.
    @lru_cache(maxsize=2)
    def order(epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng((seed, epoch)).permutation(num_rows)

    def read_row(place: int) -> Row:
        epoch, index = divmod(place, num_rows)
        return row_at(int(shuffled[num_held_out + int(order(epoch)[index])]))

    def row_at(row: int) -> Row:
        return build_row(
            source.tokens_N,
            source.starts_D,
            int(cuts[row]),
            int(cuts[row + 1]),
            seq_len=seq_len,
            max_documents=max_documents,
            padding_id=source.padding_id,
        )

    return Data(
        name=source.name,
        seq_len=seq_len,
        max_documents=max_documents,
        num_rows=num_rows,
        num_tokens=num_tokens,
        num_documents=num_documents,
        num_padding=(len(cuts) - 1) * seq_len - num_tokens,
        fingerprint=_checksum(source.fingerprint, seq_len, max_documents, num_rows, seed),
        skipped=source.skipped,
        num_held_out=num_held_out,
        read_held_out=lambda place: row_at(int(shuffled[place % max(num_held_out, 1)])),
        read_row=read_row,
    )


def _random_data(
    vocab_size: int, seq_len: int, max_documents: int, seed: int, num_held_out: int
) -> Data:
    def read_row(place: int) -> Row:
        return row_of(np.random.default_rng((seed, place)))

    def row_of(rng: np.random.Generator) -> Row:
        return single_document_row(rng.integers(0, vocab_size, seq_len + 1), max_documents)

    return Data(
        name="random",
        seq_len=seq_len,
        max_documents=max_documents,
        num_rows=None,
        num_tokens=None,
        num_documents=None,
        num_padding=0,
        fingerprint=_checksum(vocab_size, seq_len, max_documents, seed),
        skipped=(),
        num_held_out=num_held_out,
        read_held_out=lambda place: row_of(np.random.default_rng((seed, _SPLIT, place))),
        read_row=read_row,
    )


def _checksum(*numbers: int) -> int:
    return zlib.crc32(repr(numbers).encode())


def _to_batch(rows: list[Row]) -> Batch:
    return Batch(
        tokens_BS=_stack([row.tokens_S for row in rows]),
        labels_BS=_stack([row.labels_S for row in rows]),
        positions_BS=_stack([row.positions_S for row in rows]),
        cu_seqlens_BC=_stack([row.cu_seqlens_C for row in rows]),
    )


def _stack(arrays: list[NDArray[Any]]) -> torch.Tensor:
    return torch.from_numpy(np.stack(arrays))


def _check_numbers(
    vocab_size: int, seq_len: int, max_documents: int, seed: int, separator: int | None
) -> None:
    lowest = {
        "model.vocab_size": (vocab_size, 2),
        "training.seq_len": (seq_len, 1),
        "data.max_documents": (max_documents, 1),
        "debug.seed": (seed, 0),
    }
    for setting, (value, least) in lowest.items():
        if value < least:
            raise ValueError(f"{setting}={value}: expected at least {least}. Use {least} or more.")
    if separator is not None and not 0 <= separator < vocab_size:
        raise ValueError(
            f"data.separator={separator}: expected an id from 0 to {vocab_size - 1}, since "
            f"model.vocab_size is {vocab_size}. Use one of these or none."
        )
