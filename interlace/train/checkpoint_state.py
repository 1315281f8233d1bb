"""The state of a run as named tensors with a global identity.

Legend: E experts, e local experts.

A dense tensor is the same on all ranks and stored once.  An expert tensor (e, ...) is a slice of
the global (E, ...) tensor of its name, moments included, so that it can be read back under any
expert-parallel degree.  All else is per rank (random numbers) or counts.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from interlace.train.engine import Engine
from interlace.train.optim import fill_moments
from interlace.train.state import Progress, progress_tensors, restore_progress
from interlace.train.world import World

DERIVED = ("router.balance_price",)  # buffers that are set before each step


def seed_rank(seed: int, rank: int) -> None:
    """Gives this rank its own stream of random numbers, from the run's seed."""
    digest = hashlib.sha256(f"{seed}/rank {rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def run_tensors(engine: Engine) -> dict[str, Tensor]:
    """Parameters, buffers and moments: the live tensors, by name."""
    model = engine.model
    tensors: dict[str, Tensor] = {f"model.{n}": p.detach() for n, p in model.named_parameters()}
    for name, buffer in model.named_buffers():
        if not name.endswith(DERIVED):
            tensors[f"model.{name}"] = buffer
    fill_moments(engine.optimizer)
    for name, parameter in model.named_parameters():
        for key, value in engine.optimizer.state[parameter].items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def count_tensors(engine: Engine, progress: Progress) -> dict[str, Tensor]:
    """The counts of a run; copies."""
    m = engine.config.model
    tensors = progress_tensors(progress, m.num_moe_layers, m.num_experts)
    return {f"progress.{n}": t.to(engine.world.device, copy=True) for n, t in tensors.items()}


def random_states(world: World) -> dict[str, Tensor]:
    """This rank's generators: the CPU's, and the device's."""
    states = {f"rng.{world.rank}.cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        states[f"rng.{world.rank}.cuda"] = torch.cuda.get_rng_state(world.device)
    return states


def restore_random_states(world: World, states: dict[str, Tensor]) -> None:
    """The inverse of :func:`random_states`."""
    torch.set_rng_state(states[f"rng.{world.rank}.cpu"])
    if world.device.type == "cuda":
        torch.cuda.set_rng_state(states[f"rng.{world.rank}.cuda"], world.device)


def restore_counts(engine: Engine, tensors: dict[str, Tensor]) -> None:
    """The inverse of :func:`count_tensors`."""
    plain = {name.removeprefix("progress."): tensor for name, tensor in tensors.items()}
    restore_progress(engine.progress, plain)


def as_global(engine: Engine, tensors: dict[str, Tensor], device_type: str) -> dict[str, Any]:
    """The same memory, with expert tensors as slices of the global ones.  No communication."""
    world = engine.world
    if world.ep_group is None:
        return dict(tensors)
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if world.replica_group is None:
        mesh = DeviceMesh.from_group(world.ep_group, device_type)
        placements: list[Any] = [Shard(0)]
    else:
        ranks = torch.arange(world.size).view(world.num_replicas, world.ep_size)
        groups = [world.replica_group, world.ep_group]
        names = ("replicas", "ep")
        mesh = DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)
        placements = [Replicate(), Shard(0)]
    return {
        name: DTensor.from_local(tensor, mesh, placements, run_check=False)
        if _is_expert(engine, name, tensor)
        else tensor
        for name, tensor in tensors.items()
    }


def _is_expert(engine: Engine, name: str, tensor: Tensor) -> bool:
    """Whether a tensor has local experts in dimension 0: an expert's weight or a moment of it."""
    kind, _, rest = name.partition(".")
    owner = rest if kind == "model" else rest.rpartition(".")[0]
    return kind in ("model", "optimizer") and owner in engine.expert_names and tensor.dim() > 0
