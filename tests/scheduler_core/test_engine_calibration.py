"""`simulate calibrate`: constants of a simulated engine, found again from every kind of measurement."""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from benchmarks.vllm import predicted
from scheduler_core.engine.decision_log import DecisionLog
from scheduler_core.engine.plan import StepResult
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.policies import make_policy
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.commands import calibrate
from scheduler_core.simulator.commands.calibrate import EngineCalibrationConfig
from scheduler_core.simulator.commands.simulate import main
from scheduler_core.simulator.engine_probe import Endpoint, Probe, random_prompt, send
from scheduler_core.simulator.measurements.fit import fit_step_time, validated_fit
from scheduler_core.simulator.measurements.prometheus import watch_metrics
from scheduler_core.simulator.measurements.requests import request_measurements
from scheduler_core.simulator.measurements.sources import MeasurementSource, read_sources
from scheduler_core.simulator.measurements.steps import Region, StepMeasurement, step_of_table
from scheduler_core.simulator.step_time import make_step_time
from scheduler_core.simulator.step_time.base import LinearStepTime, StepTime, StepWork
from scheduler_core.simulator.step_time.staircase import StaircaseStepTime
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.watch import RunWatch, StepTable
from tests.fake_openai import event, running
from tests.scheduler_core.helpers import random_trace, request, simulate, token_times
from tests.waiting import taken

TRUE = LinearStepTime(base_s=0.01, per_prefill_token_s=5e-5, per_decode_s=4e-4, per_context_token_s=2e-6)
LIMITS = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=2048, num_kv_blocks=4096)
NAMES = ("base_s", "per_prefill_token_s", "per_decode_s", "per_context_token_s")


@dataclass
class Run:
    """What a simulated engine did: its requests, and a row of each of its steps."""

    probes: list[Probe]
    steps: list[dict[str, float]]


def simulated(step_time: StepTime, trace: Trace) -> Run:
    """A run in which every step is simulated."""
    log, watch = DecisionLog(), RunWatch(steps=StepTable())
    simulate(trace, log=log, watch=watch, scheduler=LIMITS, step_time=step_time, exact_steps=True)
    times = token_times(log)
    probes = [
        Probe(
            request_id=row.request_id, sent_s=row.arrival_s, prompt_tokens=row.prompt_tokens,
            max_tokens=row.max_tokens, token_s=times[row.request_id], output_tokens=row.output_tokens,
        )
        for row in trace.requests
    ]  # fmt: skip
    assert watch.steps is not None
    columns = watch.steps.columns(0)
    numbers = [name for name in columns if name != "replica_id"]
    rows = zip(*(columns[name].tolist() for name in numbers), strict=True)
    return Run(probes, [dict(zip(numbers, row, strict=True)) for row in rows])


def run_at(rate_rps: float, step_time: StepTime = TRUE, num: int = 80, seed: int = 0) -> Run:
    return simulated(step_time, random_trace(num, seed=seed, rate_rps=rate_rps, cap=120, most_prompt=600))


def measured(step_time: StepTime, rate_rps: float, num: int = 80, seed: int = 0) -> list[Probe]:
    """What a client would see of an engine with these step times."""
    return run_at(rate_rps, step_time, num, seed).probes


def steps_of(probes: Sequence[Probe]) -> list[StepMeasurement]:
    return request_measurements(probes, LIMITS.max_num_batched_tokens)[0]


def phases(*rates: float, num: int = 60) -> Run:
    """A run whose load changes, so that intervals differ."""
    rows, start_s = [], 0.0
    for index, rate in enumerate(rates):
        part = random_trace(num, seed=index, rate_rps=rate, cap=120, most_prompt=600).requests
        rows += [replace_row(row, f"{index}-{row.request_id}", start_s) for row in part]
        start_s = rows[-1].arrival_s
    return simulated(TRUE, Trace(tuple(rows)))


def replace_row(row: Any, name: str, start_s: float) -> Any:
    return replace(row, request_id=name, arrival_s=row.arrival_s + start_s)


def close(parameters: Mapping[str, float], rel: float, names: Sequence[str] = NAMES) -> None:
    for name in names:
        assert parameters[name] == pytest.approx(getattr(TRUE, name), rel=rel), name


def typical_errors(step_time: StepTime, run: Run) -> list[float]:
    """Relative errors of the steps of a run."""
    steps = [step_of_table(row) for row in run.steps]
    return [abs(one.expected_s(step_time.step_s) / one.duration_s - 1) for one in steps]


def fitted(path: Path | Sequence[Path], limits: SchedulerConfig = LIMITS) -> Any:
    paths = [path] if isinstance(path, Path) else path
    sources = read_sources([str(one) for one in paths], limits)
    return validated_fit([step for source in sources for step in source.measurements])


