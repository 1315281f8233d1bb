"""Signals: who may write where, and what has arrived, as epochs in memory that all ranks map.

Legend: W ranks of a group.

A channel belongs to one (kind of exchange, buffer set).  One use of it is

    announce        my buffer is free and my epoch has begun: I raise my epoch, peers see it
    await_ready     until every peer has announced this epoch
    (write into the peers' buffers)
    publish         all that I wrote before is visible once a peer sees this epoch
    await_arrival   until every peer has published this epoch

The announcement is what keeps a fast rank from overwriting what a slow one still reads: that a
message has arrived says nothing about who has read the one before.  Epochs live in device memory
and only grow, so a replayed CUDA graph goes on counting where the last one stopped.

On CUDA each call is one small kernel on the current stream: stores are ``st.release.sys`` behind a
system-scope fence, loads ``ld.acquire.sys``; nothing reads on the host.  A rank that waits too long
gives up: it marks the channel, all later waits of its group return at once, and
:func:`check_timeouts` tells at the step's end.  Between an announcement and what follows no host
work may be needed, for peers spin meanwhile.  On CPU the same protocol polls shared memory, a
reference for tests: it relies on stores becoming visible in program order, as on x86.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from interlace.ep.transport import Group
from interlace.ep.windows import Windows, open_windows, opened
from interlace.kernels.cuda_source import cuda_kernel

READY, ARRIVED, STATE = range(3)  # rows of a channel's window
EPOCH, ERROR = range(2)  # columns of the state
_ANNOUNCE, _AWAIT_READY, _PUBLISH, _AWAIT_ARRIVAL = 1, 2, 4, 8
STEPS = ("announce", "await_ready", "publish", "await_arrival")
POLL_SECONDS = 50e-6
TIMEOUT_SECONDS = {"cpu": 60.0, "cuda": 600.0}
"""How long a wait lasts at most, by device type.  A captured graph keeps what it was made with."""

_delays: dict[str, float] = {}


def limit_waits(seconds: float) -> None:
    """Lets waits that are launched from now on last so long at most, on any device."""
    TIMEOUT_SECONDS.update(cpu=seconds, cuda=seconds)


@dataclass(frozen=True)
class Signals:
    """One channel.  Its window is (3, >= W) int64: flags ``ready`` and ``arrived`` by source rank,
    then this rank's own epoch and error mark.

    ``halted`` is (1,) int64, one for all channels of the group on a device: not 0 once a wait has
    timed out.  ``kernel`` names what is launched.  Plans run on another stream than rows, and a
    report tells the kernels of one name apart by their order on one stream.
    """

    windows: Windows
    key: str
    rank: int
    size: int  # ranks that take part: 1 in loopback, where no peer would answer
    halted: Tensor
    kernel: str = "ep_signal_rows"

    @property
    def state(self) -> Tensor:
        """Epoch and error mark of this rank, (>= 2,) int64 on the device."""
        return self.windows.mine[STATE]


def open_signals(
    group: Group, key: str, device: torch.device, kernel: str = Signals.kernel
) -> Signals:
    """The channel of that name; collective on first use, see :func:`open_windows`."""
    width = max(group.size + group.size % 2, 2)
    windows = open_windows(group, f"signals.{key}", 3, width, torch.int64, device)
    halted = open_windows(group, "halted", 1, 1, torch.int64, device).mine[0]
    size = group.size if group.kind == "process" else 1
    return Signals(windows, key, group.rank, size, halted, kernel)


def announce(signals: Signals) -> None:
    """My buffer of this channel is free and my next epoch has begun."""
    _run(signals, _ANNOUNCE)


def await_ready(signals: Signals) -> None:
    """Until every peer has announced the current epoch: then its buffer may be written."""
    _run(signals, _AWAIT_READY)


def publish(signals: Signals) -> None:
    """What this stream has written before is visible to a peer that sees the current epoch."""
    _run(signals, _PUBLISH)


def await_arrival(signals: Signals) -> None:
    """Until every peer has published the current epoch: then my buffer is complete."""
    _run(signals, _AWAIT_ARRIVAL)


def enter(signals: Signals) -> None:
    """:func:`announce` and :func:`await_ready` in one launch."""
    _run(signals, _ANNOUNCE | _AWAIT_READY)


def deliver(signals: Signals) -> None:
    """:func:`publish` and :func:`await_arrival` in one launch."""
    _run(signals, _PUBLISH | _AWAIT_ARRIVAL)


def meet(signals: Signals) -> None:
    """:func:`announce` and :func:`deliver` in one launch: everything written before has arrived
    everywhere.  For buffers that another channel has freed."""
    _run(signals, _ANNOUNCE | _PUBLISH | _AWAIT_ARRIVAL)


def check_timeouts() -> None:
    """RuntimeError that names every channel on which this rank gave up waiting, and for whom.

    Sync: one read a device; call it where the host waits for the device anyway.
    """
    found = []
    channels = opened("signals.")
    for device in dict.fromkeys(w.mine.device for _, _, w in channels):
        here = [c for c in channels if c[2].mine.device == device]
        errors = torch.stack([w.mine[STATE, ERROR] for _, _, w in here]).tolist()
        found += [_complaint(*here[i], error) for i, error in enumerate(errors) if error]
    if found:
        raise RuntimeError(
            f"the exchange timed out: {'; '.join(found)}. The results of this step are void; that "
            "rank has stopped, runs another program, or had a step cut short: then ep.reset on all."
        )


def _complaint(group: str, key: str, windows: Windows, error: int) -> str:
    peer, what = divmod(error - 1, 2)
    return (
        f"rank {windows.rank} of group {group!r} waited for rank {peer} to "
        f"{('announce', 'publish')[what]} in {key.removeprefix('signals.')} "
        f"(epoch {int(windows.mine[STATE, EPOCH])})"
    )


def delay(where: str, seconds: float) -> None:
    """For tests on CPU: sleep so long after each such step of this process; 0 takes it back."""
    if where not in STEPS:
        raise ValueError(f"delay: unknown step {where!r}; one of {', '.join(STEPS)}.")
    _delays[where] = seconds


def _run(signals: Signals, steps: int) -> None:
    if signals.windows.mine.is_cuda:
        _launch(signals, steps)
        return
    run: tuple[Callable[[Signals], None], ...] = (
        _announce,
        lambda s: _poll(s, READY),
        _publish,
        lambda s: _poll(s, ARRIVED),
    )
    for i, name in enumerate(STEPS):
        if steps & 1 << i:
            run[i](signals)
            if _delays.get(name):
                time.sleep(_delays[name])


# --- the protocol on CPU


def _announce(signals: Signals) -> None:
    signals.state[EPOCH] += 1
    _tell(signals, READY)


def _publish(signals: Signals) -> None:
    _tell(signals, ARRIVED)


def _tell(signals: Signals, row: int) -> None:
    for peer in signals.windows.peers[: signals.size]:
        peer[row, signals.rank] = signals.state[EPOCH]


def _poll(signals: Signals, row: int) -> None:
    epoch, flags = signals.state[EPOCH], signals.windows.mine[row, : signals.size]
    deadline = time.monotonic() + TIMEOUT_SECONDS["cpu"]
    while bool((flags < epoch).any()):
        if time.monotonic() > deadline:
            late = [f"rank {r} (at {int(f)})" for r, f in enumerate(flags) if f < epoch]
            raise RuntimeError(
                f"rank {signals.rank} waited {TIMEOUT_SECONDS['cpu']} s in {signals.key} for "
                f"{', '.join(late)} to {('announce', 'publish')[row]} epoch {int(epoch)}; that "
                "rank has stopped, runs another program, or had a step cut short: then ep.reset "
                "on all ranks."
            )
        time.sleep(POLL_SECONDS)


# --- and on CUDA

# One thread a peer.  All threads read the epoch before the first one raises it.
_SOURCE = r"""
typedef long long i64;

