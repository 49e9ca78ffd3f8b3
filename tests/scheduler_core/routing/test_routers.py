"""Routers: what each looks at, the multi-tier paper's examples by hand, and properties of every one."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_core.errors import InputError
from scheduler_core.lengths import LogT
from scheduler_core.request import Request
from scheduler_core.routing import ROUTERS, llumnix
from scheduler_core.routing.base import Router, RoutingRequest, ScaleIn, ScaleOut
from scheduler_core.routing.baselines import PowerOfTwo
from scheduler_core.routing.cache_aware import CacheAware
from scheduler_core.routing.disaggregated import Disaggregated
from scheduler_core.routing.dispatcher import Dispatcher
from scheduler_core.routing.endpoint_picker import EndpointPicker
from scheduler_core.routing.infaas import Infaas
from scheduler_core.routing.kv_router import KVRouter
from scheduler_core.routing.migration import Move
from scheduler_core.routing.predicted_work import PredictedWait, PredictedWork
from scheduler_core.routing.prefix_affine import PrefixAffine
from scheduler_core.routing.production_stack import PrefixAware, SessionHash
from scheduler_core.routing.session_affine import SessionAffine
from scheduler_core.routing.snapshot import ReplicaRole, ReplicaSnapshot, ReplicaStatus, RequestView
from tests.scheduler_core.routing.helpers import item, predicted, replica, router, running, waiting

NAMES = sorted(ROUTERS)
DRAINING = ReplicaStatus.DRAINING
EVENTS = st.sampled_from(["add", "finish", "drain", "join"])
NO_HEADROOM = llumnix.Headroom((0.0,) * 5)


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
    kv = router("least_kv")
    assert kv.choose(item(), [one, two], 0.0) == "b"
    assert kv.choose(item(), [one, two, replica("c", running("4", 100), blocks=400)], 0.0) == "c"


def test_power_of_two_joins_the_shorter_of_two_drawn() -> None:
    """Four replicas with 0, 1, 2, 3 requests. The k-th shortest is chosen when it is drawn with a longer one: of the 6
    pairs 3, 2, 1, 0 times. 6,000 draws: 3000, 2000, 1000, 0, standard deviation below 40."""
    pictures = [replica(str(n), *[running(f"{n}{i}", 1) for i in range(n)]) for n in range(4)]
    two = PowerOfTwo(rng=np.random.default_rng(1))
    counts = Counter(two.choose(item(), pictures, 0.0) for _ in range(6000))
    for name, expected in zip("0123", (3000, 2000, 1000, 0), strict=True):
        assert abs(counts[name] - expected) <= 4 * 40
    assert (counts["3"], two.choose(item(), pictures[2:], 0.0)) == (0, "2")


def test_session_affine_stays_with_the_context_and_moves_when_it_is_evicted() -> None:
    affine = SessionAffine()
    resident: dict[tuple[str, str], int] = {}

    def send(name: str, session: str, prompt: int, names: str = "ab") -> str:
        replicas = [
            replica(one, resident_tokens=lambda session, one=one: resident.get((one, session), 0))
            for one in names
        ]
        request = item(name, prompt=prompt, session=session)
        chosen = affine.choose(request, replicas, 0.0)
        affine.on_dispatched(request, chosen, 0.0)
        return chosen

    def finish(name: str, session: str, replica_id: str, tokens: int) -> None:
        affine.on_finished(name, replica_id, 0.0)
        resident[replica_id, session] = tokens

    assert [send("x0", "x", 300), send("y0", "y", 100), send("z0", "z", 100)] == ["a", "b", "b"]
    assert send("x1", "x", 300) == "a", "its turn before is still live"
    finish("x0", "x", "a", 310)
    finish("x1", "x", "a", 310)
    finish("y0", "y", "b", 110)
    assert send("x2", "x", 320) == "a", "although b has fewer tokens"
    finish("x2", "x", "a", 160)
    assert send("w0", "w", 500) == "b", "200 tokens against 320"
    assert send("x3", "x", 330) == "a", "half of its context is left"
    finish("x3", "x", "a", 64)
    assert send("y0b", "y", 120) == "b"
    finish("y0b", "y", "b", 0)
    assert send("y1", "y", 130) == "a", "both are evicted: nothing on a, 600 tokens on b"
    assert send("x4", "x", 340, names="b") == "b", "its replica is not available"
    affine.on_gone("b", 0.0)
    assert send("z1", "z", 100) == "b", "130 tokens on a, nothing on the new b"


def test_prefix_affine_follows_the_longest_shared_prefix_until_its_replica_is_too_busy() -> None:
    affine = PrefixAffine(imbalance=1)
    first = item("1", prefix_blocks=(1, 2, 3, 4))
    assert affine.choose(first, [replica("a"), replica("b")], 0.0) == "a"
    affine.on_dispatched(first, "a", 0.0)
    affine.on_dispatched(item("2", prefix_blocks=(7, 8)), "b", 0.0)
    alike = item("3", prefix_blocks=(1, 2, 9, 10))
    assert (affine.sent.hit_blocks(alike, "a"), affine.sent.hit_blocks(alike, "b")) == (2, 0)
    near = [replica("a", running("x", 1)), replica("b")]
    assert affine.choose(alike, near, 0.0) == "a"
    busy = [replica("a", running("x", 1), running("y", 1)), replica("b")]
    assert affine.choose(alike, busy, 0.0) == "b", "two requests ahead are more than the imbalance"
    little = item("5", prefix_blocks=(1, *range(100, 110)))
    assert affine.choose(little, near, 0.0) == "b", "one block of eleven is less than min_fraction"
    affine.on_gone("a", 1.0)
    assert affine.sent.hit_blocks(alike, "a") == 0


def sent(router: Router, replica_id: str, *items: RoutingRequest, now: float = 0.0) -> None:
    for one in items:
        router.on_dispatched(one, replica_id, now)


def test_cache_aware_follows_the_best_match_while_the_loads_are_balanced() -> None:
    """SGLang: imbalanced if max - min > 2 and max > 1.5 min; else the best match if more than 0.3 of the prompt matches."""
    aware = CacheAware(balance_abs_threshold=2)
    sent(aware, "b", item("1", prefix_blocks=(1, 2, 3, 4)))
    alike = item("2", prompt=160, prefix_blocks=(1, 2, 3, 4, 9))
    balanced = [replica("a"), replica("b", *[running(f"x{number}", 1) for number in range(2)])]
    assert aware.choose(alike, balanced, 0.0) == "b", "64 of 160 tokens, 2 requests ahead"
    assert aware.choose(item("3", prompt=214, prefix_blocks=(1, 2, 3, 4)), balanced, 0.0) == "a", "0.299"
    three = replica("b", *[running(f"x{number}", 1) for number in range(3)])
    assert aware.choose(alike, [replica("a"), three], 0.0) == "a", "3 > 2, and 3 > 1.5 * 0"
    nine, six = (replica(n, *[running(f"{n}{i}", 1) for i in range(k)]) for n, k in (("b", 9), ("a", 6)))
    assert aware.choose(alike, [six, nine], 0.0) == "b", "9 is not more than 1.5 * 6"
    aware.on_gone("b", 1.0)
    assert aware.choose(alike, balanced, 0.0) == "a"


def test_endpoint_picker_adds_weighted_scores_and_takes_turns() -> None:
    """GIE's chart: 2 queue + 2 (1 - KV usage) + 3 prefix. a: no queue 2, 60 of 100 blocks 0.8: 2.8. b: queue of 2, the longest,
    0, 20 blocks 1.6: 1.6, and with 2 of 4 blocks of the prompt 3.1. c: queue of 1 of 2 1, no block 2: 3."""
    picker = EndpointPicker()
    a, b = replica("a", running("1", 60)), replica("b", running("2", 20), waiting("3", 1), waiting("4", 1))
    c = replica("c", waiting("5", 1))
    request = item("6", prompt=64, prefix_blocks=(1, 2, 3, 4))
    assert picker.choose(request, [a, b, c], 0.0) == "c"
    sent(picker, "b", item("7", prefix_blocks=(1, 2)))
    assert picker.choose(request, [a, b, c], 0.0) == "b"
    assert EndpointPicker(max_prefix_blocks=2, prefix=1.0).choose(request, [a, b, c], 0.0) == "c"
    idle = [replica(name) for name in "abc"]
    assert Counter(picker.choose(item(), idle, 0.0) for _ in range(9)) == dict.fromkeys("abc", 3)
    with pytest.raises(InputError, match="at least one weight"):
        EndpointPicker(queue=0, kv_cache=0, prefix=0)


def test_kv_router_adds_blocks_to_compute_and_blocks_in_use() -> None:
    """Dynamo's documented example, 10 blocks of prompt: 8 + 10 = 18, 5 + 5 = 10, 2 + 9 = 11."""
    rng = np.random.default_rng(0)

    def worker(name: str, cached: int, decode: int, **more: Any) -> ReplicaSnapshot:
        return replica(name, running(name, decode), cached_tokens=lambda _: 16 * cached, **more)

    workers = [worker("1", 2, 10), worker("2", 5, 5), worker("3", 8, 9)]
    request = item(prompt=160)
    assert KVRouter(rng=rng).choose(request, workers, 0.0) == "2"
    assert KVRouter(rng=rng, overlap_score_weight=2.0).choose(request, workers, 0.0) == "3", "15 and 13"
    behind = worker("3", 8, 9, running_prefill_tokens=lambda: 80)
    assert KVRouter(rng=rng, overlap_score_weight=2.0).choose(request, [workers[1], behind], 0.0) == "2"
    queue = replica("4", waiting("x", 3), cached_tokens=lambda _: 160)
    assert KVRouter(rng=rng).choose(request, [queue, worker("5", 10, 5)], 0.0) == "5", "3 + 3 against 0 + 5"
    idle = [replica(name) for name in "ab"]
    assert {KVRouter(rng=rng).choose(request, idle, 0.0) for _ in range(20)} == {"a", "b"}


