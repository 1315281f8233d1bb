"""What the main rank writes while a run goes on: settings, metrics, sinks, the loss curve."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from interlace.train.config import Config
from interlace.train.config_read import to_toml
from interlace.train.curve import loss_curve_svg
from interlace.train.metrics import MetricsFile, read_history
from interlace.train.sinks import flatten, open_sinks


class Report:
    """Owns the metrics file and the sinks; continues the history of ``first`` finished steps."""

    def __init__(self, config: Config, first: int) -> None:
        self._config, self._folder = config, Path(config.metrics.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
        path = self._folder / "metrics.jsonl"
        history = read_history(path, first)
        self._points = [(r["step"], float(r["loss"])) for r in history]
        self._cut_L = [0] * config.model.num_moe_layers
        self._routed = 0  # rows of one layer in all steps that count what was cut
        for record in history:
            self._count_cut(record)
        self._stack = contextlib.ExitStack()
        self._metrics = self._stack.enter_context(MetricsFile(path))
        self._sinks = self._stack.enter_context(open_sinks(config, first))

    def write(self, record: Mapping[str, Any]) -> None:
        """The metrics of one step, everywhere."""
        self._metrics.write(record)
        self._points.append((record["step"], record["loss"]))
        self._count_cut(record)
        values = flatten(record) if self._sinks else {}
        for sink in self._sinks:
            sink.write(record["step"], values)

    def _count_cut(self, record: Mapping[str, Any]) -> None:
        if cut_L := record.get("ep/cut_rows"):
            self._cut_L = [a + b for a, b in zip(self._cut_L, cut_L, strict=True)]
            self._routed = record["tokens_seen"] * self._config.model.top_k

    def sync(self) -> None:
        """The metrics so far are on the disk."""
        self._metrics.sync()

    def summary(self) -> str:
        """First and last loss, where everything lies, and what was cut from it."""
        losses = [loss for _, loss in self._points]
        last = losses[-min(10, len(losses)) :]
        cut = ""
        if self._routed:
            share = max(self._cut_L) / self._routed
            cut = (
                f"; rows cut by MoE layer (ep.overflow=drop): {', '.join(map(str, self._cut_L))}, "
                f"at most {share:.2%} of a layer"
            )
        return (
            f"loss {losses[0]:.3f} -> {sum(last) / len(last):.3f} (mean of the last {len(last)} "
            f"steps); metrics {self._metrics.path}, curve {self._folder / 'loss.svg'}{cut}"
        )

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)
        if self._points:
            steps, losses = zip(*self._points, strict=True)
            curve = loss_curve_svg(steps, losses, f"{self._config.model.name}: loss")
            (self._folder / "loss.svg").write_text(curve, encoding="utf-8")
