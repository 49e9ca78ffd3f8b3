"""Streams and responses of every generation API: tokens, time to first token, finish reason, and a record for each."""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from predictors.proxy import feedback_log
from predictors.proxy.feedback import MIN_STREAMS
from predictors.proxy.feedback_log import FeedbackLog
from predictors.proxy.responses import EventStreamReader, JsonReader, ReadBudget, ResponseStats
from scheduler_core.prediction.api_response import ended_by, read_response
from scheduler_core.prediction.outcome import Outcome, read_log
from tests.fake_openai import event
from tests.predictors.proxy import fake_engine
from tests.predictors.proxy.fake_engine import chat, running_engine, running_proxy, until

Json = dict[str, Any]
SHORT = "name three rivers"
OUTPUTS = 'tailcast_proxy_calibration_outputs{served_model="tiny-llm"}'
UNRECORDED = 'tailcast_proxy_unrecorded_total{reason="%s"}'
USAGE: Json = {"prompt_tokens": 9, "completion_tokens": 12}


def outcomes(log: Path) -> list[Outcome]:
    """The outcomes of a feedback log, which has nothing else."""
    left_out = Counter[str]()
    rows = [outcome for _, outcome in read_log(log, left_out)]
    assert not left_out
    return rows


def chunk(delta: Json, reason: str | None = None, **more: Any) -> Json:
    return {"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}], **more}


def tool(arguments: str, **more: Any) -> Json:
    return {"tool_calls": [{"index": 0, "function": {"arguments": arguments, **more}}]}


ROLE = chunk({"role": "assistant", "content": ""})
STOP = chunk({}, "stop")


@dataclass(frozen=True)
class Stream:
    """Events of a stream, the index of the first one with output, and what is read from them."""

    path: str
    events: list[Json]
    first: int
    tokens: int
    counted_by: str = "deltas"
    reason: str = "stop"
    prompt_tokens: int | None = None


def answer_of_responses(status: str, **more: Any) -> Json:
    usage = {"input_tokens": 9, "output_tokens": 12}
    return {"id": "r", "object": "response", "status": status, "error": None, "usage": usage, **more}


QUOTES = '"content":"x", "finish_reason":"length", "usage":{"completion_tokens":9}}\n\n'
# fmt: off
STREAMS = {
    "text": Stream(fake_engine.CHAT, [ROLE, *[chunk({"content": f" w{i}"}) for i in range(12)], STOP], 1, 12),
    "reasoning": Stream(fake_engine.CHAT, [ROLE, chunk({"reasoning": " t"}), chunk({"content": " a"}), STOP], 1, 2),
    "reasoning_content": Stream(fake_engine.CHAT, [ROLE, chunk({"reasoning_content": "t", "content": None}), STOP], 1, 1),
    "tools": Stream(
        fake_engine.CHAT,
        [
            chunk({"role": "assistant", "content": None}),
            chunk(tool("", name="weather")),
            chunk(tool("")),
            chunk(tool('{"')),
            chunk({}, "tool_calls"),
        ],
        1,
        2,
        reason="tool_calls",
    ),
    "function_call": Stream(fake_engine.CHAT, [ROLE, chunk({"function_call": {"arguments": "{"}}), STOP], 1, 1),
    "refusal": Stream(fake_engine.CHAT, [ROLE, chunk({"refusal": "No", "content": None}), STOP], 1, 1),
    "audio": Stream(fake_engine.CHAT, [ROLE, chunk({"audio": {"id": "a", "data": "AA=="}}), STOP], 1, 1),
    "parts": Stream(fake_engine.CHAT, [ROLE, chunk({"content": [{"type": "text", "text": "x"}]}), STOP], 1, 1),
    "quotes": Stream(fake_engine.CHAT, [ROLE, chunk({"content": QUOTES}), chunk({"content": QUOTES}), STOP], 1, 2),
    "escapes": Stream(
        fake_engine.CHAT, [ROLE, *[chunk({"content": text}) for text in ("a", '"', "\\", "", "é\ud83d", "b")], STOP], 1, 5
    ),
    "null usage": Stream(fake_engine.CHAT, [chunk({"content": "a"}, usage=None), chunk({}, "length", usage=None)], 0, 1, reason="length"),
    "usage with the finish reason": Stream(
        fake_engine.CHAT, [chunk({"content": "a"}), chunk({}, "stop", usage=USAGE)], 0, 12, "usage", prompt_tokens=9
    ),
    "usage in each event": Stream(
        fake_engine.CHAT,
        [chunk({"content": "a"}, usage=USAGE | {"completion_tokens": 1}), chunk({"content": "b"}, "stop", usage=USAGE)],
        0, 12, "usage", prompt_tokens=9,
    ),
    "llama.cpp chat": Stream(
        fake_engine.CHAT,
        [chunk({"content": "a"}), chunk({}, "stop", timings={"prompt_n": 9, "predicted_n": 12})],
        0, 12, "usage", prompt_tokens=9,
    ),
    "completions": Stream(
        "/v1/completions",
        [{"choices": [{"index": 0, "text": text, "finish_reason": reason}]} for text, reason in (("a", None), ("", "length"))],
        0, 1, reason="length",
    ),
    "token ids": Stream(
        "/inference/v1/generate",
        [{"choices": [{"index": 0, "token_ids": [1, 2, 3]}]}, {"choices": [{"index": 0, "token_ids": [4], "finish_reason": "stop"}]}],
        0, 4,
    ),
    "error": Stream(fake_engine.CHAT, [chunk({"content": "a"}), {"error": {"message": "out of memory"}}], 0, 1, reason="error"),
    "responses": Stream(
        "/v1/responses",
        [
            {"type": "response.created", "response": answer_of_responses("in_progress", usage=None)},
            {"type": "response.output_item.added", "item": {"type": "reasoning", "id": "x", "content": []}},
            {"type": "response.reasoning_text.delta", "delta": "hm", "sequence_number": 3},
            {"type": "response.output_text.delta", "delta": "", "sequence_number": 4},
            {"type": "response.output_text.delta", "delta": "a", "sequence_number": 5},
            {"type": "response.output_text.done", "text": "a"},
            {"type": "response.completed", "response": answer_of_responses("completed")},
        ],
        2, 12, "usage", prompt_tokens=9,
    ),
    "responses, truncated call": Stream(
        "/v1/responses",
        [
            {"type": "response.output_item.added", "item": {"type": "function_call", "name": "weather", "arguments": ""}},
            {"type": "response.function_call_arguments.delta", "delta": "{"},
            {"type": "response.refusal.delta", "delta": "No"},
            {"type": "response.incomplete", "response": answer_of_responses("incomplete", incomplete_details={"reason": "max_output_tokens"})},
        ],
        0, 12, "usage", "max_output_tokens", 9,
    ),
    "messages": Stream(
        "/v1/messages",
        [
            {"type": "message_start", "message": {"usage": {"input_tokens": 4, "cache_read_input_tokens": 5, "output_tokens": 1}}},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
            {"type": "ping"},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "AA"}},
            {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "a"}},
            {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": "{"}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 12}},
            {"type": "message_stop"},
        ],
        3, 12, "usage", "end_turn", 9,
    ),
    "ollama chat": Stream(
        "/api/chat",
        [
            {"message": {"role": "assistant", "content": "", "thinking": "hm"}, "done": False},
            {"message": {"role": "assistant", "content": "a"}, "done": False},
            {"message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "length", "eval_count": 12, "prompt_eval_count": 9},
        ],
        0, 12, "usage", "length", 9,
    ),
    "ollama generate": Stream(
        "/api/generate",
        [{"response": "", "done": False}, {"response": "a", "done": False}, {"response": "", "done": True, "done_reason": "stop", "eval_count": 12}],
        1, 12, "usage",
    ),
    "sglang": Stream(
        "/generate",
        [
            {"text": "a", "meta_info": {"finish_reason": None, "prompt_tokens": 9, "completion_tokens": 1}},
            {"text": "ab", "meta_info": {"finish_reason": {"type": "length", "length": 12}, "prompt_tokens": 9, "completion_tokens": 12}},
        ],
        0, 12, "usage", "length", 9,
    ),
    "llama.cpp": Stream(
        "/completion",
        [{"content": "a", "stop": False}, {"content": "", "stop": True, "stop_type": "limit", "tokens_predicted": 12, "tokens_evaluated": 9}],
        0, 12, "usage", "length", 9,
    ),
    "tgi": Stream(
        "/generate",
        [
            {"index": 1, "token": {"id": 5, "text": " a"}, "generated_text": None, "details": None},
            {"token": {"id": 2, "text": ""}, "generated_text": " a", "details": {"finish_reason": "eos_token", "generated_tokens": 12}},
        ],
        0, 12, "usage", "eos_token",
    ),
}
# fmt: on


def is_lines(stream: Stream) -> bool:
    return stream.path.startswith("/api/")


def encoded(stream: Stream) -> list[bytes]:
    """The events as bytes: JSON lines, or server-sent events, with their type if they have one."""
    if is_lines(stream):
        return [json.dumps(item).encode() + b"\n" for item in stream.events]
    types = [item.get("type") for item in stream.events]
    names = [b"" if name is None else f"event: {name}\n".encode() for name in types]
    return [name + event(item) for name, item in zip(names, stream.events, strict=True)]


def fields(stats: ResponseStats) -> tuple[Any, ...]:
    return stats.output_tokens, stats.prompt_tokens, stats.num_deltas, stats.finish_reason, stats.num_outputs


@pytest.mark.parametrize("name", STREAMS)
def test_the_first_output_of_any_kind_ends_the_time_to_first_token(name: str) -> None:
    stream = STREAMS[name]
    reader = EventStreamReader(False, ReadBudget(), is_lines=is_lines(stream))
    have_output = []
    for data in encoded(stream):
        assert reader.feed(data) == data
        have_output.append(reader.stats.first_s is not None)
    assert have_output.index(True) == stream.first
    stats = reader.stats
    count = stats.num_deltas if stream.counted_by == "deltas" else stats.output_tokens
    assert (count, stats.finish_reason, stats.prompt_tokens) == (
        stream.tokens,
        stream.reason,
        stream.prompt_tokens,
    )


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(STREAMS)),
    st.booleans(),
    st.sampled_from([b"\n", b"\r\n"]),
    st.lists(st.integers(0, 2000)),
)
def test_statistics_do_not_depend_on_the_pieces_of_a_stream(
    name: str, hides: bool, end: bytes, places: list[int]
) -> None:
    stream = STREAMS[name]
    data = b": ping\n\n".join(encoded(stream)).replace(b"\n", end)
    at_once, in_pieces = [EventStreamReader(hides, ReadBudget(), is_lines=is_lines(stream)) for _ in range(2)]
    assert at_once.feed(data) + at_once.end() == data
    cuts = [0, *sorted(place for place in places if place < len(data)), len(data)]
    pieces = [data[start:stop] for start, stop in pairwise(cuts)]
    assert b"".join(map(in_pieces.feed, pieces)) + in_pieces.end() == data
    assert fields(at_once.stats) == fields(in_pieces.stats)


