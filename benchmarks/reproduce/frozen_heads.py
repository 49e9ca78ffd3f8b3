"""Heads on features of a frozen encoder, trained for the studies of TIE."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

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


class TrainableHead(Protocol):
    """Interface of the heads that `train` accepts."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of outputs of each tower."""

    def loss(self, outputs: Sequence[Tensor], samples: SampleLengths) -> Tensor:
        """Loss of each row [R]."""


@dataclass(frozen=True)
class LogT:
    """A log-t distribution, as the shipped head's; nu is predicted if it is None."""

    nu: float | None = 3.5

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of outputs of each tower: mu, raw sigma and, if it is predicted, raw nu."""
        return (1, 1) if self.nu else (1, 1, 1)

    def parameters(self, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """mu, sigma, nu [R, 1]."""
        mu = outputs[0]
        sigma = nn.functional.softplus(outputs[1] + 0.5) + 1e-3
        nu = torch.full_like(mu, self.nu) if self.nu else torch.exp(4.6 * torch.sigmoid(outputs[-1] - 1.0))
        return mu.double(), sigma.double(), nu.double()

    def loss(self, outputs: Sequence[Tensor], samples: SampleLengths) -> Tensor:
        """Negative log-likelihood of ln tokens [R]."""
        mu, sigma, nu = self.parameters(outputs)
        t = (torch.log(samples.tokens.double()) - mu) / sigma
        likelihood = log_density(t, nu) - torch.log(sigma)
        censored = samples.present & ~samples.finished
        if bool(censored.any()):
            tail = log_survival(t[censored], nu.expand_as(t)[censored])
            likelihood = likelihood.masked_scatter(censored, tail)
        return -samples.mean(likelihood)


#: Standard deviation of Student's t with 3.5 degrees of freedom.
_T_DEVIATION = math.sqrt(3.5 / 1.5)


@dataclass(frozen=True)
class FittedLogT(LogT):
    """TIE's predictor: mu and sigma of the outputs of a prompt, without the predictor's own error, by squared errors (section
    3.2). Targets are the mean and standard deviation of ln tokens, where the paper has a fit by maximum likelihood."""

    def loss(self, outputs: Sequence[Tensor], samples: SampleLengths) -> Tensor:
        """Squared error of mu, and 3 times that of ln(1 + sigma) [R]."""
        mu, sigma, _ = (part[:, 0] for part in self.parameters(outputs))
        logs = torch.log(samples.tokens.double())
        mean = samples.mean(logs)
        scale = samples.mean((logs - mean[:, None]) ** 2).sqrt() / _T_DEVIATION
        return (mu - mean) ** 2 + 3.0 * (torch.log1p(sigma) - torch.log1p(scale)) ** 2


#: The families of TIE's table 4.
HEADS = {"log-t, nu 3.5": LogT(), "log-t, free nu": LogT(nu=None), "log-normal": LogT(nu=1_000.0)}


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


def one_output(rows: Rows) -> Rows:
    """The rows with their first output only."""
    samples = rows.samples
    first = SampleLengths(
        samples.tokens[:, :1], samples.finished[:, :1], samples.present[:, :1], samples.max_tokens
    )
    return replace(rows, samples=first)


def few_prompts(rows: Rows, factor: int, seed: int) -> Rows:
    """The rows of a random `factor`-th of the prompts."""
    chosen = np.random.default_rng(seed).permutation(int(rows.prompt.max()) + 1)
    prompts = torch.from_numpy(chosen[: len(chosen) // factor])
    at = torch.isin(rows.prompt, prompts).nonzero()[:, 0]
    return replace(
        rows,
        prompt=rows.prompt[at],
        model=rows.model[at],
        temperature=rows.temperature[at],
        samples=SampleLengths(*(part[at] for part in rows.samples)),
        weight=rows.weight[at],
        table=rows.table.iloc[at.numpy()],
    )


def train(
    kind: TrainableHead, rows: Rows, tune: Rows, names: Sequence[str], seed: int, epochs: int = EPOCHS
) -> Network:
    """Trains a network and returns the epoch with the lowest loss on the tuning prompts."""
    torch.manual_seed(seed)
    network = Network(kind, rows.features.shape[1], names, seed)
    network.location.fill_(float(rows.samples.mean(torch.log(rows.samples.tokens)).mean()))
    optimizer = torch.optim.AdamW((value for value in network.parameters() if value.requires_grad), lr=RATE)
    total = epochs * math.ceil(len(drawn_rows(rows)) / BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (WARMUP * total), (total - step) / (total * (1 - WARMUP)))
    )
    best, weights = math.inf, {}
    for epoch in range(epochs):
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


def outputs_of(network: Network, rows: Rows) -> list[Tensor]:
    """Outputs of each tower for all rows [R, n]."""
    network.eval()
    with torch.no_grad():
        parts = [
            network(rows.features[rows.prompt[part]], rows.model[part], rows.temperature[part])
            for part in torch.split(torch.arange(len(rows.prompt)), 2048)
        ]
    return [torch.cat(part) for part in zip(*parts, strict=True)]
