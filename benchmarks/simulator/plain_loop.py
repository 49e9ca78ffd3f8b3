"""Vidur's Sarathi and vLLM schedulers on one replica as a plain loop: the baseline of `simulator.py`.

Independent of the package except for the class of the cost tables: no classes, lists as queues, one pass of
the loop per iteration. Rules: Agrawal et al. 2024 (Vidur) and its code (microsoft/vidur @ 7d47513).
"""

from __future__ import annotations

from typing import Any

from scheduler_core.simulator.step_time.operator_table import OperatorTable

BLOCK = 16


def layer_s(table: OperatorTable, batch: list[tuple[dict[str, Any], int]]) -> float:
    """Time of one iteration of (request, tokens to process) pairs, in seconds."""
    total = sum(tokens for _, tokens in batch)
    seconds = float(table.tokens_s[total])
    decodes = [r["done"] for r, _ in batch if r["done"] >= r["prompt"]]
    if decodes:
        mean = int(sum(decodes) / len(decodes))
        factor = 1 + table.batching_overhead if len(decodes) > 1 else 1
        seconds += float(table.decode_s[len(decodes), (mean + 63) // 64]) * factor
    prompts = [(r["done"], tokens) for r, tokens in batch if r["done"] < r["prompt"]]
    if prompts:
        row = sum((done + 63) // 64 for done, _ in prompts)
        size = round(sum(tokens**2 for _, tokens in prompts) ** 0.5)
        factor = 1 + table.batching_overhead if len(prompts) > 1 else 1
        seconds += float(table.prefill_s[row, size]) * factor
    return seconds * table.num_layers


def simulate(
    requests: list[tuple[float, int, int]],
    table: OperatorTable,
    *,
    scheduler: str,
    budget: int,
    num_blocks: int,
    max_num_seqs: int = 128,
) -> list[tuple[float, float]]:
    """Times of the first and last token of each request.

    Args:
        requests: (arrival in seconds, prompt tokens, output tokens), by arrival.
        table: Operator costs.
        scheduler: "sarathi" or "vllm".
        budget: Maximum tokens in an iteration: Sarathi's chunk, vLLM's padded limit.
        num_blocks: Blocks of the KV cache.
        cap: Maximum number of requests in a batch.
    """
    every = [
        {"at": at, "prompt": p, "total": p + o, "done": 0, "blocks": 0, "first": 0.0, "last": 0.0}
        for at, p, o in requests
    ]
    waiting: list[dict[str, Any]] = []
    running: list[dict[str, Any]] = []
    free, coming, now = num_blocks, 0, 0.0

    def restart(r: dict[str, Any]) -> None:
        nonlocal free
        free += r["blocks"]
        r["prompt"], r["done"], r["blocks"] = r["done"], 0, 0
        waiting.insert(0, r)

    def decode(
        left: list[dict[str, Any]], prompts: list[dict[str, Any]], batch: list[tuple[dict[str, Any], int]]
    ) -> None:
        nonlocal free
        while left:
            r = left.pop(0)
            while free < 1:
                victim = prompts.pop() if prompts else left.pop() if left else r
                running.remove(victim)
                restart(victim)
                if victim is r:
                    break
            else:
                if r["done"] > r["blocks"] * BLOCK:
                    r["blocks"], free = r["blocks"] + 1, free - 1
                batch.append((r, 1))

    while coming < len(every) or waiting or running:
        if not waiting and not running:
            now = max(now, every[coming]["at"])
        while coming < len(every) and every[coming]["at"] <= now:
            waiting.append(every[coming])
            coming += 1
        batch: list[tuple[dict[str, Any], int]] = []
        left = [r for r in running if r["done"] >= r["prompt"]]
        prompts = [r for r in running if r["done"] < r["prompt"]]

        used = 0
        if scheduler == "sarathi":
            decode(left, prompts, batch)
            used = len(batch)
            for r in prompts:
                tokens = min(r["prompt"] - r["done"], budget - used)
                if tokens > 0:
                    batch.append((r, tokens))
                    used += tokens
        longest = num = 0
        while waiting and len(running) < max_num_seqs:
            r = waiting[0]
            need = -(-r["prompt"] // BLOCK)
            if free - need < int(0.01 * num_blocks):
                break
            tokens = min(r["prompt"], budget - used) if scheduler == "sarathi" else r["prompt"]
            longest, num = max(longest, tokens), num + 1
            if tokens <= 0 or (scheduler == "vllm" and num * longest > budget):
                break
            waiting.pop(0)
            running.append(r)
            r["blocks"], free, used = need, free - need, used + tokens
            batch.append((r, tokens))
        if scheduler == "vllm" and not batch:
            decode(left, prompts, batch)
        now += layer_s(table, batch)
        for r, tokens in batch:
            r["done"] += tokens
            if r["done"] == r["prompt"]:
                r["done"] += 1
                r["first"] = r["first"] or now
            if r["done"] == r["total"]:
                r["last"] = now
                free += r["blocks"]
                running.remove(r)
    return [(r["first"], r["last"]) for r in every]
