"""One small run per batch former, worked out by hand from its paper.

A step is written as in `helpers.line`: "a+4" a chunk of 4 tokens, "a+4." the last one (it samples a token), "b" a decode,
"-c" preempted. The last chunk of a prompt yields the first output token, each decode one more.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_core.batching.slai import Slai
from scheduler_core.errors import InputError
from scheduler_core.kv_cost import KVCost
from scheduler_core.policies.base import Policy
from scheduler_core.request import Request
from tests.scheduler_core.helpers import Drive, predicted, request, scheduler
from tests.scheduler_core.test_scheduler import Urgent

#: A100, Qwen1.5-7B, from the paper's code.
A100_7B = KVCost(
    alpha_1=5.13462572e-07, alpha_2=1.48057167e-04, gamma_1=1.34911080e-08, gamma_2=1.330198e-02, beta=1e-4
)


def drive(former: str, rows: list[tuple[Request, int]], policy: str | Policy = "fcfs", **more: Any) -> Drive:
    """A run to its end, one second per step, blocks of one token."""
    parameters = more.pop("parameters", {})
    values = {"kv_block_tokens": 1, "kv_watermark": 0.0, "num_kv_blocks": 1000, **more}
    made = Drive(scheduler(policy, batching=former, batching_parameters=parameters, **values), rows)
    made.run()
    return made


def test_request_level_serves_a_batch_to_its_end() -> None:
    """Algorithm 3 of Bari et al. with b = 2; prompts 3, 2, 4 and outputs 2, 4, 2.

    a and b are processed together (token 1 of each), a ends with token 2, b decodes alone until token 4, although c
    waits and a seat is free; only then c's batch starts.
    """
    rows = [(request("a", prompt=3), 2), (request("b", prompt=2), 4), (request("c", prompt=4), 2)]
    assert drive("request_level", rows, max_num_seqs=2).lines == ["a+3. b+2.", "a b", "b", "b", "c+4.", "c"]


def test_orca_joins_at_any_iteration_if_the_longest_answer_fits() -> None:
    """n_slots = 12 tokens. a reserves 3 + 3, b 2 + 4, so n_rsrv = 12 and c (1 + 2) has to wait, although a seat is free and
    only 5 tokens are in the cache. a ends with its third token and gives back 6; c joins the next iteration, in which b
    decodes too."""
    rows = [
        (request("a", prompt=3, cap=3), 3), (request("b", prompt=2, cap=4), 4),
        (request("c", prompt=1, cap=2), 2),
    ]  # fmt: skip
    run = drive("orca", rows, max_num_seqs=3, num_kv_blocks=12)
    assert run.lines == ["a+3. b+2.", "a b", "a b", "c+1. b", "c"]


def test_a_request_waits_for_the_quantile_of_its_length() -> None:
    """12 tokens. a and b are sure to have 4 tokens: each reserves 2 + 4. c is expected to have 7, and waits for 1 + 7. d, without
    a prediction, needs only its prompt, but comes after c in the order. a and b end together, then c and d are admitted."""
    lengths = {"a": 4, "b": 4, "c": 7, "d": 2}
    rows = [
        (request(name, prompt=1 if name in "cd" else 2, cap=9), length) for name, length in lengths.items()
    ]
    predictions = {name: predicted(lengths[name], sigma=1e-6) for name in "abc"}
    limits = {"kv_block_tokens": 1, "kv_watermark": 0.0, "num_kv_blocks": 12, "max_num_seqs": 4}
    run = Drive(scheduler("fcfs", batching="quantile_reserve", **limits), rows, predictions=predictions)
    run.run()
    assert run.lines == ["a+2. b+2.", "a b", "a b", "a b", "c+1. d+1.", "c d", *["c"] * 5]


def test_vllm_lets_a_prompt_interrupt_the_decodes() -> None:
    """b arrives while a decodes: the next step is b's whole prompt alone, and a's next token comes a step later."""
    rows = [(request("a", prompt=3), 4), (request("b", prompt=6, arrival_s=1.5), 2)]
    assert drive("vllm", rows).lines == ["a+3.", "a", "b+6.", "a b", "a"]


def test_vllm_preempts_the_latest_and_takes_it_back_first() -> None:
    """8 blocks of one token. a (prompt 3) and b (prompt 2) take 5; each decode of both takes two more.

    Step 1: 5 + 2 = 7. Step 2: a takes the eighth, b finds none and is preempted; it holds 3 tokens (2 + 1 computed),
    has generated 2 and so has to process 4 again. a goes on: 5 blocks, then ends with token 4 after step 3.
    c came later than b and waits behind it: b's 4 tokens go first, and c's 2 in the same step.
    """
    rows = [
        (request("a", prompt=3, cap=4), 4), (request("b", prompt=2, cap=4), 4),
        (request("c", prompt=2, cap=1, arrival_s=1.5), 1),
    ]  # fmt: skip
    run = drive("vllm", rows, num_kv_blocks=8, max_num_seqs=2)
    assert run.lines == ["a+3. b+2.", "a b", "a -b", "a", "b+4. c+2.", "b"]


def test_sarathi_fills_the_budget_with_chunks_and_stalls_no_decode() -> None:
    """Token budget 4. Step 0: a's 3 tokens and 1 of b's 6. Then a's decode takes 1 and b gets 3, then its last 2."""
    rows = [(request("a", prompt=3), 4), (request("b", prompt=6), 2)]
    run = drive("chunked_prefill", rows, max_num_batched_tokens=4, max_num_seqs=4)
    assert run.lines == ["a+3. b+1", "b+3 a", "b+2. a", "a b"]


