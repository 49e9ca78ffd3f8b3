"""vLLM's real scheduler and KV cache under sessions of agents, with a model that only takes time: hits, and cost of a step.

    PYTHONPATH=. .venv-vllm/bin/python -m benchmarks.agents.vllm_scheduler [--policies vllm fcfs hrrn working_set]
                                        [--sessions 48] [--turns 8] [--first_tokens 30000] [--kv_tokens 1000000]

Run by vLLM's Python (`make vllm-env`). Sessions run in a closed loop: a turn's context is the one before with its output and
the result of a tool, which takes exponentially distributed seconds. A step takes 12 ms, 1 s per 30,000 prompt tokens and
0.25 ms per output. `vllm` is vLLM's own scheduler; each policy runs in a process of its own. Scheduling is the CPU time of
`schedule`, `update_from_output` and arrivals in the calling thread, without the hashing of prompts, as a part of the time of
the steps.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request, RequestStatus

from benchmarks.shared.command import Parser
from benchmarks.vllm.real_scheduler import (
    BLOCK_TOKENS,
    TOKEN,
    VLLM,
    in_own_process,
    outputs_of,
    real_scheduler,
)
from scheduler_core.report.page import markdown_table

#: Token of the model that ends an output.
EOS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Sessions in a closed loop.

    Attributes:
        system_tokens: Tokens at the beginning that all contexts share.
        first_tokens, growth_tokens, output_tokens: Other tokens of the first context, of a tool's result, of an output.
        pause_s: Mean time from the end of a turn to the next one.
        kv_tokens: Size of the KV cache.
        named: Whether clients name their sessions: "hint", "session_id" or "no".
    """

    sessions: int
    turns: int
    first_tokens: int
    growth_tokens: int
    output_tokens: int
    pause_s: float
    kv_tokens: int
    system_tokens: int = 0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    named: str = "hint"
    seed: int = 0


