"""Logs of the servers without request data: a logged exception keeps its type and stack, not its text.

The text of an exception can quote what a client has sent: aiohttp quotes a malformed line, which can be the Authorization
header; a tokenizer or a model can quote the prompt. Where the exception was raised is in its stack.
"""

from __future__ import annotations

import logging
import traceback

from scheduler_core.errors import TailcastError

# The model runtime's errors name nodes, shapes and devices, which an operator needs, and never a prompt.
SAFE_MODULES = ("onnxruntime.",)


class RequestDataFilter(logging.Filter):
    """Removes the texts of exceptions from log records; passes all of them.

    A `TailcastError` that is an argument of the message stays: its text is meant for the log.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrites the record in place."""
        if record.exc_info and record.exc_info[1] is not None:
            record.exc_text = redacted_traceback(record.exc_info[1])
        record.exc_info = None
        record.msg = _without_text(record.msg)
        if isinstance(record.args, tuple):
            record.args = tuple(map(_without_text, record.args))
        if record.name == "asyncio":  # its further lines are reprs of tasks with their exceptions
            record.msg, record.args = record.getMessage().partition("\n")[0], ()
        return True


def redact_request_data() -> None:
    """Adds the filter to all handlers of the root logger: call it once they are set up."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(RequestDataFilter())


def _without_text(value: object) -> object:
    return redacted(value) if isinstance(value, Exception) and not isinstance(value, TailcastError) else value


def redacted(error: BaseException) -> str:
    """The type of an exception, with what is safe of its text: the model runtime's, and an operating system error's."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__.startswith(SAFE_MODULES):
        return f"{name}: {error}"
    if isinstance(error, OSError) and error.errno is not None:
        return f"{name}: [Errno {error.errno}] {error.strerror}"
    return name


def redacted_traceback(error: BaseException) -> str:
    """The tracebacks of an exception and of those that led to it, the first one first, without their texts."""
    parts: list[str] = []
    rest, visited = [error], {id(error)}
    while rest:
        one = rest.pop()
        stack = "".join(traceback.format_tb(one.__traceback__))
        parts.append(f"Traceback (most recent call last):\n{stack}{redacted(one)}")
        members = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        for other in (*members, one.__cause__, None if one.__suppress_context__ else one.__context__):
            if other is not None and id(other) not in visited:
                visited.add(id(other))
                rest.append(other)
    return "\n\nwhich led to:\n\n".join(reversed(parts))
