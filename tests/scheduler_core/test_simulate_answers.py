"""Answers of `simulate` that would mislead, and what it says about them: steady states, seeds, refused and unpredicted requests."""

import json
import logging
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_gen.importers.config import ImportLengthsConfig
from data_gen.importers.import_lengths import import_lengths
from scheduler_core.errors import InputError
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.commands import calibrate
from scheduler_core.simulator.commands.replicas import ReplicasConfig, find_replicas
from scheduler_core.simulator.commands.simulate import main
from scheduler_core.simulator.config import ClusterConfig, SimulationConfig
from scheduler_core.simulator.measurements.sources import MeasurementSource
from scheduler_core.simulator.measurements.steps import StepMeasurement
from scheduler_core.simulator.metrics import metric_bounds
from scheduler_core.simulator.run import run_simulation
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.step_time.roofline import GPUS, MODELS, RooflineStepTime
from scheduler_core.simulator.sweep import Cell
from scheduler_core.simulator.trace import MAX_TIME_S, Trace, load_trace, write_trace
from scheduler_core.simulator.trace_predictions import fetch_predictions
from scheduler_core.simulator.workloads.workload import Workload
from scheduler_core.statistics import interval
from tests.scheduler_core.helpers import predicted, random_trace, simulate, trace_row

Caplog = pytest.LogCaptureFixture


def typed(command: str, *words: str) -> int:
    return main([*command.split(), *words])


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """A log of 30 seconds."""
    rng = np.random.default_rng(0)
    rows = [
        trace_row(f"r{at}", 0.5 * at, int(rng.integers(50, 1500)), int(rng.integers(100, 600)), 1000)
        for at in range(60)
    ]
    write_trace(Trace(tuple(rows)), tmp_path / "short.jsonl")
    return tmp_path / "short.jsonl"


@pytest.mark.mend  # A log of 30 s reported a load of 16.6; repeated fifteen times it is 0.6.
def test_a_capacity_of_a_short_log_says_so_and_names_the_repeats_that_are_enough(
    short: Path, caplog: Caplog
) -> None:
    search = f"capacity --trace {short} --policy fcfs --high 30 --tolerance 0.5 --overwrite true"
    search += f" --scheduler.max_num_seqs 58 --max_seeds 2 --json {short.parent}/c.json --at_most"
    assert typed(search, "{ttft_s.p99: 2}") == 0
    result = read(short.parent / "c.json")
    assert result["level"] > 1.5
    warning = result["warnings"]["steady_state"]
    assert "no steady state" in warning
    assert warning in caplog.messages
    repeats = int(warning.partition("--repeat ")[2].split(",")[0])
    assert typed(search, "{ttft_s.p99: 2}", "--repeat", str(repeats)) == 0
    result = read(short.parent / "c.json")
    assert result["level"] < 1.2
    assert "steady_state" not in result["warnings"]


@pytest.mark.parametrize(("load", "steady"), [(0.5, True), (0.8, True), (1.2, False), (3.0, False)])
def test_an_overloaded_run_has_no_steady_state(load: float, steady: bool) -> None:
    result = run_simulation(
        SimulationConfig(policy="fcfs", workload=Workload(num_requests=1500), load=load, seed=1)
    )
    assert ("steady_state" not in result.warnings) == steady
    if load == 3.0:
        accumulated = result.metrics["steady_state"]["accumulated_fraction"]
        assert accumulated == pytest.approx(1 - 1 / load, abs=0.07)
        assert "workload.num_requests" in result.warnings["steady_state"]


def test_requests_at_once_have_no_steady_state_to_reach() -> None:
    rows = tuple(trace_row(f"r{at}", 0.0, 10, 20) for at in range(50))
    assert "steady_state" not in simulate(Trace(rows)).warnings


