"""What a graph would take on a machine: a model of FLOPs and bytes, and two lanes.

A ceiling model: an operator takes the longer of its arithmetic and its memory traffic, plus a fixed
launch; a transfer takes its remote bytes.  Good for comparing orders of one graph and for seeing
what hides what; measured time is the business of ``measure/``.

Sizes that depend on the routing count as balanced routing.  Scores of attention (S, S) count as
staying on the chip in half precision, as in flash attention, whatever the traced graph does.  The
rows of a padded exchange count in full, though kernels skip those past the last expert.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from interlace import _compat
from interlace.ep import get_group
from interlace.ep.backend import get_backend
from interlace.graph import comm_of, is_collective, is_wait, tag_of
from interlace.graph.dag import Dag
from interlace.kernels import grouped_mm  # noqa: F401 - registers the operators

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
                ids, result = node.args[0].meta["val"], node.meta["val"]
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
        scores = any(_is_scores(x) for t in tensors for x in _tensors(t))
        if scores and not flops:
            return 0.0
        half = scores or any(x.element_size() <= 2 for x in _tensors(node.meta.get("val")))
        rate = m.half_flops_per_s if half else m.single_flops_per_s
        return m.launch_us + 1e6 * max(flops / rate, moved / m.bytes_per_s)

    def _flight_us(self, launch: fx.Node) -> float:
        group, backend = (a for a in launch.args if isinstance(a, str))
        size, moved = get_group(group).size, self.bytes_of(_pending(launch))
        if launch.target is _ep.dispatch_launch.default and get_backend(backend).expert_side:
            # Expanded on arrival: what crosses is each token, once a rank at most.
            moved = min(moved, size * self.bytes_of(launch.args[0].meta["val"]))
        remote = moved * (size - 1) / size
        return self.machine.launch_us + 1e6 * remote / self.machine.exchange_bytes_per_s

    def bytes_of(self, value: Any) -> int:
        """Bytes of a result, attention scores left out."""
        return sum(
            self._rows(x.shape) * x.element_size() for x in _tensors(value) if not _is_scores(x)
        )

    def _flops(self, node: fx.Node) -> float:
        """Two per multiply-add of matrix products and attention; 0 for all else."""
        operands = [n.meta.get("val") for n in node.args if isinstance(n, fx.Node)]
        shapes = [x.shape for x in _tensors(operands)]
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
    """One exchange, in flight from start to end.

    ``exposed_us``: the compute lane stood still for it.  ``beside_us``: compute during the flight.
    ``ended_by``: the operator that needed the result, so that the wait could not come later.
    """

    launch: fx.Node
    start_us: float
    end_us: float
    exposed_us: float
    beside_us: float
    ended_by: str


@dataclass(frozen=True)
class Timeline:
    """One order on one machine; ``estimated``: routing-dependent sizes were taken as balanced."""

    spans: list[Span]
    exchanges: list[ExchangeTime]
    total_us: float
    estimated: bool

    @property
    def exposed_us(self) -> float:
        return sum(e.exposed_us for e in self.exchanges)

    @property
    def flight_us(self) -> float:
        return sum(e.end_us - e.start_us for e in self.exchanges)


class Lanes:
    """One compute lane and one lane for each stream of exchanges, as far as they have run."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self.now_us = 0.0
        self.compute: list[Span] = []
        self.flights: dict[fx.Node, Span] = {}
        self._free_us: dict[str, float] = {}

    def has_landed(self, wait: fx.Node) -> bool:
        return self.flights[launch_of(wait)].end_us <= self.now_us

    def run(self, node: fx.Node) -> float:
        """Runs the next node; returns how long the compute lane stood still for it."""
        exposed = 0.0
        if is_wait(node):
            exposed = max(0.0, self.flights[launch_of(node)].end_us - self.now_us)
            self.now_us += exposed
        if us := self._cost.us[node]:
            self.compute.append(Span(node, "compute", self.now_us, self.now_us + us))
            self.now_us += us
        if spec := comm_of(node):
            start = max(self.now_us, self._free_us.get(spec.lane, 0.0))
            end = self._free_us[spec.lane] = start + self._cost.flight_us[node]
            self.flights[node] = Span(node, spec.lane, start, end)
        return exposed


def total_us(order: Iterable[fx.Node], cost: CostModel) -> float:
    """How long an order takes."""
    lanes = Lanes(cost)
    for node in order:
        lanes.run(node)
    return lanes.now_us


def simulate(order: Iterable[fx.Node], machine: Machine) -> Timeline:
    """Runs an order and tells what was exposed, and why it could not be hidden longer."""
    order = list(order)
    cost = CostModel(order, machine)
    lanes, exchanges = Lanes(cost), []
    for i, node in enumerate(order):
        exposed = lanes.run(node)
        if is_wait(node):
            flight = lanes.flights[launch_of(node)]
            beside, by = _overlap_us(lanes.compute, flight), _first_reader(node, order[i + 1 :])
            exchanges.append(
                ExchangeTime(flight.node, flight.start_us, flight.end_us, exposed, beside, by)
            )
    spans = [*lanes.compute, *lanes.flights.values()]
    return Timeline(spans, exchanges, lanes.now_us, cost.estimated)


def launch_of(wait: fx.Node) -> fx.Node:
    """The launch that a wait completes."""
    return wait.all_input_nodes[0].all_input_nodes[0]


def _overlap_us(spans: list[Span], flight: Span) -> float:
    """Compute during a flight that was launched lately; earlier spans lie before it."""
    beside = 0.0
    for span in reversed(spans):
        if span.end_us <= flight.start_us:
            break
        beside += max(0.0, min(span.end_us, flight.end_us) - max(span.start_us, flight.start_us))
    return beside


def _first_reader(wait: fx.Node, following: Sequence[fx.Node]) -> str:
    """The first operator after a wait that reads its result, views looked through."""
    results = {wait}
    for node in following:
        if not results.isdisjoint(node.all_input_nodes):
            if not is_free(node):
                return f"{node.name} ({tag_of(node).layer or 'step'})"
            results.add(node)
    return "the end"


def independent_us(dag: Dag, cost: CostModel) -> dict[fx.Node, float]:
    """Of each launch: all compute that neither leads to it nor needs its result."""
    launches = [node for node in dag.nodes if comm_of(node)]
    bit = {node: 1 << i for i, node in enumerate(launches)}
    tied = dict.fromkeys(dag.nodes, 0)  # launches that a node leads to or needs the results of
    leads = dict.fromkeys(dag.nodes, 0)
    for node in dag.nodes:
        tied[node] |= bit[launch_of(node)] if is_wait(node) else 0
        for edge in dag.out[node]:
            tied[edge.dst] |= tied[node]
    for node in reversed(dag.nodes):
        for edge in dag.out[node]:
            leads[node] |= leads[edge.dst] | bit.get(edge.dst, 0)
    by_mask: dict[int, float] = {}
    for node in dag.nodes:
        mask = tied[node] | leads[node] | bit.get(node, 0)
        by_mask[mask] = by_mask.get(mask, 0.0) + cost.us[node]
    return {
        node: sum(us for mask, us in by_mask.items() if not mask & bit[node]) for node in launches
    }
