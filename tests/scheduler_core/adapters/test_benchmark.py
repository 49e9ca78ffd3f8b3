"""The benchmark's arithmetic: what it says about runs whose numbers are known."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.vllm_runs.client import Answer, Ask, read_event, send_all
from benchmarks.vllm_runs.clock import EngineClock
from benchmarks.vllm_runs.page import Setting, report
from benchmarks.vllm_runs.plan import CAPACITY, Cell, asks, cells
from benchmarks.vllm_runs.results import (
    CLOCK,
    calibrated,
    interval,
    measured_capacity,
    run_metrics,
    scheduling_s,
    simulated,
    slowness,
    window_throughput,
)
from benchmarks.vllm_runs.server import StepTail
from benchmarks.vllm_runs.table_predictor import TablePredictor
from scheduler_core.plan import PrefillChunk
from scheduler_core.predictions import LengthPrediction
from scheduler_core.predictor import PredictionRequest
from scheduler_core.simulator.step_time import StepWork
from scheduler_core.simulator.step_time.base import LinearStepTime

STEP = LinearStepTime(base_s=0.02, per_prefill_token_s=0.001, per_decode_s=0.004, per_context_token_s=0.00001)


def logged(rows: Any) -> list[list[float]]:
    """A log of steps that take what STEP says; a row: prefill tokens, decodes, context tokens."""
    steps, now = [], 0.0
    for prefill, decodes, context in np.asarray(rows).tolist():
        chunks = (PrefillChunk("", 0, prefill, True),) if prefill else ()
        contexts = [context] + [0] * (decodes - 1) if decodes else []
        seconds = STEP.step_s(StepWork(chunks, contexts))
        now += seconds
        steps.append(
            [now, seconds, prefill, decodes, context if decodes else 0, decodes + bool(prefill), 0.002]
        )
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
    fit = calibrated(some_steps())
    for name, value in fit.parameters.items():
        assert value == pytest.approx(getattr(STEP, name)), name
    slower = [[end, 1.1 * seconds, *work] for end, seconds, *work in some_steps()]
    assert slowness(slower, fit) == pytest.approx(1.1)
    assert scheduling_s(slower) == pytest.approx(0.002)


def test_a_clock_goes_as_fast_as_the_engines_steps() -> None:
    """The machine takes 1.5 times as long for half of the run; then half as long."""
    clock, now, said = EngineClock(STEP, recent=1), 0.0, 0.0
    assert clock.at(2.0) == 2.0
    for number, (_, seconds, *work) in enumerate(full_steps()):
        took = seconds * (1.5 if number < 20 else 0.5)
        clock.update(now, [[now, took, *work]])  # its speed is known when the next one begins
        assert clock.at(now) == pytest.approx(said)
        now, said = now + took, said + seconds
        assert clock.at(now) == pytest.approx(said)
        assert clock.when(said) == pytest.approx(now)
    plain = EngineClock()
    plain.update(1.0, full_steps())
    assert (plain.at(3.0), plain.when(3.0)) == (3.0, 3.0)


def test_a_log_is_read_while_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    early = StepTail(path)
    assert early.read() == []
    path.write_text("[1, 2]\n")
    late = StepTail(path)
    with path.open("a") as file:
        for text, found in (
            ("[3, 4]\n[5,", [[3, 4]]),
            (" 6]", []),
            ("\n[7, 8]\n", [[5, 6], [7, 8]]),
            ("", []),
        ):
            file.write(text)
            file.flush()
            assert late.read() == found
    assert early.read() == [[1, 2], [3, 4], [5, 6], [7, 8]]


@contextmanager
def engine(steps: Path) -> Iterator[str]:
    """An OpenAI server that completes each request with two tokens at once; its steps take twice the fitted time."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if body["messages"][0]["content"] == "refused":
                self.send_error(503, "overloaded")
                return
            events = (
                {"choices": [{"delta": {"content": "a"}, "finish_reason": None}]},
                {"choices": [{"delta": {"content": ""}, "finish_reason": "stop"}]},
                {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}},
            )
            answer = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    def work() -> None:
        while not ended.wait(0.03):
            said = STEP.step_s(StepWork((), [25] * 8))
            with steps.open("a", encoding="utf-8") as file:
                file.write(json.dumps([time.monotonic(), 2 * said, 0, 8, 200, 8, 0.0]) + "\n")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threads = [threading.Thread(target=run, daemon=True) for run in (server.serve_forever, work)]
    for thread in threads:
        thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        ended.set()
        server.shutdown()
        server.server_close()


