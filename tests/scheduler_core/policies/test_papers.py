"""One example of each paper, worked out by hand, and what each of our own policies promises, in small; their estimates.

Figures of our own ones are measured by `benchmarks.scheduling.default_order`.
"""

import math
from typing import Any

import numpy as np
import pytest

from scheduler_core.lengths import LogT
from scheduler_core.policies import make_policy, vtc
from scheduler_core.policies.base import LAST_RESORT, Policy
from scheduler_core.policies.deadlines import SloTie
from scheduler_core.policies.s3 import EDGES
from scheduler_core.policies.shortest_first import Sept, Ssjf
from scheduler_core.policies.tie import Tie
from scheduler_core.policies.uniboost import TailRate, UniBoost, boost_s
from scheduler_core.prediction.predictions import (
    BucketPrediction,
    LengthPrediction,
    RankPrediction,
    UrgencyPrediction,
)
from scheduler_core.request import RequestState, Status
from tests.scheduler_core.helpers import prediction, request, scheduler

BETAS = {0: 0.1, 10: 0.1, 11: 0.1, 13: 0.15, 20: 0.2, 30: 0.3, 50: 0.5, 900: 0.5}


def state(
    name: str = "a", *, arrival_s: float = 0.0, prompt: int = 10, cap: int = 100, order: int = 0, **more: Any
) -> RequestState:
    """A waiting request; `more` are fields of the request, or of its state where it has such."""
    inside = {field: more.pop(field) for field in list(more) if field in RequestState.__slots__}
    return RequestState(request(name, arrival_s, prompt=prompt, cap=cap, **more), order=order, **inside)


def sure(tokens: float) -> LengthPrediction:
    """A prediction without doubt."""
    return prediction(tokens, sigma=1e-6)


def predicted(name: str, median: float, sigma: float = 0.5, **more: Any) -> RequestState:
    return state(name, prediction=prediction(median, sigma), **more)


def key(policy: Policy, item: RequestState, now: float = 0.0) -> float:
    if item.prediction is not None:
        policy.on_prediction(item)
    return policy.key(item, now)


def enter(policy: Policy, *states: RequestState, now: float = 0.0) -> None:
    """The requests arrive; their predictions come after that."""
    for item in states:
        length, item.prediction = item.prediction, None
        policy.on_arrival(item, now)
        item.prediction = length
        if item.has_prediction:
            policy.on_prediction(item)


def generate(policy: Policy, item: RequestState, tokens: int, now: float, step_s: float = 0.01) -> float:
    """Decodes tokens one by one; the prompt is processed first. Returns the end."""
    item.status = Status.RUNNING
    if item.num_computed_tokens < item.prefill_target_tokens:
        chunk = item.prefill_target_tokens - item.num_computed_tokens
        item.num_computed_tokens += chunk
        policy.on_tokens(item, chunk, now + step_s)
        policy.on_step(now + step_s, step_s)
        now += step_s
    for _ in range(tokens):
        now += step_s
        item.num_computed_tokens += 1
        item.num_output_tokens += 1
        item.last_token_s = item.last_scheduled_s = now
        policy.on_tokens(item, 1, now)
        policy.on_step(now, step_s)
    return now


def test_priority_spf_hpjf_and_vtc_order_by_what_they_are_named_for() -> None:
    assert make_policy("priority").key(state(priority=-3), 0.0) == -3.0
    partly_cached = state(prompt=50)
    partly_cached.cached_tokens = 20
    assert make_policy("spf").key(partly_cached, 0.0) == 30.0
    hpjf = make_policy("hpjf")
    declared, judged = state("a", tier=3), state("b", tier=3, urgency=UrgencyPrediction((0.9, 0.1, 0, 0, 0)))
    enter(hpjf, declared, judged)
    assert (hpjf.key(declared, 0.0), hpjf.key(judged, 0.0)) == (3.0, 2.0)
    assert make_policy("hpjf", {"max_promotion": 2}).key(judged, 0.0) == 1.0
    assert make_policy("hpjf", {"max_promotion": 5}).key(judged, 0.0) == 0.0


