"""What any urgency predictor has to beat: a constant level, and a bag of words with logistic regression."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from data_gen.urgency.labels import LabelledText
from scheduler_core.errors import InputError
from scheduler_core.urgency import LEVELS


class ConstantBaseline:
    """The weighted shares of the levels in training, for every text."""

    def __init__(self, train: Sequence[LabelledText]) -> None:
        level, weight = levels_and_weights(train)
        shares = np.bincount(level, weights=weight, minlength=len(LEVELS))
        self._shares: NDArray[np.float64] = shares / shares.sum()

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Probabilities [N, K]."""
        return np.tile(self._shares, (len(texts), 1))


class BagOfWordsBaseline:
    """Logistic regression on TF-IDF of words and pairs of words, with fixed settings.

    Args:
        train: Labelled texts with two levels or more.
        regularisation: scikit-learn's C.

    Raises:
        InputError: There is only one level.
    """

    def __init__(self, train: Sequence[LabelledText], regularisation: float = 10.0) -> None:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline

        level, weight = levels_and_weights(train)
        if len(np.unique(level)) < 2:
            raise InputError("levels of the training texts", LEVELS[level[0]], "two or more different levels")
        words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\w+|!+|\?+")
        regression = LogisticRegression(C=regularisation, max_iter=2000)
        self._pipeline = make_pipeline(words, regression)
        self._pipeline.fit([text.text for text in train], level, logisticregression__sample_weight=weight)
        self._levels: NDArray[np.int64] = regression.classes_

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Probabilities [N, K]."""
        found = np.zeros((len(texts), len(LEVELS)))
        if texts:
            found[:, self._levels] = self._pipeline.predict_proba(list(texts))
        return found


def levels_and_weights(train: Sequence[LabelledText]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Levels [N] and weights [N] of training texts; `InputError` if there are none."""
    if not train:
        raise InputError("training texts", 0, "at least one labelled text of split train")
    return np.array([text.level for text in train]), np.array([text.weight for text in train])
