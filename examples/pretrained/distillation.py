"""Training data for distillation: real and synthetic prompts, and the predictions of a teacher for them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from scipy import stats

from examples.pretrained.prepare import COLUMNS, OPTIONS, Prepared, prompt_hash
from predictors.modules.checkpoint import load_checkpoint
from predictors.runtime import ArtifactRuntime
from scheduler_core.errors import InputError
from scheduler_core.prediction.prompt_text import PromptForm
from scheduler_core.shell.files import atomic_file
from scheduler_core.shell.progress import tracked
from training.evaluating.split_runtime import SplitRuntime
from training.fitting.samples import with_conversations
from training.network.inference import has_bfloat16, predict_prompts

#: Sampling weight of prompts of other sources than CASTILLO, as parts of synthetic prompts.
OTHER_SOURCES = 0.35
#: Number of served models, drawn for each prompt, for which the teacher predicts its length.
ROWS_PER_PROMPT = 8
#: Share of the checkpoint in the mean of two teachers.
CHECKPOINT_SHARE = 0.6
#: Number of levels that the pairs of quantiles are drawn from.
NUM_LEVELS = 16

Floats = NDArray[np.float32]


def version_of(texts: Sequence[object], temperatures: Mapping[str, float]) -> str:
    """Hash of prompts and temperatures, as part of the names of files that were made from them."""
    parts = [*map(str, texts), json.dumps(dict(temperatures), sort_keys=True)]
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()[:8]


def real_prompts(files: Prepared) -> tuple[list[str], list[str]]:
    """Training prompts of CASTILLO, and those of the other sources, without duplicates."""
    training = [file for file in files.training if file.stem != OPTIONS]
    order = sorted(training, key=lambda file: "" if _is_castillo(file) else file.stem)
    tables = [pd.read_parquet(file, columns=["prompt"]).assign(castillo=_is_castillo(file)) for file in order]
    prompts = pd.concat(tables).drop_duplicates("prompt")
    return prompts.prompt[prompts.castillo].tolist(), prompts.prompt[~prompts.castillo].tolist()


def conversation_texts(files: Sequence[Path], form: PromptForm) -> list[str]:
    """Texts of this form of the rows with messages, and the prompts of the other rows, without duplicates."""
    tables = [with_conversations(pq.read_table(file), file, form) for file in files]
    return list(dict.fromkeys(text for table in tables for text in table["prompt"].to_pylist()))


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
    names = runtime.artifact.manifest.served_models
    of_model = np.array([[temperatures.get(name, np.nan)] for name in names])
    by_name = SplitRuntime(runtime).predict_as(prompts, names, of_model, progress=True)
    parameters = [[each.arrays()[key] for key in ("mu", "sigma")] for each in by_name.values()]
    return np.array(parameters, dtype=np.float32).transpose(2, 0, 1)


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
    lengths drawn from the teachers' distribution.

    Args:
        file: Parquet file to write.
        checkpoint: Folder of the teacher.
        previous: Second teacher with the same served models: mu and sigma are the weighted means of both
            (`CHECKPOINT_SHARE`); None: only those of the checkpoint.
        prompts: Prompts without duplicates.
        temperatures: Served model -> temperature of its predictions; unknown for other served models.
        seed: Seed of the random served models and lengths.

    Raises:
        InputError: The checkpoint is not conditioned on the served model, or `previous` has other served models.
    """
    teacher = load_checkpoint(checkpoint)
    conditioning, head = teacher.model.config.conditioning, teacher.model.config.heads.length
    if conditioning is None or head is None:
        allowed = "a checkpoint with a length head that is conditioned on the served model"
        raise InputError("teacher", str(checkpoint), allowed)
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
        "messages": None,
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
    lengths = pairs_of_lengths(mu, sigma, head.nu, rng)
    table["output_tokens"] = list(lengths)
    table["finished"] = list(np.ones(lengths.shape, dtype=bool))
    with atomic_file(file) as temporary:
        table[list(COLUMNS)].to_parquet(temporary, compression="zstd", index=False)


def pairs_of_lengths(
    mu: NDArray[np.float64], sigma: NDArray[np.float64], nu: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Two output lengths for each of N log-t distributions, in tokens [N, 2]: the quantiles at a random level and at one
    minus it. Proper losses of such pairs are smallest at the distribution itself. Two, because from three or more `train`
    would also learn sigma_within, which is not the teacher's sigma."""
    levels = 0.5 + 0.5 * (rng.integers(0, NUM_LEVELS, len(mu)) + 0.5) / NUM_LEVELS
    distance = sigma * stats.t.ppf(levels, nu)
    lengths = np.exp(mu[:, None] + distance[:, None] * [-1.0, 1.0])
    return np.asarray(np.maximum(np.rint(lengths), 1).astype(np.int64))