__device__ i64 load_acquire(const i64* p) {
    i64 value;
    asm volatile("ld.acquire.sys.global.s64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
    return value;
}
__device__ void store_release(i64* p, i64 value) {
    asm volatile("st.release.sys.global.s64 [%0], %1;" :: "l"(p), "l"(value) : "memory");
}
__device__ i64 now_ns() {
    i64 value;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value) :: "memory");
    return value;
}
__device__ void spin(
    const i64* flag, i64 epoch, i64* error, i64 mark, i64* halted, i64 timeout_ns)
{
    i64 start = now_ns();
    while (load_acquire(flag) < epoch) {
        if (load_acquire(halted)) return;
        if (now_ns() - start > timeout_ns) {
            store_release(error, mark);
            store_release(halted, 1);
            return;
        }
        __nanosleep(100);
    }
}

extern "C" __global__ void KERNEL(
    const i64* addresses, i64 rank, i64 size, i64 width, i64 steps, i64* halted, i64 timeout_ns)
{
    i64 t = threadIdx.x;
    i64* mine = (i64*)addresses[rank];
    i64* state = mine + 2 * width;
    i64 epoch = state[0];
    if (steps & 1) {
        epoch += 1;
        __syncthreads();
        if (t == 0) state[0] = epoch;
    }
    if (t >= size) return;
    i64* peer = (i64*)addresses[t];
    if (steps & 5) __threadfence_system();
    if (steps & 1) store_release(peer + rank, epoch);
    if (steps & 2) spin(mine + t, epoch, state + 1, 1 + 2 * t, halted, timeout_ns);
    if (steps & 4) store_release(peer + width + rank, epoch);
    if (steps & 8) spin(mine + width + t, epoch, state + 1, 2 + 2 * t, halted, timeout_ns);
}
"""


def _launch(signals: Signals, steps: int) -> None:
    windows = signals.windows
    source = f"#define KERNEL {signals.kernel}\n{_SOURCE}"
    kernel = cuda_kernel(source, signals.kernel, windows.mine.device)
    threads = -(-signals.size // 32) * 32
    timeout_ns = int(TIMEOUT_SECONDS["cuda"] * 1e9)
    kernel.launch(
        1, threads, windows.addresses, signals.rank, signals.size, windows.mine.stride(0), steps,
        signals.halted, timeout_ns,
    )  # fmt: skip