@pytest.mark.parametrize("choices", [{"choices": []}, {"choices": None}])
def test_only_the_event_with_nothing_but_counts_is_removed(choices: Json) -> None:
    reader, others = (
        EventStreamReader(True, ReadBudget()),
        [ROLE, chunk({"content": "a"}, usage=USAGE), {"choices": []}, STOP],
    )
    data = b"".join(map(event, others))
    assert reader.feed(data + event({**choices, "usage": USAGE})) + reader.end() == data


def test_a_stream_without_its_last_line_end_is_read() -> None:
    lines, events = (
        EventStreamReader(False, ReadBudget(), is_lines=True),
        EventStreamReader(True, ReadBudget()),
    )
    lines.feed(json.dumps(STREAMS["ollama chat"].events[-1]).encode())
    rest = encoded(STREAMS["text"])[-1].rstrip(b"\n")
    assert (lines.end(), events.feed(rest) + events.end()) == (b"", rest)
    assert (lines.stats.output_tokens, events.stats.finish_reason) == (12, "stop")


CACHED: dict[str, Json] = {
    "chat": chunk({}, "stop", usage=USAGE | {"prompt_tokens_details": {"cached_tokens": 7}}),
    "responses": {"type": "response.completed", "response": answer_of_responses("completed") | {"usage": {"input_tokens_details": {"cached_tokens": 7}}}},
    "messages": {"type": "message_start", "message": {"usage": {"input_tokens": 2, "cache_read_input_tokens": 7}}},
    "sglang": {"text": "a", "meta_info": {"completion_tokens": 12, "cached_tokens": 7}},
}  # fmt: skip


