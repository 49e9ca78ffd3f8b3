"""The benchmark's arithmetic: what it says about runs whose numbers are known."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.vllm_runs.client import Answer, read_event
from benchmarks.vllm_runs.page import Setting, report
from benchmarks.vllm_runs.plan import CAPACITY, Cell, asks, cells
from benchmarks.vllm_runs.results import (
    calibrated,
    interval,
    mean_step_s,
    measured_capacity,
    run_metrics,
    simulated,
    slowness,
    window_throughput,
)
from benchmarks.vllm_runs.table_predictor import TablePredictor
from scheduler_core.plan import PrefillChunk
from scheduler_core.predictions import LengthPrediction
from scheduler_core.predictor import PredictionRequest
from scheduler_core.simulator import LinearStepTime
from scheduler_core.simulator.step_time import StepWork

STEP = LinearStepTime(base_s=0.02, per_prefill_token_s=0.001, per_decode_s=0.004, per_context_token_s=0.00001)


def logged(rows: Any) -> list[list[float]]:
    """A log of steps that take what STEP says; a row: prefill tokens, decodes, context tokens."""
    steps, now = [], 0.0
    for prefill, decodes, context in np.asarray(rows).tolist():
        chunks = (PrefillChunk("", 0, prefill, True),) if prefill else ()
        contexts = [context] + [0] * (decodes - 1) if decodes else []
        seconds = STEP.step_s(StepWork(chunks, contexts))
        now += seconds
        steps.append([now, seconds, prefill, decodes, context if decodes else 0, decodes + bool(prefill)])
    return steps


def some_steps(count: int = 400) -> list[list[float]]:
    draws = np.random.default_rng(0)
    return logged(
        np.column_stack(
            [draws.integers(0, 200, count), draws.integers(1, 9, count), draws.integers(0, 900, count)]
        )
    )


def full_steps() -> list[list[float]]:
    """All of eight places decode, 40 times."""
    return logged([[0, 8, 8 * place] for place in range(5, 45)])


def test_metrics_of_two_requests() -> None:
    rows = [
        {"arrival_s": 0.0, "first_token_s": 1.0, "finish_s": 4.0, "output_tokens": 4},
        {"arrival_s": 1.0, "first_token_s": 4.0, "finish_s": 5.0, "output_tokens": 2},
    ]
    found = run_metrics(rows)
    assert (found["per_token_mean"], found["ttft_mean"], found["ttlt_mean"]) == (1.5, 2.0, 4.0)
    assert found["tokens_per_s"] == pytest.approx(6 / 5)


def test_an_interval_is_students() -> None:
    mean, half = interval([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(4.3027 / math.sqrt(3), rel=1e-4))
    assert math.isnan(interval([1.0])[1])


def test_step_times_are_found_again() -> None:
    fit = calibrated({"steps": some_steps()})
    for name, value in fit.parameters.items():
        assert value == pytest.approx(getattr(STEP, name)), name
    slower = calibrated({"steps": some_steps()}, 1.5)
    assert {name: value / 1.5 for name, value in slower.parameters.items()} == pytest.approx(fit.parameters)


def test_a_probe_tells_how_slow_the_machine_is_now() -> None:
    """Half the places empty, or a prompt in a step, is not what is asked; one hiccup changes nothing."""
    fit = calibrated({"steps": some_steps()})
    probe = [[end, 1.1 * seconds, *work] for end, seconds, *work in full_steps()]
    probe[3][1] = 9.0
    assert slowness(probe, fit) == pytest.approx(1.1)
    assert mean_step_s(probe) == pytest.approx(1.1 * STEP.step_s(StepWork((), [25] * 8)), rel=0.01)
    others = logged([[100, 8, 50], [0, 2, 50], [0, 1, 50]])
    assert slowness(others + probe, fit) == pytest.approx(1.1)


def test_the_simulator_prefers_short_answers_where_told_of_them() -> None:
    lengths = [60, 60, *([4] * 20)]
    rows = [
        {"request_id": f"q{i}", "arrival_s": 0.001 * i, "prompt_tokens": 10, "output_tokens": length}
        for i, length in enumerate(lengths)
    ]
    known = {f"q{i}": LengthPrediction(math.log(length), 0.1, 5.0) for i, length in enumerate(lengths)}
    told = {
        side: simulated(side, {"requests": rows}, known, STEP, 1, 64)
        for side in ("fcfs", "fcfs_again", "tie", "priority", "oracle")
    }
    assert told["fcfs_again"] == told["fcfs"]
    for side in ("tie", "priority", "oracle"):
        assert told[side]["per_token_mean"] < 0.8 * told["fcfs"]["per_token_mean"]


def test_requests_depend_on_the_repetition_alone_and_have_the_load_asked_for() -> None:
    prompts = [f"p{number}" for number in range(50)]
    once, again = (asks(prompts, 1, 2.0, 80, 0) for _ in range(2))
    faster, other = asks(prompts, 1, 4.0, 80, 0), asks(prompts, 2, 2.0, 80, 0)
    assert once == again
    assert [(ask.request_id, ask.seed) for ask in once] == [(ask.request_id, ask.seed) for ask in faster]
    assert [ask.at_s for ask in faster] == pytest.approx([ask.at_s / 2 for ask in once])
    assert {ask.prompt for ask in other} == set(prompts)
    assert {ask.request_id: ask.seed for ask in once} == {ask.request_id: ask.seed for ask in other}
    assert len({ask.seed for ask in once}) == 50
    assert [ask.request_id for ask in once] != [ask.request_id for ask in other]
    assert all(0 <= ask.at_s <= 25 for ask in once)
    for part in range(10):
        assert sum(2.5 * part <= ask.at_s < 2.5 * (part + 1) for ask in once) == 5, "a tenth in each tenth"
    assert {ask.at_s for ask in asks(prompts, 0, None, 80, 0)} == {0.0}


def test_short_and_long_answers_come_at_all_times() -> None:
    lengths = [1 + number % 100 for number in range(300)]
    rows = asks([str(number) for number in range(300)], 0, 2.0, 80, 0, lengths)
    for part in range(10):
        here = [lengths[int(ask.prompt)] for ask in rows[30 * part : 30 * (part + 1)]]
        assert np.mean(here) == pytest.approx(np.mean(lengths), abs=2.0)
    unspread = asks([str(number) for number in range(300)], 0, 2.0, 80, 0)
    assert max(abs(np.mean([lengths[int(ask.prompt)] for ask in unspread[30 * part : 30 * (part + 1)]]) - 50.5) for part in range(10)) > 5.0  # fmt: skip


def test_an_interrupted_plan_has_complete_pairs() -> None:
    plan = cells([1.2, 0.7], 3, ["fcfs", "tie", "ssjf", "oracle"], ["fcfs", "tie"], 2)
    assert plan[0] == CAPACITY
    assert len(plan) == 1 + 12 + 6 + 2 == len(set(plan))
    for place in (1, 5, 9):
        assert {cell.repetition for cell in plan[place : place + 4]} == {(place - 1) // 4}
    assert [cell.side for cell in plan[1:5]] == ["fcfs", "tie", "ssjf", "oracle"]
    assert [cell.side for cell in plan[5:9]] == ["oracle", "ssjf", "tie", "fcfs"]
    assert {cell.load for cell in plan[13:19]} == {0.7}
    assert [cell.side for cell in plan[19:]] == ["fcfs_again"] * 2


def test_a_capacity_is_that_of_full_places() -> None:
    """Two places, an answer every half second after the first two; the last ones alone."""
    finish = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 9.0, 20.0]
    assert measured_capacity([{"finish_s": one} for one in finish], 2) == pytest.approx(2.0)


def test_throughput_ends_with_the_last_arrival() -> None:
    rows = [{"arrival_s": 0.0}, {"arrival_s": 2.0}]
    steps = [[0.5, 0.5, 5, 0, 0, 1], [2.0, 1.5, 0, 3, 9, 3], [2.5, 0.5, 0, 2, 9, 2]]
    assert window_throughput({"requests": rows, "steps": steps}) == pytest.approx(2.0)


def test_a_stream_is_read_as_it_comes() -> None:
    answer = Answer("q0", 1.0, 1.5)
    events = [
        (1.6, {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}),
        (2.0, {"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}),
        (3.0, {"choices": [{"delta": {"content": ""}, "finish_reason": "stop"}]}),
        (3.5, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}),
    ]
    for now_s, event in events:
        read_event(b"data: " + json.dumps(event).encode() + b"\n", answer, now_s)
    read_event(b"data: [DONE]\n", answer, 4.0)
    assert answer == Answer("q0", 1.0, 1.5, 2.0, 3.0, 7, 2, "stop")


def test_a_table_of_whatever_is_there(tmp_path: Path) -> None:
    """Two repetitions of fcfs, one of tie: its change is paired with the same repetition."""
    known = {f"q{number}": LengthPrediction(2.0, 0.5, 5.0) for number in range(6)}
    setting = Setting(tmp_path, 6, 9, 2, [1.2, 0.7], known)
    assert report(setting) == ""

    def write(cell: Cell, slower: float) -> None:
        rows = [
            {
                "request_id": f"q{number}", "arrival_s": float(number), "sent_s": number + 0.25,
                "first_token_s": number + slower, "finish_s": number + 2 * slower, "prompt_tokens": 5,
                "output_tokens": 8, "finish_reason": "stop",
            }
            for number in range(6)
        ]  # fmt: skip
        probe = [[end, 1.2 * seconds, *work] for end, seconds, *work in full_steps()]
        content = {"requests": rows, "steps": some_steps(60), "probe": None if cell == CAPACITY else probe}
        cell.file(tmp_path).write_text(json.dumps(content), encoding="utf-8")

    write(CAPACITY, 1.0)
    assert report(setting).startswith("No run yet.")
    for cell, slower in (
        (Cell("fcfs", 0, 1.2), 1.0),
        (Cell("fcfs", 1, 1.2), 4.0),
        (Cell("tie", 1, 1.2), 3.0),
    ):
        write(cell, slower)
    table = report(setting)
    [fcfs, tie] = [line.split(" | ") for line in table.splitlines() if line.startswith("| 1.2x")]
    assert fcfs[2:4] == ["2", "0.625 ± 4.765"], "means 0.25 and 1, Student's t of one degree of freedom"
    assert tie[2:4] == ["1", "0.750"]
    assert tie[11] == "-25.0 %"
    assert "late by 250 ms" in table
    assert "1.20 to 1.20 times" in table
    assert "as in fcfs's run: 100.0 %" in table


async def test_an_oracle_is_told_anew_where_its_table_changes(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    oracle, asked = TablePredictor(str(path)), [PredictionRequest("q0", "Hello?", 80, "m", None)]
    with pytest.raises(FileNotFoundError):
        await oracle.predict(asked)
    for number, mu in enumerate((1.0, 2.0)):
        path.write_text(json.dumps({"Hello?": [mu, 0.1, 5.0]}), encoding="utf-8")
        os.utime(path, ns=(number + 1, number + 1))
        assert await oracle.predict(asked) == [LengthPrediction(mu, 0.1, 5.0)]
