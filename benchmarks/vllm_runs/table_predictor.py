"""A predictor that looks prompts up in a file: the oracle of a run whose answers are known. `table://FILE`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from scheduler_core.predictions import LengthPrediction, Prediction
from scheduler_core.predictor import PredictionRequest


class TablePredictor:
    """The file: a JSON object, prompt -> [mu, sigma, nu]. It may be replaced between runs, or come later."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._read_ns = 0
        self._rows: dict[str, tuple[float, float, float]] = {}

    async def predict(self, requests: Sequence[PredictionRequest]) -> list[Prediction]:
        """What stands there; KeyError for a prompt that does not."""
        changed_ns = self._path.stat().st_mtime_ns
        if changed_ns != self._read_ns:
            self._rows = json.loads(self._path.read_text(encoding="utf-8"))
            self._read_ns = changed_ns
        return [Prediction(length=LengthPrediction(*self._rows[request.prompt])) for request in requests]

    async def close(self) -> None:
        """Nothing is open."""


def connect(address: str) -> TablePredictor:
    """What stands behind table://FILE."""
    return TablePredictor(address)
