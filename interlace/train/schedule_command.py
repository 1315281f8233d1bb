"""``interlace schedule``: what may hide each exchange of a preset, what does, and what ends it.

Nothing runs: the step is traced on the meta device and timed by a model of FLOPs and bytes.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from torch import fx

from interlace.graph import comm_of, tag_of
from interlace.graph.dag import build_dag
from interlace.schedule import (
    CostModel,
    Machine,
    Timeline,
    order_hash,
    schedule_graph,
    simulate,
)
from interlace.schedule.cost import independent_us
from interlace.schedule.timeline_svg import timeline_svg
from interlace.train.arms import ARMS
from interlace.train.config import Config
from interlace.train.console import Console
from interlace.train.trace_command import trace_on_meta

_MAX_ROWS = 32


def schedule_command(config: Config, out_dir: Path, machine: Machine | None = None) -> None:
    """Writes ``timeline.svg`` and ``schedule.json`` to a folder and prints a line an exchange."""
    console, machine = Console(), machine or Machine()
    if out_dir.exists() and not out_dir.is_dir():
        raise ValueError(f"--out {out_dir} is a file; name a folder.")
    with console.working(f"tracing {config.preset}"):
        gm = unscheduled_graph(config)
    scheduler = config.overlap.scheduler
    if scheduler == "off":
        scheduler = "policy"
        console.line("overlap.scheduler is off; shown is what policy would do")
    report, before, after = compare_orders(gm, scheduler, machine)
    report = {"preset": config.preset, "chunks": config.overlap.chunks} | report
    out_dir.mkdir(parents=True, exist_ok=True)
    title = (
        f"{config.preset}, overlap.chunks={config.overlap.chunks} of {config.overlap.chunk_root}, "
        f"{scheduler}, {machine.name}"
    )
    (out_dir / "timeline.svg").write_text(timeline_svg(before, after, title), encoding="utf-8")
    (out_dir / "schedule.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for line in describe_schedule(report):
        console.line(line)
    console.line(f"wrote {out_dir / 'timeline.svg'} and {out_dir / 'schedule.json'}")


def unscheduled_graph(config: Config) -> fx.GraphModule:
    """The step that the settings ask for, chunked if they say so, in program order."""
    arm = ARMS["chunk-graph" if config.overlap.chunks > 1 else "control"]
    return trace_on_meta(config, arm).gm


def compare_orders(
    gm: fx.GraphModule, scheduler: str, machine: Machine
) -> tuple[dict[str, Any], Timeline, Timeline]:
    """Schedules a graph in place; the report and the timelines of both orders."""
    before = simulate(gm.graph.nodes, machine)
    began = time.perf_counter()
    edges = schedule_graph(gm, scheduler=scheduler, machine=machine)
    seconds = time.perf_counter() - began
    after = simulate(gm.graph.nodes, machine)
    dag = build_dag(gm)
    may = independent_us(dag, CostModel(dag.nodes, machine))
    old = {e.launch: e for e in before.exchanges}
    rows = []
    for e in sorted(after.exchanges, key=lambda e: e.start_us):
        tag, spec, was = tag_of(e.launch), comm_of(e.launch), old[e.launch]
        assert spec is not None
        rows.append(
            {
                "exchange": spec.name,
                "node": e.launch.name,
                "layer": tag.layer,
                "phase": tag.phase,
                "chunk": tag.chunk,
                "flight_us": e.end_us - e.start_us,
                "may_run_beside_us": may[e.launch],
                "beside_us": [was.beside_us, e.beside_us],
                "exposed_us": [was.exposed_us, e.exposed_us],
                "window_ends_with": [was.ended_by, e.ended_by],
            }
        )
    report = {
        "scheduler": scheduler,
        "machine": vars(machine),
        "nodes": len(dag.nodes),
        "edges": len(edges),
        "seconds": round(seconds, 3),
        "order": order_hash(gm),
        "routing_taken_as_balanced": after.estimated,
        "total_us": [before.total_us, after.total_us],
        "flight_us": after.flight_us,
        "exposed_us": [before.exposed_us, after.exposed_us],
        "exchanges": rows,
    }
    return report, before, after


def describe_schedule(report: dict[str, Any]) -> list[str]:
    """The report for a person: first number program order, second scheduled."""
    rows = report["exchanges"]
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    shown = rows
    if len(rows) > _MAX_ROWS:
        middle = layers[len(layers) // 2]
        shown = [row for row in rows if row["layer"] == middle]
    lines = [
        f"{'exchange':<36}{'flight':>9}{'may hide it':>13}{'runs beside':>19}{'exposed':>19}"
        "  the window ends with"
    ]
    for row in shown:
        chunk = "" if row["chunk"] is None else f"/{row['chunk']}"
        name = f"{row['layer']}{chunk} {row['phase']} {row['exchange']}"
        lines.append(
            f"{name:<36}{row['flight_us']:>9,.0f}{row['may_run_beside_us']:>13,.0f}"
            f"{_pair(row['beside_us']):>19}{_pair(row['exposed_us']):>19}"
            f"  {row['window_ends_with'][1]}"
        )
    if len(shown) < len(rows):
        lines.append(f"... one layer of {len(layers)}; schedule.json has all {len(rows)} exchanges")
    flight = report["flight_us"] or 1.0
    shares = " -> ".join(f"{us / flight:.1%}" for us in report["exposed_us"])
    total = " -> ".join(f"{us / 1e3:,.2f}" for us in report["total_us"])
    lines.append(
        f"exposed {_pair(report['exposed_us'])} of {flight:,.0f} us in flight ({shares}); step "
        f"{total} ms on {report['machine']['name']}, simulated, all times in us"
    )
    if report["routing_taken_as_balanced"]:
        lines.append("sizes that the routing decides were taken as balanced")
    lines.append(
        f"{report['nodes']:,} nodes, {report['edges']:,} edges, {report['scheduler']}: scheduled "
        f"in {report['seconds']:.2f} s, order {report['order'][:12]}"
    )
    return lines


def _pair(values: list[float]) -> str:
    return " -> ".join(f"{us:,.0f}" for us in values)