def test_session_hash_moves_only_the_sessions_of_a_replica_that_is_gone() -> None:
    hashed, names = SessionHash(), "abcd"
    sessions = [item(str(number), session=f"s{number}") for number in range(400)]

    def places(names: str) -> list[str]:
        return [hashed.choose(one, [replica(name) for name in names], 0.0) for one in sessions]

    before = places(names)
    counts = Counter(before)
    # With 160 points each, a fraction of 1/4 has a standard deviation of about 0.25 / sqrt(160) beside that of 400 draws.
    assert all(abs(counts[name] / 400 - 0.25) < 4 * math.hypot(0.25 / 160**0.5, 0.022) for name in names)
    without = places("abc")
    assert all(old in (new, "d") for old, new in zip(before, without, strict=True))
    assert places(names) == before


def test_session_hash_sends_requests_without_session_where_fewest_went_in_the_window() -> None:
    hashed = SessionHash(window_s=60.0)
    both = [replica("a"), replica("b")]
    sent(hashed, "a", item("1"), item("2"), now=0.0)
    sent(hashed, "b", item("3"), now=50.0)
    assert hashed.choose(item(), both, 60.0) == "b"
    assert hashed.choose(item(), both, 61.0) == "a", "its two requests are older than the window"


def test_prefix_aware_follows_the_longest_match_whatever_the_load() -> None:
    aware = PrefixAware(rng=np.random.default_rng(0))
    sent(aware, "a", item("1", prefix_blocks=(1, 2, 3)))
    sent(aware, "b", item("2", prefix_blocks=(1, 7)))
    full = [replica("a", *[running(f"x{number}", 1) for number in range(50)]), replica("b"), replica("c")]
    assert aware.choose(item("3", prefix_blocks=(1, 2, 9)), full, 0.0) == "a"
    assert {aware.choose(item("4", prefix_blocks=(1, 8)), full, 0.0) for _ in range(30)} == {"a", "b"}
    assert {aware.choose(item("5", prefix_blocks=(5,)), full, 0.0) for _ in range(60)} == {"a", "b", "c"}


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
        self.role = ReplicaRole.PREFILL if name == "disaggregated" else ReplicaRole.BOTH
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
            self.held[replica_id][name] = running(name, 1, tier=one.request.tier)
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
@given(events=st.lists(EVENTS, max_size=40), seed=st.integers(0, 3))
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
        elif event == "finish" and placed:
            where = world.dispatcher.replica_of(placed[0])
            assert where is not None
            del world.held[where][placed[0]]
            live.discard(placed[0])
            world.dispatcher.finished(placed[0], now)
        elif event == "drain" and active:
            world.dispatcher.draining(active[0])
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


