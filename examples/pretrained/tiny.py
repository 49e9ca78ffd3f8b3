"""`python -m examples.pretrained.tiny`: distill the shipped predictor into tailcast-tiny, and compare both."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from examples.pretrained.card import scores_table
from examples.pretrained.distillation import (
    made_up_prompts,
    real_prompts,
    teacher_predictions,
    typical_temperatures,
)
from examples.pretrained.prepare import Prepared, prepare
from examples.pretrained.unseen import markdown, score_sources
from examples.shell import Shell
from predictors.artifact import write_manifest
from predictors.manifest import Conditions, EncoderCard, Manifest
from predictors.pretrained import FOLDERS, TINY, pin
from predictors.runtime import ArtifactRuntime, open_runtime
from predictors.tiny import (
    LAYERS,
    OPSET,
    TABLES,
    WEIGHTS,
    TinyModel,
    hashed_pairs,
    hashed_starts,
    length_features,
)
from predictors.tokenizer import PromptTokenizer
from scheduler_core.command import command
from scheduler_core.files import atomic_file, shared_folder
from training.data import SampleLengths
from training.losses import log_t_nll
from training.progress import tracked
from training.versions import versions_of

NAME = "tailcast-tiny"
#: Tokens: words without digits, numbers, line breaks, and every other sign or CJK character by itself.
PATTERN = r"[^\W\d぀-ヿ一-鿿가-힣]+|\d+|\n+|[^\w\s]|\w"
MAX_LENGTH = 1024
#: Rows of the tables of pairs and of starts; widths of the tables of tokens, pairs and starts; width of the hidden layers.
NUM_PAIRS, NUM_STARTS, WIDTHS, HIDDEN = 2**15, 2**13, (64, 32, 32), 256
CARD = """# tailcast-tiny

