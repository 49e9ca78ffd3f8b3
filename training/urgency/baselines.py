"""Baselines of urgency prediction, trained on labeled texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.urgency.labels import LabeledText
from scheduler_core.errors import InputError
from scheduler_core.prediction.urgency import LEVELS
from training.urgency.abstention import Predict

MAX_TOKENS = 256


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

    from training.network.inference import frozen_features

    features = FunctionTransformer(frozen_features(encoder, MAX_TOKENS, batch_size))
    regression = LogisticRegression(C=0.01, max_iter=3000)
    return _trained(train, features, StandardScaler(), regression)


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
