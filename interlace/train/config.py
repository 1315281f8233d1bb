"""Every setting of a run: frozen dataclasses, what follows from them, and their check.

A setting has one dotted name everywhere: ``training.steps`` in errors, ``[training] steps = 20``
in a file, ``--training.steps 20`` as a flag.  Nothing here imports torch, so that a mistake is
told at once.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from interlace.model.config import ModelConfig, check_model

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
    backend: Literal["alltoall", "minimal_async", "hybridep"] = "alltoall"
    """Collectives, rows written straight into the peer, or that with a token once per rank."""
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


PACKAGES = {  # optional packages and the switches that need them
    "tensorboard": "metrics.enable_tensorboard",
    "wandb": "metrics.enable_wandb",
    "trackio": "metrics.enable_trackio",
}
MAY_BE_INFINITE = ("optimizer.norm_type",)
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


def check(config: Config, world_size: int) -> None:
    """Refuse what cannot run, before any communication; a pure function of its arguments.

    Raises: ValueError for the first fault: setting, numbers, nearest legal value.
    """
    _check_numbers(config)
    if problems := check_model(config.model):
        raise ValueError(" ".join(problems))
    _check_batch(config)
    _check_parallelism(config, world_size)
    _check_ep(config)
    _check_overlap(config)
    _check_capture(config)
    _check_data(config)
    _check_layers(config)
    for package, setting in PACKAGES.items():
        _check_package(config, package, setting)


def _check_numbers(config: Config) -> None:
    for name, hint, value, low, high in walk(config):
        accept(name, hint, value)
        if value is None or isinstance(value, str):
            continue
        if value == math.inf and name in MAY_BE_INFINITE:
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}={value} must be a finite number; use for example {low:.9g}.")
        if value < low:
            raise ValueError(f"{name}={value} must be at least {low:.9g}; nearest: {low:.9g}.")
        if value > high:
            raise ValueError(f"{name}={value} must be at most {high:.9g}; nearest: {high:.9g}.")


def _check_batch(config: Config) -> None:
    batch, parts = config.training.local_batch_size, config.training.microbatches
    if batch % parts:
        legal = _nearest(parts, _divisors(batch))
        multiple = _nearest(batch, [parts * max(1, batch // parts), parts * (batch // parts + 1)])
        raise ValueError(
            f"training.local_batch_size={batch} does not split into "
            f"training.microbatches={parts} equal parts; nearest: training.microbatches={legal} "
            f"or training.local_batch_size={multiple}."
        )


def _check_parallelism(config: Config, world_size: int) -> None:
    degree, experts = config.parallelism.expert_parallel_degree, config.model.num_experts
    name = f"parallelism.expert_parallel_degree={degree}"
    if experts % degree:
        legal = _divisors(experts)
        raise ValueError(
            f"{name} does not divide model.num_experts={experts}; "
            f"nearest: {_nearest(degree, legal)} (legal: {', '.join(map(str, legal))})."
        )
    if config.ep.transport == "loopback":
        if world_size != 1:
            raise ValueError(
                f"ep.transport=loopback runs {name} in one process, but the world size is "
                f"{world_size}; start 1 process, or use ep.transport=auto."
            )
        return
    degrees = {"parallelism.expert_parallel_degree": degree}
    product = math.prod(degrees.values())
    if world_size % product:
        settings = " x ".join(f"{key}={value}" for key, value in degrees.items())
        legal = _divisors(math.gcd(experts, world_size))
        multiples = [product * (world_size // product + i) for i in (0, 1)]
        processes = " or ".join(str(n) for n in multiples if n)
        relation = "is larger than" if product > world_size else "does not divide"
        raise ValueError(
            f"{settings} (product {product}) {relation} the world size {world_size}; nearest: "
            f"parallelism.expert_parallel_degree={_nearest(degree, legal)}, or start "
            f"{processes} processes."
        )


def _check_ep(config: Config) -> None:
    e, factor = config.ep, config.ep.capacity_factor
    if factor and not e.padded:
        raise ValueError(
            f"ep.capacity_factor={factor} needs ep.padded=true, but ep.padded is false: the exact "
            f"exchange has no capacity. Set ep.padded, or leave ep.capacity_factor out."
        )
    if factor and factor < 1:
        raise ValueError(
            f"ep.capacity_factor={factor} is below 1, less than a balanced routing needs; "
            f"nearest: 1.0, or none for room for every token."
        )
    if e.backend != "alltoall" and not e.padded:
        raise ValueError(
            f"ep.backend={e.backend} needs ep.padded=true, but ep.padded is false: its buffers "
            f"have static shapes and no exact mode. Add --ep.padded, or use ep.backend=alltoall."
        )
    for name, value, plain in (("reduce", e.reduce, "slot"), ("scores_at", e.scores_at, "origin")):
        if value != plain and e.backend != "hybridep":
            raise ValueError(
                f"ep.{name}={value} needs ep.backend=hybridep, but ep.backend={e.backend} keeps "
                f"scores at the origin. Set ep.backend=hybridep, or ep.{name}={plain}."
            )


def _check_capture(config: Config) -> None:
    if config.capture.enabled and not config.ep.padded:
        raise ValueError(
            "capture.enabled=true needs ep.padded=true: the exact exchange reads sizes on the "
            "host, which a CUDA graph cannot; add --ep.padded."
        )
    if config.capture.enabled and config.training.mode == "eager":
        raise ValueError("capture.enabled=true needs training.mode=traced; got eager.")


def _check_overlap(config: Config) -> None:
    o, t = config.overlap, config.training
    if o.chunks == 1:
        return
    if o.chunk_dim == "sequence" and not o.chunk_root.endswith(".moe"):
        raise ValueError(
            f"overlap.chunk_dim=sequence splits what overlap.chunk_root={o.chunk_root} attends to; "
            f"use overlap.chunk_root=layers.*.moe or overlap.chunk_dim=batch."
        )
    extent, name = t.seq_len, "training.seq_len"
    if o.chunk_dim == "batch":
        extent = t.local_batch_size // t.microbatches
        name = "training.local_batch_size / training.microbatches"
    if extent % o.chunks:
        legal = _nearest(o.chunks, _divisors(extent))
        raise ValueError(
            f"{name} = {extent} does not split into overlap.chunks={o.chunks} equal chunks; "
            f"nearest: overlap.chunks={legal}."
        )


def _check_data(config: Config) -> None:
    d = config.data
    for name, source in (("data", d.source), ("evaluation", config.evaluation.source)):
        path = Path(source).expanduser()
        if source == "random" or (name == "evaluation" and not source):
            continue
        if d.max_documents < 2:
            raise ValueError(
                f"data.max_documents={d.max_documents} leaves no room for the padding of "
                f"{name}.source={source}; nearest: 2."
            )
        if source != "stdlib" and not path.exists():
            raise ValueError(
                f"{name}.source={source} is no file or folder; use stdlib, random, or an existing "
                f"path."
            )
        is_bytes = path.suffix not in (".npy", ".bin") and d.tokenizer == "bytes"
        if is_bytes and config.model.vocab_size < BYTE_VOCAB:
            raise ValueError(
                f"model.vocab_size={config.model.vocab_size} is too small for {name}.source="
                f"{source}: text is read as bytes, {BYTE_VOCAB} ids; nearest: {BYTE_VOCAB}."
            )
    if d.tokenizer != "bytes" and not Path(d.tokenizer).expanduser().is_file():
        raise ValueError(
            f"data.tokenizer={d.tokenizer} is no file; use bytes or a tokenizers JSON file."
        )
    if d.tokenizer != "bytes" and d.separator is None:
        raise ValueError(
            f"data.tokenizer={d.tokenizer} needs data.separator, the id that ends a document; see "
            f"the tokenizer's end-of-text token."
        )


def _check_layers(config: Config) -> None:
    last = config.model.num_moe_layers - 1
    if (named := max(unbalanced_layers(config.optimizer), default=0)) > last:
        raise ValueError(
            f"optimizer.unbalanced_layers={config.optimizer.unbalanced_layers} names MoE layer "
            f"{named}, but model.name={config.model.name} has {last + 1}; nearest: {last}."
        )


def _check_package(config: Config, package: str, setting: str) -> None:
    section, _, key = setting.partition(".")
    if getattr(getattr(config, section), key) and importlib.util.find_spec(package) is None:
        raise ValueError(
            f"{setting}=true needs the package {package}, which is not installed; run: pip install "
            f"'interlace[{package}]', or leave {setting} out."
        )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _nearest(value: int, legal: list[int]) -> int:
    return min(legal, key=lambda n: (abs(n - value), n))


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
