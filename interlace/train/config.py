"""Every setting of a run: frozen dataclasses, and what follows from them.

A setting has one dotted name everywhere: ``training.steps`` in errors, ``[training] steps = 20``
in a file, ``--training.steps 20`` as a flag.  Nothing here imports torch, so that a mistake is
told at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from interlace.model.config import ModelConfig

# What `interlace verify` can run (train/arms.py, without torch).
ARMS = (
    *("eager", "control", "scheduled"),
    *("chunk-eager", "chunk-graph", "chunk-scheduled"),
    *("captured", "scheduled-captured", "chunk-captured"),
)
BYTE_VOCAB = 256  # token ids that text, read as bytes, takes


def _number(default: Any, *, low: float, high: float = math.inf) -> Any:
    """A field with its lowest and highest legal value."""
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True)
class TrainingConfig:
    steps: int = _number(100, low=1)
    """Optimizer steps."""
    seq_len: int = _number(128, low=2)
    """Tokens a sequence."""
    local_batch_size: int = _number(8, low=1)
    """Sequences per rank and step."""
    microbatches: int = _number(1, low=1)
    """Equal parts that a rank's batch is split in; gradients add up over them."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and matrix products; the router stays in float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one."""
    mode: Literal["traced", "eager"] = "traced"
    """traced: the step runs as one FX graph; eager: plain PyTorch."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What a step with a NaN or infinity does on all ranks: end the run, or leave no trace."""
    max_skipped_steps: int = _number(10, low=1)
    """With training.nonfinite or ep.overflow skip: so many such steps in a row end the run."""


@dataclass(frozen=True)
class ParallelismConfig:
    expert_parallel_degree: int = _number(1, low=1)
    """Ranks that share the experts of a layer; consecutive ranks form a group; 1 is off."""


@dataclass(frozen=True)
class CommConfig:
    timeout_seconds: int | None = _number(None, low=0)
    """How long a rank waits for its peers; none or 0: 60 on CPU, 600 on CUDA."""


@dataclass(frozen=True)
class EpConfig:
    backend: Literal["alltoall", "minimal_async", "hybridep", "hybridep_nvidia"] = "alltoall"
    """Collectives, rows written into the peer, that with a token once per rank, or NVIDIA's."""
    transport: Literal["auto", "loopback"] = "auto"
    """loopback: one process stands for all expert-parallel ranks, its peers mirror it."""
    padded: bool = False
    """Static shapes with counts on the device, instead of sizes read on the host."""
    capacity_factor: float | None = _number(None, low=0)
    """Padded only: room per peer over the balanced load; none or 0: room for every token."""
    reduce: Literal["slot", "rank"] = "slot"
    """rank: a rank returns the sum of a token's rows, fewer bytes, rounded otherwise (hybridep)."""
    scores_at: Literal["origin", "expert"] = "origin"
    """Where rows meet gradients of scores; reduce=rank has it at the expert (hybridep)."""
    overflow: Literal["error", "skip", "redo", "drop"] = "error"
    """A step whose rows did not fit: ends the run, is left out, is done again with more room, or
    runs without those rows (of a peer's highest experts), which are counted; all ranks alike."""


@dataclass(frozen=True)
class OverlapConfig:
    chunks: int = _number(1, low=1)
    """Independent parts that a region of the step runs in, so that one part's exchange runs under
    the other's compute; 1 is off."""
    chunk_root: str = "layers.*.moe"
    """Modules that are chunked, a star for one name: layers.*.moe, or whole layers: layers.*"""
    chunk_dim: Literal["batch", "sequence"] = "batch"
    """What is split; attention needs its whole sequence, so whole layers split by batch."""
    scheduler: Literal["policy", "cost", "off"] = "policy"
    """policy: no timings; cost: a clock of estimated bytes and FLOPs; off: program order, and
    everything else as it is."""


@dataclass(frozen=True)
class CompileConfig:
    regional: bool = False
    """Norms, activations, routers and their like compiled by Inductor, the rest left as it is."""


@dataclass(frozen=True)
class CaptureConfig:
    enabled: bool = False
    """Forward and backward of all microbatches as one CUDA graph; needs CUDA and ep.padded."""


@dataclass(frozen=True)
class OptimizerConfig:
    name: Literal["AdamW", "SGD"] = "AdamW"
    """SGD is plain: no momentum, no decay."""
    lr: float = _number(3e-4, low=0)
    """Peak learning rate."""
    beta1: float = _number(0.9, low=0, high=0.999999)
    beta2: float = _number(0.95, low=0, high=0.999999)
    eps: float = _number(1e-8, low=1e-30)
    weight_decay: float = _number(0.1, low=0)
    max_norm: float | None = _number(1.0, low=0)
    """Gradient norm above which all gradients are scaled down; none or 0 is off."""
    norm_type: float = _number(2.0, low=1)
    """The p of the gradient norm; inf: the largest element."""
    expert_bias_speed: float = _number(1e-3, low=0)
    """Change of a router's expert bias in one optimizer step; 0 is off."""
    unbalanced_layers: str = ""
    """MoE layers that are left unbalanced, by bias and by loss: numbers from 0, with commas."""


