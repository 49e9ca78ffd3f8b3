"""Published files: the manifest's JSON Schema, the code of the .proto, and examples of the pages, which run as they stand there."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from predictors.manifest import FORMAT_VERSION, manifest_schema
from predictors.proto.generate import generate
from predictors.runtime import open_runtime
from tests.predictors.fakes import running_server, write_artifact, write_rich_artifact

SCHEMA = json.loads(
    resources.files("predictors").joinpath("manifest.schema.json").read_text(encoding="utf-8")
)


def errors(content: object) -> list[str]:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    return [error.json_path for error in validator.iter_errors(content)]


def read(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return content


def test_schema_is_that_of_the_types() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert manifest_schema() == SCHEMA, "python -m predictors.manifest > predictors/manifest.schema.json"
    assert SCHEMA["properties"]["format_version"]["const"] == FORMAT_VERSION


def test_manifests_fit(artifact_folder: Path, rich_folder: Path) -> None:
    for folder in (artifact_folder, rich_folder):
        assert errors(read(folder)) == []
        assert read(folder).keys() == SCHEMA["properties"].keys() == set(SCHEMA["required"])


def test_checked_in_code_is_what_the_proto_generates(tmp_path: Path) -> None:
    assert generate(tmp_path) == 0
    fresh = [path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*")]
    assert len(fresh) == 6
    for path in fresh:
        advice = f"run python -m predictors.proto.generate ({path.name})"
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), advice


ROOT = Path(__file__).resolve().parents[2]
CLIENT, PLAIN = (
    re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)[0]
    for page in ("predictors/README.md", "docs/artifact.md")
)


async def test_client_example(artifact_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with running_server(open_runtime(artifact_folder)) as (_, address):
        code = CLIENT.replace("127.0.0.1:50051", address)
        names: dict[str, object] = {}
        # The example starts its own loop, so it runs in a thread; the server stays in this one.
        code = code.replace("asyncio.run(ask(", "run(ask(")
        loop = asyncio.get_running_loop()
        names["run"] = lambda call: asyncio.run_coroutine_threadsafe(call, loop).result(timeout=20)
        await asyncio.to_thread(exec, code, names)
    median, p90, p99 = (float(number) for number in re.findall(r"[\d.]+", capsys.readouterr().out))
    assert 1 < median < p90 < p99


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("write", [write_artifact, write_rich_artifact])
def test_plain_onnxruntime_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Path]
) -> None:
    write(tmp_path / "artifact")
    monkeypatch.chdir(tmp_path)
    values: dict[str, Any] = {}
    exec(PLAIN, values)
    statements = [line for line in PLAIN.splitlines() if line and not line.startswith(("import", "from"))]
    assert len(statements) <= 12
    prompts = ["Name three rivers.", "Write an essay on the history of tides."]
    expected = open_runtime("artifact").predict(prompts, [None, None], [1.0, None])
    np.testing.assert_allclose(values["predictions"]["mu"], expected.mu, rtol=1e-6)
    np.testing.assert_allclose(values["predictions"]["sigma"], expected.sigma, rtol=1e-6)
