"""Comparison of output-length distributions: log-t, mixtures of log-t, and nonparametric ones.

    python -m benchmarks.distribution_heads DATA [--encoder ENCODER] [--seeds 3] [--work FOLDER] [--json OUT]

DATA is the folder of public sets that `python -m examples.pretrained` takes. The training, tuning and report
prompts and the held-out sources are those of the shipped predictor. There are two comparisons:

- heads: all heads use the same frozen encoder, towers, conditions, steps and learning rates; they differ in
  outputs and loss. The epoch with the lowest loss on the tuning prompts is used. There, too, each head gets
  a shift and a scale about its median (lowest CRPS of ln tokens), as in `calibrate`. The encoder must not
  have been trained on the training prompts: its features would fit them better than new prompts.
- shapes: mu and sigma are those of the shipped predictor. The distribution of (ln length - mu) / sigma is its
  Student-t, one with nu, shift and scale fitted on the tuning prompts, or the empirical residuals, over all
  served models or for each of them.
Scores use min(length, 15,000 tokens), weight each (prompt, served model) equally, and are means over seeds.
Intervals are paired bootstraps over prompts against the first head. For held-out sources the served model is
unknown.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import stdtr, stdtrit
from scipy.stats import norm
from scipy.stats import t as student_t
from torch import Tensor, nn

from benchmarks.pooled import ENCODER, pooled
from examples.pretrained.prepare import prepare
from predictors.modules.config import Conditioning
from predictors.modules.predictor import ConditionFeatures
from predictors.modules.towers import ConditionedTower, Tower
from predictors.pretrained import shipped_folder
from training.data import SampleLengths
from training.evaluating.predictors import InferenceOptions, open_predictor
from training.evaluating.scores import kendall_tau
from training.student_t import log_density, log_survival

log = logging.getLogger(__name__)

Array = NDArray[np.float64]
BATCH, EPOCHS, RATE, WARMUP, ROWS_PER_PROMPT = 256, 4, 5e-4, 0.05, 4
#: Fraction of training rows whose served model is hidden, as in examples/pretrained/minilm.yaml.
HIDDEN = 0.2
#: Lengths are truncated to this value before scoring.
LIMIT = 15_000
#: Grid of ln tokens at which every CDF is evaluated, 0.5 to about 65,000 tokens; it contains the limit.
STEP = math.log(2 * LIMIT) / 336
GRID: Array = math.log(0.5) + STEP * np.arange(384.0)
LEVELS = (0.5, 0.9, 0.99)
RISK = 0.9
NORMAL = 1_000.0  # degrees of freedom of a log-t that is a log-normal


class TrainableHead(Protocol):
    """Interface of the heads that `train` accepts."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of outputs of each tower."""

    def loss(self, outputs: Sequence[Tensor], samples: SampleLengths) -> Tensor:
        """Loss of each row [R]."""


