"""How much of the machine an exchange may take."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def _read(name: str) -> int | None:
    """A positive number of CTAs from the environment; None where the variable is not set."""
    text = os.environ.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 132:
        raise ValueError(f"{name}={text!r}: expected a whole number from 1 to 132, or nothing.")
    return int(text)


MAX_CTAS = _read("INTERLACE_EP_MAX_CTAS")
"""Thread blocks that carry one exchange, each with an SM to itself; None is the backend's choice.

Read once.  In loopback one CTA is about a 400 Gb/s network card, eight are about NVLink.
"""

_bound = MAX_CTAS


def max_ctas() -> int | None:
    """The bound of exchanges that are launched now: :data:`MAX_CTAS`, or that of :func:`bounded`.

    A captured graph keeps the bound that it was captured with.
    """
    return _bound


@contextlib.contextmanager
def bounded(num_ctas: int | None) -> Iterator[None]:
    """For measuring: another bound for the launches inside; None is the backend's choice."""
    global _bound
    if num_ctas is not None and not 1 <= num_ctas <= 132:
        raise ValueError(f"bounded: num_ctas is {num_ctas}; expected 1 to 132, or None.")
    before, _bound = _bound, num_ctas
    try:
        yield
    finally:
        _bound = before
