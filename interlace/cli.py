"""The ``interlace`` command.

torch is imported inside the commands alone, so that help and settings errors come at once.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from interlace import __version__
from interlace.train import watch
from interlace.train.launch import GRACE_SECONDS, in_worker, launch, report_failure
from interlace.train.stopping import StepRefused

if TYPE_CHECKING:
    from interlace.train.config import Config
    from interlace.train.world import World

# More local processes than this are never started without being asked for.
_MAX_OWN_PROCESSES = 8
_SETTINGS_ERROR, _FAILED, _DIFFERENT = 2, 1, 1


class _Parser(argparse.ArgumentParser):
    """Errors are one line, as everywhere else."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog}: {message}; see {self.prog} --help.")


def main(argv: list[str] | None = None) -> int:
    """Run one command; its exit code.  A worker that fails ends its process here and now."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        if in_worker():
            os._exit(130)
        return 130
    except BrokenPipeError:
        if in_worker():
            os._exit(_FAILED)
        # The reader of our output, such as head, has left; nothing is wrong, nothing is to be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        expected = _is_expected(error)
        if not expected and not in_worker():
            raise
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        text = f"interlace: error: {error}{notes}" if expected else traceback.format_exc()
        if not expected and watch.now():
            text = f"{text.rstrip()}\nat: {watch.now()}"
        report_failure(text, expected=expected)
        is_mistake = expected and not isinstance(error, StepRefused)
        code = _SETTINGS_ERROR if is_mistake else _FAILED
        if in_worker():
            # Peers see a closed connection within a second; cleaning up could wait for them.
            sys.stdout.flush()
            os._exit(code)
        return code


def _is_expected(error: Exception) -> bool:
    """A ValueError, or a refusal to import, of our own code is a message to the user."""
    if isinstance(error, StepRefused):
        return True
    if isinstance(error, ModuleNotFoundError) or not isinstance(error, ValueError | ImportError):
        return False
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and frame.tb_frame.f_globals.get("__name__", "").startswith(
        "interlace"
    )


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"interlace {__version__}")
        return 0
    name, *rest = argv
    if name not in _COMMANDS:
        close = difflib.get_close_matches(name, _COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"commands: {', '.join(_COMMANDS)}."
        raise ValueError(f"unknown command {name!r}; {hint}")
    return _COMMANDS[name][0](rest)


def _overview() -> str:
    width = max(map(len, _COMMANDS))
    lines = [f"  {name:{width}}  {summary}" for name, (_, summary, _) in _COMMANDS.items()]
    examples = [f"  {example}" for _, _, example in _COMMANDS.values()]
    return "\n".join(
        [
            "usage: interlace COMMAND ...",
            "",
            "Train mixture-of-experts models on PyTorch without making the GPUs wait.",
            "",
            *lines,
            "",
            "examples:",
            *examples,
            "",
            "interlace COMMAND --help tells more; interlace --version the version.",
        ]
    )


def _parser(name: str, usage: str) -> _Parser:
    _, summary, example = _COMMANDS[name]
    parser = _Parser(
        prog=f"interlace {name}",
        usage=f"interlace {name} {usage}",
        description=summary,
        epilog=f"example: {example}",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this message")
    return parser


def _parse(parser: _Parser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options of the command, and the rest: preset or file, then dotted settings."""
    options, rest = parser.parse_known_args(argv)
    if not options.help:
        return options, rest
    if rest:  # interlace train PRESET --help
        from interlace.train.config_read import load_config

        load_config([*rest, "--help"])
    print(parser.format_help())
    raise SystemExit(0)


# --- commands -------------------------------------------------------------------------------------

_TARGET = "PRESET|FILE.toml [--section.setting VALUE ...] [options]"
_SETTINGS_HINT = "Every setting of a preset: interlace train PRESET --help"


def _train(argv: list[str]) -> int:
    parser = _parser("train", _TARGET)
    parser.description = f"{parser.description}.  {_SETTINGS_HINT}"
    parser.add_argument("--dry-run", action="store_true", help="print and save the settings only")
    _add_nproc(parser)
    options, rest = _parse(parser, argv)
    config, size = _load(rest, options.nproc, planning=options.dry_run)
    if options.dry_run or not in_worker():
        _save(config, echo=options.dry_run)
    if options.dry_run:
        return 0

    def work(world: World) -> bool:
        from interlace.train.loop import train

        train(config, world)
        return True

    stop_seconds = config.checkpoint.stop_seconds if config.checkpoint.enabled else None
    return _run(["train", *argv], config, size, work, stop_seconds)