def bench_json(probes: Sequence[Probe], shift_s: float = 3533.7) -> dict[str, Any]:
    """The run in the format of `vllm bench serve --save-detailed`, with a failed request."""
    return {
        "date": "20260901-101010", "backend": "openai", "model_id": "m", "duration": 9.0, "failed": 1,
        "input_lens": [*(one.prompt_tokens for one in probes), 90],
        "output_lens": [*(one.output_tokens for one in probes), 0],
        "start_times": [*(one.sent_s + shift_s for one in probes), shift_s],
        "ttfts": [*(one.token_s[0] - one.sent_s for one in probes), 0.0],
        "itls": [*(np.diff(one.token_s).tolist() for one in probes), []],
        "errors": [*("" for _ in probes), "Bad Gateway"],
    }  # fmt: skip


def feedback_rows(probes: Sequence[Probe]) -> list[dict[str, Any]]:
    """The run in the log of the proxy."""
    return [
        {
            "request_id": one.request_id, "time": 1.7e9 + one.sent_s - 0.002, "waited_s": 0.002,
            "prompt_tokens": one.prompt_tokens, "output_tokens": one.output_tokens, "counted_by": "usage",
            "ttft_s": one.token_s[0] - one.sent_s + 0.002, "total_s": one.token_s[-1] - one.sent_s + 0.002,
        }
        for one in probes
    ]  # fmt: skip


def engine_log(steps: Sequence[Mapping[str, float]], host_s: float = 0.0) -> str:
    """The run in the log of vLLM with a line for each step; its times are shorter by `host_s`."""
    size = LIMITS.num_kv_blocks * LIMITS.kv_block_tokens
    lines = [
        f"(EngineCore pid=1) INFO 11-28 21:00:00 [kv_cache_utils.py:1] GPU KV cache size: {size:,} tokens"
    ]
    for number, row in enumerate(steps):
        minutes, seconds = divmod(int(row["end_s"]), 60)
        lines.append(
            f"(APIServer pid=1) INFO 11-28 21:{minutes:02d}:{seconds:02d} [loggers.py:1] Engine 000: Iteration({number}): "
            f"{row['num_prefills']} context requests, {row['num_prefill_tokens']} context tokens, {row['num_decodes']} generation "
            f"requests, {row['num_decodes']} generation tokens, iteration elapsed time: {1e3 * (row['step_s'] - host_s):.2f} ms, "
            f"GPU KV cache usage: {100 * row['num_context_tokens'] / size:.1f}%"
        )
    return "\n".join(lines)


#: Names of the metrics of vLLM 0.32 in the order of `counters`.
HISTOGRAMS = ("inter_token_latency_seconds", "time_to_first_token_seconds", "request_prefill_time_seconds")


def counters(run: Run, at_s: float) -> dict[str, float]:
    """vLLM's metrics at some time of a run."""
    values = dict.fromkeys((f"vllm:{name}_{part}" for name in HISTOGRAMS for part in ("sum", "count")), 0.0)
    values |= {"vllm:iteration_tokens_total_count": 0.0, "vllm:prompt_tokens_total": 0.0}
    size, context = LIMITS.num_kv_blocks * LIMITS.kv_block_tokens, 0.0
    done = [row for row in run.steps if row["end_s"] <= at_s]
    if done:
        values["vllm:iteration_tokens_total_count"] = float(len(done))
        values["vllm:prompt_tokens_total"] = float(sum(row["num_prefill_tokens"] for row in done))
        context = done[-1]["num_context_tokens"]
    begins = {row["end_s"]: row["start_s"] for row in done}
    for probe in run.probes:
        times = np.array(probe.token_s)
        gaps = np.diff(times[times <= at_s])
        values["vllm:inter_token_latency_seconds_sum"] += float(gaps.sum())
        values["vllm:inter_token_latency_seconds_count"] += len(gaps)
        values["vllm:time_to_first_token_seconds_count"] += bool(times[0] <= at_s)
        if times[-1] <= at_s:
            values["vllm:request_prefill_time_seconds_sum"] += probe.token_s[0] - begins[probe.token_s[0]]
            values["vllm:request_prefill_time_seconds_count"] += 1
    return values | {"vllm:kv_cache_usage_perc": context / size}


def scrape_text(values: Mapping[str, float]) -> str:
    labels = 'engine="0",model_name="m"'
    lines = ["# HELP python_info Python", 'python_info{version="3"} 1.0']
    lines += [f"{name}{{{labels}}} {value!r}" for name, value in values.items()]
    size = f'block_size="{LIMITS.kv_block_tokens}",num_gpu_blocks="{LIMITS.num_kv_blocks}"'
    lines.append(f'vllm:cache_config_info{{{size},engine="0"}} 1.0')
    lines.append('vllm:admission_rejections_total{model_name="m",reason="max_num_queued_reqs"} 0.0')
    lines.append(f'vllm:inter_token_latency_seconds_bucket{{le="0.1",{labels}}} 3.0')
    return "\n".join(lines) + "\n"


