"""`simulate run` as a user types it."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from scheduler_core.replay import read_log, replay
from scheduler_core.simulator.commands.simulate import main
from scheduler_core.simulator.trace import write_trace
from tests.hostile import DEEP
from tests.scheduler_core.helpers import random_trace

_FIXED = '{"num_requests": 4, "lengths": {"prompt": {"kind": "fixed", "low": 5}, "output": {"kind": "fixed", "low": 3}}}'


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write_trace(random_trace(50), path)
    return path


def typed(command: str, *words: str) -> int:
    """Exit code of `simulate`, as typed in a shell; `words` may contain spaces."""
    return main([*command.split(), *words])


def run(trace: Path, options: str) -> int:
    return typed(f"run --trace {trace} --json {trace.parent}/out.json --overwrite true {options}")


def result(folder: Path, name: str = "out") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return content


@pytest.mark.parametrize(("policy", "source"), [("fcfs", "none"), ("tie", "trace"), ("sjf", "oracle")])
def test_the_result_names_configuration_versions_and_metrics(policy: str, source: str, trace: Path) -> None:
    options = f"--policy {policy} --load 1.3 --seed 4"
    assert run(trace, options) == 0
    content = result(trace.parent)
    assert (content["config"]["policy"], content["config"]["seed"]) == (policy, 4)
    assert content["config"]["scheduler"]["max_num_seqs"] == 64
    assert set(content["versions"]) == {"tailcast", "python", "numpy"}
    assert content["metrics"]["num_finished"] == content["trace"]["num_requests"] == 50
    for name in ("ttft_s", "normalized_latency_s", "tpot_s", "queueing_delay_s"):
        assert set(content["metrics"][name]) >= {"mean", "p50", "p90", "p95", "p99", "p999", "max"}
    assert content["predictor"]["source"] == source
    rate = content["trace"]["arrival_rate_rps"]
    assert rate == pytest.approx(1.3 * content["trace"]["saturation_rate_rps"], rel=0.6)
    assert run(trace, options) == 0
    assert result(trace.parent) == content, "the same command gives the same result"


def test_the_decision_log_replays(trace: Path) -> None:
    log = trace.parent / "decisions.jsonl"
    assert run(trace, f"--policy tie --decisions {log} --policy_parameters.gamma 0.8") == 0
    entries = read_log(log)
    assert entries[0]["parameters"]["gamma"] == 0.8
    assert replay(entries).counters.num_finished == 50


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--policy lifo", "policy"), ("--policy tie --predictor nobody", "predictor"),
        ("--policy tie --predictor nosuch://host:1", "predictor"),
        ("--policy fcfs --requests table.txt", "requests"),
        ("--policy fcfs --scheduler.num_kv_blocks 1", "none of which fits"),
        ("--policy fcfs --step_time.base_s minus", "base_s"),
        ("--policy fcfs --trace missing.jsonl", "trace"),
    ],
)  # fmt: skip
def test_refused_input(options: str, named: str, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trace, options) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("simulate run: error: ")
    assert named in error
    assert [path.name for path in trace.parent.iterdir()] == ["trace.jsonl"]


SPEC = """
policy: hpjf
workload:
  num_requests: 40
  arrivals: {process: gamma, cv: 2.0}
  lengths: {prompt: {high: 60}, output: {high: 40}}
  tiers: {num_tiers: 3}
  classes:
  - {weight: 0.5, tenant: paying, tbt_slo_s: 0.1}
  - {weight: 0.5, tenant: free, ttft_slo_s: 3.0}
load: 0.8
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    return path


def test_a_drawn_workload_is_a_trace_for_the_next_run(spec: Path) -> None:
    drawn, parts = spec.parent / "drawn.parquet", spec.parent / "workload.yaml"
    lengths = "lengths: {prompt: {high: 60}, output: {high: 40}}"
    parts.write_text(f"num_requests: 30\n{lengths}\ntiers: {{num_tiers: 2}}\n")
    assert typed(f"workload --config {parts} --out {drawn} --seed 3") == 0
    assert run(drawn, "--policy hpjf") == 0
    content = result(spec.parent)
    assert content["metrics"]["num_finished"] == 30
    assert set(content["metrics"]["groups"]["tier"]) == {"0", "1"}


