"""Windows: memory of one rank that every rank of its group has mapped and may write.

Legend: W ranks of a group.

How memory is mapped follows from the group and the device:

single, loopback   W references to this rank's own buffer: what rank 0 would write at rank r is what
                   rank r writes at rank 0.
CPU processes      a file in shared memory, without a name once every rank has opened it.
CUDA, one GPU each torch's symmetric memory (NVLink).
CUDA, GPUs shared  CUDA IPC handles, because symmetric memory refuses two ranks on one device.
                   INTERLACE_EP_MAPPING=ipc or =symmetric chooses for all, read when a group opens
                   its first window.

Rows start at multiples of 16 bytes, so that every row can be written in 16-byte pieces: where a row
is no such multiple, ``mine`` and ``peers`` are strided views.
"""

from __future__ import annotations

import os
import socket
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interlace import _compat
from interlace.ep.transport import Group

ALIGN_BYTES = 16
MAPPINGS = ("ipc", "symmetric")
_Key = tuple[Any, ...]


@dataclass(frozen=True)
class Windows:
    """One buffer at every rank.

    Shapes: mine and each of peers (rows, width), rows 16-byte aligned; ``peers[rank]`` is ``mine``;
            addresses (W,) int64 on the device: where each rank's buffer starts in this process.
    """

    mine: Tensor
    peers: tuple[Tensor, ...]
    addresses: Tensor
    rank: int


_open: dict[_Key, Windows] = {}
_mapping: dict[str, str] = {}  # by group, for CUDA
_poison = False


def open_windows(
    group: Group, key: str, rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> Windows:
    """The windows of that name and shape; zero when new.

    ``key`` names purpose and buffer set, such as ``minimal_async.dispatch.3``.  Windows belong to a
    group's name: close them before that name gets other ranks.
    Sync:   the first use is a collective over the group's plan communicator and may wait for the
            device; later uses cost a look-up.
    Raises: ValueError where ranks ask for different shapes, for a group that cannot be mapped, and
            for a first use under CUDA graph capture.
    """
    known = (group.name, key, group.kind, group.size, rows, width, dtype, device)
    if known not in _open:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"window {key!r} of group {group.name!r} ({rows} x {width} {dtype}) is not open, "
                "and ranks cannot meet inside a CUDA graph; run the step once before capturing it."
            )
        _open[known] = _map(group, key, rows, width, dtype, device)
    return _open[known]


def close_windows(group_name: str | None = None) -> None:
    """Forgets the windows of a group, or of all; call it before process groups are destroyed.

    Nothing may be in flight.  Memory goes back once no rank has it mapped.
    """
    for known in [k for k in _open if group_name in (None, k[0])]:
        del _open[known]
    for name in [n for n in _mapping if group_name in (None, n)]:
        del _mapping[name]


def opened(prefix: str = "") -> list[tuple[str, str, Windows]]:
    """(group name, key, windows) of every open window whose key begins so, in opening order."""
    return [(k[0], k[1], w) for k, w in _open.items() if k[1].startswith(prefix)]


def poison_on_reuse(*, enabled: bool) -> None:
    """For tests: whoever frees a window fills it with NaN first, see :func:`release`."""
    global _poison
    _poison = enabled


def release(windows: Windows) -> None:
    """Marks the contents of my buffer as dead, before peers are told that they may overwrite it."""
    if _poison and windows.mine.is_floating_point():
        windows.mine.fill_(float("nan"))


