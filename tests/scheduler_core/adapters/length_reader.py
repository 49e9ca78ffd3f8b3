"""A predictor that reads the length out of the prompt, and can be told to misbehave.

`prompted://MODE`: answers; hangs (never answers); breaks:N (answers N requests, then fails); garbage (no predictions).
A prompt "w7 w7 ..." is predicted to be answered with 7 tokens.
"""

import asyncio
from collections.abc import Sequence

from scheduler_core.adapters.prediction_thread import PredictionThread
from scheduler_core.prediction.predictions import Prediction
from scheduler_core.prediction.predictor import PredictionRequest
from tests.scheduler_core.helpers import full_prediction

#: Six requests, of which each is predicted shorter and more urgent than those before, and their order in one slot.
PREDICTED = [58, 45, 35, 25, 15, 5]
ORDERS = {
    "ssjf": "r5 r4 r3 r2 r1 r0",
    "s3": "r5 r4 r3 r0 r1 r2",  # the first three are in one bucket
    "semantic": "r5 r4 r3 r0 r1 r2",
    "hpjf": "r4 r5 r0 r1 r2 r3",  # no text raises its request by more than a level
    "ltr": "r5 r4 r3 r2 r1 r0",
}


def of_length(tokens: float, sigma: float = 0.1) -> Prediction:
    """All heads say that the output is of this median length, and the more urgent the shorter it is."""
    return full_prediction(tokens, sigma, level=min(int(tokens // 10), 4))


class LengthReader:
    def __init__(self, mode: str) -> None:
        name, _, number = mode.partition(":")
        self._mode, self._left = name, int(number or 0)

    async def predict(
        self, requests: Sequence[PredictionRequest], *, timeout_s: float | None = None
    ) -> Sequence[Prediction]:
        if self._mode == "hangs":
            await asyncio.Event().wait()
        if self._mode == "garbage":
            return []
        if self._mode == "breaks":
            if self._left < len(requests):
                raise ConnectionResetError("the predictor was killed")
            self._left -= len(requests)
        return [of_length(int(request.prompt.split()[0][1:])) for request in requests]

    async def close(self) -> None:
        pass


connect = LengthReader


def settle(thread: PredictionThread) -> None:
    """Waits until every query of the thread has its event."""

    async def turns() -> None:
        while thread._pending:
            await asyncio.sleep(0)

    if thread._pending:
        asyncio.run_coroutine_threadsafe(turns(), thread._loop).result(60)