def test_a_run_with_every_table(spec: Path) -> None:
    folder = spec.parent
    options = "--policy ssjf --predictor oracle --predictor_noise 0.5 --num_seeds 2 --cluster.num_replicas 2"
    options += f" --workload.arrivals.cv 1.5 --requests {folder}/requests.parquet"
    options += f" --steps {folder}/steps.parquet"
    assert typed(f"run --config {spec} --json {folder}/out.json --report {folder}/r.html {options}") == 0
    content = result(folder)
    assert content["requests"] == "requests.parquet"
    assert content["config"]["workload"]["arrivals"]["cv"] == 1.5
    assert set(content["metrics"]["groups"]["tenant"]) == {"paying", "free"}
    assert [one["seed"] for one in content["runs"]] == [0, 1]
    assert content["metrics"] == content["runs"][0]["metrics"]
    mean = sum(one["metrics"]["ttlt_s"]["mean"] for one in content["runs"]) / 2
    over_seeds = content["intervals"]["ttlt_s.mean"]
    assert over_seeds["low"] < over_seeds["mean"] == pytest.approx(mean)
    assert over_seeds["num"] == content["intervals"]["prediction.kendall_tau"]["num"] == 2
    assert {row["seed"] for row in pq.read_table(folder / "steps.parquet").to_pylist()} == {0, 1}
    requests = pq.read_table(folder / "requests.parquet")
    assert requests.schema.metadata[b"tailcast.schema"] == b"tailcast.simulated_requests/6"
    assert np.mean(requests["ttlt_s"]) == pytest.approx(mean)
    page = (folder / "r.html").read_text()
    assert page.count("<svg") == 1
    for text in ("prediction.coverage.p99", "Means over seeds", "cluster.num_migrations", "By tenant"):
        assert text in page
    assert "http://" not in page.replace("http://www.w3.org", ""), "nothing is fetched"


