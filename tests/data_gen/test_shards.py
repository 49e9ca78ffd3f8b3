"""When records are synced; what is on the disk is looked at by test_runs.py and test_durability.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from data_gen.runs import RunStoppedError
from data_gen.runs.shards import ShardWriter, shard_paths, start_timer


class Alarm:
    """A timer that goes off when it is told to."""

    def __init__(self, due: float, function: Callable[[], None]) -> None:
        self.due = due
        self.function: Callable[[], None] | None = function

    def cancel(self) -> None:
        self.function = None


class Clock:
    """Time that stands still until it is moved; every alarm that becomes due goes off in its turn."""

    def __init__(self) -> None:
        self.now = 100.0
        self.alarms: list[Alarm] = []

    def __call__(self) -> float:
        return self.now

    def timer(self, seconds: float, function: Callable[[], None]) -> Alarm:
        alarm = Alarm(self.now + seconds, function)
        self.alarms.append(alarm)
        return alarm

    @property
    def waiting(self) -> list[Alarm]:
        return [alarm for alarm in self.alarms if alarm.function is not None]

    def move(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [alarm for alarm in self.waiting if alarm.due <= end]:
            alarm = min(due, key=lambda alarm: alarm.due)
            function, alarm.function = alarm.function, None
            self.now = alarm.due
            assert function is not None
            function()
        self.now = end


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the shards whenever one was synced."""
    sizes: list[int] = []
    fsync = os.fsync

    def recorded(handle: int) -> None:
        if os.path.isfile(f"/proc/self/fd/{handle}"):
            sizes.append(os.fstat(handle).st_size)
        fsync(handle)

    monkeypatch.setattr("data_gen.runs.shards.os.fsync", recorded)
    return sizes


def writer(folder: Path, clock: Clock, *, max_bytes: int = 1000, sync_interval_s: float = 5.0) -> ShardWriter:
    return ShardWriter(
        folder, max_bytes=max_bytes, sync_interval_s=sync_interval_s, clock=clock, timer=clock.timer
    )


def test_the_last_records_before_a_pause_are_synced_too(
    tmp_path: Path, clock: Clock, synced: list[int]
) -> None:
    shards = writer(tmp_path, clock)
    shards.append(b"one\n")
    clock.move(2)
    shards.append(b"two\n")
    clock.move(2.9)
    assert synced == []
    clock.move(0.2)
    assert synced == [8]
    clock.move(1000)
    assert synced == [8], "nothing new, nothing to do"
    assert clock.waiting == []
    shards.append(b"three\n")
    clock.move(5)
    assert synced == [8, 14]
    shards.close()


def test_nothing_waits_longer_than_the_interval_however_records_come(
    tmp_path: Path, clock: Clock, synced: list[int]
) -> None:
    shards = writer(tmp_path, clock, max_bytes=200)
    written_at: list[float] = []
    synced_at: list[float] = []
    for number in range(300):
        before = len(synced)
        shards.append(b"0123456789\n")
        written_at.append(clock.now)
        synced_at += [clock.now] * (len(written_at) - len(synced_at)) * (len(synced) > before)
        for _ in range(1 + number % 9):
            before = len(synced)
            clock.move(0.9)
            synced_at += [clock.now] * (len(written_at) - len(synced_at)) * (len(synced) > before)
        assert len(clock.waiting) <= 1
    # What is seen after a step happened within it.
    assert len(synced_at) >= 295
    assert max(end - start for start, end in zip(written_at, synced_at, strict=False)) <= 5.0 + 0.9


def test_an_interval_of_zero_syncs_every_record_and_needs_no_timer(
    tmp_path: Path, clock: Clock, synced: list[int]
) -> None:
    shards = writer(tmp_path, clock, sync_interval_s=0.0)
    shards.append(b"one\n")
    shards.append(b"two\n")
    assert synced == [4, 8]
    assert clock.alarms == []


def test_a_closed_writer_leaves_no_timer_behind(tmp_path: Path, clock: Clock, synced: list[int]) -> None:
    shards = writer(tmp_path, clock)
    shards.append(b"one\n")
    (alarm,) = clock.waiting
    late = alarm.function
    assert late is not None
    shards.close()
    assert clock.waiting == []
    assert synced == [4]
    late()
    assert synced == [4], "a timer that went off at the same moment finds nothing to do"


def test_what_a_timer_meets_is_told_by_the_next_call(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in ("append", "close"):
        folder = tmp_path / call
        folder.mkdir()
        shards = writer(folder, clock)
        shards.append(b"one\n")
        with monkeypatch.context() as patch:

            def broken(handle: int) -> None:
                raise OSError(5, "Input/output error")

            patch.setattr("data_gen.runs.shards.os.fsync", broken)
            clock.move(6)
        with pytest.raises(RunStoppedError, match="Input/output error"):
            shards.append(b"two\n") if call == "append" else shards.close()
        shards.close()
        (path,) = shard_paths(folder)
        assert path.read_bytes() == b"one\n"


def test_the_real_timer_calls_once_and_can_be_cancelled() -> None:
    import threading

    called = threading.Event()
    start_timer(0.0, called.set)
    assert called.wait(30)
    never = threading.Event()
    timer = start_timer(3600.0, never.set)
    timer.cancel()
    assert not never.is_set()
