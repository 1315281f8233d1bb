"""The check of a whole configuration, before anything starts.

Each mistake is one message: the settings with their values, what is wrong, the nearest legal value.
Nothing here imports torch.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

from interlace.model.config import check_model
from interlace.train.config import BYTE_VOCAB, Config, accept, unbalanced_layers, walk

# Optional packages and the switches that need them.
PACKAGES = {name: f"metrics.enable_{name}" for name in ("tensorboard", "wandb", "trackio")}
NVIDIA_NEEDS = {"ep.reduce": "rank", "ep.transport": "auto", "training.dtype": "bfloat16"}
MAY_BE_INFINITE = ("optimizer.norm_type",)


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
    _check_packages(config)


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
    if world_size % degree:
        legal = _divisors(math.gcd(experts, world_size))
        below = world_size // degree * degree
        processes = " or ".join(str(n) for n in (below, below + degree) if n)
        relation = "is larger than" if degree > world_size else "does not divide"
        raise ValueError(
            f"{name} (product {degree}) {relation} the world size {world_size}; nearest: "
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
        if value != plain and not e.backend.startswith("hybridep"):
            raise ValueError(
                f"ep.{name}={value} needs ep.backend=hybridep, but ep.backend={e.backend} keeps "
                f"scores at the origin. Set ep.backend=hybridep, or ep.{name}={plain}."
            )
    if e.backend == "hybridep_nvidia":
        for name, _, value, *_ in walk(config):
            if value != (need := NVIDIA_NEEDS.get(name, value)):
                raise ValueError(f"ep.backend=hybridep_nvidia needs {name}={need}; got {value}.")
        degree = config.parallelism.expert_parallel_degree
        if config.training.device == "cpu" or degree < 2:
            raise ValueError(
                "ep.backend=hybridep_nvidia needs at least two processes with a GPU each; got "
                f"training.device={config.training.device} and "
                f"parallelism.expert_parallel_degree={degree}. Use ep.backend=hybridep."
            )
        if importlib.util.find_spec("deep_ep") is None:
            raise ValueError(
                "ep.backend=hybridep_nvidia needs the package deep_ep, which is not installed; "
                "build the branch hybrid-ep of DeepEP, or use ep.backend=hybridep."
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


def _check_packages(config: Config) -> None:
    for package, setting in PACKAGES.items():
        section, _, key = setting.partition(".")
        if getattr(getattr(config, section), key) and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"{setting}=true needs the package {package}, which is not installed; run: pip "
                f"install 'interlace[{package}]', or leave {setting} out."
            )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _nearest(value: int, legal: list[int]) -> int:
    return min(legal, key=lambda n: (abs(n - value), n))