def test_stage_aware_keeps_prompts_away_from_an_urgent_decode() -> None:
    """Semantic scheduling, Algorithm 2, b = 2; the priority is the declared one.

    x (priority 1) is processed alone. y (priority 2) arrives: p* = x decodes, so y's prompt is dropped although a
    seat is free. z (priority 0) arrives: p* = z is in prefill, everything is merged, and the first b = 2 of z, x, y are
    z and x. Then p* = z decodes: y is dropped again, z and x decode; when z is done p* = x, and y still waits. At
    last p* = y.
    """
    rows = [
        (request("x", prompt=2, cap=9, priority=1), 5), (request("y", 0.5, prompt=3, cap=9, priority=2), 1),
        (request("z", 1.5, prompt=4, cap=9, priority=0), 2),
    ]  # fmt: skip
    run = drive("stage_aware", rows, policy="priority", max_num_seqs=2)
    assert run.lines == ["x+2.", "x", "z+4. x", "z x", "x", "y+3."]


@pytest.mark.parametrize(("beta", "victim", "back"), [(0.0, "-y(4)", "<y(4) y"), (1.0, "-y", "y+5.")])
def test_stage_aware_evicts_the_lowest_and_keeps_what_is_cheaper(beta: float, victim: str, back: str) -> None:
    """Semantic scheduling, Algorithm 4, in 9 tokens of memory; y (priority 2, prompt 3) decodes when z (priority 0,
    prompt 5) comes. y holds 4 tokens then and has generated 2; z's 5 and y's next one make 10 > 9. p* = z is served
    first and takes 5; y's turn comes next and finds no block: it is its own victim.

    At beta = 0 loading 4 tokens is free, so they are kept and y decodes at once when it comes back; at 1 s per token
    computing them again is cheaper, and its 3 + 2 known tokens are processed anew.
    """
    rows = [
        (request("y", prompt=3, cap=4, priority=2), 4), (request("z", 1.5, prompt=5, cap=1, priority=0), 1),
    ]  # fmt: skip
    run = drive(
        "stage_aware", rows, policy="priority", max_num_seqs=2, num_kv_blocks=9, preemption="swap",
        parameters={"beta": beta},
    )  # fmt: skip
    assert run.lines[:4] == ["y+3.", "y", f"z+5. {victim}", back]


RAD_ROWS = [
    (request("a", prompt=6), 3), (request("b", prompt=4), 2), (request("c", prompt=2), 3),
    (request("d", prompt=3), 1),
]  # fmt: skip
RAD = {"n": 3, "t_row": 4, "t_col": 2, "t_red": 1}


