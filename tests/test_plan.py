"""`tailcast plan`: from a log to a recommendation, as a newcomer types it."""

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tailcast
from scheduler_core.errors import InputError
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.config import ClusterConfig, SimulationConfig
from scheduler_core.simulator.run import run_simulation
from scheduler_core.simulator.step_time import saturation_rate_rps
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace, load_trace, write_trace
from tailcast.cli import main
from tests.scheduler_core.helpers import trace_row

Captured = pytest.CaptureFixture[str]
LINEAR: dict[str, Any] = {
    "base_s": 0.01,
    "per_prefill_token_s": 2e-5,
    "per_decode_s": 2e-4,
    "per_context_token_s": 0.0,
}
BLOCKS, SEQS = 4000, 32


def typed(line: str) -> int:
    return main(["plan", *shlex.split(line)])


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.fixture
def engine(tmp_path: Path) -> str:
    """Options of an engine with measured step times, of which a replica costs 2 per hour."""
    file = tmp_path / "engine.json"
    file.write_text(json.dumps({"step_time": {"name": "linear", "parameters": LINEAR}}))
    return f"--step_time_parameters {file} --num_kv_blocks {BLOCKS} --gpus small=2 --workers 1"


def log_of(path: Path, num: int, rate: float, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, num))
    rows = [
        trace_row(f"r{at}", float(time), int(rng.integers(20, 600)), int(rng.integers(5, 60)), 100)
        for at, time in enumerate(times)
    ]
    write_trace(Trace(tuple(rows)), path)
    return path


def needed(log: Path, bound_s: float) -> int:
    """The number of replicas by trying them in turn."""
    trace = load_trace(log)
    for num in range(1, 50):
        config = SimulationConfig(
            trace=str(log), policy="fcfs", step_time=LinearStepTime(**LINEAR), cluster=ClusterConfig(num_replicas=num),
            scheduler=SchedulerConfig(max_num_seqs=SEQS, max_num_batched_tokens=2048, num_kv_blocks=BLOCKS),
        )  # fmt: skip
        if run_simulation(config, trace=trace).metrics["ttft_s"]["p90"] < bound_s:
            return num
    raise AssertionError


@pytest.mark.parametrize(
    "rate", [40.0, *(pytest.param(rate, marks=pytest.mark.slow) for rate in (30.0, 160.0))]
)
def test_the_number_is_that_of_brute_force(
    rate: float, engine: str, tmp_path: Path, capsys: Captured
) -> None:
    log = log_of(tmp_path / "log.parquet", max(400, int(8 * rate)), rate)
    line = f"{log} {engine} --target 'ttft_s.p90<0.3' --max_num_seqs [{SEQS}] --max_num_batched_tokens [2048]"
    line += f" --json {tmp_path}/plan.json --report {tmp_path}/plan.html --what_if failed_replicas=1"
    assert typed(line) == 0
    plan = read(tmp_path / "plan.json")
    purchase = plan["answer"]
    assert purchase["num_replicas"] == needed(log, 0.3)
    assert purchase["num_replicas_low"] <= purchase["num_replicas"] <= purchase["num_replicas_high"]
    assert purchase["price_per_hour"] == 2 * purchase["num_replicas"]
    assert purchase["metrics"]["ttft_s"]["p90"] < 0.3
    [scenario] = plan["what_if"]
    assert not scenario["meets"]
    assert scenario["num_replicas"] == purchase["num_replicas"] + 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == plan["text"]
    assert lines[0].startswith(f"Buy {purchase['num_replicas']} replica")
    assert lines[1].startswith("failed_replicas=1: the recommended replicas miss the targets")
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<svg") == 3
    assert "<script" not in page


