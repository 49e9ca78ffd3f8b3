"""What the tiny predictor is distilled from: prompts, made-up ones among them, and what the shipped predictor says of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictors.runtime import ArtifactRuntime
from training.corrected_graph import FeatureRuntime
from training.corrections import Requests
from training.progress import tracked

#: Prompts between two steps of the progress bar.
CHUNK = 500

Floats = NDArray[np.float32]


def made_up_prompts(prompts: Sequence[str], weights: NDArray[Any], number: int, seed: int) -> list[str]:
    """Prompts for the teacher alone: beginnings of prompts, beginnings with a piece of another prompt, and prompts with
    words left out. They show which words matter, where real prompts have many in common.

    Args:
        prompts, weights: What they are made of, and how often each is taken [P].
        number: So many are made; some may be empty, which are left out.
    """
    rng = np.random.default_rng(seed)
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


def teacher_predictions(runtime: ArtifactRuntime, prompts: Sequence[str]) -> Floats:
    """mu and sigma in log tokens of an artifact for each prompt and each served model of its manifest [P, M, 2], at an unknown
    temperature.
    """
    artifact = FeatureRuntime(runtime, threads=1)
    names = runtime.artifact.manifest.served_models
    predicted = np.empty((len(prompts), len(names), 2), dtype=np.float32)
    order = np.argsort([len(prompt) for prompt in prompts], kind="stable")
    for start in tracked(range(0, len(order), CHUNK), "teacher", True):
        rows = order[start : start + CHUNK]
        by_name = artifact.predict_as(unknown_requests([prompts[row] for row in rows]), names)
        predicted[rows] = np.stack(
            [np.stack([by_name[name].mu, by_name[name].sigma], axis=-1) for name in names], axis=1
        )
    return predicted


def unknown_requests(prompts: Sequence[str]) -> Requests:
    """Of no known served model, temperature or length."""
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