class Sessions:
    """vLLM's scheduler and the sessions that it serves.

    Args:
        policy: Policy of our scheduler; None: vLLM's own scheduler.
        model: Folder of a model, for its configuration.
        load: The sessions.
    """

    def __init__(self, policy: str | None, model: Path, load: Load) -> None:
        max_tokens = (
            load.system_tokens + load.first_tokens + load.turns * (load.growth_tokens + load.output_tokens)
        )
        self.scheduler = real_scheduler(
            policy, model, load.kv_tokens // BLOCK_TOKENS, {"online_calibration": False}, max_model_len=max_tokens,
            max_num_seqs=load.max_num_seqs, max_num_batched_tokens=load.max_num_batched_tokens,
            enable_prefix_caching=True, hf_overrides={"max_position_embeddings": max_tokens},
        )  # fmt: skip
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.load = load
        self.now = 0.0
        if policy is not None:
            self.scheduler._tailcast_clock = self.scheduler.waiting._clock = lambda: self.now
        self.rng = np.random.default_rng(load.seed)
        system = self._text(load.system_tokens)
        self._contexts = [system + self._text(load.first_tokens) for _ in range(load.sessions)]
        self.turns = [0] * load.sessions
        self._due = dict.fromkeys(range(load.sessions), 0.0)
        self._sent_s: dict[str, float] = {}
        self.num_requests = self.num_steps = self.num_held = 0
        self.prompt_tokens = self.hit_tokens = 0
        self.ttft_s: list[float] = []
        self.cpu_s = 0.0
        #: Session of each live request.
        self.live: dict[str, int] = {}

    def run(self) -> None:
        """Runs until all sessions have had their turns. AssertionError if vLLM plans a step without work."""
        while self.live or self._due:
            if not self.live:
                self.now = max(self.now, min(self._due.values()))
            for session in [session for session, due_s in self._due.items() if due_s <= self.now]:
                del self._due[session]
                self._send(session)
            self.step()

    def step(self) -> None:
        """Plans and completes a step."""
        scheduler = self.scheduler
        begin = time.thread_time()
        plan = scheduler.schedule()
        self.cpu_s += time.thread_time() - begin
        self.num_steps += 1
        assert plan.num_scheduled_tokens, "no work although requests wait"
        self.num_held += len(scheduler.waiting) > 0 and not scheduler.waiting
        for data in plan.scheduled_new_reqs:
            self.prompt_tokens += scheduler.requests[data.req_id].num_prompt_tokens
            self.hit_tokens += data.num_computed_tokens
        num_decodes = sum(count == 1 for count in plan.num_scheduled_tokens.values())
        self.now += 0.012 + (plan.total_num_scheduled_tokens - num_decodes) / 30_000 + 0.00025 * num_decodes
        result = outputs_of(scheduler, plan)
        for name, tokens in zip(result.req_ids, result.sampled_token_ids, strict=True):
            if tokens and name in self._sent_s:
                self.ttft_s.append(self.now - self._sent_s.pop(name))
        begin = time.thread_time()
        outputs = scheduler.update_from_output(plan, result)
        self.cpu_s += time.thread_time() - begin
        for output in (one for each in outputs.values() for one in each.outputs):
            if output.finish_reason is not None:
                self._end(self.live.pop(output.request_id))

    def abort(self, name: str) -> None:
        """The client goes away, and returns with the same turn."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self._sent_s.pop(name, None)
        self._due[self.live.pop(name)] = self.now + self.load.pause_s

    def _text(self, num_tokens: int) -> list[int]:
        return [int(token) for token in self.rng.integers(TOKEN + 1, 2**14, num_tokens)]

    def _send(self, session: int) -> None:
        name, load = f"s{session}", self.load
        hints = {"tailcast_session": name} if load.named == "hint" else None
        sampling = SamplingParams(max_tokens=load.output_tokens, temperature=0.0, extra_args=hints)
        sampling.update_from_generation_config({}, EOS)
        request = Request(
            f"r{self.num_requests}", list(self._contexts[session]), sampling, None, block_hasher=self._hasher,
            session_id=name if load.named == "session_id" else None,
        )  # fmt: skip
        self.num_requests += 1
        self.live[request.request_id] = session
        self._sent_s[request.request_id] = self.now
        begin = time.thread_time()
        self.scheduler.add_request(request)
        self.cpu_s += time.thread_time() - begin

    def _end(self, session: int) -> None:
        load = self.load
        self.turns[session] += 1
        if self.turns[session] < load.turns:
            self._contexts[session] += [TOKEN] * load.output_tokens + self._text(load.growth_tokens)
            self._due[session] = self.now + float(self.rng.exponential(load.pause_s))


def measured(policy: str | None, model: Path, load: Load) -> list[float]:
    """The columns of the table."""
    sessions = Sessions(policy, model, load)
    sessions.run()
    ttft_s = np.array(sessions.ttft_s)
    return [
        sum(sessions.turns) / sessions.now,
        ttft_s.mean(),
        float(np.percentile(ttft_s, 50)),
        float(np.percentile(ttft_s, 99)),
        sessions.hit_tokens / sessions.prompt_tokens,
        1e3 * sessions.cpu_s / sessions.num_steps,
        1e2 * sessions.cpu_s / sessions.now,
    ]


def main() -> None:
    """Runs all policies and prints the table."""
    parser = Parser(__doc__)
    parser.add_argument("--policies", nargs="+", default=[VLLM, "fcfs", "hrrn", "working_set"])
    for name, value in (("sessions", 48), ("turns", 8), ("first_tokens", 30_000), ("growth_tokens", 1500)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("output_tokens", 60), ("kv_tokens", 1_000_000), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--pause_s", type=float, default=8.0)
    options: argparse.Namespace = parser.parse_args()
    load = Load(**{name: value for name, value in vars(options).items() if name != "policies"})
    rows = []
    for policy in options.policies:
        values = in_own_process(measured, policy, load)
        rows.append((policy, *(f"{value:.2f}" for value in values)))
    columns = ("turns/s", "TTFT mean, s", "P50", "P99", "hits", "scheduling, ms per step", "% of the step")
    print(f"{load.sessions} sessions of {load.turns} turns, {load.kv_tokens:,} tokens of KV memory:\n")
    print(markdown_table(("scheduler", *columns), rows))


if __name__ == "__main__":
    main()