def test_the_function_has_the_answer_and_the_errors_of_the_command(
    engine: str, tmp_path: Path, capsys: Captured, caplog: pytest.LogCaptureFixture
) -> None:
    log = log_of(tmp_path / "log.parquet", 300, 20.0)
    text = f"{log} {engine} --target 'ttft_s.p90<0.3' --what_if traffic=1.5 --json {tmp_path}/plan.json"
    assert typed(text) == 0
    options: dict[str, Any] = {
        "step_time_parameters": str(tmp_path / "engine.json"),
        "num_kv_blocks": BLOCKS,
        "what_if": ["traffic=1.5"],
    }
    result = tailcast.plan(log, ["ttft_s.p90<0.3"], {"small": 2}, **options)
    content = read(tmp_path / "plan.json")
    assert json.loads(json.dumps(result.content["answer"])) == content["answer"] == result.answer
    assert result.num_replicas == content["answer"]["num_replicas"]
    assert result.price_per_hour == 2 * result.num_replicas
    assert str(result) + "\n" == capsys.readouterr().out
    assert not result.unreliable
    result.write_page(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text().count("<svg") == 3
    trace = tailcast.read_trace(log)
    assert tailcast.plan(trace, "ttft_s.p90<0.3", "small=2", **options).answer == result.answer
    for target, gpus, named in (("ttft_s<1", "small=2", "target"), ("ttft_s.p90<1", {}, "gpus")):
        with pytest.raises(InputError) as error:
            tailcast.plan(trace, target, gpus, **options)
        assert error.value.field == named
    with pytest.raises(InputError, match="Did you mean max_num_seqs"):
        tailcast.plan(trace, "ttft_s.p90<1", "small=2", max_num_seq=[8], **options)
    with pytest.raises(InputError, match="at least one request"):
        tailcast.plan(Trace(()), "ttft_s.p90<1", "small=2", **options)
    rows = [trace_row("big", 0.0, 100, 20, 99_999), *trace.requests]
    caplog.clear()
    result = tailcast.plan(Trace(tuple(rows)), "ttft_s.p90<0.3", "small=2", **options)
    assert result.left_out == {"too large for the KV cache": 1}
    assert caplog.messages[-1] == "left out 1 of 301 rows: 1 x too large for the KV cache"


def answer_of(log: Path | Trace, engine: Path, target: str, **options: Any) -> dict[str, Any]:
    """The answer, with the engine of the fixture."""
    names: dict[str, Any] = {"step_time_parameters": str(engine), "num_kv_blocks": BLOCKS, "gpus": "small=2"}
    names |= {"max_num_seqs": [SEQS], "max_num_batched_tokens": [2048], "max_seeds": 4}
    return tailcast.plan(log, target, **names | options).content


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_more_load_or_stricter_targets_never_cost_less(seed: int, engine: str, tmp_path: Path) -> None:
    file, log = tmp_path / "engine.json", log_of(tmp_path / "log.parquet", 300, 50.0, seed)

    def price(target: str, trace: Path | Trace = log, **options: Any) -> float:
        return float(answer_of(trace, file, target, **options)["answer"]["price_per_hour"])

    usual = price("ttft_s.p90<0.3")
    rows = [replace(row, arrival_s=row.arrival_s / 2) for row in load_trace(log).requests]
    assert price("ttft_s.p90<0.3", Trace(tuple(rows))) >= usual
    assert price("ttft_s.p90<0.6") <= usual <= price("ttft_s.p90<0.15")
    assert price("ttft_s.p90<0.3,e2e_s.p90<1.2") >= usual
    slos: dict[str, Any] = {"ttlt_slo_s": 3.0}
    loose = price("goodput>0.9", ttft_slo_s=0.6, **slos)
    assert loose <= price("goodput>0.9", ttft_slo_s=0.2, **slos)
    assert price("ttft_s.p90<0.3", gpus="small=1.9") <= usual
    assert price("ttft_s.p90<0.3", max_num_seqs=[SEQS, 8]) <= usual
    assert price("ttft_s.p90<0.3", routers=["random", "jsq"]) <= price("ttft_s.p90<0.3", routers=["random"])


def test_a_dearer_choice_becomes_the_cheapest_by_its_router(tmp_path: Path) -> None:
    """A GPU of which one is enough, and one of which three are instead of four, if a router shares the load evenly."""
    log = log_of(tmp_path / "log.parquet", 400, 9.0, seed=2)
    options: dict[str, Any] = {"model": "llama-3-8b", "tensor_parallel": [1], "max_seeds": 4}
    options |= {"max_num_seqs": [4], "max_num_batched_tokens": [2048], "gpus": "h100-80gb=2,l40s-48gb=0.6"}
    random, both = (
        tailcast.plan(log, "ttft_s.p90<0.25", routers=routers, **options).answer
        for routers in (["random"], ["random", "jsq"])
    )
    assert (random["gpu"], random["num_replicas"]) == ("h100-80gb", 1)
    assert (both["gpu"], both["settings"]["router"]) == ("l40s-48gb", "jsq")
    assert both["price_per_hour"] < random["price_per_hour"]


def test_a_replica_that_restarts(engine: str, tmp_path: Path) -> None:
    log, file = log_of(tmp_path / "log.parquet", 800, 100.0), tmp_path / "engine.json"
    scenarios = ["failed_replicas=1", "failed_replicas=1+restart_s=2", "failed_replicas=1+restart_s=0.05"]
    content = answer_of(log, file, "ttft_s.p90<0.3", what_if=scenarios, timeout_s=60)
    gone, restarted, shortly = content["what_if"]
    num = content["answer"]["num_replicas"]
    assert gone["num_replicas"] == num + 1
    assert num <= shortly["num_replicas"] <= restarted["num_replicas"] <= gone["num_replicas"]
    p90 = [one["metrics"]["ttft_s"]["p90"] for one in (content["answer"], shortly, restarted, gone)]
    assert p90 == sorted(p90)
    assert content["answer"]["metrics"]["given_up_fraction"] == 0
    assert "No client gives up after 60 s" in content["text"]
    assert not content["unreliable"]


def test_clients_that_give_up_miss_the_targets_and_retries_cost_replicas(
    engine: str, tmp_path: Path, capsys: Captured
) -> None:
    """A P90 allows that every tenth client leaves, which makes room for the others. Those that send again do not: with a replica
    less than necessary, more of them give up for good the more often they try."""
    log, file = log_of(tmp_path / "log.parquet", 1200, 100.0), tmp_path / "engine.json"
    options: dict[str, Any] = {"what_if": ["failed_replicas=1"], "timeout_s": 0.3}
    line = f"{log} {engine} --target 'ttft_s.p90<0.3' --max_num_seqs [{SEQS}] --max_num_batched_tokens [2048] --max_seeds 4"
    line += f" --timeout_s 0.3 --client_retries 2 --what_if failed_replicas=1 --json {tmp_path}/plan.json"
    assert typed(line) == 0
    out, twice = capsys.readouterr().out, read(tmp_path / "plan.json")
    leaving = answer_of(log, file, "ttft_s.p90<0.3", **options)
    often = answer_of(log, file, "ttft_s.p90<0.3", client_retries=6, **options)
    strict = answer_of(log, file, "ttft_s.p99<0.3", **options)
    num = [content["answer"]["num_replicas"] for content in (leaving, twice, often, strict)]
    assert num[0] < num[1] == num[2] <= num[3]
    given_up = leaving["answer"]["metrics"]["given_up_fraction"]
    assert 0.01 < given_up < 0.1
    assert f"{given_up:.2%} of the clients give up after 0.3 s without a token." in leaving["text"]
    assert f"{given_up:.1%} of the clients give up, which the targets allow" in leaving["warnings"]["clients"]
    assert leaving["answer"]["cost_per_million_tokens"] == pytest.approx(
        _cost_of_all(leaving) / (1 - given_up)
    )
    assert strict["answer"]["cost_per_million_tokens"] == pytest.approx(_cost_of_all(strict), rel=0.01)
    assert "clients" not in strict["warnings"]
    assert strict["answer"]["metrics"]["given_up_fraction"] < 0.01
    storm = [content["what_if"][0] for content in (twice, often)]
    assert not any(one["meets"] for one in storm)
    assert given_up < storm[0]["metrics"]["given_up_fraction"] < storm[1]["metrics"]["given_up_fraction"]
    assert storm[0]["metrics"]["ttft_s"]["p90"] > 5, "of requests that never got a token"
    assert "No client gives up after 0.3 s without a token and 2 retries." in out
    assert f"{storm[0]['metrics']['given_up_fraction']:.2%} of the clients give up" in out
    with pytest.raises(InputError, match="every client gives up, as first tokens take at least"):
        answer_of(log, file, "ttft_s.p90<0.3", timeout_s=0.005)


def _cost_of_all(content: dict[str, Any]) -> float:
    log = content["log"]
    return float(content["answer"]["price_per_hour"] / (log["rate_rps"] * log["output_tokens"] * 3600) * 1e6)


def test_replicas_for_prompts_only_meet_what_others_miss_at_any_load(tmp_path: Path) -> None:
    """No token may wait for the prompt of another request, of which each takes a tenth of a second."""
    rows = [trace_row(f"r{at}", at / 4, 3000, 40, 100) for at in range(120)]
    write_trace(Trace(tuple(rows)), tmp_path / "log.parquet")
    options: dict[str, Any] = {"model": "llama-3-8b", "gpus": "h100-80gb=2", "tensor_parallel": [1]}
    options |= {"max_num_seqs": [32], "max_num_batched_tokens": [4096], "routers": ["jsq"], "max_replicas": 8}
    options["max_seeds"] = 4
    target = "itl_s.max<0.05"
    with pytest.raises(InputError, match=r"tbt_s\.max is .* at low load"):
        tailcast.plan(tmp_path / "log.parquet", target, **options)
    with pytest.raises(InputError, match=r"tbt_s\.max is .* at low load"):
        tailcast.plan(
            tmp_path / "log.parquet", target, prefill_fractions=[0.5], **options | {"max_replicas": 1}
        )
    scenarios = ["failed_replicas=1"]
    content = tailcast.plan(
        tmp_path / "log.parquet", target, prefill_fractions=[0.0, 0.5], what_if=scenarios, **options
    ).content
    purchase = content["answer"]
    assert purchase["settings"]["prefill_fraction"] == 0.5
    assert 2 <= purchase["num_replicas"] <= 4
    assert purchase["metrics"]["tbt_s"]["max"] < 0.05
    assert "50% of the replicas for prompts only" in content["text"]
    assert not content["what_if"][0]["meets"]


def test_auto_scaling_costs_what_runs(engine: str, tmp_path: Path) -> None:
    """A log that is busy in its last third."""
    rng = np.random.default_rng(5)
    times = np.sort(np.concatenate([rng.uniform(0, 600, 150), rng.uniform(400, 550, 750)]))
    rows = [
        trace_row(f"r{at}", float(time), int(rng.integers(20, 600)), int(rng.integers(5, 60)), 100)
        for at, time in enumerate(times)
    ]
    file, log = tmp_path / "engine.json", Trace(tuple(rows))
    content = answer_of(log, file, "ttft_s.p90<1", min_replicas=1, startup_s=10.0, max_num_seqs=[1])
    scaled, purchase = content["autoscaling"], content["answer"]
    assert scaled["meets"]
    assert scaled["price_per_hour"] == pytest.approx(2 * scaled["mean_replicas"])
    assert scaled["price_per_hour"] < purchase["price_per_hour"]
    assert 1 <= scaled["mean_replicas"] < purchase["num_replicas"] <= scaled["max_replicas"]
    assert "Auto-scaling from 1 to" in content["text"]
    few = answer_of(log_of(tmp_path / "log.parquet", 200, 9.0), file, "ttft_s.p90<1", min_replicas=99)
    assert few["autoscaling"] is None
    assert "no more than min_replicas are needed" in few["warnings"]["autoscaling"]


@pytest.mark.mend  # A log of 30 s got a capacity without a word about its length.
def test_a_log_of_30_seconds_is_refused_with_the_length_that_is_enough(
    engine: str, tmp_path: Path, capsys: Captured
) -> None:
    log = log_of(tmp_path / "log.parquet", 60, 2.0)
    line = f"{log} {engine} --target 'ttft_s.p99<2' --cells {tmp_path}/out --json {tmp_path}/plan.json"
    assert typed(line) == 3
    [reason, *_] = read(tmp_path / "plan.json")["unreliable"]
    assert reason.startswith(
        "ttft_s.p99 needs a log of at least 1,000 requests, which is 9 minutes at its rate"
    )
    assert capsys.readouterr().out.startswith(f"Not reliable: {reason}")
    first = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/cells").iterdir()}
    content = read(tmp_path / "plan.json")
    assert typed(f"{line} --overwrite true") == 3
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out/cells").iterdir()} == first
    assert read(tmp_path / "plan.json")["answer"] == content["answer"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--target 'ttft_s.p90<0.005'", "target: got 'ttft_s.p90<0.005'; allowed: more; the closest: ttft_s.p90 is 0.0"),
        ("--target 'ttft_s.p90<0.3,cost_per_million_tokens<0.01'", "the cheapest choice that meets the others, 1 replica of small, costs"),
        ("--target 'ttft_s.p90<0.3' --max_num_seqs [1] --max_replicas 3", "max_replicas: got 3; allowed: more; a replica bears less than 0.083 of the load: ttft_s.p90 is "),
        ("--target 'ttft_s.p90<0.3' --orders [tie]", "because the log has no prompts"),
        ("--target 'ttft_s.p90<0.3' --num_kv_blocks 20", "requests are longer than its KV cache of 320 tokens"),
        ("--target 'ttft_s.p90<0.3' --max_num_seqs [256] --max_num_batched_tokens [64]", "error: max_num_batched_tokens: got 64; allowed: integers >= 256"),
        ("--target 'ttft_s.p90<0.3' --num_kv_blocks null", "error: num_kv_blocks: got None; allowed: the blocks of the engine's KV cache"),
    ],
)  # fmt: skip
def test_what_cannot_be_met_is_refused_with_the_closest(
    options: str, message: str, engine: str, tmp_path: Path, capsys: Captured
) -> None:
    log = log_of(tmp_path / "log.parquet", 300, 20.0)
    assert typed(f"{log} {engine} {options}") == 2
    assert message in capsys.readouterr().err


