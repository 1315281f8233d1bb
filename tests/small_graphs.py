"""Graphs of ten lines for tests of order: every node is real, so that the graphs can also run."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from interlace import ep  # noqa: F401 - registers the exchange operators
from interlace.graph import Tag, set_tag

aten, _ep = torch.ops.aten, torch.ops.ep
MOE = "layers.0.moe"


def calls_of(work: Callable[[], Any]) -> int:
    """How many functions, Python's and C's, ``work`` calls: its cost, whatever else is running."""
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


class Builder:
    """Nodes by name over one input; a value is (4, 4) float32 throughout."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.x = self.tagged(self.graph.placeholder("x"), Tag("", "", 0, None, "io", "arg"))
        self.nodes["x"] = self.x

    def tagged(self, node: fx.Node, tag: Tag) -> fx.Node:
        node.meta["val"] = torch.empty(4, 4, device="meta")
        set_tag(node, tag)
        return node

    def call(
        self, name: str, target, args: tuple, *, chunk=None, phase="forward", layer=MOE, source=None
    ) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=name)
        source = source or ("0F" if phase == "forward" else "0B")
        self.nodes[name] = self.tagged(node, Tag(source, layer, 0, chunk, phase))
        return node

    def compute(self, name: str, *reads: str, target=None, **where) -> fx.Node:
        """A value from one or more others."""
        values = [self.nodes[r] for r in reads]
        if target is not None:
            return self.call(name, target, tuple(values), **where)
        if len(values) == 1:
            return self.call(name, aten.mul.Tensor, (values[0], 1.5), **where)
        return self.call(name, aten.cat.default, (values,), **where)

    def wgrad(self, name: str, *reads: str, **where) -> fx.Node:
        """An expert weight gradient."""
        x, grad, ends = (self.nodes[r] for r in (*reads, *reads)[:3])
        return self.call(name, torch.ops.interlace.grouped_wgrad.default, (x, grad, ends), **where)

    def launch(self, name: str, read: str, *, combine: bool = False, **where) -> fx.Node:
        """A launch ``name`` and its parts."""
        meta, x = [self.x] * 6, self.nodes[read]
        target, args = (
            _ep.dispatch_launch.default,
            (x, None, meta, None, 4, 0, "single", "alltoall"),
        )
        if combine:
            target, args = _ep.combine_launch.default, (x, meta, None, 4, 0, "single", "alltoall")
        node = self.call(name, target, args, **where)
        for i in range(2):
            self.call(f"{name}_{i}", operator.getitem, (node, i), **where)
        return node

    def wait(self, name: str, launch: str, **where) -> fx.Node:
        parts = (self.nodes[f"{launch}_0"], self.nodes[f"{launch}_1"])
        return self.call(name, _ep.wait.default, parts, **where)

    def done(self, *outputs: str) -> fx.GraphModule:
        node = self.graph.output([self.nodes[o] for o in outputs])
        set_tag(node, Tag("", "", 0, None, "io", "output"))
        self.graph.lint()
        return fx.GraphModule(torch.nn.Module(), self.graph)


def names(gm: fx.GraphModule, only: Iterable[str] | None = None) -> list[str]:
    """The order of a graph without inputs, output and parts of tuples."""
    order = [
        n.name for n in gm.graph.nodes
        if n.op == "call_function" and n.target is not operator.getitem
    ]  # fmt: skip
    return [n for n in order if n in set(only)] if only is not None else order


def two_chunks_forward(b: Builder, *, shared: bool = True) -> None:
    """Router, dispatch, experts, combine, shared experts of chunks 0 and 1, in program order."""
    for c in (0, 1):
        b.compute(f"r{c}", "x", chunk=c)
        b.launch(f"D{c}", f"r{c}", chunk=c)
        b.wait(f"wD{c}", f"D{c}", chunk=c)
        b.compute(f"e{c}", f"wD{c}", chunk=c)
        b.launch(f"C{c}", f"e{c}", combine=True, chunk=c)
        b.wait(f"wC{c}", f"C{c}", chunk=c)
        if shared:
            b.compute(f"s{c}", "x", chunk=c)
        b.compute(f"f{c}", f"wC{c}", *([f"s{c}"] if shared else []), chunk=c)
    b.compute("merge", "f0", "f1")


def two_chunks_backward(b: Builder, start: str = "x") -> None:
    """Dispatch, two input and two weight gradients, combine, for chunks 1 and 0, as autograd has
    them: each weight gradient right behind the input gradient of the same product."""
    at = {"phase": "backward"}
    for c in (1, 0):
        b.compute(f"g{c}", start, chunk=c, **at)
        b.launch(f"D{c}", f"g{c}", chunk=c, **at)
        b.wait(f"wD{c}", f"D{c}", chunk=c, **at)
        b.compute(f"d2_{c}", f"wD{c}", chunk=c, **at)
        b.wgrad(f"w2_{c}", "x", f"wD{c}", chunk=c, **at)
        b.compute(f"d1_{c}", f"d2_{c}", chunk=c, **at)
        b.wgrad(f"w1_{c}", "x", f"d2_{c}", chunk=c, **at)
        b.launch(f"C{c}", f"d1_{c}", combine=True, chunk=c, **at)
        b.wait(f"wC{c}", f"C{c}", chunk=c, **at)
        b.compute(f"f{c}", f"wC{c}", chunk=c, **at)
    b.compute("gx", "f1", "f0", **at)