def test_llumlet_promotes_a_waiting_request_by_a_tier_at_every_quota() -> None:
    """Quota 2 s, arrival at 1 s in tier 2: tier 1 from 3 s, tier 0 from 5 s. While it runs its tier stays; when it waits again,
    its whole age counts."""
    policy = make_policy("llumlet", {"quota_s": 2.0})
    urgent, waits, runs = (state(n, arrival_s=1.0, order=i, tier=2 * min(i, 1)) for i, n in enumerate("abc"))
    for item in (urgent, waits, runs):
        policy.on_arrival(item, item.request.arrival_s)
    assert policy.reorders_next
    assert list(policy.take_changed(2.9)) == []
    runs.status = Status.RUNNING
    assert list(policy.take_changed(3.0)) == [waits]
    assert [policy.key(item, 3.0) for item in (urgent, waits, runs)] == [0.0, 1.0, 2.0]
    runs.status = Status.WAITING
    policy.on_preempt(runs, 4.0)
    assert list(policy.take_changed(4.0)) == [runs]
    assert set(policy.take_changed(9.0)) == {waits, runs}
    assert [policy.key(item, 9.0) for item in (urgent, waits, runs)] == [0.0, 0.0, 0.0]
    assert not policy.reorders_next
    fixed = make_policy("llumlet")
    fixed.on_arrival(waits, 1.0)
    assert (fixed.key(waits, 1e9), list(fixed.take_changed(1e9)), fixed.reorders_next) == (2.0, [], False)


def test_vtc_charges_prompts_once_and_outputs_double() -> None:
    """w_p = 1, w_q = 2. Tenant u: prompts 10 and 6 wait, so their keys are 0 and 0 + 10. Admitting the first: c_u = 10,
    and the second's key stays 10. Its prefill yields a token and 2 more are decoded: c_u = 10 + 3 * 2 = 16. Tenant v joins
    now: the least counter among tenants that wait is u's, 16, so c_v is lifted to 16."""
    policy = make_policy("vtc")
    first, second = state("a", prompt=10, tenant="u"), state("b", prompt=6, tenant="u")
    enter(policy, first, second)
    assert [policy.key(item, 0.0) for item in (first, second)] == [0.0, 10.0]
    policy.on_admit(first, 0.0)
    assert policy.key(second, 0.0) == 10.0
    generate(policy, first, 2, 0.0)
    assert policy.counter("u") == 16.0  # type: ignore[attr-defined]
    late = state("c", prompt=5, tenant="v")
    enter(policy, late)
    assert policy.key(late, 0.0) == 16.0 == policy.key(second, 0.0)


@pytest.mark.mend  # every name of a tenant that a client invented was kept and scanned for ever
def test_vtc_forgets_the_least_served_of_many_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vtc, "MAX_TENANTS", 5)
    policy = vtc.Vtc()
    served = state("s", prompt=1000, tenant="served")
    enter(policy, served)
    policy.on_admit(served, 0.0)
    for number in range(100):
        item = state(f"r{number}", prompt=1, tenant=f"invented {number}")
        enter(policy, item)
        policy.on_admit(item, 0.0)
        policy.on_finish(item)
        assert len(policy._counter) <= 2 * 5 + 1
    policy.on_finish(served)
    assert policy.counter("served") == 1000.0
    assert (
        policy._queued == policy._joined == policy._admitted == policy._before == policy._num_requests == {}
    )


def test_ltr_promotes_after_200_idle_steps_for_10() -> None:
    """Scores 1 and 2. Only the first is served. After 200 steps the second stands in front of it; its quantum is 10 steps,
    and with the tenth it is demoted to its score again."""
    policy = make_policy("ltr")
    near, far = state("a", rank=RankPrediction(1.0)), state("b", rank=RankPrediction(2.0), order=1)
    enter(policy, near, far)
    near.status = Status.RUNNING
    for _ in range(199):
        policy.on_tokens(near, 1, 0.0)
        policy.on_step(0.0, 0.01)
    assert policy.key(near, 0.0) < policy.key(far, 0.0)
    policy.on_step(0.0, 0.01)
    assert list(policy.take_changed(0.0)) == [far]
    assert policy.key(far, 0.0) < policy.key(near, 0.0)
    far.status = Status.RUNNING
    for served in range(1, 11):
        assert policy.key(far, 0.0) < policy.key(near, 0.0), f"{served - 1} steps served"
        policy.on_tokens(far, 1, 0.0)
        policy.on_step(0.0, 0.01)
    assert policy.key(far, 0.0) == 2.0