def test_step_times_are_found_again_from_the_times_of_tokens() -> None:
    fit = fit_step_time(steps_of(measured(TRUE, 6.0)))
    close(fit.parameters, 0.1)
    assert fit.median_error < 0.02
    assert fit.num_outliers < 0.2 * fit.num_samples
    unseen = calibrate.latency_error(measured(TRUE, 20.0, seed=1), fit.step_time, LIMITS)
    assert unseen["num_requests"] == 80
    assert all(abs(error) < 0.1 for error in unseen["error"].values()), unseen


def test_tokens_that_come_together_are_steps_that_came_late() -> None:
    """A tenth of the tokens is read 0.1 ms before the next one of its request."""
    rng, probes = np.random.default_rng(0), measured(TRUE, 6.0)
    for one in probes:
        for index in range(len(one.token_s) - 1):
            if rng.random() < 0.1:
                one.token_s[index] = one.token_s[index + 1] - 1e-4
    close(fit_step_time(steps_of(probes)).parameters, 0.15)


def test_results_of_vllm_bench_at_several_rates(tmp_path: Path) -> None:
    files = []
    for rate in (2.0, 8.0, 20.0):
        files.append(tmp_path / f"{rate:g}.json")
        files[-1].write_text(json.dumps(bench_json(measured(TRUE, rate, num=50))))
    close(fitted(files).parameters, 0.1)
    config = config_of(files)
    result = calibrate.calibrate(config, read_sources(config.measurements, LIMITS))
    assert [load["held_out"] for load in result["loads"]] == [True] * 3
    assert all(abs(error) < 0.1 for load in result["loads"] for error in load["error"].values()), result
    assert not {kind for kind in result["warnings"] if kind.startswith("error")}
    for name in NAMES:
        low, high = result["intervals"][name]
        assert low <= result["step_time"]["parameters"][name] <= high
    appended = tmp_path / "appended.jsonl"
    appended.write_text("\n".join(path.read_text() for path in files))
    assert fitted(appended).parameters == fitted(files).parameters


@pytest.mark.parametrize("is_ahead", [False, True])
def test_time_outside_the_steps_is_found_too(tmp_path: Path, is_ahead: bool) -> None:
    """Each request takes 8 ms in front of the engine, whose next step may be planned already when it arrives."""
    true, files = replace(TRUE, frontend_s=0.008, async_scheduling=is_ahead), []
    for rate in (4.0, 10.0):
        files.append(tmp_path / f"{rate:g}.json")
        files[-1].write_text(json.dumps(bench_json(measured(true, rate, num=90))))
    config = config_of(files)
    result = calibrate.calibrate(config, read_sources(config.measurements, LIMITS))
    parameters = result["step_time"]["parameters"]
    assert parameters["async_scheduling"] == is_ahead
    assert parameters["frontend_s"] == pytest.approx(0.008, abs=0.001)
    assert all(abs(load["error"]["ttft_s"]) < 0.05 for load in result["loads"]), result["loads"]


@pytest.mark.mend
@pytest.mark.parametrize("speed", [0.995, 1.005])
def test_time_outside_the_steps_of_an_engine_of_another_phase(speed: float) -> None:
    """Steps of a real engine begin at other times than simulated ones: 23 to 25 ms were found, because only requests with a
    short simulated wait were compared, and a real run had 21 % too much TTFT."""
    true = replace(TRUE, base_s=0.05, frontend_s=0.008)
    source = MeasurementSource("x", [], measured(true, 2.0, num=400))
    source.measurements = steps_of(source.probes)
    parameters = {name: speed * getattr(true, name) for name in NAMES}
    delays = calibrate.fitted_delays(config_of([Path("x")]), [source], parameters)
    assert not delays["async_scheduling"]
    assert delays["frontend_s"] == pytest.approx(0.008, abs=0.002)


@pytest.mark.mend
def test_a_few_prompts_are_not_outliers_of_exact_decodes() -> None:
    """One of 5,147 steps was 3 % off, so that decodes had errors of 1e-5, all 243 prompts were left out, and cost nothing."""
    fit = fit_step_time(steps_of(measured(replace(TRUE, frontend_s=0.008), 4.0, num=90)))
    close(fit.parameters, 0.01)
    assert fit.num_outliers <= 1


def config_of(files: Sequence[Path], **more: Any) -> EngineCalibrationConfig:
    return EngineCalibrationConfig(
        json="", measurements=[str(one) for one in files], scheduler=LIMITS, **more
    )


