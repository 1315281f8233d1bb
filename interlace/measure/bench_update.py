"""The rest of a training step: gradients agreed over ranks, clipped, applied."""

from __future__ import annotations

from collections.abc import Callable

from interlace.model.transformer import MoETransformer
from interlace.trace import StepResult
from interlace.train.config import Config
from interlace.train.engine import sum_gradients_
from interlace.train.norms import clip_factor, global_norm
from interlace.train.optim import build_optimizer, update
from interlace.train.world import World


def build_update(
    model: MoETransformer, config: Config, world: World
) -> Callable[[StepResult], None]:
    """What follows a step's gradients, with a learning rate of 0: it costs what an update costs
    and leaves the weights, so that all arms go on with the same ones.

    Sync: none on the host.  The function is a collective, and changes gradients in place.
    """
    o, experts = config.optimizer, frozenset(model.expert_parameters())
    optimizer = build_optimizer(
        model.named_parameters(),
        name=o.name,
        lr=0.0,
        betas=(o.beta1, o.beta2),
        eps=o.eps,
        weight_decay=o.weight_decay,
    )

    def apply(result: StepResult) -> None:
        grads = dict(result.grads)
        sum_gradients_(grads, experts, world)
        norm = global_norm(grads, experts, expert_group=world.ep_group, norm_type=o.norm_type)
        factor = clip_factor(norm, o.max_norm) if o.max_norm else None
        update(optimizer, model.named_parameters(), grads, factor)

    return apply