def test_two_results_request_by_request(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = spec.parent
    for policy in ("hpjf", "fcfs"):
        outputs = f"--json {folder}/{policy}.json --requests {folder}/{policy}.parquet"
        assert typed(f"run --config {spec} --policy {policy} --num_seeds 2 {outputs}") == 0
    capsys.readouterr()
    both = f"{folder}/fcfs.json {folder}/hpjf.json"
    assert typed(f"compare {both}") == 0
    text = capsys.readouterr().out
    assert "80 requests, means in seconds" in text
    assert "ttft_s.mean" in text
    assert typed(f"compare {both} --json {folder}/c.json --report {folder}/c.html") == 0
    comparison = result(folder, "c")
    assert (comparison["baseline"], list(comparison["runs"])) == ("fcfs", ["hpjf"])
    content = comparison["runs"]["hpjf"]
    assert content["settings"] == {"policy": ["fcfs", "hpjf"]}
    means = [float(np.mean(pq.read_table(folder / f"{name}.parquet")["ttft_s"])) for name in ("fcfs", "hpjf")]
    mean = content["requests"]["latencies"]["ttft_s"]["mean"]
    assert (mean["a"], mean["b"], mean["difference"]) == pytest.approx((*means, means[1] - means[0]))
    assert mean["low"] <= mean["difference"] <= mean["high"]
    both_runs = zip(*(result(folder, name)["runs"] for name in ("fcfs", "hpjf")), strict=True)
    off = [b["metrics"]["ttft_s"]["mean"] - a["metrics"]["ttft_s"]["mean"] for a, b in both_runs]
    metric = content["metrics"]["ttft_s.mean"]
    assert metric["difference"] == pytest.approx(sum(off) / 2)
    assert metric["high"] - metric["low"] == pytest.approx(12.706 * abs(off[0] - off[1]), rel=1e-3)
    assert "hpjf: configured differently" in (folder / "c.html").read_text()


def test_any_number_of_runs_by_name_and_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path
    write_trace(random_trace(400), folder / "trace.jsonl")
    for policy in ("fcfs", "sjf", "spf"):
        options = f"--trace {folder}/trace.jsonl --load 2 --scheduler.max_num_seqs 4 --policy {policy}"
        assert typed(f"run {options} --json {folder}/{policy}.json --requests {folder}/{policy}.parquet") == 0
    capsys.readouterr()
    command = f"compare {folder}/fcfs.json bound={folder}/sjf.json {folder}/spf.json"
    assert typed(f"{command} --json {folder}/c.json") == 0
    comparison = result(folder, "c")
    assert list(comparison["runs"]) == ["bound", "spf"]
    verdicts = comparison["runs"]["bound"]["verdict"]
    assert verdicts["ttft_s"]["verdict"] == "better" and verdicts["ttft_s"]["high"] < 0  # noqa: PT018
    assert typed(command) == 0
    text = capsys.readouterr().out
    assert text.startswith("Verdict")
    assert "bound: configured differently" in text and "spf: all metrics" in text  # noqa: PT018
    for num, told in ((1, "two results or more"), (2, "fcfs is repeated")):
        assert typed("compare" + num * f" {folder}/fcfs.json") == 2
        assert told in capsys.readouterr().err


def test_a_hint_where_nobody_waited(trace: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run(trace, "--policy fcfs --load 0.05") == 0
    assert "no request waited: on average " in caplog.text and "of 64 slots" in caplog.text  # noqa: PT018
    caplog.clear()
    assert run(trace, "--policy fcfs --load 1.5") == 0
    assert "no request waited" not in caplog.text


def test_other_requests_or_versions_are_not_compared(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = spec.parent
    changes = {"a": "", "rate": "--load 0.9", "seed": "--seed 1", "same": "--policy fcfs"}
    for name, options in changes.items():
        assert typed(f"run --config {spec} --json {folder}/{name}.json {options}") == 0
    content = result(folder, "a")
    bad = {
        "older": json.dumps(content | {"schema": "tailcast.simulation/3"}),
        "wrong runs": json.dumps(content | {"runs": [1]}), "deep": "[" * DEEP,
    }  # fmt: skip
    for name, text in bad.items():
        (folder / f"{name}.json").write_text(text)
    capsys.readouterr()
    messages = {name: f"{name}: got" for name in bad} | {
        "rate": "requests of rate with seed 0: got '40 requests of workload, seed 0",
        "seed": "seeds of seed: got '1'; allowed: 0, the seeds of a",
        "older": "schema of older: got 'tailcast.simulation/3'",
    }
    for name, message in messages.items():
        assert typed(f"compare {folder}/a.json", f"{folder}/{name}.json") == 2
        assert f"simulate compare: error: {message}" in capsys.readouterr().err
    assert typed(f"compare {folder}/a.json {folder}/same.json") == 0
    assert "ttft_s.mean" in capsys.readouterr().out, "without tables of requests the metrics are compared"


def test_a_sweep_and_a_capacity(spec: Path) -> None:
    out = spec.parent / "sweep"
    common = f"--config {spec} --workload.num_requests 20"
    assert typed(f"sweep {out} {common} --policies [fcfs,hpjf] --loads [0.5,0.9] --num_seeds 2") == 0
    assert len(list((out / "cells").iterdir())) == 8
    rows = pq.read_table(out / "cells.parquet").to_pylist()
    assert {(row["policy"], row["load"]) for row in rows} == set(product(("fcfs", "hpjf"), (0.5, 0.9)))
    points = pq.read_table(out / "points.parquet").to_pylist()
    point = next(row for row in points if row["metric"] == "ttlt_s.mean")
    same = [row for row in rows if (row["policy"], row["load"]) == (point["policy"], point["load"])]
    values = [row["ttlt_s.mean"] for row in same]
    assert (point["mean"], point["num"]) == (pytest.approx(np.mean(values)), 2)
    assert "<svg" in (out / "report.html").read_text()
    search = f"{common} --policy fcfs --max_seeds 2 --low 0.1 --high 3 --tolerance 0.5"
    bound = ("--at_most", "{mean_requests_in_system: 4}")
    assert typed(f"capacity {search} --json {spec.parent}/capacity.json", *bound) == 0
    found = result(spec.parent, "capacity")
    assert 0.1 <= found["level"] < found["failing"] <= 3


def test_the_first_word_chooses_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "run" in capsys.readouterr().out
    assert (main([]), main(["walk"])) == (2, 2)
    assert "allowed: run" in capsys.readouterr().err


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "scheduler_core" / "simulator" / "README.md"
    example = page.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    (tmp_path / "run.yaml").write_text(example)
    options = "--workload.num_requests 40"
    assert typed(f"run --config {tmp_path}/run.yaml --json {tmp_path}/out.json {options}") == 0
    assert set(result(tmp_path)["metrics"]["groups"]["tenant"]) == {"paying", "free"}


# 10^8 replicas took 4.5 GB, arrival times of 1e308 gave wrong numbers.
@pytest.mark.mend
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--rate", "1e-308"], "rate: got 1e-308; allowed: at least 4e-10: 4 requests in 1e+10 s"),
        (["--load", "1e-300"], "load, as a rate: got"),
        (["--workload.num_requests", "1000000000000"], "num_requests: got 1000000000000; allowed: integers from 1 to 100000000"),
        (["--num_seeds", "1000000000"], "num_seeds: got 1000000000; allowed: integers from 1 to 10000"),
        (["--workload.lengths.max_tokens", "9223372036854775807"], "max_tokens: got 9223372036854775807; allowed: integers from 1 to 2147483647"),
        (["--workload.lengths.output.high", "9223372036854775807"], "low, high"),
        (["--workload.lengths.output", '{"kind": "zipf", "high": 2000000000}'], "high: got 2000000000; allowed: less than low + 10000000 for zipf"),
        (["--step_time.base_s", "1e308"], "base_s: got 1e+308; allowed: seconds from 0 to 3600"),
        (["--rate", "1e-9"], ""),
        (["--seed", "9223372036854775808"], "seed: got 9223372036854775808; allowed: integers of 64 bits"),
    ],
)  # fmt: skip
def test_too_large(options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    code = main(["run", "--policy", "fcfs", "--workload", _FIXED, "--json", str(out), *options])
    assert code == (2 if told else 0)
    assert told in capsys.readouterr().err
    assert out.exists() != bool(told)


@pytest.mark.parametrize(
    ("vary", "told"),
    [
        ('{"seed.x": [1]}', "setting seed.x"),
        ('{"scheduler.max_num_seqs": ["many"]}', "max_num_seqs: got 'many'; allowed: int"),
        ('{"policy_parameters.a.b": [1]}', "setting a.b"),
        (json.dumps({f"policy_parameters.p{place}": list(range(100)) for place in range(4)}), "at most 1000000"),
    ],
)  # fmt: skip
def test_vary_is_checked(vary: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["sweep", str(tmp_path / "out"), "--workload", _FIXED, "--num_seeds", "1", "--vary", vary]
    assert main(args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


@pytest.mark.mend  # The request of priority 0 was preempted and recomputed by memory pressure, that of 9 kept running.
@pytest.mark.parametrize("batching", ["chunked_prefill", "vllm"])
def test_memory_pressure_takes_from_the_lowest_priority(batching: str, tmp_path: Path) -> None:
    row = {"prompt_tokens": 160, "output_tokens": 600, "max_tokens": 700}
    low = {"request_id": "low", "arrival_s": 0.0, "priority": 9, "tier": 4, **row}
    urgent = {"request_id": "urgent", "arrival_s": 0.05, "priority": 0, "tier": 0, **row}
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(item) + "\n" for item in (low, urgent)))
    table = tmp_path / "requests.jsonl"
    limits = "--scheduler.max_num_seqs 8 --scheduler.num_kv_blocks 70"
    assert run(trace, f"--policy priority {limits} --scheduler.batching {batching} --requests {table}") == 0
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    assert {item["request_id"]: item["num_preemptions"] for item in rows} == {"low": 1, "urgent": 0}
