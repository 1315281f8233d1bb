"""From a training step to one tagged FX graph."""

from interlace.trace.step import Step, StepResult, Traced, run_eager, trace_step

__all__ = ["Step", "StepResult", "Traced", "run_eager", "trace_step"]
