"""The engine's process, in vLLM's own environment: serves runs that come as JSON lines on its standard input.

    python -m benchmarks.vllm_runs.engine '{"engine": {...}, "kind": "stock" or "tailcast"}'

A run: {"out": file, "temperature": t, "requests": [{request_id, prompt, at_s, seed, max_tokens, priority}, ...]}. Requests
are sent at their times, whether the engine is behind or not (open loop).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


async def main() -> None:
    """Serves until the input ends."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    task = json.loads(sys.argv[1])
    config = AsyncEngineArgs(**task["engine"], disable_log_stats=True).create_engine_config()
    scheduler = config.scheduler_config
    name = "LoggedAsyncScheduler" if scheduler.async_scheduling else "LoggedScheduler"
    if task["kind"] == "tailcast":
        name = "LoggedTailcastScheduler"
    scheduler.scheduler_cls = f"benchmarks.vllm_runs.step_log.{name}"
    engine = AsyncLLM.from_vllm_config(config)
    tokenizer = engine.get_tokenizer()
    if asyncio.iscoroutine(tokenizer):
        tokenizer = await tokenizer
    loop = asyncio.get_running_loop()
    await _serve(engine, tokenizer, {"temperature": 1.0, "requests": _warm_up()})
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        run = json.loads(line)
        result = await _serve(engine, tokenizer, run)
        result["steps"] = _steps(result["begin"], result["end"])
        result["scheduler"], result["async"] = name, bool(scheduler.async_scheduling)
        partial = Path(run["out"] + ".partial")
        partial.write_text(json.dumps(result), encoding="utf-8")
        partial.replace(run["out"])
    engine.shutdown()
    os._exit(0)


def _steps(begin: float, end: float) -> list[list[float]]:
    """What the scheduler has logged between two times, see step_log.py; it writes everything out when nobody runs."""
    lines = Path(os.environ["TAILCAST_STEP_LOG"]).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.endswith("]")]
    return [row[1:] for row in rows if begin <= row[0] <= end]


def _warm_up() -> list[dict[str, Any]]:
    return [
        {
            "request_id": f"w{i}",
            "prompt": "Name three rivers.",
            "at_s": 0,
            "seed": i,
            "max_tokens": 8,
            "priority": 0,
        }
        for i in range(4)
    ]


async def _serve(engine: Any, tokenizer: Any, run: dict[str, Any]) -> dict[str, Any]:
    ids = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, return_dict=False
        )
        for row in run["requests"]
    ]
    begin = time.monotonic() + 0.1
    rows = await asyncio.gather(
        *(
            _request(engine, row, prompt, begin, run["temperature"])
            for row, prompt in zip(run["requests"], ids, strict=True)
        )
    )
    return {"begin": begin, "end": time.monotonic(), "requests": rows}


async def _request(
    engine: Any, row: dict[str, Any], ids: list[int], begin: float, temperature: float
) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    parameters = SamplingParams(
        max_tokens=row["max_tokens"],
        temperature=temperature,
        seed=row["seed"],
        output_kind=RequestOutputKind.DELTA,
    )
    await asyncio.sleep(max(begin + row["at_s"] - time.monotonic(), 0))
    sent, first, tokens, reason = time.monotonic(), None, 0, None
    prompt = {"prompt_token_ids": ids}
    async for output in engine.generate(prompt, parameters, row["request_id"], priority=row["priority"]):
        tokens += len(output.outputs[0].token_ids)
        if first is None and tokens:
            first = time.monotonic()
        reason = output.outputs[0].finish_reason
    return {
        "request_id": row["request_id"], "arrival_s": sent - begin, "first_token_s": (first or 0.0) - begin,
        "finish_s": time.monotonic() - begin, "prompt_tokens": len(ids), "output_tokens": tokens, "finish_reason": reason,
    }  # fmt: skip


if __name__ == "__main__":
    asyncio.run(main())
