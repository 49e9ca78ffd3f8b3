"""The code in docs/artifact.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predictors.runtime import open_runtime
from tests.predictors.fakes import write_rich_artifact

PAGE = Path(__file__).parents[2] / "docs" / "artifact.md"
PROMPTS = ["Name three rivers.", "Write an essay on the history of tides."]


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_code_of_the_page_gives_the_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rich_artifact(tmp_path / "artifact")
    monkeypatch.chdir(tmp_path)
    [block] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    values: dict[str, Any] = {}
    exec(block, values)
    statements = [line for line in block.splitlines() if line and not line.startswith(("import", "from"))]
    assert len(statements) <= 12
    expected = open_runtime("artifact").predict(PROMPTS, [None, None], [1.0, None])
    np.testing.assert_allclose(values["predictions"]["mu"], expected.mu, rtol=1e-6)
    np.testing.assert_allclose(values["predictions"]["sigma"], expected.sigma, rtol=1e-6)
