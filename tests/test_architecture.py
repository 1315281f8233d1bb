"""The order of imports and the privacy of torch names, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "interlace"
ORDER = (
    "_compat graph kernels ep model trace chunk remat page regional schedule overlap pipeline"
    " capture train measure cli __main__"
).split()
# The exceptions: torch's operator namespace, and what is public in all but its spelling.
PUBLIC = ("torch.ops.",)


def _files() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py"))


def _module(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imported(tree: ast.AST) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("path", _files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_earlier_modules(path: Path) -> None:
    here = _module(path)
    if here == "__init__":
        return
    for name in _imported(ast.parse(path.read_text())):
        parts = name.split(".")
        if parts[0] != "interlace" or parts[1] == "__version__":
            continue
        assert ORDER.index(parts[1]) <= ORDER.index(here), f"{here} imports {name}"


@pytest.mark.parametrize("path", _files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_private_torch_names_only_in_compat(path: Path) -> None:
    if path.name == "_compat.py":
        return
    tree = ast.parse(path.read_text())
    used = [_dotted(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute)] + _imported(tree)
    private = [
        name
        for name in used
        if name.startswith("torch.")
        and not name.startswith(PUBLIC)
        and any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    ]
    assert not private, f"{path.name} uses {private}; wrap them in _compat.py"


def test_no_file_is_a_drawer() -> None:
    names = {p.name for p in _files()}
    assert not names & {"utils.py", "common.py", "helpers.py", "misc.py"}


def test_files_stay_small() -> None:
    root = PACKAGE.parent
    files = [*_files(), *sorted((root / "tests").glob("*.py"))]
    long = {str(p): n for p in files if (n := len(p.read_text().splitlines())) > 500}
    assert not long, f"split at 500 lines: {long}"
