"""Whatever bytes arrive: no crash, no hang, and a status that tells whose fault it is."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from predictors.proto import open_inference_pb2 as oip
from predictors.proto import predictor_v1_pb2 as pb
from tests.service.harness import Served, served

SERVICE = "/tailcast.predictor.v1.Predictor/"
METHODS = ("Predict", "PredictBatch", "GetMetadata")
# DEADLINE_EXCEEDED is not among them: a request's own timeout_s aside, it would be one that hangs.
CALLERS_FAULT = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
VALID = [
    pb.PredictRequest(request_id="r", prompt="name three rivers", max_tokens=100).SerializeToString(),
    pb.PredictRequest(
        prompt="sea", served_model="tiny-llm", max_tokens=9, cvar_level=0.5, quantile_levels=[0.1, 0.9]
    ).SerializeToString(),
    pb.PredictRequest(token_ids=pb.TokenIds(ids=[1, 2, 3])).SerializeToString(),
    pb.PredictRequest(
        messages=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="sea")]), temperature=0.5
    ).SerializeToString(),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, artifact_folder: Path) -> Iterator[Served]:
    with served(artifact_folder) as found:
        yield found


@pytest.fixture(scope="module")
def channel(server: Served) -> Iterator[grpc.Channel]:
    limit = 64 * 2**20
    options = [("grpc.max_send_message_length", limit), ("grpc.max_receive_message_length", limit)]
    with grpc.insecure_channel(server.address, options=options) as found:
        yield found


def status(channel: grpc.Channel, method: str, data: bytes, timeout_s: float = 30.0) -> grpc.StatusCode:
    """The status of a call whose request is just these bytes."""
    call = channel.unary_unary(method if method.startswith("/") else SERVICE + method)
    try:
        call(data, timeout=timeout_s)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def assert_alive(channel: grpc.Channel) -> None:
    assert status(channel, "Predict", VALID[0]) == grpc.StatusCode.OK


fuzzed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@fuzzed
@given(method=st.sampled_from(METHODS), data=st.binary(max_size=400))
def test_any_bytes(channel: grpc.Channel, method: str, data: bytes) -> None:
    assert status(channel, method, data) in CALLERS_FAULT | {grpc.StatusCode.OK}


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid message with bytes changed, cut out, doubled, or joined with another one."""
    data = bytearray(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(1, 4))):
        at, to = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
        kind = draw(st.sampled_from(["flip", "cut", "double", "insert", "join"]))
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[at:to]
        elif kind == "double":
            data[at:at] = data[at:to]
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=12))
        elif kind == "join":
            data[at:] = draw(st.sampled_from(VALID))
    return bytes(data)


@fuzzed
@given(data=mutated())
def test_mutations_of_valid_messages(channel: grpc.Channel, data: bytes) -> None:
    for method in METHODS:
        assert status(channel, method, data) in CALLERS_FAULT | {grpc.StatusCode.OK}
    batch = pb.PredictBatchRequest(requests=[pb.PredictRequest(prompt="sea")]).SerializeToString()
    # As an element of a batch: field 1, length-delimited.
    assert len(data) < 2**14
    length = bytes([len(data) & 127 | 128, len(data) >> 7])
    found = status(channel, "PredictBatch", batch + b"\x0a" + length + data)
    assert found in CALLERS_FAULT | {grpc.StatusCode.OK}


TEXT = st.text(max_size=60) | st.sampled_from(["", " ", "sea", "tiny-llm", "\0", "\u202e", "nan", "crash"])
NUMBERS = st.floats() | st.sampled_from([0.0, 0.5, 1.0, -1.0, 1e308])
REQUESTS = st.builds(
    lambda head, source: pb.PredictRequest(**head, **source),
    st.fixed_dictionaries(
        {},
        optional={
            "request_id": TEXT,
            "served_model": TEXT,
            "artifact_id": TEXT,
            "max_tokens": st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 5),
            "cvar_level": NUMBERS,
            "quantile_levels": st.lists(NUMBERS, max_size=4),
            "temperature": NUMBERS,
            "declared_tier": st.integers(-(2**31), 2**31 - 1),
            "timeout_s": NUMBERS,
        },
    ),
    st.one_of(
        st.just({}),
        TEXT.map(lambda prompt: {"prompt": prompt}),
        st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 15), max_size=20).map(
            lambda ids: {"token_ids": pb.TokenIds(ids=ids)}
        ),
        st.lists(st.tuples(TEXT, TEXT), max_size=3).map(
            lambda pairs: {
                "messages": pb.ChatMessages(
                    messages=[pb.ChatMessage(role=role, content=content) for role, content in pairs]
                )
            }
        ),
    ),
)


