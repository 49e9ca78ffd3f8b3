"""A baseline that understands words: logistic regression on the features of a pretrained encoder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from data_gen.urgency.labels import LabelledText
from predictors.modules import load_encoder, load_tokenizer
from predictors.modules.encoder import num_positions
from predictors.modules.pooling import pool
from scheduler_core.errors import InputError
from scheduler_core.urgency import LEVELS
from training.urgency.baselines import levels_and_weights

POOLINGS = ("cls", "mean", "max")
MAX_TOKENS = 256
REGULARISATION = 0.01


class FrozenEncoderBaseline:
    """Standardised [CLS; mean; max] features of an encoder that is not trained, then logistic regression.

    Args:
        train: Labelled texts with two levels or more.
        encoder: Local folder, `package:NAME/PATH` or hub name.
        batch_size: Texts per call of the encoder.

    Raises:
        InputError: The encoder cannot be read, or there is only one level.
    """

    def __init__(self, train: Sequence[LabelledText], encoder: str, batch_size: int = 32) -> None:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        level, weight = levels_and_weights(train)
        if len(np.unique(level)) < 2:
            raise InputError("levels of the training texts", LEVELS[level[0]], "two or more different levels")
        self._encoder = load_encoder(encoder)
        self._tokenizer = load_tokenizer(encoder)
        self._batch_size = batch_size
        self._max_tokens = min(MAX_TOKENS, num_positions(self._encoder) or MAX_TOKENS)
        regression = LogisticRegression(C=REGULARISATION, max_iter=3000)
        self._pipeline = make_pipeline(StandardScaler(), regression)
        features = self._features([text.text for text in train])
        self._pipeline.fit(features, level, logisticregression__sample_weight=weight)
        self._levels: NDArray[np.int64] = regression.classes_

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Probabilities [N, K]."""
        found = np.zeros((len(texts), len(LEVELS)))
        if texts:
            found[:, self._levels] = self._pipeline.predict_proba(self._features(texts))
        return found

    def _features(self, texts: Sequence[str]) -> NDArray[np.float32]:
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
