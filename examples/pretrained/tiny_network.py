"""The network of tailcast-tiny in torch: training on the predictions of a teacher and on true lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from predictors.tiny import LAYERS, TABLES, hashed_pairs, hashed_starts, length_features
from predictors.tokenizer import PromptTokenizer
from scheduler_core.prediction.prompt_text import LAST_TEXT, PromptForm
from scheduler_core.shell.progress import tracked
from training.fitting.samples import with_conversations
from training.network.data import SampleLengths
from training.network.losses import log_t_nll

#: Rows of the tables of pairs and of starts; widths of the tables of tokens, pairs and starts; width of the hidden layers.
NUM_PAIRS, NUM_STARTS, WIDTHS, HIDDEN = 2**15, 2**13, (64, 32, 32), 256

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Prompts:
    """P prompts with predictions of the teacher, and R rows of true lengths for some of them.

    Attributes:
        tokens: Token ids of each prompt.
        targets: The teacher's mu and ln sigma for each served model [P, M, 2]; None: not computed.
        row_prompt, row_model: Index of each row's prompt, in ascending order, and of its served model [R].
        samples: True lengths of the rows.
        weight: Weight of each row in the loss [R].
    """

    tokens: list[NDArray[np.int64]]
    targets: Tensor | None
    row_prompt: NDArray[np.int64]
    row_model: NDArray[np.int64]
    samples: SampleLengths
    weight: Tensor

    @classmethod
    def of(
        cls,
        prompts: Sequence[str],
        tokenizer: PromptTokenizer,
        targets: Floats | None,
        files: Mapping[Path, float],
        served_models: Sequence[str],
        form: PromptForm = LAST_TEXT,
    ) -> Prompts:
        """Adds the rows of weighted files for `served_models`, whose text is of this form; `targets` are mu and sigma."""
        tables = {file: with_conversations(pq.read_table(file), file, form).to_pandas() for file in files}
        rows = pd.concat([table.assign(weight=files[file]) for file, table in tables.items()])
        positions = {prompt: number for number, prompt in reversed([*enumerate(prompts)])}
        rows["prompt"] = rows.prompt.map(positions)
        rows["model"] = rows.model.map({name: number for number, name in enumerate(served_models)})
        rows = rows.dropna(subset=["prompt", "model"]).sort_values("prompt", kind="stable")
        counts = rows.output_tokens.map(len).to_numpy()
        present = np.arange(counts.max()) < counts[:, None]
        tokens, finished = np.ones(present.shape, np.float32), np.ones(present.shape, bool)
        tokens[present] = np.concatenate(rows.output_tokens.to_numpy())
        finished[present] = np.concatenate(rows.finished.to_numpy())
        return cls(
            tokens=[tokenized.ids for tokenized in tokenizer(prompts)],
            targets=None
            if targets is None
            else torch.from_numpy(np.stack([targets[..., 0], np.log(targets[..., 1])], axis=-1)),
            row_prompt=rows.prompt.to_numpy(np.int64),
            row_model=rows.model.to_numpy(np.int64),
            samples=SampleLengths(
                *map(torch.from_numpy, (tokens, finished, present, np.full(len(rows), np.inf, np.float32)))
            ),
            weight=torch.tensor(rows.weight.to_numpy(np.float32)),
        )


class TinyNetwork(nn.Module):
    """`predictors.tiny.TinyModel` in torch, with normalized inputs and dropout; for all served models at once.

    Args:
        num_tokens: Size of the vocabulary.
        mean: Mean of the targets mu and ln sigma over the prompts [M, 2].
    """

    def __init__(self, num_tokens: int, mean: Tensor) -> None:
        super().__init__()
        sizes = zip((num_tokens, NUM_PAIRS, NUM_STARTS), WIDTHS, strict=True)
        self.tables = nn.ModuleList(nn.EmbeddingBag(*size, mode="sum", sparse=True) for size in sizes)
        # Small initial values, so that pairs and starts that do not occur in training have almost no effect.
        for table, scale in zip(self.tables, (0.1, 1e-4, 1e-4), strict=True):
            nn.init.normal_(table.weight, 0.0, scale)  # type: ignore[arg-type]
        width = sum(WIDTHS) + 3
        self.norm = nn.BatchNorm1d(width)
        self.first, self.second = nn.Linear(width, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.output = nn.Linear(HIDDEN, mean.numel())
        self.dropout = nn.Dropout(0.1)
        with torch.no_grad():
            self.output.weight.mul_(0.3)
            self.output.bias.copy_(mean.flatten())

    def forward(self, bags: Sequence[tuple[Tensor, Tensor, Tensor]], num_tokens: Tensor) -> Tensor:
        """mu and ln sigma for each prompt and served model [B, M, 2].

        Args:
            bags: For each table: row numbers of all prompts, offset of each prompt [B], and factor of its sum [B].
            num_tokens: Number of tokens of each prompt [B].
        """
        sums = [
            table(rows, starts) * factor.unsqueeze(1)
            for table, (rows, starts, factor) in zip(self.tables, bags, strict=True)
        ]
        lengths = np.stack(length_features(num_tokens.numpy()), axis=1)
        features = self.dropout(self.norm(torch.cat([*sums, torch.from_numpy(lengths)], dim=1)))
        for layer in (self.first, self.second):
            features = self.dropout(torch.relu(layer(features)))
        outputs: Tensor = self.output(features)
        return outputs.view(len(outputs), -1, 2)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Content of the weights file: int8 tables with a scale for each row, normalization folded into the first layer, and
        the mean of all served models as number 0."""
        content: dict[str, NDArray[Any]] = {}
        for name, table in zip(TABLES, self.tables, strict=True):
            vectors = table.get_parameter("weight").detach().numpy()
            scale = np.abs(vectors).max(axis=1, keepdims=True) / 127
            content |= {name: np.round(vectors / scale).astype(np.int8), f"{name}_scale": scale}
        first, second = self.first, self.second
        mean, variance = self.norm.get_buffer("running_mean"), self.norm.get_buffer("running_var")
        gain = self.norm.weight / (variance + self.norm.eps) ** 0.5
        shift = self.norm.bias - mean * gain
        outputs = self.output.weight.view(-1, 2, HIDDEN), self.output.bias.view(-1, 2)
        layers = (
            ((first.weight * gain).T, first.bias + first.weight @ shift),
            (second.weight.T, second.bias),
            tuple(torch.cat([part.mean(0, keepdim=True), part]) for part in outputs),
        )
        for name, (weight, bias) in zip(LAYERS, layers, strict=True):
            content[f"{name}_weight"] = weight.detach().numpy().astype(np.float16)
            content[f"{name}_bias"] = bias.detach().numpy().astype(np.float32)
        return content