@dataclass(frozen=True)
class LogTMixture:
    """K log-t components; K = 1 is the shipped head. If `nu` is None, it is predicted for each component."""

    num: int = 1
    nu: float | None = 3.5

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of outputs of each tower: mu, ln sigma and, if needed, mixture logits and raw nu."""
        return (
            self.num,
            self.num,
            *([self.num] if self.num > 1 else []),
            *([self.num] if self.nu is None else []),
        )

    def parameters(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """mu, sigma, ln weight, nu [R, K]."""
        spread = torch.linspace(-1.0, 1.0, self.num) if self.num > 1 else torch.zeros(1)
        mu = outputs[0] + spread
        sigma = nn.functional.softplus(outputs[1] + 0.5) + 1e-3
        weight = torch.log_softmax(outputs[2], dim=-1) if self.num > 1 else torch.zeros_like(mu)
        nu = torch.full_like(mu, self.nu) if self.nu else torch.exp(4.6 * torch.sigmoid(outputs[-1] - 1.0))
        return tuple(part.double() for part in (mu, sigma, weight, nu))

    def loss(self, outputs: Sequence[Tensor], samples: SampleLengths) -> Tensor:
        """Negative log-likelihood of ln tokens [R]."""
        mu, sigma, weight, nu = (part.unsqueeze(1) for part in self.parameters(outputs))
        t = (torch.log(samples.tokens.double()).unsqueeze(-1) - mu) / sigma
        likelihood = torch.logsumexp(weight + log_density(t, nu) - torch.log(sigma), dim=-1)
        censored = samples.present & ~samples.finished
        if bool(censored.any()):
            row, _ = torch.nonzero(censored, as_tuple=True)
            tail = weight[row, 0] + log_survival(t[censored], nu[row, 0])
            likelihood = likelihood.masked_scatter(censored, torch.logsumexp(tail, dim=-1))
        return -samples.mean(likelihood)

    def cdf(self, outputs: Sequence[Tensor]) -> Array:
        """CDF on GRID [R, G]."""
        mu, sigma, weight, nu = (part.numpy()[:, None] for part in self.parameters(outputs))
        parts = zip(*(np.moveaxis(part, -1, 0) for part in (mu, sigma, weight, nu)), strict=True)
        return np.asarray(sum(np.exp(w) * stdtr(n, (GRID - m) / s) for m, s, w, n in parts))


@dataclass(frozen=True)
class Quantiles:
    """Non-crossing quantiles of ln tokens, linear in between, with exponential tails; pinball loss.

    With `nu`, they are the quantiles of a log-t, trained by the same loss.
    """

    levels: tuple[float, ...] = (0.01, 0.025, *(round(0.05 * step, 2) for step in range(1, 20)), 0.975, 0.99)
    nu: float | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of outputs of each tower: the median, and the raw gaps or raw sigma."""
        return (1, len(self.levels) - 1 if self.nu is None else 1)

    def quantiles(self, outputs: Sequence[Tensor]) -> Tensor:
        """Quantiles of ln tokens [R, L]."""
        if self.nu is not None:
            t = torch.tensor(stdtrit(self.nu, self.levels), dtype=torch.float32)
            return outputs[0] + (nn.functional.softplus(outputs[1] + 0.5) + 1e-3) * t
        # Before training: the quantiles of a log-normal.
        gaps = torch.tensor(np.log(np.expm1(np.diff(norm.ppf(self.levels)))), dtype=torch.float32)
        steps = nn.functional.softplus(outputs[1] + gaps) + 1e-4
        below = len(self.levels) // 2
        sums = torch.cumsum(torch.cat([torch.zeros_like(steps[:, :1]), steps], dim=1), dim=1)
        return outputs[0] + sums - sums[:, below : below + 1]

    def loss(self, outputs: Sequence[Tensor], samples: SampleLengths) -> Tensor:
        """Pinball loss of the ln tokens, mean over the levels [R]."""
        levels = torch.tensor(self.levels)
        limit = torch.log(samples.max_tokens).unsqueeze(-1)
        quantiles = torch.minimum(self.quantiles(outputs), limit)
        excess = torch.log(samples.tokens).unsqueeze(-1) - quantiles.unsqueeze(1)
        return samples.mean(2 * torch.maximum(levels * excess, (levels - 1) * excess).mean(-1))

    def cdf(self, outputs: Sequence[Tensor]) -> Array:
        """CDF on GRID [R, G]."""
        q, u = self.quantiles(outputs).double().numpy(), np.array(self.levels)
        values = np.stack([np.interp(GRID, row, u) for row in q])
        low = (q[:, 1] - q[:, 0]) / math.log(u[1] / u[0])
        high = (q[:, -1] - q[:, -2]) / math.log((1 - u[-2]) / (1 - u[-1]))
        left = u[0] * np.exp(np.minimum(GRID - q[:, :1], 0.0) / low[:, None])
        right = 1 - (1 - u[-1]) * np.exp(-np.maximum(GRID - q[:, -1:], 0.0) / high[:, None])
        return np.where(q[:, :1] > GRID, left, np.where(q[:, -1:] < GRID, right, values))


