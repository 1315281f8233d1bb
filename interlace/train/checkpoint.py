"""Checkpoints: saved with torch's DCP while the run goes on, resumed from bit for bit.

What is saved is named and global (checkpoint_state.py), how a folder becomes complete is
checkpoint_files.py.  Here: who does what when.  All ranks call everything together.
"""

from __future__ import annotations

import threading
import time
import warnings
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.train import checkpoint_files as files
from interlace.train import checkpoint_state as states
from interlace.train.config import Config
from interlace.train.data_open import global_batch_rows
from interlace.train.engine import Engine
from interlace.train.state import Progress

_GROUP_TIMEOUT = timedelta(hours=1)  # a rank may wait long for one that writes more
_WRITER_THREADS = {"cpu": 1, "cuda": 4}


def checkpoint_folder(config: Config) -> Path:
    """Where the checkpoints of a run lie."""
    return Path(config.metrics.folder, config.checkpoint.folder).expanduser()


class Checkpointer:
    """Owns the saves of a run: its process group, staging memory and background thread."""

    def __init__(self, engine: Engine, folder: Path | None = None) -> None:
        self.engine = engine
        self.folder = folder or checkpoint_folder(engine.config)
        self.saved_step: int | None = None
        self._group = None
        if engine.world.size > 1:
            # Of its own: a background save talks while the step's collectives run.
            self._group = dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._staging: dict[str, Tensor] = {}
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    # --- resume ---

    def resume(self) -> str | None:
        """Loads the last complete checkpoint, if there is one; one line about it for the log.

        Raises: ValueError on every rank, by name, for one that this run cannot continue.
        """
        found = self._from_main(lambda: _newest(self.folder))
        if found is None:
            return None
        path, about = Path(found[0]), found[1]
        check_identity(identity(self.engine), about["identity"], path)
        return f"resumed from {path} at step {self.load(path)}"

    def load(self, path: Path) -> int:
        """Fills model, optimizer, counts and random numbers in place; the number of steps done."""
        engine, world = self.engine, self.engine.world
        from torch.distributed import checkpoint as dcp

        tensors = states.run_tensors(engine)
        counts = states.count_tensors(engine, Progress())
        random = {name: state.clone() for name, state in states.random_states(world).items()}
        reader = dcp.FileSystemReader(path)
        known = set(reader.read_metadata().state_dict_metadata)
        wanted = {**tensors, **counts}
        _check_names(set(wanted), {n for n in known if not n.startswith("rng.")}, path)
        has_random = known >= set(random)  # a run with more ranks than before has new ones
        wanted |= random if has_random else {}
        target = states.as_global(engine, wanted, world.device.type)
        dcp.load(target, storage_reader=reader, process_group=self._group, no_dist=world.size == 1)
        states.restore_counts(engine, {name: wanted[name] for name in counts})
        if has_random:
            states.restore_random_states(world, random)
        self.saved_step = engine.progress.step
        return engine.progress.step

    # --- save ---

    def save(self, *, wait: bool = False) -> float:
        """Saves the state as it is now; how many seconds the run stood still.

        In the asynchronous modes the state is copied and written by a thread, unless ``wait``.
        Raises: ValueError on every rank if the folder cannot be written.
        """
        began = time.perf_counter()
        self.finish()
        engine, step = self.engine, self.engine.progress.step
        if step == self.saved_step:
            return time.perf_counter() - began
        partial = Path(self._from_main(lambda: str(files.begin(self.folder, step))))
        counts = states.count_tensors(engine, engine.progress)
        tensors = {**states.run_tensors(engine), **counts, **states.random_states(engine.world)}
        in_background = engine.config.checkpoint.async_mode != "disabled" and not wait
        device_type = engine.world.device.type
        if in_background:
            tensors, device_type = self._stage(tensors), "cpu"
        target = states.as_global(engine, tensors, device_type)
        about = describe(engine)
        if in_background:
            work = (target, partial, step, about)
            self._thread = threading.Thread(target=self._catch, args=work, name="checkpoint")
            self._thread.start()
        else:
            self._write(target, partial, step, about)
            self._from_main(lambda: None)  # nobody goes on before it is published
        self.saved_step = step
        return time.perf_counter() - began

    @property
    def is_writing(self) -> bool:
        """Whether a background save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def poll(self) -> None:
        """Raises what a background save has failed with."""
        if not self.is_writing:
            self.finish()

    def finish(self) -> None:
        """Waits for a background save; raises what it failed with."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def leave(self, error: BaseException | None) -> None:
        """After an error of the run: a save under way ends first, and what it failed with becomes a
        note.  Not with peers, which may be gone: there the process ends and takes it along."""
        if error is None or self.engine.world.size > 1:
            return
        step = self.saved_step
        try:
            self.finish()
        except Exception as other:
            what = f"The checkpoint of step {step} failed too"
            error.add_note(f"{what}: {type(other).__name__}: {other}")

    def _catch(self, *work: Any) -> None:
        try:
            self._write(*work)
        except BaseException as error:
            self._error = error

    def _write(
        self, target: dict[str, Any], partial: Path, step: int, about: dict[str, Any]
    ) -> None:
        from torch.distributed import checkpoint as dcp

        world = self.engine.world
        threads = _WRITER_THREADS[world.device.type]
        writer = dcp.FileSystemWriter(partial, thread_count=threads, sync_files=True)
        # It returns on the main rank once all ranks have written.
        dcp.save(target, storage_writer=writer, process_group=self._group, no_dist=world.size == 1)
        if world.is_main:
            files.publish(partial, step, about)
            files.prune(self.folder, self.engine.config.checkpoint.keep_latest_k)

    def _stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies in host memory, the same memory for each save."""
        on_cuda = self.engine.world.device.type == "cuda"
        pin = on_cuda and self.engine.config.checkpoint.async_mode == "async_with_pinned_mem"
        for name, tensor in tensors.items():
            if name not in self._staging:
                like = {"dtype": tensor.dtype, "device": "cpu"}
                self._staging[name] = torch.empty(tensor.shape, pin_memory=pin, **like)
            self._staging[name].copy_(tensor, non_blocking=pin)
        if on_cuda:
            torch.cuda.synchronize()
        return dict(self._staging)

    def _from_main(self, function: Any) -> Any:
        """The main rank's result on all ranks; its ValueError on all ranks."""
        if self._group is None:
            return function()
        answer: list[Any] = [None, None]
        if self.engine.world.is_main:
            try:
                answer[0] = function()
            except ValueError as error:
                answer[1] = str(error)
        dist.broadcast_object_list(answer, src=0, group=self._group)
        if answer[1] is not None:
            raise ValueError(answer[1])
        return answer[0]


