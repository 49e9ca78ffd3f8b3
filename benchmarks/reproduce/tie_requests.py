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
#: Columns of that table with a log-t distribution, [mu, sigma, nu]. "length" is the shipped predictor's; in "within", sigma
#: excludes the predictor's own error; "same outputs": TIE's head, as those of SSJF and LTR; "equal budget": from as many outputs as SSJF and LTR, on a tenth of the prompts.
LENGTHS = ("length", "within", "same outputs", "equal budget", *FAMILIES)
#: Columns with SSJF's length in tokens and LTR's rank: trained on the outputs that TIE's predictor learns from, and with
#: the budget of the paper.
POINTS = ("regression_tokens", "equal budget tokens")
RANKS = ("rank", "equal budget rank")
_NUMBERS = ("prompt_tokens", *LENGTHS, *POINTS, *RANKS)
#: All columns of that table.
COLUMNS = ("prompt_id", "served_model", "dataset", "output_tokens", *_NUMBERS)

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Order:
    """A policy and its predictions.

    Attributes:
        policy: Name of the policy.
        parameters: Parameters of the policy.
        told: "nothing", one of `LENGTHS`, "median" (of the shipped distribution), one of `POINTS`, "truth", or one of `RANKS`: as
            a rank for `ltr`, as a length for policies that order by length.
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
        numbers: For each of `POINTS` and `RANKS`, by request id: the predicted length in tokens, or the predicted rank,
            larger = longer.
        source: Description of their origin.
    """

    trace: Trace
    lengths: dict[str, dict[str, LengthPrediction]]
    numbers: dict[str, dict[str, float]]
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
    seen_mu = with_error(mu, R2_MU, rng)
    seen_sigma = np.exp(with_error(np.log(sigma), R2_SIGMA, rng))
    log_t = np.stack([seen_mu, seen_sigma, np.full(num, NU)], axis=1)
    # Standard deviation of ln length, as a log-normal fit yields it: that of t_3.5, 1.53 sigma.
    log_normal = np.stack([seen_mu, seen_sigma * math.sqrt(NU / (NU - 2)), np.full(num, 1e6)], axis=1)
    lengths = dict.fromkeys(LENGTHS, log_t) | {"log-normal": log_normal}
    numbers = dict.fromkeys(POINTS, np.exp(seen_mu)) | dict.fromkeys(RANKS, seen_mu)
    return made_requests(
        prompt, output, lengths, numbers,
        f"a synthetic population of log-t distributions; one predictor for all with R2 {R2_MU} (mu) and {R2_SIGMA} (ln sigma)",
    )  # fmt: skip


def with_worse_points(data: Requests, share: float, seed: int) -> Requests:
    """Adds normal errors to the predicted ln lengths: `share` times their own standard deviation."""
    rng = np.random.default_rng([seed, 9])
    points = data.numbers[POINTS[0]]
    logs = np.log(np.maximum(list(points.values()), 1.0))
    errors = rng.normal(0.0, share * float(logs.std()), len(logs))
    worse = dict(zip(points, np.exp(logs + errors).tolist(), strict=True))
    return replace(data, numbers=data.numbers | {POINTS[0]: worse})


def with_error(values: Array, r2: float, rng: np.random.Generator) -> Array:
    """The values with an error that leaves a fraction r2 of their variance explained, of mean 0 given the result."""
    mean = values.mean()
    noise = rng.normal(0, math.sqrt(r2 * (1 - r2)) * values.std(), len(values))
    return np.asarray(mean + r2 * (values - mean) + noise)


def made_requests(
    prompt: Array,
    output: Array,
    lengths: Mapping[str, Array],
    numbers: Mapping[str, Array],
    source: str,
    limits: Array | int = CAP,
) -> Requests:
    """Requests from columns [N]; `lengths` has parameters [N, 3], `limits` is max_tokens."""
    names = [f"r{index}" for index in range(len(output))]
    caps = np.broadcast_to(np.asarray(limits), len(output))
    rows = tuple(
        TraceRequest(
            request_id=name,
            arrival_s=0.0,
            prompt_tokens=int(np.clip(prompt[index], 1, 2000)),
            output_tokens=int(np.clip(round(float(output[index])), 1, caps[index])),
            max_tokens=int(caps[index]),
        )
        for index, name in enumerate(names)
    )
    return Requests(
        trace=Trace(rows),
        lengths={
            kind: {name: LengthPrediction(*row) for name, row in zip(names, values.tolist(), strict=True)}
            for kind, values in lengths.items()
        },
        numbers={kind: dict(zip(names, values.tolist(), strict=True)) for kind, values in numbers.items()},
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
    chosen = rng.integers(0, rows.num_rows, num)
    output = [float(rng.choice(table["output_tokens"][int(row)])) for row in chosen]
    column = {name: np.array(table[name], float)[chosen] for name in _NUMBERS}
    return made_requests(
        column["prompt_tokens"], np.array(output), {name: column[name] for name in LENGTHS},
        {name: column[name] for name in (*POINTS, *RANKS)}, _about(path, table),
    )  # fmt: skip


def _about(path: Path, table: Mapping[str, Any]) -> str:
    """Note on the training of the predictors, the variation of lengths, and Kendall's tau."""
    lengths = table["output_tokens"]
    medians = [float(np.median(one)) for one in lengths]

    def taus(length: str, *others: str) -> str:
        columns = {"TIE": [row[0] for row in table[length]]}
        columns |= {name: table[other] for name, other in zip(("SSJF", "LTR"), others, strict=True)}
        return ", ".join(
            f"{name} {float(kendalltau(values, medians).statistic):.3f}" for name, values in columns.items()
        )

    variation = float(np.mean([np.std(one) / np.mean(one) for one in lengths]))
    trained = (pq.read_schema(path).metadata or {}).get(ABOUT, b"").decode()
    return (
        f"{len(lengths)} prompts that no predictor was trained on, each with real outputs (mean CV of the "
        f"lengths of a prompt {variation:.2f}; the paper's prompts: 1.09). TIE gets a trained distribution, "
        "SSJF a trained regressor's length, LTR a trained ranker's score; Kendall's tau between these "
        f"predictions and the median length with the paper's equal budget: {taus('equal budget', POINTS[1], RANKS[1])}; "
        f"from the same outputs: {taus('same outputs', POINTS[0], RANKS[0])}"
        + (f". {trained}" if trained else "")
    )


def told(order: Order, data: Requests) -> Predictions | None:
    """Predictions for a policy."""
    if order.told == "nothing":
        return None
    if order.told == "truth":
        return oracle_predictions(data.trace)
    answers: dict[str, Prediction | None] = {}
    if order.told in data.numbers:
        for name, value in data.numbers[order.told].items():
            if order.policy == "ltr":
                answers[name] = Prediction(rank=RankPrediction(value))
            else:
                mu = math.log(max(value, 1.0)) if order.told in POINTS else value
                answers[name] = Prediction(length=LengthPrediction(mu, _POINT_SIGMA, NU))
        return Predictions(order.told, answers)
    for name, length in data.lengths["length" if order.told == "median" else order.told].items():
        if order.told == "median":
            length = LengthPrediction(length.mu, _POINT_SIGMA, NU)
        answers[name] = Prediction(length=length)
    return Predictions(order.told, answers)