def test_a_wrong_name_of_the_model_is_refused_once(tmp_path: Path, capsys: Captured) -> None:
    log = log_of(tmp_path / "log.parquet", 300, 20.0)
    assert typed(f"{log} --model lama-3 --gpus h100=2 --target 'ttft_s.p90<0.3'") == 2
    error = capsys.readouterr().err
    assert "error: model: got 'lama-3'" in error
    assert error.count("lama-3'") == 1


def test_the_calibration_has_the_size_of_the_kv_cache_and_tuned_settings_another_load(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    content = {"step_time": {"name": "linear", "parameters": LINEAR}, "kv_tokens": 16 * BLOCKS + 5}
    file.write_text(json.dumps(content))
    log = log_of(tmp_path / "log.parquet", 400, 40.0)
    line = f"{log} --step_time_parameters {file} --gpus small=2 --workers 1 --target 'ttft_s.p90<0.3'"
    line += f" --max_num_seqs [4,{SEQS}] --max_num_batched_tokens [2048] --json {tmp_path}/plan.json"
    assert typed(line) == 0
    purchase = read(tmp_path / "plan.json")["answer"]
    assert purchase["settings"]["max_num_seqs"] == SEQS
    trace = load_trace(log)
    limits = SchedulerConfig(max_num_seqs=SEQS, max_num_batched_tokens=2048, num_kv_blocks=BLOCKS)
    highest_rps = saturation_rate_rps(trace, limits, LinearStepTime(**LINEAR))
    assert trace.mean_rate_rps is not None
    assert purchase["load"] == pytest.approx(trace.mean_rate_rps / highest_rps / purchase["num_replicas"])


@pytest.mark.mend  # A log that was simulated several times in a row left out several times as many requests.
def test_requests_that_are_too_large_count_once(
    engine: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [trace_row(f"r{at}", at / 200, 100, 20, 99_999 if at == 50 else 20) for at in range(200)]
    write_trace(Trace(tuple(rows)), tmp_path / "log.parquet")
    line = f"{tmp_path}/log.parquet {engine} --target 'ttft_s.p90<5' --json {tmp_path}/plan.json"
    assert typed(line) == 3
    log = read(tmp_path / "plan.json")["log"]
    assert log["num_repeats"] > 1
    assert log["num_refused"] == 1
    assert caplog.messages[-1] == "left out 1 of 200 rows: 1 x too large for the KV cache"


@pytest.mark.parametrize(
    ("outputs", "code", "message"),
    [
        ([5, 9], 3, "tpot_s.p50 needs a log of at least 20 requests"),
        ([1, 1], 2, "metric: got 'tpot_s.p50'; allowed: "),
        ([5], 2, "log.jsonl'; allowed: times of arrival; or a rate"),
    ],
)
def test_tiny_logs(
    outputs: list[int], code: int, message: str, engine: str, tmp_path: Path, capsys: Captured
) -> None:
    rows = [
        {"request_id": str(at), "arrival_s": 3.0 * at, "prompt_tokens": 9, "output_tokens": num}
        for at, num in enumerate(outputs)
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert typed(f"{tmp_path}/log.jsonl {engine} --target 'tpot_s.p50<0.5'") == code
    output = capsys.readouterr()
    assert message in output.out + output.err


@pytest.mark.mend  # With the cost as the first target, a plan that compares orders ended in a KeyError.
def test_from_an_openai_log_to_a_recommendation(engine: str, tmp_path: Path, capsys: Captured) -> None:
    """With prompts: the default order is compared with that of arrival."""
    rng = np.random.default_rng(1)
    lines, now = [], 1_790_000_000.0
    for number in range(201):
        now += float(rng.exponential(0.1))
        usage = {"prompt_tokens": int(rng.integers(20, 300)), "completion_tokens": int(rng.integers(5, 60))}
        request = {
            "model": "m",
            "max_tokens": 100,
            "messages": [{"role": "user", "content": f"Word {number}?"}],
        }
        response = {"id": f"c{number}", "model": "m", "usage": usage, "choices": [{"finish_reason": "stop"}]}
        record = {"request": request, "response": response, "created_at": now}
        lines.append(json.dumps(record if number else {"request": request, "response": None}))
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    targets = "cost_per_million_tokens<99,ttft_s.p90<0.3,e2e_s.mean<5"
    line = f"{tmp_path}/log.jsonl {engine} --target '{targets}' --json {tmp_path}/plan.json"
    assert typed(line) == 0
    plan = read(tmp_path / "plan.json")
    assert plan["log"]["num_requests"] == 200
    assert plan["log"]["source"] == "log.jsonl"
    assert {one["order"] for one in plan["orders"]} == {"fcfs", "bounded_shortest"}
    assert plan["answer"]["num_replicas"] == 1
    assert "end-to-end latency" in capsys.readouterr().out


@pytest.mark.mend  # A result of `vllm bench serve` was refused, unless it was one line of a .jsonl file.
def test_from_a_result_of_vllm_bench_serve(engine: str, tmp_path: Path, capsys: Captured) -> None:
    num, rng = 400, np.random.default_rng(3)
    starts = np.cumsum(rng.exponential(0.5, num)).tolist()
    content = {
        "backend": "vllm", "model_id": "m", "input_lens": [40] * num, "output_lens": [20] * num, "start_times": starts,
        "ttfts": [0.05] * num, "itls": [[0.01] * 19] * num, "errors": [""] * num,
    }  # fmt: skip
    (tmp_path / "result.json").write_text(json.dumps(content, indent=1))
    line = f"{tmp_path}/result.json {engine} --target 'ttft_s.p50<2' --json {tmp_path}/plan.json"
    assert typed(line) in (0, 3)
    assert read(tmp_path / "plan.json")["log"]["num_requests"] == num


def test_a_log_of_prompts_gets_lengths_from_the_predictor(
    engine: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {
            "timestamp": 1_790_000_000 + number / 2,
            "request": {"messages": [{"role": "user", "content": f"Name {number % 9 + 1} birds."}]},
        }
        for number in range(120)
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"timestamp": 1}])))
    line = f"{tmp_path}/log.jsonl {engine} --target 'tpot_s.p90<0.3' --json {tmp_path}/plan.json --max_replicas 20"
    assert typed(line) == 0
    plan = read(tmp_path / "plan.json")
    assert plan["log"]["num_requests"] == 120
    assert plan["log"]["output_tokens"] > 5
    assert any("they were drawn from the predictor tiny" in text for text in caplog.messages)
    assert caplog.messages[-1] == "left out 1 of 121 rows: 1 x no prompt and no length"
    (tmp_path / "log.jsonl").write_text("\n".join(json.dumps({"timestamp": number}) for number in range(9)))
    assert typed(line + " --overwrite true") == 2


