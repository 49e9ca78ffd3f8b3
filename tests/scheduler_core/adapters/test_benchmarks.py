"""The arithmetic and the tables of the benchmarks of live engines, on runs whose numbers are known."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.agents.vllm_sessions import Turn, measures
from benchmarks.scheduling.routing import SentWork, table
from benchmarks.shared.pages import mean_cell
from benchmarks.vllm.plan import BURSTS, Cell, asks, cells
from benchmarks.vllm.results import CLOCK, measured_capacity, run_metrics, window_throughput
from scheduler_core.request import Request
from scheduler_core.routing.base import RoutingRequest
from scheduler_core.routing.snapshot import ReplicaSnapshot


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
