"""The report as lines for a terminal."""

from __future__ import annotations

from typing import Any

from interlace.measure.names import KINDS, short
from interlace.measure.report import title

_NUM_WINDOWS = 5


def lines(figures: dict[str, Any]) -> list[str]:
    ranks = figures["ranks"]
    text = _table(
        ["", "span ms", "compute ms", "comm ms", "exposed ms", "idle ms", "hidden"],
        [
            [title(r, ranks), *(ms(r[k]) for k in
             ("span_us", "compute_us", "comm_us", "exposed_us", "idle_us")), share(r)]
            for r in ranks
        ],
    )  # fmt: skip
    for rank in ranks:
        text += ["", *_one(rank, title(rank, ranks))]
    text += [f"{note['level']}: {note['text']}" for note in figures["notes"]]
    for change in figures.get("against", []):
        text += ["", *_difference(change)]
    return text


def ms(us: float) -> str:
    return f"{us / 1000:.3f}"


def share(rank: dict[str, Any]) -> str:
    return f"{100 * rank['hidden_share']:.1f}%" if rank["comm_us"] else "n/a"


def _one(rank: dict[str, Any], name: str) -> list[str]:
    text = [
        f"{name}: {rank['kernels']} kernels, at most {rank['max_concurrency']} at a time; copies "
        f"{ms(rank['copy_us'])} ms, of which {ms(rank['copy_alone_us'])} ms alone"
        + ("" if rank["reliable"] else "; UNRELIABLE")
    ]
    for note in rank["notes"]:
        mark = "WARNING" if note["level"] == "warning" else "note"
        text.append(f"  {mark}: {note['text']}")
    for head, key in (("kind", "by_kind"), ("layer", "by_layer"), ("phase", "by_phase")):
        if rank[key]:
            rows = [
                [KINDS.get(name, name), ms(v["comm_us"]), ms(v["exposed_us"]), str(v["kernels"])]
                for name, v in rank[key].items()
            ]
            text += _indent(_table([head, "comm ms", "exposed ms", "kernels"], rows))
    if "waiting" in rank:
        rows = [
            [KINDS[kind], ms(v["wait_us"]), ms(v["transfer_us"]), str(v["kernels"])]
            for kind, v in rank["waiting"]["by_kind"].items()
        ]
        text += _indent(_table(["across ranks", "wait ms", "transfer ms", "kernels"], rows))
    return text + _steps(rank) + _windows(rank)


def _steps(rank: dict[str, Any]) -> list[str]:
    rows = [
        [str(s["step"]), *(ms(s[k]) if k in s else "-" for k in
         ("span_us", "compute_us", "comm_us", "exposed_us", "idle_us")),
         "" if s["complete"] else f"incomplete: {s['missing']} launches without a kernel"]
        for s in rank["steps"]
    ]  # fmt: skip
    head = ["step", "span ms", "compute ms", "comm ms", "exposed ms", "idle ms", ""]
    return _indent(_table(head, rows)) if rows else []


def _windows(rank: dict[str, Any]) -> list[str]:
    rows = [
        [KINDS[w["kind"]], ms(w["exposed_us"]), str(w["windows"]), w["ended_by"] or "(nothing)"]
        for w in rank["ended_by"][:_NUM_WINDOWS]
    ]
    head = ["exposed by", "ms", "windows", "compute kernel that came next"]
    return _indent(_table(head, rows)) if rows else []


def _difference(change: dict[str, Any]) -> list[str]:
    name = "rank ?" if change["rank"] is None else f"rank {change['rank']}"
    rows = [
        [key.removesuffix("_us") + " ms", *(ms(change[key][side]) for side in ("new", "base")),
         f"{change[key]['change'] / 1000:+.3f}", percent(change[key])]
        for key in change if key.endswith("_us")
    ]  # fmt: skip
    hidden = change["hidden_share"]
    rows.append(["hidden", *(f"{100 * hidden[s]:.1f}%" for s in ("new", "base")),
                 f"{100 * hidden['change']:+.1f}", "points"])  # fmt: skip
    rows += [
        [f"exposed ms, {KINDS[kind]}", ms(c["new"]), ms(c["base"]), f"{c['change'] / 1000:+.3f}",
         percent(c)]
        for kind, c in change["exposed_by_kind"].items()
    ]  # fmt: skip
    text = _table([f"difference, {name}", "this", "against", "change", ""], rows)
    if change["steps"][0] != change["steps"][1]:
        text.append(
            f"WARNING: {change['steps'][0]} steps against {change['steps'][1]}: totals do not "
            f"compare; look at the steps."
        )
    return text


def percent(change: dict[str, float]) -> str:
    return f"{100 * change['change'] / change['base']:+.1f}%" if change["base"] else ""


def _indent(text: list[str]) -> list[str]:
    return [f"  {line}" for line in text]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Columns of text; numbers to the right."""
    rows = [[short(cell, 70) if len(cell) > 70 else cell for cell in row] for row in rows]
    width = [max(len(row[n]) for row in [head, *rows]) for n in range(len(head))]
    last = len(head) - 1
    return [
        "  ".join(
            cell.ljust(width[n]) if n == 0 or (n == last and not _numeric(cell, head[n]))
            else cell.rjust(width[n])
            for n, cell in enumerate(row)
        ).rstrip()
        for row in [head, *rows]
    ]  # fmt: skip


def _numeric(cell: str, head: str) -> bool:
    return head in ("kernels", "hidden")
