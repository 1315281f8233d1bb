"""What a graph would take on a machine: a model of FLOPs and bytes, and two lanes.

A ceiling model: an operator takes the longer of its arithmetic and its memory traffic, plus a fixed
launch; a transfer takes its remote bytes.  Good for comparing orders of one graph and for seeing
what hides what; measured time is the business of ``measure/``.

Sizes that depend on the routing count as balanced routing.  Scores of attention (S, S) count as
staying on the chip, as in flash attention, whatever the traced graph does with them.  The rows of
a padded exchange count in full, though kernels skip those past the last expert.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from interlace import _compat
from interlace.ep import get_group
from interlace.graph import comm_of, is_collective, is_wait, tag_of

aten, _ep, _ours = torch.ops.aten, torch.ops.ep, torch.ops.interlace
_MIN_SCORES = 512  # a square of at least this side is attention scores


@dataclass(frozen=True)
class Machine:
    """Rates of one device; the defaults are one H200 as measured on 2026-11-29."""

    name: str = "H200"
    half_flops_per_s: float = 700e12
    single_flops_per_s: float = 50e12
    bytes_per_s: float = 4.0e12
    exchange_bytes_per_s: float = 300e9
    """Remote bytes per direction: NVLink through eight CTAs; one 400 Gb/s card is 45e9."""
    launch_us: float = 2.0
    collective_us: float = 25.0


NETWORK_CARD = Machine(name="H200, 400 Gb/s card", exchange_bytes_per_s=45e9)


class CostModel:
    """Microseconds of every node of a graph; ``estimated`` tells whether routing was guessed."""

    def __init__(self, nodes: Iterable[fx.Node], machine: Machine) -> None:
        self.machine = machine
        self.estimated = False
        self._sizes: dict[str, int] = {}  # symbol -> rows under balanced routing
        nodes = list(nodes)
        for node in nodes:
            if node.target is _ep.plan.default:
                ids, result = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
                for size in (d for x in _tensors(result) for d in x.shape):
                    if isinstance(size, torch.SymInt):
                        self._sizes[str(size)] = ids.numel()
        self.us = {node: self._compute_us(node) for node in nodes}
        self.flight_us = {node: self._flight_us(node) for node in nodes if comm_of(node)}

    def _compute_us(self, node: fx.Node) -> float:
        """Time on the compute lane; of a launch, that of packing its rows."""
        m = self.machine
        if node.op != "call_function" or is_free(node):
            return 0.0
        if comm_of(node):
            return m.launch_us + 2e6 * self.bytes_of(_pending(node)) / m.bytes_per_s
        if is_collective(node):
            return m.collective_us
        tensors = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
        moved = sum(self.bytes_of(t) for t in tensors)
        flops = self._flops(node)
        half = any(x.element_size() <= 2 for x in _tensors(node.meta.get("val")))
        rate = m.half_flops_per_s if half else m.single_flops_per_s
        if not flops and any(_is_scores(x) for t in tensors for x in _tensors(t)):
            return 0.0
        return m.launch_us + 1e6 * max(flops / rate, moved / m.bytes_per_s)

    def _flight_us(self, launch: fx.Node) -> float:
        size = get_group(next(a for a in launch.args if isinstance(a, str))).size
        remote = self.bytes_of(_pending(launch)) * (size - 1) / size
        return self.machine.launch_us + 1e6 * remote / self.machine.exchange_bytes_per_s

    def bytes_of(self, value: Any) -> int:
        """Bytes of a result, attention scores left out."""
        return sum(
            self._rows(x.shape) * x.element_size() for x in _tensors(value) if not _is_scores(x)
        )

    def _flops(self, node: fx.Node) -> float:
        """Two per multiply-add of matrix products and attention; 0 for all else."""
        shapes = [x.shape for n in node.args if isinstance(n, fx.Node) for x in _tensors(n.meta.get("val"))]  # fmt: skip
        target = node.target
        if target in (aten.addmm.default, aten.baddbmm.default):
            shapes = shapes[1:]
        if target in (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default):
            causal = 0.5 if any(_is_square(s) for s in (*shapes, node.meta["val"].shape)) else 1.0
            return 2.0 * causal * self._rows(shapes[0]) * self._rows(shapes[1][-1:])
        if target in (_ours.grouped_mm.default, _ours.grouped_wgrad.default):
            return 2.0 * self._rows(shapes[0]) * self._rows(shapes[1][-1:])
        if "attention" in str(target) or "attn" in str(target):
            backward = "backward" in str(target)
            q, k = shapes[backward], shapes[1 + backward]
            longest = next((a for a in node.args if type(a) is int), 0)
            keys = self._rows(k[-2:-1]) if len(k) == 4 else longest
            return (5.0 if backward else 2.0) * self._rows(q) * keys  # causal: half of the scores
        return 0.0

    def _rows(self, shape: Any) -> int:
        """Elements of a shape, sizes of the routing as balanced."""
        for size in shape:
            self.estimated |= isinstance(size, torch.SymInt)
        return math.prod(
            self._sizes.get(str(s), 0) if isinstance(s, torch.SymInt) else s for s in shape
        )


def is_free(node: fx.Node) -> bool:
    """Whether a node costs no time: views, sizes, parts of tuples, and waits by themselves."""
    return (
        node.target in (operator.getitem, aten._unsafe_view.default)
        or _compat.op_is_view(node.target)
        or is_wait(node)
        or not _tensors(node.meta.get("val"))
    )


def _pending(launch: fx.Node) -> Any:
    value = launch.meta.get("val")
    return value[0] if isinstance(value, (list, tuple)) else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [x for v in value for x in _tensors(v)] if isinstance(value, (list, tuple)) else []


def _is_scores(x: Tensor) -> bool:
    return x.dim() >= 3 and _is_square(x.shape)


def _is_square(shape: Any) -> bool:
    if len(shape) < 3 or any(isinstance(d, torch.SymInt) for d in shape[-2:]):
        return False
    return shape[-1] == shape[-2] >= _MIN_SCORES


# --- two lanes


@dataclass(frozen=True)
class Span:
    """A node on a lane: ``compute``, or the lane of its :class:`CommSpec`."""

    node: fx.Node
    lane: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class ExchangeTime:
    """One exchange: in flight from start to end; ``exposed_us`` of it the compute lane stood still.

    ``beside_us`` is compute during the flight; ``ended_by`` the operator that needed the result.
    """

    launch: fx.Node
    start_us: float
    end_us: float
    exposed_us: float
    beside_us: float
    ended_by: str

    @property
    def flight_us(self) -> float:
        return self.end_us - self.start_us


@dataclass(frozen=True)
class Timeline:
    """One order on one machine.  ``peak_bytes`` are results that are live at a time."""

    spans: list[Span]
    exchanges: list[ExchangeTime]
    total_us: float
    peak_bytes: int
    estimated: bool

    @property
    def exposed_us(self) -> float:
        return sum(e.exposed_us for e in self.exchanges)

    @property
    def flight_us(self) -> float:
        return sum(e.flight_us for e in self.exchanges)

    @property
    def compute_us(self) -> float:
        return self.total_us - self.exposed_us


def simulate(order: Iterable[fx.Node], machine: Machine) -> Timeline:
    """Runs an order on a compute lane and one lane for each kind of stream."""
    order = list(order)
    cost = CostModel(order, machine)
    now, busy_us = 0.0, 0.0
    free: dict[str, float] = {}
    spans: list[Span] = []
    landed: dict[fx.Node, tuple[float, float, float]] = {}  # launch -> start, end, compute so far
    exchanges = []
    for i, node in enumerate(order):
        if is_wait(node):
            launch = launch_of(node)
            start, end, before_us = landed[launch]
            exposed = max(0.0, end - now)
            beside = min(busy_us - before_us, end - start)
            by = _ended_by(node, order[i + 1 : i + 40])
            exchanges.append(ExchangeTime(launch, start, end, exposed, beside, by))
            now = max(now, end)
        elif cost.us[node]:
            spans.append(Span(node, "compute", now, now + cost.us[node]))
            now, busy_us = now + cost.us[node], busy_us + cost.us[node]
        if spec := comm_of(node):
            start = max(now, free.get(spec.lane, 0.0))
            free[spec.lane] = end = start + cost.flight_us[node]
            spans.append(Span(node, spec.lane, start, end))
            landed[node] = (start, end, busy_us + max(0.0, start - now))
    return Timeline(spans, exchanges, now, _peak_bytes(order, cost), cost.estimated)


def launch_of(wait: fx.Node) -> fx.Node:
    """The launch that a wait completes."""
    return wait.all_input_nodes[0].all_input_nodes[0]


def _ended_by(wait: fx.Node, following: list[fx.Node]) -> str:
    """The first operator after the wait that reads its result, views looked through."""
    results = {wait}
    for node in following:
        if results & set(node.all_input_nodes):
            if not is_free(node):
                return f"{node.name} ({tag_of(node).layer or 'step'})"
            results.add(node)
    return "nothing nearby"


def _peak_bytes(order: list[fx.Node], cost: CostModel) -> int:
    """Most bytes live at a time, inputs left out; a result lives until its last reader, views of
    it included."""
    root: dict[fx.Node, fx.Node] = {}
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(order):
        sources = node.all_input_nodes
        alias = is_free(node) and sources and node.op == "call_function"
        root[node] = root[sources[0]] if alias else node
        for source in (*sources, node):
            last[root[source]] = i
    dying: dict[int, list[fx.Node]] = {}
    for node, i in last.items():
        dying.setdefault(i, []).append(node)
    live = peak = 0
    for i, node in enumerate(order):
        if node.op == "call_function" and root[node] is node:
            live += cost.bytes_of(node.meta.get("val"))
            peak = max(peak, live)
        for dead in dying.get(i, ()):
            if dead.op == "call_function":
                live -= cost.bytes_of(dead.meta.get("val"))
    return peak


def iter_launches(order: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """The launches of an order."""
    return (node for node in order if comm_of(node))
