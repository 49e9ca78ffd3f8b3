"""`simulate run` as a user types it."""

from __future__ import annotations

import csv
import json
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scheduler_core.decision_log import read_log
from scheduler_core.errors import InputError
from scheduler_core.replay import replay
from scheduler_core.simulator.commands.simulate import main
from tests.hostile import DEEP, TRACE
from tests.scheduler_core.helpers import random_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    with open(path, "w") as stream:
        for row in random_trace(50).requests:
            assert row.prediction is not None
            values = {"mu": row.prediction.mu, "sigma": row.prediction.sigma, "nu": row.prediction.nu}
            for name in ("request_id", "arrival_s", "prompt_tokens", "output_tokens", "max_tokens"):
                values[name] = getattr(row, name)
            stream.write(json.dumps(values) + "\n")
    return path


def run(trace: Path, *options: str) -> int:
    return main(["run", "--trace", str(trace), "--json", str(trace.parent / "out.json"), *options])


def result(trace: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((trace.parent / "out.json").read_text())
    return content


@pytest.mark.parametrize("policy", ["fcfs", "ssjf", "sept", "tie", "sjf"])
def test_the_result_names_configuration_versions_and_metrics(policy: str, trace: Path) -> None:
    assert run(trace, "--policy", policy, "--load", "1.3", "--seed", "4") == 0
    content = result(trace)
    assert content["config"]["policy"] == policy
    assert content["config"]["seed"] == 4
    assert content["config"]["scheduler"]["max_num_seqs"] == 64
    assert set(content["versions"]) == {"tailcast", "python", "numpy"}
    assert content["metrics"]["num_finished"] == 50
    for name in ("ttft_s", "ttlt_s", "normalized_latency_s", "tpot_s", "queueing_delay_s"):
        assert set(content["metrics"][name]) >= {"mean", "p50", "p90", "p95", "p99", "p999", "max"}
    sources = {"fcfs": "none", "sjf": "oracle"}
    assert content["predictor"]["source"] == sources.get(policy, "trace")
    assert content["trace"]["num_requests"] == 50
    rate = content["trace"]["arrival_rate_rps"]
    assert rate == pytest.approx(1.3 * content["trace"]["saturation_rate_rps"], rel=0.6)


def test_the_same_command_writes_the_same_bytes(trace: Path) -> None:
    assert run(trace, "--policy", "tie", "--rate", "5") == 0
    first = (trace.parent / "out.json").read_bytes()
    assert run(trace, "--policy", "tie", "--rate", "5") == 0
    assert (trace.parent / "out.json").read_bytes() == first


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_the_table_has_one_row_per_request(suffix: str, trace: Path) -> None:
    table = trace.parent / f"requests{suffix}"
    assert run(trace, "--policy", "tie", "--requests", str(table)) == 0
    if suffix == ".parquet":
        rows = pq.read_table(table).to_pylist()
        assert pq.read_schema(table).metadata[b"tailcast.schema"] == b"tailcast.simulated_requests/4"
    elif suffix == ".csv":
        with open(table, newline="") as stream:
            rows = list(csv.DictReader(stream))
    else:
        rows = [json.loads(line) for line in table.read_text().splitlines()]
    assert len(rows) == 50
    mean = sum(float(row["ttft_s"]) for row in rows) / 50
    assert mean == pytest.approx(result(trace)["metrics"]["ttft_s"]["mean"])


def test_the_decision_log_replays(trace: Path) -> None:
    log = trace.parent / "decisions.jsonl"
    assert run(trace, "--policy", "tie", "--decisions", str(log), "--policy_parameters.gamma", "0.8") == 0
    entries = read_log(log)
    assert entries[0]["parameters"]["gamma"] == 0.8
    assert replay(entries).counters.num_finished == 50


def test_a_yaml_file_and_dotted_overrides(trace: Path) -> None:
    config = trace.parent / "config.yaml"
    config.write_text("policy: tie\nscheduler:\n  max_num_seqs: 3\nstep_time:\n  base_s: 0.5\n")
    assert run(trace, "--config", str(config), "--scheduler.max_num_seqs", "5") == 0
    content = result(trace)["config"]
    assert (content["scheduler"]["max_num_seqs"], content["step_time"]["base_s"]) == (5, 0.5)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--policy", "lifo"], "policy"),
        (["--policy", "tie", "--policy_parameters", "{gama: 1}"], "gama"),
        (["--policy", "tie", "--predictor", "nobody"], "predictor"),
        (["--policy", "tie", "--predictor", "nosuch://host:1"], "predictor"),
        (["--policy", "fcfs", "--rate", "-1"], "rate"),
        (["--policy", "fcfs", "--rate", "1", "--load", "1"], "rate, load"),
        (["--policy", "fcfs", "--requests", "table.txt"], "requests"),
        (["--policy", "fcfs", "--steps", "table.txt"], "steps"),
        (["--policy", "fcfs", "--metrics", "table.jsonl"], "metrics"),
        (["--policy", "fcfs", "--scheduler.num_kv_blocks", "0"], "num_kv_blocks"),
        (["--policy", "fcfs", "--scheduler.num_kv_blocks", "1"], "none of which fits"),
        (["--policy", "fcfs", "--step_time.base_s", "minus"], "base_s"),
        (["--policy", "fcfs", "--trace", "missing.jsonl"], "trace"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    options: list[str], named: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(trace, *options) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert error[0].startswith("simulate run: error: ")
    assert named in error[0]
    assert [path.name for path in trace.parent.iterdir()] == ["trace.jsonl"]


def test_a_trace_without_caps_needs_a_default(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    longest = max(row["output_tokens"] for row in rows)
    for row in rows:
        del row["max_tokens"]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    assert run(trace, "--policy", "tie") == 2
    assert "default_max_tokens" in capsys.readouterr().err
    assert run(trace, "--policy", "tie", "--default-max-tokens", str(longest - 1)) == 2
    assert f"default_max_tokens = {longest - 1}" in capsys.readouterr().err
    assert run(trace, "--policy", "tie", "--default-max-tokens", str(longest)) == 0
    content = result(trace)
    assert content["config"]["default_max_tokens"] == longest
    assert content["metrics"]["num_finished"] == len(rows)


def test_a_bad_row_is_named(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = trace.read_text().splitlines()
    lines[6] = json.dumps({**json.loads(lines[6]), "output_tokens": -3})
    trace.write_text("\n".join(lines))
    assert run(trace, "--policy", "fcfs") == 2
    expected = "row 7 column output_tokens: got -3; allowed: integers from 1 to max_tokens"
    assert expected in capsys.readouterr().err


def test_help_explains_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["run", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for line in (
        "--predictor_delay_s",
        "--scheduler.kv_watermark",
        "--step_time.base_s",
        "Seconds every step",
    ):
        assert line in text


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


def test_a_workload_of_a_yaml_file_with_overrides_and_seeds(spec: Path) -> None:
    out = spec.parent / "out.json"
    words = [
        "run",
        "--config",
        str(spec),
        "--json",
        str(out),
        "--num_seeds",
        "2",
        "--workload.arrivals.cv",
        "1.5",
    ]
    assert main([*words, "--cluster.num_replicas", "2", "--cluster.router", "round_robin"]) == 0
    content = json.loads(out.read_text())
    assert content["config"]["workload"]["arrivals"]["cv"] == 1.5
    assert content["config"]["workload"]["classes"][1]["ttft_slo_s"] == 3.0
    assert content["metrics"]["num_finished"] == 40
    assert set(content["metrics"]["groups"]["tenant"]) == {"paying", "free"}
    spread = content["intervals"]["ttft_s"]["mean"]
    assert (spread["num"], content["num_seeds"]) == (2, 2)
    assert spread["low"] <= spread["mean"] <= spread["high"]
    assert content["metrics"]["cluster"]["num_migrations"] == 0


def test_a_drawn_workload_is_a_trace_for_the_next_run(spec: Path) -> None:
    drawn, parts = spec.parent / "drawn.parquet", spec.parent / "workload.yaml"
    parts.write_text(
        "num_requests: 30\nlengths: {prompt: {high: 60}, output: {high: 40}}\ntiers: {num_tiers: 2}\n"
    )
    assert main(["workload", "--config", str(parts), "--out", str(drawn), "--seed", "3"]) == 0
    out = spec.parent / "out.json"
    assert main(["run", "--trace", str(drawn), "--policy", "hpjf", "--json", str(out)]) == 0
    content = json.loads(out.read_text())
    assert content["metrics"]["num_finished"] == 30
    assert set(content["metrics"]["groups"]["tier"]) == {"0", "1"}


def test_the_report_and_the_timeline(spec: Path) -> None:
    folder = spec.parent
    words = ["run", "--config", str(spec), "--json", str(folder / "out.json"), "--gantt", "true"]
    words += ["--report", str(folder / "r.html"), "--chrome-trace", str(folder / "t.json")]
    assert main(words) == 0
    page = (folder / "r.html").read_text()
    assert page.count("<svg") == 4
    assert "By tenant" in page
    assert "http://" not in page.replace("http://www.w3.org", ""), "nothing is fetched"
    assert json.loads((folder / "t.json").read_text())["traceEvents"]


def test_two_results_request_by_request(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = spec.parent
    for policy in ("hpjf", "fcfs"):
        words = ["run", "--config", str(spec), "--policy", policy, "--json", str(folder / f"{policy}.json")]
        assert main([*words, "--num_seeds", "2", "--requests", str(folder / f"{policy}.parquet")]) == 0
    capsys.readouterr()
    both = [str(folder / "fcfs.json"), str(folder / "hpjf.json")]
    assert main(["compare", *both, "--num_resamples", "50"]) == 0
    told = capsys.readouterr().out
    assert "80 requests, b - a" in told
    assert "ttft_s.mean" in told
    out = ["--json", str(folder / "c.json"), "--report", str(folder / "c.html"), "--num_resamples", "50"]
    assert main(["compare", *both, *out]) == 0
    content = json.loads((folder / "c.json").read_text())
    assert content["settings"] == {"policy": ["fcfs", "hpjf"]}
    rows = [pq.read_table(folder / f"{name}.parquet").to_pylist() for name in ("fcfs", "hpjf")]
    means = [sum(row["ttft_s"] for row in table) / 80 for table in rows]
    found = content["requests"]["latencies"]["ttft_s"]["statistics"]["mean"]
    assert (found["a"], found["b"]) == pytest.approx(means)
    assert found["difference"] == pytest.approx(means[1] - means[0])
    assert found["low"] <= found["difference"] <= found["high"]
    first, second = (json.loads(Path(name).read_text())["runs"] for name in both)
    metric = content["metrics"]["ttft_s.mean"]
    off = [b["metrics"]["ttft_s"]["mean"] - a["metrics"]["ttft_s"]["mean"] for a, b in zip(first, second, strict=True)]  # fmt: skip
    assert metric["difference"] == pytest.approx(sum(off) / 2)
    assert metric["high"] - metric["low"] == pytest.approx(12.706 * abs(off[0] - off[1]), rel=1e-3)
    page = (folder / "c.html").read_text()
    assert "Configured differently" in page
    assert page.count("<svg") == 1


def test_runs_of_other_requests_are_not_compared(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = spec.parent
    changes = {
        "a": [],
        "rate": ["--load", "0.9"],
        "seed": ["--seed", "1"],
        "seeds": ["--num_seeds", "2"],
        "same": ["--policy", "fcfs"],
    }
    for name, words in changes.items():
        assert main(["run", "--config", str(spec), "--json", str(folder / f"{name}.json"), *words]) == 0
    (folder / "other.json").write_text("{}")
    capsys.readouterr()
    for name, told in (
        ("rate", "requests of b with seed 0: got '40 requests of workload, seed 0"),
        ("seed", "seeds of b: got '1'; allowed: 0, the seeds of a"),
        ("seeds", "seeds of b: got '0, 1'"),
        ("other", "b: got"),
    ):
        assert main(["compare", str(folder / "a.json"), str(folder / f"{name}.json")]) == 2
        assert f"simulate compare: error: {told}" in capsys.readouterr().err
    assert main(["compare", str(folder / "a.json"), str(folder / "same.json")]) == 0
    assert "ttft_s.mean" in capsys.readouterr().out, "without tables of requests the metrics are compared"


def test_a_run_with_every_table(spec: Path) -> None:
    folder = spec.parent
    words = ["run", "--config", str(spec), "--json", str(folder / "out.json"), "--num_seeds", "2"]
    words += ["--policy", "ssjf", "--predictor", "oracle", "--predictor_noise", "0.5", "--regret", "true"]
    words += ["--cluster.num_replicas", "2", "--report", str(folder / "r.html")]
    for name in ("requests", "steps", "metrics"):
        words += [f"--{name}", str(folder / f"{name}.parquet")]
    assert main(words) == 0
    content = json.loads((folder / "out.json").read_text())
    assert content["requests"] == "requests.parquet"
    assert [one["seed"] for one in content["runs"]] == [0, 1]
    assert content["metrics"] == content["runs"][0]["metrics"]
    rows = {row["metric"]: row for row in pq.read_table(folder / "metrics.parquet").to_pylist()}
    names = ("ttft_s.p99", "cluster.num_migrations", "prediction.kendall_tau", "regret.ttlt_s.regret_s")
    for name in (*names, "tbt_s.tail_ratio"):
        assert rows[name]["num_seeds"] == 2
    mean = sum(one["metrics"]["regret"]["ttlt_s"]["regret_s"] for one in content["runs"]) / 2
    assert rows["regret.ttlt_s.regret_s"]["mean"] == pytest.approx(mean)
    steps = pq.read_table(folder / "steps.parquet").to_pylist()
    assert {row["seed"] for row in steps} == {0, 1}
    assert len(pq.read_table(folder / "requests.parquet")) == 80
    page = (folder / "r.html").read_text()
    for heading in ("Predicted lengths", "Regret", "Means over seeds", "Cluster"):
        assert heading in page


def test_a_sweep_and_a_capacity(spec: Path) -> None:
    out = spec.parent / "sweep"
    words = ["--config", str(spec), "--workload.num_requests", "20"]
    options = ["--policies", "[fcfs, hpjf]", "--loads", "[0.5, 0.9]", "--num_seeds", "2"]
    assert main(["sweep", str(out), *words, *options]) == 0
    assert len(list((out / "cells").iterdir())) == 8
    rows = pq.read_table(out / "cells.parquet").to_pylist()
    assert {(row["policy"], row["load"]) for row in rows} == set(product(("fcfs", "hpjf"), (0.5, 0.9)))
    assert "<svg" in (out / "report.html").read_text()
    target = spec.parent / "capacity.json"
    words += ["--policy", "fcfs"]
    assert main(["capacity", *words, "--json", str(target), "--at_most", "{mean_requests_in_system: 4}", "--max_seeds", "2",
                 "--low", "0.1", "--high", "3", "--tolerance", "0.5"]) == 0  # fmt: skip
    found = json.loads(target.read_text())
    assert 0.1 <= found["level"] < found["failing"] <= 3


def test_the_first_word_chooses_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "run" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["walk"]) == 2
    assert "allowed: run" in capsys.readouterr().err


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "scheduler_core" / "simulator" / "README.md"
    example = page.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    (tmp_path / "run.yaml").write_text(example)
    words = ["run", "--config", str(tmp_path / "run.yaml"), "--json", str(tmp_path / "out.json")]
    assert main([*words, "--workload.num_requests", "40"]) == 0
    content = json.loads((tmp_path / "out.json").read_text())
    assert set(content["metrics"]["groups"]["tenant"]) == {"paying", "free"}


_FIXED = '{"num_requests": 4, "lengths": {"prompt": {"kind": "fixed", "low": 5}, "output": {"kind": "fixed", "low": 3}}}'


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--rate", "1e-308"], "rate: got 1e-308; allowed: at least 4e-10: 4 requests in 1e+10 s"),
        (["--load", "1e-300"], "load, as a rate: got"),
        (["--workload.arrivals.rate_rps", "1e-308"], "rate_rps: got 1e-308"),
        (["--cluster.num_replicas", "100000000"], "num_replicas: got 100000000; allowed: integers from 1 to 10000"),
        (["--workload.num_requests", "1000000000000"], "num_requests: got 1000000000000; allowed: integers from 1 to 100000000"),
        (["--num_seeds", "1000000000"], "num_seeds: got 1000000000; allowed: integers from 1 to 10000"),
        (["--scheduler.kv_block_tokens", "1000000000000"], "kv_block_tokens: got 1000000000000; allowed: integers from 1 to 65536"),
        (["--workload.lengths.max_tokens", "9223372036854775807"], "max_tokens: got 9223372036854775807; allowed: integers from 1 to 2147483647"),
        (["--workload.lengths.output.high", "9223372036854775807"], "low, high"),
        (["--workload.lengths.output", '{"kind": "zipf", "high": 2000000000}'], "high: got 2000000000; allowed: less than low + 10000000 for zipf"),
        (["--workload.tiers.num_tiers", "1000000000"], "num_tiers: got 1000000000; allowed: integers from 1 to 100"),
        (["--step_time.base_s", "1e308"], "base_s: got 1e+308; allowed: seconds from 0 to 3600"),
        (["--predictor_delay_s", "1e308"], "predictor_delay_s"),
        (["--seed", "9223372036854775808"], "seed: got 9223372036854775808; allowed: integers of 64 bits"),
    ],
)  # fmt: skip
def test_values_beyond_what_a_simulation_can_hold(
    options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert main(["run", "--policy", "fcfs", "--workload", _FIXED, "--json", str(out), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    assert not out.exists()


@pytest.mark.parametrize("options", [["--rate", "1e-9"], ["--rate", "1e308"], ["--step_time.base_s", "1e-9"]])
def test_extreme_values_that_a_simulation_can_hold(options: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["run", "--policy", "fcfs", "--workload", _FIXED, "--json", str(out), *options]) == 0
    content = json.loads(out.read_text())
    assert content["metrics"]["num_finished"] == 4
    assert content["metrics"]["ttft_s"]["mean"] > 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"arrival_s": 1e308}, "column arrival_s: got 1e+308; allowed: seconds from 0 to 1e+10"),
        ({"arrival_s": float("inf")}, "column arrival_s: got inf"),
        ({"arrival_s": float("nan")}, "column arrival_s: got nan"),
        ({"arrival_s": -1}, "column arrival_s: got -1"),
        ({"max_tokens": 2**63}, f"column max_tokens: got {2**63}; allowed: integers from 1 to 2147483647"),
        ({"prompt_tokens": 2**31}, "column prompt_tokens: got 2147483648"),
        ({"priority": 2**53 + 1}, ""),
        ({"priority": 2**60}, "column priority"),
        ({"tier": 100}, "column tier: got 100; allowed: integers from 0 to 99"),
        ({"max_tokens": 10**400}, "column max_tokens"),
    ],
)
def test_values_in_a_trace_that_have_no_place_on_the_simulated_clock(
    change: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(TRACE | change) + "\n")
    assert run(path, "--policy", "fcfs") == (2 if told else 0)
    assert told in capsys.readouterr().err


def _lengths_of(path: Path) -> str:
    """A workload whose lengths are those of a file."""
    return json.dumps({"lengths": {"file": str(path), "prompt": None, "output": None}})


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("t.jsonl", "[" * DEEP, "t.jsonl line 1"),
        ("t.csv", "request_id,arrival_s,prompt_tokens,output_tokens,max_tokens,tier,tier\na,0,1,1,1,1,2\n", "columns of t.csv: got 'tier'; allowed: each name once"),
        ("t.csv", "request_id,arrival_s,prompt_tokens,output_tokens,max_tokens\na,0,1,1,1,9\n", "t.csv line 2"),
        ("t.csv", "request_id,arrival_s,prompt_tokens,output_tokens,max_tokens\na,0,1,1\n", "a CSV row of 5 values"),
        ("t.csv", "request_id,arrival_s,prompt_tokens,output_tokens,max_tokens\ncaf\udce9,0,1,1,1\n", "UTF-8 text"),
    ],
)  # fmt: skip
def test_traces_that_would_be_read_as_something_else(
    name: str, text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(text, errors="surrogateescape")
    for options in (["--trace", str(path)], ["--workload", _lengths_of(path)]):
        assert main(["run", "--policy", "fcfs", "--json", str(tmp_path / "o.json"), *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert told in line


def test_parquet_traces_with_a_column_twice_or_of_another_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pa.table({name: [value] for name, value in TRACE.items()})
    cases = {
        "max_tokens": table.append_column("max_tokens", pa.array([99])),
        "a table of schema trace/1; this one has trace/2": table.replace_schema_metadata(
            {"tailcast.schema": "trace/2"}
        ),
    }
    for told, content in cases.items():
        path = tmp_path / "t.parquet"
        pq.write_table(content, path)
        for options in (["--trace", str(path)], ["--workload", _lengths_of(path)]):
            assert main(["run", "--policy", "fcfs", "--json", str(tmp_path / "o.json"), *options]) == 2
            assert told in capsys.readouterr().err


def test_a_comparison_reads_results_of_this_version_alone(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(trace, "--policy", "fcfs") == 0
    good, bad = trace.parent / "out.json", trace.parent / "bad.json"
    content = json.loads(good.read_text())
    cases = [
        (
            json.dumps(content | {"schema": "tailcast.simulation/2"}),
            "schema of b: got 'tailcast.simulation/2'",
        ),
        (json.dumps(content | {"runs": []}), "as simulate run wrote it"),
        (json.dumps(content | {"runs": [1]}), "as simulate run wrote it"),
        (json.dumps(content | {"config": None}), "as simulate run wrote it"),
        ("[" * DEEP, "b: got"),
        ("caf\udce9", "b: got"),
    ]
    for text, told in cases:
        bad.write_text(text, errors="surrogateescape")
        assert main(["compare", str(good), str(bad)]) == 2
        assert told in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("vary", "told"),
    [
        ('{"seed.x": [1]}', "setting seed.x"),
        ('{"scheduler.max_num_seqs": ["many"]}', "max_num_seqs: got 'many'; allowed: int"),
        ('{"policy": [[]]}', "policy: got []; allowed: str"),
        ('{"rate": [null], "client_think_time_s": [null]}', "client_think_time_s: got None; allowed: float or int"),
        ('{"policy_parameters.a.b": [1]}', "setting a.b"),
        (json.dumps({f"policy_parameters.p{place}": list(range(100)) for place in range(4)}), "at most 1000000"),
    ],
)  # fmt: skip
def test_settings_to_vary_are_checked_as_options_are(
    vary: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["sweep", str(tmp_path / "out"), "--workload", _FIXED, "--num_seeds", "1", "--vary", vary]
    assert main(args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_decision_log_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"op": "open", "schema": "tailcast.decisions/3"}\n')
    with pytest.raises(InputError, match="decisions/3.*a log of schema tailcast.decisions/2"):
        read_log(path)
