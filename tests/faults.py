"""Puts each fault of docs/field-reports.md into a copy of the package and shows a test that fails.

    python tests/faults.py            # all, some minutes
    python tests/faults.py F5 L2      # some

A test that no fault can break proves nothing.  Exit code 1 if a fault goes unseen or its place in
the source is gone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Fault(NamedTuple):
    """``old`` becomes ``new`` in a file below interlace/; then ``tests`` must not pass."""

    report: str
    what: str
    file: str
    old: str
    new: str
    tests: str


FAULTS = [
    Fault("A2", "idle experts get no gradient instead of zeros", "train/optim.py",
          "torch.zeros_like(parameter) if grad is None else grad",
          "grad if grad is not None and grad.any() else None", "test_masking.py -k idle"),
    Fault("A2", "router cut off from the main loss", "model/moe.py",
          "ep.combine(rows_RD, scores_TK, plan)", "ep.combine(rows_RD, scores_TK.detach(), plan)",
          "test_masking.py -k idle"),
    Fault("B1", "batches that do not split pass", "train/config.py",
          "if batch % parts:", "if False:", "test_config.py -k mistake"),
    Fault("B7", "the length of a batch is not looked at", "train/engine.py",
          "if batch.tokens_BS.shape != (t.local_batch_size, t.seq_len):", "if False:",
          "test_masking.py -k lengths"),
    Fault("D1", "no check before the update", "train/engine.py",
          "if not health.is_finite(outcome.loss, outcome.grad_norm):", "if False:",
          "test_health.py -k trace"),
    Fault("D1", "only the norm is checked, not the loss", "train/engine.py",
          "health.is_finite(outcome.loss, outcome.grad_norm)",
          "health.is_finite(outcome.grad_norm, outcome.grad_norm)", "test_health.py -k trace"),
    Fault("D3", "NaN gradients become zeros", "train/engine.py",
          "    local = health.look(", "    [g.nan_to_num_() for g in grads.values()]\n"
          "    local = health.look(", "test_health.py test_masking.py -k 'trace or real_nan'"),
    Fault("E1", "a norm of its own on each rank", "train/norms.py",
          "_gathered(_power_sum(experts, norm_type, device), expert_group)",
          "_gathered(_power_sum(experts, norm_type, device), None)", "test_health.py -k mesh"),
    Fault("E2", "squares of ranks averaged", "train/norms.py",
          "return powers.sum().pow", "return powers.mean().pow",
          "test_norms.py -k 'added or layout'"),
    Fault("E5", "expert gradients EP times too large", "train/engine.py",
          "    norm = global_norm(", "    [grads[n].mul_(world.ep_size) for n in "
          "engine.expert_names]\n    norm = global_norm(", "test_masking.py -k every_layout"),
    Fault("E9", "each rank divides by its own labels", "train/engine.py",
          "    sum_over_ranks([totals], world, None)\n", "", "test_masking.py -k every_layout"),
    Fault("E9", "mean of the means of microbatches", "train/engine.py",
          "cross_entropy_sum(model, hidden_BSD, labels_BS) / num_valid",
          "cross_entropy_sum(model, hidden_BSD, labels_BS) / (\n"
          "        (labels_BS != IGNORED).sum().clamp(min=1) * (12 // len(labels_BS)))",
          "test_masking.py -k labels"),
    Fault("F1", "tokens counted twice", "model/router.py",
          "== experts_E).sum(dim=0)", "== experts_E).sum(dim=0) * 2",
          "test_masking.py -k count_once"),
    Fault("F3", "bias moved once a microbatch", "train/engine.py",
          "update_expert_bias_(bias_E, counts_E, o.expert_bias_speed)",
          "update_expert_bias_(bias_E, counts_E, o.expert_bias_speed * t.microbatches)",
          "test_masking.py -k bias_moves"),
    Fault("F4", "balance loss a mean over the microbatch", "model/router.py",
          "(share_TE.sum(dim=0) * self.balance_price).sum()",
          "(share_TE.mean(dim=0) * self.balance_price).sum()", "test_masking.py -k split"),
    Fault("F5", "padding is counted", "model/transformer.py",
          "live_BS = positions_BS >= 0", "live_BS = positions_BS >= -1",
          "test_masking.py -k every_layout"),
    Fault("F5", "padding is in the balance loss", "model/router.py",
          "share_TE = share_TE * live_T.unsqueeze(-1)", "pass", "test_masking.py -k even_load"),
    Fault("F6", "evaluation moves a counter", "train/evaluate.py",
          "    return _checked(", "    engine.progress.load_LE = engine.progress.load_LE + 1\n"
          "    return _checked(", "test_evaluate.py -k trace"),
    Fault("I1", "reductions in another order on odd ranks", "train/engine.py",
          "    sum_over_ranks([*dense, *totals], world, None)\n    if world.num_replicas > 1:\n",
          "    late = world.rank % 2\n    if not late:\n"
          "        sum_over_ranks([*dense, *totals], world, None)\n"
          "    if late:\n        sum_over_ranks([g for n, g in grads.items() if n in "
          "engine.expert_names], world, world.replica_group)\n"
          "        sum_over_ranks([*dense, *totals], world, None)\n"
          "    elif world.num_replicas > 1:\n", "test_collective_order.py -k eager"),
    Fault("I5", "a failed process stays alive", "cli.py",
          "            sys.stdout.flush()\n            os._exit(code)",
          "            import time\n            time.sleep(60)\n            os._exit(code)",
          "test_failures.py -k data-0"),
    Fault("L1", "buffers are not saved", "train/checkpoint_state.py",
          "if not name.endswith(DERIVED):", "if False:", "test_checkpoint.py -k lives"),
    Fault("L2", "rank 0's random numbers for all", "train/checkpoint_state.py",
          "torch.set_rng_state(states[f\"rng.{world.rank}.cpu\"])",
          "import torch.distributed as d\n    state = states[f\"rng.{world.rank}.cpu\"]\n"
          "    world.size > 1 and d.broadcast(state, 0)\n    torch.set_rng_state(state)",
          "test_checkpoint.py -k own_random"),
    Fault("L3", "another number of rows a step is not noticed", "train/checkpoint.py",
          "\"rows of a step\": global_batch_rows(c, world),", "",
          "test_checkpoint.py -k another_run"),
    Fault("L4", "the position in the data is lost", "train/state.py",
          "        setattr(progress, name, int(tensors[name]))",
          "        setattr(progress, name, 0 if name == \"step\" else int(tensors[name]))",
          "test_checkpoint.py -k uninterrupted"),
    Fault("L5", "a folder without marker counts", "train/checkpoint_files.py",
          "if match and read_marker(path) is not None:", "if match:",
          "test_checkpoint.py -k 'complete'"),
    Fault("L5", "leftovers are not removed", "train/checkpoint_files.py",
          "if leftover.name.startswith((_PARTIAL, _OLD)):", "if False:",
          "test_checkpoint.py -k kill_at"),
    Fault("L5", "written in place, without the rename", "train/checkpoint_files.py",
          "partial = folder / f\"{_PARTIAL}{_name(step)}\"",
          "partial = folder / f\"{_name(step)}\"", "test_checkpoint.py -k 'kill_at or newest'"),
    Fault("L7", "second moments are not saved", "train/checkpoint_state.py",
          "if isinstance(value, Tensor):\n", "if isinstance(value, Tensor) and key != "
          "\"exp_avg_sq\":\n", "test_checkpoint.py -k lives"),
    Fault("L8", "the schedule restarts", "train/state.py",
          "        setattr(progress, name, int(tensors[name]))",
          "        setattr(progress, name, 0 if name == \"updates\" else int(tensors[name]))",
          "test_checkpoint.py -k rates"),
    Fault("L9", "no moments before the first update", "train/checkpoint_state.py",
          "    fill_moments(engine.optimizer)\n", "", "test_checkpoint.py -k first_update"),
    Fault("L", "a background save reads live memory", "train/checkpoint.py",
          "            tensors, device_type = self._stage(tensors), \"cpu\"",
          "            device_type = \"cpu\"",
          "test_checkpoint.py -k 'uninterrupted and -async'"),
    Fault(
        "C3",
        "bias moves in a skipped step",
        "train/engine.py",
        "        _pass_over(engine, _too_many_rows(engine, outcome.overflow), step)\n",
        "        _pass_over(engine, _too_many_rows(engine, outcome.overflow), step)\n"
        "        biases = [b for n, b in engine.model.named_buffers() if 'expert_bias' in n]\n"
        "        [update_expert_bias_(b, c, 0.1) for b, c in zip(biases, outcome.counts_LE)]\n",
        "test_overflow.py -k skip_leaves",
    ),
    Fault(
        "C3",
        "a skipped step updates the weights",
        "train/engine.py",
        "    if outcome.overflow:\n",
        "    if False:\n",
        "test_overflow.py -k skip_leaves",
    ),
    Fault(
        "C3",
        "redo advances the data",
        "train/engine.py",
        "    engine.runner.rebuild()\n",
        "    engine.runner.rebuild()\n    engine.progress.step += 1\n",
        "test_overflow.py -k 'redo_is and control'",
    ),
    Fault(
        "C3",
        "redo draws other random numbers",
        "train/engine.py",
        "        set_random_state(world.device, start)\n",
        "",
        "test_overflow.py -k 'redo_is and eager'",
    ),
    Fault(
        "C3",
        "redo keeps the graph of the small capacity",
        "train/engine.py",
        "    engine.runner.rebuild()\n",
        "",
        "test_overflow.py -k 'redo_is and control'",
    ),
    Fault(
        "C3",
        "ranks do not agree",
        "train/overflow.py",
        "        dist.all_reduce(worst, op=dist.ReduceOp.MAX)\n",
        "        pass\n",
        "test_overflow.py -k all_ranks_skip",
    ),
    Fault(
        "C3",
        "only the last microbatch's overflow counts",
        "train/microbatches.py",
        "    return torch.maximum(total, other) if name in MAXIMA else total + other",
        "    return total if name in MAXIMA else total + other",
        "test_overflow.py -k all_ranks_skip",
    ),
    Fault(
        "C5",
        "cut rows of the first microbatch alone",
        "train/microbatches.py",
        "    return torch.maximum(total, other) if name in MAXIMA else total + other",
        "    return torch.maximum(total, other) if name in (*MAXIMA, 'cut') else total + other",
        "test_overflow.py -k drop_counts",
    ),
    Fault(
        "C5",
        "drop mode is silent at the end",
        "train/report.py",
        "        if self._routed:\n",
        "        if False:\n",
        "test_overflow.py -k drop_counts",
    ),
    Fault(
        "E9",
        "microbatches divide by their own number",
        "train/microbatches.py",
        "            other = add((*part, number), result.grads)\n",
        "            other = add((*part, number * 1.5), result.grads)\n",
        "test_microbatches.py -k one_by_one",
    ),
    Fault(
        "K",
        "sums in half precision",
        "train/microbatches.py",
        "grads.pop(name).to(torch.float32, copy=True, ",
        "grads.pop(name).to(copy=True, dtype=None, ",
        "test_microbatches.py -k 'one_by_one and eager'",
    ),
    Fault(
        "K3",
        "a stale address is not noticed",
        "capture.py",
        "        check_addresses(self.addresses, self.state())\n",
        "",
        "test_capture.py -k moved",
    ),
    Fault(
        "K4",
        "a replay keeps the inputs of the capture",
        "capture.py",
        "            place.copy_(new)\n",
        "            pass\n",
        "test_capture.py -k 'replays_train and -captured'",
    ),
    Fault(
        "K3",
        "the counts of the last replay are overwritten",
        "capture.py",
        "        extra = {name: x.clone() for name, x in result.extra.items()}\n",
        "        extra = result.extra\n",
        "test_capture.py -k small_stays",
    ),
    Fault(
        "K6",
        "groups go before graphs",
        "train/world.py",
        '    close_all()\n    close_windows()\n    drop_group("ep")',
        '    close_windows()\n    close_all()\n    drop_group("ep")',
        "test_capture.py -k forgotten",
    ),
    Fault(
        "K6",
        "after an error the graph waits",
        "train/loop.py",
        "engine.close(wait=kind is None)",
        "engine.close()",
        "test_capture.py -k go_before",
    ),
    Fault(
        "K5",
        "evaluation with the small capacity",
        "train/loop.py",
        "    with overflow.room_for_all(engine.model):\n",
        "    if True:\n",
        "test_overflow.py -k evaluation",
    ),
    Fault(
        "B7",
        "one graph for every length",
        "capture.py",
        "        layout = layout_of(batch)\n",
        "        layout = ()\n",
        "test_capture.py -k 'lengths and captured'",
    ),
]  # fmt: skip


def seen(fault: Fault) -> str:
    """How the tests answer the fault: "seen" and by which test, or what is wrong."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary)
        for name in ("interlace", "tests"):
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, ignore=ignore)
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, copy / name)
        path = copy / "interlace" / fault.file
        source = path.read_text()
        if source.count(fault.old) != 1:
            return f"STALE: found {source.count(fault.old)} times in {fault.file}"
        path.write_text(source.replace(fault.old, fault.new))
        command = f"{sys.executable} -m pytest -x -q -p no:cacheprovider --tb=no " + " ".join(
            f"tests/{part}" if part.endswith(".py") else part for part in fault.tests.split(" ")
        )
        done = subprocess.run(
            command, shell=True, cwd=copy, capture_output=True, text=True, timeout=400
        )
    if done.returncode == 1:
        lines = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
        return f"seen  {lines[0].removeprefix('FAILED tests/')[:110]}"
    return "NOT SEEN" if done.returncode == 0 else f"BROKEN:\n{done.stdout[-2000:]}{done.stderr}"


def main() -> int:
    chosen = [f for f in FAULTS if not sys.argv[1:] or f.report in sys.argv[1:]]
    bad = 0
    for fault in chosen:
        answer = seen(fault)
        bad += not answer.startswith("seen")
        print(f"{fault.report:4}{fault.what:50}{answer}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} faults are seen")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