def test_headroom_of_figure_3() -> None:
    """K = 4, h_max = 0.20, lambda = 1: 20 %, 7.36 %, 2.71 %, 1.00 % of M, 31.1 % together."""
    fractions = llumnix.exponential_headroom(4).fractions
    assert [round(100 * share, 2) for share in fractions] == [20.0, 7.36, 2.71, 1.0]
    assert round(100 * sum(fractions), 1) == 31.1


def test_ten_tiers_of_requests() -> None:
    """K = 10: headroom sums to 0.2 (1 - e^-10)/(1 - e^-1) of M = 100; the most urgent of ten waiting goes first."""
    headroom = llumnix.exponential_headroom(10)
    assert headroom.blocks(range(10), 100) == pytest.approx(20 * (1 - math.exp(-10)) / (1 - math.exp(-1)))
    dispatcher = Dispatcher(llumnix.Llumnix(headroom=headroom))
    for tier in range(9, -1, -1):
        request = Request(request_id=f"t{tier}", arrival_s=0.0, prompt_tokens=16, max_tokens=64, tier=tier)
        dispatcher.arrived(RoutingRequest(request=request))
    dispatcher.joined("r")
    assigned = dispatcher.dispatch({"r": replica("r")}, 0.0)
    assert [item.request.request_id for item, _ in assigned] == [f"t{tier}" for tier in range(10)]
    with pytest.raises(InputError, match="tier"):
        headroom.blocks([10], 100)