Kind = LogTMixture | Quantiles
HEADS: dict[str, Kind] = {
    "log-t, nu 3.5": LogTMixture(),
    "log-t, free nu": LogTMixture(nu=None),
    "log-normal": LogTMixture(nu=NORMAL),
    "log-t, pinball": Quantiles(nu=3.5),
    "2 log-t": LogTMixture(2),
    "3 log-t": LogTMixture(3),
    "4 log-t": LogTMixture(4),
    "23 quantiles": Quantiles(),
    "3 log-normal": LogTMixture(3, nu=NORMAL),
}


@dataclass(frozen=True)
class Rows:
    """R rows (prompt, served model, temperature) with their output lengths.

    Attributes:
        features: Features of the P prompts [P, F].
        prompt: Prompt index of each row [R].
        model: Index of the served model, 0 = unknown [R].
        temperature: Sampling temperature, NaN = unknown [R].
        samples: Output lengths.
        weight: Weight in the loss [R].
        table: The original table.
    """

    features: Tensor
    prompt: Tensor
    model: Tensor
    temperature: Tensor
    samples: SampleLengths
    weight: Tensor
    table: pd.DataFrame


def read_rows(files: Mapping[Path, float], names: Sequence[str], encoder: str, work: Path) -> Rows:
    """Reads prepared files into rows; each file has a weight in the loss."""
    tables = [pd.read_parquet(file).assign(weight=weight) for file, weight in files.items()]
    parts = [pooled(encoder, list(dict.fromkeys(table.prompt)), work) for table in tables]
    starts = np.cumsum([0, *(len(part) for part in parts)])
    prompt = [pd.factorize(table.prompt)[0] + start for table, start in zip(tables, starts, strict=False)]
    table = pd.concat(tables, ignore_index=True)
    counts = table.output_tokens.map(len).to_numpy()
    present = np.arange(counts.max()) < counts[:, None]
    tokens, finished = np.ones(present.shape, dtype=np.float32), np.ones(present.shape, dtype=bool)
    tokens[present] = np.concatenate(table.output_tokens.to_numpy())
    finished[present] = np.concatenate(table.finished.to_numpy())
    limit = np.where(finished, np.inf, tokens).min(axis=1)
    number = {name: at + 1 for at, name in enumerate(names)}
    return Rows(
        torch.from_numpy(np.concatenate(parts)),
        torch.from_numpy(np.concatenate(prompt)),
        torch.tensor([number.get(name, 0) for name in table.model]),
        torch.tensor(table.temperature.to_numpy(), dtype=torch.float32),
        SampleLengths(
            *map(
                torch.from_numpy,
                (np.minimum(tokens, limit[:, None]), finished, present, limit.astype(np.float32)),
            )
        ),
        torch.tensor(table.weight.to_numpy(), dtype=torch.float32),
        table,
    )


class Network(nn.Module):
    """Conditioning and the towers of one head, on standardized ln tokens."""

    def __init__(self, kind: TrainableHead, num_features: int, names: Sequence[str], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.conditions = ConditionFeatures(Conditioning(tuple(names)), generator)
        width = self.conditions.num_features
        self.towers = nn.ModuleList(
            ConditionedTower(num_features, width, Tower(), size, generator) for size in kind.sizes
        )
        self.location = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, features: Tensor, model: Tensor, temperature: Tensor) -> list[Tensor]:
        """Outputs of each tower [R, n]; the mean of the training lengths is added to the first."""
        conditions = self.conditions(features, model, temperature)
        first, *others = (tower(features, conditions) for tower in self.towers)
        return [first + self.location, *others]


