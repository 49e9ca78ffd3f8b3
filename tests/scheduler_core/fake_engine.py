"""A little engine with OpenAI's completions API and known step times, in real time."""

from __future__ import annotations

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
from scheduler_core.simulator.step_time import StepTime, StepWork


class FakeEngine:
    """Steps of the very scheduler, each of which lasts as long as the model of step times says.

    Args:
        step_time: How long steps last.
        limits: Of the engine.
    """

    def __init__(self, step_time: StepTime, limits: SchedulerConfig) -> None:
        self._step_time = step_time
        self._core = Scheduler(limits, make_policy("fcfs"))
        self._new: queue.Queue[tuple[Request, queue.Queue[bool]] | None] = queue.Queue()
        self._streams: dict[str, queue.Queue[bool]] = {}
        self._num = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ask(self, prompt_tokens: int, max_tokens: int) -> queue.Queue[bool]:
        """A stream of "is this the last token?"."""
        with self._lock:
            self._num += 1
            name = f"q{self._num}"
        stream: queue.Queue[bool] = queue.Queue()
        asked = Request(
            request_id=name,
            arrival_s=time.monotonic(),
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
        )
        self._new.put((asked, stream))
        return stream

    def stop(self) -> None:
        """Ends it when it is idle."""
        self._new.put(None)
        self._thread.join(timeout=30)

    def _run(self) -> None:
        core = self._core
        while True:
            wait = core.num_running + core.num_waiting == 0
            try:
                while True:
                    item = self._new.get(block=wait)
                    if item is None:
                        return
                    core.add(item[0], time.monotonic())
                    self._streams[item[0].request_id] = item[1]
                    wait = False
            except queue.Empty:
                pass
            start = time.monotonic()
            plan = core.schedule(start)
            assert plan is not None
            contexts = [state.num_computed_tokens for state in core.decoding]
            seconds = self._step_time.step_s(StepWork(plan.prefills, contexts))
            time.sleep(max(0.0, start + seconds - time.monotonic()))
            sampled = [*plan.decodes, *(chunk.request_id for chunk in plan.prefills if chunk.is_last)]
            finished = {one.request_id for one in core.complete(StepResult(plan.step), time.monotonic())}
            for name in sampled:
                self._streams[name].put(name in finished)


@contextmanager
def fake_engine(step_time: StepTime, limits: SchedulerConfig) -> Iterator[str]:
    """Serves a fake engine; gives its base URL. A prompt "fail" is answered with an error."""
    engine = FakeEngine(step_time, limits)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if body["prompt"].startswith("fail"):
                self.send_error(503, "overloaded")
                return
            num = len(body["prompt"].split())
            stream = engine.ask(num, body["max_tokens"])
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            last = False
            while not last:
                last = stream.get()
                self._event({"choices": [{"text": " x"}]})
            usage = {"prompt_tokens": num, "completion_tokens": body["max_tokens"]}
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
        engine.stop()
