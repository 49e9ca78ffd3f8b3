"""What the proxy sends, read by vLLM's own request models."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.data_gen.conftest import vllm_environment, vllm_python
from tests.predictors.proxy.fake_engine import CHAT, chat, running_engine, running_proxy

READ = """
import json, sys
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
chat, text = json.load(sys.stdin)
found = [ChatCompletionRequest.model_validate(chat), CompletionRequest.model_validate(text)]
print(json.dumps([[one.priority, one.stream_options.include_usage, sorted(one.model_extra or {})] for one in found]))
"""


__all__ = ["vllm_python"]  # a fixture


@pytest.mark.slow
async def test_vllm_reads_priority_and_the_wish_for_counts(
    artifact_folder: Path, tmp_path: Path, vllm_python: Path
) -> None:
    options: dict[str, Any] = {
        "engine": "vllm",
        "predictor": str(artifact_folder),
        "feedback": str(tmp_path),
        "feedback_usage": True,
    }
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        for path, body in (
            (CHAT, chat("name sea", stream=True)),
            ("/v1/completions", {"model": "m", "prompt": "name sea", "stream": True, "max_tokens": 9}),
        ):
            assert (await proxy.post(body, path=path))[0] == 200
        sent = fake.bodies
    done = subprocess.run(
        [str(vllm_python), "-c", READ], input=json.dumps(sent), env=vllm_environment(), capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == [[body["priority"], True, []] for body in sent]
    assert all(number != 0 for number, _, _ in found)
