"""Initial weights that do not depend on how the experts are spread.

Every tensor has a generator of its own, seeded by the run's seed and the parameter's name, and
every expert one seeded by its global index besides.  Equal on all layouts of one device type.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from interlace.ep import Exchange
from interlace.model.transformer import MoETransformer, is_expert_parameter

STD = 0.02
# What attention adds is nearly the same for every token of a text.  Smaller embeddings drown in it,
# and routers then send all tokens to the same experts from the first step on.
EMBEDDING_STD = 1.0
# Projections into the residual stream, of which every layer adds two.
_RESIDUAL = ("attention.out.weight", "w2.weight", "experts.w2")


@torch.no_grad()
def init_weights(model: MoETransformer, seed: int, exchange: Exchange) -> None:
    """Fills every parameter and buffer of a model that has memory.

    Normal with deviation 0.02, embeddings 1; projections into the residual stream have 0.02 divided
    by sqrt(2 * layers); norms are 1 and the expert bias is 0.
    Raises: ValueError for a parameter on the meta device.
    """
    residual_std = STD * (2 * model.config.num_layers) ** -0.5
    for name, weight in model.named_parameters():
        if weight.is_meta:
            raise ValueError(
                f"init_weights: {name} is on the meta device and has no memory; call "
                "model.to_empty(device=...) first, or build the model on a real device."
            )
        std = EMBEDDING_STD if name == "embedding.weight" else STD
        std = residual_std if name.endswith(_RESIDUAL) else std
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
        elif is_expert_parameter(name):
            first = exchange.rank * weight.shape[0]
            for j, expert in enumerate(weight):
                expert.normal_(0.0, std, generator=_generator(seed, f"{name}/{first + j}", expert))
        else:
            weight.normal_(0.0, std, generator=_generator(seed, name, weight))
    for _, buffer in model.named_buffers():
        buffer.zero_()


def _generator(seed: int, name: str, like: Tensor) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    # 63 bits: a generator takes no more.
    return torch.Generator(like.device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
