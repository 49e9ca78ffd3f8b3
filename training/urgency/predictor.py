"""Urgency probabilities out of whatever holds an urgency head: a checkpoint folder or an exported artifact."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from scheduler_core.files import existing_file, write_json
from scheduler_core.urgency import LEVELS
from training.urgency.abstention import AbstainThreshold
from training.urgency.adversarial import Predict

MANIFEST = "manifest.json"
TRAINING = "training.json"
FIELD = "predictor"


def open_urgency(path: str | Path, *, accelerator: str = "auto", batch_size: int = 32) -> Predict:
    """Opens a predictor with an urgency head over the five levels.

    Args:
        path: Folder of a checkpoint (as `train` writes it) or of an artifact (as `export-onnx` writes it).
        accelerator: auto, cpu or cuda.
        batch_size: Texts per model call.

    Returns:
        N texts -> probabilities [N, 5], the most urgent level first.

    Raises:
        InputError: There is no such folder, or its predictor has no urgency head or other levels.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(FIELD, str(path), "the folder of a checkpoint or of an artifact")
    if batch_size < 1:
        raise InputError("batch_size", batch_size, "a whole number of at least 1")
    is_artifact = (folder / MANIFEST).is_file()
    return (_artifact if is_artifact else _checkpoint)(folder, accelerator, batch_size)


def save_threshold(path: str | Path, found: AbstainThreshold) -> None:
    """Writes the abstain threshold into a checkpoint's training.json, as `urgency.abstain_threshold`.

    If none could be certified, 1 is written: no probability is above it, so the declared tier always holds.

    Raises:
        InputError: The folder is an artifact, whose files are sealed, or has no training.json with an object.
    """
    folder = Path(path)
    if (folder / MANIFEST).is_file():
        raise InputError("save_threshold", str(path), "a checkpoint; export it again afterwards")
    file = existing_file(folder / TRAINING, FIELD)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(FIELD, str(file), f"a file with valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise InputError(FIELD, str(file), "a JSON object")
    threshold = 1.0 if found.threshold is None else found.threshold
    entry = {**(content.get("urgency") or {}), "abstain_threshold": threshold, "abstention": found.to_json()}
    write_json(file, {**content, "urgency": entry})


def _artifact(folder: Path, accelerator: str, batch_size: int) -> Predict:
    from predictors.runtime import open_runtime

    if accelerator not in ("auto", "cpu", "cuda"):
        raise InputError("accelerator", accelerator, "auto, cpu or cuda")
    runtime = open_runtime(folder, provider=accelerator)  # type: ignore[arg-type]
    manifest = runtime.artifact.manifest
    _check_levels(manifest.urgency_levels if "urgency" in manifest.heads else ())
    # The urgency head does not look at the served model, but an artifact may refuse an unknown one.
    served = manifest.served_models[0] if manifest.served_models else None

    def predict(texts: Sequence[str]) -> NDArray[np.float64]:
        if not texts:
            return np.zeros((0, len(LEVELS)))
        found = runtime.predict(texts, [served] * len(texts), batch_size=batch_size).urgency
        assert found is not None
        return _normalised(found)

    return predict


def _checkpoint(folder: Path, accelerator: str, batch_size: int) -> Predict:
    from predictors.modules import load_checkpoint
    from training.prediction import pick_device, predict_prompts

    checkpoint = load_checkpoint(folder)
    head = checkpoint.config.heads.urgency
    _check_levels(() if head is None else head.levels)
    model = checkpoint.model.to(pick_device(accelerator))
    known = checkpoint.config.known_models
    served = known[0] if known else None

    def predict(texts: Sequence[str]) -> NDArray[np.float64]:
        if not texts:
            return np.zeros((0, len(LEVELS)))
        found = predict_prompts(
            model, checkpoint.tokenizer, texts, [served] * len(texts), batch_size=batch_size
        )
        return _normalised(np.asarray(found["urgency"], dtype=np.float64))

    return predict


def _check_levels(levels: Sequence[str]) -> None:
    if not levels:
        raise InputError(FIELD, "no urgency head", "a predictor that was trained with one")
    if tuple(levels) != LEVELS:
        raise InputError(f"{FIELD}, urgency levels", list(levels), ", ".join(LEVELS))


def _normalised(probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows that sum to 1 in double precision; float32 and half-precision graphs miss it by rounding."""
    clipped = np.maximum(probabilities, 0.0)
    return np.asarray(clipped / clipped.sum(axis=1, keepdims=True))