def test_a_repeated_trace_has_new_ids_and_later_arrivals() -> None:
    rows = random_trace(20).requests
    talk = [trace_row("a#2", 3.0, 5, 5, session_id="s"), trace_row("b", 4.0, 9, 5, session_id="s", turn=1)]
    trace = Trace(tuple(sorted((*rows, *talk), key=lambda row: row.arrival_s)))
    three = trace.repeated(3)
    assert len({row.request_id for row in three.requests}) == len(three) == 66
    assert three.requests[:22] == trace.requests
    arrivals = np.array([row.arrival_s for row in three.requests])
    assert np.all(np.diff(arrivals) >= 0)
    assert three.mean_rate_rps == pytest.approx(trace.mean_rate_rps)
    sessions = [row.session_id for row in three.requests if row.session_id]
    assert {name: sessions.count(name) for name in sessions} == {"s": 2, "s##2": 2, "s##3": 2}
    assert [row.turn for row in three.requests if row.session_id] == [0, 1] * 3
    assert trace.repeated(1) == trace
    for num in (0, 10**8):
        with pytest.raises(InputError, match="repeat: got"):
            trace.repeated(num)
    with pytest.raises(InputError, match="repeat: got 2"):
        Trace((trace_row("a", 0.0, 5, 5), trace_row("b", 0.9 * MAX_TIME_S, 5, 5))).repeated(2)


@pytest.mark.parametrize("command", ["run", "sweep", "capacity", "replicas"])
def test_every_command_that_reads_a_trace_repeats_it(command: str, short: Path) -> None:
    out = short.parent / "out"
    options = {
        "run": f"--policy fcfs --json {out}",
        "sweep": f"{out} --loads [0.5] --num_seeds 2",
        "capacity": f"--max_seeds 2 --tolerance 0.9 --json {out} --cells {out}.cells --at_most",
        "replicas": f"--max_seeds 2 --json {out} --cells {out}.cells --at_most",
    }[command]
    target = ["{mean_requests_in_system: 30}"] if options.endswith("--at_most") else []
    assert typed(f"{command} --trace {short} --repeat 3 {options}", *target) == 0
    if command == "run":
        assert read(out)["trace"]["num_requests"] == 180
    else:
        folder = out / "cells" if command == "sweep" else Path(f"{out}.cells")
        assert {read(path)["trace"]["num_requests"] for path in folder.iterdir()} == {180}


def test_a_workload_is_not_repeated() -> None:
    with pytest.raises(InputError, match="repeat: got 2"):
        SimulationConfig(policy="fcfs", workload=Workload(), repeat=2)


def queues(cells: Sequence[Cell], arrivals: float) -> list[dict[str, Any]]:
    """Mean time in M/M/1 queues of mean service 1 that share the arrivals equally."""
    rates = [arrivals / cell.config.cluster.num_replicas for cell in cells]
    return [{"metrics": {"ttlt_s": {"mean": 1 / (1 - rate) if rate < 1 else 1e6}}} for rate in rates]


@pytest.mark.parametrize(("arrivals", "replicas"), [(0.5, 1), (0.9, 2), (1.7, 3), (12.1, 16), (38.0, 48)])
def test_replicas_of_queues_with_a_known_answer(arrivals: float, replicas: int) -> None:
    """1 / (1 - rate / n) <= 5 from n = rate / 0.8 on."""
    config = ReplicasConfig(policy="fcfs", workload=Workload(), json="r.json", at_most={"ttlt_s.mean": 5.0})
    found = find_replicas(config, lambda cells: queues(cells, arrivals))
    assert (found["num_replicas"], found["failing"]) == (replicas, replicas - 1 or None)
    assert found["clear"]
    assert found["estimates"]["ttlt_s.mean"]["mean"] <= 5.0
    levels = [probe["level"] for probe in found["probes"]]
    assert len(levels) == len(set(levels)) <= 2 * math.log2(replicas) + 2


def test_too_few_replicas_and_loads_are_refused() -> None:
    base = {"policy": "fcfs", "workload": Workload(), "json": "r.json", "at_most": {"ttlt_s.mean": 5.0}}
    with pytest.raises(
        InputError, match=r"max_replicas: got 3; allowed: more; with 3: ttlt_s\.mean = 1e\+06"
    ):
        find_replicas(ReplicasConfig(**base, max_replicas=3), lambda cells: queues(cells, 30.0))
    with pytest.raises(InputError, match="load: got 0.5; allowed: unset; use rate"):
        ReplicasConfig(**base, load=0.5)


