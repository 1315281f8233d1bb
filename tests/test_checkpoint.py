"""Checkpoints: complete or not there, global, and bit for bit (field reports L1 to L9).

Oracles: the live tensors before the save, the uninterrupted run, the other layout; all bitwise.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import run_steps, small_config, small_engine, snapshot, unequal
from torch.distributed import checkpoint as dcp

from interlace.train import checkpoint_files as files
from interlace.train.checkpoint import Checkpointer, check_identity
from interlace.train.checkpoint_state import seed_rank

# --- the folder -----------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the writer's own code runs after it."""


def save_like(folder: Path, step: int) -> None:
    partial = files.begin(folder, step)
    (partial / "data").write_text(f"weights of {step}")
    files.publish(partial, step, {"step": step})
    files.prune(folder, 2)


CALLS = ("mkdir", "fsync", "rename", "rmdir", "unlink", "open")


@pytest.mark.parametrize("call", CALLS)
def test_a_kill_at_any_point_leaves_the_last_complete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Each call to the operating system is once the last one (field report L5)."""
    for at in range(50):
        folder = tmp_path / str(at)
        for step in (1, 2):
            save_like(folder, step)
        real, left = getattr(os, call), at

        def dying(*args: object, real=real, **kwargs: object) -> object:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, dying)
            try:
                save_like(folder, 3)
            except Killed:
                pass
            else:
                assert files.complete(folder)[-1][0] == 3
                return  # every call of a save has been the last one
        step, path = files.complete(folder)[-1]
        assert step in (2, 3)
        assert (path / "data").read_text() == f"weights of {step}"
        save_like(folder, 4)  # the next save replaces what was left behind
        assert [s for s, _ in files.complete(folder)][-1] == 4
        assert not [p for p in folder.iterdir() if p.name.startswith(".")]
    raise AssertionError(f"a save calls os.{call} more than 50 times")


def test_only_complete_folders_count(tmp_path: Path) -> None:
    save_like(tmp_path, 5)
    (tmp_path / "step-00000009").mkdir()  # no marker
    (tmp_path / "step-00000008").mkdir()
    (tmp_path / "step-00000008" / files.MARKER).write_text('{"step": 8')  # half a marker
    (tmp_path / ".partial-step-00000010").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert [step for step, _ in files.complete(tmp_path)] == [5]
    save_like(tmp_path, 9)
    assert [step for step, _ in files.complete(tmp_path)] == [5, 9]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert files.complete(tmp_path / "nothing") == []


def test_the_newest_k_stay(tmp_path: Path) -> None:
    for step in range(1, 6):
        partial = files.begin(tmp_path, step)
        files.publish(partial, step, {"step": step})
    assert files.prune(tmp_path, 0) == []
    assert [p.name for p in files.prune(tmp_path, 2)] == [f"step-0000000{s}" for s in (1, 2, 3)]
    assert [step for step, _ in files.complete(tmp_path)] == [4, 5]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"checkpoint\.folder=.*file.* cannot be written"):
        files.begin(tmp_path / "file", 1)


# --- one process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("preset", ["dsv3-tiny", "qwen3-tiny"])
def test_resume_is_the_uninterrupted_run(tmp_path: Path, preset: str, mode: str) -> None:
    """Weights, moments, expert bias, counts and losses after 3 + 3 steps equal those after 6."""
    config = small_config(preset, checkpoint__async_mode=mode)
    whole = small_engine(config)
    losses = run_steps(whole, 6)
    first = small_engine(config)
    run_steps(first, 3)
    saver = Checkpointer(first, tmp_path)
    may_write, write = threading.Event(), saver._write
    if mode == "async":
        saver._write = lambda *work: (may_write.wait(20), write(*work))
    saver.save()
    run_steps(first, 1)  # before anything is written; the file must not see it
    may_write.set()
    saver.finish()
    second = small_engine(config)
    assert "at step 3" in (Checkpointer(second, tmp_path).resume() or "")
    assert run_steps(second, 3) == losses[3:]
    assert unequal(snapshot(second), snapshot(whole)) == []
    assert vars(second.progress)["updates"] == 6


def test_the_file_has_what_lives(tmp_path: Path) -> None:
    """Field reports L1, L7: every parameter, buffer and moment, read back without our loader."""
    engine = small_engine(small_config())
    run_steps(engine, 3)
    Checkpointer(engine, tmp_path).save()
    live = snapshot(engine)
    path = files.complete(tmp_path)[-1][1]
    known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    read = {name: torch.zeros_like(tensor) for name, tensor in live.items()}
    dcp.load(read, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    assert unequal(read, live) == []
    assert set(known) - set(live) == {"rng.0.cpu"}
    bias = live["model.layers.1.moe.router.expert_bias"]
    assert bias.abs().max() > 0
    params = {n for n, _ in engine.model.named_parameters()}
    moments = {f"optimizer.{n}.{k}" for n in params for k in ("step", "exp_avg", "exp_avg_sq")}
    assert moments <= set(known)
    assert {f"model.{n}" for n in params} <= set(known)


@pytest.mark.parametrize("steps", [0, 1])
def test_before_and_after_the_first_update(tmp_path: Path, steps: int) -> None:
    """Field report L9."""
    config = small_config()
    engine = small_engine(config)
    run_steps(engine, steps)
    Checkpointer(engine, tmp_path).save()
    losses = run_steps(engine, 2)
    again = small_engine(config)
    Checkpointer(again, tmp_path).resume()
    assert run_steps(again, 2) == losses
    assert unequal(snapshot(again), snapshot(engine)) == []


def test_learning_rates_go_on(tmp_path: Path) -> None:
    """Field report L8: warm-up and cosine over 8 steps, resumed after 1, 3 and 7."""
    config = small_config()

    def rates(engine, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            run_steps(engine, 1)
            found.append(engine.optimizer.param_groups[0]["lr"])
        return found

    expected = rates(small_engine(config), 8)
    assert len(set(expected)) > 5
    found, done = [], 0
    for until in (1, 3, 7, 8):
        engine = small_engine(config)
        saver = Checkpointer(engine, tmp_path)
        saver.resume()
        assert engine.progress.step == done
        found += rates(engine, until - done)
        saver.save()
        done = until
    assert found == expected


def test_random_numbers_go_on(tmp_path: Path) -> None:
    engine = small_engine(small_config())
    seed_rank(7, 0)
    torch.rand(5)
    Checkpointer(engine, tmp_path).save()
    expected = torch.rand(5)
    torch.manual_seed(0)
    Checkpointer(engine, tmp_path).resume()
    assert torch.equal(torch.rand(5), expected)


def test_nothing_to_resume(tmp_path: Path) -> None:
    assert Checkpointer(small_engine(small_config()), tmp_path / "none").resume() is None


def test_another_run_is_refused_by_name(tmp_path: Path) -> None:
    engine = small_engine(small_config())
    Checkpointer(engine, tmp_path).save()
    other = small_engine(small_config(optimizer__name="SGD", debug__seed=1))
    message = r"another run: optimizer\.name='AdamW' there, 'SGD' here; debug\.seed=0 there, 1 here"
    with pytest.raises(ValueError, match=message):
        Checkpointer(other, tmp_path).resume()
    fewer = small_engine(small_config(training__local_batch_size=6))
    with pytest.raises(
        ValueError, match=r"rows of a step=12 there, 6 here; choose training\.local"
    ):
        Checkpointer(fewer, tmp_path).resume()
    check_identity({"a": 1}, {"a": 1}, tmp_path)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    engine = small_engine(small_config())
    Checkpointer(engine, tmp_path).save()
    path = files.complete(tmp_path)[-1][1]
    about = json.loads((path / files.MARKER).read_text())
    shutil.rmtree(path)
    writer = dcp.FileSystemWriter(path)
    dcp.save({"model.norm.weight": torch.zeros(3)}, storage_writer=writer, no_dist=True)
    (path / files.MARKER).write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"step-00000000 lacks model\.embedding\.\S+, .* in all"):
        Checkpointer(engine, tmp_path).resume()


def test_a_failed_background_save_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine(small_config(checkpoint__async_mode="async"))
    saver = Checkpointer(engine, tmp_path)

    def broken(*_: object) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr(files, "publish", broken)
    saver.save()
    with pytest.raises(OSError, match="disk full"):
        saver.finish()
    saver.poll()  # told once
    assert files.complete(tmp_path) == []


# --- several ranks --------------------------------------------------------------------------------


def _train_and_save(rank: int, size: int, degree: int, folder: str, steps: int):
    engine = small_engine(
        small_config(parallelism__expert_parallel_degree=degree), rank=rank, size=size
    )
    saver = Checkpointer(engine, Path(folder))
    saver.resume()
    run_steps(engine, steps)
    saver.save()
    return snapshot(engine), sorted(engine.expert_names)


def _load(rank: int, size: int, degree: int, folder: str):
    engine = small_engine(
        small_config(parallelism__expert_parallel_degree=degree), rank=rank, size=size
    )
    Checkpointer(engine, Path(folder)).resume()
    return snapshot(engine), sorted(engine.expert_names)


def whole(results: list, degree: int) -> dict[str, torch.Tensor]:
    """Global tensors from the first EP group's ranks; every replica must agree with it."""
    experts = results[0][1]
    found = {}
    for name in results[0][0]:
        parts = [tensors[name] for tensors, _ in results]
        owner = name.partition(".")[2]
        is_expert = owner in experts or owner.rpartition(".")[0] in experts
        if is_expert and parts[0].dim():
            found[name] = torch.cat(parts[:degree])
            pairs = [(parts[r], parts[r % degree]) for r in range(len(parts))]
        else:
            found[name] = parts[0]
            pairs = [(part, parts[0]) for part in parts]
        assert all(torch.equal(a, b) for a, b in pairs), name
    return found