def _verify(argv: list[str]) -> int:
    parser = _parser("verify", _TARGET)
    parser.add_argument(
        "--arms", default="all", help="comma-separated, or all (default): all but the captured ones"
    )
    parser.add_argument("--steps", type=int, default=20, help="steps of each arm (default 20)")
    parser.add_argument("--json", type=Path, help="write the result to this file too")
    _add_nproc(parser)
    options, rest = _parse(parser, argv)
    config, size = _load(rest, options.nproc)
    arms = _arms(options.arms)
    if options.steps < 1:
        raise ValueError(f"--steps {options.steps} must be at least 1; nearest: 1.")
    if options.json and (options.json.is_dir() or not options.json.absolute().parent.is_dir()):
        raise ValueError(f"--json {options.json}: no file can be written there; name another path.")

    def work(world: World) -> bool:
        from interlace.train.verify import verify

        return verify(config, world, arms, options.steps, options.json)

    return _run(["verify", *argv], config, size, work)


def _trace(argv: list[str]) -> int:
    parser = _parser("trace", _TARGET)
    parser.add_argument("--out", type=Path, help="folder for the graph and its summary")
    options, rest = _parse(parser, argv)
    if options.out is None:
        raise ValueError("--out DIR is missing: the folder for the graph and its summary.")
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out {options.out} is a file; name a folder.")
    config, _ = _load(rest, planning=True)
    from interlace.train.trace_command import trace_command

    trace_command(config, options.out)
    return 0


def _schedule(argv: list[str]) -> int:
    parser = _parser("schedule", _TARGET)
    parser.add_argument("--out", type=Path, help="folder for timeline.svg and schedule.json")
    parser.add_argument(
        "--network-card",
        action="store_true",
        help="a 400 Gb/s card carries the exchange, not NVLink",
    )
    options, rest = _parse(parser, argv)
    if options.out is None:
        raise ValueError("--out DIR is missing: the folder for the timeline and the report.")
    config, _ = _load(rest, planning=True)
    from interlace.schedule import NETWORK_CARD
    from interlace.train.schedule_command import schedule_command

    schedule_command(config, options.out, NETWORK_CARD if options.network_card else None)
    return 0


def _bench(argv: list[str]) -> int:
    parser = _parser("bench", _TARGET)
    parser.description = f"{parser.description}.  {_SETTINGS_HINT}"
    parser.add_argument(
        "--arms",
        help="comma-separated, or all; default: control, scheduled, chunk-scheduled and these "
        "captured, as far as they can run here",
    )
    parser.add_argument(
        "--budgets", metavar="N,N", help="thread blocks that an exchange may take, such as 1,2,8"
    )
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="NAME=VALUE,VALUE",
        help="a setting of overlap, ep or compile; may be repeated, every combination is run",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, help="turns of every arm (default 5)")
    parser.add_argument(
        "--optimizer", action="store_true", help="time the update too, with a learning rate of 0"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with bars")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="keep the profiles, for report")
    parser.add_argument(
        "--min-gain", type=float, metavar="RATIO",
        help="exit with 1 if the best arm gains less over the control under any budget",
    )  # fmt: skip
    _add_nproc(parser)
    options, rest = _parse(parser, argv)
    _, size = _load(rest, options.nproc)
    from interlace.measure.bench_request import (
        Request,
        check_files,
        read_arms,
        read_budgets,
        read_settings,
    )

    settings, refused = read_settings(rest, options.sweep, size)
    request = Request(
        *read_arms(options.arms),
        read_budgets(options.budgets),
        settings,
        refused=refused,
        rounds=options.rounds,
        min_gain=options.min_gain,
        optimizer=options.optimizer,
        json=options.json,
        html=options.html,
        trace=options.trace,
    )
    check_files(request)

    def work(world: World) -> bool:
        from interlace.measure.bench import bench

        return bench(request, world)

    return _run(["bench", *argv], request.settings[0].config, size, work)


def _report(argv: list[str]) -> int:
    parser = _parser("report", "TRACE... [options]")
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE", help="of torch.profiler")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with a timeline")
    parser.add_argument(
        "--against", type=Path, action="append", metavar="TRACE",
        help="show the difference from this one; repeat it for several ranks",
    )  # fmt: skip
    parser.add_argument(
        "--max-exposed-ms", type=float, metavar="MS",
        help="exit with 1 if a rank exposes more communication, or its figures are unreliable",
    )  # fmt: skip
    parser.add_argument(
        "--comm", action="append", default=[], metavar="REGEX",
        help="kernels of these names are communication too; may be repeated",
    )  # fmt: skip
    parser.add_argument("--demo", action="store_true", help="report on a small trace of our own")
    options, rest = parser.parse_known_intermixed_args(argv)  # so that `A --json x B` works
    if options.help:
        print(parser.format_help())
        return 0
    if rest:
        raise ValueError(f"interlace report: unknown argument {rest[0]}; see interlace report -h.")
    from interlace.measure.command import report_command

    return report_command(
        options.traces, json_path=options.json, html_path=options.html, against=options.against,
        max_exposed_ms=options.max_exposed_ms, comm_patterns=options.comm, demo=options.demo,
    )  # fmt: skip


