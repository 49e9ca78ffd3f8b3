"""Log lines as JSON objects, for programs to read; prompts are never logged."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from predictors.edge_logging import redact_request_data

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
        if record.exc_info or record.exc_text:
            found["traceback"] = record.exc_text or self.formatException(
                record.exc_info or (None, None, None)
            )
        found |= {key: value for key, value in record.__dict__.items() if key not in STANDARD}
        return json.dumps(found, default=str, ensure_ascii=False)


def set_up_logs(log_format: str) -> None:
    """Makes the handlers of the root logger write `text` or `json`, without what clients have sent."""
    if log_format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())
    redact_request_data()
