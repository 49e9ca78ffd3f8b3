"""A predictor that reads the length out of the prompt, and can be told to misbehave.

`prompted://MODE`: answers; hangs (never answers); breaks:N (answers N requests, then fails); garbage (no predictions).
A prompt "w7 w7 ..." is predicted to be answered with 7 tokens.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from scheduler_core.predictions import LengthPrediction
from scheduler_core.predictor import PredictionRequest


class LengthReader:
    """See above."""

    def __init__(self, mode: str) -> None:
        name, _, number = mode.partition(":")
        self._mode, self._left = name, int(number or 0)
        self.prompts: list[str] = []

    async def predict(self, requests: Sequence[PredictionRequest]) -> Sequence[LengthPrediction]:
        self.prompts += [request.prompt for request in requests]
        if self._mode == "hangs":
            await asyncio.Event().wait()
        if self._mode == "garbage":
            return []
        if self._mode == "breaks":
            if self._left < len(requests):
                raise ConnectionResetError("the predictor was killed")
            self._left -= len(requests)
        return [LengthPrediction(math.log(int(r.prompt.split()[0][1:])), 0.1, 5.0) for r in requests]

    async def close(self) -> None:
        pass


def connect(address: str) -> LengthReader:
    """What stands behind prompted://MODE."""
    return LengthReader(address)