def _doctor(argv: list[str]) -> int:
    parser = _parser("doctor", "[--json]")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    options, rest = parser.parse_known_args(argv)
    if options.help:
        print(parser.format_help())
        return 0
    if rest:
        raise ValueError(f"interlace doctor: unknown argument {rest[0]}; it takes --json alone.")
    from interlace.train.doctor import doctor

    return doctor(as_json=options.json)


_COMMANDS: dict[str, tuple[Callable[[list[str]], int], str, str]] = {
    "train": (
        _train,
        "train a model",
        "interlace train dsv3-tiny --training.steps 20 --nproc 2",
    ),
    "verify": (
        _verify,
        "run arms from the same start and compare them bitwise",
        "interlace verify dsv3-tiny --arms eager,control --steps 20 --json verify.json",
    ),
    "trace": (
        _trace,
        "write the training step as one graph, and a summary of it",
        "interlace trace dsv3-tiny --out runs/trace",
    ),
    "schedule": (
        _schedule,
        "what may run beside each exchange, what does, and a timeline",
        "interlace schedule dsv3-16b-slim --overlap.chunks 2 --out runs/schedule",
    ),
    "bench": (
        _bench,
        "what overlap buys on this machine: arms in turn, times, exposure, bitwise verdict",
        "interlace bench qwen3-30b-slim --ep.transport loopback --ep.padded --budgets 1,8",
    ),
    "report": (
        _report,
        "exposed communication of any PyTorch trace, per kind, layer and stream",
        "interlace report trace.json.gz --html report.html",
    ),
    "doctor": (
        _doctor,
        "what this machine can run, and why not",
        "interlace doctor --json",
    ),
}


# --- processes ------------------------------------------------------------------------------------


def _add_nproc(parser: _Parser) -> None:
    parser.add_argument(
        "--nproc", type=int, help="local processes (default: what the settings are made for)"
    )


def _load(
    rest: list[str], nproc: int | None = None, *, planning: bool = False
) -> tuple[Config, int]:
    """The checked settings, and the number of processes they will run on."""
    from interlace.train.config import num_processes
    from interlace.train.config_check import check
    from interlace.train.config_read import load_config

    config = load_config(rest)
    if in_worker():
        text = os.environ.get("WORLD_SIZE", "1")
        if not text.isdecimal():
            raise ValueError(f"the environment variable WORLD_SIZE={text!r} is not a number.")
        size = int(text)
    elif nproc is not None:
        size = nproc
    else:
        size = num_processes(config)
        if size > _MAX_OWN_PROCESSES and not planning:
            raise ValueError(
                f"parallelism.expert_parallel_degree={size} means {size} processes, more than the "
                f"{_MAX_OWN_PROCESSES} that are started unasked; use torchrun, or --nproc {size}."
            )
    if size < 1:
        raise ValueError(f"--nproc {size} must be at least 1; nearest: 1.")
    check(config, size)
    return config, size


def _run(
    argv: list[str],
    config: Config,
    size: int,
    work: Callable[[World], bool],
    stop_seconds: float | None = None,
) -> int:
    """Do the work in place, or in as many local workers as it needs.

    ``stop_seconds``: how long those may save after SIGTERM; None if they do not.
    """
    if size > 1 and not in_worker():
        return launch(argv, size, stop_seconds=stop_seconds or GRACE_SECONDS)
    from interlace.train.world import close_world, init_world

    world = init_world(config)
    good = work(world)
    close_world(world)
    return 0 if good else _DIFFERENT


def _arms(text: str) -> list[str]:
    from interlace.train.config import ARMS

    arms = (
        [a for a in ARMS if "captured" not in a]
        if text == "all"
        else [arm for arm in text.split(",") if arm]
    )
    for arm in arms:
        if arm not in ARMS:
            close = difflib.get_close_matches(arm, ARMS, n=1)
            hint = f"; did you mean {close[0]}?" if close else "."
            raise ValueError(f"--arms: unknown arm {arm!r}, legal: {', '.join(ARMS)}{hint}")
    if not arms:
        raise ValueError(f"--arms names no arm; legal: all, {', '.join(ARMS)}.")
    return list(dict.fromkeys(arms))


def _save(config: Config, *, echo: bool) -> None:
    """Write the resolved settings to metrics.folder; print them on a dry run."""
    from interlace.train.config_read import to_toml

    text, path = to_toml(config), Path(config.metrics.folder) / "config.toml"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"metrics.folder={config.metrics.folder} cannot be written: {error.strerror}; name "
            f"another folder."
        ) from None
    if echo:
        print(text, end="")
        print(f"# saved as {path}", file=sys.stderr)
