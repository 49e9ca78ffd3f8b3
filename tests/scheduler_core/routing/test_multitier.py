"""Hand-worked examples of the multi-tier paper: headroom, freeness, dispatch, planning, scaling."""

import math
from typing import Any

import pytest

from scheduler_core.errors import InputError
from scheduler_core.request import Request
from scheduler_core.routing.base import RoutingRequest
from scheduler_core.routing.dispatcher import Dispatcher
from scheduler_core.routing.llumnix import (
    AutoScaler,
    Headroom,
    Llumnix,
    MigrationPlanner,
    ScaleIn,
    ScaleOut,
    exponential_headroom,
    full_freeness,
    normal_freeness,
    queue_freeness,
    virtual_usage_blocks,
)
from scheduler_core.routing.migration import Move
from scheduler_core.routing.snapshot import ReplicaSnapshot, ReplicaStatus
from tests.scheduler_core.routing.helpers import item, replica, running, waiting

DRAINING = ReplicaStatus.DRAINING
NO_HEADROOM = Headroom((0.0,) * 5)


def test_headroom_of_figure_3() -> None:
    """K = 4, h_max = 0.20, lambda = 1: 20 %, 7.36 %, 2.71 %, 1.00 % of M, 31.1 % together."""
    fractions = exponential_headroom(4).fractions
    assert [round(100 * share, 2) for share in fractions] == [20.0, 7.36, 2.71, 1.0]
    assert round(100 * sum(fractions), 1) == 31.1


def test_ten_tiers_of_requests() -> None:
    """K = 10: headroom sums to 0.2 (1 - e^-10)/(1 - e^-1) of M = 100; the most urgent of ten waiting goes first."""
    headroom = exponential_headroom(10)
    assert headroom.blocks(range(10), 100) == pytest.approx(20 * (1 - math.exp(-10)) / (1 - math.exp(-1)))
    dispatcher = Dispatcher(Llumnix(headroom=headroom))
    for tier in range(9, -1, -1):
        request = Request(request_id=f"t{tier}", arrival_s=0.0, prompt_tokens=16, max_tokens=64, tier=tier)
        dispatcher.arrived(RoutingRequest(request=request, tier=request.tier))
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
    assert (virtual_usage_blocks(one), normal_freeness(one)) == (44, pytest.approx(56 / 3))
    assert full_freeness(one, exponential_headroom(4)) == pytest.approx(8.313, abs=5e-4)


def test_freeness_of_the_whole_queue_by_hand() -> None:
    """M = 100 of 16 tokens, no headroom. a: two running with 30 blocks each, 20 + 15 blocks wait: (100 - 60 - 35)/2 = 2.5.
    b: one more waits with 10: -5, not divided, so that a larger batch does not make a longer queue look freer."""
    here = (running("1", 30), running("2", 30), waiting("3", 20), waiting("4", 15))
    one, more = replica("a", *here), replica("b", *here, waiting("5", 10))
    assert (queue_freeness(one, NO_HEADROOM), queue_freeness(more, NO_HEADROOM)) == (2.5, -5)
    assert full_freeness(one, NO_HEADROOM) == full_freeness(more, NO_HEADROOM) == 10
    headroom = exponential_headroom(5)
    reserved = headroom.blocks({row.tier for row in one.requests}, 100)
    assert queue_freeness(one, headroom) == pytest.approx((5 - reserved) / (1 if reserved > 5 else 2))
    assert queue_freeness(replica("a"), NO_HEADROOM) == 100
    assert queue_freeness(replica("c", status=DRAINING), NO_HEADROOM) == -math.inf


def test_one_urgent_request_keeps_the_others_off_its_replica() -> None:
    """Section 3.3. a: one tier-0 request with 10 blocks, F_full = 100 - 10 - 20 = 70. b: one tier-4 request with 20
    blocks, F_full = 100 - 20 - 0.37 = 79.6. Without headroom a would be freer (90 against 80)."""
    urgent, other = replica("a", running("1", 10, tier=0)), replica("b", running("2", 20, tier=4))
    assert Llumnix().choose(item(), [urgent, other], 0.0) == "b"
    assert Llumnix(headroom=Headroom((0.0,) * 5)).choose(item(), [urgent, other], 0.0) == "a"


