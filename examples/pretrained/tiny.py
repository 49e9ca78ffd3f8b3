"""`python -m examples.pretrained.tiny`: distill the shipped predictor into tailcast-tiny, and compare both."""

from __future__ import annotations

import hashlib
import json
import math
import re
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
from torch import Tensor

from examples.pretrained.amounts import composed_prompts, real_requests
from examples.pretrained.card import scores_table
from examples.pretrained.distillation import (
    conversation_texts,
    made_up_prompts,
    real_prompts,
    teacher_predictions,
    typical_temperatures,
)
from examples.pretrained.prepare import Prepared, prepare
from examples.pretrained.tiny_network import WIDTHS, Floats, Prompts, TinyNetwork, train
from examples.pretrained.unseen import markdown, score_sources
from examples.shell import Shell
from predictors.artifact import write_manifest
from predictors.manifest import Conditions, EncoderCard, Manifest
from predictors.pretrained import FOLDERS, TINY, pin
from predictors.runtime import ArtifactRuntime, open_runtime
from predictors.tiny import EMBEDDING, OPSET, PATTERN, WEIGHTS, TinyModel, embedding_input
from predictors.tokenizer import PromptTokenizer
from scheduler_core.prediction.requested_amount import with_amount
from scheduler_core.shell.command import command
from scheduler_core.shell.files import atomic_file, shared_folder
from scheduler_core.shell.versions import versions_of
from training.network.losses import log_t_nll

NAME = "tailcast-tiny"
MAX_LENGTH = 1024
#: Number of prompts that repeat some words, and the largest number of repetitions.
NUM_REPEATED, MOST_REPETITIONS = 600, 1_000
EMBEDDING_WIDTH = 64
CARD = """# tailcast-tiny

A small predictor distilled from [tailcast-minilm](README.md): hashed n-grams and a small network in numpy, without ONNX Runtime. A warm prediction for 400 characters takes 0.17 ms in the calling thread, 0.20 ms if it asks for an amount, and the first one of a process 10 ms (`python -m benchmarks.predictors.tiny`), fast enough to run inside a scheduler. Its name is `tiny` wherever a predictor can be selected.

Created by `make tiny DATA=FOLDER` (examples/pretrained). Licence: Apache-2.0. Data: the prompts and lengths that tailcast-minilm was trained on, with their licences ([its card](README.md)), {made_up:,} synthetic prompts composed of pieces of them, composed prompts that ask for an amount of output, and predictions of tailcast-minilm for all prompts and {served_models} served models. The prediction for an unknown served model is the mean of these. It reads conversations and amounts as tailcast-minilm does. Sampling temperature is not an input; prompts up to {max_length} tokens (words and signs), the middle of longer ones is dropped. {num_parameters:,} weights, {megabytes:.1f} MB.

It also gives each prompt an embedding of 64 numbers (principal components of its token vectors and its first hidden layer over the training prompts), with which [online calibration](../../docs/online-calibration.md) finds similar past requests, whatever the predictor.

Its features are words and pairs of neighboring words. On prompts unlike the training data it is less accurate than tailcast-minilm, and on some sources it cannot rank requests (last table).

## In distribution

CASTILLO, prompts that were used neither for training nor for calibration of either predictor:

{scores}
## Without the name of the served model, and unseen sources

{unseen}"""


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
    amounts: int = 8_000
    """Number of composed prompts that ask for an amount of output, also labelled by the teacher."""
    epochs: int = 5
    """Number of passes over all prompts."""
    seed: int = 0
    """Seed of the synthetic prompts, the initial weights and the order of prompts."""
    report: bool = True
    """Compare both predictors on the report prompts, and write the card."""
    install: bool = True
    """Replace the artifact in predictors/pretrained with the new one."""


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


def repeated_prompts(prompts: Sequence[str], number: int, seed: int) -> list[str]:
    """Prompts that repeat one to four words of others. A sum of equal vectors is much longer than that of as many words, so
    without them a network of sums extrapolates far from all lengths."""
    rng = np.random.default_rng(seed)
    repeated = []
    for each in rng.choice(len(prompts), number):
        words = re.findall(r"\s*\S+", prompts[each])
        start, count = int(rng.integers(len(words))), int(rng.integers(1, 5))
        times = int(np.exp(rng.uniform(np.log(8), np.log(MOST_REPETITIONS))))
        repeated.append(" ".join(["".join(words[start : start + count]).strip()] * times))
    return repeated


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
    made_up += repeated_prompts([*castillo, *others], NUM_REPEATED, config.seed)
    form = teacher.artifact.manifest.form
    composed = composed_prompts(real_requests(files), config.amounts, np.random.default_rng(config.seed))
    amounts = [form.text(prompt.messages) for prompt in composed]
    texts = list(dict.fromkeys([*castillo, *others, *conversation_texts([*files.training], form), *amounts]))
    prompts = list(dict.fromkeys([*texts, *made_up]))
    targets = stored_targets(out / "tiny_targets.npz", teacher, prompts, typical_temperatures(files))
    folder = out / NAME
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    make_tokenizer([with_amount(prompt) for prompt in texts]).save(str(folder / "tokenizer.json"))
    tokenizer = PromptTokenizer(
        folder / "tokenizer.json", max_length=MAX_LENGTH, truncation_side="middle", amounts=True
    )
    names, nu = teacher.artifact.manifest.served_models, teacher.artifact.manifest.nu or 3.5
    data = Prompts.of(prompts, tokenizer, targets, files.training, names, form)
    network = train(data, tokenizer.vocabulary_size, config.epochs, config.seed)
    content = network.arrays()
    np.savez_compressed(folder / WEIGHTS, **content)  # type: ignore[arg-type]
    held_out = Prompts.of(
        list(dict.fromkeys(pd.read_parquet(files.calibration).prompt)),
        tokenizer,
        None,
        {files.calibration: 1.0},
        names,
        form,
    )
    content = calibrated(content, TinyModel(folder / WEIGHTS), held_out, nu)
    content |= embedding(TinyModel(folder / WEIGHTS), data.tokens[: len(texts)])
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


def embedding(model: TinyModel, tokens: Sequence[NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Arrays of the embedding: a projection to the first `EMBEDDING_WIDTH` principal components over prompts (their token
    ids), in which similar prompts stay similar."""
    parts = [model.inputs_of_embedding(ids) for ids in tokens if len(ids)]
    center = np.mean([hidden for _, hidden in parts], axis=0)
    inputs = np.array([embedding_input(*part, center) for part in parts])
    mean = inputs.mean(axis=0)
    _, _, components = np.linalg.svd(inputs - mean, full_matrices=False)
    weight = components[:EMBEDDING_WIDTH].T
    arrays = (center, weight, -mean @ weight)
    return {name: values.astype(np.float16) for name, values in zip(EMBEDDING, arrays, strict=True)}


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
        conversations=source.conversations,
        part_tokens=source.part_tokens,
        amounts=True,
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
        "evaluate", "pretrained", "--data", files.report, "--json", target, "--overwrite", "true",
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
