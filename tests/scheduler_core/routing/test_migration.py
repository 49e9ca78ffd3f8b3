"""Live migration: its stages by hand, and every way in which it can end."""

from __future__ import annotations

import pytest

from scheduler_core.errors import InputError
from scheduler_core.routing.migration import Holding, MigrationError, Migrations
from scheduler_core.routing.moves import Aborted, AbortReason, Committed, Copy, Move
from tests.scheduler_core.routing.kv_replica import KvReplica

MOVE = Move("r", "a", "b")


def pair(prompt: int = 38, *, prefilled: bool = True, room: int = 40, seats: int = 4) -> dict[str, KvReplica]:
    """Request r runs on a with 38 tokens in blocks of 4: 10 blocks, the last half full; b has room."""
    source, destination = KvReplica(40), KvReplica(room, seats=seats)
    source.add("r", prompt)
    assert source.admit("r", prefilled=prefilled)
    return {"a": source, "b": destination}


def check(sides: dict[str, KvReplica]) -> None:
    for side in sides.values():
        side.validate()


def test_a_request_of_ten_blocks_moves_in_ceil_ten_fourths_stages() -> None:
    """Paper, section 3.5: ceil(10/4) = 3 stages of 4, 4 and 2 blocks; only in the last one the request is stopped."""
    sides = pair()
    migrations = Migrations(sides, stage_blocks=4)
    assert migrations.start(MOVE, 0.0) == Copy(MOVE, 0, 4, live=True)
    assert migrations.copied("r", 0.1) == Copy(MOVE, 4, 4, live=True)
    assert sides["a"].holding("r") is Holding.DECODING
    assert not migrations.stopped("r")
    assert migrations.copied("r", 0.2) == Copy(MOVE, 8, 2, live=False)
    assert migrations.stopped("r")
    assert (sides["a"].holding("r"), sides["b"].holding("r")) == (Holding.NOTHING, Holding.NOTHING)
    assert migrations.copied("r", 0.3) == Committed(MOVE, num_stages=3, num_blocks=10)
    assert sides["b"].holding("r") is Holding.DECODING
    assert (sides["a"].kv.num_free_blocks, sides["b"].kv.num_free_blocks) == (40, 30)
    assert migrations.in_flight == frozenset()
    check(sides)


def test_what_is_generated_meanwhile_is_copied_too() -> None:
    """9 tokens during the first two copies: 47 tokens are 12 blocks, so the last stage copies 4."""
    sides = pair()
    migrations = Migrations(sides, stage_blocks=4)
    migrations.start(MOVE, 0.0)
    sides["a"].generate("r", 5)
    assert migrations.copied("r", 0.1) == Copy(MOVE, 4, 4, live=True)
    sides["a"].generate("r", 4)
    assert migrations.copied("r", 0.2) == Copy(MOVE, 8, 4, live=False)
    assert migrations.copied("r", 0.3) == Committed(MOVE, 3, 12)
    assert sides["b"].running["r"].num_output_tokens == 9
    check(sides)


def test_all_at_once_stops_the_request_for_the_whole_copy() -> None:
    sides = pair()
    migrations = Migrations(sides, stage_blocks=None)
    assert migrations.start(MOVE, 0.0) == Copy(MOVE, 0, 10, live=False)
    assert migrations.copied("r", 1.0) == Committed(MOVE, 1, 10)
    check(sides)


def test_a_waiting_request_changes_its_queue_at_once() -> None:
    sides = pair()
    sides["a"].preempt("r")
    assert Migrations(sides).start(MOVE, 0.0) == Committed(MOVE, 0, 0)
    assert sides["b"].holding("r") is Holding.WAITING
    check(sides)


def test_a_request_in_its_prefill_or_not_there_does_not_move() -> None:
    assert Migrations(pair(prefilled=False)).start(MOVE, 0.0) == Aborted(MOVE, AbortReason.NOT_MOVABLE)
    elsewhere = Move("x", "a", "b")
    assert Migrations(pair()).start(elsewhere, 0.0) == Aborted(elsewhere, AbortReason.NOT_MOVABLE)


@pytest.mark.parametrize("stages", [0, 1, 2])
def test_the_destination_fills_up_before_any_stage(stages: int) -> None:
    """Room for 3, 7 and 9 of 10 blocks: the first, second and third stage find no memory."""
    sides = pair(room=(3, 7, 9)[stages])
    migrations = Migrations(sides, stage_blocks=4)
    found = migrations.start(MOVE, 0.0)
    for _ in range(stages):
        assert isinstance(found, Copy)
        found = migrations.copied("r", 0.1)
    assert found == Aborted(MOVE, AbortReason.DESTINATION_FULL)
    assert sides["a"].holding("r") is Holding.DECODING
    assert sides["b"].kv.num_free_blocks == sides["b"].kv.num_blocks
    check(sides)