def identity(engine: Engine) -> dict[str, Any]:
    """What must be equal for a checkpoint to be this run's own, by name of the setting."""
    c, world = engine.config, engine.world
    model = {f"model.{k}": v for k, v in asdict(c.model).items() if k != "balance_loss_weight"}
    return model | {
        "training.seq_len": c.training.seq_len,
        "optimizer.name": c.optimizer.name,
        "debug.seed": c.debug.seed,
        "loopback ranks": world.ep_size if world.loopback else 1,
        "checksum of the data and its packing": engine.data.fingerprint,
        "rows of a step": global_batch_rows(c, world),
    }


def describe(engine: Engine) -> dict[str, Any]:
    """The marker of a checkpoint."""
    c, world = engine.config, engine.world
    return {
        "step": engine.progress.step,
        "preset": c.preset,
        "world_size": world.size,
        "expert_parallel_degree": world.ep_size,
        "torch": torch.__version__,
        "identity": identity(engine),
    }


def check_identity(mine: dict[str, Any], saved: dict[str, Any], path: Path) -> None:
    """Raises: ValueError naming each setting that differs, both values, and what to do."""
    if mine == saved:
        return
    names = [name for name in {**saved, **mine} if mine.get(name) != saved.get(name)]
    faults = [f"{name}={saved.get(name)!r} there, {mine.get(name)!r} here" for name in names]
    advice = "use the settings it was written with, or another checkpoint.folder or metrics.folder"
    if names == ["rows of a step"]:
        advice = (
            "choose training.local_batch_size so that ranks x local_batch_size is the same; the "
            "number of ranks may change"
        )
    raise ValueError(f"{path} is the checkpoint of another run: {'; '.join(faults)}; {advice}.")


def _check_names(wanted: set[str], found: set[str], path: Path) -> None:
    for names, what in (
        (wanted - found, "lacks"),
        (found - wanted, "has, but this run does not,"),
    ):
        if names:
            first = ", ".join(sorted(names)[:3])
            raise ValueError(
                f"{path} {what} {first} ({len(names)} in all); use the settings and the version "
                f"that it was written with, or another checkpoint.folder."
            )


def _newest(folder: Path) -> tuple[str, dict[str, Any]] | None:
    found = files.complete(folder)
    if not found:
        return None
    path = found[-1][1]
    return str(path), files.read_marker(path) or {}
