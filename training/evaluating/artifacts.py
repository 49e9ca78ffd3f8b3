"""Artifacts as predictors: each different row is predicted once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from predictors.runtime import ArtifactRuntime, open_runtime
from training.evaluating.predictors import DEFAULT_NU, OpenedPredictor, Prediction, RunOptions, distinct
from training.progress import tracked

#: Rows between two steps of the progress bar.
_ROWS = 512


def open_artifact_predictor(folder: Path, options: RunOptions) -> OpenedPredictor:
    """Verifies and loads an artifact, of an encoder or of trees on lexical features."""
    runtime = open_runtime(folder, threads_per_run=options.threads or 1)
    manifest = runtime.artifact.manifest
    return OpenedPredictor(
        kind="lexical artifact" if manifest.kind == "lexical" else "artifact",
        name={"artifact_id": manifest.artifact_id, "artifact_version": manifest.artifact_version},
        nu=manifest.nu,
        bucket_edges=manifest.bucket_edges,
        served_models=() if manifest.conditioning is None else manifest.served_models,
        data=manifest.training_data,
        conversations=manifest.conversations,
        folder=folder,
        predict=lambda prompts, models, temperatures: _predict(
            runtime, prompts, models, temperatures, options
        ),
    )


def _predict(
    runtime: ArtifactRuntime,
    prompts: Sequence[str],
    served_models: Sequence[str | None],
    temperatures: Sequence[float | None],
    options: RunOptions,
) -> Prediction:
    conditioned = runtime.artifact.manifest.conditioning is not None
    first, of_row = distinct(prompts, served_models, temperatures) if conditioned else distinct(prompts)
    # Rows of similar length share a batch, and a part of the bar takes about as long as any other.
    by_length = np.argsort([len(prompts[row]) for row in first], kind="stable")
    parts = []
    for start in tracked(range(0, len(first), _ROWS), "predict", options.progress):
        rows = first[by_length[start : start + _ROWS]].tolist()
        parts.append(
            runtime.predict(
                [prompts[row] for row in rows],
                [served_models[row] for row in rows] if conditioned else None,
                [temperatures[row] for row in rows] if conditioned else None,
                batch_size=options.batch_size,
            )
        )
    at = np.argsort(by_length)[of_row]

    def joined(name: str) -> NDArray[np.float64] | None:
        if getattr(parts[0], name) is None:
            return None
        return np.concatenate([np.asarray(getattr(part, name), dtype=np.float64) for part in parts])[at]

    nu = joined("nu")
    return Prediction(
        mu=joined("mu"),
        sigma=joined("sigma"),
        nu=DEFAULT_NU if nu is None else _one_if_equal(nu),
        bucket=joined("bucket"),
        regression_tokens=joined("regression_tokens"),
        rank=joined("rank"),
        sigma_within=joined("sigma_within"),
    )


def _one_if_equal(nu: NDArray[np.float64]) -> float | NDArray[np.float64]:
    return float(nu[0]) if (nu == nu[0]).all() else nu
