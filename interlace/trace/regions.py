"""Which module call every operator belongs to, while a step runs.

A region is one call of one module (or a named part of the step).  Entering one publishes its tag in
the metadata that fx copies onto each node it records.  Autograd nodes draw growing sequence
numbers, so a log of (number, region), kept at each enter and leave, tells which region made any
grad_fn, even one whose output left by a side door.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import traceback

from interlace import _compat
from interlace.graph.tag import Tag

_Key = tuple[str, int | None, str]  # layer, chunk, role


class Region:
    """One call of a module: a node in the tree of calls of a step."""

    def __init__(self, key: _Key, call: int, parent: Region | None) -> None:
        self.layer, self.chunk, self.role = self.key = key
        self.call = call
        self.children: dict[_Key, list[Region]] = {}
        self.path: tuple[Region, ...] = (*parent.path, self) if parent else (self,)

    def common(self, other: Region) -> Region:
        """The innermost call that holds both."""
        return [a for a, b in zip(self.path, other.path, strict=False) if a is b][-1]

    def tag(self, phase: str, role: str | None = None) -> Tag:
        """The tag of an operator of this call."""
        side = "F" if phase == "forward" else "B"
        return Tag(f"0{side}", self.layer, self.call, self.chunk, phase, role or self.role)


class Regions:
    """The calls of one step, on one thread.  Outside a trace it publishes nothing."""

    def __init__(self) -> None:
        self.root = Region(("", None, "body"), 0, None)
        self.stack = [self.root]
        self.phase, self.role = "forward", None  # type: tuple[str, str | None]
        self.running: Region | None = None  # owner of the grad_fn that runs now
        self._calls: Counter[_Key] = Counter()
        self._numbers, self._owners = [0], [self.root]
        self._replayed: Counter[tuple[Region, _Key]] = Counter()

    @contextlib.contextmanager
    def region(
        self, layer: str | None = None, *, chunk: int | None = None, role: str | None = None
    ) -> Iterator[None]:
        """Everything inside belongs to this call; what is not given is the enclosing region's."""
        self.enter(layer, chunk=chunk, role=role)
        try:
            yield
        finally:
            self.leave()

    def enter(
        self, layer: str | None = None, *, chunk: int | None = None, role: str | None = None
    ) -> None:
        top = self.stack[-1]
        key = (
            top.layer if layer is None else layer,
            top.chunk if chunk is None else chunk,
            role or top.role,
        )
        region = self._repeated(key) if self.running else None
        if region is None:
            part_of_top = layer is None and chunk is None
            region = Region(key, top.call if part_of_top else self._calls[key], top)
            self._calls[key] += not part_of_top
            top.children.setdefault(key, []).append(region)
        self.stack.append(region)
        self._log()

    def leave(self) -> None:
        self.stack.pop()
        self._log()

    def owner(self, grad_fn: Any) -> Region:
        """The region in which a grad_fn was made."""
        at = bisect_right(self._numbers, _compat.sequence_number(grad_fn))
        return self._owners[at - 1]

    def start_grad_fn(self, owner: Region) -> tuple[Any, ...]:
        """A grad_fn of ``owner`` begins; returns what :meth:`end_grad_fn` restores."""
        saved = (self.stack, self.phase, self.role, self.running)
        self.stack, self.phase, self.role, self.running = [owner], "backward", None, owner
        self._replayed = Counter()
        self.publish()
        return saved

    def end_grad_fn(self, saved: tuple[Any, ...]) -> None:
        self.stack, self.phase, self.role, self.running = saved

    def publish(self, gap: int | None = None) -> None:
        """Tags the operators that follow; ``gap`` numbers what comes after a grad_fn instead."""
        if not traceback.has_preserved_node_meta():
            return
        recomputing = self.running is not None and len(self.stack) > 1
        phase = "recompute" if recomputing else self.phase
        meta = traceback.get_current_meta()
        ours = {"tag": self.stack[-1].tag(phase, self.role), "gap": gap}
        meta["custom"] = {**meta.get("custom", {}), **ours}

    def _log(self) -> None:
        self._numbers.append(_compat.next_sequence_number())
        self._owners.append(self.stack[-1])
        self.publish()

    def _repeated(self, key: _Key) -> Region | None:
        """The forward call that a module entered inside a grad_fn repeats (checkpointing)."""
        top = self.stack[-1]
        if len(self.stack) == 1:
            around = [r for r in top.path if r.key == key]
            if around:
                self._replayed = Counter()
                return around[-1]
            top = next((r for r in reversed(top.path) if key in r.children), top)
        n = self._replayed[top, key]
        self._replayed[top, key] += 1
        calls = top.children.get(key, [])
        return calls[n] if n < len(calls) else None

    @contextlib.contextmanager
    def of_modules(
        self, module: torch.nn.Module, boundary: Callable[[str], bool] = lambda name: False
    ) -> Iterator[None]:
        """Makes a region of each call of each submodule.

        ``boundary(name)`` True aliases the tensor inputs of that module on entry, so that the
        gradients of its own uses are summed inside it before they meet those of outside uses.
        """
        with contextlib.ExitStack() as hooks:
            for name, child in module.named_modules():
                if not name:
                    continue

                def before(
                    _: Any, args: Any, kwargs: Any, name: str = name, cut: bool = boundary(name)
                ) -> Any:
                    self.enter(name)
                    if not cut:
                        return None
                    return _compat.tree_map_tensors(torch.ops.aten.alias.default, (args, kwargs))

                pre = child.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
                post = child.register_forward_hook(lambda *_: self.leave(), always_call=True)
                hooks.callback(pre.remove)
                hooks.callback(post.remove)
            yield