def test_simulate_replicas_of_a_log(short: Path, caplog: Caplog) -> None:
    caplog.set_level(logging.INFO)
    command = f"replicas --trace {short} --policy fcfs --repeat 15 --rate 12 --json {short.parent}/r.json"
    assert typed(command, "--at_most", "{ttft_s.p99: 2}", "--tolerance", "1") == 2, "no such option"
    assert typed(command, "--at_most", "{ttft_s.p99: 2}") == 0
    result = read(short.parent / "r.json")
    assert result["failing"] == result["num_replicas"] - 1 > 0
    assert result["estimates"]["ttft_s.p99"]["mean"] <= 2
    assert any(
        text.startswith(f"replicas: {result['num_replicas']}, with ttft_s.p99 = ") for text in caplog.messages
    )
    assert "same_arrivals" not in result["warnings"]


def test_intervals_stay_within_what_a_metric_can_be() -> None:
    two = interval([1.5, 5.2], metric_bounds("ttft_s.p99"))
    assert (two.low, two.num) == (0.0, 2)
    assert two.high == pytest.approx(3.35 + 12.7062 * 1.85, rel=1e-4)
    assert interval([0.9, 0.99], metric_bounds("groups.tier.0.slo_attainment")).high == 1.0
    assert interval([0.2, 0.9], metric_bounds("prediction.coverage.p90")).low == 0.0
    assert interval([-0.5, 0.9], metric_bounds("prediction.kendall_tau")).low == -1.0
    assert interval([-1.0, 1.0], metric_bounds("starvation_slope")).low < -1.0
    assert interval([0.5, 0.51], metric_bounds("kv_usage.mean")).high < 1.0


@pytest.mark.mend  # P99 of two seeds had an interval of [-20, 26.7], and nothing said what that is worth.
def test_no_file_has_a_negative_latency_and_few_seeds_are_said(short: Path, caplog: Caplog) -> None:
    folder = short.parent
    common = f"--trace {short} --policy fcfs"
    assert typed(f"run {common} --load 2 --num_seeds 2 --json {folder}/run.json") == 0
    assert any(text.startswith("2 seeds:") for text in caplog.messages)
    result = read(folder / "run.json")
    assert "few_seeds" in result["warnings"]
    ends = [
        result["intervals"][f"{name}.{key}"]
        for name in ("ttft_s", "ttlt_s")
        for key in ("mean", "p99", "max")
    ]
    assert all(0 <= one["low"] < one["mean"] < one["high"] for one in ends)
    search = f"capacity {common} --high 50 --tolerance 0.5 --max_seeds 2 --json {folder}/c.json"
    assert typed(search, "--at_most", "{ttft_s.p99: 2}") == 0
    for probe in read(folder / "c.json")["probes"]:
        assert probe["estimates"]["ttft_s.p99"]["low"] >= 0
    assert typed(f"sweep {folder}/sweep {common} --loads [2] --num_seeds 1") == 0
    assert "few_seeds" not in caplog.messages[-1]


@pytest.mark.parametrize(("model", "gpu", "devices"), [("llama-3-70b", "a100-80gb", 2), ("llama-2-13b", "a5000-24gb", 2), ("qwen2.5-72b", "h200-141gb", 2), ("llama-3-8b", "a5000-24gb", 1)])  # fmt: skip
def test_a_model_needs_memory_for_its_weights(model: str, gpu: str, devices: int) -> None:
    """At 90 % of the memory, 2 bytes a weight; a block of 16 tokens at least."""
    usable = 0.9 * GPUS[gpu].memory_bytes
    assert RooflineStepTime(model=model, gpu=gpu, tensor_parallel=devices).num_kv_blocks() > 0
    if devices > 1:
        assert 2 * MODELS[model].num_parameters > usable
        with pytest.raises(
            InputError, match=f"tensor_parallel: got 1; allowed: at least {devices}: .*{model}"
        ):
            RooflineStepTime(model=model, gpu=gpu)