# "nan" and "crash" are words that make the tiny model fail: there INTERNAL is the truth.
def _may_break(request: pb.PredictRequest) -> bool:
    text = request.prompt + "".join(message.content for message in request.messages.messages)
    return any(word in text for word in ("nan", "crash")) or any(one >= 14 for one in request.token_ids.ids)


@fuzzed
@given(request=REQUESTS)
def test_any_values_of_the_fields(channel: grpc.Channel, request: pb.PredictRequest) -> None:
    allowed = CALLERS_FAULT | {grpc.StatusCode.OK}
    if request.HasField("timeout_s"):
        allowed = allowed | {grpc.StatusCode.DEADLINE_EXCEEDED}
    if _may_break(request):
        allowed = allowed | {grpc.StatusCode.INTERNAL}
    assert status(channel, "Predict", request.SerializeToString()) in allowed


@fuzzed
@given(batch=st.lists(REQUESTS, max_size=6))
def test_a_batch_tells_each_ones_own_fault(channel: grpc.Channel, batch: list[pb.PredictRequest]) -> None:
    call: Any = channel.unary_unary(SERVICE + "PredictBatch")
    data = pb.PredictBatchRequest(requests=[pb.PredictRequest(prompt="sea"), *batch]).SerializeToString()
    outcomes = pb.PredictBatchResponse.FromString(call(data, timeout=30)).outcomes
    assert len(outcomes) == len(batch) + 1
    if not any(_may_break(request) for request in batch):
        assert outcomes[0].WhichOneof("outcome") == "prediction"
    for request, outcome in zip(batch, outcomes[1:], strict=True):
        assert outcome.WhichOneof("outcome") is not None
        if outcome.WhichOneof("outcome") == "error":
            codes = {code.value[0] for code in CALLERS_FAULT}
            late = outcome.error.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
            if not (late and request.HasField("timeout_s")):
                assert outcome.error.code in codes or any(_may_break(one) for one in batch)
            assert outcome.error.message
            assert outcome.error.request_id == request.request_id


@fuzzed
@given(parts=st.lists(st.sampled_from(VALID) | st.binary(max_size=60), min_size=1, max_size=8))
def test_any_bytes_in_a_stream(channel: grpc.Channel, parts: list[bytes]) -> None:
    call = channel.stream_stream(SERVICE + "PredictStream")(iter(parts), timeout=30)
    num_answers = 0
    try:
        for data in call:
            assert pb.Outcome.FromString(data).WhichOneof("outcome") is not None
            num_answers += 1
    except grpc.RpcError:
        assert call.code() == grpc.StatusCode.INVALID_ARGUMENT
    else:
        assert num_answers == len(parts)


@pytest.mark.parametrize("field", [1, 2, 5, 11])
def test_text_that_is_not_utf8_is_the_callers_fault(channel: grpc.Channel, field: int) -> None:
    bad = bytes([field << 3 | 2, 3]) + b"\xff\xfe\xc0"
    assert status(channel, "Predict", VALID[0] + bad) == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("method", METHODS)
def test_another_services_messages(channel: grpc.Channel, method: str) -> None:
    other = pb.GetMetadataResponse(
        artifact_id="x", urgency_levels=["a"] * 5, bucket_edges=[1.0, 2.0]
    ).SerializeToString()
    assert status(channel, method, other) in CALLERS_FAULT | {grpc.StatusCode.OK}


