"""Replica selection by predicted lengths, compared with the defaults of LiteLLM and Ray Serve, simulated.

    python -m benchmarks.scheduling.routing castillo_validation.parquet [--seeds 5] [--markdown benchmarks/results/routing.md]

Four engines in virtual time, FCFS, the simulator's default step times, `--slots` sequences each, at `--load`
of their capacity. Prompts and lengths are those of CASTILLO that tailcast-minilm was not trained on;
predictions arrive 20 ms after the request. "without token events" has only the information that Ray Serve
gives to routers; "true lengths" is an upper bound. Latencies are the mean, P90 and P99 over the requests of a
run, averaged over seeds. Ratios are to the first side and to "least busy" of the same seed, with 95 % intervals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.shared.castillo import report_rows
from benchmarks.shared.command import Parser
from benchmarks.shared.pages import mean_cell, put_section
from scheduler_core.report.page import markdown_table
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.config import ClusterConfig, SimulationConfig
from scheduler_core.simulator.run import run_simulation
from scheduler_core.simulator.step_time import saturation_rate_rps
from scheduler_core.simulator.trace import Trace, TraceRequest
from scheduler_core.simulator.trace_predictions import Predictions, fetch_predictions, oracle_predictions

FloatArray = NDArray[np.float64]
HEADER = (
    "", "TTFT mean", "P90", "P99", "end-to-end mean", "P90", "P99", "TTFT mean / first", "end-to-end mean / first",
    "TTFT mean / least busy", "TTFT P99 / least busy", "end-to-end mean / least busy",
)  # fmt: skip
MAX_TOKENS = 4096


def table(runs: dict[str, list[FloatArray]]) -> str:
    """A row for each side: the means of its runs, and ratios to the first side and to "least busy"."""
    values = {side: np.array(results) for side, results in runs.items()}
    first, least_busy = next(iter(values)), next(side for side in values if "least busy" in side)
    ratios = ((first, 0), (first, 3), (least_busy, 0), (least_busy, 2), (least_busy, 3))
    rows = []
    for side, results in values.items():
        cells = [f"{value:.2f}" for value in results.mean(axis=0)]
        for base, column in ratios:
            divided = (results[:, column] / values[base][:, column]).tolist()
            cells.append("1" if side == base else mean_cell(divided))
        rows.append((side, *cells))
    return markdown_table(HEADER, rows)


def castillo_trace(rows: pd.DataFrame, num_requests: int) -> Trace:
    """Requests with one output each, one second apart."""
    rng = np.random.default_rng(0)
    chosen = rows.iloc[rng.permutation(len(rows))[:num_requests]].to_dict("records")
    return Trace(
        tuple(
            TraceRequest(
                request_id=str(number),
                arrival_s=float(number),
                prompt_tokens=max(1, int(row["prompt_tokens"])),
                output_tokens=int(np.clip(rng.choice(row["output_tokens"]), 1, MAX_TOKENS)),
                max_tokens=MAX_TOKENS,
                prompt=row["prompt"],
                model=row["model"],
            )
            for number, row in enumerate(chosen)
        )
    )


def main() -> None:
    """Prints a table for each number of slots."""
    parser = Parser(__doc__)
    parser.add_argument("data", help="castillo_validation.parquet")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--slots", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--markdown", help="page whose section is replaced")
    options = parser.parse_args()
    trace = castillo_trace(report_rows(options.data), options.requests)
    live = fetch_predictions(trace, "pretrained", max_in_flight=8)
    sides: dict[str, tuple[str, dict[str, Any], Predictions]] = {
        "random (LiteLLM's default)": ("random", {}, Predictions()),
        "power of two (Ray Serve's default)": ("power_of_two", {}, Predictions()),
        "round robin": ("round_robin", {}, Predictions()),
        "least busy": ("jsq", {}, Predictions()),
        "predicted work": ("predicted_work", {}, live),
        "predicted wait": ("predicted_wait", {}, live),
        "predicted wait, without token events": ("predicted_wait", {"refresh_tokens": 10**9}, live),
        "predicted wait, true lengths": ("predicted_wait", {}, oracle_predictions(trace)),
    }
    parts = []
    for slots in options.slots:
        limits = SchedulerConfig(max_num_seqs=slots)
        runs: dict[str, list[FloatArray]] = {side: [] for side in sides}
        for seed in range(options.seeds):
            for side, (router, parameters, predictions) in sides.items():
                config = SimulationConfig(
                    policy="fcfs",
                    trace=options.data,
                    predictor="none",
                    predictor_delay_s=0.02,
                    seed=seed,
                    scheduler=limits,
                    cluster=ClusterConfig(num_replicas=4, router=router, router_parameters=parameters),
                )
                rate = 4 * options.load * saturation_rate_rps(trace, limits, config.step_time)
                arrivals = trace.with_poisson_arrivals(rate, np.random.default_rng(seed))
                records = run_simulation(config, trace=arrivals, predictions=predictions).records
                latencies = np.array([(one.ttft_s, one.ttlt_s) for one in records]).T
                summary = [[values.mean(), *np.percentile(values, [90, 99])] for values in latencies]
                runs[side].append(np.concatenate(summary))
        parts.append(
            f"Four simulated engines with {slots} slots each, load {options.load:g}, {len(trace):,} requests, "
            f"{options.seeds} seeds, seconds:\n\n{table(runs)}"
        )
    text = "\n\n".join(parts)
    print(text)
    if options.markdown is not None:
        put_section(options.markdown, "routing, simulated", text)


if __name__ == "__main__":
    main()
