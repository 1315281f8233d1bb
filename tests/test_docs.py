"""What the pages say is true of the program: commands, settings, arms, files, links, figures.

Every command line in a code block is parsed by the command's own parser; those in blocks below
`<!-- run -->` are run as well (slow), and what stands below `<!-- prints -->` must be in their
output.  Oracles: the program's parsers and lists, the files of the repository, and docs/results.md
for measured figures.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import interlace
from interlace import cli, ep
from interlace.train.arms import ARMS
from interlace.train.config import walk
from interlace.train.presets import PRESETS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
SETTINGS = {setting.name for setting in walk(PRESETS["dsv3-tiny"])}
SECTIONS = {name.partition(".")[0] for name in SETTINGS if "." in name}
_COMMAND = re.compile(
    r"^(?:[A-Z_]+=\S+ +)*(?:\.venv/bin/)?(?:interlace|python3?|torchrun|make|pip)\s"
)


@dataclass(frozen=True)
class Block:
    """A code block: its text without indentation, and the mark in the comment above it."""

    text: str
    mark: str

    @property
    def commands(self) -> list[list[str]]:
        """Words of each command; variables of the environment stay in front."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        lines = [line for line in joined.splitlines() if _COMMAND.match(line)]
        words = [shlex.split(line, comments=True) for line in lines]
        return [[w for w in each if w != "..."] for each in words]


def blocks(page: Path) -> Iterator[Block]:
    """The indented and the fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(
        r"(?:<!-- (?P<mark>[^\n]*) -->\n+)?"
        r"(?:^```\w*\n(?P<fenced>.*?)^```$|(?P<indented>(?:^ {4,}\S[^\n]*\n(?:\n(?= {4}))?)+))",
        text,
        re.MULTILINE | re.DOTALL,
    )
    for match in found:
        body = match["fenced"] or textwrap.dedent(match["indented"] or "")
        yield Block(body, match["mark"] or "")


def prose(page: Path) -> str:
    """The page without its code blocks."""
    text = re.sub(r"^```\w*\n.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^ {4,}\S.*$", "", text, flags=re.MULTILINE)


def spans(page: Path) -> list[str]:
    """What stands in backticks outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


# --- commands -------------------------------------------------------------------------------------

