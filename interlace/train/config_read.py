"""Settings read from presets, TOML files and dotted flags, and written back."""

from __future__ import annotations

import contextlib
import difflib
import io
import re
import tomllib
from collections.abc import Iterable
from dataclasses import is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from interlace.model.config import MODELS, ModelConfig
from interlace.train.config import ZERO_IS_NONE, Config, accept, walk

_MANY = 30  # names; more than that is no help in one line


def load_config(args: list[str]) -> Config:
    """Preset name or TOML file, then dotted overrides: ``["dsv3-tiny", "--training.steps", "20"]``.

    Raises: ValueError, one line, with close matches for what is not known.
    """
    from interlace.train.presets import PRESETS

    if not args or args[0].startswith("-"):
        found = f", got {args[0]}" if args else ""
        raise ValueError(
            f"name a preset or a TOML file first{found}; presets: {', '.join(PRESETS)}"
        )
    name, *flags = args
    if name in PRESETS:
        config = PRESETS[name]
    elif name.endswith(".toml") or "/" in name or Path(name).exists():
        config = _read_toml(Path(name), PRESETS)
    else:
        raise ValueError(f"unknown preset {name!r}{_suggest(name, PRESETS)}")
    return _zero_to_none(_apply_flags(config, flags, name) if flags else config)


def to_toml(config: Config) -> str:
    """The resolved configuration; load_config gives back an equal one.

    TOML has no null: a None is left out, or written "none" where the preset has another value.
    """
    import tomli_w

    from interlace.train.presets import PRESETS

    base = PRESETS.get(config.preset, config)
    preset_values = {setting.name: setting.value for setting in walk(base)}
    tree: dict[str, Any] = {}
    for name, _, value, *_ in walk(config):
        if value is None and preset_values.get(name) is None:
            continue
        section, _, key = name.rpartition(".")
        table = tree
        for part in section.split(".") if section else []:
            table = table.setdefault(part, {})
        table[key] = "none" if value is None else value
    return tomli_w.dumps(tree)


def _read_toml(path: Path, presets: dict[str, Config]) -> Config:
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a TOML file or a preset.")
    try:
        text = path.read_bytes().decode("utf-8-sig")
        tree = tomllib.loads(text)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; name a TOML file or a preset.") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not UTF-8 text (byte 0x{error.object[error.start]:02x} at offset "
            f"{error.start}); save it as UTF-8."
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not valid TOML: {error}.") from None
    if "preset" not in tree:
        raise ValueError(f'{path}: begin the file with a preset, such as preset = "dsv3-tiny".')
    preset = str(tree.pop("preset"))
    if preset not in presets:
        raise ValueError(f"{path}: unknown preset {preset!r}{_suggest(preset, presets)}")
    try:
        return _merge(presets[preset], tree, "")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _merge(base: Any, tree: dict[str, Any], prefix: str) -> Any:
    """A dataclass with the values of a table laid over it."""
    hints = get_type_hints(type(base))
    if isinstance(base, ModelConfig) and "name" in tree:
        base = _named_model(base, str(tree["name"]))
    changes: dict[str, Any] = {}
    for key, value in tree.items():
        name = prefix + key
        if key not in hints:
            kind = "setting" if prefix or not isinstance(value, dict) else "section"
            raise ValueError(f"unknown {kind} {name!r}{_suggest(key, hints)}")
        old = getattr(base, key)
        if is_dataclass(old):
            if not isinstance(value, dict):
                raise ValueError(f"{name} is a section, got {value!r}; write [{name}] above it.")
            changes[key] = _merge(old, value, f"{name}.")
        else:
            changes[key] = accept(name, hints[key], value)
    return replace(base, **changes)


def _named_model(current: ModelConfig, name: str) -> ModelConfig:
    """Another model by ``model.name``; the present one, with its changes, by its own name."""
    if name not in MODELS:
        raise ValueError(f"model.name: unknown model {name!r}{_suggest(name, MODELS)}")
    return current if name == current.name else MODELS[name]


def _apply_flags(config: Config, flags: list[str], prog: str) -> Config:
    """Dotted overrides through tyro, its boxed errors made one line."""
    import tyro

    names = {setting.name: setting.hint for setting in walk(config)}
    args = [part for flag in flags for part in _checked_flag(flag, names)]
    for i, (flag, value) in enumerate(pairwise(args), 1):
        if value in ("none", "null") and NoneType in get_args(names.get(flag[2:])):
            args[i] = "None"  # the spelling that tyro knows
        if flag == "--model.name":
            config = replace(config, model=_named_model(config.model, value))
    wants_help = "-h" in args or "--help" in args
    output = io.StringIO()
    capture = contextlib.nullcontext() if wants_help else contextlib.redirect_stdout(output)
    errors = contextlib.redirect_stderr(output)
    try:
        with capture, errors:
            return tyro.cli(
                tyro.conf.AvoidSubcommands[Config],
                default=config,
                args=args,
                prog=f"interlace train {prog}",
                description=f"Settings of {config.preset}, each with its value there.",
                use_underscores=True,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(_one_line(output.getvalue())) from None


def _checked_flag(flag: str, names: dict[str, Any]) -> list[str]:
    """A known flag with underscores, its ``=value`` apart; values pass through."""
    if not flag.startswith("--") or flag == "--help":
        return [flag]
    name, equals, value = flag[2:].partition("=")
    name = name.replace("-", "_")
    if name == "preset":
        raise ValueError("preset cannot be overridden; name another preset in its place.")
    if name not in names and re.sub(r"\.no_(\w+)$", r".\1", name) not in names:
        raise ValueError(f"unknown setting --{name}{_suggest(name, names)}")
    return [f"--{name}", value] if equals else [f"--{name}"]


def _one_line(box: str) -> str:
    """The message inside tyro's box, without rules, help and border."""
    lines = [line.strip(" │|╭╮╰╯") for line in box.splitlines()]
    lines = [line for line in lines if line]
    rules = [i for i, line in enumerate(lines) if set(line) <= set("-─")] + [len(lines)] * 2
    body = " ".join(lines[rules[0] + 1 : rules[1]]) or " ".join(lines)
    body = re.sub(r"^Error parsing --(\S+): ", r"\1: ", body.split(" Got errors:")[0])
    return body.replace("'--", "'") if body else "cannot read the settings given as flags."


def _zero_to_none(config: Config) -> Config:
    for name in ZERO_IS_NONE:
        section, key = name.split(".")
        part = getattr(config, section)
        if getattr(part, key) == 0:
            config = replace(config, **{section: replace(part, **{key: None})})
    return config


def _suggest(name: str, known: Iterable[str]) -> str:
    """The end of an "unknown ..." message: close matches, or all; of many dotted names those of the
    same section, or the sections."""
    known = list(known)
    close = [k for k in known if k.endswith(f".{name}")]
    close = close or difflib.get_close_matches(name, known, n=3)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    if len(known) > _MANY:
        sections = dict.fromkeys(k.partition(".")[0] for k in known if "." in k)
        beside = [k for k in known if k.startswith(f"{name.partition('.')[0]}.")]
        known = beside or [f"{section}.*" for section in sections]
    return f"; known: {', '.join(known)}."