@pytest.mark.parametrize("name", CACHED)
def test_cached_tokens_of_a_prompt_are_read(name: str) -> None:
    reader = EventStreamReader(False, ReadBudget())
    reader.feed(event(CACHED[name]))
    reader.feed(encoded(STREAMS["text"])[-1])
    assert reader.stats.cached_tokens == 7
    assert reader.stats.response_id == ("r" if name == "responses" else "")
    for malformed in ("7", -1, None, True):
        assert (
            read_response({"usage": {"prompt_tokens_details": {"cached_tokens": malformed}}}).cached_tokens
            is None
        )


def test_how_an_output_ended() -> None:
    reasons = ("tool_calls", "tool_use", "function_call", "stop", "END_TURN", "length", "abort", "")
    assert [ended_by(reason) for reason in reasons] == ["tool_use"] * 3 + ["end_turn"] * 2 + [""] * 3


RESPONSES: dict[str, tuple[str, Json, str]] = {
    "chat": (fake_engine.CHAT, fake_engine.completion(12), "stop"),
    "responses": ("/v1/responses", answer_of_responses("completed"), "stop"),
    "responses, call": ("/v1/responses", answer_of_responses("completed", output=[{"type": "reasoning"}, {"type": "function_call"}]), "tool_calls"),
    "messages": ("/v1/messages", {"type": "message", "stop_reason": "max_tokens", "usage": {"input_tokens": 9, "output_tokens": 12}}, "max_tokens"),
    "ollama": ("/api/chat", {"message": {"content": "ok"}, "done": True, "done_reason": "stop", "eval_count": 12}, "stop"),
    "sglang": ("/generate", {"text": "a", "meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 12}}, "stop"),
    "llama.cpp": ("/completion", {"content": "a", "stop": True, "stop_type": "eos", "tokens_predicted": 12}, "stop"),
    "tgi": ("/generate", {"generated_text": "a", "details": {"finish_reason": "length", "generated_tokens": 12}}, "length"),
}  # fmt: skip


def of_path(path: str, **more: Any) -> Json:
    """A body for an endpoint, with a limit in its own words."""
    text = {"model": "tiny-llm", "prompt": SHORT, "max_tokens": 500}
    match path:
        case "/v1/responses":
            return {"model": "tiny-llm", "input": SHORT, "max_output_tokens": 500} | more
        case "/api/chat":
            return {
                "model": "tiny-llm",
                "messages": chat(SHORT)["messages"],
                "options": {"num_predict": 500},
            } | more
        case "/generate":
            return {"text": SHORT, "sampling_params": {"max_new_tokens": 500}} | more
        case "/completion" | "/api/generate" | "/v1/completions" | "/inference/v1/generate":
            return text | ({"options": {"num_predict": 500}} if path == "/api/generate" else {}) | more
    return chat(SHORT, **more)


async def test_each_stream_and_response_has_a_record(artifact_folder: Path, tmp_path: Path) -> None:
    """Its length, limit, finish reason and, for streams, time to first token; the bytes of all of them are unchanged."""

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        name = request.headers["x-name"]
        if name in RESPONSES and not json.loads(body).get("stream"):
            return web.json_response(RESPONSES[name][1])
        kind = "application/x-ndjson" if is_lines(STREAMS[name]) else "text/event-stream"
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        for data in encoded(STREAMS[name]):
            await response.write(data)
        await response.write_eof()
        return response

    options: Json = {"engine": "vllm", "predictor": str(artifact_folder), "feedback": str(tmp_path)}
    async with running_engine(script) as fake, running_proxy(fake.url, **options) as proxy:
        for name, stream in STREAMS.items():
            _, data = await proxy.post(of_path(stream.path, stream=True), {"x-name": name}, stream.path)
            assert data == b"".join(encoded(stream))
        for name, (path, content, _) in RESPONSES.items():
            _, data = await proxy.post(of_path(path), {"x-name": name}, path)
            assert json.loads(data) == content
        used = await proxy.metric(OUTPUTS)
    rows = [outcome.to_json() for outcome in outcomes(tmp_path)]
    assert len(rows) == len(STREAMS) + len(RESPONSES)
    assert used == sum(row["finished"] is not None and row["served_model"] == "tiny-llm" for row in rows)
    finished = {"length": False, "max_tokens": False, "max_output_tokens": False, "error": None}
    for row, stream in zip(rows, STREAMS.values(), strict=False):
        expected = (
            stream.path,
            stream.tokens,
            stream.counted_by,
            stream.reason,
            finished.get(stream.reason, True),
            500,
        )
        names = ("endpoint", "output_tokens", "counted_by", "finish_reason", "finished", "max_tokens")
        assert tuple(row[name] for name in names) == expected
        assert 0 < row["ttft_s"] <= row["total_s"]
    for row, (path, _, reason) in zip(rows[len(STREAMS) :], RESPONSES.values(), strict=True):
        assert (row["endpoint"], row["output_tokens"], row["counted_by"]) == (path, 12, "usage")
        assert (row["finish_reason"], row["finished"]) == (reason, finished.get(reason, True))


@pytest.mark.parametrize("engine", ["vllm", "none"])
async def test_streams_calibrate_and_can_be_trained_on_with_default_options(
    engine: str, artifact_folder: Path, tmp_path: Path
) -> None:
    log, out = tmp_path / "log", tmp_path / "samples.parquet"
    options: Json = {"engine": engine, "predictor": str(artifact_folder), "feedback": str(log)}
    options |= {"feedback_prompts": "stored"}
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        expected = b"".join(fake_engine.stream_events(["a", "b", "c"], None))
        for _ in range(60):
            assert await proxy.post(chat(SHORT, stream=True)) == (200, expected)
        await proxy.reaches(OUTPUTS, 60)  # the last outputs may be quicker than their predictions
    from data_gen.importers.config import ImportLengthsConfig
    from data_gen.importers.import_lengths import import_lengths

    report = import_lengths(ImportLengthsConfig(kind="feedback", file=str(log), out=str(out)))
    assert (report["num_written"], report["finish_reasons"]) == (60, {"stop": 60})
    row = outcomes(log)[0]
    assert (row.counted_by, row.output_tokens) == (("usage", 7) if engine == "vllm" else ("deltas", 3))


async def test_events_are_converted_to_tokens_by_streams_with_both_numbers(tmp_path: Path) -> None:
    """An engine with two tokens in each event; clients request the counts of some streams."""

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        return await fake_engine.plain(request, body, tokens=6)

    async with running_engine(script) as fake, running_proxy(fake.url, feedback=str(tmp_path)) as proxy:
        await proxy.post(chat(SHORT, stream=True))
        for _ in range(MIN_STREAMS):
            await proxy.post(chat(SHORT, stream=True, stream_options={"include_usage": True}))
        await proxy.post(chat(SHORT, stream=True))
    rows = outcomes(tmp_path)
    assert [(row.output_tokens, row.num_events) for row in (rows[0], rows[-1])] == [(3, 3), (6, 3)]
    assert {row.counted_by for row in (rows[0], rows[-1])} == {"deltas"}


async def test_an_engine_that_refuses_stream_options_is_not_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = json.dumps({"error": {"message": "Unrecognized request argument: stream_options"}}).encode()

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        if b"stream_options" in body:
            return web.Response(body=refusal, status=400, content_type="application/json")
        return await fake_engine.plain(request, body)

    async with running_engine(script) as fake:
        async with running_proxy(fake.url, engine="sglang", feedback=str(tmp_path)) as proxy:
            for _ in range(2):
                assert (await proxy.post(chat(SHORT, stream=True)))[0] == 200
        assert ["stream_options" in body for body in fake.bodies] == [True, False, False]
    assert "refuses stream_options" in caplog.text
    assert [outcome.counted_by for outcome in outcomes(tmp_path)] == ["deltas"] * 2


async def test_a_request_that_is_wrong_by_itself_gets_the_engines_answer(tmp_path: Path) -> None:
    """Token counts are requested further on."""

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        if b'"temperature": -1' in body:
            return web.json_response({"error": {"message": "temperature must be >= 0"}}, status=400)
        return await fake_engine.plain(request, body)

    async with running_engine(script) as fake:
        async with running_proxy(fake.url, engine="vllm", feedback=str(tmp_path)) as proxy:
            status, text = await proxy.post(chat(SHORT, stream=True, temperature=-1))
            assert (status, b"temperature" in text) == (400, True)
            assert (await proxy.post(chat(SHORT, stream=True)))[0] == 200
        assert ["stream_options" in body for body in fake.bodies] == [True, False, True]
    assert [outcome.counted_by for outcome in outcomes(tmp_path)] == ["usage"]


@pytest.mark.mend  # one length of 3,000 tokens was recorded for three outputs
@pytest.mark.parametrize("n", [3, "3", 3.0, "x", -1])
async def test_several_outputs_have_no_record(n: Any, tmp_path: Path) -> None:
    """Also if only the response shows that there are several."""

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        words = [{"choices": [{"index": i, "delta": {"content": "a"}}]} for i in (0, 1, 2, 0)]
        usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3000}}
        return await fake_engine.streamed(request, map(event, [*words, usage]))

    async with running_engine(script) as fake, running_proxy(fake.url, feedback=str(tmp_path)) as proxy:
        for more in ({"n": n}, {}):
            await proxy.post(chat(SHORT, stream=True, **more))
        malformed = int(n in ("x", -1))
        assert await proxy.metric(UNRECORDED % "malformed_n") == malformed
        assert await proxy.metric(UNRECORDED % "several_outputs") == 2 - malformed
    assert list(tmp_path.iterdir()) == []


