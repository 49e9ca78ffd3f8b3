"""Sweeps: cells and their keys, resumption, and the search for a capacity."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler_core.errors import InputError
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator import sweep
from scheduler_core.simulator.commands.capacity import CapacityConfig, find_capacity
from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.metrics import metric
from scheduler_core.simulator.sweep import Cell, CellStore, grid, run_cells, simulate_cell
from scheduler_core.simulator.workloads.lengths import Lengths, TokenDistribution
from scheduler_core.simulator.workloads.workload import Tiers, Workload

LENGTHS = Lengths(prompt=TokenDistribution(high=60), output=TokenDistribution(high=30))
WORKLOAD = Workload(num_requests=25, lengths=LENGTHS)
BASE = SimulationConfig(policy="fcfs", workload=WORKLOAD, scheduler=SchedulerConfig(max_num_seqs=8))
VARY: dict[str, list[Any]] = {"policy": ["fcfs", "sjf"], "load": [0.5, 1.0]}


def test_a_grid_has_every_combination_with_every_seed() -> None:
    cells = grid(BASE, VARY | {"scheduler.batching": ["chunked_prefill", "vllm"]}, range(3))
    assert len(cells) == len({cell.key() for cell in cells}) == 2 * 2 * 2 * 3
    first = cells[-1]
    assert first.config.policy == "sjf"
    assert (first.config.scheduler.batching, first.config.load, first.config.seed) == ("vllm", 1.0, 2)
    assert first.settings == {"policy": "sjf", "load": 1.0, "scheduler.batching": "vllm", "seed": 2}
    assert len({sweep.point_of(cell.settings) for cell in cells}) == 8


def test_a_bound_stands_beside_policies_with_a_live_predictor() -> None:
    cells = grid(replace(BASE, predictor="grpc://127.0.0.1:1"), {"policy": ["tie", "sjf"]}, range(1))
    sources = {cell.config.policy: cell.config.prediction_source for cell in cells}
    assert sources == {"tie": "grpc://127.0.0.1:1", "sjf": "oracle"}
    assert simulate_cell(cells[1]).predictor["source"] == "oracle"


@pytest.mark.parametrize(
    ("vary", "named"),
    [
        ({"polcy": ["fcfs"]}, "setting polcy"), ({"seed": [1]}, "vary"),
        ({"load": [0.5], "scheduler.max_num_seqs": [4, 8]}, "load"),
        ({"policy": ["fcfs", "srpt"], "scheduler.batching": ["chunked_prefill", "orca"]}, "policy under Orca"),
    ],
)  # fmt: skip
def test_wrong_grids_are_named(vary: Mapping[str, Sequence[Any]], named: str) -> None:
    with pytest.raises(InputError) as caught:
        grid(BASE, vary, range(1))
    assert caught.value.field.startswith(named)


def test_the_number_of_tiers_is_of_the_workload_and_the_cluster() -> None:
    base = replace(BASE, workload=replace(WORKLOAD, tiers=Tiers(num_tiers=3)))
    for cell, number in zip(grid(base, {"num_tiers": [2, 4]}, range(1)), (2, 4), strict=True):
        assert cell.config.workload is not None
        assert cell.config.workload.tiers == Tiers(num_tiers=number)
        assert cell.config.cluster.num_tiers == cell.settings["num_tiers"] == number


def test_the_key_changes_with_configuration_and_with_files(tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text('{"prompt_tokens": 3, "output_tokens": 4}\n')
    cell = Cell(sweep.with_setting(BASE, "workload", Workload(lengths=Lengths(file=str(file)))), {})
    tie = sweep.with_setting(sweep.with_setting(BASE, "policy", "tie"), "policy_parameters.gamma", 0.5)
    assert (tie.policy_parameters, BASE.policy_parameters) == ({"gamma": 0.5}, {}), "the base is as it was"
    before = cell.key()
    assert before == Cell(cell.config, {"other": 1}).key(), "how a sweep calls it is not what it is"
    assert before != Cell(sweep.with_setting(cell.config, "seed", 1), {}).key()
    file.write_text('{"prompt_tokens": 3, "output_tokens": 5}\n')
    assert cell.key() != before


def test_a_killed_sweep_goes_on_and_does_none_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells, store = grid(BASE, VARY, range(2)), CellStore(tmp_path)
    done: list[str] = []
    real = sweep.simulate_cell

    def killed(cell: Cell) -> Any:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(cell.key())
        return real(cell)

    monkeypatch.setattr(sweep, "simulate_cell", killed)
    with pytest.raises(KeyboardInterrupt):
        run_cells(cells, store)
    assert len(list(tmp_path.iterdir())) == 3, "whole files only"
    told: list[int] = []
    monkeypatch.setattr(sweep, "simulate_cell", lambda cell: (done.append(cell.key()), real(cell))[1])
    results = run_cells(cells, store, progress=told.append)
    assert sorted(done) == sorted(cell.key() for cell in cells), "each once"
    assert (sum(told), told[0]) == (len(cells), 3)
    assert [one["settings"] for one in results] == [dict(cell.settings) for cell in cells]
    assert (run_cells(cells, store), len(done)) == (results, len(cells))


@pytest.mark.slow
def test_processes_give_what_one_process_gives(tmp_path: Path) -> None:
    cells = grid(BASE, {"policy": ["fcfs", "sjf"]}, range(1))
    alone = run_cells(cells, CellStore(tmp_path / "a"))
    assert alone == run_cells(cells, CellStore(tmp_path / "b"), workers=2)


@pytest.mark.parametrize("content", ["", "[]", '{"key": "x", "schema": "tailcast.cell/1"}'])
def test_a_foreign_file_is_refused(content: str, tmp_path: Path) -> None:
    (cell,) = grid(BASE, {"policy": ["fcfs"]}, range(1))
    store = CellStore(tmp_path)
    store.path(cell.key()).write_text(content)
    with pytest.raises(InputError, match="^out: got"):
        run_cells([cell], store)


def test_a_metric_that_is_not_there_says_what_is() -> None:
    tree = {"ttft_s": {"mean": 1.0, "p99": 2.0}, "num": 3}
    assert metric(tree, "ttft_s.p99") == 2.0
    for name, told in (("ttft_s.p98", "p99"), ("nothing", "ttft_s")):
        with pytest.raises(InputError) as caught:
            metric(tree, name)
        assert told in caught.value.allowed


def mm1(cells: Sequence[Cell], noise: float) -> list[dict[str, Any]]:
    """Mean time in an M/M/1 queue of mean service 1 at the cell's rate, off by noise of the seed."""
    found = []
    for cell in cells:
        rate = cell.config.rate
        assert rate is not None
        wait = math.inf if rate >= 1 else 1 / (1 - rate)
        error = np.random.default_rng(cell.config.seed).normal(0, noise)
        found.append({"metrics": {"ttlt_s": {"mean": min(wait, 1e6) * (1 + error)}}})
    return found


