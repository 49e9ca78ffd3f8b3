"""Gain of online calibration for served models or sources of prompts that are not in the training data.

    python -m benchmarks.correcting.online_calibration DATA... [--leave_out model source] [--predictions TABLE]
        [--counts 0 50 200 1000 5000] [--seeds 3] [--load 1.2] [--json OUT] [--markdown benchmarks/results/online_calibration.md]

DATA are CASTILLO's files: columns model, dataset, prompt, prompt_tokens, output_tokens (lists;
15,000 and more is truncated). For each served model, a predictor is trained on the others (or on that model,
without the source): ridge regressions of mean ln length and of ln deviation on frozen MiniLM embeddings and
ln prompt_tokens, scaled to out-of-fold residuals. The prompts are split into training (50 %), stream (35 %)
and evaluation (15 %), with a new split for each seed. The stream is (prompt, one output of the model) in
random order; it is repeated if it is too short. After each of `--counts` finished requests, all evaluation
outputs are scored with the corrected predictions. The reference is trained on the model's own training
prompts, of all sources.

--predictions: Parquet with prompt, model, mu, sigma, nu, instead of the ridge predictor, from an artifact
that was trained without these models or sources. Only prompts with a prediction are used, two thirds of them
for the stream. Alternatively an artifact ("pretrained", or a folder) that was not trained on DATA; it
predicts for an unknown served model.

--load: also simulates an engine (the simulator's defaults) with the policy tie at this multiple of its
capacity, on 3,000 requests per held-out model from prompts that were not used for training, at most 4,096
tokens each.

Intervals are 95 % over held-out models (for sources: over pairs of source and model), of means over seeds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.shared.pages import put_section
from benchmarks.shared.pooled import ENCODER, pooled
from predictors.pretrained import artifact_folder
from scheduler_core.errors import InputError
from scheduler_core.prediction.correction import Correction, RequestContext
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.report.page import markdown_table
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.simulator.config import SimulationConfig
from scheduler_core.simulator.run import run_simulation
from scheduler_core.simulator.step_time import saturation_rate_rps
from scheduler_core.simulator.step_time.base import LinearStepTime
from scheduler_core.simulator.trace import Trace, TraceRequest
from scheduler_core.statistics import interval
from training.evaluating.batch_predictor import InferenceOptions, open_batch_predictor
from training.evaluating.scores import COVERAGE_LEVELS, OutputLengths, kendall_tau, percent, score_outputs

FloatArray = NDArray[np.float64]
Indices = NDArray[np.intp]
MAX_TOKENS, MAX_SIMULATED_TOKENS = 15_000, 4096
NU = 3.5
FOLDS = 4
ALPHAS = (30.0, 100.0, 300.0, 1000.0, 3000.0)
#: Streams and evaluations with fewer rows are skipped.
MIN_ROWS = 30
#: tau, CRPS of ln length, coverage at each level in percent.
Scores = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of (prompt, model), each with its output lengths.

    Attributes:
        prompts, models, sources: Text columns [N].
        prompt_tokens: Prompt lengths [N].
        tokens: Lengths of the outputs, at most MAX_TOKENS [N, S].
        split: Random number in [0, 1), equal for all rows of a prompt [N]; see `drawn`.
        mu, sigma, nu: Predicted parameters [N].
    """

    prompts: NDArray[np.object_]
    models: NDArray[np.object_]
    sources: NDArray[np.object_]
    prompt_tokens: NDArray[np.int64]
    tokens: NDArray[np.int64]
    split: FloatArray
    mu: FloatArray
    sigma: FloatArray
    nu: FloatArray

    def prediction(self, row: int) -> LengthPrediction:
        """The prediction of one row."""
        return LengthPrediction(float(self.mu[row]), float(self.sigma[row]), float(self.nu[row]))