def test_the_log_of_the_proxy_without_times_of_tokens(tmp_path: Path) -> None:
    rows = [
        row for rate in (2.0, 6.0, 12.0) for row in shifted(feedback_rows(measured(TRUE, rate)), 1000 * rate)
    ]
    path = tmp_path / "feedback-1.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + '\n{"time": 1.7')
    [source] = read_sources([str(tmp_path)], LIMITS)
    assert source.left_out == {"request: not valid JSON": 1}
    fit = validated_fit(source.measurements)
    close(fit.parameters, 0.25, NAMES[:3])
    assert np.median(typical_errors(fit.step_time, run_at(10.0, seed=3))) < 0.05


def test_the_log_of_a_proxy_with_several_replicas(tmp_path: Path) -> None:
    """Each replica is fitted by itself; together they would seem to be one engine with twice the requests."""
    rows = [
        row | {"replica": f"http://{name}"}
        for seed, name in enumerate(("a", "b"))
        for rate in (2.0, 6.0, 12.0)
        for row in shifted(feedback_rows(measured(TRUE, rate, seed=seed)), 1000 * rate)
    ]
    path = tmp_path / "feedback-1.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in sorted(rows, key=lambda row: row["time"])) + '\n{"t')
    sources = read_sources([str(tmp_path)], LIMITS)
    names = ["feedback log of http://a", "feedback log of http://b", "feedback log"]
    assert [source.name for source in sources] == names
    assert sources[2].left_out == {"request: not valid JSON": 1}
    truth = run_at(10.0, seed=3)
    errors = np.median(typical_errors(fitted(path).step_time, truth))
    path.write_text("\n".join(json.dumps(row | {"replica": None}) for row in rows))
    as_one = np.median(typical_errors(fitted(path).step_time, truth))
    assert errors < 0.05 < as_one


def shifted(rows: list[dict[str, Any]], by_s: float) -> list[dict[str, Any]]:
    return [row | {"time": row["time"] + by_s} for row in rows]


def test_a_log_of_steps(tmp_path: Path) -> None:
    run = run_at(8.0)
    log, table, rows = tmp_path / "vllm.log", tmp_path / "steps.jsonl", tmp_path / "engine.steps"
    log.write_text(engine_log(run.steps))
    [source] = read_sources([str(log)], LIMITS)
    assert source.kv_tokens == 65_536
    close(fitted(log).parameters, 0.1)
    log.write_text(engine_log(run.steps, host_s=0.004))
    close(fitted(log).parameters, 0.1)
    table.write_text("\n".join(json.dumps(row) for row in run.steps))
    close(fitted(table).parameters, 1e-6)
    lists = [
        [
            row["end_s"],
            row["step_s"],
            row["num_prefill_tokens"],
            row["num_decodes"],
            row["num_context_tokens"],
            1,
        ]
        for row in run.steps
    ]
    rows.write_text("\n".join(json.dumps(row) for row in lists))
    close(fitted(rows).parameters, 1e-6)


def test_lines_of_mean_throughput(tmp_path: Path) -> None:
    """Steps between two lines are described by the running requests at both; an engine that was idle is left out."""
    line = "INFO 11-28 21:00:{} [loggers.py:1] Engine 000: Avg prompt throughput: {:.1f} tokens/s, Avg generation throughput: {:.1f} tokens/s, Running: {} reqs, Waiting: 0 reqs, GPU KV cache usage: {:.1f}%, Prefix cache hit rate: 0.0%"
    lines = ["INFO 11-28 21:00:00 GPU KV cache size: 65,536 tokens"]
    for index, running_requests in enumerate([1, 1, 4, 4, 8, 8, 12, 12, 16, 16, 24, 24, 32, 32, 0, 2]):
        context = 300 * running_requests
        step_s = TRUE.step_s(StepWork((), [300] * running_requests))
        lines.append(
            line.format(
                f"{index:02d}", 0.0, running_requests / step_s, running_requests, 100 * context / 65_536
            )
        )
    path = tmp_path / "vllm.log"
    path.write_text("\n".join(lines))
    [source] = read_sources([str(path)], LIMITS)
    assert source.left_out == {"intervals with an idle engine": 2}
    assert [one.decodes for one in source.measurements[::2]] == [1, 4, 8, 12, 16, 24, 32]
    for one in source.measurements[::2]:
        assert one.duration_s == pytest.approx(one.expected_s(TRUE.step_s), rel=0.02)