@dataclass(frozen=True)
class LRSchedulerConfig:
    warmup_steps: int = _number(0, low=0)
    """Steps of linear rise; then a cosine down to lr * min_lr_factor at the last step."""
    min_lr_factor: float = _number(0.1, low=0, high=1)


@dataclass(frozen=True)
class DataConfig:
    source: str = "stdlib"
    """stdlib (Python's own source files), random, a text file or folder, a .jsonl or .parquet file,
    or a token file."""
    text_field: str = "text"
    """The field of a JSONL line, or the column of a parquet file, that holds a document."""
    tokenizer: str = "bytes"
    """bytes, or a `tokenizers` JSON file; that needs data.separator."""
    max_documents: int = _number(16, low=1)
    """Most documents that one sequence may hold, its padding included."""
    separator: int | None = _number(None, low=0)
    """Token id that ends a document of a token file; none: one document."""
    at_end: Literal["wrap", "stop"] = "wrap"
    """After the last whole batch of an epoch: another epoch in a new order, or the run ends."""


@dataclass(frozen=True)
class MetricsConfig:
    log_freq: int = _number(10, low=1)
    """Steps between two lines on the console; the metrics file has every step."""
    folder: str = "runs/interlace"
    """Where metrics, the loss curve and the resolved configuration go."""
    enable_tensorboard: bool = False
    """Also write TensorBoard files below metrics.folder."""
    enable_wandb: bool = False
    """Also log to Weights & Biases."""
    enable_trackio: bool = False
    """Also log to trackio."""
    project: str = "interlace"
    """The project's name at Weights & Biases and trackio."""


@dataclass(frozen=True)
class EvaluationConfig:
    interval: int = _number(0, low=0)
    """Steps between two evaluations, with one after the last step; 0 is off."""
    batches: int = _number(8, low=1)
    """Batches of an evaluation, the same ones each time."""
    source: str = ""
    """As data.source; empty: rows of the training data that are then kept out of the training."""


@dataclass(frozen=True)
class CheckpointConfig:
    enabled: bool = False
    """Save as the run goes; the same command then resumes from the last complete checkpoint."""
    folder: str = "checkpoints"
    """Below metrics.folder, unless it is an absolute path."""
    interval: int = _number(500, low=1)
    """Steps between two checkpoints; one more after the last step and after SIGTERM."""
    keep_latest_k: int = _number(3, low=0)
    """Older complete checkpoints are removed; 0 keeps all."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """async: training goes on once the state is copied to host memory; pinned copies faster."""
    stop_seconds: int = _number(120, low=1)
    """How long our launcher lets workers save after SIGTERM."""


@dataclass(frozen=True)
class DebugConfig:
    seed: int = _number(0, low=0, high=2**63 - 1)
    deterministic: bool = False
    """Deterministic kernels only."""


@dataclass(frozen=True)
class Config:
    """All settings of one run."""

    preset: str
    """The preset that this configuration started from."""
    model: ModelConfig
    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    ep: EpConfig = field(default_factory=EpConfig)
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)


# Optional settings for which 0 says the same as none.
ZERO_IS_NONE = ("comm.timeout_seconds", "ep.capacity_factor", "optimizer.max_norm")


def num_processes(config: Config) -> int:
    """How many processes a configuration is made for."""
    return 1 if config.ep.transport == "loopback" else config.parallelism.expert_parallel_degree


def microbatch_tokens(config: Config) -> int:
    """Tokens that one rank computes at a time."""
    sequences = config.training.local_batch_size // config.training.microbatches
    return sequences * config.training.seq_len


def unbalanced_layers(optimizer: OptimizerConfig) -> frozenset[int]:
    """The MoE layers, numbered from 0, that the settings leave unbalanced.

    Raises: ValueError for what is no list of numbers.
    """
    text = optimizer.unbalanced_layers
    parts = [part.strip() for part in text.split(",")] if text else []
    if any(not part.isdecimal() for part in parts):
        raise ValueError(
            f"optimizer.unbalanced_layers={text!r} must be numbers from 0 joined by commas, such "
            f"as 0,3; empty: every layer is balanced."
        )
    return frozenset(map(int, parts))


class Setting(NamedTuple):
    """One leaf of a configuration, by its dotted name."""

    name: str
    hint: Any
    value: Any
    low: float
    high: float


def walk(config: Any, prefix: str = "") -> Iterator[Setting]:
    """Every setting, in order."""
    hints = get_type_hints(type(config))
    for item in fields(config):
        value, name = getattr(config, item.name), prefix + item.name
        if is_dataclass(value):
            yield from walk(value, f"{name}.")
        else:
            low, high = item.metadata.get("low", -math.inf), item.metadata.get("high", math.inf)
            yield Setting(name, hints[item.name], value, low, high)


def accept(name: str, hint: Any, value: Any) -> Any:
    """The value as the type that the setting has, or an error that names both."""
    if get_origin(hint) in (Union, UnionType):
        options = get_args(hint)
        if NoneType in options and (value is None or value in ("none", "null")):
            return None
        hint = next(option for option in options if option is not NoneType)
    if get_origin(hint) is Literal:
        options = get_args(hint)
        if value in options:
            return value
        raise ValueError(f"{name} must be one of {', '.join(options)}; got {value!r}.")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if hint in words and type(value) is not hint:
        raise ValueError(f"{name} must be {words[hint]}; got {value!r}.")
    return value
