"""Agents through the proxy in front of a real vLLM, both of which are killed: no session is lost.

Minutes, in vLLM's own environment (see tests/data_gen/conftest.py).
"""

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import openai
import pytest
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from benchmarks.shared.processes import free_port
from tests.data_gen.conftest import save_tiny_llama, vllm_environment, vllm_python
from tests.scheduler_core.adapters.test_vllm_engine import Server, answers

__all__ = ["vllm_python"]  # a fixture
pytestmark = pytest.mark.slow

NUM_SESSIONS, NUM_TURNS = 8, 6
#: Ended turns of all sessions after which the proxy, and then the engine, is killed.
PROXY_DIES_AT, ENGINE_DIES_AT = 12, 28


def save_llama(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    save_tiny_llama(folder, hidden_size=128, heads=4, kv_heads=2)
    config = LlamaConfig.from_pretrained(folder)
    config.max_position_embeddings = 1024
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    return folder


class Restartable:
    """A server that is started again on the same port after it was killed."""

    def __init__(self, command: list[str], environment: dict[str, str], health: str, log: Path) -> None:
        self._start: Callable[[], Server] = lambda: Server(command, environment, log)
        self._health = health
        self.server = self._start()

    def wait(self) -> None:
        self.server.wait(lambda: answers(self._health), 900)

    async def restart(self) -> None:
        await asyncio.to_thread(self.server.kill)
        self.server = self._start()


async def agent(client: openai.AsyncOpenAI, number: int, on_turn: Callable[[], object]) -> list[str]:
    """Calls a tool after each output, with its result as the next message; the outputs."""
    outputs: list[str] = []
    messages = [{"role": "user", "content": " ".join(f"w{(number * 7 + i) % 59}" for i in range(300))}]
    for turn in range(NUM_TURNS):
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type((openai.APIConnectionError, openai.InternalServerError)),
            wait=wait_fixed(0.5),
            stop=stop_after_delay(900),
        ):
            with attempt:
                response = await client.chat.completions.create(
                    model="tiny-llm",
                    messages=messages,  # type: ignore[arg-type]
                    max_tokens=8,
                    temperature=0.0,
                    extra_body={"ignore_eos": True},
                    extra_headers={"x-session-id": str(number)},
                )
                assert response.usage is not None
                assert response.usage.completion_tokens == 8
        outputs.append(response.choices[0].message.content or "")
        result = " ".join(f"w{(number + turn + i * i) % 59}" for i in range(40))
        messages += [
            {"role": "assistant", "content": outputs[-1]},
            {"role": "tool", "tool_call_id": f"call_{turn}", "content": result},
        ]
        on_turn()
    return outputs


async def test_no_session_is_lost_when_proxy_and_engine_are_killed(
    vllm_python: Path,
    tmp_path: Path,
) -> None:
    model, port, proxy_port, admin_port = (
        save_llama(tmp_path / "llama"),
        free_port(),
        free_port(),
        free_port(),
    )
    engine_url = f"http://127.0.0.1:{port}"
    command = [str(vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "tiny-llm", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--max-num-seqs", "16"]
    command += ["--num-gpu-blocks-override", "90", "--block-size", "32", "--enable-prompt-tokens-details"]
    engine = Restartable(command, vllm_environment(), f"{engine_url}/health", tmp_path / "engine.log")
    command = [sys.executable, "-m", "predictors.commands.tailcast_proxy", engine_url]
    command += ["--policy", "working_set", "--predictor", "none", "--release", "16"]
    command += ["--port", str(proxy_port), "--admin_port", str(admin_port)]
    proxy = Restartable(
        command, dict(os.environ), f"http://127.0.0.1:{admin_port}/healthz", tmp_path / "proxy.log"
    )
    try:
        await asyncio.to_thread(engine.wait)
        await asyncio.to_thread(proxy.wait)
        num_turns, restarts = 0, []

        def on_turn() -> None:
            nonlocal num_turns
            num_turns += 1
            if num_turns in (PROXY_DIES_AT, ENGINE_DIES_AT):
                dying = proxy if num_turns == PROXY_DIES_AT else engine
                restarts.append(asyncio.ensure_future(dying.restart()))

        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{proxy_port}/v1",
            api_key="x",
            max_retries=0,
            timeout=600,
            default_headers={"Connection": "close"},
        ) as client:
            outputs = await asyncio.gather(
                *(agent(client, number, on_turn) for number in range(NUM_SESSIONS))
            )
            assert len(restarts) == 2
            await asyncio.gather(*restarts)
            again = await asyncio.gather(*(agent(client, number, int) for number in range(NUM_SESSIONS)))
        assert num_turns == NUM_SESSIONS * NUM_TURNS
        assert outputs == again, "each session went on where it was"
    finally:
        for each in (engine, proxy):
            with suppress(ProcessLookupError):
                each.server.kill()
