"""Training data for distillation: real and synthetic prompts, and the predictions of a teacher for them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from examples.pretrained.prepare import COLUMNS, Prepared, prompt_hash
from predictors.modules.checkpoint import load_checkpoint
from predictors.runtime import ArtifactRuntime
from scheduler_core.errors import InputError
from scheduler_core.files import atomic_file
from training.corrected_graph import FeatureRuntime
from training.corrections import Requests
from training.prediction import has_bfloat16, predict_prompts
from training.progress import tracked

#: Number of prompts per step of the progress bar.
CHUNK = 500
#: Sampling weight of prompts of other sources than CASTILLO, as parts of synthetic prompts.
OTHER_SOURCES = 0.35
#: Number of served models, drawn for each prompt, for which the teacher predicts its length.
ROWS_PER_PROMPT = 8
#: Share of the checkpoint in the mean of two teachers.
CHECKPOINT_SHARE = 0.6
#: The log-t (nu = 3.5) with the smallest `log_t_crps` for two outputs at mu - OFFSET * sigma and mu + OFFSET * sigma has this
#: mu and sigma. From three or more outputs, `train` would also learn sigma_within, which is not the teacher's sigma.
OFFSET = 0.978

Floats = NDArray[np.float32]


def real_prompts(files: Prepared) -> tuple[list[str], list[str]]:
    """Training prompts of CASTILLO, and those of the other sources, without duplicates."""
    order = sorted(files.training, key=lambda file: "" if _is_castillo(file) else file.stem)
    tables = [pd.read_parquet(file, columns=["prompt"]).assign(castillo=_is_castillo(file)) for file in order]
    prompts = pd.concat(tables).drop_duplicates("prompt")
    return prompts.prompt[prompts.castillo].tolist(), prompts.prompt[~prompts.castillo].tolist()


def _is_castillo(file: Path) -> bool:
    return file.stem.startswith("castillo")


def made_up_prompts(castillo: Sequence[str], others: Sequence[str], number: int, seed: int) -> list[str]:
    """Synthetic prompts, which have no true lengths: beginnings of prompts, beginnings joined with a piece of another
    prompt, and prompts with some words removed. They separate the effects of words that occur together in real prompts.

    Args:
        castillo, others: Prompts of CASTILLO, and those of other sources, which are drawn less often (`OTHER_SOURCES`).
        number: Number of synthetic prompts to generate; empty ones are dropped.
    """
    rng = np.random.default_rng(seed)
    prompts = [*castillo, *others]
    weights = np.where(np.arange(len(prompts)) < len(castillo), 1.0, OTHER_SOURCES)
    share = weights / weights.sum()

    def words() -> list[str]:
        return re.findall(r"\s*\S+", prompts[int(rng.choice(len(prompts), p=share))])

    def log_uniform(limit: int) -> int:
        return int(np.exp(rng.uniform(np.log(3), np.log(limit))))

    def one() -> str:
        text, kind = words(), rng.random()
        if kind < 0.35 and len(text) > 4:
            text = text[: log_uniform(min(len(text), 150))]
        elif kind < 0.8:
            other = words()
            begin = min(len(text), int(rng.integers(2, 30)))
            start = int(rng.integers(0, max(1, len(other) // 2)))
            text = text[:begin] + other[start : start + log_uniform(150)]
        else:
            dropped = rng.uniform(0.05, 0.4)
            text = [word for word in text[:200] if rng.random() > dropped]
        return "".join(text).strip()

    return [prompt for prompt in (one() for _ in range(number)) if prompt]


def teacher_predictions(
    runtime: ArtifactRuntime, prompts: Sequence[str], temperatures: Mapping[str, float]
) -> Floats:
    """mu and sigma (log tokens) predicted by an artifact for each prompt and each of its served models [P, M, 2].

    Args:
        temperatures: Served model -> sampling temperature of its predictions; unknown for other served models.
    """
    artifact = FeatureRuntime(runtime, threads=1)
    names = runtime.artifact.manifest.served_models
    predicted = np.empty((len(prompts), len(names), 2), dtype=np.float32)
    order = np.argsort([len(prompt) for prompt in prompts], kind="stable")
    for start in tracked(range(0, len(order), CHUNK), "teacher", True):
        rows = order[start : start + CHUNK]
        by_name = artifact.predict_as(unknown_requests([prompts[row] for row in rows]), names, temperatures)
        predicted[rows] = np.stack(
            [np.stack([by_name[name].mu, by_name[name].sigma], axis=-1) for name in names], axis=1
        )
    return predicted


def typical_temperatures(files: Prepared) -> dict[str, float]:
    """Median sampling temperature of each served model of CASTILLO."""
    table = pd.read_parquet(files.calibration, columns=["model", "temperature"])
    return {str(name): float(value) for name, value in table.groupby("model").temperature.median().items()}


def write_teacher_rows(
    file: Path,
    checkpoint: Path,
    previous: ArtifactRuntime | None,
    prompts: Sequence[str],
    temperatures: Mapping[str, float],
    seed: int,
) -> None:
    """Writes rows for `train`: each prompt with `ROWS_PER_PROMPT` random served models of the checkpoint, and two output
    lengths from which the CRPS objective learns the mu and sigma that the teachers predict.

    Args:
        file: Parquet file to write.
        checkpoint: Folder of the teacher.
        previous: Second teacher with the same served models: mu and sigma are the weighted means of both
            (`CHECKPOINT_SHARE`); None: only those of the checkpoint.
        prompts: Prompts without duplicates.
        temperatures: Served model -> temperature of its predictions; unknown for other served models.
        seed: Seed of the random served models.

    Raises:
        InputError: The checkpoint is not conditioned on the served model, or `previous` has other served models.
    """
    teacher = load_checkpoint(checkpoint)
    conditioning = teacher.model.config.conditioning
    if conditioning is None:
        raise InputError("teacher", str(checkpoint), "a checkpoint that is conditioned on the served model")
    names = np.array(conditioning.served_models, dtype=object)
    if previous is not None and previous.artifact.manifest.served_models != tuple(names):
        raise InputError(
            "initial", str(previous.artifact.path), f"an artifact with the served models of {checkpoint}"
        )
    rng = np.random.default_rng(seed)
    size = min(ROWS_PER_PROMPT, len(names))
    chosen = np.argsort(rng.random((len(prompts), len(names))), axis=1)[:, :size]
    table = pd.DataFrame({
        "dataset": "teacher",
        "prompt_id": np.repeat([prompt_hash(prompt) for prompt in prompts], size),
        "prompt": np.repeat(np.array(prompts, dtype=object), size),
        "model": names[chosen].ravel(),
    })  # fmt: skip
    table["temperature"] = table.model.map(temperatures).astype(float)
    with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16()):
        predicted = predict_prompts(
            teacher.model,
            teacher.tokenizer,
            table.prompt.tolist(),
            table.model.tolist(),
            [None if np.isnan(value) else value for value in table.temperature],
            track=lambda batches: tracked(list(batches), "teacher", True),
        )
    mu, sigma = predicted["mu"], predicted["sigma"]
    if previous is not None:
        all_names = teacher_predictions(previous, prompts, temperatures)
        other_mu, other_sigma = np.take_along_axis(all_names, chosen[..., None], axis=1).reshape(-1, 2).T
        mu = CHECKPOINT_SHARE * mu + (1 - CHECKPOINT_SHARE) * other_mu
        sigma = CHECKPOINT_SHARE * sigma + (1 - CHECKPOINT_SHARE) * other_sigma
    lengths = np.exp(mu[:, None] + OFFSET * sigma[:, None] * [-1.0, 1.0])
    table["output_tokens"] = list(np.maximum(np.rint(lengths), 1).astype(np.int64))
    table["finished"] = list(np.ones(lengths.shape, dtype=bool))
    with atomic_file(file) as temporary:
        table[list(COLUMNS)].to_parquet(temporary, compression="zstd", index=False)


def unknown_requests(prompts: Sequence[str]) -> Requests:
    """Requests with unknown served model, temperature and length."""
    texts, unknown = np.array(prompts, dtype=object), np.full(len(prompts), np.nan)
    return Requests(
        prompts=texts,
        prompt_ids=texts,
        served_models=np.full(len(prompts), "", dtype=object),
        temperatures=unknown,
        lengths=unknown,
        finished=np.zeros(len(prompts), dtype=bool),
        max_tokens=unknown,
    )
