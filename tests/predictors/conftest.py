from __future__ import annotations

from pathlib import Path

import pytest

from tests.predictors.fakes import write_artifact, write_rich_artifact


@pytest.fixture(scope="session")
def artifact_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid tiny artifact; tests must not write into it."""
    return write_artifact(tmp_path_factory.mktemp("artifacts") / "tiny")


@pytest.fixture(scope="session")
def rich_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with all heads, conditioned; tests must not write into it."""
    return write_rich_artifact(tmp_path_factory.mktemp("artifacts") / "rich")