A small predictor distilled from [tailcast-minilm](README.md): hashed n-grams and a small network in numpy, without ONNX Runtime. A prediction takes less than 100 microseconds for a prompt of 400 characters with warm caches ([figures](../../docs/benchmarks.md#tiny-predictor)), fast enough to run inside a scheduler. Its name is `tiny` wherever a predictor can be selected.

Created by `make tiny DATA=FOLDER` (examples/pretrained/tiny.py). Licence: Apache-2.0. Data: the prompts and lengths that tailcast-minilm was trained on, with their licences ([its card](README.md)), {made_up:,} synthetic prompts composed of pieces of them, and predictions of tailcast-minilm for all prompts and {served_models} served models. The prediction for an unknown served model is the mean of these. Sampling temperature is not an input; prompts up to {max_length} tokens (words and signs), the middle of longer ones is dropped. {num_parameters:,} weights, {megabytes:.1f} MB.

Its features are words and pairs of neighboring words. On prompts unlike the training data it is less accurate than tailcast-minilm, and on some sources it cannot rank requests (last table).

## In distribution

CASTILLO, prompts that were used neither for training nor for calibration of either predictor:

{scores}
## Without the name of the served model, and unseen sources

{unseen}"""

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """Distill, calibrate and evaluate the tiny predictor that is shipped with tailcast."""

    INPUTS = ("data",)

    data: str
    """Folder of public data sets of output lengths, as for `python -m examples.pretrained`."""
    out: str = "out/pretrained"
    """Folder for all results, including the cached predictions of the teacher."""
    teacher: str = "pretrained"
    """Artifact folder of the teacher, or pretrained."""
    made_up: int = 16_000
    """Number of synthetic prompts, composed of pieces of others, that only the teacher labels."""
    epochs: int = 5
    """Number of passes over all prompts."""
    seed: int = 0
    """Seed of the synthetic prompts, the initial weights and the order of prompts."""
    report: bool = True
    """Compare both predictors on the report prompts, and write the card."""
    install: bool = True
    """Replace the artifact in predictors/pretrained with the new one."""


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
    ) -> Prompts:
        """Adds the rows of weighted files for `served_models`; `targets` are mu and sigma."""
        rows = pd.concat([pd.read_parquet(file).assign(weight=weight) for file, weight in files.items()])
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


def make_tokenizer(prompts: Sequence[str]) -> Tokenizer:
    """Creates a tokenizer of all words and signs that occur in at least two prompts; all others are token 0."""
    split = pre_tokenizers.Split(Regex(PATTERN), "removed", invert=True)
    counts = Counter(
        word for prompt in prompts for word in {word for word, _ in split.pre_tokenize_str(prompt)}
    )
    words = ["[UNK]", *sorted(word for word, count in counts.items() if count >= 2 and word != "[UNK]")]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = split
    return tokenizer


def calibrated(
    content: Mapping[str, NDArray[Any]], model: TinyModel, data: Prompts, nu: float
) -> dict[str, NDArray[Any]]:
    """Calibrates the weights: shifts mu and ln sigma to maximize the likelihood of true lengths, once for all known served
    models together, and once for the unknown one."""
    bias = content["output_bias"].copy()
    for part, numbers in ((slice(1, None), data.row_model + 1), (slice(0, 1), 0 * data.row_model)):
        rows = zip(data.row_prompt, numbers, strict=True)
        mu, sigma = torch.tensor([model(data.tokens[prompt], int(number)) for prompt, number in rows]).T

        def loss(change: NDArray[Any], mu: Tensor = mu, sigma: Tensor = sigma) -> float:
            shift, scale = change.tolist()
            return float(
                log_t_nll(mu + shift, sigma * math.exp(scale), torch.tensor(nu), data.samples).mean()
            )

        bias[part] += minimize(loss, (0.0, 0.0), method="Nelder-Mead").x
    return {**content, "output_bias": bias}


def tiny(config: TinyConfig) -> None:
    """Runs all steps; cached predictions of the teacher are reused."""
    out = shared_folder(config.out, "pretrained")
    files = prepare(Path(config.data), out / "data")
    teacher = open_runtime(config.teacher, provider="cpu")
    castillo, others = real_prompts(files)
    made_up = made_up_prompts(castillo, others, config.made_up, config.seed)
    prompts = [*castillo, *others, *made_up]
    targets = stored_targets(out / "tiny_targets.npz", teacher, prompts, typical_temperatures(files))
    folder = out / NAME
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    make_tokenizer(castillo + others).save(str(folder / "tokenizer.json"))
    tokenizer = PromptTokenizer(folder / "tokenizer.json", max_length=MAX_LENGTH, truncation_side="middle")
    names, nu = teacher.artifact.manifest.served_models, teacher.artifact.manifest.nu or 3.5
    data = Prompts.of(prompts, tokenizer, targets, files.training, names)
    network = train(data, tokenizer.vocabulary_size, config.epochs, config.seed)
    content = network.arrays()
    np.savez_compressed(folder / WEIGHTS, **content)  # type: ignore[arg-type]
    held_out = Prompts.of(
        list(dict.fromkeys(pd.read_parquet(files.calibration).prompt)),
        tokenizer,
        None,
        {files.calibration: 1.0},
        names,
    )
    content = calibrated(content, TinyModel(folder / WEIGHTS), held_out, nu)
    np.savez_compressed(folder / WEIGHTS, **content)  # type: ignore[arg-type]
    write_manifest(folder, manifest_of(network, teacher))
    if config.report:
        (out / "TINY.md").write_text(report(Shell(out / "logs"), out, folder, files, len(made_up)))
    if config.install:
        target = FOLDERS[TINY]
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)
        if config.report:
            shutil.copy(out / "TINY.md", target.parent)
        pin(target)


def stored_targets(
    file: Path, teacher: ArtifactRuntime, prompts: Sequence[str], temperatures: Mapping[str, float]
) -> Floats:
    """Predictions of the teacher [P, M, 2], cached in a file by teacher version, prompts and temperatures."""
    parts = [*prompts, json.dumps(dict(temperatures), sort_keys=True)]
    key = f"{teacher.artifact.manifest.artifact_version} {sha256_text(parts)}"
    if file.is_file() and str((stored := np.load(file))["key"]) == key:
        targets: Floats = stored["targets"]
        return targets
    targets = teacher_predictions(teacher, prompts, temperatures)
    with atomic_file(file) as temporary, open(temporary, "wb") as stream:
        np.savez(stream, key=key, targets=targets)
    return targets


def sha256_text(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode(errors="surrogatepass")).hexdigest()


def manifest_of(network: TinyNetwork, teacher: ArtifactRuntime) -> Manifest:
    """Manifest without the fields that are derived from the files."""
    source = teacher.artifact.manifest
    return Manifest.model_construct(
        artifact_id=NAME,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        heads=("length",),
        encoder=EncoderCard(
            architecture="hashed n-grams",
            source=f"{source.artifact_id} {source.artifact_version}",
            num_parameters=sum(weight.numel() for weight in network.tables.parameters()),
            num_layers=None,
            width=sum(WIDTHS),
        ),
        max_length=MAX_LENGTH,
        truncation_side="middle",
        pad_token_id=0,
        opset=OPSET,
        precision="int8",
        nu=source.nu,
        served_models=source.served_models,
        conditioning=Conditions(unknown_models=True, temperature=False),
        training_data=source.training_data,
        versions=versions_of(("numpy", "tokenizers", "torch")),
        license="Apache-2.0",
    )


def report(shell: Shell, out: Path, folder: Path, files: Prepared, made_up: int) -> str:
    """The card, with an evaluation of both predictors on the report prompts, which were not used for any selection."""
    target = out / "tiny_evaluation.json"
    shell.run("tiny", [
        "evaluate", "pretrained", "--data", files.report, "--json", target,
        "--compare+", f"{NAME}={folder}", "--progress", "false",
    ])  # fmt: skip
    evaluation = json.loads(target.read_text(encoding="utf-8"))
    scores = {"tailcast-minilm": evaluation["model"], **evaluation["compared"]}
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return CARD.format(
        made_up=made_up,
        served_models=len(manifest["served_models"]),
        max_length=MAX_LENGTH,
        num_parameters=manifest["encoder"]["num_parameters"],
        megabytes=sum(file.stat().st_size for file in folder.iterdir()) / 1e6,
        scores=scores_table("predictor", scores),
        unseen=markdown(score_sources(folder, {"report": files.report, **files.set_aside})),
    )


main = command("tiny", TinyConfig, tiny, extra="dev")


if __name__ == "__main__":
    sys.exit(main())