async def test_what_is_not_recorded_is_counted_by_reason(tmp_path: Path) -> None:
    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        match json.loads(body)["prompt"]:
            case "error":
                return web.json_response({}, status=500)
            case "compressed":
                return web.Response(
                    body=b"x", headers={"Content-Encoding": "gzip", "Content-Type": "application/json"}
                )
            case "page":
                return web.Response(text="hello")
        return web.json_response({"choices": [], "data": []})

    cases = [("error", "error"), ("compressed", "unread"), ("page", "unread"), ("empty", "no_tokens")]
    async with running_engine(script) as fake, running_proxy(fake.url, feedback=str(tmp_path)) as proxy:
        for prompt, _ in cases:
            await proxy.post({"prompt": prompt}, path="/v1/completions")
        await proxy.post({"prompt": "x"}, path="/v1/embeddings")
        for reason, count in (("error", 1), ("unread", 2), ("no_tokens", 1), ("other_endpoint", 1)):
            assert await proxy.metric(UNRECORDED % reason) == count
    assert list(tmp_path.iterdir()) == []


AGENT: list[Json] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}, {"type": "image_url", "image_url": {"url": "x"}}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "sunny"},
]  # fmt: skip


async def test_records_of_agents_are_imported(tmp_path: Path) -> None:
    from data_gen.importers.config import ImportLengthsConfig
    from data_gen.importers.import_lengths import import_lengths

    log = tmp_path / "log"
    bodies = [
        (fake_engine.CHAT, {"messages": AGENT}),
        (fake_engine.CHAT, {"messages": AGENT[1:3]}),
        (fake_engine.CHAT, {"messages": [{"role": "system", "content": ""}, *AGENT[1:2]]}),
        ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "c", "output": "sunny"}]}),
        ("/v1/completions", {"prompt": [1, 2, 3]}),
        ("/v1/completions", {"prompt": [1, 2, 4]}),
    ]

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.json_response(fake_engine.completion(5))

    options: Json = {"feedback": str(log), "feedback_prompts": "stored"}
    async with running_engine(script) as fake, running_proxy(fake.url, **options) as proxy:
        for path, body in bodies:
            await proxy.post({"model": "m"} | body, path=path)
    rows = outcomes(log)
    assert [row.endpoint for row in rows] == [path for path, _ in bodies]
    assert [message.text for message in rows[0].messages] == [
        "Be brief.",
        "Weather?",
        "weather({})",
        "sunny",
    ]
    assert rows[-1].prompt_sha256 != rows[-2].prompt_sha256
    for schema in ("samples", "trace"):
        config = ImportLengthsConfig(
            kind="feedback", file=str(log), out=str(tmp_path / f"{schema}.parquet"), schema=schema
        )
        assert import_lengths(config)["num_written"] == len(bodies)


