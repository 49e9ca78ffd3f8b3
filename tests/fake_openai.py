"""A scripted server of the OpenAI API on loopback.

Lengths of `Completions` depend on (seed, prompt): the same request gets the same output, as from a seeded engine.
"""

import asyncio
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.waiting import taken

HOST, MODEL = "127.0.0.1", "fake-model"
Script = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]


class FakeEngine:
    """Records requests and responds by `script`; the port is kept over a restart.

    Attributes:
        requests: Method, path, headers and body of all requests, unless `remembers` is off.
        arrivals: When they came, by the clock of the event loop.
        num_gone: Requests whose client hung up.
        num_in_flight: Requests that are being served; max_in_flight: most of them at a time.
    """

    def __init__(self, script: Script, host: str = HOST, port: int = 0) -> None:
        self.script = script
        self._host = host
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.arrivals: list[float] = []
        self.remembers = True
        self.num_gone = self.num_in_flight = self.max_in_flight = 0
        self._port = port
        self._handlers: dict[asyncio.Task[Any], web.Request] = {}

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._port}"

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, _, _, body in self.requests if body]

    async def start(self) -> None:
        """Listens, on the port it had before if it had one."""
        self._loop = asyncio.get_running_loop()
        application = web.Application(client_max_size=2**26)
        application.router.add_route("*", "/{path:.*}", self._handle)
        options: dict[str, Any] = {"handler_cancellation": True, "auto_decompress": False}
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1, **options)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port, reuse_address=True, backlog=20_000).start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stops at once: the connections of what is in flight are aborted."""
        for site in list(self._runner.sites):
            await site.stop()
        await _turns()  # What was accepted just now is a connection too, some turns later.
        for task, request in list(self._handlers.items()):
            if request.transport is not None:
                request.transport.abort()
            task.cancel()
        server = self._runner.server
        await self._runner.cleanup()
        for connection in list(server.connections) if server is not None else ():
            connection.force_close()
        await _turns()

    def halt(self) -> None:
        """`stop`, from another thread."""
        asyncio.run_coroutine_threadsafe(self.stop(), self._loop).result()

    def resume(self) -> None:
        """`start` again, from another thread."""
        asyncio.run_coroutine_threadsafe(self.start(), self._loop).result()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if self.remembers:
            self.requests.append((request.method, request.raw_path, dict(request.headers), body))
            self.arrivals.append(self._loop.time())
        task = asyncio.current_task()
        assert task is not None
        self._handlers[task] = request
        self.num_in_flight = len(self._handlers)
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        try:
            return await self.script(request, body)
        except asyncio.CancelledError:
            self.num_gone += 1
            raise
        finally:
            del self._handlers[task]
            self.num_in_flight = len(self._handlers)


async def _turns() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


@asynccontextmanager
async def running_engine(script: Script, host: str = HOST, port: int = 0) -> AsyncIterator[FakeEngine]:
    """An engine in this event loop."""
    engine = FakeEngine(script, host, port)
    await engine.start()
    try:
        yield engine
    finally:
        await engine._runner.cleanup()


@contextmanager
def running(*scripts: Script) -> Iterator[list[FakeEngine]]:
    """Engines, one for each script (a good one if there is none), in an event loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    engines = [FakeEngine(script) for script in scripts or (Completions(),)]
    try:
        for engine in engines:
            asyncio.run_coroutine_threadsafe(engine.start(), loop).result()
        yield engines
    finally:
        for engine in engines:
            engine.halt()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def event(content: dict[str, Any]) -> bytes:
    """A server-sent event as engines write it."""
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


async def break_off(request: web.Request, data: bytes, headers: dict[str, str]) -> web.StreamResponse:
    """Closes the connection after a part of the response."""
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    await response.write(data)
    assert request.transport is not None
    request.transport.close()
    return response


@dataclass(frozen=True)
class Fault:
    """What a request gets instead of, or on top of, an output."""

    status: int = 200  # HTTP status; 200 goes on with the output
    headers: dict[str, str] = field(default_factory=dict)  # further headers
    payload: bytes | None = None  # body instead of the output
    hang: bool = False  # never responds
    # "early": the connection breaks before the head; "middle": in the middle of the body. Of a stream also "quiet": no
    # more events come; "ended": it ends properly, but too soon.
    cut: str = ""
    # Changes the JSON of the response before it is sent.
    change: Callable[[dict[str, Any]], object] = lambda content: None


GOOD = Fault()
#: Where engines tell their version, and in which field, by `owned_by` of their model; TGI's is the model's hub name.
VERSION_PAGES = {
    "vllm": ("/version", "version"),
    "sglang": ("/get_server_info", "version"),
    "llamacpp": ("/props", "build_info"),
    "library": ("/api/version", "version"),
    "org/fake-model": ("/info", "version"),
}


def error(status: int, message: str = "told to fail", **headers: str) -> Fault:
    """An HTTP error with a message as engines send it."""
    payload = json.dumps({"error": {"message": message, "type": "Error", "code": status}}).encode()
    return Fault(status, {name.replace("_", "-"): value for name, value in headers.items()}, payload)


