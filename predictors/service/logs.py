"""Log lines as JSON objects, for programs to read; prompts are never logged."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the traceback where there is one, and `extra` fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        found = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        found |= {key: value for key, value in record.__dict__.items() if key not in STANDARD}
        return json.dumps(found, default=str, ensure_ascii=False)


def use_json() -> None:
    """Makes all handlers of the root logger write JSON."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter())
