"""The boosted-trees baseline of `evaluate`: scikit-learn on the words of the prompt, the served model and the temperature."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.model_selection import GroupKFold, cross_val_predict
from sklearn.preprocessing import OrdinalEncoder

from training.evaluating.predictors import PredictedRows, distinct
from training.evaluating.rows import EvaluationRows
from training.evaluating.scores import standard_quantiles

NUM_WORDS = 200
NUM_TREES = 200
FOLDS = 3


def boosted_trees(train: EvaluationRows, rows: EvaluationRows, *, seed: int = 0) -> PredictedRows:
    """mu by trees, and one sigma: the scale of the training outputs about the cross-validated mu.

    Args:
        train: Rows to learn from, of at least `FOLDS` different prompts.
        rows: Rows to predict.
        seed: Of the trees.
    """
    words = CountVectorizer(binary=True, max_features=NUM_WORDS, token_pattern=r"(?u)\w+").fit(train.prompts)
    models = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=np.nan)
    models.fit(_column(train.served_models))
    inputs = _inputs(train, words, models)
    trees = HistGradientBoostingRegressor(
        max_iter=NUM_TREES, min_samples_leaf=20, categorical_features=[0], random_state=seed
    )
    _, prompt = distinct(train.prompts)
    unseen = cross_val_predict(trees, inputs, train.fits.mu, groups=prompt, cv=GroupKFold(FOLDS))
    distance = np.abs(np.log(train.outputs.lengths) - unseen[train.outputs.owner])
    nu = float(train.fits.nu)
    sigma = float(np.median(distance) / standard_quantiles(np.array([0.75]), nu)[0, 0])
    mu = trees.fit(inputs, train.fits.mu).predict(_inputs(rows, words, models))
    return PredictedRows(mu=np.asarray(mu), sigma=np.full(len(rows), max(sigma, 1e-6)), nu=nu)


def _column(values: Any) -> NDArray[np.object_]:
    return np.array([[value or ""] for value in values], dtype=object)


def _inputs(rows: EvaluationRows, words: Any, models: Any) -> NDArray[np.float64]:
    """Served model, temperature, logarithms of characters and lines, one column for each word [G, 4 + words]."""
    numbers = [
        [np.nan if temperature is None else temperature, np.log1p(len(prompt)), np.log1p(prompt.count("\n"))]
        for prompt, temperature in zip(rows.prompts, rows.temperatures, strict=True)
    ]
    present = words.transform(rows.prompts).toarray()
    return np.hstack([models.transform(_column(rows.served_models)), np.array(numbers), present])
