"""Prompt text to lexical features, for artifacts that read them instead of tokens or beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from predictors.artifact import LexicalInput
from scheduler_core.errors import InputError


@dataclass(frozen=True, slots=True)
class LexicalPrompt:
    """Features float32 [F], and whether the prompt had more characters than are read."""

    features: NDArray[np.float32]
    truncated: bool

    @property
    def values(self) -> NDArray[np.float32]:
        """What the model reads: the features."""
        return self.features

    @property
    def lexical(self) -> None:
        """Nothing beside `values`."""
        return None

    @property
    def num_tokens(self) -> int:
        """Tokens that are read: none."""
        return 0


class LexicalReader:
    """Feature extractor of one artifact or predictor; thread-safe.

    Raises:
        InputError: This program computes other features than the artifact was trained on.
    """

    def __init__(self, lexical: LexicalInput) -> None:
        from predictors.lexical import FEATURE_NAMES, FEATURE_VERSION, LexicalFeatures

        if lexical.feature_version != FEATURE_VERSION:
            raise InputError(
                "artifact manifest, lexical, feature_version",
                lexical.feature_version,
                f"{FEATURE_VERSION}, the version of this tailcast; train the artifact again",
            )
        if lexical.feature_names != tuple(FEATURE_NAMES):
            raise InputError(
                "artifact manifest, lexical, feature_names",
                list(lexical.feature_names),
                f"{', '.join(FEATURE_NAMES)}",
            )
        self.max_chars = lexical.max_chars
        self.vocabulary_size: int | None = None  # it reads no tokens
        self._features = LexicalFeatures()

    def __call__(self, prompts: Sequence[str]) -> list[LexicalPrompt]:
        """Features of each prompt."""
        if not prompts:
            return []
        table = self._features.extract(prompts, max_chars=self.max_chars)
        return [
            LexicalPrompt(row, len(prompt) > self.max_chars)
            for row, prompt in zip(table, prompts, strict=True)
        ]
