"""Two traces of one step, at T and at T / n tokens, laid side by side.

Both have static shapes and come from the same code, so they are isomorphic: node i of one is node i
of the other.  What differs tells what depends on the number of tokens; nothing symbolic is needed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from interlace import _compat
from interlace.graph import has_tag, tag_of

Twins = dict[fx.Node, fx.Node]


def align(full: fx.GraphModule, small: fx.GraphModule) -> Twins:
    """The twin in ``small`` of every node of ``full``.

    Raises: ValueError that names the first node (module and source line) from which the steps part:
            a branch or a loop that depends on the number of tokens.
    """
    a, b = list(full.graph.nodes), list(small.graph.nodes)
    for x, y in zip(a, b, strict=False):
        if _identity(x) != _identity(y):
            raise ValueError(
                "chunking: the operators of the step depend on the chunk extent; "
                f"{describe(x)} at full extent is {describe(y)} in a chunk. Make the model's "
                "control flow independent of batch and sequence sizes."
            )
    if len(a) != len(b):
        raise ValueError(
            f"chunking: the step has {len(a)} nodes at full extent and {len(b)} in a chunk; make "
            "the model's control flow independent of batch and sequence sizes."
        )
    return dict(zip(a, b, strict=True))


def _identity(node: fx.Node) -> Any:
    target = "" if node.op == "placeholder" else node.target
    return node.op, target, tag_of(node) if has_tag(node) else None


def constants(node: fx.Node) -> list[Any]:
    """What a node is given besides other nodes."""
    leaves, _ = _compat.tree_flatten((node.args, dict(node.kwargs)))
    return [x for x in leaves if not isinstance(x, fx.Node)]


def describe(node: fx.Node) -> str:
    """A node for a person: operator, module call, source line where it is known."""
    where = f" in {tag_of(node).layer or 'the step'}" if has_tag(node) else ""
    return f"{node.name} ({node.target}){where}{_source_line(node)}"


def _source_line(node: fx.Node) -> str:
    """`` at file.py:12`` of the model's own code, empty where the trace kept no lines."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    ours = [(Path(file).name, line) for file, line in frames if "/torch/" not in file]
    return f" at {ours[-1][0]}:{ours[-1][1]}" if ours else ""


def sharded_dim(full: Any, small: Any, num_chunks: int) -> int | None:
    """The dimension of a value that is n times as long at full extent; None if shapes are equal.

    Raises: ValueError (without the node's name) for two such dimensions or another ratio.
    """
    if not isinstance(full, Tensor) or not isinstance(small, Tensor):
        return None
    if full.dim() != small.dim():
        raise ValueError(f"has {full.dim()} dimensions at full extent and {small.dim()} in a chunk")
    dims = [i for i, (p, q) in enumerate(zip(full.shape, small.shape, strict=True)) if p != q]
    if not dims:
        return None
    shapes = f"{list(full.shape)} at full extent and {list(small.shape)} in a chunk"
    if len(dims) > 1:
        raise ValueError(f"depends on the chunk extent in several dimensions: {shapes}")
    if full.shape[dims[0]] != num_chunks * small.shape[dims[0]]:
        raise ValueError(f"is not {num_chunks} times as long at full extent: {shapes}")
    return dims[0]
