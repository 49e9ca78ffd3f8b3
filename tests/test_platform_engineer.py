"""The week of a platform engineer: an agent's log, a proxy with streams and tools, a better artifact, a reload, a capacity.

Every step is a command or a client of the real world; only the engine is scripted.
"""

import asyncio
import json
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pyarrow.parquet as pq
from aiohttp import web
from openai import AsyncOpenAI

from scheduler_core.prediction.api_request import read_request
from tests.fake_openai import event
from tests.predictors.proxy.fake_engine import running_engine
from tests.training.test_adapt import prompts, replaceable_artifact, shifted

ROOT = Path(__file__).parents[1]
MODEL = "tiny-llm"
TOOLS: Any = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
]


async def command(line: str) -> str:
    """Runs a command of this checkout; returns all that it wrote."""
    name, *arguments = shlex.split(line)
    modules = {"import-lengths": "data_gen.commands.import_lengths", "adapt": "training.commands.adapt"}
    words = ["-m", modules.get(name, "scheduler_core.simulator.commands.simulate"), *arguments]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, cwd=ROOT, stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )
    text = (await process.communicate())[0].decode()
    assert process.returncode == 0, text
    return text


def agent_log(path: Path) -> Path:
    """Twenty sessions of eight calls, each with the results of the tools so far, one call every two seconds."""
    rng = np.random.default_rng(3)
    lines = []
    for session in range(20):
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": ""},
            {"role": "user", "content": f"Task {session}"},
        ]
        for turn in range(8):
            number, tokens = 8 * session + turn, int(rng.integers(20, 200))
            usage = {"prompt_tokens": 200 + 150 * turn, "completion_tokens": tokens}
            choice = {"index": 0, "finish_reason": "tool_calls" if turn < 7 else "stop"}
            response = {
                "id": f"c{number}",
                "created": 1_790_000_000 + 2 * number,
                "model": MODEL,
                "usage": usage,
                "choices": [choice],
            }
            request = {"model": MODEL, "messages": list(messages), "tools": TOOLS, "max_tokens": -1}
            lines.append(json.dumps({"request": request, "response": response}))
            call = {"id": f"t{number}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"t{number}", "content": f"result {number}"})
    path.write_text("\n".join(lines) + "\n")
    return path


async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
    """An output as long as the artifact's predictions, half a log token longer, in the form that the client asked for."""
    if request.method == "GET":  # the proxy asks whether the engine is there
        return web.Response()
    content = json.loads(body)
    fields = read_request(content)
    tokens = shifted(fields.text(), np.random.default_rng(len(body)))
    usage = {"prompt_tokens": 9, "completion_tokens": tokens}
    if request.path == "/v1/responses":
        usage = {"input_tokens": 9, "output_tokens": tokens}
        done = {
            "id": "r",
            "object": "response",
            "status": "completed",
            "model": MODEL,
            "output": [],
            "usage": usage,
        }
        if not fields.is_stream:
            return web.json_response(done)
        deltas: list[dict[str, Any]] = [{"type": "response.output_text.delta", "delta": "x"}] * 3
        return await stream(request, [*deltas, {"type": "response.completed", "response": done}])
    if not fields.is_stream:
        choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
        return web.json_response({"id": "c", "model": MODEL, "choices": [choice], "usage": usage})
    call = {"index": 0, "id": "t", "type": "function", "function": {"name": "look", "arguments": ""}}
    deltas = [
        {"reasoning": "hm"},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
    ]
    chunks: list[dict[str, Any]] = [
        {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        for delta in deltas
    ]  # fmt: skip
    chunks.append({**chunks[0], "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    if fields.include_usage:
        chunks.append({**chunks[0], "choices": [], "usage": usage})
    return await stream(request, chunks)


async def stream(request: web.Request, events: list[dict[str, Any]]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for content in events:
        await response.write(event(content))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


@dataclass
class Proxy:
    """A running `tailcast-proxy`."""

    process: asyncio.subprocess.Process
    url: str
    lines: list[str]

    async def logged(self, text: str) -> str:
        """Waits for a line of the log."""
        assert self.process.stderr is not None
        while not (self.lines and text in self.lines[-1]):
            line = await self.process.stderr.readline()
            assert line, "".join(self.lines)
            self.lines.append(line.decode())
        return self.lines[-1]


@asynccontextmanager
async def running(engine_url: str, ports: Path, *options: str) -> AsyncIterator[Proxy]:
    words = [
        sys.executable,
        "-m",
        "predictors.commands.tailcast_proxy",
        engine_url,
        "--engine",
        "vllm",
        "--port",
        "0",
    ]
    process = await asyncio.create_subprocess_exec(
        *words, "--port_file", str(ports), *options, cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )
    proxy = Proxy(process, "", [])
    try:
        await proxy.logged("ready on")
        proxy.url = f"http://127.0.0.1:{ports.read_text().split()[0]}"
        yield proxy
        process.send_signal(signal.SIGTERM)
        await proxy.logged("stopped")
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def converse(url: str, texts: list[str]) -> None:
    """Agents and applications of four kinds, with the openai client and over HTTP."""
    async with (
        AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
        aiohttp.ClientSession() as session,
    ):
        for number, text in enumerate(texts):
            user: Any = {"role": "user", "content": text}
            if number % 4 == 0:  # a stream of an agent, whose last message is the result of a tool
                call = {"id": "t", "type": "function", "function": {"name": "look", "arguments": "{}"}}
                history: Any = [
                    user,
                    {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "t", "content": "sea"},
                ]
                chunks = await client.chat.completions.create(
                    model=MODEL, messages=history, tools=TOOLS, stream=True
                )
                deltas = [chunk.choices[0] async for chunk in chunks]
                assert deltas[-1].finish_reason == "tool_calls"
            elif number % 4 == 1:
                reply = await client.responses.create(model=MODEL, input=text, max_output_tokens=3000)
                assert reply.status == "completed"
            elif number % 4 == 2:
                events = await client.responses.create(model=MODEL, input=[user], stream=True)
                assert [item.type async for item in events][-1] == "response.completed"
            else:
                body = {"model": MODEL, "messages": [user], "max_tokens": 3000}
                async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                    assert response.status == 200


def records(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()
    ]


async def test_the_week_of_a_platform_engineer(tmp_path: Path) -> None:
    trace, samples, log = tmp_path / "trace.parquet", tmp_path / "samples.parquet", tmp_path / "log"

    # The agent log becomes a trace, without a row less.
    agents = agent_log(tmp_path / "agents.jsonl")
    text = await command(f"import-lengths openai-log {agents} --schema trace --out {trace}")
    assert pq.read_metadata(trace).num_rows == 160, text

    # The proxy meets streams, tools, reasoning and the Responses API; its log makes a better artifact, which it loads.
    artifact, texts = replaceable_artifact(tmp_path / "artifact"), prompts(240)
    options = f"--predictor {artifact} --feedback {log} --feedback_prompts stored --deadline_s 20"
    async with (
        asyncio.timeout(300),
        running_engine(answer) as engine,
        running(engine.url, tmp_path / "ports", *shlex.split(options)) as proxy,
    ):
        await converse(proxy.url, texts)
        sent = [request[2]["X-Vllm-Priority"] for request in engine.requests if request[0] == "POST"]
        assert len(set(sent)) > 100
        await command(f"adapt {log} --artifact {artifact} --out {artifact} --overwrite true --progress false")
        proxy.process.send_signal(signal.SIGHUP)
        assert "predictor: version" in await proxy.logged("reloaded:")
        await converse(proxy.url, texts[:4])
    written = records(log)
    assert {record["counted_by"] for record in written} == {"usage"}
    assert {record["served_model"] for record in written} == {MODEL}
    assert sum(record["ttft_s"] is not None for record in written) == len(written) / 2, "of the streams"
    assert all(record["mu"] is not None for record in written)
    versions = [record["artifact_version"] for record in written]
    assert len({*versions[:240]}) == len({*versions[240:]}) == 1
    assert versions[0] != versions[-1]

    # The log imports whole.
    await command(f"import-lengths feedback {log} --out {samples}")
    table = pq.read_table(samples)
    assert table.num_rows == len(written) == 244
    assert {*table["finish_reason"].to_pylist()} == {"stop"}
    assert {*table["prompt"].to_pylist()} == {*texts}

    # Requests per second and number of replicas; a log of five minutes is repeated until the answer is steady.
    fast = f"--trace {trace} --default_max_tokens 400 --repeat 5 --max_seeds 2 --scheduler.max_num_seqs 16"
    for name, target in (("capacity", "{ttft_s.p50: 2.0}"), ("replicas", "{ttft_s.p99: 2.0}")):
        text = await command(f"simulate {name} {fast} --at_most '{target}' --json {tmp_path}/{name}.json")
        result = json.loads((tmp_path / f"{name}.json").read_text())
        assert result["level" if name == "capacity" else "num_replicas"] > 0, text
