"""Properties of every router: one live replica for each request, none for a draining one, no other randomness."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_core.routing import ROUTERS
from scheduler_core.routing.dispatcher import Dispatcher
from scheduler_core.routing.snapshot import ReplicaRole, ReplicaSnapshot, ReplicaStatus, RequestView
from tests.scheduler_core.routing.helpers import item, replica, router, running

NAMES = sorted(ROUTERS)
#: New requests go to prefill replicas alone where the phases are separated.
ROLES = {"disaggregated": ReplicaRole.PREFILL}


class World:
    """A dispatcher with replicas that keep what they are given."""

    def __init__(self, name: str, replicas: Sequence[str], seed: int = 0) -> None:
        self.dispatcher = Dispatcher(router(name, seed))
        self.role = ROLES.get(name, ReplicaRole.BOTH)
        self.held: dict[str, dict[str, RequestView]] = {}
        self.drained_at: dict[str, int] = {}
        for one in replicas:
            self.join(one)

    def join(self, name: str) -> None:
        self.dispatcher.joined(name, self.role)
        self.held[name] = {}

    def snapshots(self) -> dict[str, ReplicaSnapshot]:
        status = self.dispatcher.replicas
        return {
            name: replica(name, *views.values(), blocks=4000, status=status[name], role=self.role)
            for name, views in self.held.items()
        }

    def dispatch(self, *names: str, now: float = 0.0, tiers: Sequence[int] = (0, 1, 2, 3, 4)) -> list[str]:
        for number, name in enumerate(names):
            blocks = tuple(range(number % 3, number % 3 + 4))
            self.dispatcher.arrived(item(name, tier=tiers[number % len(tiers)], prefix_blocks=blocks))
        return self.dispatch_pending(now)

    def dispatch_pending(self, now: float = 0.0) -> list[str]:
        """Dispatches pending requests; the replicas run them at once."""
        assignments = self.dispatcher.dispatch(self.snapshots(), now)
        for one, replica_id in assignments:
            name = one.request.request_id
            self.held[replica_id][name] = running(name, 1, tier=one.tier)
        return [replica_id for _, replica_id in assignments]


@pytest.mark.parametrize("name", NAMES)
def test_without_an_active_replica_requests_wait(name: str) -> None:
    world = World(name, [])
    assert world.dispatch("r1", "r2") == []
    assert world.dispatcher.num_pending == 2
    world.join("late")
    assert world.dispatch_pending(3.0) == ["late", "late"]
    world = World(name, ["a", "b"])
    world.held["a"] = {"x": running("x", 1), "y": running("y", 1)}
    world.held["b"] = {"z": running("z", 1)}
    for one in "ab":
        world.dispatcher.draining(one)
    expected = ["b"] if name == "llumnix" else []  # the least loaded one
    assert world.dispatch("r") == expected
    assert world.dispatcher.num_pending == 1 - len(expected)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(
    events=st.lists(st.sampled_from(["add", "finish", "abort", "drain", "fail", "join"]), max_size=40),
    seed=st.integers(0, 3),
)
def test_the_same_generator_gives_the_same_choices(name: str, events: list[str], seed: int) -> None:
    assert _play(name, events, seed) == _play(name, events, seed)


def _play(name: str, events: Sequence[str], seed: int) -> list[tuple[str, str]]:
    """Plays the events; checks at each that nothing is lost, and that draining replicas get nothing."""
    world = World(name, ["n0", "n1"], seed)
    events_seen: list[tuple[str, str]] = []
    live: set[str] = set()
    for number, event in enumerate(events):
        now = float(number)
        placed = sorted(one for held in world.held.values() for one in held)
        active = [one for one, status in world.dispatcher.replicas.items() if status is ReplicaStatus.ACTIVE]
        if event == "add":
            live.add(f"r{number}")
            events_seen += [
                (event, where) for where in world.dispatch(f"r{number}", now=now, tiers=[number % 5])
            ]
        elif event in ("finish", "abort") and placed:
            where = world.dispatcher.replica_of(placed[0])
            assert where is not None
            del world.held[where][placed[0]]
            live.discard(placed[0])
            if event == "finish":
                world.dispatcher.finished(placed[0], now)
            else:
                assert world.dispatcher.aborted(placed[0], now) == where
        elif event == "drain" and active:
            world.dispatcher.draining(active[0])
        elif event == "fail" and world.held:
            gone = next(iter(world.held))
            world.dispatcher.failed(gone, now)
            del world.held[gone]
        elif event == "join":
            world.join(f"n{number + 2}")
        draining = {
            one: set(world.held[one])
            for one, status in world.dispatcher.replicas.items()
            if status is ReplicaStatus.DRAINING
        }
        events_seen += [("settled", where) for where in world.dispatch_pending(now)]
        if name != "llumnix":
            assert all(set(world.held[one]) == held for one, held in draining.items())
        here = [one for held in world.held.values() for one in held]
        assert len(here) == len(set(here)), "a request is on two replicas"
        assert len(here) + world.dispatcher.num_pending == len(live), "a request is lost"
    return events_seen


@pytest.mark.parametrize("name", NAMES)
def test_a_request_that_fits_nowhere_keeps_waiting_and_holds_nobody_up(name: str) -> None:
    world = World(name, ["a"])
    world.dispatcher.arrived(item("huge", tier=0, prompt=16 * 4000))
    assert world.dispatch("small") == ["a"]
    assert world.dispatcher.num_pending == 1
    assert world.dispatcher.aborted("huge", 1.0) is None


def test_routers_know_their_names() -> None:
    assert {kind.name for kind in ROUTERS.values()} == set(ROUTERS)
