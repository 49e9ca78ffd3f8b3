from __future__ import annotations

from pathlib import Path

import pytest

from tests.predictors.conftest import artifact_folder  # noqa: F401
from tests.service.harness import write_costly_artifact


@pytest.fixture(scope="session")
def costly_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny artifact that costs CPU; tests must not write into it."""
    return write_costly_artifact(tmp_path_factory.mktemp("artifacts") / "costly")
