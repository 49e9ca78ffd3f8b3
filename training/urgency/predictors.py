"""Urgency predictors: a checkpoint, an artifact, or a baseline trained on labeled texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.urgency.labels import LabeledText
from predictors.manifest import MANIFEST
from scheduler_core.errors import InputError
from scheduler_core.prediction.urgency import LEVELS
from scheduler_core.shell.files import existing_file, write_json
from training.evaluating.predictors import TRAINING, Accelerator, InferenceOptions, open_predictor
from training.urgency.abstention import Predict

MAX_TOKENS = 256


def open_urgency(path: str | Path, *, accelerator: Accelerator = "auto", batch_size: int = 32) -> Predict:
    """Opens a checkpoint or artifact with an urgency head; InputError if it has none, or one with other levels than
    LEVELS."""
    options = InferenceOptions(batch_size, accelerator=accelerator, progress=False)
    predictor = open_predictor(path, options)
    if not predictor.urgency_levels:
        raise InputError("predictor", "no urgency head", "a predictor that was trained with one")
    if predictor.urgency_levels != LEVELS:
        raise InputError("predictor, urgency levels", list(predictor.urgency_levels), ", ".join(LEVELS))
    # The urgency head ignores the served model, but a predictor may not accept an unknown one.
    served = predictor.served_models[0] if predictor.served_models else None

    def predict(texts: Sequence[str]) -> NDArray[np.float64]:
        if not texts:
            return np.zeros((0, len(LEVELS)))
        urgency = predictor.predict(texts, [served] * len(texts), [None] * len(texts)).urgency
        # Normalized, because outputs of float16 and float32 graphs sum to 1 only up to rounding.
        probabilities = np.maximum(np.asarray(urgency), 0.0)
        return np.asarray(probabilities / probabilities.sum(axis=1, keepdims=True))

    return predict


def save_threshold(path: str | Path, abstention: dict[str, Any]) -> None:
    """Writes the abstain threshold to a checkpoint's training.json, as `urgency.abstain_threshold`; InputError for an
    artifact, whose files must not change.

    If no threshold was certified, 1 is written, so that the declared tier is always used.
    """
    if (Path(path) / MANIFEST).is_file():
        raise InputError("save_threshold", str(path), "a checkpoint; export it again afterwards")
    file = existing_file(Path(path) / TRAINING, "predictor")
    content = json.loads(file.read_text(encoding="utf-8"))
    threshold = 1.0 if abstention["threshold"] is None else abstention["threshold"]
    entry = {"abstain_threshold": threshold, "abstention": abstention}
    write_json(file, content | {"urgency": (content.get("urgency") or {}) | entry})


def constant_baseline(train: Sequence[LabeledText]) -> Predict:
    """Predicts the weighted frequencies of the training levels for every text."""
    from sklearn.dummy import DummyClassifier

    return _trained(train, DummyClassifier(strategy="prior"))


def bag_of_words_baseline(train: Sequence[LabeledText]) -> Predict:
    """Logistic regression on TF-IDF features of words and word pairs, with fixed settings."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\w+|!+|\?+")
    return _trained(train, words, LogisticRegression(C=10.0, max_iter=2000))


def frozen_encoder_baseline(train: Sequence[LabeledText], encoder: str, batch_size: int = 32) -> Predict:
    """Logistic regression on standardized [CLS; mean; max] features of a frozen encoder."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import FunctionTransformer, StandardScaler

    from predictors.modules.config import PredictorConfig
    from predictors.modules.encoder import load_encoder, load_tokenizer, num_positions, tokenize
    from predictors.modules.heads import Heads, RankHead
    from predictors.modules.normalization import Normalization
    from predictors.modules.predictor import PromptPredictor
    from training.network.prediction import pooled_features

    network, tokenizer = load_encoder(encoder), load_tokenizer(encoder)
    max_tokens = min(MAX_TOKENS, num_positions(network) or MAX_TOKENS)
    config = PredictorConfig(encoder=encoder, heads=Heads(rank=RankHead()), max_length=max_tokens)
    model = PromptPredictor(config, network, Normalization())

    def features(texts: Sequence[str]) -> NDArray[np.float32]:
        token_ids = tokenize(tokenizer, texts, max_length=max_tokens)
        pad = int(tokenizer.pad_token_id)
        return np.asarray(pooled_features(model, token_ids, pad, batch_size=batch_size))

    regression = LogisticRegression(C=0.01, max_iter=3000)
    return _trained(train, FunctionTransformer(features), StandardScaler(), regression)


def _trained(train: Sequence[LabeledText], *steps: Any) -> Predict:
    """Trains a scikit-learn pipeline on labelled texts."""
    from sklearn.pipeline import make_pipeline

    if not train:
        raise InputError("training texts", 0, "at least one labelled text of split train")
    level = np.array([text.level for text in train])
    if len(steps) > 1 and len(np.unique(level)) < 2:
        raise InputError("levels of the training texts", LEVELS[level[0]], "two or more different levels")
    pipeline = make_pipeline(*steps)
    weights = {f"{pipeline.steps[-1][0]}__sample_weight": np.array([text.weight for text in train])}
    pipeline.fit([text.text for text in train], level, **weights)

    def predict(texts: Sequence[str]) -> NDArray[np.float64]:
        probabilities = np.zeros((len(texts), len(LEVELS)))
        if texts:
            probabilities[:, pipeline.classes_] = pipeline.predict_proba(list(texts))
        return probabilities

    return predict