def test_s3_orders_and_reserves_by_bucket() -> None:
    """Edges 42, 141, 294, 503. Median 100 is bucket 1: memory for prompt 10 + 141, or 10 + M with M = 120. A predicted
    bucket counts more than a length; without either the last bucket, whose end is M."""
    policy = make_policy("s3")
    known = state("a", prediction=sure(100), cap=1000)
    capped = state("b", prediction=sure(100), cap=120)
    bucket = state("c", prediction=sure(100), bucket=BucketPrediction((0.2, 0.8), (50.0,)), cap=1000)
    unknown = state("d", cap=700)
    enter(policy, known, capped, bucket, unknown)
    assert [policy.key(item, 0.0) for item in (known, bucket, unknown)] == [1.0, 1.0, float(len(EDGES))]
    assert [BucketPrediction(row, (9, 99)).bucket for row in ((0.2, 0.5, 0.3), (0.4, 0.4, 0.2))] == [1, 0]
    found = [policy.admission_tokens(item) for item in (known, capped, bucket, unknown)]
    assert found == [10 + 141, 10 + 120, 10 + 1000, 10 + 700]


def test_edf_follows_the_first_and_then_the_last_token() -> None:
    """Arrival 5, first token wanted within 2 s, last within 30 s: deadline 7, then 35. Without targets 5 + 60."""
    policy = make_policy("edf")
    item = state(arrival_s=5.0, ttft_slo_s=2.0, ttlt_slo_s=30.0)
    assert policy.key(item, 0.0) == 7.0
    item.first_token_s = item.last_token_s = 6.0
    policy.on_tokens(item, 10, 6.0)
    assert (list(policy.take_changed(6.0)), policy.key(item, 6.0)) == ([item], 35.0)
    assert policy.key(state(arrival_s=5.0), 0.0) == 65.0


def test_las_counts_quanta_of_work() -> None:
    """Quantum 256, prompt 100: with 155 tokens generated 255, the first quantum; with 156 the second."""
    policy = make_policy("las")
    done = {"prompt": 100, "cap": 1000, "first_token_s": 1.0}
    assert policy.key(state(num_output_tokens=155, **done), 0.0) == 0.0
    assert policy.key(state(num_output_tokens=156, **done), 0.0) == 1.0
    assert policy.key(state(prompt=600, num_computed_tokens=300), 0.0) == 1.0


def test_mlfq_skips_by_prompt_demotes_by_use_and_promotes_by_waiting() -> None:
    """Quanta 10, 20, 40 ms. A prompt of 600 tokens takes 600 * 55 us = 33 ms: queue 2. One of 10 tokens joins queue 0; after
    a step of 10 ms its quantum is used up, queue 1; two more steps (20 ms), queue 2. Waiting 3 s brings it back to 0."""
    policy = make_policy("mlfq")
    long, short = state("a", prompt=600), state("b", prompt=10, order=1)
    enter(policy, long, short)
    assert [policy.key(item, 0.0) for item in (long, short)] == [2.0, 0.0]
    now = generate(policy, short, 0, 0.0)
    assert policy.key(short, now) == 1.0
    now = generate(policy, short, 2, now)
    assert policy.key(short, now) == 2.0
    short.status = Status.WAITING
    assert short not in policy.take_changed(now + 2.9)
    assert short in policy.take_changed(now + 3.01)
    assert policy.key(short, now + 3.01) == 0.0


def test_srpt_trail_and_elis_see_the_same_rest_of_a_sure_prediction() -> None:
    """Sure of 100 tokens: 60 generated, 40 left. TRAIL: 60 < 0.8 * 100 may be displaced, 80 not. ELIS: 60 lies within the
    window from 50, where 50 are left; displaced only at 50 and 100."""
    for name, left in (("srpt", 40.0), ("trail", 100.0 - 48.0), ("elis", 50.0)):
        policy = make_policy(name)
        item = state(prediction=sure(100), cap=1000, num_output_tokens=60)
        enter(policy, item)
        assert policy.key(item, 0.0) == pytest.approx(left, abs=0.01)
    trail, elis = make_policy("trail"), make_policy("elis")
    item = state(prediction=sure(100), cap=1000)
    enter(trail, item)
    enter(elis, item)
    free = []
    for generated in (49, 50, 60, 79, 80, 99):
        item.num_output_tokens = generated
        free.append((trail.eviction_key(item, 0.0) > -math.inf, elis.eviction_key(item, 0.0) > -math.inf))
    assert free == [(True, False), (True, True), (True, False), (True, False), (False, False), (False, False)]


