"""Heads for length distributions, trained on features of a frozen encoder."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pandas as pd
import torch
from scipy.special import stdtr, stdtrit
from scipy.stats import norm
from torch import Tensor, nn

from benchmarks.predictors.grid_scores import GRID, Array
from benchmarks.shared.pooled import pooled
from predictors.heads import Tower
from predictors.modules.config import Conditioning
from predictors.modules.predictor import ConditionFeatures
from predictors.modules.towers import ConditionedTower
from training.network.data import SampleLengths
from training.network.student_t import log_density, log_survival

log = logging.getLogger(__name__)

BATCH, EPOCHS, RATE, WARMUP, ROWS_PER_PROMPT = 256, 4, 5e-4, 0.05, 4
#: Fraction of training rows whose served model is hidden, as in examples/pretrained/minilm.yaml.
HIDDEN = 0.2
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


def served_models(files: Iterable[Path]) -> list[str]:
    """Names of the served models in prepared files."""
    tables = (pd.read_parquet(file, columns=["model"]) for file in files)
    return sorted({str(name) for table in tables for name in table.model.dropna()})


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
