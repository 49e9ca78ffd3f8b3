"""Agents through the proxy in front of a real vLLM whose KV memory is too small for their contexts: hits rise.

Minutes, in vLLM's own environment (see tests/data_gen/conftest.py).
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.data_gen.conftest import save_tiny_llama, vllm_environment, vllm_python
from tests.predictors.proxy.fake_engine import RunningProxy, running_proxy
from tests.scheduler_core.adapters.test_vllm_engine import Server, answers
from tests.waiting import taken

__all__ = ["vllm_python"]  # a fixture
pytestmark = pytest.mark.slow

NUM_SESSIONS, NUM_TURNS = 8, 6
#: Words, which are tokens, of the first prompt and of the result of a tool.
FIRST_WORDS, RESULT_WORDS = 1000, 60
#: Memory for less than half of the sessions, in tokens.
NUM_BLOCKS, BLOCK_TOKENS = 36, 128
PAUSE_S = 0.2


@pytest.fixture(scope="module")
def engine_url(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from benchmarks.shared.processes import free_port

    folder = tmp_path_factory.mktemp("vllm")
    model = save_llama(folder / "llama")
    port = free_port()
    command = [str(vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "tiny-llm", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "3000", "--enforce-eager", "--max-num-seqs", "16"]
    command += ["--num-gpu-blocks-override", str(NUM_BLOCKS), "--block-size", str(BLOCK_TOKENS)]
    command += ["--enable-prompt-tokens-details"]
    server = Server(command, vllm_environment(), folder / "log")
    try:
        server.wait(lambda: answers(f"http://127.0.0.1:{port}/health"), 900)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()


def save_llama(folder: Path) -> Path:
    """A model that takes about a second for a first prompt, so that a context is worth its memory."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    save_tiny_llama(folder, hidden_size=128, heads=4, kv_heads=2)
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12, "num_attention_heads": 8}
    config = LlamaConfig.from_pretrained(folder, **sizes, num_key_value_heads=8, head_dim=64)
    config.max_position_embeddings = 4096
    torch.manual_seed(0)
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    return folder


def words(seed: int, num: int) -> str:
    return " ".join(f"w{(seed * 31 + i * i + i) % 59}" for i in range(num))


async def agent(client: openai.AsyncOpenAI, number: int) -> int:
    """Calls a tool in each turn, whose result is the next message; the cached tokens of all turns."""
    cached = 0
    messages: list[dict[str, str]] = [{"role": "user", "content": words(number, FIRST_WORDS)}]
    for turn in range(NUM_TURNS):
        stream = await client.chat.completions.create(
            model="tiny-llm",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=8,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
            extra_headers={"x-session-id": str(number)},
        )
        output, usage = "", None
        async for chunk in stream:
            usage = chunk.usage or usage
            output += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert usage is not None
        assert usage.completion_tokens == 8
        details = usage.prompt_tokens_details
        cached += 0 if details is None else details.cached_tokens or 0
        messages.append({"role": "assistant", "content": output})
        messages.append({"role": "user", "content": words(97 * number + turn + 1, RESULT_WORDS)})
        await taken(PAUSE_S)
    return cached


async def hits(proxy: RunningProxy, first: int) -> int:
    """Cached tokens of all turns of new agents."""
    async with openai.AsyncOpenAI(
        base_url=f"{proxy.url}/v1", api_key="x", timeout=600, max_retries=0
    ) as client:
        return sum(await asyncio.gather(*(agent(client, first + number) for number in range(NUM_SESSIONS))))


async def test_hits_of_agents_rise(engine_url: str) -> None:
    options = {"release": 16, "predictor": "none"}
    async with running_proxy(engine_url, policy="fcfs", **options) as proxy:
        before = await hits(proxy, 100)
    async with running_proxy(engine_url, policy="working_set", **options) as proxy:
        assert await proxy.metric("tailcast_proxy_kv_tokens") == pytest.approx(
            NUM_BLOCKS * BLOCK_TOKENS, rel=0.05
        )
        after = await hits(proxy, 200)
        reported = await proxy.metric('tailcast_proxy_cached_tokens_total{by="engine"}')
        modeled = await proxy.metric('tailcast_proxy_cached_tokens_total{by="model"}')
        assert await proxy.metric("tailcast_proxy_sessions") == NUM_SESSIONS
    assert reported == after
    assert modeled == pytest.approx(reported, rel=0.3)
    assert after > 1.5 * before, (before, after)
