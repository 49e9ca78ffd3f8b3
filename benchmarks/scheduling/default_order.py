"""The default order compared with FCFS and the other orders, on realistic arrivals and live predictions.

    python -m benchmarks.scheduling.default_order --data FOLDER [--requests 3000] [--seeds 5] [--first_seed 0] [--orders ORDER ...]
                                       [--loads 0.6 0.8 0.95 1.1 1.2] [--arrivals azure gamma spikes] [--frontier]

FOLDER has the public sets: castillo_validation.parquet and traces/azure2023_conv.parquet. A request has a
prompt of CASTILLO's report split, which is not in the training data of the shipped predictor tailcast-minilm,
and one of the ten sampled lengths of that prompt. All lengths are predicted before the runs.
Arrivals are a random part of the Azure conversation trace, a gamma process with a coefficient of variation of
3, or spikes of up to 200 requests. Loads are relative to the capacity of the simulated engine (the defaults
of the simulator, 64 sequences). Values are ratios to FCFS on the same requests, with 95 % intervals.

--frontier: only the default order, at several values of `ratio`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.shared.command import Parser
from benchmarks.shared.pages import mean_cell
from data_gen.splits import split_of
from examples.pretrained.prepare import FRACTIONS, SPLIT_SEED, prompt_hash
from predictors.pretrained import artifact_folder
from scheduler_core.prediction.predictions import LengthPrediction, Prediction
from scheduler_core.report.page import markdown_table
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.run import run_simulation
from scheduler_core.simulator.step_time import saturation_rate_rps
from scheduler_core.simulator.trace import Trace, TraceRequest
from scheduler_core.simulator.trace_predictions import Predictions, oracle_predictions
from scheduler_core.simulator.workloads.arrivals import Arrivals, at_rate
from training.evaluating.batch_predictor import InferenceOptions, open_batch_predictor

MAX_TOKENS = 8000
ORDERS = ("bounded_shortest", "ssjf", "tie", "ltr", "trail", "uniboost", "sjf")
PROCESSES: dict[str, Callable[[float], Arrivals]] = {
    "poisson": lambda rate_rps: Arrivals(rate_rps=rate_rps),
    "gamma": lambda rate_rps: Arrivals(process="gamma", cv=3.0, rate_rps=rate_rps),
    "spikes": lambda rate_rps: Arrivals(process="spikes", max_burst=200, rate_rps=rate_rps),
}
ARRIVALS = ("azure", "gamma", "spikes")
#: The default order with the true lengths as predictions: an upper bound for better predictors.
TRUE_LENGTHS = "bounded_shortest, true lengths"
RATIOS = (1.0, 1.05, 1.15, 1.25, 1.5, 2.0)
CONFIG = SimulationConfig(trace="benchmark", policy="fcfs", scheduler=SchedulerConfig(max_num_seqs=64))
LEVELS = {"P50": 50.0, "P90": 90.0, "P99": 99.0, "P99.9": 99.9, "max": 100.0}
COLUMNS = [f"{name} {level}" for name in ("TTFT", "E2E") for level in ("mean", *LEVELS)] + [
    "per token mean",
    "longest gap",
]
Values = dict[str, float]


@dataclass(frozen=True, slots=True)
class Population:
    """Rows to draw requests from, with the shipped predictor's predictions; Azure's arrival times."""

    rows: pd.DataFrame
    azure_s: NDArray[np.float64]


def read_population(data: Path) -> Population:
    """The report split of CASTILLO's validation prompts, with predictions."""
    table = pd.read_parquet(data / "castillo_validation.parquet")
    split = table.prompt.map(lambda text: split_of(prompt_hash(text), SPLIT_SEED, FRACTIONS))
    table = table[split == "test"].reset_index(drop=True)
    predictor = open_batch_predictor(
        artifact_folder("pretrained"), InferenceOptions(threads=1, progress=False)
    )
    served_models = set(predictor.served_models)
    models = [model if model in served_models else None for model in table.model]
    rows = predictor.predict(table.prompt.tolist(), models, [None] * len(table))
    azure = pd.read_parquet(data / "traces/azure2023_conv.parquet").arrival_s.to_numpy()
    return Population(table.assign(mu=rows.mu, sigma=rows.sigma, nu=rows.nu), azure)