ALL_COMMANDS = [(p, c) for p in PAGES for block in blocks(p) for c in block.commands]


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands of the program end once their arguments have been read and checked."""
    monkeypatch.chdir(tmp_path)
    for page in PAGES:
        write_files(page, tmp_path)
    monkeypatch.setattr(cli, "_run", lambda *_, **__: 0)
    monkeypatch.setattr(cli, "_save", lambda *_, **__: None)
    for module, name in (
        ("interlace.train.trace_command", "trace_command"),
        ("interlace.train.schedule_command", "schedule_command"),
        ("interlace.train.doctor", "doctor"),
        ("interlace.measure.command", "report_command"),
    ):
        monkeypatch.setattr(importlib.import_module(module), name, lambda *_, **__: 0)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def write_files(page: Path, folder: Path) -> None:
    """The files that a page shows, for its own commands."""
    for block in blocks(page):
        if block.mark.startswith("file: "):
            (folder / block.mark.removeprefix("file: ")).write_text(block.text)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("page", "words"), ALL_COMMANDS, ids=[f"{p.stem}-{i}" for i, (p, _) in enumerate(ALL_COMMANDS)]
)
def test_command_is_known(page: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        assert name in sources(), f"nothing reads {name}"
        monkeypatch.setenv(name, value)
    program, *rest = words
    if Path(program).name == "interlace":
        assert cli.main(rest) in (0, None)
    elif program == "torchrun":
        check_torchrun(rest, monkeypatch)
    elif Path(program).name == "make":
        targets = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{re.escape(t)}:", targets, re.MULTILINE) for t in rest), rest
    elif rest[0] == "-m" or "pip" in program:
        assert rest[:2] in (["-m", "venv"], ["-m", "pytest"]) or rest[0] == "install"
    else:
        check_script(rest)


def check_torchrun(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(words)
    if not options.module:
        check_script([options.training_script, *options.training_script_args])
        return
    assert options.training_script == "interlace"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", options.nproc_per_node)
    monkeypatch.setattr(cli, "in_worker", lambda: True)
    monkeypatch.setattr(cli.os, "_exit", lambda code: pytest.fail(f"it ended with {code}"))
    assert cli.main(options.training_script_args) == 0


def check_script(words: list[str]) -> None:
    """The file exists and knows the options."""
    text = (ROOT / words[0]).read_text()
    unknown = [w for w in words[1:] if w.startswith("--") and f'"{w}"' not in text]
    assert not unknown, f"{words[0]} does not read {unknown}"


@cache
def sources() -> str:
    return "\n".join(p.read_text() for p in (ROOT / "interlace").rglob("*.py"))


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_settings_exist(page: Path) -> None:
    sections = "|".join(sorted(SECTIONS))
    text = re.sub(r"^ +interlace: error: .*$", "", page.read_text(), flags=re.MULTILINE)
    named = set(re.findall(rf"--((?:{sections})\.\w+)", text))
    for span in spans(page):
        named |= set(re.findall(rf"(?<![\w./])((?:{sections})\.[a-z]\w*)\b(?!\.?\w*[(/])", span))
    exchange = {f"ep.{name}" for name in ep.__all__} | {"ep.pending", "ep.wait"}
    named -= exchange | {n for n in named if n.endswith((".py", ".toml", ".json", ".jsonl"))}
    unknown = {n for n in named if re.sub(r"\.no_(\w+)$", r".\1", n) not in SETTINGS}
    assert not unknown, f"{page.name} names {unknown}, which are no settings"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_arms_presets_and_variables_exist(page: Path) -> None:
    text = page.read_text()
    code = sources()
    for variable in set(re.findall(r"\bINTERLACE_\w+", text)):
        assert variable in code, f"nothing reads {variable}"
    for span in spans(page):
        if re.fullmatch(r"chunk-\w+|[\w-]*captured", span):
            assert span in ARMS
        if re.fullmatch(r"(?:dsv3|qwen3)-[\w-]+", span):
            assert span in PRESETS


def test_the_table_of_arms_is_complete() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|[^|]*\| (?:`([\w-]+)` )?\|$",
                      (DOCS / "how-it-works.md").read_text(), re.MULTILINE)  # fmt: skip
    assert {name: against or None for name, against in rows} == {
        arm.name: arm.against for arm in ARMS.values()
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_names_of_the_library_exist(page: Path) -> None:
    """``interlace.x.y`` in prose and in Python, and every import."""
    code = "\n".join(b.text for b in blocks(page) if "import " in b.text or "def " in b.text)
    named = set(re.findall(r"\binterlace(?:\.[a-z_]\w*)+", "\n".join([*spans(page), code])))
    for name in named:
        parts, thing = name.split(".")[1:], interlace
        for index, part in enumerate(parts):
            if not hasattr(thing, part):
                importlib.import_module(".".join(["interlace", *parts[: index + 1]]))
            thing = getattr(thing, part)


# What commands write: not in the repository.
_PRODUCED = {
    "graph.txt", "summary.json", "timeline.svg", "schedule.json", "metrics.jsonl", "loss.svg",
    "config.toml", "config.json", "verify.json", "mine.toml",
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_files_exist(page: Path) -> None:
    pattern = r"[\w./-]+\.(?:py|md|svg|toml|txt|json|jsonl|j2)|(?:\w+/)+"
    for name in (s for s in spans(page) if re.fullmatch(pattern, s)):
        if Path(name).name in _PRODUCED or name.startswith("..."):
            continue
        places = [
            ROOT,
            page.parent,
            ROOT / "interlace",
            ROOT / "tests",
            ROOT / "benchmarks/results",
        ]
        places += [p for p in (ROOT / "interlace").iterdir() if p.is_dir()]
        assert any((place / name).exists() for place in places), f"{page.name}: no {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            heads = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in heads}


def test_the_index_names_every_page() -> None:
    index = (DOCS / "README.md").read_text()
    missing = [
        p.name for p in DOCS.glob("*.md") if f"]({p.name})" not in index and p.stem != "README"
    ]
    assert not missing, f"docs/README.md does not link {missing}"


# --- contents -------------------------------------------------------------------------------------


def test_files_shown_are_settings() -> None:
    shown = [b for p in PAGES for b in blocks(p) if b.text.startswith("preset =")]
    assert shown
    for block in shown:
        path = Path(block.mark.removeprefix("file: "))
        assert path.suffix == ".toml"


def test_figures_of_tuning_are_measured_or_drawn() -> None:
    """Each decimal number in prose stands in results.md; what is no measurement is listed here."""
    settings = {"1.0", "1.25", "1.1"}  # capacity factors and a gate
    known = set(re.findall(r"\d+\.\d+", (DOCS / "results.md").read_text())) | settings
    text = prose(DOCS / "tuning.md")
    unknown = {n for n in re.findall(r"(?<![\w.])\d+\.\d+", text) if n not in known}
    assert not unknown, f"docs/tuning.md has {unknown}, which docs/results.md has not"


def test_python_blocks_are_the_example() -> None:
    """Long ones line for line, short ones at least as Python."""
    example = (ROOT / "examples/own_model.py").read_text()
    shown = [b.text for b in blocks(DOCS / "own-model.md") if b.text.lstrip().startswith(
        ("class", "def", "group", "step", "chunk", "run ="))]  # fmt: skip
    assert len(shown) >= 7
    for text in shown:
        ast.parse(textwrap.dedent(text))
        if len(text.splitlines()) > 5:
            assert text in example, f"not in examples/own_model.py:\n{text}"


# --- pictures and runs ----------------------------------------------------------------------------


def headings(svg: str) -> list[str]:
    """Titles of a picture with their figures."""
    return re.findall(r'class="h">([^<]+)<', svg)


@pytest.mark.slow
def test_pictures_say_what_the_tool_says() -> None:
    pictures = runpy.run_path(str(DOCS / "pictures.py"))
    drawn = {name: pictures["draw_schedule"](name) for name in pictures["SCHEDULES"]}
    drawn |= {name: pictures[f"draw_{name}"]() for name in ("report", "bench", "link")}
    assert {p.stem for p in (DOCS / "img").glob("*.svg")} == set(drawn)
    for name, svg in drawn.items():
        kept = (DOCS / "img" / f"{name}.svg").read_text()
        assert headings(kept) == headings(svg), f"run: python docs/pictures.py {name}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["getting-started", "own-model", "tuning"])
def test_marked_blocks_run(name: str, tmp_path: Path) -> None:
    page, printed = DOCS / f"{name}.md", ""
    write_files(page, tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    num_commands = 0
    for block in blocks(page):
        if block.mark == "prints":
            for line in block.text.splitlines():
                assert line in printed, f"{page.name} expects {line!r} in:\n{printed}"
        if not block.mark.startswith("run"):
            continue
        folder = ROOT if block.mark == "run in the repository" else tmp_path
        printed = ""
        for words in block.commands:
            num_commands += 1
            printed += run(words, folder, environment)
    assert num_commands >= 3
    if name == "tuning":  # what the page concludes from its two schedules
        whole, cut = (
            json.loads((tmp_path / d / "schedule.json").read_text()) for d in ("whole", "cut")
        )
        assert whole["total_us"][1] < cut["total_us"][1]


def run(words: list[str], folder: Path, environment: dict[str, str]) -> str:
    """What a command prints; a hung one is told to end its own workers."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            out, err = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.terminate()
            out, err = process.communicate(timeout=20)
            raise AssertionError(
                f"{shlex.join(words)} hung:\n{out[-1000:]}\n{err[-2000:]}"
            ) from None
    assert process.returncode == 0, f"{shlex.join(words)}:\n{out[-1000:]}\n{err[-2000:]}"
    return out
