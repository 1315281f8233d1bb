"""Random numbers of a traced step: drawn in the order and as often as plain PyTorch draws them.

A graph draws from the default generators anew in every run.  What it cannot tell by itself is which
draw of a recomputed layer repeats one of the forward, because checkpointing restores the random
state in Python, where no operator is recorded.  So while a step is traced, the generators hold a
number in place of a state: the n-th draw finds BASE + n and leaves BASE + n + 1.  A draw that finds
a number again repeats that draw, and reads the forward's result (:func:`reuse_draws`): what was
drawn is saved, everything else is recomputed.

Example: rand (0), checkpoint(dropout (1)), rand (2), backward: dropout finds 1 again.
Refused: states set by hand, generators of one's own, Python's and NumPy's random numbers, draws
         that differ when a layer is recomputed, and draws that the chunks of a region would share.
"""

from __future__ import annotations

import contextlib
import operator
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import traceback

from interlace import _compat
from interlace.graph.dag import build_dag
from interlace.graph.passes import remove_dead_nodes
from interlace.graph.tag import set_tag, tag_of
from interlace.trace.functional import has_one_reader
from interlace.trace.regions import Regions

BASE = 1 << 62  # as a seed: no one else's

_Id = tuple[torch.device, int]
aten = torch.ops.aten