@pytest.mark.parametrize("degree", [2, *(pytest.param(d, marks=pytest.mark.slow) for d in (1, 4))])
def test_any_layout_reads_any_other(four_ranks, tmp_path: Path, degree: int) -> None:
    """Saved by four ranks at one degree, read at every other one and by one process; then trained
    on there and read back.  Oracle: the global tensors, bitwise."""
    results = four_ranks.run(_train_and_save, degree, str(tmp_path), 2)
    expected = whole(results, degree)
    alone, _ = _load(0, 1, 1, str(tmp_path))
    assert unequal(alone, expected) == []
    for other in {1, 2, 4} - {degree}:
        assert unequal(whole(four_ranks.run(_load, other, str(tmp_path)), other), expected) == []
    mine, _ = _train_and_save(0, 1, 1, str(tmp_path), 1)
    back = whole(four_ranks.run(_load, degree, str(tmp_path)), degree)
    assert unequal(back, mine) == []


def _with_noise(rank: int, size: int, folder: str, steps: tuple[int, ...], mode: str):
    """EP = 2 where each rank adds its own random numbers, as dropout and router noise do."""
    config = small_config(parallelism__expert_parallel_degree=2, checkpoint__async_mode=mode)
    engine = small_engine(config, rank=rank, size=size)
    plain = engine.forward_backward

    def noisy(batch):
        result = plain(batch)
        noise = torch.rand(()) * 0.1
        grads = {n: g * (1 + noise) for n, g in result.grads.items()}
        return replace(result, grads=grads, loss=result.loss + noise)

    engine = replace(engine, forward_backward=noisy)
    seed_rank(3, rank)
    saver = Checkpointer(engine, Path(folder))
    resumed = saver.resume()
    losses = []
    for count in steps:
        losses += run_steps(engine, count)
        saver.save()
    saver.finish()
    return losses, snapshot(engine), resumed, torch.rand(1).item()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_every_rank_keeps_its_own_random_numbers(two_ranks, tmp_path: Path, mode: str) -> None:
    """Field report L2: saved at 3, resumed; steps 4 to 6 bitwise as without a stop."""
    whole_run = two_ranks.run(_with_noise, str(tmp_path / "whole"), (6,), mode)
    two_ranks.run(_with_noise, str(tmp_path / "halves"), (3,), mode)
    resumed = two_ranks.run(_with_noise, str(tmp_path / "halves"), (3,), mode)
    assert whole_run[0][3] != whole_run[1][3]  # the ranks do have different streams
    for a, b in zip(whole_run, resumed, strict=True):
        assert "at step 3" in b[2]
        assert b[0] == a[0][3:]
        assert unequal(a[1], b[1]) == []
        assert a[3] == b[3]


def _cannot_write(rank: int, size: int, folder: str) -> str:
    engine = small_engine(small_config(parallelism__expert_parallel_degree=2), rank, size)
    try:
        Checkpointer(engine, Path(folder)).save()
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_bad_folder_is_the_same_error_on_every_rank(two_ranks, tmp_path: Path) -> None:
    """Field reports L5, I5: nobody waits for a rank that could not make its folder."""
    (tmp_path / "file").write_text("")
    first, second = two_ranks.run(_cannot_write, str(tmp_path / "file"), timeout=20)
    assert first == second
    assert "cannot be written" in first