def read_rows(files: Sequence[str]) -> Rows:
    """Reads files into rows without predictions."""
    names = ["prompt", "model", "dataset", "output_tokens"]
    table = pa.concat_tables([pq.read_table(file) for file in files], promote_options="default")
    prompts, models, sources = (np.array(table[name].to_pylist(), dtype=object) for name in names[:3])
    if "prompt_tokens" in table.column_names:
        prompt_tokens = np.array(table["prompt_tokens"].to_pylist(), dtype=np.int64)
    else:
        prompt_tokens = np.array([1 + len(prompt) // 4 for prompt in prompts])
    tokens = np.array(table["output_tokens"].to_pylist(), dtype=np.int64)
    nothing = np.full(len(prompts), np.nan)
    tokens = np.clip(tokens, 1, MAX_TOKENS)
    return drawn(Rows(prompts, models, sources, prompt_tokens, tokens, *[nothing] * 4), 0)


def drawn(rows: Rows, seed: int, first: float = 0.0) -> Rows:
    """Rows with a new random split by prompt, uniform between `first` and 1."""
    unit = {
        prompt: int(hashlib.sha256(f"{seed}\0{prompt}".encode()).hexdigest()[:8], 16) / 2**32
        for prompt in set(rows.prompts.tolist())
    }
    return replace(rows, split=np.array([first + (1 - first) * unit[prompt] for prompt in rows.prompts]))


def with_predictions(rows: Rows, file: str) -> Rows:
    """Rows that have a prediction in the table."""
    table = pq.read_table(file, columns=["prompt", "model", "mu", "sigma", "nu"]).to_pydict()
    predictions = {
        (prompt, model): values
        for prompt, model, *values in zip(*(table[name] for name in table), strict=True)
    }
    keys = list(zip(rows.prompts.tolist(), rows.models.tolist(), strict=True))
    indices = np.array([row for row, key in enumerate(keys) if key in predictions], dtype=np.intp)
    if not len(indices):
        raise InputError("--predictions", file, "a table of the prompts and models of DATA")
    values = np.array([predictions[keys[row]] for row in indices.tolist()], dtype=np.float64).T
    fields = ("prompts", "models", "sources", "prompt_tokens", "tokens")
    chosen = replace(rows, **{name: getattr(rows, name)[indices] for name in fields})
    return replace(chosen, split=rows.split[indices], mu=values[0], sigma=values[1], nu=values[2])


def with_artifact(rows: Rows, artifact: str) -> Rows:
    """The rows with an artifact's predictions for an unknown served model."""
    predictor = open_batch_predictor(artifact_folder(artifact), InferenceOptions(progress=False))
    nothing = [None] * len(rows.prompts)
    predicted = predictor.predict(rows.prompts.tolist(), nothing, nothing)
    if predicted.mu is None or predicted.sigma is None:
        raise InputError("--predictions", artifact, "an artifact with the length head")
    nu = np.broadcast_to(np.asarray(predicted.nu, np.float64), len(rows.prompts))
    return replace(rows, mu=predicted.mu, sigma=predicted.sigma, nu=nu)


def regressors(rows: Rows, cache: Path) -> FloatArray:
    """Inputs of the ridge regressions [N, 386]: mean-pooled last layer of MiniLM, ln prompt_tokens, 1."""
    prompts, of = np.unique(rows.prompts.astype(str), return_inverse=True)
    _, mean, _ = np.split(pooled(ENCODER, prompts.tolist(), cache)[:, :-1].astype(np.float64), 3, axis=1)
    lengths = 3 * (np.log(rows.prompt_tokens + 1.0) - 5)
    return np.column_stack([10 * mean[of], lengths, np.ones(len(of))])


def ridge(features: FloatArray, target: FloatArray, fold: NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
    """Weights [D] and out-of-fold predictions [N] of the best alpha; the last feature, 1, has no penalty."""
    parts = [fold == number for number in range(FOLDS)]
    grams = [features[part].T @ features[part] for part in parts]
    responses = [features[part].T @ target[part] for part in parts]
    penalty = np.ones(features.shape[1])
    penalty[-1] = 1e-6
    gram, response = sum(grams), sum(responses)
    best: tuple[float, float, FloatArray] | None = None
    for alpha in ALPHAS:
        shrink = np.diag(alpha * penalty)
        inner = np.empty_like(target)
        for part, own, answer in zip(parts, grams, responses, strict=True):
            inner[part] = features[part] @ np.linalg.solve(gram - own + shrink, response - answer)
        error = float(((inner - target) ** 2).mean())
        if best is None or error < best[0]:
            best = error, alpha, inner
    assert best is not None
    return np.linalg.solve(gram + np.diag(best[1] * penalty), response), best[2]


def predictor(
    features: FloatArray, rows: Rows, chosen: Indices
) -> Callable[[Indices], tuple[FloatArray, FloatArray]]:
    """Trains on the chosen rows; returns a function from rows to (mu, sigma)."""
    inputs, logs = features[chosen], np.log(rows.tokens[chosen])
    fold = (rows.split[chosen] * 2**20).astype(np.int64) % FOLDS
    for_mu, inner = ridge(inputs, logs.mean(axis=1), fold)
    errors = logs - inner[:, None]
    for_sigma, inner = ridge(inputs, 0.5 * np.log((errors**2).mean(axis=1) + 1e-3), fold)
    residuals, scale = errors / np.exp(inner)[:, None], 1.0
    for _ in range(50):  # EM algorithm for the scale of a Student's t
        weights = (NU + 1) / (NU + (residuals / scale) ** 2)
        scale = float(np.sqrt((weights * residuals**2).mean()))
    return lambda at: (features[at] @ for_mu, scale * np.exp(features[at] @ for_sigma))


def scores(rows: Rows, at: Indices, mu: FloatArray, sigma: FloatArray) -> Scores:
    """Scores over all outputs of the rows `at`."""
    num_samples = rows.tokens.shape[1]
    lengths = rows.tokens[at].ravel().astype(np.float64)
    outputs = OutputLengths(
        np.repeat(np.arange(len(at)), num_samples),
        lengths,
        lengths < MAX_TOKENS,
        np.full(len(at), float(MAX_TOKENS)),
    )
    result = score_outputs(mu, sigma, rows.nu[at], outputs).summary()
    tau = kendall_tau(np.repeat(mu, num_samples), lengths) or 0.0
    estimates = (result["coverage"][percent(level)]["estimate"] for level in COVERAGE_LEVELS)
    # Without a predicted quantile below the limit, coverage is undefined.
    return tau, result["crps_log_tokens"], *(np.nan if one is None else 100 * one for one in estimates)


def streamed(
    rows: Rows, stream: Indices, evaluation: Indices, counts: Sequence[int], seed: int
) -> list[Scores]:
    """Scores after each number of finished requests."""
    calibration, rng = Correction(), np.random.default_rng(seed)
    num_samples, num_ended, results = rows.tokens.shape[1], 0, []
    order: list[int] = []
    for count in sorted(counts):
        for _ in range(count - num_ended):
            order = order or rng.permutation(len(stream) * num_samples).tolist()
            number = order.pop()
            row = int(stream[number // num_samples])
            tokens = int(rows.tokens[row, number % num_samples])
            outcome = Outcome(
                prediction=rows.prediction(row),
                prompt_tokens=int(rows.prompt_tokens[row]),
                output_tokens=tokens,
                max_tokens=MAX_TOKENS,
            )
            calibration.observe(RequestContext(), outcome)
        num_ended = count
        corrected = [
            calibration.correct(
                RequestContext(prompt_tokens=int(rows.prompt_tokens[row])), rows.prediction(row)
            )
            for row in evaluation.tolist()
        ]
        mu, sigma = (np.array([getattr(one, name) for one in corrected]) for name in ("mu", "sigma"))
        results.append(scores(rows, evaluation, mu, sigma))
    return results


def study(
    rows: Rows, features: FloatArray | None, leave_out: str, counts: Sequence[int], seeds: int
) -> tuple[FloatArray, FloatArray | None, list[str]]:
    """Scores of the held-out units after each count [U, C, 5] and of the reference [U, 5]; the units."""
    models, sources = (sorted(set(column.tolist())) for column in (rows.models, rows.sources))
    units = [(model, source) for source in ([""] if leave_out == "model" else sources) for model in models]
    # Without features there is no training: two thirds of the prompts are the stream.
    splits = [drawn(rows, seed, 0.0 if features is not None else 0.5).split for seed in range(seeds)]
    names, results, trained = [], [], []
    for model, source in units:
        is_model = rows.models == model
        unit = is_model & (rows.sources == source) if source else is_model
        runs, references = [], []
        for seed, split in enumerate(splits):
            rows = replace(rows, split=split)
            is_training = split < 0.5
            stream = np.flatnonzero(unit & (split >= 0.5) & (split < 0.85))
            evaluation = np.flatnonzero(unit & (split >= 0.85))
            if min(len(stream), len(evaluation)) < MIN_ROWS:
                break
            if features is not None:
                others = ~is_model if leave_out == "model" else is_model & ~unit
                predict = predictor(features, rows, np.flatnonzero(is_training & others))
                mu, sigma = predict(np.arange(len(rows.mu)))
                rows = replace(rows, mu=mu, sigma=sigma, nu=np.full(len(mu), NU))
                own = predictor(features, rows, np.flatnonzero(is_training & is_model))
                references.append(scores(rows, evaluation, *own(evaluation)))
            runs.append(streamed(rows, stream, evaluation, counts, seed))
        if len(runs) < seeds:
            continue
        if references:
            trained.append(np.mean(references, axis=0))
        names.append(f"{model} {source}".strip())
        results.append(np.nanmean(runs, axis=0))
        print(names[-1], f"CRPS {results[-1][0][1]:.3f} -> {results[-1][-1][1]:.3f}", file=sys.stderr)
    return np.array(results), np.array(trained) if trained else None, names


def simulated(rows: Rows, features: FloatArray, load: float, num_requests: int) -> str:
    """Markdown table of tie's latencies for each held-out model; all predictions use the same arrivals."""
    kinds = ("without the model", "the same, calibrated online", "trained on it", "true lengths")
    results: list[list[list[float]]] = []
    for model in sorted(set(rows.models.tolist())):
        is_model, is_training = rows.models == model, rows.split < 0.5
        rng = np.random.default_rng(0)
        chosen = rng.choice(np.flatnonzero(is_model & ~is_training), num_requests)
        samples = rng.integers(0, rows.tokens.shape[1], num_requests)
        tokens = np.minimum(rows.tokens[chosen, samples], MAX_SIMULATED_TOKENS)
        traces = []
        for training in (~is_model, is_model):
            mu, sigma = predictor(features, rows, np.flatnonzero(is_training & training))(chosen)
            requests = [
                TraceRequest(
                    request_id=str(number),
                    arrival_s=float(number),
                    prompt_tokens=int(rows.prompt_tokens[chosen[number]]),
                    output_tokens=int(tokens[number]),
                    max_tokens=MAX_SIMULATED_TOKENS,
                    prediction=LengthPrediction(float(mu[number]), float(sigma[number]), NU),
                )
                for number in range(num_requests)
            ]
            traces.append(Trace(tuple(requests)))
        rate = load * saturation_rate_rps(traces[0], SchedulerConfig(), LinearStepTime())
        results.append([])
        for trace, predicted, online in (
            (traces[0], "trace", False),
            (traces[0], "trace", True),
            (traces[1], "trace", False),
            (traces[0], "oracle", False),
        ):
            arrivals = trace.with_poisson_arrivals(rate, np.random.default_rng(1))
            config = SimulationConfig(trace="", policy="tie", predictor=predicted, online_calibration=online)
            metrics = run_simulation(config, trace=arrivals).metrics
            results[-1].append([metrics[name]["mean"] for name in ("ttft_s", "normalized_latency_s")])
        print(model, *(f"TTFT {ttft:.2f} s" for ttft, _ in results[-1]), file=sys.stderr)
    values = np.array(results)
    lines = []
    for number, kind in enumerate(kinds):
        cells = [f"{values[:, number, 0].mean():.2f}", f"{values[:, number, 1].mean():.4f}"]
        for column in (0, 1):
            ratio = interval((100 * (values[:, number, column] / values[:, 0, column] - 1)).tolist())
            cells.append(f"{ratio.mean:.0f} ± {ratio.high - ratio.mean:.0f} %" if number else "-")
        lines.append([kind, *cells])
    return markdown_table(
        ("predictions", "TTFT, s", "normalized latency, s/token", "change of TTFT", "of normalized latency"),
        lines,
    )


def table(counts: Sequence[int], results: FloatArray, trained: FloatArray | None) -> str:
    """The Markdown table of one study."""
    targets = 100 * np.array(COVERAGE_LEVELS)

    def row(name: str, values: FloatArray) -> list[str]:
        cells = []
        for column, digits in ((0, 3), (1, 3)):
            one = interval(values[:, column].tolist())
            cells.append(f"{one.mean:.{digits}f} ± {one.high - one.mean:.{digits}f}")
        cells.append(" / ".join(f"{value:.1f}" for value in np.nanmean(values[:, 2:], axis=0)))
        cells.append(
            " / ".join(f"{value:.1f}" for value in np.nanmean(np.abs(values[:, 2:] - targets), axis=0))
        )
        closed = "-"
        if trained is not None:
            gap = results[:, 0, 1].mean() - trained[:, 1].mean()
            closed = f"{100 * (results[:, 0, 1].mean() - values[:, 1].mean()) / gap:.0f} %"
        return [name, *cells, closed]

    header = (
        "ended requests", "Kendall tau", "CRPS of ln length", "P50 / P90 / P99 coverage, %",
        "its mean distance from 50 / 90 / 99", "of the CRPS gap closed",
    )  # fmt: skip
    lines = [row(f"{count:,}", results[:, number]) for number, count in enumerate(sorted(counts))]
    if trained is not None:
        lines.append(row("trained on it", trained))
    return markdown_table(header, lines)


def main(args: Sequence[str] | None = None) -> int:
    """Prints a table for each study."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="*")
    parser.add_argument("--leave_out", nargs="+", choices=("model", "source"), default=["model", "source"])
    parser.add_argument("--predictions")
    parser.add_argument("--work", type=Path, default=Path("out/online_calibration"), help="cached features")
    parser.add_argument("--counts", nargs="+", type=int, default=[0, 50, 200, 1000, 5000])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--load", type=float, help="also simulate the policy tie for each held-out model")
    parser.add_argument("--requests", type=int, default=3000, help="requests of a simulation")
    parser.add_argument("--json")
    parser.add_argument("--markdown", help="page whose tables are replaced")
    options = parser.parse_args(args)
    if not options.data:
        print("nothing to measure: the files of CASTILLO are required (see --help)")
        return 0
    rows = read_rows(options.data)
    features = None
    if options.predictions is None:
        features = regressors(rows, options.work)
    else:
        is_table = options.predictions.endswith(".parquet")
        rows = (with_predictions if is_table else with_artifact)(rows, options.predictions)
    content = {}
    for leave_out in options.leave_out:
        results, trained, units = study(rows, features, leave_out, options.counts, options.seeds)
        text = table(options.counts, results, trained)
        print(f"left out: {leave_out} ({len(units)})\n\n{text}\n", flush=True)
        content[leave_out] = {
            "units": units,
            "counts": sorted(options.counts),
            "scores": results.tolist(),
            "trained": None if trained is None else trained.tolist(),
        }
        if options.markdown:
            put_section(options.markdown, f"left out {leave_out}", text)
    if features is not None and options.load is not None:
        text = simulated(rows, features, options.load, options.requests)
        print(f"simulated at load {options.load:g}\n\n{text}")
        if options.markdown:
            put_section(options.markdown, "simulated online calibration", text)
    if options.json:
        Path(options.json).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
