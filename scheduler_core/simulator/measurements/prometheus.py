"""Steps from vLLM's Prometheus metrics: means between two scrapes of /metrics."""

from __future__ import annotations

import http.client
import math
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.ranges import parse_number
from scheduler_core.simulator.measurements.steps import StepMeasurement

#: Minimum number of steps between two scrapes; intervals are joined until they have so many.
MIN_INTERVAL_STEPS = 20

#: Metrics of vLLM (v1/metrics/loggers.py, 0.32) and their older names; sums and counts are those of histograms.
STEPS = "vllm:iteration_tokens_total_count"
GAPS = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
FIRST_TOKENS = "vllm:time_to_first_token_seconds_count"
PREFILL_S = "vllm:request_prefill_time_seconds"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
CACHED_TOKENS = ("vllm:prompt_tokens_cached_total", "vllm:prefix_cache_hits_total")
USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
CACHE = "vllm:cache_config_info"
#: Beginnings of the names of all of them.
READ = (STEPS, *GAPS, FIRST_TOKENS, PREFILL_S, PROMPT_TOKENS, *CACHED_TOKENS, *USAGE, CACHE)
#: Labels that identify an engine; some of its metrics have no model_name.
ENGINE_LABELS = ("instance", "pod", "job", "engine")
#: Labels of `CACHE`: size in tokens, or in blocks and tokens per block before vLLM 0.14.
SIZE_LABELS = ("kv_cache_size_tokens", "num_gpu_blocks", "block_size")

#: Metric -> value of one engine at one time.
Scrape = dict[str, float]
#: Engine, by its labels -> its scrapes in the order of time.
Scrapes = dict[tuple[str, ...], list[Scrape]]


def parse_scrapes(text: str, name: str) -> Scrapes:
    """The metrics of each engine in one or more texts of /metrics, one after the other. `InputError`, with the file's `name`
    and the line, for a line that is not in Prometheus' text format."""
    from prometheus_client.parser import text_string_to_metric_families

    lines = text.strip().splitlines()
    engines: defaultdict[tuple[str, ...], list[Scrape]] = defaultdict(list)
    scrape: defaultdict[tuple[str, ...], Scrape] = defaultdict(dict)
    series = lines[0].rpartition(" ")[0]  # or the comment with which a scrape begins
    for number, line in enumerate([*lines, lines[0]], 1):
        if number > 1 and line.rpartition(" ")[0] == series:
            for key, metrics in scrape.items():
                engines[key].append(metrics)
            scrape = defaultdict(dict)
        if not line.startswith(READ) or number > len(lines):
            continue
        try:
            samples = [
                one for family in text_string_to_metric_families(f"{line}\n") for one in family.samples
            ]
        except (ValueError, KeyError, IndexError) as error:
            allowed = f"a line of Prometheus' text format ({error})"
            raise InputError(f"{name}, line {number}", line[:80], allowed) from error
        for sample in samples:
            _add(scrape[_engine(sample.labels)], sample.name, sample.labels, float(sample.value))
    return dict(engines)


def watch_metrics(url: str, duration_s: float, interval_s: float, timeout_s: float) -> Scrapes:
    """Scrapes /metrics of a live engine for some seconds; `TailcastError` if it does not respond."""
    engines: defaultdict[tuple[str, ...], list[Scrape]] = defaultdict(list)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    begin_s = time.perf_counter()
    for number in range(max(2, math.floor(duration_s / interval_s) + 1)):
        time.sleep(max(0.0, begin_s + number * interval_s - time.perf_counter()))
        try:
            with direct.open(url, timeout=timeout_s) as reply:
                text = reply.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise TailcastError(f"metrics_url {url}: {error}") from error
        for key, scrapes in parse_scrapes(text, url).items():
            engines[key] += scrapes[:1]
    return dict(engines)


def parse_range_query(content: Mapping[str, Any], name: str) -> Scrapes:
    """The metrics of each engine in the response to a range query (`/api/v1/query_range`). `InputError` if it is not one."""
    data = content.get("data")
    series = data.get("result") if isinstance(data, dict) else None
    if not isinstance(data, dict) or data.get("resultType") != "matrix" or not isinstance(series, list):
        kind = data.get("resultType") if isinstance(data, dict) else None
        raise InputError(f"{name}: data.resultType", kind, "matrix, as in responses of /api/v1/query_range")
    engines: defaultdict[tuple[str, ...], defaultdict[float, Scrape]] = defaultdict(lambda: defaultdict(dict))
    for index, row in enumerate(series):
        where = f"{name}: data.result[{index}]"
        labels = row.get("metric") if isinstance(row, dict) else None
        values = row.get("values") if isinstance(row, dict) else None
        if not isinstance(labels, dict) or not isinstance(values, list):
            raise InputError(where, row, "an object with metric and values")
        metric = str(labels.get("__name__"))
        if not metric.startswith(READ):
            continue
        texts = {str(key): str(value) for key, value in labels.items()}
        for pair in values:
            try:
                at_s, value = float(pair[0]), parse_number(str(pair[1]))
            except (TypeError, ValueError, IndexError, KeyError) as error:
                raise InputError(f"{where}.values", pair, "pairs of a time and a number as text") from error
            _add(engines[_engine(texts)][at_s], metric, texts, value)
    return {key: [times[at_s] for at_s in sorted(times)] for key, times in engines.items()}