def test_freeness_by_hand() -> None:
    """M = 100, K = 4. Running: tier 0 with 10 blocks, tier 0 with 20, tier 3 with 6; waiting: tier 1 at the head with a
    demand of 8, tier 2 behind it with 30.

    sum V = 10 + 20 + 6 + 8 + 0 = 44; B = 3; F_normal = 56/3 = 18.67.
    All four tiers are present: headroom 20 + 7.3576 + 2.7067 + 0.9957 = 31.06; F_full = (56 - 31.06)/3 = 8.313.
    """
    one = replica(
        "a", running("1", 10, tier=0), running("2", 20, tier=0), running("3", 6, tier=3),
        waiting("4", 8, tier=1), waiting("5", 30, tier=2),
    )  # fmt: skip
    assert (llumnix.virtual_usage_blocks(one), llumnix.normal_freeness(one)) == (44, pytest.approx(56 / 3))
    assert llumnix.full_freeness(one, llumnix.exponential_headroom(4)) == pytest.approx(8.313, abs=5e-4)


def test_freeness_of_the_whole_queue_by_hand() -> None:
    """M = 100 of 16 tokens, no headroom. a: two running with 30 blocks each, 20 + 15 blocks wait: (100 - 60 - 35)/2 = 2.5.
    b: one more waits with 10: -5, not divided, so that a larger batch does not make a longer queue look freer."""
    here = (running("1", 30), running("2", 30), waiting("3", 20), waiting("4", 15))
    one, more = replica("a", *here), replica("b", *here, waiting("5", 10))
    assert (llumnix.queue_freeness(one, NO_HEADROOM), llumnix.queue_freeness(more, NO_HEADROOM)) == (2.5, -5)
    assert llumnix.full_freeness(one, NO_HEADROOM) == llumnix.full_freeness(more, NO_HEADROOM) == 10
    headroom = llumnix.exponential_headroom(5)
    reserved = headroom.blocks({row.tier for row in one.requests}, 100)
    assert llumnix.queue_freeness(one, headroom) == pytest.approx((5 - reserved) / (1 if reserved > 5 else 2))
    assert llumnix.queue_freeness(replica("a"), NO_HEADROOM) == 100
    assert llumnix.queue_freeness(replica("c", status=DRAINING), NO_HEADROOM) == -math.inf


def test_one_urgent_request_keeps_the_others_off_its_replica() -> None:
    """Section 3.3. a: one tier-0 request with 10 blocks, F_full = 100 - 10 - 20 = 70. b: one tier-4 request with 20
    blocks, F_full = 100 - 20 - 0.37 = 79.6. Without headroom a would be freer (90 against 80)."""
    urgent, other = replica("a", running("1", 10, tier=0)), replica("b", running("2", 20, tier=4))
    assert llumnix.Llumnix().choose(item(), [urgent, other], 0.0) == "b"
    assert llumnix.Llumnix(headroom=NO_HEADROOM).choose(item(), [urgent, other], 0.0) == "a"