@pytest.mark.mend  # records waiting for a slow disk took 2.7 GB
def test_records_in_memory_are_bounded_by_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go, real, outcomes = threading.Event(), feedback_log.os.fsync, list[str]()
    monkeypatch.setattr(feedback_log.os, "fsync", lambda descriptor: go.wait(60) and real(descriptor))
    monkeypatch.setattr(feedback_log, "MAX_PENDING_BYTES", 10_000)
    log = FeedbackLog(tmp_path, on_outcome=outcomes.append)
    for _ in range(20):
        log.put({"prompt": "x" * 1000})
    assert outcomes == ["dropped"] * 10
    assert caplog.text.count("records are dropped") == 1
    go.set()
    log.close()
    assert outcomes.count("written") == 10


def test_events_after_one_that_is_too_large_are_forwarded() -> None:
    reader = EventStreamReader(False, ReadBudget())
    large = b"data: " + b"x" * (9 * 2**20)
    for data in (*encoded(STREAMS["text"])[:3], large, b"\n\n"):
        assert reader.feed(data) == data
    assert (reader.stats.num_deltas, reader.end()) == (2, b"")


@pytest.mark.parametrize("content", [None, 1, [], [{}], {}, {"choices": [None, {"index": "x", "delta": 3}]}, {"type": "response.x", "response": 1}, {"type": "message_delta", "usage": []}, {"done": True, "eval_count": "9"}, {"meta_info": {"completion_tokens": 2**40}}, {"choices": [{"delta": {"content": {"a": [[[[[[[[["x"]]]]]]]]]}}}]}])  # fmt: skip
def test_odd_responses_have_no_output(content: Any) -> None:
    response = read_response(content)
    assert (response.num_new_tokens, response.output_tokens, response.finish_reason) == (0, None, "")
    reader = JsonReader(ReadBudget())
    reader.feed(json.dumps(content).encode())
    assert reader.end() == b""


