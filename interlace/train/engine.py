"""One training step of one configuration: compute, agree over the ranks, apply.

The loop and the verification share this file, so that what is proven is what trains.

Legend: L MoE layers, E experts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Set
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from interlace import ep
from interlace.capture import random_state, set_random_state
from interlace.ep.backend import get_backend
from interlace.ep.signals import check_timeouts, limit_waits
from interlace.ep.windows import close_windows
from interlace.model import build_model, cross_entropy_sum, init_weights
from interlace.model.batch import IGNORED, PADDING, Batch
from interlace.model.transformer import MoETransformer
from interlace.schedule import agree_on_order
from interlace.trace import Step, StepResult, Traced
from interlace.train import config as settings
from interlace.train import health, overflow, watch
from interlace.train.arms import Arm, ForwardBackward, Runner, Working, chunking_of
from interlace.train.balance import set_prices_, update_expert_bias_
from interlace.train.config import Config
from interlace.train.data import Data
from interlace.train.data_open import open_training_data
from interlace.train.norms import clip_factor, global_norm
from interlace.train.optim import build_optimizer, learning_rate, set_learning_rate, update
from interlace.train.state import Progress
from interlace.train.stopping import StepRefused, StopRequest
from interlace.train.world import World, gather, timeout_seconds

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Engine:
    """What a run owns: model, data, optimizer, and the function that computes a batch.

    That is ``forward_backward``; the ``runner`` behind it owns graphs, so :meth:`close` an engine
    before process groups go.
    """

    config: Config
    world: World
    model: MoETransformer
    data: Data
    optimizer: torch.optim.Optimizer
    forward_backward: ForwardBackward
    runner: Runner
    expert_names: frozenset[str]
    num_nodes: int | None  # of the graph; None when there is none
    notes: tuple[str, ...] = ()  # what passes have to tell the user
    progress: Progress = field(default_factory=Progress)
    stop: StopRequest = field(default_factory=StopRequest)

    def close(self, *, wait: bool = True) -> None:
        """Lets go of captured graphs; ``wait`` for their work, but not after an error."""
        self.runner.close(wait=wait)


@dataclass(frozen=True)
class Outcome:
    """A step before its update, the same on every rank but for the experts' gradients.

    ``loss`` (with the balance loss, if there is one) and ``grad_norm`` are 0-d float32 on the
    device; ``counts_LE`` int64 are the tokens of all ranks without padding; ``num_valid`` tokens
    had a label.  ``overflow``: rows that did not fit, for a step that is to be left out.
    ``cut_L`` int64: rows that ran as zeros, by MoE layer, of all ranks and microbatches; None
    unless such steps are wanted.  ``stop``: a rank was asked to end the run after this step.
    """

    loss: Tensor
    grads: dict[str, Tensor]
    grad_norm: Tensor
    counts_LE: Tensor
    num_valid: int
    num_tokens: int
    data_seconds: float
    local: health.Local
    balance: Tensor | None = None
    overflow: int = 0
    cut_L: Tensor | None = None
    stop: bool = False


def build_exchange(config: Config, world: World) -> ep.Exchange:
    """Registers this world's exchange group and describes it to the model."""
    group = ep.get_group("single")
    limit_waits(timeout_seconds(config, world))
    if world.ep_size > 1:
        kind = "loopback" if world.loopback else "process"
        carrier = world.exchange_group or world.ep_group
        counts = world.counts_group
        group = ep.Group("ep", world.ep_size, world.ep_rank, kind, carrier, counts)
        ep.register_group(group)
    return exchange_over(group, config)


def exchange_over(group: ep.Group, config: Config) -> ep.Exchange:
    """The exchange that the settings ask for, over a group."""
    e = config.ep
    return ep.Exchange(
        group.name,
        group.size,
        group.rank,
        e.backend,
        e.padded,
        e.capacity_factor,
        reduce=e.reduce,
        scores_at=e.scores_at,
    )


def step_of(model: MoETransformer, config: Config) -> Step:
    """What one microbatch computes, for eager and traced execution alike."""
    return Step(
        model,
        partial(microbatch_loss, count_cut=config.ep.overflow == "drop"),
        compute_dtype=DTYPES[config.training.dtype],
        keep=lambda name: name.endswith("router.gate"),  # routing is float32 throughout
    )