def _engine(labels: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(labels.get(name, "") for name in ENGINE_LABELS)


def _add(scrape: Scrape, metric: str, labels: Mapping[str, str], value: float) -> None:
    """Adds a sample; series that only differ in further labels are summed."""
    if metric.endswith("_bucket"):
        return
    if metric == CACHE:
        for label in SIZE_LABELS:
            if labels.get(label, "").isdecimal():
                scrape[label] = float(labels[label])
        return
    scrape[metric] = scrape.get(metric, 0.0) + value


def scrape_measurements(
    scrapes: Sequence[Scrape], max_num_batched_tokens: int
) -> tuple[list[StepMeasurement], Counter[str]]:
    """The means of the steps between the scrapes of one engine, and reasons with numbers of what was left out.

    Between two scrapes, the mean time between tokens is the mean duration of the steps, weighted by their decodes, and the
    mean prefill time of requests that of a step with a prompt. The batch is the mean over the steps, with the same weights:
    decodes and computed prompt tokens divided by the number of steps, and the used part of the KV cache at both ends. So
    constants are those of the load's usual steps, which differences between intervals separate. As the used memory is only
    known at scrapes, a part of its time may be attributed to the decodes.
    `InputError` if a metric is missing.
    """
    left_out: Counter[str] = Counter()
    measurements: list[StepMeasurement] = []
    if len(scrapes) < 2:
        left_out["engines with a single scrape"] += 1
        return measurements, left_out
    before = scrapes[0]
    for number, after in enumerate(scrapes[1:], 2):
        steps = _difference(before, after, STEPS)
        if steps is None:
            raise InputError(STEPS, "missing", f"in every scrape (missing in number {number} or before)")
        if steps < 0:
            left_out["intervals with a restart of the engine"] += 1
            before = after
        elif steps >= MIN_INTERVAL_STEPS:
            measurements += _interval(before, after, steps, max_num_batched_tokens, left_out)
            before = after
        elif number == len(scrapes):
            left_out[f"intervals with fewer than {MIN_INTERVAL_STEPS} steps"] += 1
    return measurements, left_out


def _interval(
    before: Scrape, after: Scrape, steps: float, budget: int, left_out: Counter[str]
) -> Iterable[StepMeasurement]:
    """A measurement of the steps with decodes, and one of those with prompts."""
    gaps = next((name for name in GAPS if f"{name}_count" in after), GAPS[0])
    needed = (f"{gaps}_count", f"{gaps}_sum", FIRST_TOKENS, PROMPT_TOKENS)
    for name in needed:
        if _difference(before, after, name) is None:
            allowed = "in every scrape of vLLM's /metrics (without --disable-log-stats)"
            raise InputError(name, "missing", allowed)
    decodes, seconds, prompts, tokens = (after[name] - before[name] for name in needed)
    cached = next(
        (one for name in CACHED_TOKENS if (one := _difference(before, after, name)) is not None), 0.0
    )
    computed = max(tokens - cached, 0.0)
    context = _context_tokens(before, after)
    batch = decodes / steps
    if decodes and seconds > 0:
        weighted = _size_biased(max(batch, 1.0))
        yield StepMeasurement(
            seconds / decodes, weighted, context, computed / steps, prompts / steps, weight=steps
        )
    requests, prefill_s = (_difference(before, after, f"{PREFILL_S}_{part}") for part in ("count", "sum"))
    if requests and prefill_s and prompts:
        length = computed / prompts
        if length > budget:
            left_out["means of prompts longer than max_num_batched_tokens"] += 1
        else:
            yield StepMeasurement(prefill_s / requests, batch, context, length, 1, weight=requests)


def _size_biased(mean: float) -> float:
    """Mean number of decodes in the step of a decode, E[D^2] / E[D], from their mean over the steps with one, for a Poisson
    distribution, as of independent requests: 1 + its parameter, which solves x / (1 - exp(-x)) = `mean`. A full engine has a
    constant batch instead, of which this is at most one more."""
    parameter = mean
    for _ in range(60):
        parameter = -mean * math.expm1(-parameter)
    return 1.0 + parameter


def kv_tokens(scrape: Scrape) -> int | None:
    """Size of the KV cache, if it is known."""
    tokens, blocks, block_tokens = (scrape.get(label, 0.0) for label in SIZE_LABELS)
    return int(tokens or blocks * block_tokens) or None


def _context_tokens(before: Scrape, after: Scrape) -> float:
    """Cached tokens, the mean of both ends; 0 if the size of the cache is unknown."""
    size = kv_tokens(after) or 0
    usage = [one[name] for one in (before, after) for name in USAGE if name in one]
    return size * sum(usage) / len(usage) if usage else 0.0


def _difference(before: Scrape, after: Scrape, name: str) -> float | None:
    if name not in before or name not in after:
        return None
    value = after[name] - before[name]
    return value if math.isfinite(value) else None