def test_rad_keeps_t_col_requests_decoding() -> None:
    """Algorithm 1 with n = 3, t_col = 2, t_lcm = LCM(4, 2, 1) = 4; prompts 6, 4, 2, 3, outputs 3, 2, 3, 1.

    Prefill mode: a in chunks of 4 and 2, then b in 4: |D| = 2. Decode mode: b is done with its second token, |D| = 1.
    Prefill: c, the third request of the cycle, so n are started. a and c decode; a is done. |D| = 1 < t_col and d
    waits, but n = 3 were started: c decodes alone. D is empty, the cycle ends, and d starts the next.
    """
    run = drive("rad", RAD_ROWS, parameters=RAD, max_num_seqs=4)
    assert run.lines == ["a+4", "a+2.", "b+4.", "a b", "c+2.", "a c", "c", "d+3."]


def test_rad_prefill_first_processes_all_prompts_of_a_cycle_before_any_decode() -> None:
    """Algorithm 2 with the same numbers: the prompts of a, b, c (n = 3), then t_col = 2 of D are active: a and b; b is done
    and c takes its place; a is done; c is done; then d."""
    run = drive("rad_prefill_first", RAD_ROWS, parameters=RAD, max_num_seqs=4)
    assert run.lines == ["a+4", "a+2.", "b+4.", "c+2.", "a b", "a c", "c", "d+3."]


def test_slai_decodes_when_they_become_critical() -> None:
    """Eq. 8 with delta = 1, steps of 1 s, token budget 4; TBT 3 s (a) and 6 s (b), prompts 2 and 2, and c's 12.

    Both get their first token at 1: C_a = 1 + 3 - 1 = 3, C_b = 1 + 6 - 1 = 6. At 1 and 2 nobody is critical and c's
    prompt takes the whole budget. At 3 a is critical and c gets the other 3; now C_a = 4 + 3 - 1 = 6. At 4 c has 1 left,
    and the budget has room for the decodes that are not critical, a before b since C_a = C_b and a came first.
    At 5 all three have their latest token at 5: C_a = 7, C_c = 5 + 6 - 1 = 10 = C_b, all decode.
    """
    rows = [
        (request("a", prompt=2, cap=9, tbt_slo_s=3.0), 4),
        (request("b", prompt=2, cap=9, tbt_slo_s=6.0), 3),
        (request("c", 0.5, prompt=12, cap=9, tbt_slo_s=6.0), 2),
    ]
    parameters = {"delta_low": 1.0, "delta_high": 1.0}
    run = drive("slai", rows, parameters=parameters, max_num_batched_tokens=4, max_num_seqs=4)
    assert run.lines == ["a+2. b+2.", "c+4", "c+4", "c+3 a", "c+1. a b", "a b c"]


def test_slai_doubles_its_offset_when_memory_is_nearly_used_up() -> None:
    """Section 7.1: delta = 5 below 96 % of the KV blocks and 10 from there on; mean batch time 0.02 s.

    a got its token at e = 1.0 and wants TBT = 0.15 s. C = 1 + 0.15 - 5 * 0.02 = 1.05 with free memory, and 0.95 with
    delta = 10. At 1.0 it is therefore critical only in the second case.
    """
    former = Slai()
    for _ in range(3):
        former.on_step(0.02)
    assert former.offset_s(0.95) == pytest.approx(0.1)
    assert former.offset_s(0.96) == pytest.approx(0.2)
    former.on_step(0.1)
    assert former.offset_s(0.0) == pytest.approx(5 * 0.04), "the plain mean of 0.02, 0.02, 0.02 and 0.1"