def test_a_destination_without_a_seat_is_full() -> None:
    assert Migrations(pair(seats=0)).start(MOVE, 0.0) == Aborted(MOVE, AbortReason.DESTINATION_FULL)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ("on_finished", AbortReason.FINISHED),
        ("on_preempted", AbortReason.PREEMPTED),
        ("on_aborted", AbortReason.ABORTED),
    ],
)
def test_the_request_goes_away_while_it_is_copied(event: str, reason: AbortReason) -> None:
    sides = pair()
    migrations = Migrations(sides, stage_blocks=4)
    migrations.start(MOVE, 0.0)
    if event == "on_preempted":
        sides["a"].preempt("r")
    else:
        sides["a"].drop("r")
    assert getattr(migrations, event)("r", 0.05) == Aborted(MOVE, reason)
    assert getattr(migrations, event)("r", 0.05) is None
    assert sides["a"].kv.num_free_blocks == sides["b"].kv.num_free_blocks == 40
    with pytest.raises(MigrationError, match="not being migrated"):
        migrations.copied("r", 0.1)
    check(sides)


def test_a_user_gives_up_while_the_request_is_stopped() -> None:
    sides = pair()
    migrations = Migrations(sides, stage_blocks=None)
    migrations.start(MOVE, 0.0)
    with pytest.raises(MigrationError, match="stopped for its handover"):
        migrations.on_finished("r", 0.05)
    assert migrations.on_aborted("r", 0.05) == Aborted(MOVE, AbortReason.ABORTED)
    assert sides["a"].kv.num_free_blocks == sides["b"].kv.num_free_blocks == 40
    check(sides)


@pytest.mark.parametrize("stage_blocks", [4, None], ids=["copying", "handover"])
def test_the_destination_drains_and_the_request_stays(stage_blocks: int | None) -> None:
    sides = pair()
    migrations = Migrations(sides, stage_blocks=stage_blocks)
    migrations.start(MOVE, 0.0)
    assert migrations.on_draining("a", 0.05) == (), "who leaves a draining replica goes on leaving"
    assert migrations.on_draining("b", 0.05) == (Aborted(MOVE, AbortReason.DESTINATION_DRAINING),)
    assert sides["a"].holding("r") is Holding.DECODING
    assert sides["b"].kv.num_free_blocks == 40
    check(sides)


@pytest.mark.parametrize("stage_blocks", [4, None], ids=["copying", "handover"])
def test_the_destination_fails_and_the_request_stays(stage_blocks: int | None) -> None:
    sides = pair()
    migrations = Migrations(sides, stage_blocks=stage_blocks)
    migrations.start(MOVE, 0.0)
    del sides["b"]
    assert migrations.on_failed("b", 0.05) == (Aborted(MOVE, AbortReason.DESTINATION_FAILED),)
    assert sides["a"].holding("r") is Holding.DECODING
    check(sides)


@pytest.mark.parametrize("stage_blocks", [4, None], ids=["copying", "handover"])
def test_the_source_fails_and_the_destination_gets_its_memory_back(stage_blocks: int | None) -> None:
    sides = pair()
    migrations = Migrations(sides, stage_blocks=stage_blocks)
    migrations.start(MOVE, 0.0)
    del sides["a"]
    assert migrations.on_failed("a", 0.05) == (Aborted(MOVE, AbortReason.SOURCE_FAILED),)
    assert sides["b"].kv.num_free_blocks == 40
    assert migrations.in_flight == frozenset()
    check(sides)


def test_a_request_that_grows_as_fast_as_it_is_copied_stays() -> None:
    sides = pair()
    migrations = Migrations(sides, stage_blocks=2)
    migrations.start(MOVE, 0.0)
    sides["a"].generate("r", 8)
    assert migrations.copied("r", 0.1) == Aborted(MOVE, AbortReason.STALLED)
    assert sides["b"].kv.num_free_blocks == 40
    check(sides)


def test_calls_that_do_not_belong_here_are_refused() -> None:
    sides = pair()
    migrations = Migrations(sides, stage_blocks=4)
    migrations.start(MOVE, 0.0)
    with pytest.raises(MigrationError, match="already"):
        migrations.start(MOVE, 0.0)
    with pytest.raises(InputError, match="replica"):
        migrations.start(Move("x", "a", "nowhere"), 0.0)
    with pytest.raises(InputError, match="destination"):
        migrations.start(Move("x", "a", "a"), 0.0)
    sides["c"] = KvReplica(40, block_tokens=8)
    with pytest.raises(InputError, match="as many tokens per block"):
        migrations.start(Move("x", "a", "c"), 0.0)
    with pytest.raises(InputError, match="stage_blocks"):
        Migrations(sides, stage_blocks=0)