def test_a_burst_onto_equal_replicas_is_distributed() -> None:
    dispatcher = Dispatcher(llumnix.Llumnix())
    for name in "abcd":
        dispatcher.joined(name)
    for number in range(8):
        dispatcher.arrived(item(f"r{number}"))
    assigned = dispatcher.dispatch({name: replica(name) for name in "abcd"}, 0.0)
    assert sorted(replica_id for _, replica_id in assigned) == sorted("abcd" * 2)


def test_the_planner_moves_the_cheapest_running_request_from_the_fullest_to_the_freest() -> None:
    """a: 90 of 100 blocks in 3 requests, F = 3.33; b: 60 in 2, F = 20; c: 10 in 1, F = 90. max - min = 86.7 >= 0.3.
    Of a's requests the least urgent goes (tier 4), of those with 50 and 20 blocks the smaller one."""
    a = replica("a", running("urgent", 20, tier=1), running("big", 50, tier=4), running("small", 20, tier=4))
    b, c = replica("b", running("x", 30), running("y", 30)), replica("c", running("z", 10))
    planner = llumnix.MigrationPlanner(headroom=NO_HEADROOM)
    assert planner.plan([a, b, c], frozenset(), 0.0) == (Move("small", "a", "c"),)
    assert planner.plan([a, b, c], frozenset({"small"}), 0.05) == (Move("big", "a", "c"),)


def test_waiting_requests_move_first_and_only_where_they_fit() -> None:
    a = replica("a", running("r", 80, tier=4), waiting("w1", 30, tier=1), waiting("w2", 25, tier=4))
    roomy, tight = replica("b", running("x", 10)), replica("b", running("x", 70), running("y", 10))
    planner = llumnix.MigrationPlanner(headroom=NO_HEADROOM)
    assert planner.plan([a, roomy], frozenset(), 0.0) == (Move("w1", "a", "b"),)
    # 20 blocks are left on `tight`: neither waiting request fits, nor does the running one.
    assert planner.plan([a, tight], frozenset(), 1.0) == ()


def test_a_move_leaves_its_destination_outside_of_headroom() -> None:
    """M = 100, headroom 20 % for tier 0 and 10 % for tier 1. b holds 60 blocks in tier 0: 40 free, 20 of them headroom. A
    request of tier 0 with 20 blocks fits; one of tier 1 brings 10 of headroom and does not, unless its replica drains."""
    planner = llumnix.MigrationPlanner(headroom=llumnix.Headroom((0.2, 0.1)))
    b = replica("b", running("x", 60, tier=0))

    def moves(tier: int, blocks: int, **more: Any) -> tuple[Move, ...]:
        planner._last_s = -math.inf
        a = replica("a", running("r", blocks, tier=tier), running("y", 75, tier=1), **more)
        return planner.plan([a, b], frozenset({"y"}), 0.0)

    assert moves(0, 20) == (Move("r", "a", "b"),)
    assert moves(0, 21) == ()
    assert moves(1, 20) == ()
    assert moves(1, 10) == (Move("r", "a", "b"),)
    assert moves(1, 20, status=DRAINING) == (Move("r", "a", "b"),)


def test_adaptive_headroom_doubles_for_missed_targets_and_decays_without() -> None:
    """Windows of 1 s. In the first, tier 0 misses 2 of 100 targets and tier 1 one of 100; tier 2 has none. In the second, tier 0
    misses one of 100."""
    headroom = llumnix.AdaptiveHeadroom((0.2, 0.1, 0.05), window_s=1.0)
    for number in range(100):
        headroom.observe(0, number > 1, 0.5)
        headroom.observe(1, number > 0, 0.9)
    assert headroom.fractions == (0.2, 0.1, 0.05)
    headroom.observe(0, False, 1.5)
    assert headroom.fractions == pytest.approx((0.4, 0.09, 0.05))
    for _ in range(99):
        headroom.observe(0, True, 1.6)
    headroom.observe(0, True, 2.6)
    assert headroom.fractions == pytest.approx((0.36, 0.09, 0.05))
    with pytest.raises(InputError, match="to double it"):
        llumnix.AdaptiveHeadroom((0.6,), window_s=1.0)


