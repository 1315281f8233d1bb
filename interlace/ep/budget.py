"""How much of the machine an exchange may take."""

from __future__ import annotations

import os


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