@pytest.mark.parametrize(("paying_first", "order"), [(False, "free paid"), (True, "paid free")])
def test_slai_takes_paying_prompts_first_if_told(paying_first: bool, order: str) -> None:
    """Two new prompts, SPF: the free one is shorter, and first unless paying requests (TBT 0.1 s) go first."""
    paid = request("paid", prompt=4, cap=9, tbt_slo_s=0.1)
    free = request("free", prompt=2, cap=9, tbt_slo_s=0.5)
    parameters = {"paying_first": paying_first}
    run = drive("slai", [(paid, 1), (free, 1)], policy="spf", parameters=parameters, max_num_seqs=1)
    assert [words.split("+")[0] for words in run.lines] == order.split()


def test_slai_evicts_the_prompt_started_last_for_a_critical_decode() -> None:
    """7 blocks of one token, budget 4, steps of 1 s, delta = 1: a wants TBT = 1, so C = e + 1 - 1 = e and a is critical
    at every step; b wants 9 and never is.

    Step 0: a's prompt (2) and 2 of b's 4 tokens; admission took blocks for all 4, so 2 + 4 = 6 are held. Step 1: a takes
    the seventh, b's prompt is done. Step 2: a finds no block and no prompt is under way: it evicts itself, and b
    takes one of the three that are free now. With a prompt of 5 for b all 7 are held after step 0; at step 1 a
    finds no block, and b, whose prompt is under way, has to go.
    """
    a, b = request("a", prompt=2, cap=5, tbt_slo_s=1.0), request("b", prompt=4, cap=3, tbt_slo_s=9.0)
    limits = {"max_num_batched_tokens": 4, "max_num_seqs": 4, "num_kv_blocks": 7}
    parameters = {"delta_low": 1.0, "delta_high": 1.0}
    run = drive("slai", [(a, 5), (b, 3)], parameters=parameters, **limits)
    assert run.lines[:3] == ["a+2. b+2", "b+2. a", "b -a"]
    run = drive("slai", [(a, 5), (request("b", prompt=5, cap=2), 2)], parameters=parameters, **limits)
    assert run.lines[:2] == ["a+2. b+2", "a -b"]


def priorities(*rows: tuple[str, int, int, int, float]) -> list[tuple[Request, int]]:
    """(name, priority, prompt, output, arrival)."""
    return [
        (request(name, at, prompt=prompt, cap=4, priority=first), length)
        for name, first, prompt, length, at in rows
    ]


@pytest.mark.parametrize(
    ("hysteresis_s", "lines"),
    [(0.0, ["a+3.", "a", "b+2.", "b", "a"]), (2.0, ["a+3.", "a", "a", "b+2.", "b"])],
)
def test_uniboost_takes_one_argmin_over_prompts_and_decodes(hysteresis_s: float, lines: list[str]) -> None:
    """Algorithm 1 with M = 1; Phi is the declared priority. b (1) comes while a (2) decodes: a is paused, not evicted, and
    goes on with its third token when b is done. With delta = 2 b is not far enough ahead: 1 < 2 - 2 does not hold."""
    rows = priorities(("a", 2, 3, 3, 0.0), ("b", 1, 2, 2, 1.5))
    parameters = {"hysteresis_s": hysteresis_s}
    run = drive("uniboost", rows, policy="priority", parameters=parameters, max_num_seqs=1)
    assert (run.lines, run.core.counters.num_preemptions) == (lines, 0)


@pytest.mark.parametrize(("swap_token_s", "third"), [(0.0, "z+2. x -y(6)"), (1.0, "z+2. y -x(3)")])
def test_uniboost_selects_victims_by_priority_and_swap_cost(swap_token_s: float, third: str) -> None:
    """9 blocks of one token: x (4) and y (5) hold 3 and 6 after a token each when z (0) needs 2. Without swap cost y is the
    victim, the last in the order; at 1 s per token x is: 4 - 3 > 5 - 6. The block that is left is y's next one."""
    rows = priorities(("x", 4, 2, 4, 0.0), ("y", 5, 5, 4, 0.0), ("z", 0, 2, 1, 1.5))
    run = drive("uniboost", rows, policy=Urgent(), num_kv_blocks=9, preemption="swap", parameters={"swap_token_s": swap_token_s})  # fmt: skip
    assert run.lines[:3] == ["x+2. y+5.", "x y", third]