def test_the_access_files_of_a_predictor_are_read(engine: str, tmp_path: Path, capsys: Captured) -> None:
    rows = [{"timestamp": number, "request": {"prompt": "Name 3 birds."}} for number in range(120)]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "ca.pem").write_text("no certificate")
    line = f"{tmp_path}/log.jsonl {engine} --target 'tpot_s.p90<0.3' --predictor grpcs://localhost:1"
    assert typed(f"{line} --predictor_ca {tmp_path}/ca.pem") == 2
    assert "predictor_ca: got" in capsys.readouterr().err


def sessions(path: Path, num: int, turns: int) -> Path:
    """Recorded agent sessions, in the columns of the public ones."""
    rng = np.random.default_rng(4)
    rows = []
    for session in range(num):
        time_s, cached = 0.0, 0
        for turn in range(turns):
            pause = float(rng.uniform(0.5, 4)) if turn else 0.0
            new, output = int(rng.integers(100, 400)), int(rng.integers(5, 60))
            time_s += pause + 1.0
            row = {
                "session": f"t{session}",
                "agent": "main",
                "depth": 0,
                "time_s": time_s - 1.0,
                "kind": "s",
                "model": "m",
            }
            row |= {"input_tokens": cached + new, "cached_tokens": cached, "output_tokens": output}
            row |= {
                "stop": "tool_use" if turn < turns - 1 else "end_turn",
                "input_types": "tool_result" if turn else "text",
            }
            rows.append(
                row | {"output_types": "text", "think_time_s": pause, "api_time_s": 1.0, "ttft_s": None}
            )
            cached += new
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_from_agent_sessions_to_a_recommendation(engine: str, tmp_path: Path, capsys: Captured) -> None:
    log = sessions(tmp_path / "agent_sessions.parquet", 24, 8)
    line = f"{log} {engine} --target 'ttft_s.p90<0.5' --json {tmp_path}/plan.json"
    assert typed(line) == 2
    assert (
        "sessions with times of arrival (24 of 24 start at the same time); or a rate"
        in capsys.readouterr().err
    )
    assert typed(f"{line} --rate 10") == 0
    plan = read(tmp_path / "plan.json")
    assert plan["log"]["num_requests"] == 192
    assert plan["log"]["num_units"] < 60
    assert plan["log"]["rate_rps"] == pytest.approx(10, rel=0.1)
    hits = plan["answer"]["metrics"]["prefix_hit_fraction"]
    assert hits > 0.5


