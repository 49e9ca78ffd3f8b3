"""Predictor that looks up prompts in a file (`table://FILE`): the oracle for runs with known lengths."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from scheduler_core.prediction.predictions import LengthPrediction, Prediction
from scheduler_core.prediction.predictor import PredictionRequest


class TablePredictor:
    """Lookup in a JSON file, prompt -> [mu, sigma, nu]; it may be created later or replaced between runs."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._read_ns = 0
        self._rows: dict[str, tuple[float, float, float]] = {}

    async def predict(self, requests: Sequence[PredictionRequest]) -> list[Prediction]:
        """Predictions from the file; KeyError for an unknown prompt."""
        changed_ns = self._path.stat().st_mtime_ns
        if changed_ns != self._read_ns:
            self._rows = json.loads(self._path.read_text(encoding="utf-8"))
            self._read_ns = changed_ns
        return [Prediction(length=LengthPrediction(*self._rows[request.prompt])) for request in requests]

    async def close(self) -> None:
        """Does nothing: there are no open resources."""


def connect(address: str) -> TablePredictor:
    """Predictor for the address table://FILE."""
    return TablePredictor(address)