def test_a_model_that_does_not_fit_ends_the_command(short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = f"run --trace {short} --policy fcfs --json {short.parent}/o.json --step_time_model roofline"
    assert typed(options, "--step_time_parameters", "{model: llama-3-70b, gpu: h100-80gb}") == 2
    assert "at least 2: the 16-bit weights of llama-3-70b take 141 GB" in capsys.readouterr().err


@pytest.mark.parametrize(("model", "fits"), [("llama-3-70b", False), ("llama-3-8b", True)])
def test_a_kv_cache_that_does_not_fit_beside_the_weights_is_told(
    model: str, fits: bool, short: Path, caplog: Caplog
) -> None:
    """Two cards hold the weights of a 70B model and some 20,000 tokens, not 131,000; unset, the KV cache is as large."""
    options = f"run --trace {short} --policy fcfs --json {short.parent}/o.json --step_time_model roofline"
    assert typed(options, "--step_time_parameters", f"{{model: {model}, tensor_parallel: 2}}") == 0
    assert not [line for line in caplog.messages if "does not fit" in line]
    options += " --overwrite true --scheduler.num_kv_blocks 8191"
    assert typed(options, "--step_time_parameters", f"{{model: {model}, tensor_parallel: 2}}") == 0
    told = [line for line in caplog.messages if "the KV cache of 131056 tokens does not fit" in line]
    assert len(told) == (not fits)
    if told:
        num_blocks = RooflineStepTime(model=model, tensor_parallel=2).num_kv_blocks(16, 64, 2048)
        assert told[0].endswith(f"use --scheduler.num_kv_blocks {num_blocks}")
        options += f" --scheduler.num_kv_blocks {num_blocks}"
        caplog.clear()
        assert typed(options, "--step_time_parameters", f"{{model: {model}, tensor_parallel: 2}}") == 0
        assert not [line for line in caplog.messages if "does not fit" in line]


class Reader:
    """Predicts the number in the prompt."""

    async def predict(self, requests: Sequence[Any], *, timeout_s: float | None = None) -> list[Any]:
        return [predicted(float(request.prompt)) for request in requests]

    async def close(self) -> None:
        return None


@pytest.mark.mend  # One row without a prompt stopped the simulation.
def test_rows_without_a_prompt_have_an_unknown_length(short: Path, caplog: Caplog) -> None:
    rows = [trace_row(f"r{at}", float(at), 10, 20, prompt=None if at % 4 == 0 else "20") for at in range(12)]
    predictions = fetch_predictions(Trace(tuple(rows)), Reader())
    assert predictions.num_without_prompt == 3
    assert set(predictions.by_id) == {f"r{at}" for at in range(12) if at % 4}
    result = simulate(Trace(tuple(rows)), "ssjf", predictions=predictions)
    assert result.metrics["num_finished"] == 12
    assert result.predictor["num_without_prompt"] == 3
    told = "3 of 12 requests have no prompt and were simulated with an unknown length"
    assert result.warnings["predictions"] == told
    with pytest.raises(InputError, match="prompt of request r0: got None"):
        fetch_predictions(Trace(tuple(trace_row(f"r{at}", 0.0, 10, 20) for at in range(12))), Reader())


def test_requests_without_a_prediction_in_the_trace_are_counted(tmp_path: Path, caplog: Caplog) -> None:
    rows = [trace_row(f"r{at}", float(at), 10, 20) for at in range(4)] + list(
        random_trace(16, seed=2).requests
    )
    rows = [row for at, row in enumerate(rows) if at < 4 or row.request_id not in ("r0", "r1", "r2", "r3")]
    write_trace(Trace(tuple(rows)), tmp_path / "t.jsonl")
    assert typed(f"run --trace {tmp_path}/t.jsonl --policy ssjf --json {tmp_path}/o.json") == 0
    assert caplog.messages[-1] == "4 of 16 predictions failed (no mu, sigma and nu in the trace)"


@pytest.mark.parametrize(("num_large", "code", "level"), [(4, 0, "WARNING"), (13, 3, "ERROR")])
def test_the_last_line_says_how_many_requests_were_refused(
    num_large: int, code: int, level: str, tmp_path: Path, caplog: Caplog
) -> None:
    """Their prompt and max_tokens need more than the KV cache of 1,600 tokens."""
    rows = [trace_row(f"r{at}", 0.1 * at, 4000 if at < num_large else 50, 9) for at in range(20)]
    write_trace(Trace(tuple(rows)), tmp_path / "t.jsonl")
    common = f"--trace {tmp_path}/t.jsonl --policy fcfs --scheduler.num_kv_blocks 100"
    for command in (
        f"run {common} --json {tmp_path}/o.json",
        f"sweep {tmp_path}/sweep {common} --num_seeds 1",
    ):
        assert typed(command) == code
        last = caplog.records[-1]
        assert (last.levelname, f"left out {num_large} of 20 requests" in last.getMessage()) == (level, True)
    search = f"replicas {common} --json {tmp_path}/r.json --max_seeds 2"
    assert typed(search, "--at_most", "{ttft_s.mean: 5}") == code
    assert f"left out {2 * num_large} of 40 requests" in caplog.messages[-1]


HASHES = [[0, 1, 2, 3], [0, 1, 2, 4]]


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_prefixes_that_hash_ids_share_are_simulated(suffix: str, tmp_path: Path) -> None:
    """Two prompts of four blocks, of which three are equal: 1,536 tokens of the second one are found."""
    rows = [
        {"request_id": f"r{at}", "arrival_s": at, "prompt_tokens": 2000, "output_tokens": 5, "max_tokens": 9}
        | {"hash_ids": hashes}
        for at, hashes in enumerate(HASHES)
    ]
    path = tmp_path / f"t.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        lines = [",".join(rows[0]), *(",".join([*map(str, list(row.values())[:-1]), f'"{row["hash_ids"]}"']) for row in rows)]  # fmt: skip
        path.write_text("\n".join(lines) + "\n")
    first, second = load_trace(path).requests
    assert (first.content, second.content) == ((("0", 2000),), (("0", 1536), ("4", 464)))
    times = LinearStepTime(base_s=1e-9, per_prefill_token_s=1e-3, per_decode_s=0.0, per_context_token_s=0.0)
    limits = SchedulerConfig(num_kv_blocks=1000, prefix_caching=True, max_num_batched_tokens=4096)
    result = simulate(load_trace(path), scheduler=limits, step_time=times)
    assert [record.ttft_s for record in result.records] == pytest.approx([2.0, 1.0 + 0.464])


def calibration(error: float, num_failed: int = 0) -> dict[str, Any]:
    load = {"num_requests": 30 - num_failed, "num_failed": num_failed}
    return {
        "step_time": {"name": "linear", "parameters": {"base_s": 0.5}}, "fitted": load,
        "held_out": load | {"error": {"ttlt_s": error}}, "first_failure": "HTTP 503" if num_failed else None,
    }  # fmt: skip


@pytest.mark.mend  # Step times that were off by +298 % ended with INFO and exit code 0.
@pytest.mark.parametrize(
    ("error", "num_failed", "options", "code"),
    [(0.1, 0, "", 0), (2.98, 0, "", 3), (-0.6, 0, "", 3), (2.98, 0, "--max_error 4", 0), (0.1, 2, "", 0), (0.1, 40, "", 3), (math.nan, 0, "", 3)],
)  # fmt: skip
def test_a_calibration_that_does_not_describe_the_engine_fails(
    error: float, num_failed: int, options: str, code: int, tmp_path: Path, caplog: Caplog, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    steps = [StepMeasurement(0.01 + 0.001 * decodes, decodes, 100.0 * decodes) for decodes in range(1, 29)]
    left_out = Counter({"HTTP 503": num_failed}) if num_failed else Counter()
    sources = [
        MeasurementSource(name, steps, left_out=Counter(left_out))
        for name in ("1 requests/s", "2 requests/s")
    ]
    monkeypatch.setattr(calibrate, "probe_engine", lambda *_, **__: sources)
    errors = {} if math.isnan(error) else {"ttlt_s": error}
    monkeypatch.setattr(calibrate, "load_error", lambda source, *_: {"name": source.name, "error": errors})
    command = f"calibrate --url http://127.0.0.1:9/v1 --served_model m --json {tmp_path}/c.json {options}"
    assert typed(command) == code
    levels = [record.levelname for record in caplog.records if record.levelno > logging.INFO]
    assert ("ERROR" in levels) == (code == 3)
    warnings = read(tmp_path / "c.json")["warnings"]
    assert any(kind.startswith("error") for kind in warnings) == (code == 3 and not num_failed)
    if num_failed:
        num = 2 * num_failed
        assert f"left out {num} of {56 + num} rows: {num} x HTTP 503" in caplog.messages[-1]


def test_a_calibration_is_used_by_its_path(short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = short.parent
    path = folder / "c.json"
    path.write_text(json.dumps({"schema": calibrate.SCHEMA, **calibration(0.1)}))
    options = (
        f"run --trace {short} --policy fcfs --json {folder}/o.json --overwrite true --step_time_parameters"
    )
    assert typed(f"{options} {path}") == 0
    by_path = read(folder / "o.json")["metrics"]["tbt_s"]
    assert by_path["p50"] > 0.5
    assert typed(f"{options} {path} --step_time_model linear") == 0
    assert typed(f"{options} {path} --step_time_model staircase") == 2
    assert "step_time_model: got 'staircase'; allowed: unset, or linear" in capsys.readouterr().err
    for content in ("{}", "[]", '{"step_time": {"name": "linear"}}', "no"):
        path.write_text(content)
        assert typed(f"{options} {path}") == 2
        assert "step_time_parameters: got" in capsys.readouterr().err
    assert typed(f"{options} {folder}/none.json") == 2
    config = SimulationConfig(policy="fcfs", trace=str(short), step_time_parameters=str(path))
    path.write_text(json.dumps(calibration(0.1)))
    before = Cell(config, {}).key()
    path.write_text(json.dumps({**calibration(0.1), "later": 1}))
    assert Cell(config, {}).key() != before, "the file is part of the key of a cell"


POLICY = """
from dataclasses import dataclass
from scheduler_core.policies import Policy

@dataclass(kw_only=True, slots=True)
class Own(Policy):
    weight: float = 1.0

    def key(self, state, now):
        return {}

def helper(state):
    return {{}}[state.request_id]
"""


def own_policy(folder: Path, result: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a policy in a new module in the current folder, which is not on sys.path."""
    monkeypatch.chdir(folder)
    name = f"own_policy_{abs(hash((str(folder), result)))}"
    (folder / f"{name}.py").write_text(POLICY.format(result))
    return f"{name}:Own"


def test_a_policy_in_the_current_folder_is_found(
    short: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = short.parent
    name = own_policy(folder, "self.weight * state.request.prompt_tokens", monkeypatch)
    before = list(sys.path)
    options = f"--trace {short} --policy_parameters.weight 2"
    assert typed(f"run {options} --policy {name} --json {folder}/o.json") == 0
    assert typed(f"sweep {folder}/s {options} --policy {name} --num_seeds 2 --workers 2") == 0
    assert sys.path == before
    assert typed(f"run {options} --policy no_such_module:Own --json {folder}/p.json") == 2
    assert "no_such_module" in capsys.readouterr().err


@pytest.mark.mend  # An exception of a user's policy was called a bug in tailcast.
@pytest.mark.parametrize(
    ("result", "told"),
    [
        ("state.no_such_field", "line 10, in key: AttributeError: "),
        ("helper(state)", "line 13, in helper: KeyError: "),
        ("1 / 0", "line 10, in key: ZeroDivisionError: "),
        ("open('/no/such/file')", "line 10, in key: FileNotFoundError: "),
        ("__import__('json').loads('{{')", "line 10, in key: JSONDecodeError: "),
        ("float('nan')", "Own.key of request r0: got nan; allowed: numbers"),
        ("None", "Own.key of request r0: got None; allowed: numbers"),
        ("'soon'", "Own.key of request r0: got 'soon'; allowed: numbers"),
    ],
)
@pytest.mark.parametrize("command", ["run", "sweep"])
def test_an_error_in_a_users_policy_is_told_with_its_place(
    command: str, result: str, told: str, short: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    folder = short.parent
    name = own_policy(folder, result.replace("{{", "{"), monkeypatch)
    out = f"run --json {folder}/o.json" if command == "run" else f"sweep {folder}/s --num_seeds 2 --workers 2"
    assert typed(f"{out} --trace {short} --policy {name}") == 2
    stderr = capsys.readouterr().err
    assert told in stderr
    assert "bug in tailcast" not in stderr
    assert ("line" in told) == (str(folder / name.partition(":")[0]) in stderr)


def test_errors_while_a_users_policy_is_loaded(
    short: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = short.parent
    monkeypatch.chdir(folder)
    sources = {
        "fails_at_import": ("1 / 0\n", "line 1, in <module>: ZeroDivisionError"),
        "lacks_a_key": (POLICY.format(0).replace("def key", "def kee"), "a policy that implements key"),
        "lacks_an_argument": (
            POLICY.format(0).replace("state, now", "state"),
            "a policy whose method key can be called as key(self, state",
        ),
        "lacks_a_package": ("import no_such_package\n", "No module named 'no_such_package'"),
    }
    for name, (source, told) in sources.items():
        (folder / f"{name}.py").write_text(source)
        assert typed(f"run --trace {short} --policy {name}:Own --json {folder}/o.json") == 2
        assert told in capsys.readouterr().err


def test_prefixes_are_shared_by_hash_ids_as_by_sessions(tmp_path: Path) -> None:
    """The report's trace, imported, and with its groups as sessions by hand: both find what earlier requests of a group have
    computed, even while these still run, which the report's cache of ended turns did not."""
    folder = Path(__file__).parents[1] / "data" / "reports" / "20-mooncake-prefix-cache"
    want = json.loads((folder / "expected.json").read_text())
    options = "--default_max_tokens 100 --policy fcfs --scheduler.num_kv_blocks 40000 --overwrite true"
    imported = tmp_path / "trace.parquet"
    import_lengths(ImportLengthsConfig(kind="mooncake", file=str(folder / "trace.jsonl"), out=str(imported)))
    means = {}
    for trace, caching in product((imported, folder / "by_hand_sessions.jsonl"), ("true", "false")):
        cached = f"{options} --scheduler.prefix_caching {caching}"
        assert typed(f"run --trace {trace} {cached} --json {tmp_path}/out.json") == 0
        means[trace.suffix, caching] = read(tmp_path / "out.json")["metrics"]["ttft_s"]["mean"]
    for suffix in (".parquet", ".jsonl"):
        assert means[suffix, "false"] == pytest.approx(want["ttft_mean_s_without"], abs=want["tolerance"])
        assert means[suffix, "true"] < want["ttft_mean_s_with_cache"]
    assert means[".parquet", "true"] == pytest.approx(means[".jsonl", "true"], rel=1e-3)


@pytest.mark.mend  # A run of steps cut to one by an arrival counted the gaps of all of it: ITL of four replicas was 16 % too high.
@pytest.mark.parametrize("router", ["jsq", "least_kv"])
def test_gaps_of_several_replicas_are_those_of_single_steps(router: str) -> None:
    trace = random_trace(200, rate_rps=20.0)
    cluster = ClusterConfig(num_replicas=4, router=router)
    base = SimulationConfig(policy="fcfs", workload=Workload(), cluster=cluster)
    combined, exact = (
        run_simulation(replace(base, exact_steps=exact), trace=trace).metrics for exact in (False, True)
    )
    for name in ("mean", "p99", "max"):
        assert combined["tbt_s"][name] == pytest.approx(exact["tbt_s"][name], rel=1e-9)
    assert combined["ttlt_s"] == pytest.approx(exact["ttlt_s"], rel=1e-9)