def trace_of(
    lengths: Iterable[tuple[int, int]], times: Callable[[float], NDArray[np.float64]], load: float
) -> Trace:
    """Requests named r0, r1, ... of (prompt tokens, output tokens), limited to `MAX_TOKENS`.

    Args:
        lengths: Lengths of the requests.
        times: Function from a rate in requests per second to the arrival times in seconds.
        load: Rate of the arrivals, as a fraction of the engine's capacity.
    """
    requests = [
        TraceRequest(
            request_id=f"r{index}",
            arrival_s=0.0,
            prompt_tokens=min(max(prompt, 1), MAX_TOKENS),
            output_tokens=min(max(output, 1), MAX_TOKENS),
            max_tokens=MAX_TOKENS,
        )
        for index, (prompt, output) in enumerate(lengths)
    ]
    trace = Trace(tuple(requests), source="benchmark")
    arrivals = times(load * saturation_rate_rps(trace, CONFIG.scheduler, CONFIG.make_step_time()))
    rows = (replace(row, arrival_s=float(time)) for row, time in zip(requests, arrivals, strict=True))
    return replace(trace, requests=tuple(rows))


def draw(
    population: Population, arrivals: str, load: float, seed: int, num: int
) -> tuple[Trace, Predictions]:
    """Draws requests and their predictions."""
    rng = np.random.default_rng(seed)
    rows = population.rows.iloc[rng.integers(0, len(population.rows), num)]
    lengths = [
        (int(prompt), int(rng.choice(each)))
        for prompt, each in zip(rows.prompt_tokens, rows.output_tokens, strict=True)
    ]

    def times(rate_rps: float) -> NDArray[np.float64]:
        if arrivals == "azure":
            start = rng.integers(0, len(population.azure_s) - num)
            return at_rate(population.azure_s[start : start + num] - population.azure_s[start], rate_rps)
        return PROCESSES[arrivals](rate_rps).times(num, rng)

    trace = trace_of(lengths, times, load)
    parameters = rows[["mu", "sigma", "nu"]].to_numpy(float).tolist()
    predictions = [Prediction(length=LengthPrediction(*one)) for one in parameters]
    return trace, Predictions("tailcast-minilm", {f"r{row}": one for row, one in enumerate(predictions)})


def run(
    policy: str,
    trace: Trace,
    predictions: Predictions,
    parameters: Mapping[str, Any] = MappingProxyType({}),
    *,
    learns: bool = False,
    warm_up: int = 0,
) -> Values:
    """Latencies of one policy in seconds, by column name, without those of the first `warm_up` requests."""
    config = replace(CONFIG, policy=policy, policy_parameters=dict(parameters), online_calibration=learns)
    records = run_simulation(config, trace=trace, predictions=predictions).records
    records = [record for record in records if int(record.request_id[1:]) >= warm_up]
    values = _summary("TTFT", [record.ttft_s for record in records])
    values |= _summary("E2E", [record.ttlt_s for record in records])
    values |= _summary("per token", [record.normalized_latency_s for record in records])
    values["longest gap"] = max(record.max_tbt_s or 0.0 for record in records)
    return values


def _summary(name: str, values_s: Sequence[float]) -> Values:
    percentiles = {f"{name} {level}": float(np.percentile(values_s, at)) for level, at in LEVELS.items()}
    return {f"{name} mean": float(np.mean(values_s))} | percentiles


def rows_of(
    population: Population, arrivals: str, load: float, options: argparse.Namespace
) -> Iterator[list[str]]:
    """Rows of the table: ratios of each policy to FCFS."""
    sides: list[tuple[str, str, dict[str, float]]] = [(name, name, {}) for name in options.orders]
    sides.append((TRUE_LENGTHS, "bounded_shortest", {}))
    if options.frontier:
        sides = [(f"ratio {ratio}", "bounded_shortest", {"ratio": ratio}) for ratio in RATIOS]
    ratios: dict[str, list[Values]] = {label: [] for label, _, _ in sides}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        trace, predictions = draw(population, arrivals, load, seed, options.requests)
        reference = run("fcfs", trace, predictions)
        for label, policy, parameters in sides:
            lengths = oracle_predictions(trace) if label == TRUE_LENGTHS else predictions
            values = run(policy, trace, lengths, parameters)
            ratios[label].append({name: values[name] / reference[name] for name in reference})
    for label, runs in ratios.items():
        cells = [mean_cell([one[name] for one in runs]) for name in COLUMNS]
        yield [arrivals, f"{load:g}", label, *cells]


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--orders", nargs="+", default=ORDERS, help="names of policies")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.6, 0.8, 0.95, 1.1, 1.2])
    parser.add_argument("--arrivals", nargs="+", choices=ARRIVALS, default=ARRIVALS)
    parser.add_argument("--frontier", action="store_true")
    options = parser.parse_args()
    population = read_population(options.data)
    rows = [
        row
        for arrivals, load in product(options.arrivals, options.loads)
        for row in rows_of(population, arrivals, load, options)
    ]
    print(markdown_table(("arrivals", "load", "order", *COLUMNS), rows))


if __name__ == "__main__":
    main()