def openai_script(name: str) -> Callable[[web.Request, bytes], Any]:
    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        wants_usage = "include_usage" in (json.loads(body).get("stream_options") or {})
        usage = [event({"id": "c", "choices": [], "usage": USAGE})] if wants_usage else []
        return await fake_engine.streamed(request, [*encoded(STREAMS[name]), *usage, b"data: [DONE]\n\n"])

    return script


async def test_the_openai_client_streams_tools_and_responses(artifact_folder: Path, tmp_path: Path) -> None:
    options: Json = {"engine": "vllm", "predictor": str(artifact_folder), "feedback": str(tmp_path)}
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    messages: Any = [{"role": "user", "content": SHORT}]
    async with running_engine(openai_script("tools")) as fake, running_proxy(fake.url, **options) as proxy:
        client = openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="k", max_retries=0)
        stream: Any = await client.chat.completions.create(
            model="tiny-llm", messages=messages, tools=tools, stream=True
        )
        chunks = [item async for item in stream]
        assert len(chunks) == len(STREAMS["tools"].events)  # no usage event
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        fake.script = openai_script("responses")
        responses = await client.responses.create(model="tiny-llm", input=SHORT, stream=True)
        kinds = [item.type async for item in responses]
        assert kinds == [item["type"] for item in STREAMS["responses"].events]
        await client.close()
    rows = outcomes(tmp_path)
    assert [(row.endpoint, row.output_tokens, row.counted_by) for row in rows] == [
        (fake_engine.CHAT, 12, "usage"),
        ("/v1/responses", 12, "usage"),
    ]
    assert all(row.ttft_s is not None for row in rows)


