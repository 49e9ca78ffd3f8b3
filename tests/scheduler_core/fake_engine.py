"""A little engine with OpenAI's completions API and known step times, in real time."""

from __future__ import annotations

import itertools
import json
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from scheduler_core.plan import StepResult
from scheduler_core.policies import make_policy
from scheduler_core.request import Request
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.step_time.base import StepTime, StepWork

#: A request and its stream of "is this the last token?"; None: the engine ends.
Asked = tuple[Request, queue.Queue[bool]]


def run_engine(step_time: StepTime, limits: SchedulerConfig, asked: queue.Queue[Asked | None]) -> None:
    """Steps of the very scheduler, each of which lasts as long as the model of step times says."""
    core, streams = Scheduler(limits, make_policy("fcfs")), {}
    while True:
        idle = core.num_running + core.num_waiting == 0
        while idle or not asked.empty():
            item = asked.get()
            if item is None:
                return
            core.add(item[0], time.monotonic())
            streams[item[0].request_id] = item[1]
            idle = False
        start = time.monotonic()
        plan = core.schedule(start)
        assert plan is not None
        contexts = [state.num_computed_tokens for state in core.decoding]
        seconds = step_time.step_s(StepWork(plan.prefills, contexts))
        time.sleep(max(0.0, start + seconds - time.monotonic()))
        sampled = [*plan.decodes, *(chunk.request_id for chunk in plan.prefills if chunk.is_last)]
        finished = {one.request_id for one in core.complete(StepResult(plan.step), time.monotonic())}
        for name in sampled:
            streams[name].put(name in finished)


@contextmanager
def fake_engine(step_time: StepTime, limits: SchedulerConfig) -> Iterator[str]:
    """Serves a fake engine; gives its base URL. A prompt "fail" is answered with an error."""
    asked: queue.Queue[Asked | None] = queue.Queue()
    engine = threading.Thread(target=run_engine, args=(step_time, limits, asked), daemon=True)
    engine.start()
    names = map(str, itertools.count())

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if body["prompt"].startswith("fail"):
                self.send_error(503, "overloaded")
                return
            num = len(body["prompt"].split())
            stream: queue.Queue[bool] = queue.Queue()
            limit = body["max_tokens"]
            request = Request(
                request_id=next(names), arrival_s=time.monotonic(), prompt_tokens=num, max_tokens=limit
            )
            asked.put((request, stream))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            last = False
            while not last:
                last = stream.get()
                self._event({"choices": [{"text": " x"}]})
            usage = {"prompt_tokens": num, "completion_tokens": limit}
            self._event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, content: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")
            self.wfile.flush()

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        asked.put(None)
        engine.join(timeout=30)