def test_a_burst_onto_equal_replicas_is_distributed() -> None:
    dispatcher = Dispatcher(Llumnix())
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
    planner = MigrationPlanner(headroom=NO_HEADROOM)
    assert planner.plan([a, b, c], frozenset(), 0.0) == (Move("small", "a", "c"),)
    assert planner.plan([a, b, c], frozenset({"small"}), 0.05) == (Move("big", "a", "c"),)


def test_waiting_requests_move_first_and_only_where_they_fit() -> None:
    a = replica("a", running("r", 80, tier=4), waiting("w1", 30, tier=1), waiting("w2", 25, tier=4))
    roomy, tight = replica("b", running("x", 10)), replica("b", running("x", 70), running("y", 10))
    planner = MigrationPlanner(headroom=NO_HEADROOM)
    assert planner.plan([a, roomy], frozenset(), 0.0) == (Move("w2", "a", "b"),)
    # 20 blocks are left on `tight`: neither waiting request fits, nor does the running one.
    assert planner.plan([a, tight], frozenset(), 1.0) == ()


def test_the_planner_waits_for_its_interval_and_for_imbalance() -> None:
    """M = 1000. a holds 500 blocks in 2 requests, F = 250; b 499, F = 250.5; c and d 498, F = 251. Equal replicas do
    nothing; a difference of 0.5 >= 0.3 does, unless the threshold is 1."""
    planner = MigrationPlanner(headroom=NO_HEADROOM)
    a = replica("a", running("1", 250), running("2", 250), blocks=1000)
    b = replica("b", running("3", 249), running("4", 250), blocks=1000)
    c = replica("c", running("5", 249), running("6", 249), blocks=1000)
    a2 = replica("a", running("1", 251), running("2", 250), blocks=1000)
    d = replica("d", running("7", 249), running("8", 249), blocks=1000)
    assert planner.plan([c, d], frozenset(), 0.0) == ()
    assert planner.plan([a, b], frozenset(), 0.04) == (), "50 ms are not over"
    assert planner.plan([a, b], frozenset(), 0.05) == (Move("1", "a", "b"),), "0.5 blocks per request"
    assert MigrationPlanner(headroom=NO_HEADROOM, threshold=1.0).plan([a, b], frozenset(), 0.0) == ()
    assert len(MigrationPlanner(headroom=NO_HEADROOM).plan([a2, b, c], frozenset(), 0.0)) == 1


def test_everything_leaves_a_draining_replica_one_by_one() -> None:
    planner = MigrationPlanner(headroom=NO_HEADROOM)
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
    assert AutoScaler().signal([crowd("a", 10, 10, head=10), b], 0.0) is None
    assert AutoScaler().signal([crowd("a", 10, 10, head=11), b], 0.0) == ScaleOut()
    c = crowd("c", 40, 1)
    assert AutoScaler().signal([c, crowd("e", 40, 1)], 0.0) is None
    assert AutoScaler().signal([c, crowd("d", 39, 1)], 0.0) == ScaleIn("d")


def test_scaling_keeps_its_bounds_and_its_pace() -> None:
    scaler = AutoScaler(min_replicas=1, max_replicas=2, interval_s=1.0)
    idle, busy = [replica("a"), replica("b")], [crowd("a", 10, 10, head=20), crowd("b", 10, 10, head=20)]
    assert scaler.signal(busy, 0.0) is None, "there are two already"
    assert isinstance(scaler.signal(idle, 0.0), ScaleIn)
    assert scaler.signal(idle, 0.9) is None
    assert isinstance(scaler.signal(idle, 1.0), ScaleIn)
    assert scaler.signal(idle[:1], 3.0) is None, "one must stay"
    assert scaler.signal([], 3.0) is None
