"""Urgency probabilities of a checkpoint, an artifact, or a baseline that is trained on labeled texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_gen.urgency.labels import LabeledText
from scheduler_core.errors import InputError
from scheduler_core.files import existing_file, write_json
from scheduler_core.urgency import LEVELS
from training.urgency.abstention import AbstainThreshold
from training.urgency.claims import Predict

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
        raise InputError("batch_size", batch_size, "an integer > 0")
    is_artifact = (folder / MANIFEST).is_file()
    return (_artifact if is_artifact else _checkpoint)(folder, accelerator, batch_size)


def save_threshold(path: str | Path, certified: AbstainThreshold) -> None:
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
    threshold = 1.0 if certified.threshold is None else certified.threshold
    entry = {
        **(content.get("urgency") or {}),
        "abstain_threshold": threshold,
        "abstention": certified.to_json(),
    }
    write_json(file, {**content, "urgency": entry})


def _artifact(folder: Path, accelerator: str, batch_size: int) -> Predict:
    from predictors.runtime import open_runtime

    if accelerator not in ("auto", "cpu", "cuda"):
        raise InputError("accelerator", accelerator, "auto, cpu or cuda")
    runtime = open_runtime(folder, provider=accelerator)  # type: ignore[arg-type]
    manifest = runtime.artifact.manifest
    _check_levels(manifest.urgency_levels if "urgency" in manifest.heads else ())
    # The urgency head ignores the served model, but an artifact may refuse an unknown one.
    served = manifest.served_models[0] if manifest.served_models else None

    def predict(texts: Sequence[str]) -> NDArray[np.float64]:
        if not texts:
            return np.zeros((0, len(LEVELS)))
        outputs = runtime.predict(texts, [served] * len(texts), batch_size=batch_size).urgency
        assert outputs is not None
        return _normalized(outputs)

    return predict


def _checkpoint(folder: Path, accelerator: str, batch_size: int) -> Predict:
    from predictors.modules import load_checkpoint
    from training.prediction import pick_device, predict_prompts

    checkpoint = load_checkpoint(folder)
    head = checkpoint.config.heads.urgency
    _check_levels(() if head is None else head.levels)
    model = checkpoint.model.to(pick_device(accelerator))
    served_models = checkpoint.config.known_models
    served = served_models[0] if served_models else None

    def predict(texts: Sequence[str]) -> NDArray[np.float64]:
        if not texts:
            return np.zeros((0, len(LEVELS)))
        outputs = predict_prompts(
            model, checkpoint.tokenizer, texts, [served] * len(texts), batch_size=batch_size
        )
        return _normalized(np.asarray(outputs["urgency"], dtype=np.float64))

    return predict


def _check_levels(levels: Sequence[str]) -> None:
    if not levels:
        raise InputError(FIELD, "no urgency head", "a predictor that was trained with one")
    if tuple(levels) != LEVELS:
        raise InputError(f"{FIELD}, urgency levels", list(levels), ", ".join(LEVELS))


def _normalized(probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows that sum to 1 in double precision; float32 and half-precision graphs miss it by rounding."""
    clipped = np.maximum(probabilities, 0.0)
    return np.asarray(clipped / clipped.sum(axis=1, keepdims=True))


class ConstantBaseline:
    """The weighted frequencies of the levels in training, for every text."""

    def __init__(self, train: Sequence[LabeledText]) -> None:
        level, weight = levels_and_weights(train)
        frequencies = np.bincount(level, weights=weight, minlength=len(LEVELS))
        self._frequencies: NDArray[np.float64] = frequencies / frequencies.sum()

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Probabilities [N, K]."""
        return np.tile(self._frequencies, (len(texts), 1))


class BagOfWordsBaseline:
    """Logistic regression on TF-IDF of words and pairs of words, with fixed settings.

    Args:
        train: Labelled texts with two levels or more.
        regularization: scikit-learn's C.

    Raises:
        InputError: There is only one level.
    """

    def __init__(self, train: Sequence[LabeledText], regularization: float = 10.0) -> None:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline

        level, weight = levels_and_weights(train)
        if len(np.unique(level)) < 2:
            raise InputError("levels of the training texts", LEVELS[level[0]], "two or more different levels")
        words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\w+|!+|\?+")
        regression = LogisticRegression(C=regularization, max_iter=2000)
        self._pipeline = make_pipeline(words, regression)
        self._pipeline.fit([text.text for text in train], level, logisticregression__sample_weight=weight)
        self._levels: NDArray[np.int64] = regression.classes_

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Probabilities [N, K]."""
        probabilities = np.zeros((len(texts), len(LEVELS)))
        if texts:
            probabilities[:, self._levels] = self._pipeline.predict_proba(list(texts))
        return probabilities


def levels_and_weights(train: Sequence[LabeledText]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Levels [N] and weights [N] of training texts; `InputError` if there are none."""
    if not train:
        raise InputError("training texts", 0, "at least one labelled text of split train")
    return np.array([text.level for text in train]), np.array([text.weight for text in train])


POOLINGS = ("cls", "mean", "max")
MAX_TOKENS = 256
REGULARIZATION = 0.01


class FrozenEncoderBaseline:
    """Standardized [CLS; mean; max] features of an encoder that is not trained, then logistic regression.

    Args:
        train: Labelled texts with two levels or more.
        encoder: Local folder, `package:NAME/PATH` or hub name.
        batch_size: Texts per call of the encoder.

    Raises:
        InputError: The encoder cannot be read, or there is only one level.
    """

    def __init__(self, train: Sequence[LabeledText], encoder: str, batch_size: int = 32) -> None:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        from predictors.modules import load_encoder, load_tokenizer
        from predictors.modules.encoder import num_positions

        level, weight = levels_and_weights(train)
        if len(np.unique(level)) < 2:
            raise InputError("levels of the training texts", LEVELS[level[0]], "two or more different levels")
        self._encoder = load_encoder(encoder)
        self._tokenizer = load_tokenizer(encoder)
        self._batch_size = batch_size
        self._max_tokens = min(MAX_TOKENS, num_positions(self._encoder) or MAX_TOKENS)
        regression = LogisticRegression(C=REGULARIZATION, max_iter=3000)
        self._pipeline = make_pipeline(StandardScaler(), regression)
        features = self._features([text.text for text in train])
        self._pipeline.fit(features, level, logisticregression__sample_weight=weight)
        self._levels: NDArray[np.int64] = regression.classes_

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Probabilities [N, K]."""
        probabilities = np.zeros((len(texts), len(LEVELS)))
        if texts:
            probabilities[:, self._levels] = self._pipeline.predict_proba(self._features(texts))
        return probabilities

    def _features(self, texts: Sequence[str]) -> NDArray[np.float32]:
        import torch

        from predictors.modules.encoder import pool

        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        parts: list[NDArray[np.float32]] = []
        with torch.inference_mode():
            for start in range(0, len(order), self._batch_size):
                batch = self._tokenizer(
                    [texts[number] for number in order[start : start + self._batch_size]],
                    padding=True,
                    truncation=True,
                    max_length=self._max_tokens,
                    return_tensors="pt",
                )
                mask = batch["attention_mask"]
                states = self._encoder(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
                parts.append(pool(states, mask, POOLINGS).float().numpy())
        return np.concatenate(parts)[np.argsort(order)]
