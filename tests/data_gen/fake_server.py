"""A fast server that speaks the OpenAI API and misbehaves as told; for tests and benchmarks, on loopback only.

Lengths follow a law of (seed, prompt): the same request gets the same answer, as from a seeded engine. In a process
of its own: `python -m tests.data_gen.fake_server --port 0` prints its port and serves until it is stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from aiohttp import web

from data_gen.openai.http_client import allow_descriptors
from tests.data_gen.fake_script import Fault, Script, length_of, prompt_of
from tests.data_gen.fast_protocol import FastProtocol

HOST = "127.0.0.1"

#: Where engines tell their version, and in which field, by `owned_by` of their model; TGI's is the model's hub name.
VERSION_PAGES = {
    "vllm": ("/version", "version"),
    "sglang": ("/get_server_info", "version"),
    "llamacpp": ("/props", "build_info"),
    "library": ("/api/version", "version"),
    "org/fake-model": ("/info", "version"),
}


class FakeServer:
    """One server in an event loop; `port` is kept over a restart.

    Attributes:
        bodies: All requests.
        headers: Their headers.
        arrivals: When they came, by the clock of the event loop.
        in_flight: Requests that are being answered.
        most_in_flight: Most of them at a time.
        pages: How often other pages than completions were asked for.
    """

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self.port = 0
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.arrivals: list[float] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.pages: Counter[str] = Counter()
        self.remembers = True
        self._connections: set[Any] = set()
        self._handlers: set[asyncio.Task[Any]] = set()
        self._number = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: web.ServerRunner | None = None
        self._site: web.TCPSite | None = None
        self._server: web.Server[web.BaseRequest] | None = None

    @property
    def url(self) -> str:
        """Base address."""
        return f"http://{HOST}:{self.port}/v1"

    async def start(self) -> None:
        """Listens, on the port it had before if it had one."""
        self._loop = asyncio.get_running_loop()
        self._server = web.Server(self._handle, access_log=None, handler_cancellation=True)
        self._runner = web.ServerRunner(self._server, shutdown_timeout=0.1)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, HOST, self.port, reuse_address=True, backlog=20_000)
        await self._site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stops at once: whatever is in flight is cut off."""
        if self._runner is not None:
            assert self._site is not None
            assert self._server is not None
            await self._site.stop()
            await _turns()  # What was accepted just now is a connection too, some turns later.
            for transport in list(self._connections):
                transport.abort()
            for task in list(self._handlers):
                task.cancel()
            await self._runner.cleanup()
            for connection in list(self._server.connections):
                connection.force_close()
            await _turns()
            self._runner = None

    def halt(self) -> None:
        """`stop`, from another thread."""
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self.stop(), self._loop).result()

    def resume(self) -> None:
        """`start` again, from another thread."""
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self.start(), self._loop).result()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        if path.endswith("/completions"):
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            task = asyncio.current_task()
            assert task is not None
            self._connections.add(request.transport)
            self._handlers.add(task)
            try:
                return await self._complete(request)
            finally:
                self.in_flight -= 1
                self._connections.discard(request.transport)
                self._handlers.discard(task)
        self.pages[path] += 1
        script = self.script
        if script.key and request.headers.get("Authorization") != f"Bearer {script.key}":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        if path == "/v1/models":
            entry = {"id": script.model, "object": "model", "owned_by": script.owner}
            return web.json_response({"object": "list", "data": [entry]})
        page, field = VERSION_PAGES.get(script.owner, ("", ""))
        if path == page:
            return web.json_response({field: script.version})
        if path == "/tokenize" and self.pages[path] <= script.busy_tokenizer:
            return web.json_response({"error": {"message": "busy"}}, status=503)
        if path == "/tokenize":
            body = json.loads(await request.read())
            tokens = str(body.get("content", body.get("prompt"))).split()
            return web.json_response({"count": len(tokens), "tokens": list(range(len(tokens)))})
        return web.json_response({"detail": "Not Found"}, status=404)

    async def _complete(self, request: web.BaseRequest) -> web.StreamResponse:
        body = json.loads(await request.read())
        number, self._number = self._number, self._number + 1
        if self.remembers:
            self.bodies.append(body)
            self.headers.append(dict(request.headers))
            self.arrivals.append(asyncio.get_running_loop().time())
        fault = self.script.behave(number, body)
        delay_s = self.script.delay_s + fault.delay_s
        if delay_s:
            await asyncio.sleep(delay_s)
        while self.most_in_flight < self.script.gate:
            await asyncio.sleep(0.01)
        if fault.hang:
            await asyncio.Event().wait()
        if fault.cut == "early":
            assert request.transport is not None
            request.transport.abort()
        if fault.status != 200 or fault.payload is not None:
            return web.Response(
                status=fault.status,
                body=fault.payload or b"",
                headers=fault.headers,
                content_type="application/json",
            )
        chat = request.path.endswith("chat/completions")
        answer = self._answer(body, chat)
        if fault.change is not None:
            fault.change(answer)
        if body.get("stream"):
            return await self._stream(request, answer, chat, fault)
        payload = json.dumps(answer).encode()
        if fault.cut == "middle":
            response = web.StreamResponse(headers={"Content-Length": str(len(payload))})
            await response.prepare(request)
            await response.write(payload[:20])
            assert request.transport is not None
            request.transport.close()
            return response
        return web.Response(body=payload, content_type="application/json")

    def _answer(self, body: dict[str, Any], chat: bool) -> dict[str, Any]:
        prompt, script = prompt_of(body), self.script
        count = body.get("n", 1) if script.honours_n else 1
        cap = body.get("max_tokens", body.get("max_completion_tokens"))
        choices, total = [], 0
        for index in range(count):
            wanted = length_of(prompt, body.get("seed"), index)
            length = min(wanted, cap)
            total += length
            stopped = wanted <= cap
            text = " ".join(f"w{i}" for i in range(length - stopped))
            choice: dict[str, Any] = {"index": index, "finish_reason": "stop" if stopped else "length"}
            choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            listed = length - (stopped and not script.lists_end)
            if script.lists_tokens and body.get("return_token_ids"):
                choice["token_ids"] = list(range(listed))
            if script.lists_tokens and body.get("logprobs"):
                tokens = [{"token": f"w{i}", "logprob": -1.0} for i in range(listed)]
                choice["logprobs"] = {"content": tokens} if chat else {"tokens": tokens}
            choices.append(choice)
        answer: dict[str, Any] = {"id": "x", "model": script.model, "choices": choices}
        if script.usage:
            prompt_tokens = script.prompt_tokens(prompt)
            answer["usage"] = {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": total,
                "total_tokens": prompt_tokens + total,
            }
        return answer

    async def _stream(
        self, request: web.BaseRequest, answer: dict[str, Any], chat: bool, fault: Fault
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        events = list(_events(answer, chat))
        for number, event in enumerate(events):
            if fault.cut == "middle" and number == len(events) // 2:
                assert request.transport is not None
                request.transport.close()
                return response
            if fault.cut == "quiet" and number == len(events) // 2:
                await asyncio.Event().wait()
            if fault.cut == "ended" and number == len(events) // 2:
                return response
            await response.write(event)
        return response


def _events(answer: dict[str, Any], chat: bool) -> Iterator[bytes]:
    """Server-sent events, one per word, the choices interleaved, usage last."""

    def event(found: object) -> bytes:
        return b"data: " + json.dumps(found).encode() + b"\n\n"

    choices = answer["choices"]
    if chat:
        for choice in choices:
            yield event(
                {"choices": [{"index": choice["index"], "delta": {"role": "assistant", "content": ""}}]}
            )
    texts = [choice["message"]["content"] if chat else choice["text"] for choice in choices]
    words = [text.split(" ") if text else [] for text in texts]
    for position in range(max(len(listed) for listed in words)):
        for choice, listed in zip(choices, words, strict=True):
            if position < len(listed):
                piece = (" " if position else "") + listed[position]
                entry: dict[str, Any] = {"index": choice["index"], "finish_reason": None}
                entry |= {"delta": {"content": piece}} if chat else {"text": piece}
                entry |= _listed(choice, chat, 1)
                yield event({"choices": [entry]})
    for choice, listed in zip(choices, words, strict=True):
        entry = {"index": choice["index"], "finish_reason": choice["finish_reason"]}
        entry |= {"delta": {}} if chat else {"text": ""}
        entry |= _listed(choice, chat, _num_listed(choice) - len(listed))
        yield event({"choices": [entry]})
    if "usage" in answer:
        yield event({"choices": [], "usage": answer["usage"]})
    yield b"data: [DONE]\n\n"


def _num_listed(choice: dict[str, Any]) -> int:
    logprobs = choice.get("logprobs") or {}
    return max(len(listed) for listed in ((), choice.get("token_ids", ()), *logprobs.values()))


def _listed(choice: dict[str, Any], chat: bool, count: int) -> dict[str, Any]:
    """Token ids and logprobs of a piece of so many tokens, if the whole answer has them."""
    listed: dict[str, Any] = {}
    if count > 0 and "token_ids" in choice:
        listed["token_ids"] = [0] * count
    if count > 0 and "logprobs" in choice:
        tokens = [{"token": "w", "logprob": -1.0}] * count
        listed["logprobs"] = {"content": tokens} if chat else {"tokens": tokens}
    return listed


async def _turns() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


@contextmanager
def running(*scripts: Script) -> Iterator[list[FakeServer]]:
    """Servers, one per script (one good one if there is none), in an event loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    servers = [FakeServer(script) for script in scripts or (Script(),)]
    try:
        for server in servers:
            asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        yield servers
    finally:
        for server in servers:
            server.halt()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def main() -> None:
    """Serves until it is stopped; writes the port to stdout."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--interval-s", type=float, default=0.02, help="between events, with --fast")
    parser.add_argument("--fast", action="store_true", help="always the same answer, at little cost")
    options = parser.parse_args()

    async def serve() -> None:
        if options.fast:
            loop = asyncio.get_running_loop()
            protocol = partial(FastProtocol, options.delay_s, options.interval_s)
            listening = await loop.create_server(protocol, HOST, options.port, backlog=20_000)
            port = listening.sockets[0].getsockname()[1]
        else:
            server = FakeServer(Script(delay_s=options.delay_s))
            server.port, server.remembers = options.port, False
            await server.start()
            port = server.port
        print(port, flush=True)  # noqa: T201
        await asyncio.Event().wait()

    allow_descriptors(12_000)
    asyncio.run(serve())


if __name__ == "__main__":
    main()
