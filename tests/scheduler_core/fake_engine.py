"""A little engine with OpenAI's completions API and known step times, in real time."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from scheduler_core.plan import StepResult
from scheduler_core.policies import make_policy
from scheduler_core.request import Request
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.step_time.base import StepTime, StepWork
from tests.fake_openai import event, running


class _Stepping:
    """Steps of the very scheduler, each of which lasts as long as the model of step times says."""

    def __init__(self, step_time: StepTime, limits: SchedulerConfig) -> None:
        self._core, self._step_time = Scheduler(limits, make_policy("fcfs")), step_time
        #: By request: of each of its tokens whether it is the last.
        self._streams: dict[str, asyncio.Queue[bool]] = {}
        self._steps: asyncio.Task[None] | None = None

    async def __call__(self, request: web.Request, body: bytes) -> web.StreamResponse:
        content, now = json.loads(body), time.monotonic()
        if content["prompt"].startswith("fail"):
            return web.Response(status=503, text="overloaded")
        name, num, limit = f"r{len(self._streams)}", len(content["prompt"].split()), content["max_tokens"]
        self._streams[name] = asyncio.Queue()
        self._core.add(Request(request_id=name, arrival_s=now, prompt_tokens=num, max_tokens=limit), now)
        if self._steps is None or self._steps.done():
            self._steps = asyncio.create_task(self._run())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        is_last = False
        while not is_last:
            is_last = await self._streams[name].get()
            await response.write(event({"choices": [{"text": " x"}]}))
        usage = {"prompt_tokens": num, "completion_tokens": limit}
        await response.write(event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        return response

    async def _run(self) -> None:
        core = self._core
        while core.num_running + core.num_waiting:
            start = time.monotonic()
            plan = core.schedule(start)
            assert plan is not None
            contexts = [state.num_computed_tokens for state in core.decoding]
            seconds = self._step_time.step_s(StepWork(plan.prefills, contexts))
            await asyncio.sleep(max(0.0, start + seconds - time.monotonic()))
            sampled = [*plan.decodes, *(chunk.request_id for chunk in plan.prefills if chunk.is_last)]
            finished = {one.request_id for one in core.complete(StepResult(plan.step), time.monotonic())}
            for name in sampled:
                self._streams[name].put_nowait(name in finished)


@contextmanager
def fake_engine(step_time: StepTime, limits: SchedulerConfig) -> Iterator[str]:
    """Serves a fake engine; gives its base URL. A prompt "fail" gets an error."""
    with running(_Stepping(step_time, limits)) as (engine,):
        yield f"{engine.url}/v1"
