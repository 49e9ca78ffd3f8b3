"""Logs without request data.

The type and stack of an exception are logged without its text, which can quote request data: aiohttp quotes a
malformed line, which can be the Authorization header; a tokenizer or a model can quote the prompt.
"""

from __future__ import annotations

import logging
import traceback

from scheduler_core.errors import TailcastError

# Errors of the model runtime contain nodes, shapes and devices, which operators need, and never a prompt.
SAFE_MODULES = ("onnxruntime.",)


class RequestDataFilter(logging.Filter):
    """Removes the texts of exceptions from log records, except for `TailcastError`s in their arguments, which
    are intended for the log. No record is dropped."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrites the record in place."""
        if record.exc_info and record.exc_info[1] is not None:
            record.exc_text = redacted_traceback(record.exc_info[1])
        record.exc_info = None
        record.msg = _without_text(record.msg)
        if isinstance(record.args, tuple):
            record.args = tuple(map(_without_text, record.args))
        if record.name == "asyncio":  # the other lines are reprs of tasks, which contain exceptions
            record.msg, record.args = record.getMessage().partition("\n")[0], ()
        return True


def set_up_logs(log_format: str) -> None:
    """Sets the format (`text` or `json`) of the root logger's handlers, and removes request data."""
    for handler in logging.getLogger().handlers:
        if log_format == "json":
            handler.setFormatter(_json_formatter())
        handler.addFilter(RequestDataFilter())


def _json_formatter() -> logging.Formatter:
    """One JSON object per line: time, level, logger, message, pid, traceback (if any) and `extra` fields."""
    from pythonjsonlogger.json import JsonFormatter

    return JsonFormatter(
        "{levelname}{name}{message}{process}",
        style="{",
        rename_fields={"levelname": "level", "name": "logger", "process": "pid", "exc_info": "traceback"},
        timestamp="time",
        json_ensure_ascii=False,
    )


def _without_text(value: object) -> object:
    return redacted(value) if isinstance(value, Exception) and not isinstance(value, TailcastError) else value


def redacted(error: BaseException) -> str:
    """The type of an exception; with its text for errors of the model runtime and the operating system."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__.startswith(SAFE_MODULES):
        return f"{name}: {error}"
    if isinstance(error, OSError) and error.errno is not None:
        return f"{name}: [Errno {error.errno}] {error.strerror}"
    return name


def redacted_traceback(error: BaseException) -> str:
    """The tracebacks of an exception and of its causes, the first cause first, without their texts."""
    parts: list[str] = []
    stack_of_errors, visited = [error], {id(error)}
    while stack_of_errors:
        current = stack_of_errors.pop()
        stack = "".join(traceback.format_tb(current.__traceback__))
        parts.append(f"Traceback (most recent call last):\n{stack}{redacted(current)}")
        members = current.exceptions if isinstance(current, BaseExceptionGroup) else ()
        context = None if current.__suppress_context__ else current.__context__
        for other in (*members, current.__cause__, context):
            if other is not None and id(other) not in visited:
                visited.add(id(other))
                stack_of_errors.append(other)
    return "\n\nwhich led to:\n\n".join(reversed(parts))