def test_scrapes_of_metrics(tmp_path: Path) -> None:
    """Intervals of one load each give the mean step of that load."""
    run = phases(1.0, 4.0, 8.0, 12.0, 16.0)
    times = np.arange(0.0, run.steps[-1]["end_s"] + 4, 4.0).tolist()
    scrapes = [counters(run, at_s) for at_s in times]
    one_file, several = tmp_path / "scrapes.txt", [tmp_path / f"{at}.txt" for at in range(len(times))]
    texts = [scrape_text(values) for values in scrapes]
    one_file.write_text("".join(texts))
    for path, text in zip(several, texts, strict=True):
        path.write_text(text)
    [source] = read_sources([str(one_file)], LIMITS)
    assert source.kv_tokens == 65_536
    fit = fitted(one_file)
    assert fitted(several).parameters == fit.parameters
    close(fit.parameters, 0.2, ("base_s", "per_prefill_token_s"))
    assert np.median(typical_errors(fit.step_time, run_at(10.0, seed=3))) < 0.06
    series = []
    for name in scrapes[0]:
        labels = {"__name__": name, "engine": "0", "model_name": "m"}
        values = [[at_s, str(one[name])] for at_s, one in zip(times, scrapes, strict=True)]
        series.append({"metric": labels, "values": values})
    labels = {"block_size": "16", "num_gpu_blocks": "4096", "engine": "0"}
    values = [[at_s, "1"] for at_s in times]
    series.append({"metric": {"__name__": "vllm:cache_config_info", **labels}, "values": values})
    query = tmp_path / "query.json"
    query.write_text(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": series}}))
    assert fitted(query).parameters == pytest.approx(fit.parameters)


def test_a_restart_between_two_scrapes_is_left_out(tmp_path: Path) -> None:
    run = run_at(8.0)
    scrapes = [scrape_text(counters(run, at_s)) for at_s in (2.0, 4.0, 1.0, 3.0, 3.1)]
    path = tmp_path / "scrapes.txt"
    path.write_text("".join(scrapes))
    [source] = read_sources([str(path)], LIMITS)
    assert source.left_out == {
        "intervals with a restart of the engine": 1,
        "intervals with fewer than 20 steps": 1,
    }
    assert len(source.measurements) == 4  # steps with decodes and with prompts of two intervals


async def test_a_live_page_of_metrics() -> None:
    run = run_at(8.0)
    pages = [scrape_text(counters(run, at_s)) for at_s in (1.0, 3.0, 5.0)]

    async def page(sent: web.Request, body: bytes) -> web.Response:
        return web.Response(text=pages.pop(0))

    with running(page) as (engine,):
        scrapes = await asyncio.to_thread(watch_metrics, f"{engine.url}/metrics", 0.02, 0.01, 5.0)
    [values] = [parts for (*_, name), parts in scrapes.items() if name]
    assert [one["vllm:prompt_tokens_total"] for one in values] == [
        counters(run, at_s)["vllm:prompt_tokens_total"] for at_s in (1.0, 3.0, 5.0)
    ]
    with pytest.raises(TailcastError, match="metrics_url http://127.0.0.1:9/metrics"):
        watch_metrics("http://127.0.0.1:9/metrics", 0.01, 0.01, 1.0)


def test_other_models_are_fitted_too() -> None:
    """Held-out steps of a staircase are exact with a staircase, and off with a line."""
    true = StaircaseStepTime(base_s=2e-3, linear_tile_s=0.02, per_token_s=1e-5, t_col=16)
    run = run_at(8.0, true)
    steps = [step_of_table(row) for row in run.steps]
    right = validated_fit(steps, "staircase", {"t_col": 16})
    wrong = validated_fit(steps)
    assert right.held_out_errors["median"] < 0.02
    assert wrong.held_out_errors["median"] > 0.05
    roofline = {"model": "qwen2.5-7b", "gpu": "a100-80gb"}
    fixed = make_step_time("roofline", roofline | {"memory_efficiency": 0.6})
    steps = [StepMeasurement(one.expected_s(fixed.step_s), *values_of(one)) for one in steps]
    fit = validated_fit(steps, "roofline", roofline)
    assert fit.parameters["memory_efficiency"] == pytest.approx(0.6, rel=0.05)
    assert fit.held_out_errors["p90"] < 0.02


def values_of(step: StepMeasurement) -> tuple[float, ...]:
    names = ("decodes", "context_tokens", "prefill_tokens", "prefills", "cached_tokens", "weight")
    return tuple(getattr(step, name) for name in names)


def test_a_model_that_does_not_describe_the_engine_is_a_failed_check(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    true = StaircaseStepTime(base_s=1e-3, linear_tile_s=0.03, per_token_s=1e-6, t_col=16)
    path, out = tmp_path / "result.json", tmp_path / "c.json"
    path.write_text(json.dumps(bench_json(measured(true, 4.0))))
    limits = ["--scheduler.max_num_seqs", "32", "--scheduler.num_kv_blocks", "4096"]
    words = ["calibrate", "--measurements", json.dumps([str(path)]), "--json", str(out), *limits]
    assert main([*words, "--max_error", "0.1"]) == 3
    assert "a linear model does not describe this engine" in caplog.text
    result = json.loads(out.read_text())
    assert [kind for kind in result["warnings"] if kind.startswith("error")]
    staircase = [
        "--step_time_model",
        "staircase",
        "--step_time_parameters",
        '{"t_col": 16}',
        "--overwrite",
        "true",
    ]
    assert main([*words, *staircase, "--max_error", "0.1"]) == 0
    assert "left out 1 of" in caplog.text


def test_missing_points_are_named_with_a_command(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(bench_json(measured(TRUE, 1.0))))
    limits = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192, num_kv_blocks=65_536)
    config = EngineCalibrationConfig(json="", measurements=[str(path)], scheduler=limits)
    warnings = calibrate.calibrate(config, read_sources([str(path)], limits))["warnings"]
    assert "--max-concurrency 256" in warnings["batch"]
    assert "max_num_seqs 256" in warnings["batch"]
    assert "cached tokens (KV cache: 1,048,576)" in warnings["context"]
    assert "--random-input-len 8192" in warnings["prefill"]


def test_a_simulation_beyond_the_measured_region_says_so(tmp_path: Path) -> None:
    files = []
    for rate in (1.0, 4.0):
        files.append(tmp_path / f"{rate:g}.json")
        files[-1].write_text(json.dumps(bench_json(measured(TRUE, rate))))
    out = tmp_path / "c.json"
    config = config_of(files)
    result = calibrate.calibrate(config, read_sources(config.measurements, LIMITS))
    out.write_text(json.dumps(result))
    inside = simulate(
        random_trace(60, rate_rps=2.0, cap=120), step_time_parameters=str(out), scheduler=LIMITS
    )
    beyond = simulate(
        random_trace(60, rate_rps=500.0, cap=120), step_time_parameters=str(out), scheduler=LIMITS
    )
    assert "region" not in inside.warnings
    assert "requests in a step (measured: up to" in beyond.warnings["region"]
    out.write_text(json.dumps({"step_time": result["step_time"]}))  # of an older version
    old = simulate(random_trace(60, rate_rps=500.0, cap=120), step_time_parameters=str(out), scheduler=LIMITS)
    assert "region" not in old.warnings


def test_prompts_in_several_steps_are_left_out() -> None:
    limits = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=128, num_kv_blocks=4096)
    probes = measured(TRUE, 6.0)
    steps, left_out = request_measurements(probes, limits.max_num_batched_tokens)
    [(reason, number)] = left_out.items()
    assert "longer than max_num_batched_tokens" in reason
    assert number > 10
    assert len(steps) < len(steps_of(probes))