def _map(
    group: Group, key: str, rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> Windows:
    unit = ALIGN_BYTES // dtype.itemsize
    stride = -(-width // unit) * unit
    num_bytes = max(rows * stride * dtype.itemsize, ALIGN_BYTES)  # nothing maps zero bytes

    def shaped(memory: Tensor) -> Tensor:
        return memory.view(dtype)[: rows * stride].view(rows, stride)[:, :width]

    if group.kind in ("single", "loopback"):
        mine = shaped(torch.zeros(num_bytes, dtype=torch.uint8, device=device))
        peers = (mine,) * group.size
    elif group.kind == "process":
        _agree(group, key, (rows, width, str(dtype), device.type))
        memory = _share(group, num_bytes, device)
        peers = tuple(shaped(m) for m in memory)
        mine = peers[group.rank]
    else:
        raise ValueError(
            f"exchange group {group.name!r} has sizes only and cannot map memory; it serves "
            "tracing and planning. Use loopback or start the processes."
        )
    addresses = torch.tensor([p.data_ptr() for p in peers], dtype=torch.int64).to(device)
    return Windows(mine, peers, addresses, group.rank)


def _gather(group: Group, value: Any) -> list[Any]:
    import torch.distributed as dist

    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.counts_group or group.process_group)
    return values


def _agree(group: Group, key: str, mine: tuple[Any, ...]) -> None:
    found = _gather(group, (key, *mine))
    if len(set(found)) > 1:
        shown = "; ".join(f"rank {r}: {v}" for r, v in enumerate(found))
        raise ValueError(
            f"ranks of group {group.name!r} open different windows (key, rows, width, type, "
            f"device): {shown}. Give each rank the same tokens and settings."
        )


def _share(group: Group, num_bytes: int, device: torch.device) -> list[Tensor]:
    """The memory of every rank as bytes, in rank order, zeroed."""
    if device.type == "cpu":
        return _share_file(group, num_bytes)
    if group.name not in _mapping:
        _mapping[group.name] = _choose_mapping(group, device)
    if _mapping[group.name] == "symmetric":
        carrier = group.process_group
        assert carrier is not None
        memory = _compat.symmetric_memory(num_bytes, device, carrier)
        memory[group.rank].zero_()
    else:
        mine = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
        handles = _gather(group, _compat.share_handle(mine))
        memory = [
            mine if r == group.rank else _compat.open_handle(handle, device)
            for r, handle in enumerate(handles)
        ]
    torch.cuda.synchronize(device)  # zeroed before any peer may write
    _gather(group, None)
    return memory


def _share_file(group: Group, num_bytes: int) -> list[Tensor]:
    """Raises the same on every rank where one has no room, or the ranks are on several hosts."""
    path, problem = "", ""
    try:
        path = _new_file(num_bytes)
    except ValueError as error:
        problem = str(error)
    try:
        found = _gather(group, (path, problem, socket.gethostname()))
        for rank, (_, theirs, _) in enumerate(found):
            if theirs:
                raise ValueError(f"rank {rank} of group {group.name!r}: {theirs}")
        _refuse_several_hosts(group, {host for _, _, host in found})
        memory = [
            torch.from_file(p, shared=True, size=num_bytes, dtype=torch.uint8) for p, _, _ in found
        ]
        _gather(group, None)  # every rank has it open
    finally:
        if path:
            os.unlink(path)
    return memory


def _refuse_several_hosts(group: Group, hosts: set[str]) -> None:
    if len(hosts) > 1:
        raise ValueError(
            f"ranks of group {group.name!r} are on {len(hosts)} hosts ({', '.join(sorted(hosts))}) "
            "and cannot map each other's memory. Use ep.backend=alltoall there, or keep "
            "expert-parallel ranks on one host."
        )


def _new_file(num_bytes: int) -> str:
    """A file with its space reserved: to run out of it later would end the process.

    In memory where there is room; containers often have little.
    """
    for folder in ("/dev/shm", tempfile.gettempdir()):
        if not os.access(folder, os.W_OK):
            continue
        handle, path = tempfile.mkstemp(prefix=f"interlace.{os.getpid()}.", dir=folder)
        try:
            os.posix_fallocate(handle, 0, num_bytes)
            return path
        except OSError:
            os.unlink(path)
        finally:
            os.close(handle)
    raise ValueError(
        f"a window of {num_bytes} bytes fits neither in /dev/shm nor in {tempfile.gettempdir()}; "
        "lower ep.capacity_factor or the number of tokens, or set TMPDIR to a folder with room."
    )


def _choose_mapping(group: Group, device: torch.device) -> str:
    wanted = os.environ.get("INTERLACE_EP_MAPPING", "")
    if wanted and wanted not in MAPPINGS:
        raise ValueError(
            f"INTERLACE_EP_MAPPING={wanted!r}: expected {' or '.join(MAPPINGS)}, or nothing."
        )
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    found = _gather(group, (socket.gethostname(), uuid, wanted))
    hosts, wishes = {h for h, _, _ in found}, {w for _, _, w in found}
    _refuse_several_hosts(group, hosts)
    if len(wishes) > 1:
        raise ValueError(
            f"INTERLACE_EP_MAPPING differs between ranks of group {group.name!r}: "
            f"{', '.join(sorted(map(repr, wishes)))}. Set it alike for all."
        )
    distinct = len({(h, u) for h, u, _ in found}) == group.size
    return wanted or ("symmetric" if distinct else "ipc")
