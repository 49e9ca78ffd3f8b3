"""The examples of predictors/README.md do what they say."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from predictors.runtime import open_runtime
from tests.predictors.fakes import running_server, write_artifact, write_rich_artifact

README = Path(__file__).resolve().parents[2] / "predictors" / "README.md"
CLIENT, PLAIN = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


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


@pytest.mark.parametrize("write", [write_artifact, write_rich_artifact])
def test_plain_onnxruntime_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Path]
) -> None:
    folder = write(tmp_path / "artifact")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(PLAIN, names)
    prompts = ["Name three rivers.", "Write an essay about tides."]
    found = open_runtime(folder).predict(prompts, ["tiny-llm", None], [0.7, None])
    np.testing.assert_allclose(names["mu"], found.mu, rtol=1e-6)
    np.testing.assert_allclose(names["sigma"], found.sigma, rtol=1e-6)
