"""Read the JSON of a trace piece by piece: gzip or plain, whole or damaged.

A trace is ``{..., "traceEvents": [event, ...], ...}`` or the bare list.  The list is cut between
two events into pieces of some megabytes, so that memory does not grow with the file and one broken
byte costs one event.  Whatever had to be mended or left out is told in ``TraceReader.notes``.

Raises: ValueError, one line with the file and the byte, if no event list can be found.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

E = TypeVar("E")

_BLOCK_BYTES = 8 << 20
_MAX_JOINED = 3  # pieces joined before a piece that does not parse counts as broken
_MAX_NEIGHBOURS = 6  # texts between two borders that one event may span when it is looked for alone
_BORDER = re.compile(rb"\}\s*,\s*\{")
_LIST_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_ESCAPE = re.compile(rb'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')
_CONTROL = bytes(32 if code < 32 else code for code in range(256))
_BYTE = re.compile(r"\(byte (\d+)\)")
# What a file of another kind begins with.
_FOREIGN = {b"PK\x03\x04": "a zip archive", b"\x28\xb5\x2f\xfd": "zstandard data"}


class TraceReader(Generic[E]):
    """The events of one file, in batches, and afterwards its other fields."""

    def __init__(
        self, path: Path, event_type: type[E], progress: Callable[[int], None] | None = None
    ) -> None:
        self.path = path
        self.notes: list[str] = []
        self.fields: dict[str, Any] = {}
        self._decoder = msgspec.json.Decoder(list[event_type])  # type: ignore[valid-type]
        self._progress = progress
        self._blocks = self._read_blocks()
        self._text = bytearray()
        self._offset = 0  # of _text[0] in the unpacked file
        self._ended = False
        self._num_events = 0
        self._num_lost, self._num_mended = 0, 0
        self._first_fault: int | None = None

    # --- bytes ------------------------------------------------------------------------------------

    def _read_blocks(self) -> Iterator[bytes]:
        try:
            with open(self.path, "rb") as file:
                start = file.read(4)
                for magic, kind in _FOREIGN.items():
                    if start == magic:
                        raise ValueError(
                            f"{self.path} is {kind}, not JSON or gzip; unpack it first."
                        )
                file.seek(0)
                blocks = iter(lambda: file.read(_BLOCK_BYTES), b"")
                yield from self._unpack(blocks) if start[:2] == b"\x1f\x8b" else blocks
        except OSError as error:
            raise ValueError(
                f"{self.path} cannot be read: {error.strerror}; name a trace file."
            ) from None

    def _unpack(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        unzip = zlib.decompressobj(wbits=31)
        for block in blocks:
            while block:
                try:
                    data = unzip.decompress(block, _BLOCK_BYTES)
                except zlib.error:
                    self.notes.append(
                        f"the gzip data is damaged after byte {self._offset + len(self._text)} of "
                        f"its content; what came before was read."
                    )
                    return
                if data:
                    yield data
                block = unzip.unconsumed_tail
                if unzip.eof:  # several members may follow each other
                    block = unzip.unused_data
                    if not block.startswith(b"\x1f\x8b"):
                        break
                    unzip = zlib.decompressobj(wbits=31)
        if not unzip.eof:
            yield unzip.flush()
            self.notes.append(
                f"the gzip data is cut short after byte {self._offset + len(self._text)} of its "
                f"content; what came before was read."
            )

    def _fill(self) -> bool:
        block = next(self._blocks, b"")
        self._text += block
        if self._progress and block:
            self._progress(self._offset + len(self._text))
        return bool(block)

    def _drop(self, count: int) -> None:
        del self._text[:count]
        self._offset += count

    # --- the list ---------------------------------------------------------------------------------

    def batches(self) -> Iterator[list[E]]:
        """Events in the order of the file; ``notes`` and ``fields`` are complete at the end."""
        self._find_list()
        joined = 0
        more = True
        while not self._ended and more:
            more = self._fill()
            cut = self._last_border() if more else len(self._text)
            if not cut:
                continue
            piece = bytes(self._text[:cut])
            events, end = self._decode(piece)
            if events is None and more and joined < _MAX_JOINED:
                joined += 1  # cut inside a nested list, or inside a text
                continue
            joined = 0
            if events is None:
                events, end = self._salvage(piece)
            self._finish(piece, end, last=not more)
            self._num_events += len(events)
            yield events
        self._close()

    def _find_list(self) -> None:
        at = 0
        while True:
            more = self._fill()
            if not at and self._text[:3] == b"\xef\xbb\xbf":
                self._drop(3)
            text = self._text
            if text.lstrip()[:1] == b"[":
                self._drop(text.index(b"[") + 1)
                return
            found = _LIST_START.search(text, at)
            if found:
                head = bytes(text[: found.start()])
                self._read_fields(head.rstrip().removesuffix(b",") + b"}", self._offset)
                self._drop(found.end())
                return
            if not more:
                raise ValueError(self._no_list())
            at = max(0, len(text) - 64)

    def _no_list(self) -> str:
        text = bytes(self._text)
        if self.notes:
            return f"{self.path} holds no readable trace: {self.notes[0]}  Write it again."
        if not text.strip():
            return f"{self.path} is empty (0 bytes of JSON); name a trace of torch.profiler."
        try:
            msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            at = _byte_of(error, len(text))
            return (
                f"{self.path} is not a trace: expected JSON with traceEvents, found "
                f"{_plain(error)} at byte {at}; name a trace of torch.profiler."
            )
        return f"{self.path} has no traceEvents list; name a trace of torch.profiler."

    def _last_border(self) -> int:
        """Just past the last ``}`` that may end an event, 0 if there is none."""
        window = 1 << 16
        while True:
            start = max(0, len(self._text) - window)
            found = None
            for found in _BORDER.finditer(self._text, start):  # noqa: B007
                pass
            if found:
                return found.start() + 1
            if not start:
                return 0
            window *= 16

    def _decode(self, piece: bytes) -> tuple[list[E] | None, int | None]:
        """Events of a piece, None if it does not parse; and where the list ends, if it does."""
        text = b"[" + piece + b"]"
        try:
            return self._decoder.decode(text), None
        except msgspec.DecodeError as error:
            if "trailing characters" not in str(error):
                return None, None
            end = text.rfind(b"]", 0, _byte_of(error, 1) - 1) + 1  # the list ends before its byte
        except RecursionError:
            return None, None
        try:
            return self._decoder.decode(text[:end]), end - 1
        except msgspec.DecodeError:
            return None, None

    def _finish(self, piece: bytes, end: int | None, *, last: bool) -> None:
        """Take a piece off the text, and the comma after it."""
        if end is not None:
            self._ended = True
            self._drop(end)
            return
        self._drop(len(piece))
        if last:
            return
        while not (comma := _leading_comma(self._text)):
            if not self._fill():
                return
        self._drop(comma)

    def _close(self) -> None:
        if self._ended:
            while self._fill():
                pass
            rest = bytes(self._text).strip()
            if rest and rest != b"}":
                self._read_fields(b"{" + rest.removeprefix(b","), self._offset)
        elif not self._num_events:
            raise ValueError(
                f"{self.path} ends at byte {self._offset} before its first whole event; "
                f"write the trace again."
            )
        else:
            self.notes.append(
                f"the file is cut short at byte {self._offset}: {self._num_events} events were "
                f"read, later ones are missing."
            )
        self._tell_faults()

    def _tell_faults(self) -> None:
        where = f"the first at byte {self._first_fault}"
        if self._num_lost and not self._num_events:
            raise ValueError(f"{self.path}: no event can be read, {where}; write the trace again.")
        if self._num_mended:
            self.notes.append(
                f"{self._num_mended} piece(s) of invalid JSON were mended, {where} "
                f"(backslashes, control characters or UTF-8)."
            )
        if self._num_lost:
            self.notes.append(f"{self._num_lost} unreadable event(s) were left out, {where}.")

    # --- damage -----------------------------------------------------------------------------------

    def _salvage(self, piece: bytes) -> tuple[list[E], int | None]:
        """What can be read of a piece that does not parse; and where the list ends, if it does."""
        mended = mend(piece)
        if mended != piece:
            events, end = self._decode(mended)
            if events is not None and end is None:
                self._count_mended(piece)
                return events, None
        found: list[E] = []
        start = index = 0
        borders = [match.start() + 1 for match in _BORDER.finditer(piece)] + [len(piece)]
        while index < len(borders):
            events, end, index = self._one(piece, start, borders, index)
            found += events
            if end is not None:
                return found, start + end
            start = borders[index - 1]
            start += _leading_comma(piece[start : start + 4096])
        return found, None

    def _one(
        self, piece: bytes, start: int, borders: list[int], index: int
    ) -> tuple[list[E], int | None, int]:
        """One event from ``start``; the borders inside it, if any, are skipped."""
        for last in range(index, min(index + _MAX_NEIGHBOURS, len(borders))):
            text = piece[start : borders[last]]
            events, end = self._decode(text)
            if events is None and (mended := mend(text)) != text:
                events, end = self._decode(mended)
                if events is not None:
                    self._count_mended(text, start)
                    # A mended text is longer; what follows its list is found in the original.
                    end = None if end is None else max(len(text) - (len(mended) - end), 0)
            if events is not None:
                return events, end, last + 1
        is_last = index + 1 == len(borders)
        if is_last and b"]" not in piece[start:]:
            return [], None, index + 1  # cut short, which is told elsewhere
        self._num_lost += 1
        self._note_fault(start)
        closed = piece.find(b"]", start) if is_last else -1
        return [], closed + 1 - start if closed >= 0 else None, index + 1

    def _count_mended(self, text: bytes, start: int = 0) -> None:
        self._num_mended += 1
        try:
            self._decoder.decode(b"[" + text + b"]")
        except (msgspec.DecodeError, RecursionError) as error:
            self._note_fault(start + _byte_of(error, 1) - 1)

    def _note_fault(self, at: int) -> None:
        if self._first_fault is None:
            self._first_fault = self._offset + max(at, 0)

    def _read_fields(self, text: bytes, offset: int) -> None:
        try:
            try:
                fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            except msgspec.DecodeError:
                fields = msgspec.json.decode(mend(text), type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, RecursionError) as error:
            at = offset + max(_byte_of(error, 1) - 1, 0)
            self.notes.append(f"fields outside traceEvents are unreadable at byte {at}.")
            return
        for name, raw in fields.items():
            try:
                self.fields[name] = msgspec.json.decode(raw)
            except (msgspec.DecodeError, RecursionError):
                self.notes.append(f"the field {name[:40]!r} is unreadable.")


def mend(text: bytes) -> bytes:
    """JSON with stray backslashes, control characters and bytes that are no UTF-8, made valid.

    Example: ``"C:\\Users"`` with one backslash -> two; a raw tab -> a space; 0xff -> U+FFFD.
    """
    text = text.translate(_CONTROL)
    text = _ESCAPE.sub(lambda match: match[0] if match[1] else b"\\\\", text)
    return text.decode("utf-8", "replace").encode()


def _leading_comma(text: bytes | bytearray) -> int:
    """Length of the comma that the text begins with, and of the white space around it."""
    match = re.match(rb"\s*,\s*", text)
    return match.end() if match else 0


def _byte_of(error: Exception, otherwise: int) -> int:
    match = _BYTE.search(str(error))
    return int(match[1]) if match else otherwise


def _plain(error: Exception) -> str:
    text = _BYTE.sub("", str(error)).strip().removeprefix("JSON is malformed: ")
    text = text.partition(" - at")[0]
    return "the end of the data" if "truncated" in text else text