def test_requests_are_sent_by_the_engines_clock(tmp_path: Path) -> None:
    rows = [Ask(f"q{number}", "Hello?", 0.5 * number, number, 80) for number in range(3)]
    steps = tmp_path / "steps"
    with engine(steps) as url:
        run = send_all(url, "m", rows, 1.0, EngineClock(STEP), StepTail(steps))
        with pytest.raises(RuntimeError, match="q0: HTTP 503"):
            asked = [Ask("q0", "refused", 0.0, 0, 80), replace(rows[1], at_s=60.0)]
            send_all(url, "m", asked, 1.0, EngineClock(), StepTail(steps))
        (tmp_path / "torn").write_text("")
        tail = StepTail(tmp_path / "torn")
        (tmp_path / "torn").write_text("no step\n")
        with pytest.raises(json.JSONDecodeError):
            send_all(url, "m", [replace(rows[0], at_s=60.0)], 1.0, EngineClock(), tail)
    found = run["requests"]
    assert [row["request_id"] for row in found] == ["q0", "q1", "q2"]
    assert [row["arrival_clock_s"] for row in found] == [0.0, 0.5, 1.0]
    assert run["steps"]
    for row in found:
        assert row["arrival_s"] <= row["sent_s"] <= row["first_token_s"] <= row["finish_s"]


def test_the_simulator_prefers_short_answers_where_told_of_them() -> None:
    lengths = [60, 60, *([4] * 20)]
    rows = [
        {"request_id": f"q{i}", "arrival_clock_s": 0.001 * i, "prompt_tokens": 10, "output_tokens": length}
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
    rows = [{"arrival_s": 0.0, "arrival_clock_s": 0.0}, {"arrival_s": 2.0, "arrival_clock_s": 4.0}]
    steps = [[0.5, 0.5, 5, 0, 0, 1], [2.0, 1.5, 0, 3, 9, 3], [2.5, 0.5, 0, 2, 9, 2]]
    assert window_throughput({"requests": rows, "steps": steps}) == pytest.approx(2.0)
    assert window_throughput({"requests": rows, "steps": steps}, CLOCK) == pytest.approx(1.0)


def test_a_stream_is_read_as_it_comes() -> None:
    answer = Answer("q0", 1.0, 0.5, 1.5)
    events = [
        (1.6, {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}),
        (2.0, {"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}),
        (3.0, {"choices": [{"delta": {"content": ""}, "finish_reason": "stop"}]}),
        (3.5, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}),
    ]
    for now_s, event in events:
        read_event(b"data: " + json.dumps(event).encode() + b"\n", answer, now_s, now_s / 2)
    read_event(b"data: [DONE]\n", answer, 4.0, 2.0)
    assert answer == Answer("q0", 1.0, 0.5, 1.5, 2.0, 3.0, 1.0, 1.5, 7, 2, "stop")


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
                "output_tokens": 8, "finish_reason": "stop", "arrival_clock_s": 0.5 * number,
                "first_token_clock_s": 0.5 * (number + slower), "finish_clock_s": 0.5 * number + slower,
            }
            for number in range(6)
        ]  # fmt: skip
        steps = [[end, 1.2 * seconds, *work] for end, seconds, *work in some_steps(60)]
        content = {"requests": rows, "steps": some_steps(60) if cell == CAPACITY else steps}
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
    assert (tie[15], tie[17]) == ("-25.0 %", "-25.0 %"), (
        "of the same repetition, by the wall and by the clock"
    )
    assert "late by 250 ms" in table
    assert (tie[9], tie[10], tie[11]) == ("1.20", "2.00", "0.375")
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
