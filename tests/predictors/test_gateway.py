"""The HTTP side: the same answers as over gRPC, statuses, probes, metrics; requests whose counts are checked before they are parsed."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextvars import copy_context
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from predictors.hosting.tracing import Tracing
from predictors.manifest import Conditions
from predictors.proto import open_inference_pb2 as oip
from predictors.proto import predictor_v1_pb2 as pb
from predictors.runtime import open_runtime
from predictors.service.batcher import BatchingSettings
from predictors.service.errors import MAX_MESSAGE_BYTES, ErrorStatus, UnparsableError, trailing_metadata
from predictors.service.gateway import MAX_JSON_VALUES, json_object
from predictors.service.json_request import LIMITS, request_message
from predictors.service.messages import MAX_ELEMENTS, parse
from scheduler_core.errors import InputError
from tests.predictors.fakes import GatedRuntime, expected_rich, running_server, write_rich_artifact
from tests.waiting import until


@contextlib.asynccontextmanager
async def gateway(runtime: Any, **options: Any) -> AsyncIterator[tuple[Any, aiohttp.ClientSession]]:
    """A server and a session with its HTTP port."""
    async with (
        running_server(runtime, http_port=0, **options) as (server, _),
        aiohttp.ClientSession(base_url=f"http://127.0.0.1:{server.http_port}") as session,
    ):
        yield server, session


@pytest.fixture
async def http(rich_folder: Path) -> AsyncIterator[aiohttp.ClientSession]:
    async with gateway(open_runtime(rich_folder)) as (_, session):
        yield session


async def post(session: aiohttp.ClientSession, path: str, **body: Any) -> tuple[int, Any]:
    async with session.post(path, json=body) as response:
        return response.status, await response.json()


async def get(session: aiohttp.ClientSession, path: str) -> str:
    async with session.get(path) as response:
        assert response.status == 200, path
        return await response.text()


async def test_predict_over_http_gives_the_artifacts_numbers(http: aiohttp.ClientSession) -> None:
    options = {"request_id": "r1", "served_model": "tiny-llm", "max_tokens": 300}
    status, found = await post(http, "/v1/predict", prompt="name three rivers", **options)
    row = expected_rich("name three rivers", 1)
    assert (status, found["request_id"], found["served_model_known"]) == (200, "r1", True)
    for name in ("mu", "sigma", "nu", "rank", "regression_tokens"):
        assert found[name] == pytest.approx(row[name], rel=1e-5)
    np.testing.assert_allclose(found["urgency"]["probabilities"], row["urgency"], rtol=1e-5)
    assert "effective_level" not in found["urgency"]
    assert found["truncated_length"]["max_tokens"] == "300"
    assert found["median_tokens"] == pytest.approx(min(np.exp(row["mu"]), 300), rel=1e-5)
    assert found["median_tokens"] <= found["p90_tokens"] <= 300
    assert found["expected_tokens"] <= 300
    assert found["truncated"] is False


async def test_chat_and_token_ids_are_plain_lists(http: aiohttp.ClientSession) -> None:
    parts = [{"type": "text", "text": "name three "}, {"type": "text", "text": "rivers"}]
    for text, source in (
        ("sea", {"prompt": "sea"}),
        ("sea", {"token_ids": [1, 13, 2]}),
        ("sea", {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "sea"}]}),
        ("name three rivers", {"messages": [{"role": "user", "content": parts}]}),
    ):
        _, response = await post(http, "/v1/predict", **source)
        assert response["mu"] == pytest.approx(expected_rich(text)["mu"], rel=1e-6)
        assert response["prompt_tokens"] == len(text.split()) + 2


async def test_batch_over_http(http: aiohttp.ClientSession) -> None:
    requests = [{"request_id": "a", "prompt": "sea"}, {"request_id": "b", "prompt": ""}]
    status, found = await post(http, "/v1/predict-batch", requests=requests)
    assert status == 200
    assert found["outcomes"][0]["prediction"]["request_id"] == "a"
    assert found["outcomes"][1]["error"]["field"] == "requests[1].prompt"


UNREADABLE = [b"{", b"\xff\xfe", b"[" * 100_000, b"[]", b"5", b'{"prompt": "\\ud800"}', b'{"\\udc00": 1}']
WRONG_MEMBERS = {
    b'"max_tokens": "' + b"7" * 5000 + b'"': "max_tokens",
    b'"max_tokens": 1, "maxTokens": 2': "max_tokens, maxTokens",
    b'"max_tokens": NaN': "max_tokens",
    b'"max_tokens": 1.5': "max_tokens",
    b'"model": 5': "model",
    b'"quantile_levels": [NaN]': "quantile_levels",
    b'"temperature": "1_0"': "temperature",
    b'"declared_tier": 2147483648': "declared_tier",
}


@pytest.mark.parametrize(
    ("path", "body", "code", "field"),
    [
        ("/v1/predict", b'{"prompt": ""}', 400, "prompt"),
        ("/v1/predict", b'{"prompt": "sea", "artifact_id": "other"}', 404, "artifact_id"),
        ("/v1/predict-batch", b'{"requests": []}', 400, "requests"),
        ("/v1/predict-batch", b'{"requests": {}}', 400, "requests"),
        ("/v1/predict-batch", b'{"requests": [3]}', 400, "requests[0].request"),
        ("/v1/predict-batch", b'{"requests": [{"promt": "sea"}]}', 400, "requests[0].member"),
        ("/v1/predict", b'{"prompt": 5}', 400, "prompt"),
        *(("/v1/predict", body, 400, "request") for body in UNREADABLE),
        *(
            ("/v1/predict", b'{"prompt": "sea", ' + body + b"}", 400, field)
            for body, field in WRONG_MEMBERS.items()
        ),
    ],
)
async def test_wrong_requests_get_a_status_that_names_the_field(
    http: aiohttp.ClientSession, path: str, body: bytes, code: int, field: str
) -> None:
    async with http.post(path, data=body) as response:
        content = await response.json()
    assert response.status == code, content
    assert content["message"].startswith(f"{field}: got ")
    kinds = {detail["@type"].rpartition(".")[2]: detail for detail in content["details"]}
    assert kinds["BadRequest"]["fieldViolations"][0]["field"] == field
    assert "proto" not in content["message"].lower()
    metrics = await get(http, "/metrics")
    method = "HTTP Predict" if path == "/v1/predict" else "PredictBatch"
    name = "NOT_FOUND" if code == 404 else "INVALID_ARGUMENT"
    assert f'tailcast_requests_total{{artifact="tiny",code="{name}",method="{method}"}} 1.0' in metrics


async def test_full_queue_and_time_out_over_http(rich_folder: Path) -> None:
    runtime = GatedRuntime(rich_folder, is_open=False)
    batching = BatchingSettings(max_batch=1, max_wait_s=0.0, max_queue=2)
    async with gateway(runtime, batching=batching) as (server, session):
        first = asyncio.create_task(post(session, "/v1/predict", prompt="sea"))
        await until(lambda: server.artifacts.num_in_flight == 1)
        assert (await post(session, "/v1/predict", prompt="sea", timeout_s=0.01))[0] == 504
        second = asyncio.create_task(post(session, "/v1/predict", prompt="sea"))
        await until(lambda: server.artifacts.num_in_flight == 2)
        assert (await post(session, "/v1/predict", prompt="sea"))[0] == 429
        second.cancel()  # hangs up, and so leaves the queue
        await until(lambda: server.artifacts.num_in_flight == 1)
        runtime.gate.set()
        assert (await first)[0] == 200
    assert runtime.batches == [1]


# A header that is not ASCII was a 500.
@pytest.mark.mend
def test_a_trace_context_that_is_not_ascii_is_left_out() -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    task = copy_context()  # that of this thread would be the parent of spans of later tests
    task.run(Tracing().receive, {"tracestate": "a=\u00fc", "traceparent": f"00-{'1' * 32}-{'2' * 16}-01"})
    current = task.run(trace.get_current_span).get_span_context()
    assert (f"{current.span_id:x}", current.trace_state) == ("2" * 16, {})


async def test_metadata_and_metrics(http: aiohttp.ClientSession) -> None:
    metadata = json.loads(await get(http, "/v1/metadata"))
    assert (metadata["artifact_ids"], metadata["abstain_threshold"]) == (["tiny"], 0.9)
    for prompt in ("sea", ""):
        await post(http, "/v1/predict", prompt=prompt)
    text = await get(http, "/metrics")
    for code in ("OK", "INVALID_ARGUMENT"):
        labels = f'artifact="tiny",code="{code}",method="HTTP Predict"'
        assert f"tailcast_requests_total{{{labels}}} 1.0" in text
    assert f'version="{metadata["artifact_version"]}"' in text


async def turns_during(call: Callable[[], Any]) -> tuple[Any, int]:
    """The result of a coroutine, and how often others got a turn on the event loop meanwhile."""
    num_turns = 0

    async def others() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    try:
        return await call(), num_turns
    finally:
        task.cancel()


# A body of 5 million "{}" blocked all requests for seconds.
@pytest.mark.mend
@pytest.mark.parametrize("unit", ["{}", "1", '""', "[", '{"a":', "[1]"])
async def test_json_of_too_many_values_is_not_parse(monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    monkeypatch.delattr(json, "loads")
    separator = "" if unit.endswith(("[", ":")) else ","
    body = ("[" + separator.join([unit] * (MAX_JSON_VALUES + 1)) + "]").encode()
    with pytest.raises(UnparsableError, match="more than 100000 values"):
        await json_object(body)


async def test_what_stands_in_a_text_is_no_value_and_reading_it_lets_others_in() -> None:
    prompt = '[{,:\\"' * (4 * MAX_JSON_VALUES)
    content, num_turns = await turns_during(lambda: json_object(json.dumps({"prompt": prompt}).encode()))
    assert content == {"prompt": prompt}
    assert num_turns > 20


async def test_integers_of_many_digits_are_not_converted() -> None:
    with pytest.raises(UnparsableError, match="value has 5000 digits"):
        await json_object(b'{"max_tokens": -%s}' % (b"7" * 5000))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"maxTokens": "5", "cvarLevel": "0.5"}, pb.PredictRequest(max_tokens=5, cvar_level=0.5)),
        ({"prompt": None, "max_tokens": None}, pb.PredictRequest()),
        ({"token_ids": {"ids": ["1", 2]}}, pb.PredictRequest(token_ids=pb.TokenIds(ids=[1, 2]))),
        ({"quantileLevels": [0.5, "0.9"]}, pb.PredictRequest(quantile_levels=[0.5, 0.9])),
        ({"prompt": ["sea"], "stream": True}, pb.PredictRequest(prompt="sea")),
        ({"model": "m", "servedModel": "m"}, pb.PredictRequest(served_model="m")),
        ({"model": "m", "served_model": ""}, pb.PredictRequest(served_model="m")),
        *[({name: 0}, pb.PredictRequest()) for name in LIMITS],
        *[({name: -1}, pb.PredictRequest()) for name in LIMITS],
        *[({name: 7}, pb.PredictRequest(max_tokens=7)) for name in LIMITS],
        ({"max_tokens": 0, "max_completion_tokens": 9}, pb.PredictRequest(max_tokens=9)),
        (
            {"options": {"num_predict": 8, "temperature": 0.5}},
            pb.PredictRequest(max_tokens=8, temperature=0.5),
        ),
    ],
)
def test_json_may_be_that_of_protobuf(content: dict[str, Any], expected: pb.PredictRequest) -> None:
    assert request_message(content) == expected


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"prompt": "sea", "token_ids": [1]}, "prompt, token_ids: got '2 inputs'; allowed: one of them"),
        ({"prompt": "sea", "messages": []}, "prompt, messages: got '2 inputs'"),
        ({"input": "sea", "messages": []}, "messages, input: got '2 inputs'"),
        ({"max_tokens": 2**63}, "max_tokens: got 9223372036854775808; allowed: an integer of 64 bits"),
        ({"max_tokens": 1.5}, "max_tokens: got 1.5; allowed: an integer"),
        ({"prompt": ["sea", "river"]}, "prompt: got .*; allowed: one text; .*/v1/predict-batch several"),
        (
            {"prompt": [1, 2]},
            "prompt: got .*; allowed: one text; token_ids has ids of the artifact's tokenizer",
        ),
        ({"prompt": {}}, "prompt: got {}; allowed: a text"),
        (
            {"quantile_levels": [0.5] * 20_001},
            "quantile_levels: got '20001 values'; allowed: .* at most 20000",
        ),
        ({"messages": [{"role": "user"}] * 4097}, "messages: got '4097 messages'; allowed: at most 4096"),
        ({"messages": {}}, "messages: got {}; allowed: a list of messages"),
        ({"model": "a", "served_model": "b"}, "model, served_model: got "),
        ({"promt": "sea"}, "member: got 'promt'; allowed: prompt, or the name of another member"),
        *[({name: 5}, f"member: got '{name}'; allowed: max_tokens") for name in ("max_token", "max_toknes")],
        *[({name: "m"}, f"member: got '{name}'; allowed: model, or") for name in ("model_name", "model_id")],
        *[
            ({name: 5}, f"member: got '{name}'; allowed: max_tokens, or")
            for name in ("maxtoken", "MAX_TOKENS", "max-tokens")
        ],
        *[
            ({name: 5}, f"member: got '{name}'; allowed: max_tokens")
            for name in ("max_length", "max_gen_tokens")
        ],
        ([], "request: got 'a value of type list'; allowed: a JSON object"),
    ],
)
def test_wrong_json_is_named(content: object, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        request_message(content)


CALL = {"id": "c", "type": "function", "function": {"name": "depth", "arguments": "{}"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SEA = {"role": "user", "content": "sea"}
TOOLS = [{"type": "function", "function": {"name": "depth", "parameters": {"type": "object"}}}]
#: Bodies as clients send them, and the text that is predicted.
BODIES: list[tuple[dict[str, Any], str]] = [
    ({"messages": [SEA], "tools": TOOLS, "tool_choice": "auto", "top_p": 0.5, "stream": True, "n": 2}, "sea"),
    ({"messages": [SEA, {"role": "assistant", "content": None, "tool_calls": [CALL]}]}, "sea"),
    ({"messages": [SEA, {"role": "tool", "tool_call_id": "c", "content": "9"}]}, "sea"),
    ({"messages": [SEA, {"role": "function", "name": "depth", "content": "9"}]}, "sea"),
    ({"messages": [SEA, {"role": "assistant", "content": "name"}], "max_tokens": -1}, "sea"),
    ({"messages": [{"role": "developer", "content": "sea"}]}, "sea"),
    ({"messages": [{"role": "system", "content": ""}, SEA, {"role": "user", "content": ""}]}, "sea"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "sea"}, IMAGE]}]}, "sea"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "[image]"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "[audio]"),
    ({"input": "sea", "instructions": "name", "max_output_tokens": 9, "text": {"format": {}}}, "sea"),
    ({"input": [SEA, {"type": "function_call_output", "call_id": "c", "output": "9"}]}, "sea"),
    ({"system": "name", "messages": [SEA], "max_tokens": 9, "thinking": {"type": "enabled"}}, "sea"),
    ({"system": [{"type": "text", "text": "name"}], "prompt": "sea", "options": {"num_predict": -1}}, "sea"),
    ({"prompt": ["sea"], "echo": False, "logprobs": None, "suffix": None}, "sea"),
    ({"contents": [{"role": "user", "parts": [{"text": "sea"}]}], "generationConfig": {"maxOutputTokens": 9}, "systemInstruction": {"parts": [{"text": "name"}]}}, "sea"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "text"), BODIES)
async def test_bodies_of_generation_apis_are_predicted(
    http: aiohttp.ClientSession, body: dict[str, Any], text: str
) -> None:
    status, response = await post(http, "/v1/predict", model="tiny-llm", **body)
    assert status == 200, response
    assert response["served_model_known"]
    assert response["mu"] == pytest.approx(expected_rich(text, 1)["mu"], rel=1e-6)
    batch = {"requests": [body | {"model": "tiny-llm"}]}
    _, outcomes = await post(http, "/v1/predict-batch", **batch)
    assert outcomes["outcomes"][0]["prediction"]["mu"] == response["mu"]


@pytest.mark.parametrize("content", [None, "", "  ", [], [{"type": "text", "text": ""}]])
async def test_only_conversations_without_any_text_are_refused(
    http: aiohttp.ClientSession, content: object
) -> None:
    status, response = await post(http, "/v1/predict", messages=[{"role": "user", "content": content}])
    assert status == 400
    assert response["message"].startswith("messages: got ")


async def test_an_unknown_model_is_named_as_it_was_sent_with_similar_names(tmp_path: Path) -> None:
    names = ("Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct")
    conditioning = Conditions(unknown_models=False, temperature=True)
    folder = write_rich_artifact(tmp_path / "a", conditioning=conditioning, served_models=names)
    async with gateway(open_runtime(folder)) as (_, session):
        for name in ("model", "served_model"):
            status, response = await post(session, "/v1/predict", prompt="sea", **{name: "llama-3.1-8b"})
            assert (status, response["message"].partition(":")[0]) == (400, name)
            assert response["message"].endswith("Did you mean meta-llama/Llama-3.1-8B-Instruct?")


async def test_the_log_lists_models_similar_to_an_unknown_one_once(
    http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        status, response = await post(http, "/v1/predict", prompt="sea", model="TINY-LLM-2")
        assert (status, response["served_model_known"]) == (200, False)
    [record] = [record for record in caplog.records if "none of its 2 served models" in record.getMessage()]
    assert "Did you mean tiny-llm" in record.getMessage()
    assert "TINY-LLM-2" not in record.getMessage()


class Unparsed:
    """A kind of message whose parser must not be called."""

    def __init__(self, kind: Any) -> None:
        self.DESCRIPTOR, self.__name__ = kind.DESCRIPTOR, "Unparsed"


# A gRPC message of 8 million token ids blocked all requests for seconds.
@pytest.mark.mend
@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (pb.PredictBatchRequest, b"\x0a\0"),
        (pb.PredictRequest, b"\x22" + b"\xc0\xf0\x04" + b"\x0a\0" * 40_000),
        (pb.PredictBatchRequest, b"\x0b\x0c" + b"\x0a\0" * 40_000),
        (oip.ModelInferRequest, b"\x2a\0"),
        (oip.ModelInferRequest, b"\x2a\xc4\xf0\x04\x2a\xc0\xf0\x04" + b"\x42\0" * 40_000),
    ],
    ids=["requests", "messages", "behind a group", "inputs", "texts"],
)
def test_messages_of_too_many_elements_are_not_parse(kind: Any, data: bytes) -> None:
    if len(data) < 10:
        data *= 40_000
    kind.FromString(data)  # it is one, and too large just for us
    with pytest.raises(UnparsableError, match=f"more than {MAX_ELEMENTS} elements"):
        parse(Unparsed(kind), data)


def test_large_messages_of_few_elements_are_parse() -> None:
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="sea" * 20)] * 50)
    batch = pb.PredictBatchRequest(requests=[pb.PredictRequest(messages=chat)] * 256)
    assert parse(pb.PredictBatchRequest, batch.SerializeToString()) == batch
    ids = pb.PredictRequest(token_ids=pb.TokenIds(ids=range(100_000)))
    assert parse(pb.PredictRequest, ids.SerializeToString()) == ids


# A lone surrogate in an error message made the response a 500.
@pytest.mark.mend
@pytest.mark.parametrize("text", ["x" * 10**6, "\U0001f600" * 10**5, "\ud800" * 10**5])
def test_messages_of_errors_are_short_and_can_be_encoded(text: str) -> None:
    status = ErrorStatus.of(InputError("served_model", "other", f"one of {text}"))
    assert status.message.startswith("served_model: got ")
    assert status.message.endswith("...")
    assert len(status.message.encode()) <= MAX_MESSAGE_BYTES + 3
    # Of a header, gRPC takes 8 KiB without complaint: percent-encoded, and twice in base64.
    assert 3 * MAX_MESSAGE_BYTES + len(trailing_metadata(status)[0][1]) * 4 / 3 < 8192
