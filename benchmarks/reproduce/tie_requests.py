"""Requests for the studies of TIE, and the predictions of each policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy.stats import kendalltau

from benchmarks.reproduce.study import Effort
from scheduler_core.errors import InputError
from scheduler_core.prediction.predictions import LengthPrediction, Prediction, RankPrediction
from scheduler_core.simulator.trace import Trace, TraceRequest
from scheduler_core.simulator.trace_predictions import Predictions, oracle_predictions

#: Longest output in tokens: `max_tokens` in the paper's released code.
CAP = 2048
NU = 3.5
#: A population similar to table 1: mean output of about 180 tokens (appendix C: 177 for the 8B model on
#: LMSYS), with wide and heavy-tailed lengths within a prompt.
MU_MEAN, MU_SD, SIGMA_MEAN, SIGMA_SD = 4.5, 1.0, -0.9, 0.45
#: Errors of the predicted mu and ln sigma that yield the paper's R2 of 0.82 and 0.76.
R2_MU, R2_SIGMA = 0.82, 0.76
_POINT_SIGMA = 1e-6
#: Metadata of the table of --predictions: training of the predictors.
ABOUT = b"about"
#: Families of table 4, by their names in `benchmarks.reproduce.frozen_heads`.
FAMILIES = ("log-t, nu 3.5", "log-t, free nu", "log-normal")
#: Columns of that table with a log-t distribution, [mu, sigma, nu]. "length" is TIE's; in "within", sigma
#: excludes the predictor's own error.
LENGTHS = ("length", "within", *FAMILIES)
_NUMBERS = ("prompt_tokens", *LENGTHS, "regression_tokens", "rank")
#: All columns of that table.
COLUMNS = ("prompt_id", "served_model", "dataset", "output_tokens", *_NUMBERS)

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Order:
    """A policy and its predictions.

    Attributes:
        policy: Name of the policy.
        parameters: Parameters of the policy.
        told: "nothing", one of `LENGTHS`, "median" (of TIE's distribution), "point" (SSJF's length), "rank",
            "rank order" (the rank as a length, for policies that order by length), or "truth".
    """

    policy: str
    parameters: Mapping[str, float] = field(default_factory=dict)
    told: str = "length"


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests and their predictions.

    Attributes:
        trace: The requests.
        lengths: For each of `LENGTHS`, by request id: the predicted distribution.
        points: By request id: the predicted length in tokens.
        ranks: By request id: the predicted rank, larger = longer.
        source: Description of their origin.
    """

    trace: Trace
    lengths: dict[str, dict[str, LengthPrediction]]
    points: dict[str, float]
    ranks: dict[str, float]
    source: str


def requests(
    effort: Effort, num: int, seed: int, served_model: str = "", dataset: str | None = None
) -> Requests:
    """Requests from --predictions, otherwise from the synthetic population.

    The first have trained predictors and prompts drawn with replacement. The others have predictions with the
    paper's R2, the same for all policies.

    Args:
        effort: Selects the source.
        num: Number of requests.
        seed: Random seed.
        served_model: Served model of the outputs, if the data have it.
        dataset: Data set of the prompts, if the data have it; None: all.
    """
    rng = np.random.default_rng([seed, 3])
    if effort.predictions is not None:
        return _predicted(effort.predictions, num, rng, served_model, dataset)
    mu = rng.normal(MU_MEAN, MU_SD, num)
    sigma = np.exp(rng.normal(SIGMA_MEAN, SIGMA_SD, num))
    output = np.exp(np.clip(mu + sigma * rng.standard_t(NU, num), 0.0, math.log(CAP)))
    prompt = np.exp(rng.normal(4.0, 1.0, num))
    seen_mu = _wrong(mu, R2_MU, rng)
    seen_sigma = np.exp(_wrong(np.log(sigma), R2_SIGMA, rng))
    log_t = np.stack([seen_mu, seen_sigma, np.full(num, NU)], axis=1)
    # Standard deviation of ln length, as a log-normal fit yields it: that of t_3.5, 1.53 sigma.
    log_normal = np.stack([seen_mu, seen_sigma * math.sqrt(NU / (NU - 2)), np.full(num, 1e6)], axis=1)
    lengths = dict.fromkeys(LENGTHS, log_t) | {"log-normal": log_normal}
    return _requests(
        prompt, output, lengths, np.exp(seen_mu), seen_mu,
        f"a synthetic population of log-t distributions; one predictor for all with R2 {R2_MU} (mu) and {R2_SIGMA} (ln sigma)",
    )  # fmt: skip