def microbatch_loss(
    model: MoETransformer,
    tokens_BS: Tensor,
    labels_BS: Tensor,
    positions_BS: Tensor,
    cu_seqlens_BC: Tensor,
    num_valid: Tensor,
    *,
    count_cut: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This microbatch's share of the step's loss: the sum over its labels / all valid labels.

    ``num_valid`` (float32, 0-d) counts the labels of every microbatch of every rank, so shares add
    up to the mean over tokens however the batch is split.  The balance loss is a sum over tokens
    at prices that hold its divisor.
    """
    hidden_BSD, routed = model(tokens_BS, positions_BS, cu_seqlens_BC)
    loss = cross_entropy_sum(model, hidden_BSD, labels_BS) / num_valid
    extra = {"counts": routed.counts_LE, "overflow": routed.overflow_L}
    if count_cut:  # a sum over microbatches, where the overflow is their largest
        extra["cut"] = routed.overflow_L.to(torch.int64)
    if routed.balance is None:
        return loss, extra
    return loss + routed.balance, extra | {"balance": routed.balance}


def build_engine(
    config: Config, world: World, arm: Arm, working: Working = lambda what: nullcontext()
) -> Engine:
    """Builds everything from the configuration's seed, to run as ``arm``."""
    exchange = build_exchange(config, world)
    with working(f"building {config.model.name}"):
        with world.device:
            model = build_model(config.model, exchange)
        init_weights(model, config.debug.seed, exchange)
    with working(f"reading data ({config.data.source})"):
        data = open_training_data(config, world)
    o = config.optimizer
    optimizer = build_optimizer(
        model.named_parameters(),
        name=o.name,
        lr=o.lr,
        betas=(o.beta1, o.beta2),
        eps=o.eps,
        weight_decay=o.weight_decay,
    )
    t = config.training
    rows = t.local_batch_size // t.microbatches

    def agreed(traced: Traced) -> None:
        if world.size > 1:  # ranks that would launch in another order than their peers hang
            agree_on_order(traced.gm)

    runner = Runner(arm, step_of(model, config), config, rows, working, agreed)
    runner.prepare(_example(config, world.device))
    traced = runner.traced
    num_nodes = None if traced is None else len(traced.gm.graph.nodes)
    notes = tuple(note for r in (traced.reports if traced else ()) for note in r.notes)
    return Engine(
        config,
        world,
        model,
        data,
        optimizer,
        runner,
        runner,
        frozenset(model.expert_parameters()),
        num_nodes,
        notes,
    )


def _example(config: Config, device: torch.device) -> tuple[Tensor, ...]:
    """Tensors with the shapes of a rank's batch; a trace does not read their values."""
    t = config.training
    shape = (t.local_batch_size, t.seq_len)
    zeros = torch.zeros(shape, dtype=torch.int64, device=device)
    bounds = torch.zeros(
        (shape[0], config.data.max_documents + 1), dtype=torch.int32, device=device
    )
    batch = Batch(zeros, zeros.clone(), zeros.clone(), bounds)
    return (*batch.tensors(), torch.ones((), device=device))


def compute(engine: Engine, step: int) -> Outcome:
    """Forward and backward of all microbatches of this step, summed over microbatches and ranks.

    Raises: StepRefused on every rank if a capacity overflowed anywhere.
    """
    t, world, device = engine.config.training, engine.world, engine.world.device
    began = time.perf_counter()
    watch.enter("reading data", step)
    batch = engine.data.rows(
        step,
        global_batch_rows=t.local_batch_size * world.size,
        first=t.local_batch_size * world.rank,
        count=t.local_batch_size,
    )
    if batch.tokens_BS.shape != (t.local_batch_size, t.seq_len):
        rows, length = batch.tokens_BS.shape
        raise ValueError(
            f"step {step + 1}: the data gave {rows} sequences of {length} tokens, but the step is "
            f"built for training.local_batch_size={t.local_batch_size} of training.seq_len="
            f"{t.seq_len}; pad or cut them to that."
        )
    num_valid, num_live = (batch.labels_BS != IGNORED).sum(), (batch.positions_BS != PADDING).sum()
    watch.enter("the count of tokens over all ranks", step)
    totals = torch.stack((num_valid, num_live, torch.tensor(int(engine.stop.requested))))
    totals = totals.to(device) if world.backend == "nccl" else totals
    sum_over_ranks([totals], world, None)
    num_valid, num_live, num_stops = totals.unbind()
    data_seconds = time.perf_counter() - began

    watch.enter("forward and backward", step)
    weight, o = engine.config.model.balance_loss_weight, engine.config.optimizer
    if weight:
        left_out = settings.unbalanced_layers(o)
        set_prices_(engine.model, engine.progress.load_LE, num_live, weight, left_out)
    denominator = num_valid.clamp(min=1).to(device, torch.float32)
    inputs = tuple(x.to(device, non_blocking=True) for x in batch.tensors())
    result, missing = _run(engine, (*inputs, denominator), step)
    loss, grads, counts = result.loss, result.grads, result.extra["counts"]
    balance, cut = result.extra.get("balance"), result.extra.get("cut")
    watch.enter("the sum of gradients over ranks", step)
    local = health.look(summed(grads, engine.expert_names, world), loss)
    totals = [x for x in (loss, counts, balance, cut) if x is not None]
    sum_gradients_(grads, engine.expert_names, world, totals)
    norm = global_norm(
        grads, engine.expert_names, expert_group=world.ep_group, norm_type=o.norm_type
    )
    return Outcome(
        loss,
        grads,
        norm,
        counts,
        int(num_valid),
        batch.tokens_BS.numel() * world.size,
        data_seconds,
        local,
        balance,
        missing,
        cut,
        bool(num_stops),
    )


def _run(engine: Engine, inputs: tuple[Tensor, ...], step: int) -> tuple[StepResult, int]:
    """Forward and backward of the batch, and the rows for which the step is to be left out.

    With ``ep.overflow`` redo as often as it takes until all rows fit: every time is as the first,
    with more room.
    Raises: StepRefused on every rank, as the settings say.
    """
    e, world = engine.config.ep, engine.world
    start = random_state(world.device) if e.overflow == "redo" else ()
    while True:
        result = engine.forward_backward(inputs)
        if get_backend(e.backend).owns_buffers:
            check_timeouts()
        exchange = overflow.exchange_of(engine.model)
        if e.overflow == "drop" or not exchange.padded or not exchange.capacity_factor:
            return result, 0
        missing = overflow.agree(result.extra["overflow"], world)
        if not missing or e.overflow == "skip":
            return result, missing
        text = overflow.describe(exchange, missing, _load(engine))
        if e.overflow == "error":
            advice = overflow.advice(exchange, missing, _load(engine))
            raise StepRefused(
                f"{text}; no rank has changed a weight. {advice}, or ep.overflow=redo."
            )
        del result  # its memory, before the step is built again
        _make_room(engine, exchange, missing, f"step {step + 1}: {text}")
        watch.enter("forward and backward, again with more room", step)
        set_random_state(world.device, start)


def _make_room(engine: Engine, exchange: ep.Exchange, missing: int, text: str) -> None:
    """A larger capacity on every rank; whatever was built for the smaller one goes."""
    watch.enter("more room for the exchange", engine.progress.step)
    factor = overflow.enough(exchange, missing, _load(engine))
    engine.runner.rebuild()
    close_windows(exchange.group)
    overflow.set_exchange(engine.model, replace(exchange, capacity_factor=factor))
    if engine.world.is_main:
        room = "every token" if factor is None else f"ep.capacity_factor={factor:g}"
        print(f"{text}; done again with room for {room}", file=sys.stderr, flush=True)


def _load(engine: Engine) -> overflow.Load:
    """What one exchange carries; with chunks a part of a microbatch."""
    c = engine.config
    chunking = chunking_of(c, at_least=2) if engine.runner.arm.chunked else None
    tokens = settings.microbatch_tokens(c) // (chunking.num_chunks if chunking else 1)
    return overflow.Load(tokens, c.model.top_k, c.model.num_experts)


def apply(engine: Engine, outcome: Outcome, step: int) -> float | None:
    """Clips, updates the parameters and the experts' bias; returns the learning rate used.

    A step that is not finite, or is to be left out for its rows, changes nothing on any rank; where
    the settings say skip, this returns None.
    Raises: StepRefused on every rank for such a step otherwise.
    """
    o, s, t = engine.config.optimizer, engine.config.lr_scheduler, engine.config.training
    watch.enter("the update of the weights", step)
    if outcome.overflow:
        _pass_over(engine, _too_many_rows(engine, outcome.overflow), step)
        return None
    if not health.is_finite(outcome.loss, outcome.grad_norm):
        _pass_over(engine, _faults(engine, outcome), step, may_stop=True)
        return None
    factor = clip_factor(outcome.grad_norm, o.max_norm) if o.max_norm else None
    lr = learning_rate(
        engine.progress.updates,
        base=o.lr,
        warmup_steps=s.warmup_steps,
        total_steps=t.steps,
        min_factor=s.min_lr_factor,
    )
    set_learning_rate(engine.optimizer, lr)
    update(engine.optimizer, engine.model.named_parameters(), outcome.grads, factor)
    if o.expert_bias_speed:
        biases = [b for n, b in engine.model.named_buffers() if n.endswith("expert_bias")]
        left_out = settings.unbalanced_layers(o)
        pairs = zip(biases, outcome.counts_LE, strict=bool(biases))
        for layer, (bias_E, counts_E) in enumerate(pairs):
            if layer not in left_out:
                update_expert_bias_(bias_E, counts_E, o.expert_bias_speed)
    engine.progress.applied(outcome.counts_LE)
    return lr


def _faults(engine: Engine, outcome: Outcome) -> str:
    """Where a step that is not finite went wrong; the same on all ranks."""
    world = engine.world
    num_local = engine.config.model.num_experts // world.ep_size
    first = world.ep_rank * num_local
    mine = health.my_faults(outcome.local, outcome.grads, engine.expert_names, world.rank, first)
    faults = [fault for part in gather(mine, world) for fault in part]
    return health.describe(faults, outcome.loss.item(), outcome.grad_norm.item())


def _too_many_rows(engine: Engine, missing: int) -> str:
    return overflow.describe(overflow.exchange_of(engine.model), missing, _load(engine))


def _pass_over(engine: Engine, text: str, step: int, *, may_stop: bool = False) -> None:
    """Raises, or counts a skipped step, as the settings say; the same on all ranks."""
    t, progress = engine.config.training, engine.progress
    progress.passed_over()
    text = f"step {step + 1}: {text}; weights, moments, expert bias and schedule are untouched"
    if may_stop and t.nonfinite == "stop":
        raise StepRefused(
            f"{text}. Lower optimizer.lr={engine.config.optimizer.lr}, look at the data, or set "
            f"training.nonfinite=skip."
        )
    if progress.skipped_in_a_row >= t.max_skipped_steps:
        cause = f"lower optimizer.lr={engine.config.optimizer.lr}"
        raise StepRefused(
            f"{text}. It was the last of training.max_skipped_steps={t.max_skipped_steps} such "
            f"steps in a row; resume from an earlier checkpoint or "
            f"{cause if may_stop else 'set ep.overflow=redo'}."
        )
    if engine.world.is_main:
        print(f"{text}; skipped", file=sys.stderr, flush=True)


def summed(grads: dict[str, Tensor], experts: Set[str], world: World) -> dict[str, Tensor]:
    """The gradients that :func:`sum_gradients_` sums over ranks."""
    if world.size == 1:
        return {}
    return {n: g for n, g in grads.items() if world.num_replicas > 1 or n not in experts}


def sum_gradients_(
    grads: dict[str, Tensor], experts: Set[str], world: World, totals: Iterable[Tensor] = ()
) -> None:
    """Sums dense gradients over all ranks, the experts' over those that hold the same ones.

    In float32, whatever type they come in; ``totals`` are summed over all ranks beside them.
    """
    if world.size == 1:
        return
    grads.update({n: g.float() for n, g in summed(grads, experts, world).items()})
    dense = [g for n, g in grads.items() if n not in experts]
    sum_over_ranks([*dense, *totals], world, None)
    if world.num_replicas > 1:
        own = [g for n, g in grads.items() if n in experts]
        sum_over_ranks(own, world, world.replica_group)


def sum_over_ranks(tensors: Iterable[Tensor], world: World, group: Any) -> None:
    """Sums in place, one all-reduce a dtype: few large messages instead of one a parameter."""
    if world.size == 1:
        return
    import torch.distributed as dist

    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        flat = torch.cat([x.reshape(-1) for x in same])
        dist.all_reduce(flat, group=group)
        for tensor, part in zip(same, flat.split([x.numel() for x in same]), strict=True):
            tensor.copy_(part.view_as(tensor))