def test_unknown_methods_and_services(channel: grpc.Channel) -> None:
    for path in ("/tailcast.predictor.v1.Predictor/Guess", "/other.Service/Predict", "/nothing"):
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(path)(VALID[0], timeout=30)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert_alive(channel)


@pytest.mark.parametrize("unit", ["x", "\U0001f600", "\n", "\0"])
def test_a_megabyte_of_one_character(channel: grpc.Channel, unit: str) -> None:
    data = pb.PredictRequest(prompt="sea " + unit * (2**20 // len(unit.encode()))).SerializeToString()
    assert status(channel, "Predict", data, 120) in {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
    assert_alive(channel)


def test_a_huge_batch_is_refused_as_a_whole(channel: grpc.Channel) -> None:
    data = pb.PredictBatchRequest(requests=[pb.PredictRequest(prompt="sea")] * 200_000).SerializeToString()
    assert status(channel, "PredictBatch", data, 60) == grpc.StatusCode.INVALID_ARGUMENT
    assert status(channel, "PredictBatch", b"") == grpc.StatusCode.INVALID_ARGUMENT
    assert_alive(channel)


def http_status(
    server: Served, path: str, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = (), verb: str = "POST"
) -> int:
    """The status of an HTTP request, whose header values are just these bytes."""
    head = (
        f"{verb} ".encode()
        + path.encode("utf-8", "surrogateescape")
        + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    )
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=60) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n" % len(body) + lines + b"\r\n" + body)
        response = http.client.HTTPResponse(connection)
        response.begin()
        response.read()
        return response.status


def is_answered_or_refused(status: int) -> bool:
    """Whether a status is that of a service whose client is at fault, if anybody is."""
    return 200 <= status < 500 or status == 503


# Where a value is expected: what JSON parsers and their users trip over. None of the texts makes the tiny model fail.
HOSTILE_JSON = st.sampled_from(
    [
        *[
            "null",
            "true",
            "0",
            "-1",
            "-0",
            "0.5",
            "1.0",
            "5e-324",
            "1e308",
            "1e999",
            "NaN",
            "Infinity",
            "-Infinity",
            "nul",
            "'sea'",
            "01",
            "+1",
        ],
        *["2147483648", "-9223372036854775809", "9223372036854775807", "9223372036854775808"],
        *['""', '"sea"', '"5"', '"NaN"', '"tiny"', '"\\ud800"', '"x\\udc00"', '"\\u0000"', '"\u202e漢"'],
        *["[]", "{}", "[[]]", "[null]", "[1,2]", '["sea"]', "[0.5]", '{"ids":[1]}', "[1,NaN]"],
        '" "',
        "7" * 5000,
        "[" * 2000 + "]" * 2000,
        '{"a":' * 2000 + "1" + "}" * 2000,
        "[1" + ", 1" * 20_000 + "]",
    ]
)


def json_objects(names: st.SearchStrategy[str], values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """JSON texts of objects; a name can come twice."""
    pairs = st.tuples(names, values).map(lambda pair: f'"{pair[0]}": {pair[1]}')
    return st.lists(pairs, max_size=4).map(lambda parts: "{" + ", ".join(parts) + "}")


FIELDS = [
    name for field in pb.PredictRequest.DESCRIPTOR.fields for name in (field.name, field.json_name)
    if field.name != "timeout_s"
]  # fmt: skip
JSON_REQUESTS = json_objects(st.sampled_from([*FIELDS, "a", "\\ud800", ""]), HOSTILE_JSON)
JSON_BATCHES = st.lists(JSON_REQUESTS | HOSTILE_JSON, max_size=3).map(
    lambda parts: '{"requests": [{"prompt": "sea"}, ' + ", ".join(parts) + "]}"
)
TENSOR_NAMES = st.sampled_from(
    ["prompt", "input_ids", "served_model", "temperature", "max_tokens", "\\ud800", ""]
)
DATATYPES = st.sampled_from(["BYTES", "INT8", "INT64", "UINT64", "FP32", "FP64", "\\ud800", ""])
SHAPES = st.lists(st.sampled_from([-1, 0, 1, 2, 3, 2**31, 2**63, 2**70]), max_size=3).map(str) | HOSTILE_JSON
JSON_TENSORS = st.builds(
    lambda name, datatype, shape, data: (
        f'{{"name": "{name}", "datatype": "{datatype}", "shape": {shape}, "data": {data}}}'
    ),
    TENSOR_NAMES,
    DATATYPES,
    SHAPES,
    HOSTILE_JSON,
)
PROMPT_TENSOR = '{"name": "prompt", "datatype": "BYTES", "shape": [1], "data": ["sea"]}'
JSON_INFERENCES = st.builds(
    lambda tensors, outputs, rest: (
        f'{{"inputs": [{", ".join(tensors)}], "outputs": [{", ".join(outputs)}], {rest[1:]}'
        if rest != "{}"
        else f'{{"inputs": [{", ".join(tensors)}]}}'
    ),
    st.lists(st.just(PROMPT_TENSOR) | JSON_TENSORS | HOSTILE_JSON, max_size=3),
    st.lists(json_objects(st.sampled_from(["name", "parameters"]), HOSTILE_JSON), max_size=2),
    json_objects(st.sampled_from(["id", "parameters", "inputs", "outputs", "a"]), HOSTILE_JSON),
)
INFER = "/v2/models/tiny/infer"
POSTS = st.one_of(
    st.tuples(st.just("/v1/predict"), JSON_REQUESTS | HOSTILE_JSON),
    st.tuples(st.just("/v1/predict-batch"), JSON_BATCHES | HOSTILE_JSON),
    st.tuples(st.just(INFER), JSON_INFERENCES | HOSTILE_JSON),
)


@fuzzed
@given(post=POSTS)
def test_any_json_over_http(server: Served, post: tuple[str, str]) -> None:
    path, text = post
    status = http_status(server, path, text.encode("utf-8", "surrogatepass"))
    assert is_answered_or_refused(status), (status, text[:500])


def tensor(name: str, datatype: str, data: str, shape: str = "[1]") -> str:
    return f'{{"name": "{name}", "datatype": "{datatype}", "shape": {shape}, "data": {data}}}'


@pytest.mark.parametrize(
    ("path", "text"),
    [
        *(
            ("/v1/predict", f'{{"prompt": "sea", "{name}": {value}}}')
            for name, value in [
                ("max_tokens", "9223372036854775808"),
                ("max_tokens", '"9223372036854775808"'),
                ("max_tokens", "7" * 5000),
                ("max_tokens", '"' + "7" * 5000 + '"'),
                ("max_tokens", "1e400"),
                ("max_tokens", "NaN"),
                ("temperature", "NaN"),
                ("temperature", "Infinity"),
                ("cvar_level", "NaN"),
                ("quantile_levels", "[NaN]"),
                ("declared_tier", "2147483648"),
                ("served_model", '"\\ud800"'),
                ("request_id", '"\\ud800"'),
                ("\\ud800", "1"),
                ("token_ids", "[1]"),
                ("token_ids", "[" * 100_000),
                ("prompt", '"river"'),
                ("max_tokens", "1, " + '"maxTokens": 2'),
            ]
        ),
        ("/v1/predict", '{"prompt": "\\ud800"}'),
        ("/v1/predict", '{"messages": [{"role": "user", "content": "\\udc00"}]}'),
        ("/v1/predict", '{"a":' * 100_000),
        ("/v1/predict-batch", '{"requests": [{"prompt": "\\ud800"}]}'),
        ("/v1/predict-batch", '{"requests": {}}'),
        *(
            (INFER, f'{{"inputs": [{", ".join(tensors)}]}}')
            for tensors in [
                [tensor("prompt", "BYTES", '["\\ud800"]')],
                [PROMPT_TENSOR, tensor("served_model", "BYTES", '["\\ud800"]')],
                [PROMPT_TENSOR, tensor("max_tokens", "UINT64", "[9223372036854775808]")],
                [PROMPT_TENSOR, tensor("max_tokens", "INT64", "[9223372036854775808]")],
                [PROMPT_TENSOR, tensor("max_tokens", "INT64", "[1.5]")],
                [PROMPT_TENSOR, tensor("max_tokens", "INT64", "[true]")],
                [PROMPT_TENSOR, tensor("temperature", "FP32", "[1e39]")],
                [PROMPT_TENSOR, tensor("\\ud800", "FP32", "[1]")],
                [tensor("prompt", "BYTES", "[1]")],
                [tensor("prompt", "\\ud800", '["sea"]')],
                [tensor("prompt", "BYTES", '["sea"]', "[9223372036854775808]")],
                [tensor("prompt", "BYTES", '["sea"]', f"[{'7' * 5000}]")],
                [tensor("prompt", "BYTES", '["sea"]', "[1, 1, 1]")],
                [tensor("input_ids", "INT64", "[1]", "[1, 9223372036854775807]")],
            ]
        ),
        (INFER, f'{{"inputs": [{PROMPT_TENSOR}], "outputs": [{{"name": "\\ud800"}}]}}'),
        (INFER, f'{{"inputs": [{PROMPT_TENSOR}], "outputs": [{{"name": "mu", "parameters": 1}}]}}'),
        (INFER, f'{{"inputs": [{PROMPT_TENSOR}], "parameters": "\\ud800"}}'),
    ],
)  # fmt: skip
def test_what_is_known_to_trip_is_the_callers_fault(server: Served, path: str, text: str) -> None:
    status = http_status(server, path, text.encode())
    assert status == 400


def test_half_a_surrogate_in_an_id_comes_back(server: Served) -> None:
    assert http_status(server, INFER, f'{{"id": "\\ud800", "inputs": [{PROMPT_TENSOR}]}}'.encode()) == 200


HEADER_NAMES = st.sampled_from(
    b"Authorization traceparent tracestate Content-Type Content-Encoding Expect X-Any Accept Range Cookie Upgrade "
    b"Inference-Header-Content-Length".split()
)
HEADER_VALUES = st.binary(max_size=20).map(lambda value: value.translate(None, b"\r\n\0")) | st.sampled_from(
    [
        *b"-1 0 2 1_0 1e1 gzip deflate br 100-continue".split(),
        *(b"7" * 5000, "١٢".encode(), b" 1 ", b"Bearer \xe4\xf6", b"\xed\xa0\x80", b"gzip, gzip"),
        b"00-" + b"1" * 32 + b"-" + b"1" * 16 + b"-01",
    ]
)
BODIES = st.sampled_from(
    [
        b'{"prompt": "sea"}',
        b"",
        b"\xff",
        b'\xef\xbb\xbf{"prompt": "sea"}',
        '{"prompt": "sea"}'.encode("utf-16"),
        gzip.compress(b'{"prompt": "sea"}'),
        zlib.compress(b'{"prompt": "sea"}'),
        zlib.compress(b'{"prompt": "sea"}')[2:-4],
        gzip.compress(b'{"prompt": "sea"}')[:-3],
        gzip.compress(b"{}") + b"more",
    ]
)


@fuzzed
@given(
    path=st.sampled_from(["/v1/predict", "/v1/predict-batch", INFER]),
    headers=st.lists(st.tuples(HEADER_NAMES, HEADER_VALUES), max_size=3).map(tuple),
    body=BODIES | st.binary(max_size=60),
)
def test_any_headers_and_bodies_over_http(
    server: Served, path: str, headers: tuple[tuple[bytes, bytes], ...], body: bytes
) -> None:
    status = http_status(server, path, body, headers)
    assert is_answered_or_refused(status), status


@pytest.mark.parametrize(
    "path",
    [
        "/v2/models/%ff/infer",
        "/v2/models/�/infer",
        "/v2/models/%ED%A0%80",
        "/v2/models/tiny/versions/%00",
        "/v1/metadata?artifact_id=%ff",
        "/v1/metadata?artifact_id=%ED%A0%80",
        "/%",
        "/v2/models/%2e%2e/ready",
    ],
)
@pytest.mark.parametrize("verb", ["GET", "POST"])
def test_any_names_in_paths(server: Served, path: str, verb: str) -> None:
    assert 400 <= http_status(server, path, b"{}", verb=verb) < 500


@fuzzed
@given(
    name=TENSOR_NAMES.filter(str.isalpha) | st.sampled_from(["input_ids", "max_tokens"]),
    datatype=DATATYPES.filter(str.isalnum),
    shape=st.lists(st.sampled_from([0, 1, 2, 3, 2**31, 2**63]), max_size=3),
    data=st.binary(max_size=24),
    size=st.integers(-1, 30) | st.just(2**70),
)
def test_any_binary_tensor_over_http(
    server: Served, name: str, datatype: str, shape: list[int], data: bytes, size: int
) -> None:
    tensor = {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [json.loads(PROMPT_TENSOR), tensor][name == "prompt" :]}).encode()
    headers = ((b"Inference-Header-Content-Length", b"%d" % len(head)),)
    status = http_status(server, INFER, head + data, headers)
    assert is_answered_or_refused(status), status


TYPED = st.fixed_dictionaries(
    {},
    optional={
        "int_contents": st.lists(st.sampled_from([-1, 0, 1, 2**31 - 1]), max_size=3),
        "int64_contents": st.lists(st.sampled_from([-(2**63), -1, 0, 1, 2**63 - 1]), max_size=3),
        "fp32_contents": st.lists(st.floats(width=32), max_size=3),
        "bytes_contents": st.lists(st.sampled_from([b"", b"sea", b"\xff", b"tiny-llm"]), max_size=3),
    },
)
TENSORS = st.builds(
    lambda name, datatype, shape, contents: oip.ModelInferRequest.InferInputTensor(
        name=name, datatype=datatype, shape=shape, contents=oip.InferTensorContents(**contents)
    ),
    TENSOR_NAMES.filter(str.isalpha) | st.sampled_from(["input_ids", "max_tokens", "served_model"]),
    DATATYPES.filter(str.isalnum),
    st.lists(st.sampled_from([-1, 0, 1, 2, 3, 2**31, 2**63 - 1]), max_size=3),
    TYPED,
)
SEA = oip.ModelInferRequest.InferInputTensor(
    name="prompt", datatype="BYTES", shape=[1], contents=oip.InferTensorContents(bytes_contents=[b"sea"])
)


@fuzzed
@given(
    tensors=st.lists(TENSORS | st.just(SEA), max_size=3),
    raw=st.lists(st.binary(max_size=12), max_size=3),
    outputs=st.lists(st.sampled_from(["mu", "expected_tokens", "", "\U0001f600"]), max_size=3),
    noise=st.binary(max_size=20),
)
def test_any_model_infer(
    channel: grpc.Channel,
    tensors: list[oip.ModelInferRequest.InferInputTensor],
    raw: list[bytes],
    outputs: list[str],
    noise: bytes,
) -> None:
    request = oip.ModelInferRequest(model_name="tiny", inputs=tensors, raw_input_contents=raw)
    for name in outputs:
        request.outputs.add(name=name)
    code = status(channel, "/inference.GRPCInferenceService/ModelInfer", request.SerializeToString() + noise)
    assert code in CALLERS_FAULT | {grpc.StatusCode.OK}


@fuzzed
@given(
    data=st.sampled_from(VALID),
    keys=st.lists(
        st.tuples(st.sampled_from(["authorization", "traceparent", "x-any-bin"]), st.binary(max_size=12)),
        max_size=3,
    ),
)
def test_any_metadata_over_grpc(channel: grpc.Channel, data: bytes, keys: list[tuple[str, bytes]]) -> None:
    metadata = [(key, value if key.endswith("-bin") else value.hex()) for key, value in keys]
    call: Any = channel.unary_unary(SERVICE + "Predict")
    assert call(data, timeout=30, metadata=metadata)


def test_the_server_is_still_the_same_process(server: Served, channel: grpc.Channel) -> None:
    assert_alive(channel)
    assert server.process.popen.poll() is None
    assert server.queue_length() == 0