def with_worse_points(data: Requests, share: float, seed: int) -> Requests:
    """Adds normal errors to the predicted ln lengths: `share` times their own standard deviation."""
    rng = np.random.default_rng([seed, 9])
    logs = np.log(list(data.points.values()))
    errors = rng.normal(0.0, share * float(logs.std()), len(logs))
    points = np.maximum(np.exp(logs + errors), 1.0)
    return replace(data, points=dict(zip(data.points, points.tolist(), strict=True)))


def _wrong(values: Array, r2: float, rng: np.random.Generator) -> Array:
    """The values with an error that leaves a fraction r2 of their variance explained."""
    mean = values.mean()
    noise = rng.normal(0, math.sqrt(r2 * (1 - r2)) * values.std(), len(values))
    return np.asarray(mean + r2 * (values - mean) + noise)


def _requests(
    prompt: Array, output: Array, lengths: Mapping[str, Array], points: Array, ranks: Array, source: str
) -> Requests:
    names = [f"r{index}" for index in range(len(output))]
    rows = tuple(
        TraceRequest(
            request_id=name,
            arrival_s=0.0,
            prompt_tokens=int(np.clip(prompt[index], 1, 2000)),
            output_tokens=int(np.clip(round(float(output[index])), 1, CAP)),
            max_tokens=CAP,
        )
        for index, name in enumerate(names)
    )
    return Requests(
        trace=Trace(rows),
        lengths={
            kind: {name: LengthPrediction(*row) for name, row in zip(names, values.tolist(), strict=True)}
            for kind, values in lengths.items()
        },
        points=dict(zip(names, np.maximum(points, 1.0).tolist(), strict=True)),
        ranks=dict(zip(names, ranks.tolist(), strict=True)),
        source=source,
    )


def _predicted(
    path: Path, num: int, rng: np.random.Generator, served_model: str, dataset: str | None
) -> Requests:
    filters = [("served_model", "==", served_model)] if served_model else []
    filters += [("dataset", "==", dataset)] if dataset is not None else []
    rows = pq.read_table(path, columns=["output_tokens", *_NUMBERS], filters=filters or None)
    if not rows.num_rows:
        raise InputError(str(path), f"no outputs of {served_model} to {dataset}", "a file that has them")
    table = rows.to_pydict()
    chosen = rng.integers(0, len(table["rank"]), num)
    output = [float(rng.choice(table["output_tokens"][int(row)])) for row in chosen]
    column = {name: np.array(table[name], float)[chosen] for name in _NUMBERS}
    return _requests(
        column["prompt_tokens"], np.array(output), {name: column[name] for name in LENGTHS},
        column["regression_tokens"], column["rank"], _about(path, table),
    )  # fmt: skip


def _about(path: Path, table: Mapping[str, Any]) -> str:
    """Note on the training of the predictors, the variation of lengths, and Kendall's tau."""
    lengths = table["output_tokens"]
    medians = [float(np.median(one)) for one in lengths]
    mu = [row[0] for row in table["length"]]
    taus = [
        float(kendalltau(values, medians).statistic)
        for values in (mu, table["regression_tokens"], table["rank"])
    ]
    variation = float(np.mean([np.std(one) / np.mean(one) for one in lengths]))
    trained = (pq.read_schema(path).metadata or {}).get(ABOUT, b"").decode()
    return (
        f"{len(lengths)} prompts that no predictor was trained on, each with real outputs (mean CV of the "
        f"lengths of a prompt {variation:.2f}; the paper's prompts: 1.09). TIE gets a trained distribution, "
        "SSJF a trained regressor's length, LTR a trained ranker's score; Kendall's tau between these "
        "predictions and the median length: "
        f"TIE {taus[0]:.3f}, SSJF {taus[1]:.3f}, LTR {taus[2]:.3f}" + (f". {trained}" if trained else "")
    )


def told(order: Order, data: Requests) -> Predictions | None:
    """Predictions for a policy."""
    if order.told == "nothing":
        return None
    if order.told == "truth":
        return oracle_predictions(data.trace)
    answers: dict[str, Prediction | None] = {}
    for name, length in data.lengths.get(order.told, data.lengths["length"]).items():
        if order.told == "rank":
            answers[name] = Prediction(rank=RankPrediction(data.ranks[name]))
            continue
        if order.told == "point":
            length = LengthPrediction(math.log(data.points[name]), _POINT_SIGMA, NU)
        elif order.told == "median":
            length = LengthPrediction(length.mu, _POINT_SIGMA, NU)
        elif order.told == "rank order":
            length = LengthPrediction(data.ranks[name], _POINT_SIGMA, NU)
        answers[name] = Prediction(length=length)
    return Predictions(order.told, answers)