def drawn_rows(rows: Rows) -> Tensor:
    """Random indices of ROWS_PER_PROMPT rows per prompt, shuffled."""
    order = torch.randperm(len(rows.prompt))
    by_prompt = order[torch.argsort(rows.prompt[order], stable=True)]
    counts = torch.bincount(rows.prompt)
    rank = torch.arange(len(order)) - torch.repeat_interleave(torch.cumsum(counts, 0) - counts, counts)
    chosen = by_prompt[rank < ROWS_PER_PROMPT]
    return chosen[torch.randperm(len(chosen))]


def train(kind: TrainableHead, rows: Rows, tune: Rows, names: Sequence[str], seed: int) -> Network:
    """Trains a network and returns the epoch with the lowest loss on the tuning prompts."""
    torch.manual_seed(seed)
    network = Network(kind, rows.features.shape[1], names, seed)
    network.location.fill_(float(rows.samples.mean(torch.log(rows.samples.tokens)).mean()))
    optimizer = torch.optim.AdamW((value for value in network.parameters() if value.requires_grad), lr=RATE)
    total = EPOCHS * math.ceil(len(drawn_rows(rows)) / BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (WARMUP * total), (total - step) / (total * (1 - WARMUP)))
    )
    best, weights = math.inf, {}
    for epoch in range(EPOCHS):
        network.train()
        for at in torch.split(drawn_rows(rows), BATCH):
            model = rows.model[at].masked_fill(torch.rand(len(at)) < HIDDEN, 0)
            outputs = network(rows.features[rows.prompt[at]], model, rows.temperature[at])
            samples = SampleLengths(*(part[at] for part in rows.samples))
            loss = (kind.loss(outputs, samples) * rows.weight[at]).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            score = float(kind.loss(outputs_of(network, tune), tune.samples).mean())
        if score < best:
            best, weights = score, {name: value.clone() for name, value in network.state_dict().items()}
        log.info("epoch %d: %.4f", epoch + 1, score)
    network.load_state_dict(weights)
    return network


def outputs_of(
    network: Network, rows: Rows, at: Tensor | None = None, *, hidden: bool = False
) -> list[Tensor]:
    """Outputs of the rows `at` (default: all); `hidden` drops served model and temperature."""
    network.eval()
    parts = []
    with torch.no_grad():
        chosen = torch.arange(len(rows.prompt)) if at is None else at
        for part in torch.split(chosen, 2048):
            model, temperature = rows.model[part], rows.temperature[part]
            if hidden:
                model, temperature = torch.zeros_like(model), temperature * math.nan
            parts.append(network(rows.features[rows.prompt[part]], model, temperature))
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def at_grid(values: Array, z: Array, of: NDArray[np.int64] | None = None) -> Array:
    """Interpolates values on GRID [D, G] at z [R, N]; `of` [R] is the row of `values`, default 0..R-1."""
    place = np.clip((z - GRID[0]) / STEP, 0, len(GRID) - 1.0001)
    low = place.astype(np.int64)
    row = (np.arange(len(z)) if of is None else of)[:, None]
    return np.asarray(values[row, low] * (low + 1 - place) + values[row, low + 1] * (place - low))


def quantile(cdf: Array, level: float) -> Array:
    """Quantile at a level, in ln tokens [R]."""
    at = np.clip((cdf < level).sum(axis=1), 1, len(GRID) - 1)
    row = np.arange(len(cdf))
    below, above = cdf[row, at - 1], cdf[row, at]
    return np.asarray(GRID[at - 1] + STEP * (level - below) / np.maximum(above - below, 1e-12))


def shifted(cdf: Array, shift: float, scale: float) -> Array:
    """Shifts and scales about the median m: m + shift w + scale (z - m); w is half the 16 % to 84 % range."""
    median = quantile(cdf, 0.5)[:, None]
    width = ((quantile(cdf, 0.84) - quantile(cdf, 0.16)) / 2)[:, None]
    return at_grid(cdf, median + (GRID - median - shift * width) / scale)


