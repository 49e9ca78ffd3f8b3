"""What a memory of past requests is worth for the order of requests: simulated latencies with raw, calibrated, remembered and
true lengths.

    python -m benchmarks.correcting.memory_orders DATA [--predictor tiny] [--stream L] [--loads 0.7 0.9 1.1] [--seeds 5]
        [--arrivals poisson spikes] [--requests 4000] [--markdown benchmarks/results/memory_orders.md]

Requests are those of a stream of `benchmarks.lengths`: many applications behind one name, on which the predictor was not
trained. The engine is that of the simulator's defaults with 64 sequences; a load of 1 is its capacity. Spikes are
bursts of up to 200 requests at the same mean load. Latencies are those of the requests after the first `WARM_UP`, as ratios to
FCFS on the same requests, with 95 % intervals over seeds. The last column is the part of the gap of the mean latency per token
between raw predictions and true lengths that is closed; - if a seed has no gap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.lengths.features import Features
from benchmarks.lengths.streams import MIXED, Streams
from benchmarks.scheduling.default_order import PROCESSES, Values, run, trace_of
from benchmarks.shared.command import Parser
from benchmarks.shared.pages import mean_cell, put_section
from scheduler_core.prediction.predictions import Prediction
from scheduler_core.report.page import markdown_table
from scheduler_core.simulator.trace import Trace
from scheduler_core.simulator.trace_predictions import Predictions, oracle_predictions

WARM_UP = 500
ORDERS = ("bounded_shortest", "tie", "ssjf")
SIDES = ("as predicted", "calibrated", "with the memory", "true lengths")
COLUMNS = ("TTFT mean", "TTFT P90", "TTFT P99", "per token mean", "per token P90", "per token P99")


def draw(
    streams: Streams,
    features: Features,
    name: str,
    stream: str,
    arrivals: str,
    load: float,
    seed: int,
    num: int,
) -> tuple[Trace, Predictions]:
    """A trace, and its predictions with embeddings."""
    rows = MIXED[stream](streams, seed)[:num]
    lengths = ((features.num_tokens(request.prompt), tokens) for request, tokens in rows)
    rng = np.random.default_rng(seed)
    trace = trace_of(lengths, lambda rate_rps: PROCESSES[arrivals](rate_rps).times(len(rows), rng), load)
    prompts = [request.prompt for request, _ in rows]
    by_id: dict[str, Prediction | None] = {
        f"r{row}": Prediction(length=features.length(name, prompt), embedding=features.embedding(prompt))
        for row, prompt in enumerate(prompts)
    }
    return trace, Predictions(name, by_id)


def sides_of(policy: str, trace: Trace, predictions: Predictions) -> dict[str, Values]:
    """Latencies of one order with each kind of prediction."""
    without = {
        name: replace(one, embedding=None) for name, one in predictions.by_id.items() if one is not None
    }
    plain = replace(predictions, by_id=without)
    kinds = (plain, plain, predictions, oracle_predictions(trace))
    return {
        side: run(policy, trace, kind, learns=side in SIDES[1:3], warm_up=WARM_UP)
        for side, kind in zip(SIDES, kinds, strict=True)
    }


def rows_of(reference: list[Values], runs: Mapping[str, list[Values]]) -> list[list[str]]:
    """Cells of each kind of prediction, over seeds."""
    rows = []
    gaps = [
        raw["per token mean"] - true["per token mean"]
        for raw, true in zip(runs[SIDES[0]], runs[SIDES[3]], strict=True)
    ]
    for side, values in runs.items():
        cells = [
            mean_cell([one[name] / base[name] for one, base in zip(values, reference, strict=True)])
            for name in COLUMNS
        ]
        gained = [
            raw["per token mean"] - one["per token mean"]
            for raw, one in zip(runs[SIDES[0]], values, strict=True)
        ]
        closed = "-"
        if side in SIDES[1:3] and min(gaps) > 0.0:
            closed = mean_cell([100 * gain / gap for gain, gap in zip(gained, gaps, strict=True)], digits=0)
        rows.append([side, *cells, closed])
    return rows


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--predictor", default="tiny")
    parser.add_argument("--stream", default="L", choices=tuple(MIXED))
    parser.add_argument("--orders", nargs="+", default=ORDERS)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.7, 0.9, 1.1])
    parser.add_argument("--arrivals", nargs="+", default=["poisson", "spikes"], choices=("poisson", "spikes"))
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=Path("out/length-benchmark"))
    parser.add_argument("--markdown", help="page whose table is replaced")
    options = parser.parse_args()
    streams = Streams(options.data)
    features = Features(streams, options.cache)
    prompts = [
        each.prompt for seed in range(options.seeds) for each, _ in MIXED[options.stream](streams, seed)
    ]
    features.prepare([options.predictor], prompts)
    table = []
    for arrivals, load in product(options.arrivals, options.loads):
        draws = [
            draw(streams, features, options.predictor, options.stream, arrivals, load, seed, options.requests)
            for seed in range(options.seeds)
        ]
        reference = [run("fcfs", trace, predictions, warm_up=WARM_UP) for trace, predictions in draws]
        for policy in options.orders:
            runs: dict[str, list[Values]] = {side: [] for side in SIDES}
            for trace, predictions in draws:
                for side, values in sides_of(policy, trace, predictions).items():
                    runs[side].append(values)
            table += [[arrivals, f"{load:g}", policy, *cells] for cells in rows_of(reference, runs)]
            print(*table[-4:], sep="\n", flush=True)
    header = ("arrivals", "load", "order", "predictions", *COLUMNS, "gap closed, %")
    text = markdown_table(header, table)
    print(f"\nstream {options.stream}, predictor {options.predictor}, {options.seeds} seeds\n\n{text}")
    if options.markdown:
        put_section(options.markdown, " ".join((options.stream, options.predictor, *options.arrivals)), text)


if __name__ == "__main__":
    main()