@pytest.mark.slow
def test_the_benchmark_of_real_vllm(tmp_path: Path) -> None:
    """On files of a simulated engine, the predictions of its second load are right from every kind of measurement."""
    limits = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=1024, num_kv_blocks=4096)
    files: dict[str, list[Path]] = {"first": [], "second": []}
    for name, rate in (("first", 3.0), ("second", 5.0)):
        run = run_at(rate, num=150, seed=int(rate))
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps(bench_json(run.probes)))
        path.with_suffix(".log").write_text(engine_log(run.steps))
        texts = [scrape_text(counters(run, at_s)) for at_s in np.arange(0.0, run.steps[-1]["end_s"], 2.0)]
        path.with_suffix(".metrics").write_text("".join(texts))
        files[name].append(path)
    assert limits.max_num_batched_tokens == predicted.STEP_TOKENS
    results = predicted.predict(argparse.Namespace(out=tmp_path, max_num_seqs=16, loads=[0.35, 0.55]), files)
    for name, fit in results["fits"].items():
        for metric, measured_s in fit["measured"].items():
            assert fit["simulated"][metric] == pytest.approx(measured_s, rel=0.1), (name, metric)
    assert len(predicted.table(results).splitlines()) == 6


@pytest.mark.slow
def test_reported_results_of_vllm_bench() -> None:
    data = os.environ.get("DATA")
    if not data:
        pytest.skip("needs DATA, the folder of the public data sets")
    folder = f"{data}/reports/03-vllm-bench-detailed"
    one, *appended = read_sources([f"{folder}/result.json", f"{folder}/result-appended.jsonl"], LIMITS)
    for source in (one, *appended):
        # The lists of gaps are shorter than the outputs, so each request is one mean.
        assert [probe.output_tokens for probe in source.probes if probe.error is None] == [128, 12, 280]
        assert source.left_out == {"request: Bad Gateway": 1}
        assert [step.weight for step in source.measurements if step.decodes] == [127, 11, 279]
    assert len(appended) == 2
    with pytest.raises(InputError, match="measured steps: got 6"):
        validated_fit(one.measurements)


