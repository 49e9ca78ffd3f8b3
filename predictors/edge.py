"""Common parts of the servers: event loop, signals, port file, and logs without request data.

The type and stack of an exception are logged without its text, which can quote request data: aiohttp quotes a
malformed line, which can be the Authorization header; a tokenizer or a model can quote the prompt.
"""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.shell.files import atomic_file, remove_output, writable_target

R = TypeVar("R")

# Errors of the model runtime contain nodes, shapes and devices, which operators need, and never a prompt.
SAFE_MODULES = ("onnxruntime.",)


def run(main: Coroutine[Any, Any, R]) -> R:
    """Runs `main` with uvloop if it is installed (10 % less CPU time per request), otherwise with asyncio."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def on_signals(stop: Callable[[], object], reload: Callable[[], object] | None = None) -> None:
    """Calls `stop` on SIGTERM and SIGINT, and `reload` on SIGHUP, in the running event loop."""
    actions = {"SIGTERM": stop, "SIGINT": stop} | ({} if reload is None else {"SIGHUP": reload})
    for name, action in actions.items():
        try:
            asyncio.get_running_loop().add_signal_handler(getattr(signal, name), action)
        except (AttributeError, NotImplementedError):  # Windows: Ctrl-C ends asyncio.run by itself
            return


def ignore_hangups() -> None:
    """Ignores SIGHUP, which would end a process that is still loading, until `on_signals`."""
    if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


_MAX_PORTS_BYTES = 64


class PortFile:
    """File with the ports of a ready service; does nothing if `path` is None. An existing file of a killed
    service is removed first, because programs that wait for the file would read the old ports; `InputError` if
    it holds anything but ports."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else writable_target(path, "port_file")
        if self._path is not None and self._path.is_dir():
            raise InputError("port_file", path, "the path of a file, not of a folder")
        if self._path is not None and self._path.is_file():
            with open(self._path, "rb") as file:
                content = file.read(_MAX_PORTS_BYTES + 1)
            if len(content) > _MAX_PORTS_BYTES or not re.fullmatch(rb"[0-9\n]*", content):
                raise InputError("port_file", path, "a new file, or the port file of an earlier run")
        self.remove()

    def write(self, *ports: int | None) -> None:
        """Writes the ports that are not None, one per line, atomically."""
        if self._path is not None:
            lines = [f"{port}\n" for port in ports if port is not None]
            with atomic_file(self._path) as temporary:
                temporary.write_text("".join(lines), encoding="ascii")

    def remove(self) -> None:
        """Removes the file if it exists."""
        if self._path is not None:
            remove_output(self._path)


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
