"""Joined predictors: several are asked at the same time, and each adds heads to one prediction, such as length and urgency.

A part that fails or is late is left out: the prediction has the heads of the others, and names the part and the reason
(`Prediction.missing`). Only if all parts fail does the joined predictor fail.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.prediction.predictions import HEADS, MissingPart, Prediction

logger = logging.getLogger(__name__)

T = TypeVar("T")
#: Fraction of a deadline after which a late part is left out; the rest is for the answer itself.
TIMEOUT_FRACTION = 0.9
#: Deadlines for which a part that was late is not asked.
PAUSE = 2
LATE = "late"
#: Codes of errors of a service whose texts are no request's.
_PUBLIC_CODES = frozenset({"UNAVAILABLE", "UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED"})


class Parts:
    """The parts of a joined predictor, by name. Each kind of failure of a part is logged once.

    `clock` is monotonic, in seconds; a late part is paused after deadlines of at least `shortest_s` seconds.
    """

    def __init__(
        self, names: Sequence[str], clock: Callable[[], float] = time.monotonic, *, shortest_s: float = 0.0
    ) -> None:
        self.names = tuple(names)
        self._clock = clock
        self._shortest_s = shortest_s
        #: Part -> when it is asked again, after it was late.
        self._resume_s: dict[str, float] = {}
        self._logged: set[tuple[str, str]] = set()

    async def ask(
        self, calls: Sequence[Callable[[], Awaitable[T]]], timeout_s: float | None
    ) -> list[T | MissingPart]:
        """The answer of each part to its call, or why it is missing; raises the error of the first part if none answers.

        A part that has not answered after `TIMEOUT_FRACTION` of `timeout_s` is late, if another one has: it is cancelled, and not
        asked for the next `PAUSE` times `timeout_s`, so that it does not delay each request. None: all are waited for.
        """
        tasks: dict[str, asyncio.Future[T]] = {}
        active = self._active(timeout_s)
        paused = [name for name in self.names if name not in active]
        try:
            for names in (active, paused):  # the paused ones only if no other part answers
                if names and not any(map(_has_result, tasks.values())):
                    tasks |= {name: asyncio.ensure_future(calls[self.names.index(name)]()) for name in names}
                    await _wait([tasks[name] for name in names], timeout_s)
        finally:
            for task in tasks.values():
                task.cancel()
        results: list[T | MissingPart | BaseException] = [
            self._result(name, tasks.get(name), timeout_s) for name in self.names
        ]
        present = [each for each in results if not isinstance(each, MissingPart | BaseException)]
        if not present:
            raise next(each for each in results if isinstance(each, BaseException))
        return [
            self.missing(number, each) if isinstance(each, BaseException) else each
            for number, each in enumerate(results)
        ]

    def missing(self, number: int, error: BaseException) -> MissingPart:
        """The reason of a failure of a part, which is logged the first time."""
        name, reason = self.names[number], _reason(error)
        self._log(name, reason)
        return MissingPart(name, reason)

    def _active(self, timeout_s: float | None) -> list[str]:
        """The parts that are not paused. The first request after a pause is the only one that asks for another pause."""
        now = self._clock()
        active = [name for name in self.names if self._resume_s.get(name, now) <= now]
        for name in active:
            if name in self._resume_s:
                self._resume_s[name] = now + PAUSE * max(timeout_s or 0.0, self._shortest_s)
        return active

    def _result(self, name: str, task: asyncio.Future[Any] | None, timeout_s: float | None) -> Any:
        """The result or the error of a call; a missing part if it was late, or not asked (None)."""
        if task is None:
            return MissingPart(name, LATE)
        if not task.done():
            if timeout_s is not None and timeout_s >= self._shortest_s:
                self._resume_s[name] = self._clock() + PAUSE * timeout_s
            self._log(name, LATE)
            return MissingPart(name, LATE)
        self._resume_s.pop(name, None)
        if task.cancelled():
            return TailcastError("the call was cancelled")
        return task.exception() or task.result()

    def _log(self, name: str, reason: str) -> None:
        if (name, reason) not in self._logged and len(self._logged) < 16 * len(self.names):
            self._logged.add((name, reason))
            logger.warning(
                "the part %s of a joined predictor is left out, the others answer: %s", name, reason
            )


async def _wait(tasks: Sequence[asyncio.Future[T]], timeout_s: float | None) -> None:
    """Waits for all tasks; after `TIMEOUT_FRACTION` of `timeout_s` only until one of them has a result."""
    pending = set(tasks)
    _, pending = await asyncio.wait(
        pending, timeout=None if timeout_s is None else TIMEOUT_FRACTION * timeout_s
    )
    while pending and not any(_has_result(task) for task in tasks):
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)


def _has_result(task: asyncio.Future[T]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _reason(error: BaseException) -> str:
    """The reason of a failure, without what can quote a request."""
    code = getattr(error, "code", None)
    of_artifact = isinstance(error, InputError) and (error.field or "").startswith(("artifact", "SHA-256"))
    return str(error) if of_artifact or code in _PUBLIC_CODES else str(code or type(error).__name__)


def merged(parts: Sequence[Prediction | MissingPart]) -> Prediction:
    """The first of several predictions for one request, with the heads that only the others have, and with the parts that are
    missing. TailcastError if there is none."""
    missing = tuple(each for each in parts if isinstance(each, MissingPart))
    predictions = [each for each in parts if isinstance(each, Prediction)]
    if not predictions:
        raise TailcastError("; ".join(map(str, missing)))
    first, *others = predictions
    heads = {name: getattr(first, name) for name in HEADS}
    for other in others:
        heads |= {name: getattr(other, name) for name, value in heads.items() if value is None}
        missing += other.missing
    return replace(first, **heads, missing=(*first.missing, *missing))
