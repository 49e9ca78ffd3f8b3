"""Log records of the servers hold types and stacks of exceptions, and no text that a client may have sent."""

from __future__ import annotations

import asyncio
import io
import json
import logging

import pytest

from predictors.edge import _json_formatter, redacted_traceback
from scheduler_core.errors import TailcastError

CANARY = "canary-4711"


def chained() -> Exception:
    """An exception with a cause, a context, a note and members of a group, each with the canary."""
    try:
        try:
            try:
                raise UnicodeDecodeError("utf-8", CANARY.encode(), 0, 1, CANARY)
            except ValueError:
                raise KeyError(CANARY) from ExceptionGroup(CANARY, [SyntaxError(CANARY), OSError(CANARY)])
        except KeyError as error:
            raise RuntimeError(CANARY) from error
    except RuntimeError as error:
        error.add_note(CANARY)
        return error


def test_an_exception_that_causes_itself_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert redacted_traceback(first).count("Traceback") == 2


async def test_no_record_holds_a_text_of_a_client(log: io.StringIO, caplog: pytest.LogCaptureFixture) -> None:
    error = chained()
    logging.getLogger("aiohttp.server").error("Error handling request from %s", "::1", exc_info=error)
    logging.getLogger("any").warning("it broke: %s (%r)", error, error)
    logging.getLogger("any").warning(error)
    logging.getLogger("any").error("%s", ConnectionRefusedError(111, "Connection refused", CANARY))
    logging.getLogger("any").error("%s", TailcastError("artifact tiny: model.onnx is missing"))
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    failed.set_exception(RuntimeError(CANARY))
    asyncio.get_running_loop().call_exception_handler(
        {"message": "Task exception was never retrieved", "exception": failed.exception(), "future": failed}
    )
    text = log.getvalue()
    assert CANARY not in text
    for line in ("Error handling request from ::1\n", "it broke: RuntimeError", "Task exception was never"):
        assert line in text
    # Errors of the system and of tailcast stay readable.
    assert "\nConnectionRefusedError: [Errno 111] Connection refused\nartifact tiny: model.onnx is" in text
    for record in caplog.records:
        assert record.exc_info is None
        assert CANARY not in str(record.__dict__)


def test_json_lines_have_the_redacted_traceback(log: io.StringIO) -> None:
    [handler] = [one for one in logging.getLogger().handlers if getattr(one, "stream", None) is log]
    handler.setFormatter(_json_formatter())
    logging.getLogger("any").error("it broke", exc_info=chained())
    record = json.loads(log.getvalue())
    assert record["message"] == "it broke"
    assert record["traceback"].endswith("RuntimeError")
    assert CANARY not in log.getvalue()
