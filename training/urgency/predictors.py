"""Urgency probabilities of a checkpoint, an artifact, or a baseline that is trained on labeled texts."""

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
from scheduler_core.files import existing_file, write_json
from scheduler_core.urgency import LEVELS
from training.evaluating.predictors import TRAINING, Accelerator, InferenceOptions, open_predictor
from training.urgency.abstention import Predict

MAX_TOKENS = 256


def open_urgency(path: str | Path, *, accelerator: Accelerator = "auto", batch_size: int = 32) -> Predict:
    """Opens a checkpoint or an artifact with an urgency head over the five levels; InputError if there is none, or it has
    others."""
    options = InferenceOptions(batch_size, accelerator=accelerator, progress=False)
    predictor = open_predictor(path, options)
    if not predictor.urgency_levels:
        raise InputError("predictor", "no urgency head", "a predictor that was trained with one")
    if predictor.urgency_levels != LEVELS:
        raise InputError("predictor, urgency levels", list(predictor.urgency_levels), ", ".join(LEVELS))
    # The urgency head ignores the served model, but a predictor may refuse an unknown one.
    served = predictor.served_models[0] if predictor.served_models else None

    def predict(texts: Sequence[str]) -> NDArray[np.float64]:
        if not texts:
            return np.zeros((0, len(LEVELS)))
        urgency = predictor.predict(texts, [served] * len(texts), [None] * len(texts)).urgency
        # Half-precision and float32 graphs miss a sum of 1 by rounding.
        probabilities = np.maximum(np.asarray(urgency), 0.0)
        return np.asarray(probabilities / probabilities.sum(axis=1, keepdims=True))

    return predict


def save_threshold(path: str | Path, abstention: dict[str, Any]) -> None:
    """Writes the abstain threshold into a checkpoint's training.json, as `urgency.abstain_threshold`; InputError for an
    artifact, whose files are sealed.

    If none could be certified, 1 is written: no probability is above it, so the declared tier always holds.
    """
    if (Path(path) / MANIFEST).is_file():
        raise InputError("save_threshold", str(path), "a checkpoint; export it again afterwards")
    file = existing_file(Path(path) / TRAINING, "predictor")
    content = json.loads(file.read_text(encoding="utf-8"))
    threshold = 1.0 if abstention["threshold"] is None else abstention["threshold"]
    entry = {"abstain_threshold": threshold, "abstention": abstention}
    write_json(file, content | {"urgency": (content.get("urgency") or {}) | entry})


def constant_baseline(train: Sequence[LabeledText]) -> Predict:
    """The weighted frequencies of the levels in training, for every text."""
    from sklearn.dummy import DummyClassifier

    return _trained(train, DummyClassifier(strategy="prior"))


def bag_of_words_baseline(train: Sequence[LabeledText]) -> Predict:
    """Logistic regression on TF-IDF of words and pairs of words, with fixed settings."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\w+|!+|\?+")
    return _trained(train, words, LogisticRegression(C=10.0, max_iter=2000))


def frozen_encoder_baseline(train: Sequence[LabeledText], encoder: str, batch_size: int = 32) -> Predict:
    """Standardized [CLS; mean; max] features of an encoder that is not trained, then logistic regression."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import FunctionTransformer, StandardScaler

    from predictors.modules.config import PredictorConfig
    from predictors.modules.encoder import load_encoder, load_tokenizer, num_positions, tokenize
    from predictors.modules.heads import Heads, RankHead
    from predictors.modules.normalization import Normalization
    from predictors.modules.predictor import PromptPredictor
    from training.prediction import pooled_features

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
    """A pipeline of scikit-learn trained on labelled texts."""
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