def test_trail_learns_that_an_answer_is_one_of_the_long_ones() -> None:
    """Where SRPT says 0 is left, the conditional length says how much an answer beyond its median still needs."""
    item = state(prediction=LengthPrediction(math.log(100), 0.7, 3.5), cap=2000, num_output_tokens=160)
    srpt, trail = make_policy("srpt"), make_policy("trail")
    enter(srpt, item)
    enter(trail, item)
    expected = float(item.prediction.distribution().expected(2000.0, 160.0))
    assert srpt.key(item, 0.0) == 0.0
    assert trail.key(item, 0.0) == pytest.approx(expected, rel=0.02)
    assert expected > 50


def test_semantic_compares_urgency_first_and_then_time() -> None:
    """A100, Qwen1.5-4B, prompt n = 100, 50 tokens sure:
    prefill 1.46585e-9 * 100^2 + 1.0515576e-4 * 100 = 0.0105302 s,
    decode 5.91298857e-9 * (1250 + 5000 + 25) + 0.01195828 * 50 = 0.597951 s, f_t = 0.608481 s.
    After the prompt and 10 tokens: 40 left, n = 110: 5.91298857e-9 * (800 + 4400 + 20) + 0.4783312 = 0.478362 s."""
    policy = make_policy("semantic")
    item = state("a", prompt=100, prediction=sure(50), cap=1000, tier=2)
    most_urgent = UrgencyPrediction((1.0, 0, 0, 0, 0))
    urgent = state("b", prompt=900, prediction=sure(900), cap=1000, urgency=most_urgent)
    enter(policy, item, urgent)
    assert policy.remaining_s(item) == pytest.approx(0.608481, abs=2e-6)  # type: ignore[attr-defined]
    assert policy.key(urgent, 0.0) < policy.key(item, 0.0) == pytest.approx(2e8 + 0.608481, abs=1e-4)
    item.num_computed_tokens, item.num_output_tokens = 110, 10
    assert policy.remaining_s(item) == pytest.approx(0.478362, abs=2e-6)  # type: ignore[attr-defined]


def test_boost_values_and_limits() -> None:
    """gamma = 0.5/s, w = 2 s: exp(-1) = 0.367879, b = 2 ln(1/0.632121) = 0.917351 s. Large gamma: no boost, FCFS."""
    assert boost_s(2.0, 0.5) == pytest.approx(0.917350, abs=2e-6)
    assert boost_s(2.0, 50.0) < 1e-40
    assert boost_s(1e-6, 0.01) > 1000


def test_distboost_moves_short_prompts_ahead() -> None:
    """50 us per token, gamma = 0.1/s: 100 tokens are 5 ms, b = 10 ln(1/(1 - exp(-0.0005))) = 76.0115 s; 10,000 are 0.5 s,
    b = 30.2058 s. So the short one passes if it arrives less than 45.8 s later. Decode goes by entry."""
    policy = make_policy("distboost")
    short, long = state("a", prompt=100), state("b", prompt=10_000)
    assert policy.key(short, 0.0) == pytest.approx(-76.0115, abs=1e-3)
    assert policy.key(long, 0.0) == pytest.approx(-30.2058, abs=1e-3)
    long.num_computed_tokens, long.decode_entered_s, long.status = 10_000, 12.0, Status.RUNNING
    assert policy.key(long, 20.0) == 12.0


def test_uniboost_bins_by_floor_and_revises_as_often_as_stated() -> None:
    """k = 256: 255 and 511 are in bin 256, 512 in 512, 10,000 in 8192; on the way to 10,000 a request's bin changes
    floor(log2(10000/256)) = 5 times, with its first one 6 as the paper says."""
    policy = UniBoost()
    assert [policy.quantized(tokens) for tokens in (1, 255, 511, 512, 10_000)] == [256, 256, 256, 512, 8192]
    assert len({policy.quantized(tokens) for tokens in range(1, 10_001)}) == 6


