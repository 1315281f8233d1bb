"""Regional Inductor: element-wise and reduction operators of one module call, compiled.

A region is a set of connected operators of one layer, call, chunk and phase (a norm, an activation
with its gate, a router's softmax, their backwards).  Matrix products, exchanges, waits, writes and
random draws are never inside.  A region becomes one node, before anything is scheduled, so that all
arms of a comparison have the same regions.  Equal regions of different layers are compiled once.

torch's own ``regional_inductor`` compiles each region by itself, hundreds in a deep model; its
building block, ``standalone_compile``, does the work here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from interlace import _compat
from interlace.graph import has_effect, set_tag, tag_of
from interlace.graph.order import Key, sort_by_key

aten = torch.ops.aten
_ALSO_FUSED = frozenset(
    {
        aten._to_copy.default,
        aten._softmax.default,
        aten._softmax_backward_data.default,
        aten._log_softmax.default,
        aten._log_softmax_backward_data.default,
        aten._fused_rms_norm.default,
        aten._fused_rms_norm_backward.default,
        aten.gather.default,
        aten.cat.default,
    }
)
MIN_OPERATORS = 2  # a single operator gains nothing


@dataclass(frozen=True)
class RegionalReport:
    """How many regions a graph has, how many of them differ, and how many operators they hold."""

    regions: int
    compiled: int
    operators: int


_compiled: dict[str, Callable[..., Any]] = {}


def compile_regions(gm: fx.GraphModule) -> RegionalReport:
    """Replaces every region of ``gm`` by one node that runs its compiled form.

    Ensures: the regions follow from tags and operators alone, so equal steps have equal regions.
             Results keep their shapes, strides and dtypes; their bits are Inductor's.
    """
    runs = [r for r in find_regions(gm) if sum(map(_computes, r)) >= MIN_OPERATORS]
    keys: dict[fx.Node, Key] = {n: (i, 0) for i, n in enumerate(gm.graph.nodes)}
    distinct = {_replace(gm, run, keys) for run in runs}
    sort_by_key(gm.graph, keys)
    return RegionalReport(len(runs), len(distinct), sum(len(run) for run in runs))


def find_regions(gm: fx.GraphModule) -> list[list[fx.Node]]:
    """The regions of a graph, members in program order; pure.

    They follow from the graph alone and not from its order, so that arms that differ in order have
    the same ones.  Every node has a depth: the number of times that the longest path to it enters
    an operator from outside of its region.  A region is what is connected, by data or by a common
    operand, among fused nodes of one key and one depth.  All edges between regions go deeper, so
    regions never need each other's results.
    """
    depth: dict[fx.Node, int] = {}
    key: dict[fx.Node, Any] = {}  # of fused nodes
    parent: dict[Any, Any] = {}

    def find(x: Any) -> Any:
        while parent[x] is not x:
            parent[x] = x = parent[parent[x]]
        return x

    for node in gm.graph.nodes:
        operands = node.all_input_nodes
        mine = _key(node) if node.op == "call_function" else None
        middle = bool(operands) and all(key.get(x) == mine for x in operands)
        if _is_view(node) and not (middle and _is_fixed(node.meta.get("val"))):
            depth[node] = max((depth[x] for x in operands), default=0)
            continue
        fused = _computes(node) or (_is_view(node) and middle)
        steps = [depth[x] + (not (fused and key.get(x) == mine)) for x in operands]
        depth[node] = max(steps, default=0)
        if not fused:
            continue
        key[node] = mine
        parent[node] = node
        for x in operands:
            if key.get(x) == mine and depth[x] == depth[node]:
                parent[find(node)] = find(x)
            shared = (x, mine, depth[node])
            if shared in parent:
                parent[find(node)] = find(shared)
            else:
                parent[shared] = find(node)
    regions: dict[Any, list[fx.Node]] = {}
    for node in key:
        regions.setdefault(find(node), []).append(node)
    return list(regions.values())


def _is_view(node: fx.Node) -> bool:
    return node.target is operator.getitem or _compat.op_is_view(node.target)


def _key(node: fx.Node) -> tuple[Any, ...]:
    tag = tag_of(node)
    return tag.source, tag.layer, tag.call, tag.chunk, tag.phase


def _computes(node: fx.Node) -> bool:
    """Whether a node is an operator that Inductor fuses, on values of fixed size."""
    if node.op != "call_function" or has_effect(node) or not node.all_input_nodes:
        return False
    if tag_of(node).role in ("split", "merge", "cast", "accum"):
        return False
    if node.target not in _ALSO_FUSED and not _compat.op_is_elementwise(node.target):
        return False
    values = [node.meta.get("val"), *(x.meta.get("val") for x in node.all_input_nodes)]
    return all(_is_fixed(v) for v in values)


def _is_fixed(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_fixed(v) for v in value)
    if not isinstance(value, Tensor):
        return value is None or isinstance(value, (int, float, bool))
    return not any(isinstance(d, torch.SymInt) for d in (*value.shape, *value.stride()))


def _replace(gm: fx.GraphModule, run: list[fx.Node], keys: dict[fx.Node, Key]) -> str:
    """One region node, placed by ``keys``, and an item for each value that leaves the run."""
    members = set(run)
    inputs = list(dict.fromkeys(x for n in run for x in n.all_input_nodes if x not in members))
    results = [n for n in run if any(u not in members for u in n.users)]
    signature = _signature(run, inputs, results)
    if signature not in _compiled:
        body = _as_module(run, inputs, results)
        _compiled[signature] = _compat.compile_with_inductor(body, [x.meta["val"] for x in inputs])
    with gm.graph.inserting_before(run[0]):
        region = gm.graph.call_function(_compiled[signature], tuple(inputs))
        items = [gm.graph.call_function(operator.getitem, (region, i)) for i in range(len(results))]
    set_tag(region, tag_of(run[0]))
    region.meta["val"] = tuple(n.meta["val"] for n in results)
    keys[region] = (keys[run[0]][0], 0)
    for i, (node, item) in enumerate(zip(results, items, strict=True)):
        set_tag(item, tag_of(node))
        item.meta["val"] = node.meta["val"]
        keys[item] = (keys[run[0]][0], 1 + i)
        node.replace_all_uses_with(item)
    for node in reversed(run):
        gm.graph.erase_node(node)
    return signature


def _as_module(run: list[fx.Node], inputs: list[fx.Node], results: list[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"x{i}")
        copies[node].meta["val"] = node.meta["val"]
    for node in run:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = {"val": node.meta["val"]}
    graph.output(tuple(copies[n] for n in results))
    return fx.GraphModule(torch.nn.Module(), graph)


def _signature(run: list[fx.Node], inputs: list[fx.Node], results: list[fx.Node]) -> str:
    """Text that two regions share exactly when one compiled form serves both."""
    number = {n: i for i, n in enumerate([*inputs, *run])}
    lines = [_layout(n.meta["val"]) for n in inputs]
    for node in run:
        args, kwargs = (fx.map_arg(a, lambda n: f"%{number[n]}") for a in (node.args, node.kwargs))
        lines.append(f"{node.target} {args} {kwargs}")
    return "\n".join([*lines, str([number[n] for n in results])])


def _layout(value: Any) -> str:
    return f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()}"
