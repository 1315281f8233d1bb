"""Who this process is among its peers: rank, device, process groups.

One process needs no launcher and no torch.distributed; several read torchrun's variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from interlace.capture import close_all, set_allocator
from interlace.ep.nvidia_buffers import close_buffers
from interlace.ep.transport import drop_group
from interlace.ep.windows import close_windows
from interlace.train.config import Config
from interlace.train.config_check import check

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TIMEOUT_SECONDS = {"cpu": 60, "cuda": 600}


@dataclass(frozen=True)
class World:
    """This process's place.  Groups are None where they would have one member.

    ``ep_size`` consecutive ranks exchange tokens: ``exchange_group`` carries the rows,
    ``counts_group`` their numbers, ``ep_group`` everything else among them.  ``replica_group``
    joins the ranks that hold the same experts, one of each EP group.  In loopback ``ep_size`` ranks
    are virtual: this process is rank 0 of them and there is no group.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str  # "gloo", "nccl", or "none" for one process
    ep_rank: int
    ep_size: int
    loopback: bool = False
    ep_group: ProcessGroup | None = None
    exchange_group: ProcessGroup | None = None
    counts_group: ProcessGroup | None = None
    replica_group: ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process speaks for all: rank 0."""
        return self.rank == 0

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return 1 if self.loopback else self.size // self.ep_size


def world_size_of(environment: Mapping[str, str]) -> int:
    """The number of processes that a launcher announced; 1 without one."""
    return _number(environment, "WORLD_SIZE", 1)


def init_world(config: Config) -> World:
    """Join the other processes, if there are any.

    Raises: ValueError for settings that cannot run here, before any communication.
    """
    size = world_size_of(os.environ)
    rank = _number(os.environ, "RANK", 0)
    local_rank = _number(os.environ, "LOCAL_RANK", rank)
    local_size = _number(os.environ, "LOCAL_WORLD_SIZE", size)
    check(config, size)
    if torch.version.cuda:
        set_allocator()  # before CUDA starts
    device = _pick_device(config.training.device, local_rank)
    _set_threads(device, local_size)
    degree, loopback = config.parallelism.expert_parallel_degree, _is_loopback(config)
    world = World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        device=device,
        backend="none" if size == 1 else _pick_backend(device, local_size),
        ep_rank=0 if loopback else rank % degree,
        ep_size=degree,
        loopback=loopback,
    )
    return world if size == 1 else _join(world, config)


def timeout_seconds(config: Config, world: World) -> int:
    """How long a rank waits for its peers."""
    return config.comm.timeout_seconds or TIMEOUT_SECONDS[world.device.type]


def close_world(world: World) -> None:
    """Leave all process groups.  Only after success: with a dead peer this may wait for it.

    Captured graphs go first, for they hold communicators and write into peers' windows; then the
    windows, which groups map; then the groups.
    """
    close_all()
    close_windows()
    close_buffers()
    drop_group("ep")  # the engine's registration; its process group ends below
    if world.size == 1:
        return
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()  # the subgroups with it


def gather(value: Any, world: World) -> list[Any]:
    """Everybody's value, in rank order; a collective."""
    if world.size == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value)
    return values


def _is_loopback(config: Config) -> bool:
    degree = config.parallelism.expert_parallel_degree
    return config.ep.transport == "loopback" and degree > 1


def _join(world: World, config: Config) -> World:
    """The same world with its process groups, made by all ranks in the same order."""
    import torch.distributed as dist

    if not dist.is_available():
        raise ValueError(
            f"the world size is {world.size}, but this build of torch has no torch.distributed; "
            f"run one process with parallelism.expert_parallel_degree=1."
        )
    timeout = timedelta(seconds=timeout_seconds(config, world))
    dist.init_process_group(
        world.backend,
        timeout=timeout,
        rank=world.rank,
        world_size=world.size,
        device_id=world.device if world.backend == "nccl" else None,
    )
    ep_group = replica_group = None
    exchange_group = counts_group = None
    if world.ep_size > 1:
        for first in range(0, world.size, world.ep_size):
            ranks = list(range(first, first + world.ep_size))
            # The exchange shares no communicator with anything else: a reduction would queue behind
            # its rows, and the counts of one chunk behind the rows of another.
            groups = [
                dist.new_group(ranks, timeout=timeout, group_desc="ep"),
                dist.new_group(
                    ranks, timeout=timeout, group_desc="exchange", pg_options=_urgent(world)
                ),
                dist.new_group(
                    ranks, timeout=timeout, group_desc="counts", pg_options=_urgent(world)
                ),
            ]
            if world.rank in ranks:
                ep_group, exchange_group, counts_group = groups
    if world.num_replicas > 1:
        for first in range(world.ep_size):
            ranks = list(range(first, world.size, world.ep_size))
            group = dist.new_group(ranks, timeout=timeout, group_desc="expert replicas")
            replica_group = group if world.rank in ranks else replica_group
    return replace(
        world,
        ep_group=ep_group,
        exchange_group=exchange_group,
        counts_group=counts_group,
        replica_group=replica_group,
    )


def _urgent(world: World) -> Any:
    """NCCL options for a high-priority stream; other backends have none."""
    if world.backend != "nccl":
        return None
    from torch.distributed import ProcessGroupNCCL

    return ProcessGroupNCCL.Options(is_high_priority_stream=True)


def _pick_device(wanted: str, local_rank: int) -> torch.device:
    found = torch.cuda.is_available()
    if wanted == "cuda" and not found:
        raise ValueError(
            f"training.device=cuda, but torch {torch.__version__} sees no CUDA device; use "
            f"training.device=cpu, and ask `interlace doctor` for the reason."
        )
    if wanted == "cpu" or not found:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _pick_backend(device: torch.device, local_size: int) -> str:
    """NCCL refuses two processes on one GPU; gloo carries CUDA tensors through the host."""
    shared = device.type == "cuda" and local_size > torch.cuda.device_count()
    return "gloo" if device.type == "cpu" or shared else "nccl"


def _set_threads(device: torch.device, local_size: int) -> None:
    """Processes that share the cores must not each start a thread on every one."""
    if device.type == "cpu" and local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, num_cores() // local_size))


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name)
    if text is None:
        return default
    if not text.isdecimal():
        raise ValueError(f"the environment variable {name}={text!r} is not a whole number.")
    return int(text)
