"""The code in docs/artifact.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predictors.runtime import open_runtime
from scheduler_core.lengths import LogT
from tests.export.artifacts import write_text_artifact

PAGE = Path(__file__).parents[2] / "docs" / "artifact.md"
PROMPTS = ["Name three rivers.", "Write an essay on the history of tides."]


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_code_of_the_page_gives_the_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text_artifact(tmp_path / "artifact")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 2
    values: dict[str, Any] = {}
    for block in blocks:
        exec(block, values)
    wanted = open_runtime("artifact").predict(PROMPTS, [None, None], [1.0, None])
    np.testing.assert_allclose(values["found"]["mu"], wanted.mu, rtol=1e-6)
    np.testing.assert_allclose(values["found"]["sigma"], wanted.sigma, rtol=1e-6)
    lengths = LogT(wanted.mu, wanted.sigma, 3.5)
    np.testing.assert_allclose(values["expected"], lengths.expected([256, 4096]), rtol=1e-4)
    np.testing.assert_allclose(values["cvar"], lengths.cvar(0.9, [256, 4096]), rtol=1e-4)


def test_a_dozen_lines_are_no_more() -> None:
    [block, _] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    statements = [line for line in block.splitlines() if line and not line.startswith(("import", "from"))]
    assert len(statements) <= 12
