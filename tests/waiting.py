"""Waiting in tests: for a condition, with a deadline, and for the end of what a fake engine takes time for."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from tenacity import AsyncRetrying, RetryError, Retrying, retry_if_result, stop_after_delay, wait_fixed

PATIENCE_S = 60.0
_EVERY_S = 0.01


def _attempts(seconds: float) -> dict[str, Any]:
    return {
        "retry": retry_if_result(lambda value: not value),
        "stop": stop_after_delay(seconds),
        "wait": wait_fixed(_EVERY_S),
    }


def eventually(condition: Callable[[], object], seconds: float = PATIENCE_S) -> bool:
    """Whether the condition, which other processes or threads fulfil, holds within that time."""
    try:
        return bool(Retrying(**_attempts(seconds))(condition))
    except RetryError:
        return False


async def until(
    condition: Callable[[], object] | Callable[[], Awaitable[object]], seconds: float = PATIENCE_S
) -> None:
    """Lets the event loop run until the condition holds; it may be a coroutine function."""

    async def value() -> object:
        result = condition()
        return await result if inspect.isawaitable(result) else result

    try:
        await AsyncRetrying(**_attempts(seconds))(value)
    except RetryError as error:
        raise AssertionError("the condition does not hold") from error


async def taken(seconds: float) -> None:
    """The end of a step of a fake engine that takes so long: its duration is what the test is about."""
    loop = asyncio.get_running_loop()
    end = loop.create_future()
    timer = loop.call_later(max(0.0, seconds), end.set_result, None)
    try:
        await end
    finally:
        timer.cancel()
