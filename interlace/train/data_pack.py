"""Cuts a run of documents into rows of one static length, without ever joining two documents.

Legend: N tokens of the source, D documents, M rows of an epoch, S tokens a row,
        C document boundaries of a row (static: max_documents + 1).

The rule: the source is cut into windows of S tokens.  A window with too many documents becomes
several rows of ``max_documents - 1`` whole documents each; what a row lacks is padding, as a last
document of its own: every label is ignored and every position is PADDING.  The last window of the
source may be short and is padded likewise.  So each token of the source is an input exactly once in
an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interlace.model.batch import IGNORED, PADDING


@dataclass(frozen=True)
class Row:
    """One row in numpy; the meaning of the fields is that of :class:`Batch`."""

    tokens_S: NDArray[np.int64]
    labels_S: NDArray[np.int64]
    positions_S: NDArray[np.int64]
    cu_seqlens_C: NDArray[np.int32]


def plan_rows(
    starts_D: NDArray[np.int64], num_tokens: int, *, seq_len: int, max_documents: int
) -> NDArray[np.int64]:
    """First token of each row, then ``num_tokens``: row m is tokens [cuts[m], cuts[m + 1]).

    Example: documents of 2, 2, 2, 2, 4 tokens, seq_len=8, max_documents=3
             -> 0, 4, 8, 12: the first window holds four documents, hence two rows of two.
    """
    windows = np.arange(0, num_tokens, seq_len, dtype=np.int64)
    segments = np.union1d(windows, starts_D)  # a piece of one document in one window each
    window_of = segments // seq_len
    first = np.searchsorted(segments, windows)
    rank_in_window = np.arange(len(segments)) - first[window_of]
    limits = np.full(len(windows), max_documents)
    if num_tokens % seq_len:
        limits[-1] -= 1  # the short last window needs a place for its padding
    too_many = np.diff(first, append=len(segments)) > limits
    is_cut = (rank_in_window == 0) | (
        too_many[window_of] & (rank_in_window % max(max_documents - 1, 1) == 0)
    )
    return np.append(segments[is_cut], num_tokens)


def build_row(
    tokens_N: NDArray[Any],
    starts_D: NDArray[np.int64],
    begin: int,
    end: int,
    *,
    seq_len: int,
    max_documents: int,
    padding_id: int,
) -> Row:
    """Tokens [begin, end) of the source as one row.

    A label is the next token of the same document, be it in the next row, and ignored at the
    last token of a document.  Positions restart with each document, and with each row.
    """
    length = end - begin
    tokens_S = np.full(seq_len, padding_id, dtype=np.int64)
    tokens_S[:length] = tokens_N[begin:end]
    next_tokens = tokens_N[begin + 1 : end + 1]
    labels_S = np.full(seq_len, IGNORED, dtype=np.int64)
    labels_S[: len(next_tokens)] = next_tokens
    low, high = np.searchsorted(starts_D, (begin, end), side="right")
    next_starts = starts_D[low:high] - begin  # in (0, length]
    labels_S[next_starts - 1] = IGNORED
    inner = next_starts[next_starts < length]
    bounds = np.unique(np.concatenate(([0], inner, [length, seq_len])))
    positions_S = _positions(bounds)
    positions_S[length:] = PADDING
    return Row(tokens_S, labels_S, positions_S, _pad_bounds(bounds, max_documents + 1))


def single_document_row(tokens: NDArray[Any], max_documents: int) -> Row:
    """S + 1 tokens of one document: all labels count."""
    bounds = np.array([0, len(tokens) - 1])
    tokens = tokens.astype(np.int64)
    return Row(tokens[:-1], tokens[1:], _positions(bounds), _pad_bounds(bounds, max_documents + 1))


def _positions(bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds))


def _pad_bounds(bounds: NDArray[np.int64], num_columns: int) -> NDArray[np.int32]:
    padded = np.full(num_columns, bounds[-1], dtype=np.int32)
    padded[: len(bounds)] = bounds  # raises, never truncates, if the plan broke its promise
    return padded
