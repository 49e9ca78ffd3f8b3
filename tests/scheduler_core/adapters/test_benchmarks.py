"""The arithmetic and the tables of the benchmarks of live engines, on runs whose numbers are known."""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from benchmarks.agents.vllm_sessions import Turn, measures
from benchmarks.scheduling.routing import SentWork, table
from benchmarks.shared.pages import mean_cell
from benchmarks.vllm.client import Answer, read_event
from benchmarks.vllm.clock import step_work
from benchmarks.vllm.deadlines_page import page
from benchmarks.vllm.mixes import LONG_PREFILL, MIXES, SPIKES, VLLM, Mix, Scale
from benchmarks.vllm.outcomes import ALL, LongPrefill, capacity_rps, class_metrics, simulated, step_metrics
from benchmarks.vllm.plan import BURSTS, Cell, asks, cells
from benchmarks.vllm.results import CLOCK, REAL, measured_capacity, run_metrics, window_throughput
from scheduler_core.batching import BATCH_FORMERS
from scheduler_core.policies import make_policy
from scheduler_core.request import Request
from scheduler_core.routing.base import RoutingRequest
from scheduler_core.routing.snapshot import ReplicaSnapshot
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.step_time.base import LinearStepTime

#: Twice the fixed time of the default engine, and half as many tokens in it.
ENGINE = LinearStepTime(base_s=2 * 0.01716, per_prefill_token_s=4 * 5.47e-5, per_decode_s=4 * 5.47e-5)


def test_metrics_by_hand() -> None:
    first = {"arrival_s": 0.0, "first_token_s": 1.0, "finish_s": 4.0, "output_tokens": 4}
    rows = [first, {"arrival_s": 1.0, "first_token_s": 4.0, "finish_s": 5.0, "output_tokens": 2}]
    metrics = run_metrics(rows)
    assert (metrics["per_token_mean"], metrics["ttft_mean"], metrics["ttlt_mean"]) == (1.5, 2.0, 4.0)
    assert (metrics["ttft_p50"], metrics["ttft_max"], metrics["ttlt_max"]) == (2.0, 3.0, 4.0)
    assert (mean_cell([1.0, 2.0, 3.0]), mean_cell([1.0]), mean_cell([])) == ("2.00 ± 2.48", "1.00", "-")
    # Two slots, an output every half second after the first two; the last ones alone.
    finish = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 9.0, 20.0]
    assert measured_capacity([{"finish_s": one} for one in finish], 2) == pytest.approx(2.0)
    # Throughput ends with the last arrival.
    rows = [{"arrival_s": 0.0, "arrival_clock_s": 0.0}, {"arrival_s": 2.0, "arrival_clock_s": 4.0}]
    steps = [[0.5, 0.5, 5, 0, 0, 1], [2.0, 1.5, 0, 3, 9, 3], [2.5, 0.5, 0, 2, 9, 2]]
    assert window_throughput({"requests": rows, "steps": steps}) == pytest.approx(2.0)
    assert window_throughput({"requests": rows, "steps": steps}, CLOCK) == pytest.approx(1.0)


def test_measures_of_sessions_by_hand() -> None:
    turns = [Turn(0, 0, 0.0, 1.0, 2.0, 100), Turn(0, 1, 2.5, 3.0, 4.0, 150), Turn(1, 0, 0.0, 6.0, 8.0, 100)]
    values = measures(turns, 0.25)
    assert values["turns/s"] == 3 / 8
    assert (values["TTFT mean, s"], values["P50"], values["max"]) == (2.5, 1.0, 6.0)
    assert (values["session mean, s"], values["session max"], values["hits"]) == (6.0, 8.0, 0.25)


def test_bursts() -> None:
    prompts = [str(number) for number in range(200)]
    smooth = asks(prompts, 0, 2.0, 80, 0)
    bursts = asks(prompts, 0, 2.0, 80, 0, bursts=True)
    assert [ask.request_id for ask in bursts] == [ask.request_id for ask in smooth]
    # 100 s in four parts of 25 s; the first tenth of each has half of its requests.
    at = np.array([ask.at_s for ask in bursts])
    assert at.min() >= 0.0
    assert at.max() < 100.0
    in_bursts = np.mod(at, 100.0 / BURSTS) < 2.5
    np.testing.assert_array_equal(in_bursts, np.mod([ask.at_s for ask in smooth], 25.0) < 12.5)
    plan = cells([(1.2, False), (0.8, True)], 2, ["fcfs", "tie", "ssjf"])
    assert len({cell.file(Path()) for cell in plan}) == len(plan) == 1 + 6 + 6
    assert plan[7] == Cell("fcfs", 0, 0.8, bursts=True)


def test_table_by_hand() -> None:
    runs = {
        "least busy": [np.full(9, 1.0), np.full(9, 2.0)],
        "two at random": [np.full(9, 2.0), np.full(9, 4.0)],
    }
    lines = table(runs).splitlines()
    assert len(lines) == 4
    assert lines[2] == "| least busy |" + 9 * " 1.5 |" + 4 * " 1 |"
    assert lines[3] == "| two at random |" + 9 * " 3 |" + 4 * " 2.00 ± 0.00 |"
    one = table({side: results[:1] for side, results in runs.items()}).splitlines()
    assert one[3].endswith(4 * " | 2.00" + " |")  # one seed has no interval