@pytest.mark.slow
def test_goodput_disaggregation_and_parallelism_of_a_data_sheet(tmp_path: Path) -> None:
    log = log_of(tmp_path / "log.parquet", 1500, 90.0)
    line = f"{log} --model llama-3-8b --gpus l40s=1 --tensor_parallel [1,2] --target 'goodput>0.95' --ttft_slo_s 1"
    line += f" --tbt_slo_s 0.2 --prefill_fractions [0,0.5] --routers [jsq,round_robin] --json {tmp_path}/plan.json"
    assert typed(f"{line} --report {tmp_path}/plan.html --workers 2 --what_if outputs=2+traffic=1.2") in (
        0,
        3,
    )
    plan = read(tmp_path / "plan.json")
    assert plan["answer"]["metrics"]["slo_attainment"] > 0.95
    assert plan["answer"]["error_band"]["basis"] in ("measured", "propagated")
    assert {one["gpu"] for one in plan["candidates"]} == {"l40s"}
    prices = [one["price_per_hour"] for one in plan["candidates"]]
    assert prices == sorted(prices)
    assert "Goodput is" in plan["text"]


@pytest.mark.slow
def test_from_the_public_agent_sessions_to_a_recommendation(tmp_path: Path) -> None:
    data = os.environ.get("DATA")
    if not data:
        pytest.skip("needs DATA, the folder of the public data sets")
    line = f"{data}/traces/agent_sessions.parquet --rate 2 --model gpt-oss-20b --gpus h200=3.5 --tensor_parallel [2]"
    line += (
        " --max_num_seqs [256] --max_num_batched_tokens [8192] --target 'ttft_s.p90<5' --max_requests 1000"
    )
    assert typed(f"{line} --json {tmp_path}/plan.json --report {tmp_path}/plan.html") in (0, 3)
    assert read(tmp_path / "plan.json")["answer"]["num_replicas"] >= 1
