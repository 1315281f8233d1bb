"""A traced step in words: what it consists of, what it exchanges, what it moves."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from interlace.graph import comm_of, is_collective, tag_of
from interlace.trace.step import Traced

_VIEWS = frozenset(
    f"aten.{n}" for n in (
        "view", "t", "transpose", "permute", "slice", "expand", "unsqueeze", "squeeze", "detach",
        "alias", "split", "select", "_unsafe_view", "unbind", "as_strided", "split_with_sizes",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Exchange:
    """One launch: where, and the bytes of its result (None where the routing decides)."""

    name: str
    node: str
    tag: str
    bytes: int | None


def exchanges(gm: fx.GraphModule) -> list[Exchange]:
    """The launches of a graph, in order."""
    found = []
    for node in gm.graph.nodes:
        spec = comm_of(node)
        if spec is not None:
            size = _bytes(node.meta.get("val"))
            found.append(Exchange(spec.name, node.name, str(tag_of(node)), size))
    return found


def summarise(traced: Traced) -> dict[str, Any]:
    """Counts by operator, phase, role and layer; exchanges; estimated bytes.

    ``written_bytes`` adds up the results of all operators that are not views: a lower bound of what
    the step writes.  ``unknown_sizes`` counts results whose size only the run tells.
    """
    nodes = [n for n in traced.gm.graph.nodes if n.op == "call_function"]
    written, unknown = 0, 0
    for node in nodes:
        if str(node.target).rpartition(".")[0] in _VIEWS or node.target is operator.getitem:
            continue
        size = _bytes(node.meta.get("val"))
        written, unknown = written + (size or 0), unknown + (size is None)
    tags = [tag_of(n) for n in nodes]
    return {
        "nodes": len(traced.gm.graph.nodes),
        "by_operator": dict(Counter(str(n.target) for n in nodes).most_common()),
        "by_phase": dict(Counter(t.phase for t in tags)),
        "by_role": dict(Counter(t.role for t in tags)),
        "by_layer": dict(sorted(Counter(_top(t.layer) for t in tags).items(), key=_natural)),
        "collectives": sum(is_collective(n) for n in nodes),
        "exchanges": [vars(e) for e in exchanges(traced.gm)],
        "parameter_bytes": sum(
            _bytes(n.meta.get("val")) or 0
            for n in traced.gm.graph.nodes
            if n.op == "placeholder" and tag_of(n).role == "param"
        ),
        "written_bytes": written,
        "unknown_sizes": unknown,
        "passes": [vars(r) for r in traced.reports],
    }


def graph_text(gm: fx.GraphModule) -> str:
    """One line a node: name, operator, arguments, shape, tag."""
    lines = []
    for n in gm.graph.nodes:
        args = ", ".join([*map(str, n.args), *(f"{k}={v}" for k, v in n.kwargs.items())])
        target = "" if n.op in ("placeholder", "output") else f" {n.target}"
        lines.append(
            f"{n.name} = {n.op}{target}({args}) : {_shape(n.meta.get('val'))}  # {tag_of(n)}"
        )
    return "\n".join(lines) + "\n"


def _bytes(value: Any) -> int | None:
    """Bytes of a fake result; None where a dimension is a symbol."""
    if isinstance(value, (list, tuple)):
        sizes = [_bytes(v) for v in value]
        return None if None in sizes else sum(s or 0 for s in sizes)
    if not isinstance(value, Tensor):
        return 0
    if any(isinstance(d, torch.SymInt) for d in value.shape):
        return None
    return value.numel() * value.element_size()


def _shape(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(_shape, value)) + ")"
    if not isinstance(value, Tensor):
        return str(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _top(layer: str) -> str:
    parts = layer.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0] or "step"


def _natural(item: tuple[str, int]) -> tuple[str, int]:
    head, _, number = item[0].rpartition(".")
    return (head, int(number)) if number.isdigit() else (item[0], -1)