def test_work_that_was_sent_counts_until_it_ends() -> None:
    router = SentWork(work_s={"a": 3.0, "b": 1.0, "c": 1.0})
    replicas = [ReplicaSnapshot(replica_id=name, num_kv_blocks=9, num_free_blocks=9) for name in "01"]
    requests = {
        name: Request(request_id=name, arrival_s=0.0, prompt_tokens=1, max_tokens=1) for name in "abc"
    }
    chosen = []
    for name, request in requests.items():
        item = RoutingRequest(request=request)
        chosen.append(router.choose(item, replicas, 0.0))
        router.on_dispatched(item, chosen[-1], 0.0)
        if name == "b":
            router.on_finished("a", "0", 0.0)
    assert chosen == ["0", "1", "0"]


def test_times_and_tokens_of_a_paper_are_scaled_to_the_engine() -> None:
    scale = Scale.of(ENGINE, LinearStepTime())
    assert (scale.tokens, scale.seconds) == pytest.approx((0.5, 2.0))
    mix = MIXES["deadlines"](100, ENGINE, 0)
    limits = {
        tenant: {row.tbt_slo_s for row in mix.rows if row.tenant == tenant} for tenant in ("paying", "free")
    }
    assert limits == {"paying": {0.2}, "free": {1.0}}
    assert sum(row.tenant == "paying" for row in mix.rows) == 5
    assert (mix.limits.max_num_seqs, mix.limits.max_num_batched_tokens, mix.max_model_len) == (64, 256, 2048)
    # Half of the paper's lengths: medians of 1,730 and 415 tokens.
    assert np.median([row.prompt_tokens for row in mix.rows]) == pytest.approx(1730 / 4, rel=0.05)
    assert np.median([row.output_tokens for row in mix.rows]) == pytest.approx(415 / 4, rel=0.05)
    prompts = sorted(row.prompt_tokens for row in mix.rows)
    paying = [row.prompt_tokens for row in mix.rows if row.tenant == "paying"]
    # A paying request among each fifth of the prompts.
    assert sorted(int(np.searchsorted(prompts, tokens)) // 20 for tokens in paying) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", MIXES)
def test_every_mix_fits_its_engine_and_is_the_same_for_all_sides(name: str) -> None:
    mix = MIXES[name](40, ENGINE, 0)
    assert next(iter(mix.sides)) == VLLM
    assert mix.sides[VLLM].settings() is None
    assert max(row.prompt_tokens + row.output_tokens for row in mix.rows) <= mix.max_model_len
    assert mix.limits.num_kv_blocks * mix.limits.kv_block_tokens >= mix.max_model_len
    drawn = mix.asks(0, 2.0, 0)
    assert drawn == mix.asks(0, 2.0, 0)
    by_id = {row.request_id: row for row in mix.rows}
    for ask in drawn:
        row = by_id[ask.request_id]
        assert (len(ask.prompt), ask.max_tokens) == (row.prompt_tokens, row.output_tokens)
        assert ask.hints.get("tailcast_tbt_slo_s") == row.tbt_slo_s
    if mix.gap_s is None:
        assert 0 < max(ask.at_s for ask in drawn) <= 40 / 2.0
    else:
        spikes = {round(ask.at_s / mix.gap_s, 9) for ask in drawn}
        assert spikes <= set(range(SPIKES))
        assert len(spikes) > 5
    words = mix.server_options(VLLM)
    assert words[words.index("--num-gpu-blocks-override") + 1] == str(mix.limits.num_kv_blocks + 1)


@pytest.mark.parametrize(("prompts", "expected"), [((200, 100, 20), [30, 30, 4]), ((200,), [64])])
def test_long_prompts_share_a_step(prompts: tuple[int, ...], expected: list[int]) -> None:
    """vLLM's threshold: long prompts get 30 tokens each, and the next one what is left; one alone gets the whole budget."""
    with patch.dict(BATCH_FORMERS, {LONG_PREFILL: LongPrefill}):
        config = SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=64,
            batching=LONG_PREFILL,
            batching_parameters={"threshold": 30},
        )
        scheduler = Scheduler(config, make_policy("fcfs"))
    for index, tokens in enumerate(prompts):
        name = str(index)
        scheduler.add(Request(request_id=name, arrival_s=0.0, prompt_tokens=tokens, max_tokens=1), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert [chunk.num_tokens for chunk in plan.prefills] == expected


def test_token_deadlines_by_hand() -> None:
    mix = MIXES["deadlines"](20, ENGINE, 0)
    paying, free = (next(row for row in mix.rows if row.tenant == tenant) for tenant in ("paying", "free"))
    row = {
        "request_id": paying.request_id,
        "arrival_s": 0.0,
        "first_token_s": 1.0,
        "finish_s": 1.8,
        "output_tokens": 4,
    }
    rows = [
        {**row, "token_s": [1.0, 1.1, 1.5, 1.8]},  # gaps of 0.1, 0.4 and 0.3 s; the limit is 0.2
        {
            **row,
            "request_id": free.request_id,
            "first_token_s": 3.0,
            "finish_s": 5.2,
            "token_s": [3.0, 3.9, 5.2],
        },
    ]
    metrics = class_metrics(rows, {one.request_id: one for one in mix.rows}, REAL)
    assert metrics["paying"]["deadlines_kept"] == pytest.approx(1 / 3)
    assert metrics["free"]["deadlines_kept"] == 0.5
    assert metrics[ALL]["deadlines_kept"] == 0.4
    assert (metrics["paying"]["ttft_p50"], metrics[ALL]["ttft_p50"], metrics[ALL]["ttlt_mean"]) == (
        1.0,
        2.0,
        3.5,
    )
    assert metrics["paying"]["tbt_p50"] == pytest.approx(0.3)


def test_what_the_steps_contained_by_hand() -> None:
    # end, seconds, prompt tokens, decodes, contexts, new, scheduling; before, held back, waiting, KV use, preemptions
    steps = [
        [0.1, 0.1, 60, 1, 10, 1, 0.001, 40, 3, 2, 0.5, 0],
        [0.2, 0.2, 0, 4, 40, 4, 0.001, 0, 0, 0, 0.7, 1],
    ]
    metrics = step_metrics(steps)
    assert (metrics["fraction_with_prompt"], metrics["prompt_tokens_per_step_with_prompt"]) == (0.5, 60)
    assert (metrics["step_with_prompt_s"], metrics["decode_step_s"]) == (0.1, 0.2)
    assert metrics["fraction_of_decodes_held_back"] == 3 / 8
    assert (metrics["max_kv_use"], metrics["preemptions"]) == (0.7, 1)
    assert step_work(steps[0]).num_context_tokens == 50
    assert (
        step_work(steps[0][:7]).num_context_tokens == 10
    )  # a log without the number of tokens before the chunks


def test_a_chunk_with_several_tokens_counts_each() -> None:
    answer = Answer("q0", 0.0, 0.0, 0.0)
    for at, (text, tokens) in enumerate((("a", [5]), ("", [6]), ("bc", [7, 8])), start=1):
        event = {
            "choices": [{"text": text, "token_ids": tokens, "finish_reason": "length" if at == 3 else None}]
        }
        read_event(b"data: " + json.dumps(event).encode(), answer, float(at), 10.0 * at)
    assert answer.token_s == [1.0, 2.0, 3.0, 3.0]
    assert answer.token_clock_s == [10.0, 20.0, 30.0, 30.0]
    assert (answer.first_token_s, answer.finish_clock_s, answer.finish_reason) == (1.0, 30.0, "length")


def _run(mix: Mix, rate: float) -> list[dict[str, object]]:
    return [{"request_id": ask.request_id, "arrival_clock_s": ask.at_s} for ask in mix.asks(0, rate, 0)]


def test_the_simulator_beside_the_engine() -> None:
    mix = MIXES["deadlines"](40, ENGINE, 0)
    capacity = capacity_rps(mix, VLLM, ENGINE, 0)
    slow = replace(ENGINE, base_s=2 * ENGINE.base_s)
    assert capacity_rps(mix, VLLM, slow, 0) < capacity
    sides = {side: simulated(mix, side, _run(mix, capacity), ENGINE) for side in mix.sides}
    assert {name: metrics[ALL]["num"] for name, metrics in sides.items()} == dict.fromkeys(sides, 40)
    assert sides["vllm_threshold"][ALL]["ttft_p50"] > sides[VLLM][ALL]["ttft_p50"]
    assert sides["slai"][ALL]["tbt_p99"] > sides[VLLM][ALL]["tbt_p99"]
    assert sides["slai"]["paying"]["deadlines_kept"] > 0.9
    rows = [
        {"mix": "deadlines", "load": 1.0, "side": side, "repetition": 0, "engine": metrics, "simulator": metrics,
         "steps": step_metrics([[1.0, 1.0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0]]) | {"slowness": 1.0}}
        for side, metrics in sides.items()
    ]  # fmt: skip
    summary = {
        "num_requests": 40, "prompt_tokens": {"mean": 1.0}, "output_tokens": {"mean": 1.0}, "max_num_seqs": 1,
        "max_num_batched_tokens": 1, "kv_tokens": 1, "gap_s": None, "capacity_rps": capacity,
        "tbt_slo_s": {"paying": 0.2, "free": 1.0},
    }  # fmt: skip
    lines = page(
        {"rows": rows, "fit": {"base_s": 1.0, "median_error": 0.0}, "mixes": {"deadlines": summary}}
    ).splitlines()
    assert [line.split("|")[2].strip() for line in lines[2 : 2 + len(sides)]] == list(sides)
    assert all(line.endswith("| +0.0 |") for line in lines[2 : 2 + len(sides)])