BENCH = bench_json(
    [Probe(request_id="a", sent_s=0.0, prompt_tokens=9, output_tokens=2, token_s=[0.1, 0.2])] * 12
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "measurements: got .*a file that is not empty"),
        ("hello", "allowed: results of vllm bench serve"),
        ('{"a": 1}', "allowed: results of vllm bench serve"),
        ('{"input_lens": [1], "outp', "line 1: got .*valid JSON"),
        (
            json.dumps(BENCH | {"itls": None}),
            "itls: got None; allowed: results of vllm bench serve --save-detailed",
        ),
        (json.dumps(BENCH | {"ttfts": [0.1]}), "ttfts: got 1; allowed: a list of 13 values"),
        (json.dumps(BENCH | {"ttfts": [-1.0] * 13}), r"ttfts\[0\]: got -1.0; allowed: a number >= 0"),
        (json.dumps(BENCH | {"input_lens": [1.5] * 13}), r"input_lens\[0\]: got 1.5; allowed: an integer"),
        (json.dumps(BENCH | {"itls": [["x"]] * 13}), r"itls\[0\]\[0\]: got 'x'"),
        ('{"status": "success", "data": {"resultType": "vector"}}', "data.resultType: got 'vector'"),
        (
            '{"status": "success", "data": {"resultType": "matrix", "result": [{"metric": {"__name__": "vllm:prompt_tokens_total"}, "values": [[1, "y"]]}]}}',
            r"data.result\[0\].values: got \[1, 'y'\]",
        ),
        ("vllm:prompt_tokens_total{ 3", "line 1: got 'vllm:prompt_tokens_total"),
        ("# a\nvllm:prompt_tokens_total 1\n# a\nvllm:prompt_tokens_total 2\n", "_count: got 'missing'"),
        ("[1, 0.1, 3]", "a list of at least 6 numbers"),
        ('{"num_decodes": 1, "num_steps": "x"}', "num_steps: got 'x'"),
        (
            '{"output_tokens": 3, "prompt_tokens": 2, "time": 1, "ttft_s": 2, "total_s": 1}',
            "line 1: ttft_s: got 2",
        ),
    ],
)
def test_malformed_files_are_errors_that_name_the_value(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        read_sources([str(path)], LIMITS)


def test_the_region_is_what_several_steps_reach() -> None:
    steps = [StepMeasurement(1.0, num, 10 * num) for num in range(1, 41)]
    assert Region.of(steps) == Region((5.0, 36.0), (50.0, 360.0), (0.0, 0.0))


def test_noise_and_hiccups_change_the_mean_and_not_the_proportions() -> None:
    """2 % of the steps take 20 times as long: they are left out, but queues follow the mean of all steps."""
    rng = np.random.default_rng(0)
    samples = []
    for one in steps_of(measured(TRUE, 6.0)):
        factor = float(np.exp(rng.normal(0, 0.1))) * (20.0 if rng.random() < 0.02 else 1.0)
        samples.append(StepMeasurement(one.duration_s * factor, *values_of(one)))
    fit = fit_step_time(samples)
    assert fit.num_outliers > 0.01 * len(samples)
    total = sum(one.weight * one.duration_s for one in samples)
    expected = sum(one.weight * one.expected_s(fit.step_time.step_s) for one in samples)
    assert expected == pytest.approx(total)
    assert total > 1.2 * sum(one.weight * one.expected_s(TRUE.step_s) for one in samples)
    ratios = [fit.parameters[name] / getattr(TRUE, name) for name in ("base_s", "per_prefill_token_s")]
    assert ratios[0] == pytest.approx(ratios[1], rel=0.2)


def test_the_parts_of_a_load_are_all_its_requests() -> None:
    config = EngineCalibrationConfig(json="", url="http://x/v1", served_model="m", num_requests=20)
    rng = np.random.default_rng(0)
    ids = [one.request_id for index in range(3) for one in calibrate.draw_probes(config, 2.0, index, rng)]
    assert ids == [f"r{number}" for number in range(20)]


def test_no_time_is_ever_negative() -> None:
    steps = [StepMeasurement(1.0 - 0.01 * index, index + 1, 100 * index * (index + 1)) for index in range(20)]
    fit = fit_step_time(steps)
    assert all(value >= 0 for value in fit.parameters.values())
    with pytest.raises(InputError, match="measured steps"):
        fit_step_time(steps[:1] * 3)


def probes(*prompts: str) -> list[Probe]:
    return [
        Probe(request_id=f"r{number}", arrival_s=0.05 * number, prompt=prompt, max_tokens=5 + number)
        for number, prompt in enumerate(prompts)
    ]


def test_requests_to_a_live_engine_are_sent_in_time() -> None:
    rng = np.random.default_rng(0)
    sent = probes(*(random_prompt(10 + number, rng) for number in range(6)), "fail please")
    with fake_engine(LinearStepTime(base_s=0.002), LIMITS) as url:
        counted: list[int] = []
        start_s = time.perf_counter()
        send(Endpoint(url=url, served_model="m"), sent, start_s, progress=counted.append)
        with pytest.raises(TailcastError, match="503"):
            send(Endpoint(url=url, served_model="m"), probes("fail"), start_s)
    assert sum(counted) == 7
    assert (sent[-1].error or "").startswith("HTTP 503")
    for number, one in enumerate(sent[:-1]):
        assert one.error is None
        assert (one.prompt_tokens, one.output_tokens) == (10 + number, 5 + number)
        assert len(one.token_s) == one.output_tokens
        assert one.arrival_s <= one.sent_s < one.token_s[0]
        assert one.token_s == sorted(one.token_s)


def test_no_engine_and_wrong_values_are_errors() -> None:
    with pytest.raises(TailcastError, match="all requests failed"):
        send(Endpoint(url="http://127.0.0.1:9/v1", served_model="m"), probes("x"), 0.0)
    wrong: list[tuple[str, Any]] = [
        ("url", "ftp://x"), ("prompt_words", (9, 3)), ("served_model", None), ("step_time_model", "table"),
        ("measurements", ["x"]),
    ]  # fmt: skip
    for name, value in wrong:
        values: dict[str, Any] = {"json": "", "url": "http://x/v1", "served_model": "m", name: value}
        with pytest.raises(InputError, match=name):
            EngineCalibrationConfig(**values)


@pytest.mark.mend
@pytest.mark.parametrize("user", ["user:secret", ":secret", "secret"])
def test_a_password_in_the_address_of_the_engine_is_refused(user: str) -> None:
    """It was in error messages and in the result."""
    with pytest.raises(InputError, match="url: got .*without user or password") as caught:
        Endpoint(url=f"http://{user}@127.0.0.1:9/v1", served_model="m")
    assert "secret" not in str(caught.value)


@pytest.mark.slow
def test_a_live_engine_is_calibrated_on_one_load_and_predicted_on_another() -> None:
    true = LinearStepTime(base_s=0.03, per_prefill_token_s=4e-4, per_decode_s=3e-3, per_context_token_s=0.0)
    loads: dict[str, Any] = {"json": "", "rate": 2.0, "held_out_rate": 5.0, "num_requests": 40}
    loads |= {"prompt_words": (8, 300), "output_tokens": (5, 30), "scheduler": LIMITS}
    with fake_engine(true, LIMITS) as url:
        config = EngineCalibrationConfig(url=url, served_model="m", **loads)
        [first, second] = calibrate.probe_engine(config)
    result = calibrate.calibrate(config, [first], [second])
    written = json.loads(json.dumps(result))
    again = make_step_time(written["step_time"]["name"], written["step_time"]["parameters"])
    assert isinstance(again, LinearStepTime)
    # The engine sleeps, so its steps are never shorter than they should be, and longer on a busy machine.
    assert again.base_s == pytest.approx(true.base_s, rel=0.5)
    assert again.per_prefill_token_s == pytest.approx(true.per_prefill_token_s, rel=0.5)
    assert result["loads"][0]["held_out"]
    assert abs(result["loads"][0]["error"]["ttlt_s"]) < 0.3
    assert not second.left_out


class _Stepping:
    """Steps of the very scheduler, each of which lasts as long as the model of step times says."""

    def __init__(self, step_time: StepTime, limits: SchedulerConfig) -> None:
        self._core, self._step_time = Scheduler(limits, make_policy("fcfs")), step_time
        #: By request: of each of its tokens whether it is the last.
        self._streams: dict[str, asyncio.Queue[bool]] = {}
        self._steps: asyncio.Task[None] | None = None

    async def __call__(self, sent: web.Request, body: bytes) -> web.StreamResponse:
        content, now = json.loads(body), time.monotonic()
        if content["prompt"].startswith("fail"):
            return web.Response(status=503, text="overloaded")
        name, num, limit = f"r{len(self._streams)}", len(content["prompt"].split()), content["max_tokens"]
        self._streams[name] = asyncio.Queue()
        self._core.add(request(name, now, num, limit), now)
        if self._steps is None or self._steps.done():
            self._steps = asyncio.create_task(self._run())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(sent)
        is_last = False
        while not is_last:
            is_last = await self._streams[name].get()
            await response.write(event({"choices": [{"text": " x"}]}))
        usage = {"prompt_tokens": num, "completion_tokens": limit}
        await response.write(event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        return response

    async def _run(self) -> None:
        core = self._core
        while core.num_running + core.num_waiting:
            start = time.monotonic()
            plan = core.schedule(start)
            assert plan is not None
            contexts = [state.num_computed_tokens for state in core.decoding]
            seconds = self._step_time.step_s(StepWork(plan.prefills, contexts))
            await taken(start + seconds - time.monotonic())
            finished = {one.request_id for one in core.complete(StepResult(plan.step), time.monotonic())}
            for name in [*plan.decodes, *(chunk.request_id for chunk in plan.prefills if chunk.is_last)]:
                self._streams[name].put_nowait(name in finished)


@contextmanager
def fake_engine(step_time: StepTime, limits: SchedulerConfig) -> Iterator[str]:
    """Serves a fake engine; gives its base URL. A prompt "fail" gets an error."""
    with running(_Stepping(step_time, limits)) as (engine,):
        yield f"{engine.url}/v1"