def _crps(cdf: Array, lengths: Array, x: Array, of: NDArray[np.int64]) -> Array:
    """CRPS [R, N] of lengths: the integral of (F - 1{X <= x})^2 up to the limit; `x`: values on GRID."""

    def below(values: Array) -> Array:
        steps = (values[:, 1:] + values[:, :-1]) / 2 * np.diff(x)
        return np.concatenate([np.zeros((len(values), 1)), np.cumsum(steps, axis=1)], axis=1)

    z, lower, upper = np.log(lengths), below(cdf**2), below((1 - cdf) ** 2)
    # Integral of F^2 below the length, and of (1 - F)^2 from there to the limit;
    top = upper[of, np.searchsorted(GRID, math.log(LIMIT) - STEP / 2)][:, None]
    return np.asarray(at_grid(lower, z, of) + top - at_grid(upper, z, of))


def mean_over(present: NDArray[np.bool_], values: Array) -> Array:
    """Mean over each row's samples [R]."""
    return np.asarray(np.where(present, values, 0.0).sum(1) / present.sum(1))


def scores(cdf: Array, rows: Rows, of: NDArray[np.int64]) -> dict[str, Array]:
    """Scores of each row [R]; `of` [R] is the index of its distribution in cdf [D, G]."""
    finished, present = rows.samples.finished.numpy(), rows.samples.present.numpy()
    served = np.minimum(rows.samples.tokens.numpy().astype(float), LIMIT)
    z, x = np.log(served), np.exp(GRID)
    u = at_grid(cdf, z, of)
    density = np.maximum(at_grid(cdf, z + STEP, of) - at_grid(cdf, z - STEP, of), 1e-12) / (2 * STEP)
    nll = np.where(finished, z - np.log(density), -np.log(np.maximum(1 - u, 1e-12)))
    survival = np.where(x[1:] < LIMIT * 1.001, 1 - (cdf[:, 1:] + cdf[:, :-1]) / 2, 0.0) * np.diff(x)
    top = np.minimum(np.exp(quantile(cdf, RISK)), LIMIT)
    beyond = np.cumsum(survival[:, ::-1], axis=1)[:, ::-1]
    tail = at_grid(np.concatenate([beyond, np.zeros((len(cdf), 1))], axis=1), np.log(top)[:, None])[:, 0]
    over = present & (served > top[of, None])
    result = {
        "crps_tokens": mean_over(present, _crps(cdf, served, x, of)),
        "crps_log": mean_over(present, _crps(cdf, served, GRID, of)),
        "nll": mean_over(present, nll),
        "median": quantile(cdf, 0.5)[of],
        "expected": (survival.sum(axis=1) + x[0])[of],
        "cvar": np.minimum(top + tail / (1 - RISK), LIMIT)[of],
        "mean_length": mean_over(present, served),
        "mean_log": mean_over(present, z),
        "over": over.sum(1) / present.sum(1),
        "over_length": np.where(over, served, 0.0).sum(1) / present.sum(1),
    }
    return result | {f"p{100 * level:g}": mean_over(present, (u <= level) & finished) for level in LEVELS}


