"""Windows that every rank writes, and the signals that say when."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from interlace.ep import signals, windows
from interlace.ep.transport import Group
from interlace.ep.windows import close_windows, open_windows, opened

CPU = torch.device("cpu")
LOOPBACK = Group("mirror", 4, 0, "loopback")


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_windows()


def test_one_process_maps_itself() -> None:
    w = open_windows(LOOPBACK, "a", 5, 3, torch.bfloat16, CPU)
    assert w.mine.shape == (5, 3)
    assert w.mine.stride() == (8, 1)  # rows of 6 bytes start at multiples of 16
    assert w.mine.data_ptr() % 16 == 0
    assert len(w.peers) == 4
    assert all(p is w.mine for p in w.peers)
    assert w.addresses.tolist() == [w.mine.data_ptr()] * 4
    assert not w.mine.any()
    assert open_windows(LOOPBACK, "a", 5, 8, torch.bfloat16, CPU).mine.is_contiguous()


def test_windows_are_told_apart_by_name_and_shape() -> None:
    first = open_windows(LOOPBACK, "a", 5, 3, torch.float32, CPU)
    assert open_windows(LOOPBACK, "a", 5, 3, torch.float32, CPU) is first
    other = Group("mirror", 2, 0, "loopback")
    for group, key, rows in ((LOOPBACK, "b", 5), (LOOPBACK, "a", 6), (other, "a", 5)):
        assert open_windows(group, key, rows, 3, torch.float32, CPU) is not first
    single = open_windows(Group("single", 1, 0, "single"), "a", 0, 3, torch.float32, CPU)
    assert single.mine.shape == (0, 3)
    assert [key for _, key, _ in opened("b")] == ["b"]
    close_windows("mirror")
    assert [group for group, _, _ in opened()] == ["single"]


def test_poison_is_for_tests_only() -> None:
    floats = open_windows(LOOPBACK, "a", 2, 3, torch.float32, CPU)
    numbers = open_windows(LOOPBACK, "a", 2, 3, torch.int64, CPU)
    windows.release(floats)
    assert not floats.mine.any()
    windows.poison_on_reuse(enabled=True)
    try:
        windows.release(floats)
        windows.release(numbers)
    finally:
        windows.poison_on_reuse(enabled=False)
    assert floats.mine.isnan().all()
    assert not numbers.mine.any()


def test_a_group_without_processes_is_refused() -> None:
    with pytest.raises(ValueError, match="'paper' has sizes only and cannot map memory"):
        open_windows(Group("paper", 2, 0, "abstract"), "a", 1, 1, torch.float32, CPU)


def _group(rank: int, size: int) -> Group:
    return Group("ep", size, rank, "process", dist.group.WORLD)


def _write_everywhere(rank: int, size: int, rows: int) -> tuple[list, int]:
    w = open_windows(_group(rank, size), "a", rows, 3, torch.float32, CPU)
    for peer in w.peers:
        peer[rank] = 10 + rank
    dist.barrier()
    found, names = w.mine[:, 0].tolist(), os.listdir("/dev/shm")
    dist.barrier()
    close_windows()
    return found, sum(name.startswith(f"interlace.{os.getpid()}.") for name in names)


def test_every_rank_writes_every_window(two_ranks) -> None:
    """And no file is left behind, whatever happens to the processes later."""
    assert two_ranks.run(_write_everywhere, 2) == [([10.0, 11.0], 0)] * 2


def test_space_for_a_window_is_reserved(monkeypatch, tmp_path) -> None:
    """Not in memory where there is no room; nowhere, if there is none at all."""
    real, tried = os.posix_fallocate, []

    def full(handle: int, start: int, size: int) -> None:
        tried.append(size)
        if len(tried) != 2:
            raise OSError(errno.ENOSPC, "full")
        real(handle, start, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(windows.tempfile, "gettempdir", lambda: str(tmp_path))
    path = windows._new_file(100)
    assert os.path.dirname(path) == str(tmp_path)
    assert os.path.getsize(path) == 100
    os.unlink(path)
    with pytest.raises(ValueError, match=r"a window of 100 bytes fits neither in /dev/shm nor in"):
        windows._new_file(100)
    assert not os.listdir(tmp_path)


def _full(*_: int) -> None:
    raise OSError(errno.ENOSPC, "full")


def _no_room(rank: int, size: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(os, "posix_fallocate", _full)
        try:
            open_windows(_group(rank, size), "b", 5, 3, torch.float32, CPU)
        except ValueError as error:
            return str(error)
    return "no error"


def test_no_room_on_one_rank_is_told_on_all(two_ranks) -> None:
    for message in two_ranks.run(_no_room):
        assert message.startswith("rank 1 of group ")
        assert "a window of 80 bytes fits neither in" in message


def _disagree(rank: int, size: int) -> str:
    try:
        open_windows(_group(rank, size), "a", 5 + rank, 3, torch.float32, CPU)
    except ValueError as error:
        return str(error)
    return "no error"


def test_ranks_that_disagree_are_named(two_ranks) -> None:
    for message in two_ranks.run(_disagree):
        assert "rank 0: ('a', 5, 3, 'torch.float32', 'cpu'); rank 1: ('a', 6, 3," in message


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([("h", "u0", ""), ("h", "u1", "")], "symmetric"),
        ([("h", "u0", ""), ("h", "u0", "")], "ipc"),
        ([("h", "u0", "ipc"), ("h", "u1", "ipc")], "ipc"),
        ([("h", "u0", ""), ("g", "u1", "")], r"are on 2 hosts \(g, h\)"),
        ([("h", "u0", "ipc"), ("h", "u1", "")], "INTERLACE_EP_MAPPING differs .* '', 'ipc'"),
    ],
)
def test_how_cuda_memory_is_mapped(monkeypatch, found, expected) -> None:
    monkeypatch.setattr(windows, "_gather", lambda group, value: found)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="u0")
    )
    monkeypatch.setenv("INTERLACE_EP_MAPPING", found[0][2])
    choose = lambda: windows._choose_mapping(_Two, torch.device("cuda", 0))  # noqa: E731
    if expected in windows.MAPPINGS:
        assert choose() == expected
        return
    with pytest.raises(ValueError, match=expected):
        choose()


_Two = Group("ep", 2, 0, "loopback")


def test_an_unknown_mapping_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("INTERLACE_EP_MAPPING", "pigeon")
    with pytest.raises(ValueError, match=r"'pigeon': expected ipc or symmetric, or nothing"):
        windows._choose_mapping(_Two, torch.device("cuda", 0))


# --- signals


def test_alone_nobody_is_waited_for() -> None:
    channel = signals.open_signals(LOOPBACK, "x", CPU)
    for step in (signals.announce, signals.await_ready, signals.publish, signals.await_arrival):
        step(channel)
    signals.enter(channel)
    signals.deliver(channel)
    signals.meet(channel)
    assert channel.state.tolist() == [3, 0, 0, 0]
    assert signals.open_signals(LOOPBACK, "y", CPU).halted.data_ptr() == channel.halted.data_ptr()
    signals.check_timeouts()


def _ping(rank: int, size: int, rounds: int) -> list[float]:
    """What rank 0 finds in its window, which rank 1 writes between the two waits."""
    group = _group(rank, size)
    w = open_windows(group, "data", 1, 1, torch.float32, CPU)
    channel = signals.open_signals(group, "data", CPU)
    found = []
    for i in range(rounds):
        signals.enter(channel)
        for peer in w.peers:
            peer[0, 0] = i if rank == 1 else peer[0, 0]
        signals.deliver(channel)
        if rank == 0:
            time.sleep(0.002)  # rank 1 is ready for the next round long before
        found.append(w.mine.item())
    dist.barrier()
    close_windows()
    return found


def test_rounds_keep_apart(two_ranks) -> None:
    assert two_ranks.run(_ping, 50) == [[float(i) for i in range(50)]] * 2


def _missing_peer(rank: int, size: int) -> str:
    channel = signals.open_signals(_group(rank, size), "x", CPU)
    message, before = "", signals.TIMEOUT_SECONDS["cpu"]
    signals.TIMEOUT_SECONDS["cpu"] = 0.1
    try:
        if rank == 0:
            signals.enter(channel)
    except RuntimeError as error:
        message = str(error)
    finally:
        signals.TIMEOUT_SECONDS["cpu"] = before
    dist.barrier()
    close_windows()
    return message


def test_a_rank_that_does_not_come_is_named(two_ranks) -> None:
    message, _ = two_ranks.run(_missing_peer)
    assert message == (
        "rank 0 waited 0.1 s in x for rank 1 (at 0) to announce epoch 1; that rank has stopped, "
        "runs another program, or had a step cut short: then ep.reset on all ranks."
    )


def test_marks_of_the_device_are_told() -> None:
    channel = signals.open_signals(Group("single", 1, 0, "single"), "minimal_async.combine.3", CPU)
    channel.state[signals.EPOCH] = 7
    channel.state[signals.ERROR] = 2 + 2 * 5
    with pytest.raises(
        RuntimeError,
        match=r"timed out: rank 0 of group 'single' waited for rank 5 to publish in "
        r"minimal_async.combine.3 \(epoch 7\)",
    ):
        signals.check_timeouts()


def test_delays_have_known_places() -> None:
    with pytest.raises(ValueError, match="unknown step 'lunch'; one of announce, await_ready"):
        signals.delay("lunch", 1.0)


@pytest.mark.gpu
def test_epochs_go_on_over_replays() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    channel = signals.open_signals(LOOPBACK, "x", device)
    signals.enter(channel)
    signals.deliver(channel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        signals.enter(channel)
        signals.deliver(channel)
        signals.meet(channel)
    for _ in range(10):
        graph.replay()
    signals.meet(channel)
    assert channel.state[signals.EPOCH].item() == 22
    signals.check_timeouts()


@pytest.mark.gpu
def test_a_kernel_gives_up_and_says_so(monkeypatch) -> None:
    """Two ranks of which one is missing; all later waits return at once, on other channels too."""
    device = torch.device("cuda", torch.cuda.current_device())

    def of_two(key: str) -> signals.Signals:
        alone = signals.open_signals(Group("single", 1, 0, "single"), key, device)
        mine, peers, addresses = (getattr(alone.windows, n) for n in ("mine", "peers", "addresses"))
        twice = windows.Windows(mine, peers * 2, addresses.repeat(2), rank=0)
        return replace(alone, windows=twice, size=2)

    channel, other = of_two("x"), of_two("y")
    monkeypatch.setitem(signals.TIMEOUT_SECONDS, "cuda", 0.05)
    start = time.monotonic()
    for _ in range(20):
        signals.enter(channel)
        signals.deliver(other)
    torch.cuda.synchronize()
    assert time.monotonic() - start < 20 * 0.05
    with pytest.raises(RuntimeError, match=r"waited for rank 1 to announce in x \(epoch \d+\)\. "):
        signals.check_timeouts()
    close_windows()


@pytest.mark.gpu
def test_nothing_is_opened_under_capture() -> None:
    device = torch.device("cuda", torch.cuda.current_device())

    something = torch.zeros(1, device=device)

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            something.add_(1)  # torch warns of empty graphs
            open_windows(LOOPBACK, "late", 1, 1, torch.float32, device)

    with pytest.raises(ValueError, match=r"'late' .* is not open, and ranks cannot meet inside"):
        capture()
