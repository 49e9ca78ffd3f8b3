"""Results of cells in a folder: a file each, whole or not there, so that a killed sweep goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scheduler_core.errors import InputError
from scheduler_core.files import write_json
from scheduler_core.simulator.metrics import with_cluster
from scheduler_core.simulator.run import SimulationResult
from scheduler_core.simulator.sweep.cells import Cell

SCHEMA = "tailcast.cell/2"


class CellStore:
    """Results by key.

    Args:
        folder: Where they are; made if it is missing.

    Raises:
        InputError: The folder cannot be made.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError("out", str(folder), f"a folder that can be made ({error.strerror})") from error

    def path(self, key: str) -> Path:
        """Where the result of the cell with this key is, or would be."""
        return self._folder / f"{key[:24]}.json"

    def read(self, key: str) -> dict[str, Any] | None:
        """The result; None if it is not there yet.

        Raises:
            InputError: What is there was not written by a sweep.
        """
        path = self.path(key)
        if not path.exists():
            return None
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            known = content["key"] == key and content["schema"] == SCHEMA
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError("out", str(path), "a folder with files of sweeps alone") from error
        if not known:
            raise InputError("out", str(path), f"a result of schema {SCHEMA} with key {key}")
        return content

    def write(self, key: str, cell: Cell, result: SimulationResult) -> dict[str, Any]:
        """Keeps a result, atomically; returns what `read` will."""
        content = {
            "schema": SCHEMA,
            "key": key,
            "settings": dict(cell.settings),
            "config": result.config,
            "versions": result.versions,
            "trace": result.trace,
            "metrics": with_cluster(result.metrics, result.cluster),
        }
        write_json(self.path(key), content)
        plain: dict[str, Any] = json.loads(json.dumps(content, sort_keys=True))
        return plain
