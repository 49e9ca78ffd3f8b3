"""The command, and the page about it."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from predictors.cli_proxy import main
from predictors.proxy.config import ProxyConfig
from predictors.proxy.server import ProxyServer
from scheduler_core.command import command
from tests.predictors.proxy.fake_engine import CHAT, chat, paused, running_engine, stream_events, until

ROOT = Path(__file__).parents[3]


BAD_OPTIONS = {
    "": "missing: ENGINE_URL",
    "ftp://x": "engine_url: got 'ftp://x'; allowed: http://HOST:PORT",
    "URL --policy best": "policy: got 'best'",
    "URL --policy no.such:Policy": "policy: got 'no.such:Policy'",
    "URL --policy hrrn --engine vllm": "the key of policy hrrn changes while a request waits",
    "URL --policy s3": "policy s3 reserves KV memory, which the engine allocates itself",
    "URL --policy slai": "policy slai forms batches, which the engine forms itself",
    "URL --policy tie --policy_parameters '{gamma: 2}'": "gamma: got 2",
    "URL --predictor http://x": "predictor: got 'http://x'; allowed: pretrained, tiny, an artifact folder, or grpc://HOST:PORT",
    "URL --predictor no/such/folder": "predictor: got 'no/such/folder'",
    "URL --shadow_predictor x": "shadow_predictor: got 'x'; allowed: only together with feedback",
    "URL --slo_ttft_ms '[1, 2]'": "slo_ttft_ms: got [1, 2]",
    "URL --deadline_s 0": "deadline_s: got 0.0; allowed: seconds > 0, at most 60",
    "URL --client_priority drop": "client_priority",
}


@pytest.mark.parametrize("options", BAD_OPTIONS)
def test_bad_options_are_one_line(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(options.replace("URL", "http://127.0.0.1:1"))) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert BAD_OPTIONS[options] in line


def test_every_command_of_the_page_is_accepted() -> None:
    found: list[ProxyConfig] = []
    text = (ROOT / "docs" / "proxy.md").read_text()
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("tailcast-proxy http")]
    assert len(lines) == 5
    main = command("tailcast-proxy", ProxyConfig, found.append, positionals=("engine_url",), extra="serve")
    for line in lines:
        words = shlex.split(line.replace("path/to/artifact", str(ROOT)).replace("GATEWAY", "gateway"))[1:]
        assert main(words) == 0
        ProxyServer(found[-1])
    assert [config.engine for config in found] == ["vllm", "sglang", "dynamo", "llm-d", "none"]


async def test_sigterm_answers_what_is_inside_and_ends_with_0(artifact_folder: Path, tmp_path: Path) -> None:
    go = asyncio.Event()

    ports, log = tmp_path / "ports", tmp_path / "log"
    async with running_engine(paused(stream_events(["a", "b"], 2), go)) as fake:
        options = f"--engine vllm --predictor {artifact_folder} --port 0 --admin_port 0 --port_file {ports}"
        options += f" --feedback {log} --feedback_usage true --log_format json --access_log true"
        words = [fake.url, *options.split()]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "predictors.cli_proxy", *words, cwd=ROOT, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(120):
            while not ports.exists():
                assert process.returncode is None
                await asyncio.sleep(0.05)
            port, admin = ports.read_text().split()
            async with aiohttp.ClientSession() as client:
                for path in ("healthz", "readyz"):
                    async with client.get(f"http://127.0.0.1:{admin}/{path}") as response:
                        assert response.status == 200
                _, writer = await asyncio.open_connection("127.0.0.1", int(port))
                writer.write(b"GET / HTTP/1.1\r\nAuthorization Bearer canary4711\r\n\r\n")
                await writer.drain()
                body = chat("name sea", stream=True)
                async with client.post(f"http://127.0.0.1:{port}{CHAT}", json=body) as response:
                    assert await response.content.readany()
                    process.send_signal(signal.SIGTERM)
                    await until(lambda: not ports.exists() or process.returncode is not None)
                    go.set()
                    rest = await response.read()
            _, errors = await process.communicate()
    assert process.returncode == 0
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b'"usage"' not in rest
    writer.close()
    assert b"canary4711" not in errors
    lines = [json.loads(line) for line in errors.decode().splitlines()]
    assert any("BadHttpMessage" in line["message"] for line in lines)
    assert [line["code"] for line in lines if "code" in line] == ["200"]
    [segment] = log.iterdir()
    record = json.loads(segment.read_text())
    assert (record["output_tokens"], record["finish_reason"]) == (2, "stop")
