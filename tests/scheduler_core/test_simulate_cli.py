"""`simulate run` as a user types it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from scheduler_core.cli import main
from scheduler_core.decision_log import read_log
from scheduler_core.replay import replay
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
    for name in ("ttft_s", "ttlt_s", "per_token_latency_s", "tpot_s", "queueing_delay_s"):
        assert set(content["metrics"][name]) == {"mean", "p50", "p90", "p99", "max"}
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
        assert pq.read_schema(table).metadata[b"tailcast.schema"] == b"simulated_requests/1"
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
    assert (
        "row 7 column output_tokens: got -3; allowed: integers from 1 to max_tokens"
        in capsys.readouterr().err
    )


def test_help_explains_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["run", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for line in (
        "--predictor_delay_s",
        "--scheduler.kv_watermark",
        "--step_time.base_s",
        "Seconds every step takes",
    ):
        assert line in text


def test_the_first_word_chooses_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "run" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["walk"]) == 2
    assert "allowed: run" in capsys.readouterr().err
