"""Ways to correct the shipped predictor from the first part of a log, measured on the rest of it.

    python -m benchmarks.correcting.fits DATA [--requests 1430] [--seeds 3]

DATA is a folder with the sources that the predictor was not trained on (parquet, one row = one output). Two kinds of logs:
several applications behind one name (400 requests of one model of each source), and one application (m_ifeval, eight models in
turn). The first 70 % of a log are for fitting, the rest is scored: as predicted; by online calibration, which also learns
from the rest; by the batch fit of `adapt`; and by that with a shift by encoder features. Means over logs; coverage in percent.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.shared.command import Parser
from predictors.pretrained import artifact_folder
from predictors.runtime import ArtifactRuntime, open_runtime
from scheduler_core.prediction.correction import Correction, RequestContext
from scheduler_core.prediction.linear_correction import fit
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.report.page import markdown_table
from scheduler_core.statistics import kendall_tau
from training.correcting.adapt import predicted
from training.correcting.comparison import corrected
from training.correcting.encoder_shift import FeatureRuntime, fit_shift
from training.evaluating.scores import COVERAGE_LEVELS, score_outcomes

SOURCES = ("m_ifeval", "llmzoo", "d_bench", "hallucin_pm", "ai_independence_bench", "lrm_token_economy")
LIMITS = {"m_ifeval": 2048}
PER_SOURCE, NUM_MODELS = 400, 8
COLUMNS = ("log", "correction", "tau", "CRPS, ln tokens", "P50", "P90", "P99")
FloatArray = NDArray[np.float64]


def read(folder: Path, source: str) -> dict[str, list[Outcome]]:
    """Served model -> its outputs, without those of models that hide their reasoning."""
    outputs: dict[str, list[Outcome]] = {}
    for row in pq.read_table(folder / f"{source}.parquet").to_pylist():
        tokens = row.get("api_tokens") or row["n_tokens"] + (row.get("n_tokens_reasoning") or 0)
        if tokens < 1 or row.get("hidden_reasoning"):
            continue
        limit = LIMITS.get(source)
        outcome = Outcome(
            prompt=row["prompt"], output_tokens=int(min(tokens, limit or tokens)), max_tokens=limit
        )
        outputs.setdefault(row["model"], []).append(outcome)
    return outputs


def logs(folder: Path, size: int, seeds: int) -> Iterator[tuple[str, list[Outcome]]]:
    """Names and requests of the logs, in random order."""
    sources = {name: read(folder, name) for name in SOURCES}
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        mixed: list[Outcome] = []
        for models in sources.values():
            part = models[sorted(models)[rng.integers(len(models))]]
            mixed += [part[row] for row in rng.permutation(len(part))[:PER_SOURCE].tolist()]
        yield "several applications", [mixed[row] for row in rng.permutation(len(mixed))[:size].tolist()]
    for number, (_, part) in enumerate(sorted(sources["m_ifeval"].items())[:NUM_MODELS]):
        rng = np.random.default_rng(number)
        yield "one application", [part[row] for row in rng.permutation(len(part))[:size].tolist()]


def metrics(outcomes: Sequence[Outcome]) -> list[float]:
    """Kendall's tau, CRPS, and coverage in percent."""
    rows = [(outcome, prediction) for outcome in outcomes if (prediction := outcome.prediction) is not None]
    scores = score_outcomes(rows)
    tau = kendall_tau([each.mu for _, each in rows], [outcome.output_tokens for outcome, _ in rows])
    coverage = [scores.coverage(level)["estimate"] for level in COVERAGE_LEVELS]
    return [tau or 0.0, float(scores.crps_log.mean()), *(100 * (value or np.nan) for value in coverage)]


def compare(first: list[Outcome], rest: list[Outcome], h: FloatArray) -> dict[str, list[float]]:
    """Metrics of each correction on the rest; h has the features of both parts."""
    linear, online = fit(first), Correction()
    for outcome in first:
        online.observe(RequestContext(), outcome)
    online_rest = []
    for outcome in rest:
        prediction = outcome.prediction
        assert prediction is not None
        context = RequestContext(prompt_tokens=outcome.prompt_tokens)
        online_rest.append(replace(outcome, prediction=online.correct(context, prediction)))
        online.observe(RequestContext(), outcome)
    sigma = np.array(
        [each.sigma for outcome in corrected(first, {"": linear}) if (each := outcome.prediction)]
    )
    shift, held_out = fit_shift(first, sigma, h[: len(first)])
    shifted = corrected(shift.moved(rest, h[len(first) :]), {"": fit(held_out)})
    sides = {
        "none": rest,
        "online calibration": online_rest,
        "batch fit": corrected(rest, {"": linear}),
        "batch fit, with features": shifted,
    }
    return {name: metrics(side) for name, side in sides.items()}


def main(args: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = Parser(__doc__)
    parser.add_argument("data", type=Path, help="folder with the sources")
    parser.add_argument("--requests", type=int, default=1430, help="maximum requests of a log")
    parser.add_argument("--seeds", type=int, default=3, help="logs of several applications")
    options = parser.parse_args(args)
    runtime = open_runtime(artifact_folder("pretrained"), provider="cpu", threads_per_run=2)
    print(markdown_table(COLUMNS, table(runtime, options.data, options.requests, options.seeds)))


def table(runtime: ArtifactRuntime, data: Path, size: int, seeds: int) -> list[list[str]]:
    """Rows of the table: means over the logs of each kind."""
    parts = list(logs(data, size, seeds))
    texts = list(dict.fromkeys(outcome.prompt or "" for _, log in parts for outcome in log))
    h = FeatureRuntime(runtime, 2).features(texts)
    prompts = [Outcome(prompt=text, output_tokens=1) for text in texts]
    of_text = dict(zip(texts, predicted(runtime, prompts, [None] * len(texts), progress=False), strict=True))
    number = {text: row for row, text in enumerate(texts)}
    results: dict[tuple[str, str], list[list[float]]] = {}
    for name, log in parts:
        outcomes = []
        for outcome in log:
            of_prompt = of_text[outcome.prompt or ""]
            outcomes.append(
                replace(outcome, prediction=of_prompt.prediction, prompt_tokens=of_prompt.prompt_tokens)
            )
        count, rows_of_log = int(0.7 * len(log)), [number[outcome.prompt or ""] for outcome in log]
        for side, values in compare(outcomes[:count], outcomes[count:], h[rows_of_log]).items():
            results.setdefault((name, side), []).append(values)
        print(name, len(log), file=sys.stderr)
    rows = []
    for key, of_logs in results.items():
        tau, crps, *coverage = np.nanmean(of_logs, axis=0)
        rows.append([*key, f"{tau:.3f}", f"{crps:.3f}", *(f"{value:.1f}" for value in coverage)])
    return rows


if __name__ == "__main__":
    main()