def measure(
    kind: Kind, network: Network, tune: Rows, report: Rows, others: Mapping[str, Rows]
) -> dict[str, Array]:
    """Scores of each row of each set by "SET/SCORE"; raw/ is the report set before shift and scale."""
    # One served model in four per prompt is enough to fit two parameters.
    at = torch.arange(0, len(tune.prompt), 4)
    cdf, every = kind.cdf(outputs_of(network, tune, at)), np.arange(len(at))
    present = tune.samples.present[at].numpy()
    served = np.minimum(tune.samples.tokens[at].numpy().astype(float), LIMIT)

    def score(x: Array) -> float:
        part = shifted(cdf, x[0], math.exp(x[1]))
        return float(mean_over(present, _crps(part, served, GRID, every)).mean())

    simplex = [[0.0, 0.0], [0.2, 0.0], [0.0, 0.2]]
    options = {"xatol": 0.01, "fatol": 1e-5, "initial_simplex": simplex}
    solution = minimize(score, np.zeros(2), method="Nelder-Mead", options=options).x
    shift, scale = float(solution[0]), math.exp(solution[1])
    result = {"calibration": np.array([shift, scale])}
    raw, every = kind.cdf(outputs_of(network, report)), np.arange(len(report.prompt))
    sets = {"raw": (raw, report, every), "report": (shifted(raw, shift, scale), report, every)}
    for name, rows in others.items():
        _, first, of = np.unique(rows.prompt.numpy(), return_index=True, return_inverse=True)
        unknown = kind.cdf(outputs_of(network, rows, torch.from_numpy(first), hidden=True))
        sets[name] = (shifted(unknown, shift, scale), rows, of)
    for name, part in sets.items():
        result |= {f"{name}/{key}": value for key, value in scores(*part).items()}
    return result


def shapes(tune: Rows, report: Rows, others: Mapping[str, Rows]) -> dict[str, dict[str, Array]]:
    """Scores as in `measure`, by shape, with mu and sigma of the shipped predictor."""
    predictor = open_predictor(shipped_folder("pretrained"), InferenceOptions(threads=1))
    known = set(predictor.served_models)

    def parameters(rows: Rows, *, hidden: bool = False) -> tuple[Array, Array]:
        table = rows.table
        models = [None if hidden or name not in known else name for name in table.model]
        temperatures = [None if hidden or math.isnan(value) else value for value in table.temperature]
        predicted = predictor.predict(table.prompt.tolist(), models, temperatures)
        return np.asarray(predicted.mu), np.asarray(predicted.sigma)

    mu, sigma = parameters(tune)
    present, finished = tune.samples.present.numpy(), tune.samples.finished.numpy()
    z = (np.log(tune.samples.tokens.numpy().astype(float)) - mu[:, None]) / sigma[:, None]

    def loss(x: Array) -> float:
        nu, t = math.exp(x[0]), (z - x[1]) / math.exp(x[2])
        values = np.where(finished, -student_t.logpdf(t, nu) + x[2], -student_t.logsf(t, nu))
        return float(mean_over(present, values).mean())

    nu, shift, log_scale = minimize(loss, np.array([math.log(3.5), 0.0, 0.0]), method="Nelder-Mead").x
    levels = np.linspace(0.0, 1.0, 401)
    pooled_z = np.quantile(z[present], levels)
    by_model = {
        model: np.quantile(z[tune.model.numpy() == model][present[tune.model.numpy() == model]], levels)
        for model in np.unique(tune.model.numpy()).tolist()
    }

    def residuals(table: Mapping[int, Array]) -> Callable[[Array, NDArray[np.int64]], Array]:
        return lambda t, model: np.stack(
            [
                np.interp(row, table.get(number, pooled_z), levels)
                for row, number in zip(t, model.tolist(), strict=True)
            ]
        )

    kinds: dict[str, Callable[[Array, NDArray[np.int64]], Array]] = {
        "log-t, nu 3.5, as shipped": lambda t, model: stdtr(3.5, t),
        "log-t, fitted nu": lambda t, model: stdtr(math.exp(nu), (t - shift) / math.exp(log_scale)),
        "residuals": residuals({}),
        "residuals by served model": residuals(by_model),
    }
    results: dict[str, dict[str, Array]] = {name: {} for name in kinds}
    log.info("fitted nu %.2f, shift %.3f, scale %.3f", math.exp(nu), shift, math.exp(log_scale))
    for part, rows in {"report": report, **others}.items():
        mu, sigma = parameters(rows, hidden=part != "report")
        model = rows.model.numpy() * (part == "report")
        for name, shape in kinds.items():
            cdf = shape((GRID - mu[:, None]) / sigma[:, None], model)
            one = scores(cdf, rows, np.arange(len(mu)))
            results[name] |= {f"{part}/{key}": value for key, value in one.items()}
    return results