def first(count: int, fault: Fault) -> Callable[[int, dict[str, Any]], Fault]:
    """The first `count` requests fail, the rest are served."""
    return lambda number, body: fault if number < count else GOOD


def length_of(prompt: str, seed: int | None, choice: int = 0) -> int:
    """Length of an output before it is truncated, end marker included: 1 to 64 words."""
    return 1 + hashlib.sha256(f"{prompt}|{seed}|{choice}".encode()).digest()[0] % 64


@dataclass
class Completions:
    """The script of an engine that completes prompts; its fields may change while it runs."""

    # Fault for a request, by its number (from 0) and its body.
    behave: Callable[[int, dict[str, Any]], Fault] = lambda number, body: GOOD
    model: str = MODEL  # name it serves
    owner: str = "vllm"  # `owned_by` of its model; decides what engine it is taken for
    version: str = "9.9"  # of the engine
    delay_s: float = 0.0  # seconds until an output
    gate: int = 0  # outputs wait until so many requests have come
    usage: bool = True  # whether it counts tokens
    key: str = ""  # API key it wants, if any
    _number: int = 0
    _opened: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, request: web.Request, body: bytes) -> web.StreamResponse:
        if request.path.endswith("/completions"):
            return await self._complete(request, json.loads(body))
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        if request.path == "/v1/models":
            entry = {"id": self.model, "object": "model", "owned_by": self.owner}
            return web.json_response({"object": "list", "data": [entry]})
        page, name = VERSION_PAGES.get(self.owner, ("", ""))
        if request.path == page:
            return web.json_response({name: self.version})
        return web.json_response({"detail": "Not Found"}, status=404)

    async def _complete(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        fault = self.behave(self._number, body)
        self._number += 1
        await taken(self.delay_s)
        if self._number >= self.gate:
            self._opened.set()
        await self._opened.wait()
        if fault.hang:
            await asyncio.Event().wait()
        if fault.cut == "early":
            assert request.transport is not None
            request.transport.abort()
        if fault.status != 200 or fault.payload is not None:
            headers = {"Content-Type": "application/json", **fault.headers}
            return web.Response(status=fault.status, body=fault.payload, headers=headers)
        content = self._content(body)
        fault.change(content)
        if body.get("stream"):
            return await self._stream(request, content, fault)
        payload = json.dumps(content).encode()
        if fault.cut == "middle":
            return await break_off(request, payload[:20], {"Content-Length": str(len(payload))})
        return web.Response(body=payload, content_type="application/json")

    def _content(self, body: dict[str, Any]) -> dict[str, Any]:
        is_chat = "messages" in body
        prompt = str(body["messages"][-1]["content"] if is_chat else body["prompt"])
        max_tokens = body.get("max_tokens", body.get("max_completion_tokens"))
        choices, total = [], 0
        for index in range(body.get("n", 1)):
            length = length_of(prompt, body.get("seed"), index)
            stopped = length <= max_tokens
            length = min(length, max_tokens)
            total += length
            text = " ".join(f"w{i}" for i in range(length - stopped))
            choice: dict[str, Any] = {"index": index, "finish_reason": "stop" if stopped else "length"}
            choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            choices.append(choice)
        content: dict[str, Any] = {"id": "x", "model": self.model, "choices": choices}
        if self.usage:
            content["usage"] = {"prompt_tokens": len(prompt.split()), "completion_tokens": total}
        return content

    async def _stream(
        self, request: web.Request, content: dict[str, Any], fault: Fault
    ) -> web.StreamResponse:
        events = _events(content)
        stop = len(events) // 2 if fault.cut else len(events)
        if fault.cut == "middle":
            return await break_off(request, b"".join(events[:stop]), {"Content-Type": "text/event-stream"})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for one in events[:stop]:
            await response.write(one)
        if fault.cut == "quiet":
            await asyncio.Event().wait()
        return response


def _events(content: dict[str, Any]) -> list[bytes]:
    """Server-sent events, one for each word, the choices interleaved, usage last."""
    pieces: list[dict[str, Any]] = []
    for choice in content["choices"]:
        is_chat = "message" in choice
        words = (choice["message"]["content"] if is_chat else choice["text"]).split()
        texts = [f" {word}" if number else word for number, word in enumerate(words)]
        for position, text in enumerate([*texts, None]):
            last = text is None
            entry = {"index": choice["index"], "finish_reason": choice["finish_reason"] if last else None}
            entry |= {"delta": {} if last else {"content": text}} if is_chat else {"text": text or ""}
            pieces.append({"position": position, "entry": entry})
        if is_chat:
            role = {"index": choice["index"], "delta": {"role": "assistant", "content": ""}}
            pieces.append({"position": -1, "entry": role})
    contents = [{"choices": [one["entry"]]} for one in sorted(pieces, key=lambda one: one["position"])]
    if "usage" in content:
        contents.append({"choices": [], "usage": content["usage"]})
    return [*map(event, contents), b"data: [DONE]\n\n"]