@pytest.mark.parametrize(("num_kv_blocks", "third"), [(9, "p"), (14, "q+4.")])
def test_uniboost_pauses_but_does_not_evict_what_the_policy_protects(num_kv_blocks: int, third: str) -> None:
    """M = 1. p's eviction key is -infinity. Where q fits beside p it goes first and p pauses; else it waits."""
    rows = priorities(("p", 99, 5, 4, 0.0), ("q", 1, 4, 1, 1.5))
    run = drive("uniboost", rows, policy=Urgent(), num_kv_blocks=num_kv_blocks, max_num_seqs=1)
    assert (run.lines[:3], run.core.counters.num_preemptions) == (["p+5.", "p", third], 0)


def test_a_policy_that_preempts_is_refused_where_nobody_can_be_displaced() -> None:
    for former in ("orca", "request_level", "rad", "rad_prefill_first", "slai"):
        with pytest.raises(InputError, match="not preemptive"):
            scheduler("srpt", batching=former, batching_parameters={})


@pytest.mark.parametrize("former", ["orca", "request_level", "vllm"])
def test_a_prompt_that_must_not_be_split_has_to_fit_into_a_step(former: str) -> None:
    core = scheduler(batching=former, max_num_batched_tokens=100, max_num_seqs=4)
    with pytest.raises(InputError, match="does not split prompts"):
        core.add(request("a", prompt=101, cap=1), 0.0)
    core.add(request("a", prompt=100, cap=1), 0.0)


def test_decoding_costs_the_sum_over_the_tokens() -> None:
    """Eq. 4: the sum of gamma_1 i + gamma_2 for i = n + 1 .. n + m; n = 3, m = 2: gamma_1 (4 + 5) + 2 gamma_2."""
    assert KVCost(gamma_1=2.0, gamma_2=7.0).decode_s(3, 2) == 2.0 * 9 + 2 * 7.0


def test_the_rules_differ_where_the_paper_has_its_inequality_reversed() -> None:
    """A100, 7B, n = 1000 prompt tokens, nothing decoded: loading takes 0.1 s, prefill 0.5135 + 0.1481 = 0.6615 s.

    Loading is faster, so the exact rule keeps all 1000; inequality 3 as printed says the opposite.
    """
    assert A100_7B.prefill_s(1000) == pytest.approx(0.66152, abs=1e-5)
    assert A100_7B.return_s(1000, 1000) == pytest.approx(0.1)
    assert A100_7B.return_s(1000, 0) == A100_7B.prefill_s(1000)
    assert A100_7B.offload_tokens(1000, 0) == 1000
    assert A100_7B.offload_tokens(1000, 0, "paper") == 0


def test_the_printed_optimum_worked_out() -> None:
    """beta = 10, gamma_1 = 0.5, gamma_2 = 1, n = 4: (10 - 2 - (0.5 + 2) / 2) / (2 * 0.5) = 6.75 decoded tokens.

    Prefill of 4 tokens takes 4 * 0.1 = 0.4 s and loading 40 s; as printed the prompt is kept, and 6 of 9 tokens.
    """
    cost = KVCost(alpha_1=0.0, alpha_2=0.1, gamma_1=0.5, gamma_2=1.0, beta=10.0)
    assert cost.offload_tokens(4, 9, "paper") == 4 + 6
    assert cost.offload_tokens(4, 3, "paper") == 4 + 3, "no more than there are"
    assert cost.offload_tokens(4, 9, "exact") == 0


@given(st.integers(0, 60), st.integers(0, 60), st.floats(0, 1e-2), st.floats(0, 1e-1), st.floats(0, 1e-1))
def test_the_exact_rule_is_best_of_all(prompt: int, decoded: int, a1: float, a2: float, beta: float) -> None:
    cost = KVCost(alpha_1=a1, alpha_2=a2, beta=beta)
    total = prompt + decoded
    best = min(cost.return_s(total, kept) for kept in range(total + 1))
    assert cost.return_s(total, cost.offload_tokens(prompt, decoded)) <= best + 1e-9
