"""The loss on data that does not train; the run goes on as if it had not happened.

Nothing is written: no counter, bias, moment or gradient, and random numbers are put back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from interlace.model.batch import IGNORED
from interlace.model.loss import cross_entropy_sum
from interlace.model.transformer import MoETransformer
from interlace.train import watch
from interlace.train.data import Data
from interlace.train.engine import DTYPES, Engine, sum_over_ranks
from interlace.train.stopping import StepRefused


@dataclass(frozen=True)
class Evaluation:
    """Mean cross entropy over all tokens with a label, of all ranks; ``num_tokens`` of them."""

    loss: float
    num_tokens: int


class _Loss(nn.Module):
    """The model with its loss, so that the parameters stay swapped for both."""

    def __init__(self, model: MoETransformer) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens_BS: Tensor, labels_BS: Tensor, positions_BS: Tensor, cu_seqlens_BC: Tensor
    ) -> tuple[Tensor, Tensor]:
        hidden_BSD, routed = self.model(tokens_BS, positions_BS, cu_seqlens_BC)
        return cross_entropy_sum(self.model, hidden_BSD, labels_BS), routed.overflow_L


@torch.no_grad()
def evaluate(engine: Engine, data: Data, *, held_out: bool) -> Evaluation:
    """The loss over ``evaluation.batches`` batches, the same ones each time.

    ``held_out``: of the rows that ``data`` keeps out of its epochs, else its first ones.
    Raises: ValueError on every rank where no token has a label; StepRefused for rows that did not
            fit a capacity.
    """
    config, world = engine.config, engine.world
    t, device = config.training, engine.world.device
    watch.enter("an evaluation", engine.progress.step)
    devices = [device] if device.type == "cuda" else []
    loss = torch.zeros((), dtype=torch.float64, device=device)
    num_valid = torch.zeros((), dtype=torch.int64, device=device)
    overflow = torch.zeros((), dtype=torch.int64, device=device)
    rows, total_rows = t.local_batch_size // t.microbatches, t.local_batch_size * world.size
    with torch.random.fork_rng(devices):
        weights = _cast_weights(engine)
        module = _Loss(engine.model)
        for index in range(config.evaluation.batches):
            begin = t.local_batch_size * world.rank
            if held_out:
                batch = data.held_out_rows(index * total_rows + begin, t.local_batch_size)
            else:
                batch = data.rows(
                    index, global_batch_rows=total_rows, first=begin, count=t.local_batch_size
                )
            for part in zip(*(x.split(rows) for x in batch.tensors()), strict=True):
                tensors = tuple(x.to(device) for x in part)
                one, missing_L = functional_call(module, weights, tensors, tie_weights=False)
                loss += one
                num_valid += (tensors[1] != IGNORED).sum()
                overflow += missing_L.sum()
    sum_over_ranks([loss, num_valid, overflow], world, None)
    return _checked(float(loss), int(num_valid), int(overflow), data.name)


def _checked(loss: float, num_valid: int, overflow: int, name: str) -> Evaluation:
    if overflow:
        raise StepRefused(
            f"evaluation: {overflow} rows did not fit ep.capacity_factor; use a larger one or none."
        )
    if not num_valid:
        raise ValueError(
            f"evaluation on {name}: no token of evaluation.batches has a label; use more batches "
            f"or another evaluation.source."
        )
    return Evaluation(loss / num_valid, num_valid)


def _cast_weights(engine: Engine) -> dict[str, Tensor]:
    """Parameters in the type that the step computes in, once for all batches."""
    dtype = DTYPES[engine.config.training.dtype]
    return {
        f"model.{name}": p.detach() if name.endswith("router.gate") else p.detach().to(dtype)
        for name, p in engine.model.named_parameters()
    }
