"""What each router looks at."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from scheduler_core.lengths import LogT
from scheduler_core.routing.baselines import PowerOfTwo
from scheduler_core.routing.disaggregated import Disaggregated
from scheduler_core.routing.infaas import Infaas
from scheduler_core.routing.migration import Move
from scheduler_core.routing.predicted_work import PredictedWait, PredictedWork
from scheduler_core.routing.prefix_affine import PrefixAffine
from scheduler_core.routing.snapshot import ReplicaRole, ReplicaStatus, RequestView
from tests.scheduler_core.routing.helpers import item, predicted, replica, router, running, waiting


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
    assert counts["3"] == 0
    assert two.choose(item(), pictures[2:], 0.0) == "2"


def test_prefix_affine_follows_the_longest_shared_prefix_until_its_replica_is_too_busy() -> None:
    affine = PrefixAffine(imbalance=1)
    empty = [replica("a"), replica("b")]
    first = item("1", prefix_blocks=(1, 2, 3, 4))
    assert affine.choose(first, empty, 0.0) == "a"
    affine.on_dispatched(first, "a", 0.0)
    other = item("2", prefix_blocks=(7, 8))
    affine.on_dispatched(other, "b", 0.0)
    alike = item("3", prefix_blocks=(1, 2, 9, 10))
    assert affine.hit_blocks(alike, "a") == 2
    assert affine.hit_blocks(alike, "b") == 0
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
    assert base.cost(crowded) == pytest.approx(5.4)
    assert base.cost(quiet) == pytest.approx(2.0)
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
        running("1", 20, arrival_s=1.0),
        running("2", 15, arrival_s=2.0),
        running("3", 40, arrival_s=3.0),
        running("4", 1, arrival_s=4.0),
        waiting("5", 1, arrival_s=0.0),
    ]
    pictures = [
        replica("p", *ready, role=ReplicaRole.PREFILL, blocks=400),
        replica("d1", running("x", 70), role=ReplicaRole.DECODE),
        replica("d2", running("y", 50), role=ReplicaRole.DECODE),
        replica("d3", role=ReplicaRole.DECODE, status=ReplicaStatus.DRAINING),
    ]
    assert split.plan(pictures, frozenset(), 0.0) == (Move("1", "p", "d2"), Move("2", "p", "d1"))
    assert split.plan(pictures, frozenset({"1", "2", "3"}), 0.0) == (Move("4", "p", "d2"),)