def capacity_config(**more: Any) -> CapacityConfig:
    base = {"policy": "fcfs", "workload": WORKLOAD, "scheduler": BASE.scheduler, "json": "capacity.json"}
    search = {"low": 0.1, "high": 2.0, "unit": "rate", "tolerance": 0.01, "at_most": {"ttlt_s.mean": 5.0}}
    return CapacityConfig(**{**base, **search, **more})


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.011), (0.02, 0.03)])
def test_capacity_of_a_queue_with_a_known_answer(noise: float, tolerance: float) -> None:
    """1 / (1 - rate) <= 5 up to a rate of 0.8."""
    found = find_capacity(capacity_config(max_seeds=12), lambda cells: mm1(cells, noise))
    assert found["level"] == pytest.approx(0.8, rel=tolerance)
    assert found["level"] < found["failing"] <= found["level"] * 1.0101
    if noise:
        assert any(not probe["clear"] for probe in found["probes"]), "near the bound the seeds do not tell"
        assert found["probes"][0]["clear"]


@pytest.mark.parametrize(("low", "high", "named"), [(0.85, 2.0, "low"), (0.1, 0.7, "high")])
def test_a_capacity_search_says_which_end_is_wrong(low: float, high: float, named: str) -> None:
    with pytest.raises(InputError, match=f"^{named}: got"):
        find_capacity(capacity_config(low=low, high=high), lambda cells: mm1(cells, 0.0))
