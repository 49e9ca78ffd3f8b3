"""A worker of `serve-predictor --workers N`: `python -m predictors.service.worker CONFIG NUMBER READY_FD`."""

from __future__ import annotations

import json
import logging
import sys

from predictors.cli import ServeConfig, serve_worker
from scheduler_core.errors import TailcastError


def main(arguments: list[str]) -> int:
    """Serves until SIGTERM or until its supervisor ends; 2 if that cannot be."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    config, number, ready_fd = arguments
    try:
        return serve_worker(ServeConfig(**json.loads(config)), int(number), int(ready_fd))
    except (TailcastError, OSError) as error:
        sys.stderr.write(f"serve-predictor: error: {error}\n")
        return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