async def test_reasoning_models_of_the_report(tmp_path: Path) -> None:
    """12 events of output each; the time to first token is that of the first thought."""
    kinds = {"plain": "content", "reasoning_content": "reasoning_content", "reasoning": "reasoning"}
    go = asyncio.Event()

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        name = json.loads(body)["model"]
        thoughts = [chunk({kinds[name]: f" t{i}"}) for i in range(10)]
        texts = [chunk({"content": f" {word}"}) for word in "ab"]
        events = list(map(event, [ROLE, *thoughts, *texts, STOP]))
        return await fake_engine.paused([b"".join(events[:2]), *events[2:]], go)(request, body)

    latest_s = []
    async with running_engine(script) as fake, running_proxy(fake.url, feedback=str(tmp_path)) as proxy:
        for name in kinds:
            go.clear()
            start_s, body = time.perf_counter(), chat(SHORT, stream=True, model=name)
            async with proxy.client.post(proxy.url + fake_engine.CHAT, json=body) as response:
                await response.content.readany()
                latest_s.append(time.perf_counter() - start_s)
                go.set()
                await response.read()
    rows = outcomes(tmp_path)
    assert [row.output_tokens for row in rows] == [12, 12, 12]
    for row, limit_s in zip(rows, latest_s, strict=True):
        assert row.ttft_s is not None
        assert row.ttft_s < limit_s


