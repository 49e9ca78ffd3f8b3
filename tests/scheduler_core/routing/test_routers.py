"""What each router looks at, and properties of every one: one live replica for each request, none for a draining one."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_core.lengths import LogT
from scheduler_core.routing import ROUTERS
from scheduler_core.routing.baselines import PowerOfTwo
from scheduler_core.routing.disaggregated import Disaggregated
from scheduler_core.routing.dispatcher import Dispatcher
from scheduler_core.routing.infaas import Infaas
from scheduler_core.routing.migration import Move
from scheduler_core.routing.predicted_work import PredictedWait, PredictedWork
from scheduler_core.routing.prefix_affine import PrefixAffine
from scheduler_core.routing.snapshot import ReplicaRole, ReplicaSnapshot, ReplicaStatus, RequestView
from tests.scheduler_core.routing.helpers import item, predicted, replica, router, running, waiting

NAMES = sorted(ROUTERS)
#: New requests go to prefill replicas alone where the phases are separated.
ROLES = {"disaggregated": ReplicaRole.PREFILL}


def test_round_robin_takes_turns_also_when_replicas_come_and_go() -> None:
    turns = router("round_robin")
    three = [replica(name) for name in "abc"]
    assert [turns.choose(item(), three, 0.0) for _ in range(4)] == ["a", "b", "c", "a"]
    assert turns.choose(item(), [three[0], three[2]], 0.0) == "c", "b, whose turn it was, is gone"
    assert turns.choose(item(), three, 0.0) == "a"


def test_least_kv_counts_blocks_and_what_waits_for_them() -> None:
    """a: 10 of 100 blocks held, 30 waited for: 0.40. b: 30 of 100 held: 0.30. c: 100 of 400 held: 0.25."""
    one = replica("a", running("1", 10), waiting("2", 30))
    two = replica("b", running("3", 30))
    three = replica("c", running("4", 100), blocks=400)
    kv = router("least_kv")
    assert kv.choose(item(), [one, two], 0.0) == "b"
    assert kv.choose(item(), [one, two, three], 0.0) == "c"


def test_power_of_two_joins_the_shorter_of_two_drawn() -> None:
    """Four replicas with 0, 1, 2, 3 requests. The k-th shortest is chosen when it is drawn with a longer one: of the 6
    pairs 3, 2, 1, 0 times. 6,000 draws: 3000, 2000, 1000, 0, standard deviation below 40."""
    pictures = [replica(str(n), *[running(f"{n}{i}", 1) for i in range(n)]) for n in range(4)]
    two = PowerOfTwo(rng=np.random.default_rng(1))
    counts = Counter(two.choose(item(), pictures, 0.0) for _ in range(6000))
    for name, expected in zip("0123", (3000, 2000, 1000, 0), strict=True):
        assert abs(counts[name] - expected) <= 4 * 40
    assert (counts["3"], two.choose(item(), pictures[2:], 0.0)) == (0, "2")


def test_prefix_affine_follows_the_longest_shared_prefix_until_its_replica_is_too_busy() -> None:
    affine = PrefixAffine(imbalance=1)
    empty = [replica("a"), replica("b")]
    first = item("1", prefix_blocks=(1, 2, 3, 4))
    assert affine.choose(first, empty, 0.0) == "a"
    affine.on_dispatched(first, "a", 0.0)
    other = item("2", prefix_blocks=(7, 8))
    affine.on_dispatched(other, "b", 0.0)
    alike = item("3", prefix_blocks=(1, 2, 9, 10))
    assert (affine.hit_blocks(alike, "a"), affine.hit_blocks(alike, "b")) == (2, 0)
    near = [replica("a", running("x", 1)), replica("b")]
    assert affine.choose(alike, near, 0.0) == "a"
    busy = [replica("a", running("x", 1), running("y", 1)), replica("b")]
    assert affine.choose(alike, busy, 0.0) == "b", "two requests ahead are more than the imbalance"
    little = item("5", prefix_blocks=(1, *range(100, 110)))
    assert affine.choose(little, near, 0.0) == "b", "one block of eleven is less than min_fraction"
    affine.on_gone("a", 1.0)
    assert affine.hit_blocks(alike, "a") == 0


def work_s(work: PredictedWork, *views: RequestView) -> float:
    """Work of a replica with these requests, as of a choice."""
    one = replica("a", *views)
    work.choose(item(), [one], 0.0)
    return work.work_s(one)


def test_predicted_work_is_the_sum_of_expected_remaining_work() -> None:
    """One request with 32 tokens to prefill and X ~ log-t(4, 0.5, 3.5), one that has generated 48 of X ~ log-t(3, 0.5,
    3.5), one without a prediction that has generated 16 of 64: (64 - 16 + 1)/2 = 24.5 remain on average."""
    work = PredictedWork(prefill_token_s=0.001, decode_token_s=0.01)
    first = predicted(waiting("1", 2), 4.0)
    second = predicted(running("2", 3, done=48), 3.0)
    third = running("3", 4, done=16)
    left = [float(LogT(4.0, 0.5, 3.5).expected(64)), float(LogT(3.0, 0.5, 3.5).expected(64, 48)), 24.5]
    assert work_s(work, first, second, third) == pytest.approx(0.032 + 0.01 * sum(left), rel=1e-12)


def test_predicted_wait_is_the_time_until_a_slot_is_free() -> None:
    """Two slots each, uniform lengths, so (M - g + 1)/2 remain, in steps.

    a: 8 and 4 remain, then a waiting request of 10 takes the slot that is free at 4: the next one is free at 8. b: 9 and 7
    remain, nothing waits: 7. c has less work than either, but a free slot counts first, whatever its one request has left.
    """
    wait = PredictedWait(refresh_tokens=1)
    a = replica("a", running("1", 1, cap=16), running("2", 1, cap=8), waiting("3", 1, cap=19), max_num_seqs=2)
    b = replica("b", running("4", 1, cap=18), running("5", 1, cap=14), max_num_seqs=2)
    assert wait.choose(item(), [a, b], 0.0) == "b"
    assert (wait._wait(a), wait._wait(b)) == (8.0, 7.0)
    free = replica("c", running("6", 1, cap=60), max_num_seqs=2)
    assert wait.choose(item(), [a, b, free], 0.0) == "c"
    idle = replica("d", max_num_seqs=2)
    assert wait.choose(item(), [free, idle], 0.0) == "d", "fewer requests where slots are free"
    full = replica("e", running("7", 100, cap=60), waiting("8", 1, cap=9), max_num_seqs=2)
    assert wait.choose(item(), [full, b], 0.0) == "b", "its free slot has no memory"


def finish(base: Infaas, replica_id: str, name: str, start_s: float, end_s: float) -> None:
    base.on_dispatched(item(name), replica_id, start_s)
    base.on_finished(name, replica_id, end_s)


def test_infaas_cost_is_queue_plus_service_time_plus_penalty() -> None:
    """Multi-tier paper, Eq. 5, alpha = beta = gamma = 1, target 1 s, EWMA 0.6.

    Service times 2 s, then 1 s: s = 0.6 * 1 + 0.4 * 2 = 1.4 s. With 3 waiting requests and s > 1.3 target the replica is
    OVERLOADED: cost = 3 + 1.4 + 1 = 5.4. With none waiting it is slow for no reason, INTERFERED: 0 + 1.4 + 0.5 = 1.9. A
    replica without any history or request is INACTIVE: 0 + 0 + 2 = 2.
    """
    base = Infaas()
    finish(base, "a", "1", 0.0, 2.0)
    finish(base, "a", "2", 2.0, 3.0)
    crowded = replica("a", *[waiting(f"w{number}", 1) for number in range(3)])
    quiet = replica("b")
    finish(base, "c", "3", 0.0, 1.4)
    slow = replica("c")
    assert base.choose(item(), [crowded, quiet, slow], 3.0) == "c"
    assert (base.cost(crowded), base.cost(quiet)) == (pytest.approx(5.4), pytest.approx(2.0))
    assert base.cost(slow) == pytest.approx(1.9)
    assert [base.health(name) for name in "abc"] == ["overloaded", "inactive", "interfered"]


def test_infaas_keeps_a_bad_state_for_its_hold() -> None:
    base = Infaas()
    finish(base, "a", "1", 0.0, 2.0)
    crowded = replica("a", *[waiting(f"w{number}", 1) for number in range(2)])
    base.choose(item(), [crowded], 2.0)
    for number in range(5):
        finish(base, "a", f"f{number}", 2.0, 2.1)
    seen = []
    for _ in range(5):
        base.choose(item(), [crowded], 3.0)
        seen.append(base.health("a"))
    assert seen == ["overloaded"] * 3 + ["active"] * 2


def test_disaggregated_prefills_where_least_is_left_to_prefill() -> None:
    split = Disaggregated()
    busy = replica("p1", waiting("1", 10), role=ReplicaRole.PREFILL)
    many = replica("p2", *[waiting(f"s{number}", 1) for number in range(5)], role=ReplicaRole.PREFILL)
    assert split.choose(item(), [busy, many], 0.0) == "p2", "5 short prompts are less work than a long one"


def test_disaggregated_moves_processed_prompts_to_the_emptiest_decode_replica_with_room() -> None:
    """d1 holds 70 of 100 blocks, d2 50 of 100. The first prompt (20 blocks) goes to d2, then both stand at 70; the
    second (15 blocks) goes to d1, the earlier one. The third needs 40 blocks: no room anywhere, and the fourth, behind
    it, waits too although it would fit."""
    split = Disaggregated()
    ready = [
        running("1", 20, arrival_s=1.0), running("2", 15, arrival_s=2.0), running("3", 40, arrival_s=3.0),
        running("4", 1, arrival_s=4.0), waiting("5", 1, arrival_s=0.0),
    ]  # fmt: skip
    pictures = [
        replica("p", *ready, role=ReplicaRole.PREFILL, blocks=400),
        replica("d1", running("x", 70), role=ReplicaRole.DECODE),
        replica("d2", running("y", 50), role=ReplicaRole.DECODE),
        replica("d3", role=ReplicaRole.DECODE, status=ReplicaStatus.DRAINING),
    ]
    assert split.plan(pictures, frozenset(), 0.0) == (Move("1", "p", "d2"), Move("2", "p", "d1"))
    assert split.plan(pictures, frozenset({"1", "2", "3"}), 0.0) == (Move("4", "p", "d2"),)


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
    assert (world.dispatch("r1", "r2"), world.dispatcher.num_pending) == ([], 2)
    world.join("late")
    assert world.dispatch_pending(3.0) == ["late", "late"]
    world = World(name, ["a", "b"])
    world.held["a"] = {"x": running("x", 1), "y": running("y", 1)}
    world.held["b"] = {"z": running("z", 1)}
    for one in "ab":
        world.dispatcher.draining(one)
    expected = ["b"] if name == "llumnix" else []  # the least loaded one
    assert (world.dispatch("r"), world.dispatcher.num_pending) == (expected, 1 - len(expected))


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
            places = world.dispatch(f"r{number}", now=now, tiers=[number % 5])
            events_seen += [(event, where) for where in places]
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
        statuses = world.dispatcher.replicas.items()
        draining = {one: set(world.held[one]) for one, status in statuses if status is ReplicaStatus.DRAINING}
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
    assert (world.dispatch("small"), world.dispatcher.num_pending) == (["a"], 1)
    assert world.dispatcher.aborted("huge", 1.0) is None
