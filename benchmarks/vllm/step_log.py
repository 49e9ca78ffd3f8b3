"""vLLM's scheduler and ours, both with a step log; imported only by vLLM's Python."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from scheduler_core.adapters.vllm import scheduler_class

#: Environment variable with the name of the file.
VARIABLE = "TAILCAST_STEP_LOG"


class StepLog:
    """Writes one JSON line per step: [end, seconds, prefill tokens, decodes, context tokens, new tokens, seconds of scheduling,
    tokens before the chunks of prompts, decodes held back, waiting requests, used fraction of the KV cache, preemptions].

    A decode is held back if its request is in memory with all its tokens computed, and the step does not include it. A step starts at the end of the previous one if that left requests unfinished, so that it includes the
    engine's time between two steps.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._log = open(os.environ[VARIABLE], "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._open_steps: deque[tuple[float, float, list[int], list[float]]] = deque()
        self._ended_s = 0.0
        self._was_busy = False

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic()
        before = {name: request.num_computed_tokens for name, request in self.requests.items()}  # type: ignore[attr-defined]
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        scheduling = time.monotonic() - begin
        prefill = decodes = context = new = cached = 0
        for name, num_tokens in output.num_scheduled_tokens.items():
            done, prompt = before.get(name, 0), self.requests[name].num_prompt_tokens  # type: ignore[attr-defined]
            new += done + num_tokens >= prompt
            if num_tokens == 1 and done >= prompt:
                decodes += 1
                context += done
            else:
                prefill += num_tokens
                cached += done
        held = sum(
            request.num_computed_tokens == request.num_tokens - 1
            for request in self.running  # type: ignore[attr-defined]
            if request.request_id not in output.num_scheduled_tokens
        )
        usage, preempted = self.kv_cache_manager.usage, output.preempted_req_ids  # type: ignore[attr-defined]
        state = [cached, held, len(self.waiting), round(usage, 4), len(preempted or ())]  # type: ignore[attr-defined]
        self._open_steps.append((begin, scheduling, [prefill, decodes, context, new], state))
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        updated = time.monotonic()
        result = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        begin, scheduling, work, state = self._open_steps.popleft()
        now = time.monotonic()
        if any(work):
            start = self._ended_s if self._was_busy else max(begin, self._ended_s)
            row = [now, now - start, *work, scheduling + now - updated, *state]
            self._log.write(json.dumps(row) + "\n")
        self._ended_s = now
        self._was_busy = bool(self.requests)  # type: ignore[attr-defined]
        return result


class LoggedStockScheduler(StepLog, Scheduler if current_platform.is_cpu() else AsyncScheduler):  # type: ignore[misc]
    """vLLM's default scheduler: asynchronous except on CPUs."""


class LoggedTailcastScheduler(StepLog, scheduler_class()):  # type: ignore[misc]
    """Ours."""