@pytest.mark.mend  # each response in flight could hold 8 MiB, without a bound on all of them
async def test_responses_that_are_read_share_a_budget() -> None:
    """What exceeds it passes unread, and what ended or was given up is given back."""
    budget = ReadBudget(1000)
    first, second = JsonReader(budget), JsonReader(budget)
    stream = EventStreamReader(True, budget)
    body = json.dumps(fake_engine.completion(7)).encode()
    text = b" " * 600 + body
    assert (first.feed(text), second.feed(text)) == (text, text)
    assert budget.num_bytes == len(text)
    second.end()
    assert second.stats.output_tokens is None
    assert stream.feed(b"data: " + b"x" * 900) == b"data: " + b"x" * 900
    first.end()
    assert first.stats.output_tokens == 7
    for reader in (first, second, stream):
        reader.close()
    assert budget.num_bytes == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_held_after_a_client_has_gone(stream: bool) -> None:
    go = asyncio.Event()
    events = [b'{"id": "c", ', b"}"] if not stream else [b"data: {", b"}"]
    kind = "text/event-stream" if stream else "application/json"

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        await response.write(events[0])
        await go.wait()
        return response

    async with (
        running_engine(script) as fake,
        running_proxy(fake.url, engine="vllm", predictor="tiny") as proxy,
    ):
        task = asyncio.create_task(proxy.post(chat(SHORT, stream=stream)))
        await until(lambda: proxy.server.handler.budget.num_bytes)
        task.cancel()
        await until(lambda: not proxy.server.handler.budget.num_bytes)
        assert proxy.server.num_in_flight == 0
        go.set()