def gain(
    base: Array, other: Array, prompt: NDArray[Any], rng: np.random.Generator
) -> tuple[float, float, float]:
    """1 - mean(other) / mean(base), both [R], and its 95 % bootstrap interval over prompts."""
    sums = np.zeros((2, prompt.max() + 1))
    for side, values in zip(sums, (base, other), strict=True):
        np.add.at(side, prompt, values)
    drawn = sums[:, rng.integers(sums.shape[1], size=(2000, sums.shape[1]))].sum(axis=2)
    low, high = np.percentile(1 - drawn[1] / drawn[0], (2.5, 97.5))
    return float(1 - sums[1].sum() / sums[0].sum()), float(low), float(high)


def summary(
    runs: Sequence[Mapping[str, Array]],
    base: Sequence[Mapping[str, Array]],
    part: str,
    table: pd.DataFrame,
    keep: NDArray[np.bool_],
) -> dict[str, Any]:
    """Metrics of one head on the rows `keep` of one set, means over seeds."""
    at = np.flatnonzero(keep)
    prompt, model = (pd.factorize(table[column].iloc[at])[0] for column in ("prompt_id", "model"))

    def of(name: str, source: Sequence[Mapping[str, Array]] = runs) -> Array:
        return np.stack([run[f"{part}/{name}"][at] for run in source])

    rng = np.random.default_rng(0)
    result: dict[str, Any] = {"prompts": int(prompt.max() + 1), "rows": len(at)}
    for name in ("crps_tokens", "crps_log", "nll"):
        result[name] = float(of(name).mean())
        result[f"{name}_sd"] = float(of(name).mean(axis=1).std())
    for name in ("crps_tokens", "crps_log"):
        result[f"{name}_gain"] = gain(of(name, base).mean(axis=0), of(name).mean(axis=0), prompt, rng)
    for level in LEVELS:
        covered = of(f"p{100 * level:g}").mean(axis=0)
        by_model = pd.Series(covered).groupby(model).mean()
        result[f"p{100 * level:g}"] = float(covered.mean())
        result[f"p{100 * level:g}_by_model"] = float((by_model - level).abs().mean())
    result["tau"] = float(np.mean([kendall_tau(run, of("mean_log")[0]) or 0.0 for run in of("median")]))
    result["tau_expected"] = float(
        np.mean([kendall_tau(run, of("mean_log")[0]) or 0.0 for run in of("expected")])
    )
    result["expected_mae"] = float(np.abs(of("expected") - of("mean_length")).mean())
    result["expected_ratio"] = float(of("expected").sum() / of("mean_length").sum())
    result["cvar_ratio"] = float((of("cvar") * of("over")).sum() / of("over_length").sum())
    return result


def reasoning(data: Path, name: str, table: pd.DataFrame) -> NDArray[np.bool_]:
    """Rows of served models for which most outputs have thinking tokens that the source counts."""
    raw = pd.read_parquet(data / f"more/{name}.parquet")
    if "api_tokens" not in raw.columns:
        return np.zeros(len(table), dtype=bool)
    thought = raw.n_tokens_reasoning.fillna(0).gt(0) | raw.api_tokens.gt(2 * raw.n_tokens)
    share = thought.groupby(raw.model).mean()
    return np.asarray(table.model.isin(share[share > 0.5].index))


COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "CRPS, tokens": lambda one: f"{one['crps_tokens']:.1f}",
    "gain, %": lambda one: interval(one["crps_tokens_gain"]),
    "CRPS, ln": lambda one: f"{one['crps_log']:.4f}",
    "gain, % ": lambda one: interval(one["crps_log_gain"]),
    "nll": lambda one: f"{one['nll']:.3f}",
    "P50 / P90 / P99, %": lambda one: " / ".join(f"{100 * one[key]:.1f}" for key in ("p50", "p90", "p99")),
    "error by served model, points": lambda one: " / ".join(
        f"{100 * one[f'{key}_by_model']:.1f}" for key in ("p50", "p90", "p99")
    ),
    "tau": lambda one: f"{one['tau']:.3f}",
    "tau of E": lambda one: f"{one['tau_expected']:.3f}",
    "MAE of E": lambda one: f"{one['expected_mae']:.0f}",
    "E, ratio": lambda one: f"{one['expected_ratio']:.3f}",
    "CVaR, ratio": lambda one: f"{one['cvar_ratio']:.3f}",
}


def interval(values: Sequence[float]) -> str:
    """A gain with its interval, in percent."""
    mean, low, high = (100 * value for value in values)
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def markdown(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Table of one set with a row for each head."""
    lines = [f"| head | {' | '.join(COLUMNS)} |", "|---|" + "---:|" * len(COLUMNS)]
    lines += [
        f"| {name} | {' | '.join(cell(one) for cell in COLUMNS.values())} |" for name, one in results.items()
    ]
    return "\n".join(lines) + "\n"


def main(args: Sequence[str] | None = None) -> int:
    """Trains the heads that are missing in the work folder, and prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder of the public sets")
    parser.add_argument("--encoder", default=ENCODER, help="encoder not trained on these prompts")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--work", type=Path, default=Path("out/distribution_heads"), help="cached results")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    files = prepare(options.data, options.work / "data")
    names = sorted(
        {
            str(name)
            for file in files.training
            for name in pd.read_parquet(file, columns=["model"]).model.dropna()
        }
    )

    def read(file: Path) -> Rows:
        return read_rows({file: 1.0}, names, options.encoder, options.work)

    rows = read_rows(files.training, names, options.encoder, options.work)
    tune, report = read(files.calibration), read(files.report)
    others = {name: read(file) for name, file in files.set_aside.items()}
    shaped = shapes(tune, report, others)
    runs: dict[str, list[dict[str, Array]]] = {name: [] for name in options.heads}
    for seed in range(options.seeds):
        for name in options.heads:
            file = options.work / f"{Path(options.encoder).name}-{name.replace(' ', '-')}-{seed}.npz"
            if not file.is_file():
                since = time.monotonic()
                kind = HEADS[name]
                weights = file.with_suffix(".pt")
                if weights.is_file():
                    network = Network(kind, rows.features.shape[1], names, seed)
                    network.load_state_dict(torch.load(weights, weights_only=True))
                else:
                    network = train(kind, rows, tune, names, seed)
                    torch.save(network.state_dict(), weights)
                np.savez(file, **measure(kind, network, tune, report, others))  # type: ignore[arg-type]
                log.info("%s, seed %d: %.0f s", name, seed, time.monotonic() - since)
            runs[name].append(dict(np.load(file)))
    thinking = {name: reasoning(options.data, name, other.table) for name, other in others.items()}
    sets = {"report": ("report", report.table, np.ones(len(report.table), dtype=bool))}
    for name, other in others.items():
        for title, keep in ((name, ~thinking[name]), (f"{name}, reasoning", thinking[name])):
            if keep.any():
                sets[title] = (name, other.table, keep)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for way, measured in (("shapes", {name: [one] for name, one in shaped.items()}), ("heads", runs)):
        base = next(iter(measured.values()))
        for title, part in sets.items():
            results[f"{way}, {title}"] = {name: summary(one, base, *part) for name, one in measured.items()}
    raw = ("raw", report.table, sets["report"][2])
    results["heads, report, without shift and scale"] = {
        name: summary(one, base, *raw) for name, one in runs.items()
    }
    for title, result in results.items():
        first = next(iter(result.values()))
        sys.stdout.write(
            f"\n{title}: {first['prompts']:,} prompts, {first['rows']:,} rows\n\n{markdown(result)}"
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