def bags_of(
    prompts: Sequence[NDArray[np.int64]], dropped: NDArray[Any] | None = None, seed: int = 0
) -> tuple[list[tuple[Tensor, Tensor, Tensor]], Tensor]:
    """Arguments of the network for B prompts.

    Args:
        prompts: Token ids of each prompt.
        dropped: Fraction of tokens and pairs of each prompt that are dropped at random [B]; None: none.
        seed: Seed of the dropping.
    """
    rng = np.random.default_rng(seed)
    columns: list[list[NDArray[Any]]] = [
        list(prompts),
        [hashed_pairs(ids, NUM_PAIRS) for ids in prompts],
    ]
    if dropped is not None:
        columns = [
            [rows[rng.random(len(rows)) >= part] for rows, part in zip(column, dropped, strict=True)]
            for column in columns
        ]
    starts = [np.array(hashed_starts(ids, NUM_STARTS)) for ids in prompts]
    bags = []
    for column, power in (*((column, -0.5) for column in columns), (starts, 0.0)):
        counts = np.array([len(rows) for rows in column])
        bags.append((
            torch.from_numpy(np.concatenate(column).astype(np.int64)),
            torch.from_numpy(np.concatenate([[0], np.cumsum(counts)[:-1]])),
            torch.from_numpy(np.maximum(counts, 1).astype(np.float32) ** power),
        ))  # fmt: skip
    return bags, torch.tensor([len(ids) for ids in prompts], dtype=torch.float32)


def train(
    data: Prompts,
    num_tokens: int,
    epochs: int,
    seed: int,
    *,
    num_models: int = 1,
    batch_size: int = 64,
) -> TinyNetwork:
    """Trains a network on the teacher's mu and ln sigma, and on the likelihood of the true lengths; without a teacher, for
    `num_models` served models, only on the latter."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    targets = data.targets
    if targets is None:
        mean = data.samples.mean(torch.log(data.samples.tokens)).mean()
        start = torch.stack([mean, torch.tensor(-0.5)]).expand(num_models, 2)
    else:
        start = targets.mean(0)
    network = TinyNetwork(num_tokens, start)
    tables = {id(table.weight) for table in network.tables}
    optimizers: tuple[torch.optim.Optimizer, ...] = (
        torch.optim.SparseAdam([p for p in network.parameters() if id(p) in tables], lr=4e-3),
        torch.optim.AdamW([p for p in network.parameters() if id(p) not in tables], lr=2e-3),
    )
    order = np.concatenate([rng.permutation(len(data.tokens)) for _ in range(epochs)])
    num_steps = max(len(order) // batch_size, 1)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / (0.1 * num_steps), 1.0) * max(1 - step / num_steps, 0.01)
        )
        for optimizer in optimizers
    ]
    begins = np.searchsorted(data.row_prompt, np.arange(len(data.tokens) + 1))
    nu = torch.tensor(3.5)
    for step in tracked(range(num_steps), "train", True):
        batch = order[step * batch_size : (step + 1) * batch_size]
        outputs = network(
            *bags_of([data.tokens[prompt] for prompt in batch], rng.uniform(0, 0.6, len(batch)), int(step))
        )
        loss = torch.zeros(())
        if targets is not None:
            loss = ((outputs - targets[batch]) ** 2 * torch.tensor([1.0, 0.5])).sum(-1).mean()
        rows = np.concatenate([np.arange(begins[prompt], begins[prompt + 1]) for prompt in batch])
        if len(rows):
            of_row = np.repeat(np.arange(len(batch)), begins[batch + 1] - begins[batch])
            mu, log_sigma = outputs[of_row, data.row_model[rows]].unbind(-1)
            samples = SampleLengths(*(values[rows] for values in data.samples))
            loss = loss + 0.3 * (data.weight[rows] * log_t_nll(mu, log_sigma.exp(), nu, samples)).mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    return network.eval()