class Draws:
    """The draws of one trace: what each was, by generator, in order."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._done: defaultdict[torch.device, list[Any]] = defaultdict(list)
        self._marked = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Marks every node that draws; the generators are as before afterwards.

        Raises: ValueError for what no graph can repeat.
        """
        generators, others = _generators(), _foreign_states()
        states = {device: g.get_state() for device, g in generators.items()}
        try:
            for g in generators.values():
                g.manual_seed(BASE)
            with _compat.watched_calls(self._watch):
                yield
            for device, g in generators.items():
                if g.initial_seed() - BASE != len(self._done[device]):
                    raise ValueError(_set_by_hand("the step leaves"))
        finally:
            for device, g in generators.items():
                g.set_state(states[device])
        now = _foreign_states()
        for name in [n for n, state in others.items() if now[n] != state]:
            raise ValueError(
                f"trace_step: the step draws random numbers with {name}, which would be the same "
                "in every run of the graph; draw them with torch. (If it does not, another thread "
                "of this process did meanwhile: give that one a generator of its own.)"
            )

    def _watch(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Before each operator of the step."""
        draws = _compat.call_draws(op, args, kwargs)
        if not draws and not self._marked:
            return
        meta = traceback.get_current_meta()
        meta["custom"] = {k: v for k, v in meta.get("custom", {}).items() if k != "draw"}
        if draws:
            meta["custom"]["draw"] = self._draw(op, args, kwargs)
        self._marked = draws

    def _draw(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Id | None:
        """Which draw this is: generator and number."""
        where = f"{self._regions.stack[-1].layer or 'the step'} ({op})"
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise ValueError(
                f"trace_step: {where} draws from a generator of its own, which a graph cannot "
                "hold; draw from the default one, which torch.manual_seed seeds."
            )
        device = _device_of(args, kwargs)
        generator, done = _generators().get(device), self._done[device]
        if generator is None:
            return None
        number, what = generator.initial_seed() - BASE, (op, _layout(args, kwargs))
        in_backward = self._regions.running is not None
        if number == len(done):
            if in_backward and torch.is_grad_enabled():  # only a recomputed forward needs gradients
                raise ValueError(
                    f"trace_step: {where} draws other random numbers when it is recomputed than in "
                    "the forward, which makes gradients wrong; leave preserve_rng_state=True in "
                    "torch.utils.checkpoint.checkpoint, or draw outside of the checkpointed part."
                )
            done.append(what)
        elif not (in_backward and 0 <= number < len(done) and done[number] == what):
            raise ValueError(_set_by_hand(f"{where} finds"))
        generator.manual_seed(BASE + number + 1)
        return device, number


def _set_by_hand(who: str) -> str:
    return (
        f"trace_step: {who} a random state that was set inside of the step (manual_seed, fork_rng "
        "or the like), which a graph cannot repeat; seed outside of the step, and make numbers "
        "that stay the same a buffer of the model."
    )


def _generators() -> dict[torch.device, torch.Generator]:
    """The default generators, those that no tensor can use yet left out."""
    found = {torch.device("cpu"): torch.default_generator}
    if torch.cuda.is_initialized():
        found |= {torch.device("cuda", i): g for i, g in enumerate(torch.cuda.default_generators)}
    return found


def _foreign_states() -> dict[str, str]:
    """The states of generators that torch does not know."""
    states = {"Python's random": repr(random.getstate())}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy.random"] = repr((kind, keys.tolist(), rest))
    return states


def _device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    leaves, _ = _compat.tree_flatten((args, dict(kwargs)))
    tensors = [x.device for x in leaves if isinstance(x, Tensor)]
    device = torch.device(kwargs.get("device") or (tensors[0] if tensors else "cpu"))
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _layout(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What tells whether two draws from one state give the same numbers: sizes and settings.
    Sizes that only the run will tell are left out."""
    leaves, _ = _compat.tree_flatten((args, dict(kwargs)))
    sizes = [x.dtype if isinstance(x, Tensor) else x for x in leaves]
    sizes += [d for x in leaves if isinstance(x, Tensor) for d in x.shape]
    return [None if isinstance(x, torch.SymInt) else x for x in sizes]


def repeated_draws(gm: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Each marked node that repeats a draw, and its first.  Ask before tags are settled."""
    first: dict[_Id, fx.Node] = {}
    repeats = {}
    for node in gm.graph.nodes:
        mark = (node.meta.get("custom") or {}).get("draw")
        if mark is not None and _compat.op_is_random(node.target):
            if mark in first:
                repeats[node] = first[mark]
            else:
                first[mark] = node
    return repeats


def reuse_draws(gm: fx.GraphModule, repeats: Mapping[fx.Node, fx.Node]) -> None:
    """Each repeated draw reads what its first has drawn; what fed it alone goes."""
    copies: list[fx.Node] = []
    for node, first in repeats.items():
        written = [i for i, (_, _, writes) in enumerate(_compat.op_memory(node.target)) if writes]
        if written not in ([], [0]):
            raise ValueError(
                f"{node.name} ({node.target}) writes random numbers beside its result in a part "
                "that is recomputed; draw them outside of it."
            )
        if written and not has_one_reader(node.args[0]):  # they have to find it written
            copies.append(_copied(first))
            node.target, node.kwargs = aten.copy_.default, {}
            node.args = (node.args[0], copies[-1])
            continue
        is_one = isinstance(node.meta["val"], Tensor)
        for value in [node] if is_one else list(node.users):
            copies.append(_copied(first if is_one else _item(first, value)))
            value.replace_all_uses_with(copies[-1])
            gm.graph.erase_node(value)
        if not is_one:
            gm.graph.erase_node(node)
    _drop_needless(gm, copies)
    remove_dead_nodes(gm)


def _item(first: fx.Node, like: fx.Node) -> fx.Node:
    """The item of a draw with several results that ``like`` takes of its repetition."""
    for user in first.users:
        if user.target is operator.getitem and user.args[1] == like.args[1]:
            return user
    with first.graph.inserting_after(first):
        return first.graph.node_copy(like, lambda _: first)


def _copied(node: fx.Node) -> fx.Node:
    """A copy of what was drawn, made before anybody writes over it."""
    with node.graph.inserting_after(node):
        copy = node.graph.call_function(aten.clone.default, (node,))
    copy.meta["val"] = node.meta["val"]
    set_tag(copy, tag_of(node))
    return copy


def _drop_needless(gm: fx.GraphModule, copies: Sequence[fx.Node]) -> None:
    """A copy is needed where the original or the copy is written later: whoever read it just after
    it was made would have to come before that write."""
    probes = [_copied(copy) for copy in copies]
    leaving = build_dag(gm).out
    is_written = {n: any(e.why == "mutation" for e in leaving[n]) for n in (*copies, *probes)}
    for copy, probe in zip(copies, probes, strict=True):
        gm.graph.erase_node(probe)
        if not is_written[copy] and not is_written[probe]:
            copy.replace_all_uses_with(copy.args[0])
            gm.graph.erase_node(copy)


def check_chunk_draws(gm: fx.GraphModule, boundary: Callable[[str], bool]) -> None:
    """Every chunk of a region draws for itself, as eager chunking does.

    Raises: ValueError for a draw in a chunked module that the chunks share: its shape does not
            depend on the chunk, so it was taken for the same in all.
    """
    roots = {
        _root(tag_of(n).layer, boundary) for n in gm.graph.nodes if tag_of(n).chunk is not None
    }
    for node in gm.graph.nodes:
        tag = tag_of(node)
        draws = node.op == "call_function" and _compat.call_draws(
            node.target, node.args, node.kwargs
        )
        if draws and tag.chunk is None and _root(tag.layer, boundary) in roots - {None}:
            raise ValueError(
                f"chunking: {node.name} ({node.target}) in {tag.layer} draws random numbers whose "
                "shape is the same for a chunk and for the whole, and each chunk would draw its "
                "own; draw one number a token, or draw outside of the chunked module."
            )


def _root(layer: str, boundary: Callable[[str], bool]) -> str | None:
    """The chunked module that a module lies in."""
    parts = layer.split(".")
    paths = (".".join(parts[: i + 1]) for i in range(len(parts)))
    return next((path for path in paths if boundary(path)), None)