def test_uniboost_may_be_displaced_only_after_a_threshold() -> None:
    """k = 8, prompt 6, adaptation off. Bins 8 (up to 15 tokens), 16, 32. So after 10, 26 generated tokens, and at no other
    time, a request can be displaced; without MemGuard always."""
    for guard, expected in ((True, [10, 26]), (False, list(range(1, 31)))):
        policy = make_policy("uniboost", {"bin_tokens": 8, "mem_guard": guard, "adapt_gamma": False})
        item = state(prompt=6)
        enter(policy, item)
        policy.on_admit(item, 0.0)
        generate(policy, item, 0, 0.0)
        free = []
        for generated in range(1, 31):
            generate(policy, item, 1, 0.0)
            if policy.eviction_key(item, 0.0) > LAST_RESORT:
                free.append(generated)
        assert free == expected


def test_uniboost_revises_a_key_only_at_a_threshold() -> None:
    """k = 8, prompt 6, 50 us and 1 ms per token: w is 8 prompt tokens, from 10 generated ones on 6 and 10, from 26 on 6 and 26."""
    policy = make_policy("uniboost", {"bin_tokens": 8, "gamma_per_s": 1.0, "adapt_gamma": False})
    item = state(prompt=6)
    keys = []
    for generated in range(31):
        item.num_output_tokens = generated
        keys.append(policy.key(item, 0.0))
    assert keys == [
        -boost_s(w, 1.0) for w in 10 * [8 * 5e-5] + 16 * [6 * 5e-5 + 0.01] + 5 * [6 * 5e-5 + 0.026]
    ]


def test_uniboost_preempts_a_request_once_between_two_thresholds_and_then_has_memory_for_it() -> None:
    """k = 8, prompt 6, preempted at 10 of 16 tokens: it comes back if 16 of 24 are free of such requests, with 8 to spare."""
    policy = make_policy("uniboost", {"bin_tokens": 8, "adapt_gamma": False})
    scheduler(policy, num_kv_blocks=24, kv_block_tokens=1)  # tells it the size of the cache
    item, other = state("a", prompt=6), state("b", prompt=3)
    for each in (item, other):
        enter(policy, each)
        policy.on_admit(each, 0.0)
        generate(policy, each, 4, 0.0)
        assert policy.eviction_key(each, 0.0) == LAST_RESORT
        policy.on_preempt(each, 0.0)
        assert policy.may_admit(each, 0.0)
    policy.on_admit(item, 0.0)
    assert policy.eviction_key(item, 0.0) == -math.inf
    assert not policy.may_admit(other, 0.0)
    assert policy.may_admit(state("new"), 0.0)
    generate(policy, item, 6, 0.0)
    assert policy.eviction_key(item, 0.0) == policy.key(item, 0.0)
    assert policy.may_admit(other, 0.0)


def test_uniboost_without_its_phases_is_boosted_by_work_and_has_hysteresis() -> None:
    """gamma = 1/s, 50 us and 1 ms per token. Prompt 1000, 950 generated: w = 0.05 + 0.95 = 1 s, b = 0.458675 s. A newcomer
    with a prompt of 1000: w = 0.05, b = 3.020629 s. It displaces if a + delta < 2.561954: delta 0.1, at 2.4 yes, 2.5 no."""
    policy = make_policy("uniboost", {"gamma_per_s": 1.0, "mem_guard": False, "adapt_gamma": False})
    old = state("a", prompt=1000, num_output_tokens=950, cap=2000)
    assert policy.key(old, 0.0) == pytest.approx(-0.458675, abs=1e-5)
    for arrival_s, displaces in ((2.4, True), (2.5, False)):
        new = state("b", prompt=1000, arrival_s=arrival_s)
        assert policy.key(new, 0.0) == pytest.approx(arrival_s - 3.020629, abs=1e-5)
        assert policy.may_preempt(old, new, 0.0) is displaces


def test_uniboost_signal_by_phase() -> None:
    """Prompt 1000 and 10 tokens generated: the signal is 10 tokens of decode, not 1010."""
    item = state(prompt=1000, num_computed_tokens=1010, num_output_tokens=10)
    assert UniBoost(signal_by_phase=True).effective_tokens(item) == (0, 10)
    assert UniBoost().effective_tokens(item) == (1000, 10)


def test_ssjf_orders_by_predicted_median_and_takes_max_tokens_without_one() -> None:
    policy = Ssjf()
    short, long = predicted("a", 20), predicted("b", 80)
    unknown, beyond = state("c"), predicted("d", 5000)
    assert key(policy, short) == pytest.approx(math.log(20))
    assert key(policy, short) < key(policy, long) < key(policy, unknown) == key(policy, beyond)


