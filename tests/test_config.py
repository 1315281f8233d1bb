"""Settings: every mistake is one message; what is written reads back equal."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import get_args

import pytest

from interlace.train.config import Config, num_processes, walk
from interlace.train.config_check import check
from interlace.train.config_read import load_config, to_toml
from interlace.train.presets import PRESETS

EP = "parallelism.expert_parallel_degree"
TINY = "dsv3-tiny"

# Flags over dsv3-tiny (8 experts, top-2, EP=2, batch 8), world size (0: what it is made for), and
# what the message must hold: the setting, both numbers, the nearest legal value.
BAD: list[tuple[list[str], int, list[str]]] = [
    ([f"--{EP}", "0"], 1, [f"{EP}=0", "at least 1", "nearest: 1"]),
    ([f"--{EP}", "-2"], 2, [f"{EP}=-2", "nearest: 1"]),
    ([f"--{EP}", "3"], 3, [f"{EP}=3", "model.num_experts=8", "nearest: 2", "1, 2, 4, 8"]),
    (["--model.num_experts", "6", "--model.num_groups", "2", f"--{EP}", "4"], 4, ["=4", "=6", "3"]),
    ([f"--{EP}", "4"], 2, [f"{EP}=4", "product 4", "larger", "world size 2", f"{EP}=2"]),
    ([f"--{EP}", "4"], 6, [f"{EP}=4", "product 4", "world size 6", f"{EP}=2", "4 or 8 proc"]),
    ([f"--{EP}", "2"], 3, [f"{EP}=2", "world size 3", f"{EP}=1", "2 or 4 processes"]),
    (["--ep.transport", "loopback"], 2, ["ep.transport=loopback", f"{EP}=2", "world size is 2"]),
    (["--model.top_k", "9"], 0, ["model.top_k", "9", "model.num_experts", "8", "use 8"]),
    (["--model.top_k", "0"], 0, ["model.top_k", "0", "1"]),
    (["--model.routing", "balance"], 0, ["model.routing", "balance", "balanced"]),
    (["--model.routing", "skewed:x"], 0, ["model.routing", "skewed:x"]),
    (
        ["--training.local_batch_size", "7", "--training.microbatches", "3"],
        0,
        ["training.local_batch_size=7", "training.microbatches=3", "microbatches=1", "size=6"],
    ),
    (
        ["--training.local_batch_size", "1", "--training.microbatches", "2"],
        0,
        ["local_batch_size=1", "microbatches=2", "microbatches=1", "local_batch_size=2"],
    ),
    (["--training.microbatches", "0"], 0, ["training.microbatches=0", "nearest: 1"]),
    (["--training.local_batch_size", "0"], 0, ["training.local_batch_size=0", "nearest: 1"]),
    (["--training.seq_len", "1"], 0, ["training.seq_len=1", "at least 2", "nearest: 2"]),
    (["--training.steps", "0"], 0, ["training.steps=0", "nearest: 1"]),
    (["--training.steps", "2.5"], 0, ["training.steps", "2.5"]),
    (["--training.steps", "many"], 0, ["training.steps", "many"]),
    (["--training.steps"], 0, ["training.steps", "Missing value"]),
    (["--training.dtype", "float16"], 0, ["training.dtype", "float16", "bfloat16"]),
    (["--training.stepz", "3"], 0, ["training.stepz", "did you mean training.steps"]),
    (["--steps", "3"], 0, ["--steps", "did you mean"]),
    (["stray"], 0, ["stray"]),
    (["--preset", "x"], 0, ["preset cannot be overridden"]),
    (["--model.name", "dsv3-61b"], 0, ["model.name", "did you mean", "dsv3-671b"]),
    (["--ep.capacity_factor", "1.5"], 0, ["ep.capacity_factor=1.5", "ep.padded"]),
    (
        ["--ep.padded", "--ep.capacity_factor", "0.5"],
        0,
        ["ep.capacity_factor=0.5", "below 1", "nearest: 1.0"],
    ),
    (["--ep.backend", "nvshmem"], 0, ["ep.backend", "nvshmem", "alltoall"]),
    (["--optimizer.lr", "nan"], 0, ["optimizer.lr=nan", "finite"]),
    (["--optimizer.lr", "-1"], 0, ["optimizer.lr=-1", "nearest: 0"]),
    (["--optimizer.beta2", "1"], 0, ["optimizer.beta2=1.0", "nearest: 0.999999"]),
    (["--optimizer.max_norm", "-1"], 0, ["optimizer.max_norm=-1", "nearest: 0"]),
    (["--lr_scheduler.min_lr_factor", "2"], 0, ["min_lr_factor=2.0", "nearest: 1"]),
    (["--metrics.log_freq", "0"], 0, ["metrics.log_freq=0", "nearest: 1"]),
    (["--debug.seed", "-1"], 0, ["debug.seed=-1", "nearest: 0"]),
    (["--data.source", "no/such/path"], 0, ["data.source=no/such/path", "stdlib"]),
    (["--data.max_documents", "1"], 0, ["data.max_documents=1", "nearest: 2"]),
    (["--model.vocab_size", "100"], 0, ["model.vocab_size=100", "256"]),
    (["--data.tokenizer", "no.json"], 0, ["data.tokenizer=no.json", "bytes"]),
    (["--data.tokenizer", __file__], 0, ["data.tokenizer=", "needs data.separator"]),
    (["--data.at_end", "loop"], 0, ["data.at_end", "loop", "wrap", "stop"]),
    (["--evaluation.source", "no/such"], 0, ["evaluation.source=no/such", "stdlib"]),
    (["--evaluation.batches", "0"], 0, ["evaluation.batches=0", "nearest: 1"]),
    (["--evaluation.interval", "-1"], 0, ["evaluation.interval=-1", "nearest: 0"]),
    (["--checkpoint.interval", "0"], 0, ["checkpoint.interval=0", "nearest: 1"]),
    (["--checkpoint.keep_latest_k", "-1"], 0, ["checkpoint.keep_latest_k=-1", "nearest: 0"]),
    (["--checkpoint.async_mode", "on"], 0, ["checkpoint.async_mode", "on", "disabled"]),
    (["--training.nonfinite", "zero"], 0, ["training.nonfinite", "zero", "stop", "skip"]),
    (["--training.max_skipped_steps", "0"], 0, ["max_skipped_steps=0", "nearest: 1"]),
    (["--optimizer.norm_type", "0.5"], 0, ["optimizer.norm_type=0.5", "nearest: 1"]),
    (["--optimizer.norm_type", "nan"], 0, ["optimizer.norm_type=nan", "finite"]),
    (["--optimizer.unbalanced_layers", "x"], 0, ["optimizer.unbalanced_layers='x'", "0,3"]),
    (["--optimizer.unbalanced_layers", "0,2"], 0, ["layer 2", "has 2", "nearest: 1"]),
    (["--model.balance_loss_weight", "-1"], 0, ["model.balance_loss_weight", "-1", "0.0"]),
]


def message_of(flags: list[str], world_size: int) -> str:
    try:
        config = load_config([TINY, *flags])
        check(config, world_size or num_processes(config))
    except ValueError as error:
        return str(error)
    return "accepted"


def messages() -> list[str]:
    """Of the whole table; the -O test calls it in another process."""
    return [message_of(flags, world_size) for flags, world_size, _ in BAD]


@pytest.mark.parametrize(("flags", "world_size", "parts"), BAD, ids=lambda v: str(v)[:60])
def test_each_mistake_is_one_message(flags: list[str], world_size: int, parts: list[str]) -> None:
    message = message_of(flags, world_size)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.slow
def test_same_messages_under_python_O() -> None:
    here = Path(__file__).parent
    code = (
        f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]\n"
        "import json, test_config\n"
        "print(json.dumps([__debug__, test_config.messages()]))"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, check=True)
    assert json.loads(done.stdout) == [False, messages()]


def test_degree_one_is_off() -> None:
    config = load_config([TINY, f"--{EP}", "1"])
    for world_size in (1, 2, 3, 7):
        check(config, world_size)
    check(load_config([TINY, f"--{EP}", "1", "--ep.transport", "loopback"]), 1)


OVERLAP = ["--overlap.chunks", "2", "--ep.padded", "--optimizer.max_norm", "0.5"]
OFF = {  # every setting that may be left out, and what it is then
    "comm.timeout_seconds": None,
    "ep.capacity_factor": None,
    "optimizer.max_norm": None,
}
# Whole and other numbers of which 0 means that there is none.
ZEROS = ["model.num_shared_experts", "model.num_dense_layers", "model.q_lora_rank"]
ZEROS += ["model.balance_loss_weight", "optimizer.expert_bias_speed", "lr_scheduler.warmup_steps"]
ZEROS += ["evaluation.interval", "checkpoint.keep_latest_k"]


@pytest.mark.parametrize("off", ["0", "none", "null", "None"])
def test_zero_and_none_are_off(off: str, tmp_path: Path) -> None:
    """Field report B8: with overlap on, as flags and in a file; what is absent is off as well."""
    optional = {s.name for s in walk(PRESETS[TINY]) if NoneType in get_args(s.hint)}
    assert optional == {*OFF, "data.separator"}  # of which 0 is a token
    config = load_config([TINY, *OVERLAP, *(x for name in OFF for x in (f"--{name}", off))])
    check(config, 2)
    values = {s.name: s.value for s in walk(config)}
    assert {name: values[name] for name in OFF} == OFF
    values = {s.name: s.value for s in walk(load_config([TINY, *OVERLAP]))}
    assert values["comm.timeout_seconds"] is values["ep.capacity_factor"] is None
    path = tmp_path / "run.toml"
    text = off if off == "0" else f'"{off.lower()}"'
    lines = [f"{name} = {text}" for name in OFF]  # dotted keys are TOML too
    path.write_text("\n".join([f'preset = "{TINY}"', *lines]))
    assert load_config([str(path), *OVERLAP[:3]]) == config


def test_zero_means_without() -> None:
    config = load_config([TINY, *OVERLAP, *(x for name in ZEROS for x in (f"--{name}", "0"))])
    check(config, 2)
    assert {s.value for s in walk(config) if s.name in ZEROS} == {0}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_legal(name: str) -> None:
    config = PRESETS[name]
    check(config, num_processes(config))
    assert (config.preset, config.model.name) == (name, name)


def test_wrong_types_from_python_are_refused() -> None:
    config = PRESETS[TINY]
    bad = replace(config, training=replace(config.training, steps="20"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"training\.steps must be a whole number; got '20'"):
        check(bad, 2)


def test_every_number_has_bounds() -> None:
    unbounded = [
        s.name
        for s in walk(PRESETS[TINY])
        if not s.name.startswith("model.") and type(s.value) in (int, float) and s.low < 0
    ]
    assert unbounded == []


def test_overrides_reach_their_fields() -> None:
    flags = ["--training.steps=20", "--training.local-batch-size", "4", "--ep.padded"]
    config = load_config(["qwen3-tiny", *flags, "--model.routing", "balanced"])
    base = PRESETS["qwen3-tiny"]
    assert config == replace(
        base,
        training=replace(base.training, steps=20, local_batch_size=4),
        ep=replace(base.ep, padded=True),
        model=replace(base.model, routing="balanced"),
    )


def test_model_name_brings_its_numbers() -> None:
    config = load_config([TINY, "--model.name", "qwen3-30b", "--model.num_layers", "4"])
    assert config.model == replace(PRESETS["qwen3-30b"].model, num_layers=4)


# --- files ----------------------------------------------------------------------------------------


def changed() -> list[Config]:
    flags = ["--optimizer.max_norm", "none", "--ep.padded", "--ep.capacity_factor", "1.25"]
    text = ["--data.source", "a 'quoted' \"näme\"", "--data.separator", "0"]
    return [
        *PRESETS.values(),
        load_config(
            [TINY, *flags, *text, "--optimizer.lr", "1e-7", "--optimizer.norm_type", "inf"]
        ),
        load_config([TINY, "--model.name", "qwen3-tiny", "--model.dim", "64"]),
    ]


@pytest.mark.parametrize("config", changed(), ids=lambda c: c.preset)
def test_toml_round_trip(config: Config, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert load_config([str(path)]) == config


def test_file_then_flags(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('preset = "dsv3-tiny"\n[training]\nsteps = 5\n[optimizer]\nlr = 1\n')
    config = load_config([str(path), "--training.steps", "6"])
    assert (config.training.steps, config.optimizer.lr) == (6, 1.0)
    assert isinstance(config.optimizer.lr, float)


HEAD = b'preset = "dsv3-tiny"\n'
BAD_FILES = {
    b'preset = "dsv3-tinny"': "unknown preset 'dsv3-tinny'; did you mean dsv3-tiny",
    b"[training]\nsteps = 5": "begin the file with a preset",
    b'preset = ["a"]': "unknown preset",
    HEAD + b"[trainig]\nsteps = 5": "unknown section 'trainig'; did you mean training",
    HEAD + b"[training]\nstep = 5": "unknown setting 'training.step'; .*steps",
    HEAD + b"steps = 5": "unknown setting 'steps'",
    HEAD + b"training = 5": "training is a section, got 5",
    HEAD + b'[training]\nsteps = "5"': "training.steps must be a whole number; got '5'",
    HEAD + b"[training]\nsteps = 5.0": "training.steps must be a whole number; got 5.0",
    HEAD + b"[training]\nsteps = true": "training.steps must be a whole number; got True",
    HEAD + b'[optimizer]\nlr = "x"': "optimizer.lr must be a number; got 'x'",
    HEAD + b"[ep]\npadded = 1": "ep.padded must be true or false; got 1",
    HEAD + b'[training]\ndtype = "fp8"': "training.dtype must be one of float32, bfloat16; got",
    HEAD + b'[model]\nname = "gpt"': "model.name: unknown model 'gpt'; known: dsv3",
    HEAD + b"[training\n": "not valid TOML: .*line 2",
    HEAD + b"# \xff": r"not UTF-8 text \(byte 0xff at offset 23\)",
}


@pytest.mark.parametrize("content", BAD_FILES, ids=range(len(BAD_FILES)))
def test_bad_files(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=BAD_FILES[content]) as caught:
        load_config([str(path)])
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.toml: no such file"):
        load_config([str(tmp_path / "gone.toml")])
    with pytest.raises(ValueError, match="is a folder"):
        load_config([str(tmp_path)])


def test_unknown_preset_and_none() -> None:
    with pytest.raises(ValueError, match=r"unknown preset 'qwen3-tny'; did you mean qwen3-tiny"):
        load_config(["qwen3-tny"])
    with pytest.raises(ValueError, match=r"unknown preset 'zzz'; known: .*qwen3-30b"):
        load_config(["zzz"])
    with pytest.raises(ValueError, match=r"name a preset or a TOML file first; presets: dsv3-tiny"):
        load_config([])


@pytest.mark.parametrize(
    ("flag", "known"),
    [
        ("--parallelism.pp", "known: parallelism.expert_parallel_degree."),
        ("--xyzzy", "known: model.*, training.*, parallelism.*,"),
    ],
)
def test_what_resembles_nothing_is_told_its_neighbours_in_one_short_line(
    flag: str, known: str
) -> None:
    with pytest.raises(ValueError, match=f"unknown setting {flag}; {re.escape(known)}") as found:
        load_config(["dsv3-tiny", flag, "2"])
    assert len(str(found.value)) < 300