def test_the_planner_waits_for_its_interval_and_for_imbalance() -> None:
    """M = 1000. a holds 500 blocks in 2 requests, F = 250; b 499, F = 250.5; c and d 498, F = 251. Equal replicas do
    nothing; a difference of 0.5 >= 0.3 does, unless the threshold is 1."""
    planner = llumnix.MigrationPlanner(headroom=NO_HEADROOM)
    a = replica("a", running("1", 250), running("2", 250), blocks=1000)
    b = replica("b", running("3", 249), running("4", 250), blocks=1000)
    c = replica("c", running("5", 249), running("6", 249), blocks=1000)
    a2 = replica("a", running("1", 251), running("2", 250), blocks=1000)
    d = replica("d", running("7", 249), running("8", 249), blocks=1000)
    assert planner.plan([c, d], frozenset(), 0.0) == ()
    assert planner.plan([a, b], frozenset(), 0.04) == (), "50 ms are not over"
    assert planner.plan([a, b], frozenset(), 0.05) == (Move("1", "a", "b"),), "0.5 blocks per request"
    assert llumnix.MigrationPlanner(headroom=NO_HEADROOM, threshold=1.0).plan([a, b], frozenset(), 0.0) == ()
    assert len(llumnix.MigrationPlanner(headroom=NO_HEADROOM).plan([a2, b, c], frozenset(), 0.0)) == 1


def test_everything_leaves_a_draining_replica_one_by_one() -> None:
    planner = llumnix.MigrationPlanner(headroom=NO_HEADROOM)
    full = replica("a", running("x", 95))
    views = [running("r1", 50, tier=0), running("r2", 4, tier=3), waiting("w", 40, tier=0)]
    order, now = [], 0.0
    while views:
        [move] = planner.plan([full, replica("d", *views, status=DRAINING)], frozenset(), now) or [None]
        now += 0.05
        if move is None:
            break
        order.append(move.request_id)
        views = [view for view in views if view.request_id != move.request_id]
    assert order == ["w", "r2"], "50 blocks do not fit beside 95 of 100"
    assert [view.request_id for view in views] == ["r1"]
    [move] = planner.plan([replica("b"), replica("d", *views, status=DRAINING)], frozenset(), now)
    assert move == Move("r1", "d", "b")


def crowd(name: str, num: int, blocks: int, head: int = 0, **more: Any) -> ReplicaSnapshot:
    rows = [running(f"{name}{number}", blocks) for number in range(num)]
    return replica(name, *rows, *([waiting(f"{name}w", head)] if head else []), **more)


def test_scaling_thresholds() -> None:
    """M = 100. a: 10 requests of 10 blocks and a head of 10: F_normal = (100 - 110)/10 = -1. b: 10 of 10: F = 0.
    Mean -0.5: not below. With a head of 11 on a: -1.1 and 0, mean -0.55 < -0.5: scale out.
    c: 40 of 1 block: F = 60/40 = 1.5: not above. d: 39 of 1: 61/39 = 1.564; mean of c and d 1.532 > 1.5: scale in, and d,
    with fewer running requests, is drained."""
    b = crowd("b", 10, 10)
    assert llumnix.AutoScaler().signal([crowd("a", 10, 10, head=10), b], 0.0) is None
    assert llumnix.AutoScaler().signal([crowd("a", 10, 10, head=11), b], 0.0) == ScaleOut()
    c = crowd("c", 40, 1)
    assert llumnix.AutoScaler().signal([c, crowd("e", 40, 1)], 0.0) is None
    assert llumnix.AutoScaler().signal([c, crowd("d", 39, 1)], 0.0) == ScaleIn("d")


def test_scaling_keeps_its_bounds_and_its_pace() -> None:
    scaler = llumnix.AutoScaler(min_replicas=1, max_replicas=2, interval_s=1.0)
    idle, busy = [replica("a"), replica("b")], [crowd("a", 10, 10, head=20), crowd("b", 10, 10, head=20)]
    assert scaler.signal(busy, 0.0) is None, "there are two already"
    assert isinstance(scaler.signal(idle, 0.0), ScaleIn)
    assert scaler.signal(idle, 0.9) is None
    assert isinstance(scaler.signal(idle, 1.0), ScaleIn)
    assert scaler.signal(idle[:1], 3.0) is None, "one must stay"
    assert scaler.signal([], 3.0) is None
