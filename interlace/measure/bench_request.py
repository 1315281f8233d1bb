"""What a benchmark was asked for, checked before anything long runs; imports no torch."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlace.train.config import ARMS, Config, walk
from interlace.train.config_check import check
from interlace.train.config_read import load_config

DEFAULT_ARMS = (
    *("control", "scheduled", "chunk-scheduled"),
    *("captured", "scheduled-captured", "chunk-captured"),
)
DEFAULT_ROUNDS = 5
_MAX_CTAS = 132
_SWEPT_SECTIONS = ("overlap.", "ep.", "compile.")  # all else changes weights, batch or ranks
Values = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Setting:
    """One combination of swept values, by dotted name, and the settings that it makes."""

    values: Values
    config: Config


@dataclass(frozen=True)
class Request:
    """``optional``: arms that cannot run here are left out with their reason; else an error.

    ``refused``: combinations of swept values that are not legal, with the reason.
    """

    arms: tuple[str, ...]
    optional: bool
    budgets: tuple[int, ...]  # none: the environment's, or the default of loopback
    settings: tuple[Setting, ...]
    rounds: int = DEFAULT_ROUNDS
    min_gain: float | None = None
    optimizer: bool = False
    json: Path | None = None
    html: Path | None = None
    trace: Path | None = None
    refused: tuple[tuple[Values, str], ...] = ()


def read_arms(text: str | None) -> tuple[tuple[str, ...], bool]:
    """The arms, and whether those that cannot run may be left out.

    Raises: ValueError for an arm that does not exist.
    """
    if text is None or text == "all":
        return (DEFAULT_ARMS if text is None else ARMS), True
    arms = tuple(dict.fromkeys(arm for arm in text.split(",") if arm))
    for arm in arms:
        if arm not in ARMS:
            close = difflib.get_close_matches(arm, ARMS, n=1)
            hint = f"; did you mean {close[0]}?" if close else "."
            raise ValueError(f"--arms: unknown arm {arm!r}, legal: all, {', '.join(ARMS)}{hint}")
    if not arms:
        raise ValueError(f"--arms names no arm; legal: all, {', '.join(ARMS)}.")
    return arms, False


def read_budgets(text: str | None) -> tuple[int, ...]:
    """Thread blocks of an exchange, joined by commas: ``1,2,8``."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isdecimal() or not 1 <= int(part) <= _MAX_CTAS:
            raise ValueError(
                f"--budgets {text}: {part!r} is no whole number from 1 to {_MAX_CTAS}; write for "
                f"example --budgets 1,2,8."
            )
    return tuple(dict.fromkeys(map(int, parts)))


def read_settings(
    rest: list[str], sweeps: Sequence[str], world_size: int
) -> tuple[tuple[Setting, ...], tuple[tuple[Values, str], ...]]:
    """Every combination of ``NAME=VALUE,VALUE...`` over the settings of the command line.

    Returns the legal ones and, where several settings are swept, those that are not, with why.
    Raises: ValueError for a name that cannot be swept in one run, or a value that is not legal.
    """
    base = load_config(rest)
    axes = [_read_sweep(sweep, base) for sweep in sweeps]
    names = [name for name, _ in axes]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"--sweep {repeated} is given twice; join its values by commas.")
    found, refused = [], []
    for texts in itertools.product(*(values for _, values in axes)):
        flags = [flag for n, text in zip(names, texts, strict=True) for flag in _flags(n, text)]
        config = load_config([*rest, *flags])  # a value that no combination could have is an error
        try:
            check(config, world_size)
        except ValueError as error:
            if len(axes) < 2:
                raise
            refused.append((tuple(zip(names, texts, strict=True)), str(error).rstrip(".")))
            continue
        got = {setting.name: setting.value for setting in walk(config)}
        found.append(Setting(tuple((name, got[name]) for name in names), config))
    if not found:
        raise ValueError(f"--sweep: no combination is legal: {refused[0][1]}.")
    return tuple(found), tuple(refused)


def _read_sweep(sweep: str, base: Config) -> tuple[str, list[str]]:
    name, equals, text = sweep.partition("=")
    name = name.removeprefix("--").replace("-", "_")
    legal = {
        setting.name: setting.hint
        for setting in walk(base)
        if setting.name.startswith(_SWEPT_SECTIONS) and setting.name != "ep.transport"
    }
    if name not in legal:
        known = {setting.name for setting in walk(base)}
        why = "arms of one run share weights, batch and ranks" if name in known else "no setting"
        close = difflib.get_close_matches(name, legal, n=1)
        hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(legal)}."
        raise ValueError(f"--sweep {name}: cannot be swept, {why}; {hint}")
    values = [value.strip() for value in text.split(",")]
    if legal[name] is bool and not {*values} <= {"true", "false"}:
        raise ValueError(f"--sweep {sweep}: {name} is a switch; write {name}=true,false.")
    if not equals or not all(values):
        raise ValueError(f"--sweep {sweep}: write NAME=VALUE,VALUE, such as overlap.chunks=1,2,4.")
    return name, list(dict.fromkeys(values))


def _flags(name: str, text: str) -> list[str]:
    """Flags of the command line; a switch has no value there."""
    section, _, key = name.rpartition(".")
    switches = {"true": [f"--{name}"], "false": [f"--{section}.no_{key}"]}
    return switches.get(text, [f"--{name}", text])


def check_files(request: Request) -> None:
    """Raises: ValueError for a file or folder that cannot be written, or numbers out of range."""
    for option, path in (("--json", request.json), ("--html", request.html)):
        if path and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ValueError(f"{option} {path}: no file can be written there; name another path.")
    if request.trace and request.trace.exists() and not request.trace.is_dir():
        raise ValueError(f"--trace {request.trace} is a file; name a folder.")
    if request.rounds < 1:
        raise ValueError(f"--rounds {request.rounds} must be at least 1; nearest: 1.")
    if request.min_gain is not None and not 0 < request.min_gain < 1000:
        raise ValueError(f"--min-gain {request.min_gain:g} must be a ratio, such as 1.1.")
