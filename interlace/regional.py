"""Regional Inductor: runs of element-wise and reduction operators of one module call, compiled.

A region is a run of connected operators of one layer, call, chunk and phase (a norm, an activation
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
    runs = [run for run in find_runs(gm) if sum(map(_computes, run)) >= MIN_OPERATORS]
    keys: dict[fx.Node, Key] = {n: (i, 0) for i, n in enumerate(gm.graph.nodes)}
    distinct = {_replace(gm, run, keys) for run in runs}
    sort_by_key(gm.graph, keys)
    return RegionalReport(len(runs), len(distinct), sum(len(run) for run in runs))


def find_runs(gm: fx.GraphModule) -> list[list[fx.Node]]:
    """Maximal runs in program order; pure.

    A node joins a run that it reads from or shares an operand with: unrelated operators in one
    region would wait for each other's operands.  A node that is not fused ends a run only for what
    depends on it: the rest of the run may move before it, which keeps every run convex.
    """
    runs: list[list[fx.Node]] = []
    run: list[fx.Node] = []
    members: set[fx.Node] = set()
    near: set[fx.Node] = set()  # the run and its operands
    after: set[fx.Node] = set()  # outside of the run and dependent on it
    key: Any = None
    for node in gm.graph.nodes:
        fused = _computes(node)
        same = (fused or _is_middle_view(node, members)) and _key(node) == key
        operands = node.all_input_nodes
        if same and not any(x in after for x in operands) and any(x in near for x in operands):
            run.append(node)
            members.add(node)
            near.update(operands, (node,))
            continue
        if fused:
            run, key = [node], _key(node)
            runs.append(run)
            members, near, after = {node}, {node, *operands}, set()
            continue
        if any(x in members or x in after for x in operands):
            after.add(node)
    return runs


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


def _is_middle_view(node: fx.Node, members: set[fx.Node]) -> bool:
    """Views and tuple items of a region's own values; a view of an outside value stays outside."""
    is_view = node.target is operator.getitem or _compat.op_is_view(node.target)
    return (
        node.op == "call_function"
        and is_view
        and all(x in members for x in node.all_input_nodes)
        and _is_fixed(node.meta.get("val"))
    )


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