def test_sept_orders_by_the_expectation_of_the_capped_length() -> None:
    narrow, wide = predicted("a", 50, 0.1), predicted("b", 45, 1.5)
    assert key(Sept(), narrow) == pytest.approx(float(LogT(math.log(50), 0.1).expected(100)))
    assert key(Ssjf(), wide) < key(Ssjf(), narrow), "by median the wide one is shorter"
    fresh = Sept()
    tail = predicted("c", 45, 1.5, cap=4000)
    assert key(fresh, predicted("d", 50, 0.1, cap=4000)) < key(fresh, tail), "by mean it is longer"
    assert key(fresh, state("e", cap=77)) == 77


def test_tie_score_is_mean_plus_beta_times_tail_mean() -> None:
    """sigma -> 0 and median 40: E = CVaR = 40, so the score is 40 (1 + beta)."""
    policy = Tie()
    exact = predicted("a", 40, 1e-6)
    policy.on_prediction(exact)
    assert policy.score(exact) == pytest.approx(40 * 1.1, rel=1e-4)
    policy.on_pressure(num_waiting=30, max_num_seqs=10)
    assert policy.score(exact) == pytest.approx(40 * 1.3, rel=1e-4)
    wide = predicted("b", 40, 0.9)
    policy.on_prediction(wide)
    length = LogT(math.log(40), 0.9)
    score = float(length.expected(100)) + 0.3 * float(length.cvar(0.9, 100))
    assert policy.score(wide) == pytest.approx(score)


@pytest.mark.parametrize(("num_waiting", "beta"), BETAS.items())
def test_beta_follows_the_queue_on_a_grid(num_waiting: int, beta: float) -> None:
    """beta = clip(0.1 * Lq / B, 0.1, 0.5) with B = 10, rounded to steps of 0.05."""
    assert Tie().beta(num_waiting, 10) == pytest.approx(beta)


def test_waiting_lowers_the_tie_score_by_gamma_per_tau() -> None:
    """A request that waited 30 s longer is served as if its score were 0.9 of what it is."""
    policy = Tie()
    old = predicted("a", 50, 1e-6)
    assert key(policy, old) == pytest.approx(key(policy, predicted("b", 45, 1e-6, arrival_s=30.0)), abs=1e-6)
    assert key(policy, old, now=0.0) == key(policy, old, now=1e6), "static in time"


def test_slo_tie_lets_the_late_overtake_by_urgency_and_gives_up_the_missed() -> None:
    """token_s = 0.02, sure of 500 tokens: 10 s. Targets of 30 s: latest start 20 s, urgent from 18 s to 22 s. Before, the
    short one is first; at 18 s both long ones are, the more urgent level first; after 22 s TIE's order holds again."""
    policy = SloTie()
    short = state("s", prediction=sure(50), cap=1000)
    late = state("l", prediction=sure(500), cap=1000, ttlt_slo_s=30.0, order=1)
    grave = state(
        "g", prediction=sure(500), cap=1000, ttlt_slo_s=30.0, order=2,
        urgency=UrgencyPrediction((1.0, 0, 0, 0, 0)),
    )  # fmt: skip
    enter(policy, short, late, grave)

    def order() -> str:
        served = sorted([short, late, grave], key=lambda item: (policy.key(item, 0.0), item.order))
        return "".join(item.request_id for item in served)

    assert (list(policy.take_changed(17.9)), order()) == ([], "slg")
    assert (set(policy.take_changed(18.1)), order()) == ({late, grave}, "gls")
    assert (set(policy.take_changed(22.1)), order()) == ({late, grave}, "slg")


def test_gamma_is_the_slope_of_the_tail() -> None:
    """Exponential latencies of rate 2: ln 5/(t99 - t95) = 2. Eq. 9, not the 39 times smaller line 17 of the algorithm."""
    rate = TailRate(1.0, 20_000, 20_000, smoothing=1.0, min_per_s=1e-4, max_per_s=100.0)
    assert [rate.finished(float(value)) for value in np.random.default_rng(0).exponential(0.5, 20_000)][-1]
    assert rate.gamma_per_s == pytest.approx(2.0, rel=0.1)
    same = TailRate(1.0, 10, 10, smoothing=1.0, min_per_s=1e-4, max_per_s=7.0)
    assert [same.finished(1.0) for _ in range(10)][-1]
    assert same.gamma_per_s == 7.0, "a collapsed tail does not run away"
