"""Whatever bytes arrive: no crash, no hang, and a status that tells whose fault it is."""

import gzip
import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from predictors.proto import open_inference_pb2 as oip
from predictors.proto import predictor_v1_pb2 as pb
from scheduler_core.errors import InputError
from scheduler_core.ranges import parse_number
from scheduler_core.shell.json_text import RepeatedKeyError, check_num_values, num_separators, parse_json
from tests.service.harness import Served, served

SERVICE = "/tailcast.predictor.v1.Predictor/"
METHODS = ("Predict", "PredictBatch", "GetMetadata")
OK, INVALID, UNKNOWN = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED
# DEADLINE_EXCEEDED is not among them: a request's own timeout_s aside, it would be one that hangs.
CALLERS_FAULT = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
CHAT = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="sea")])
VALID = [
    pb.PredictRequest(request_id="r", prompt="name three rivers", max_tokens=100).SerializeToString(),
    pb.PredictRequest(
        prompt="sea", served_model="tiny-llm", max_tokens=9, cvar_level=0.5, quantile_levels=[0.1, 0.9]
    ).SerializeToString(),
    pb.PredictRequest(token_ids=pb.TokenIds(ids=[1, 2, 3])).SerializeToString(),
    pb.PredictRequest(messages=CHAT, temperature=0.5).SerializeToString(),
]
fuzzed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
ODD_PATHS = "/v2/models/%ff/infer /v2/models/tiny/versions/%00 /v1/metadata?artifact_id=%ED%A0%80 /v2/models/%2e%2e/ready"


@pytest.fixture(scope="module")
def server(artifact_folder: Path) -> Iterator[Served]:
    with served(artifact_folder) as server:
        yield server
        assert server.process.popen.poll() is None
        assert server.queue_length() == 0
        assert server.answers()


@pytest.fixture(scope="module")
def channel(server: Served) -> Iterator[grpc.Channel]:
    options = [("grpc.max_send_message_length", 64 * 2**20)]
    with grpc.insecure_channel(server.address, options=options) as channel:
        yield channel


def status(channel: grpc.Channel, method: str, data: bytes, timeout_s: float = 60.0) -> grpc.StatusCode:
    """The status of a call whose request is just these bytes."""
    try:
        channel.unary_unary(method if method.startswith("/") else SERVICE + method)(data, timeout=timeout_s)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return OK


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
@given(data=st.binary(max_size=400) | mutated())
def test_any_bytes_and_mutations_of_valid_messages(channel: grpc.Channel, data: bytes) -> None:
    for method in METHODS:
        assert status(channel, method, data) in CALLERS_FAULT | {OK}
    # As an element of a batch: field 1, length-delimited.
    element = b"\x0a" + bytes([len(data) & 127 | 128, len(data) >> 7]) + data
    batch = pb.PredictBatchRequest(requests=[pb.PredictRequest(prompt="sea")]).SerializeToString()
    assert status(channel, "PredictBatch", batch + element) in CALLERS_FAULT | {OK}


def long_prompt(text: str) -> bytes:
    return pb.PredictRequest(prompt="sea " + text * 2**18).SerializeToString()


@pytest.mark.parametrize(
    ("method", "data", "code"),
    [
        *[
            ("Predict", VALID[0] + bytes([field << 3 | 2, 3]) + b"\xff\xfe\xc0", INVALID)
            for field in (1, 2, 5, 11)
        ],
        ("PredictBatch", b"\x0a\x05\x12\x03sea" * 200_000, INVALID),
        ("PredictBatch", b"", INVALID),
        *[(path, VALID[0], UNKNOWN) for path in (SERVICE + "Guess", "/other.Service/Predict", "/nothing")],
        *[("Predict", long_prompt(text), OK) for text in ("xxxx", "\U0001f600", "\n\n\n\n", "\0\0\0\0")],
    ],
)
def test_bytes_over_grpc(channel: grpc.Channel, method: str, data: bytes, code: grpc.StatusCode) -> None:
    """Texts that are not UTF-8, huge and empty batches, unknown methods, a mebibyte of one character."""
    assert status(channel, method, data, 120) == code


def http_status(
    server: Served, path: str, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = (), verb: str = "POST"
) -> int:
    """The status of an HTTP request, whose header values are just these bytes."""
    line = f"{verb} {path} HTTP/1.1\r\n".encode("utf-8", "surrogateescape")
    fields = ((b"Host", b"x"), (b"Connection", b"close"), (b"Content-Length", b"%d" % len(body)), *headers)
    head = line + b"".join(name + b": " + value + b"\r\n" for name, value in fields)
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=60) as connection:
        connection.sendall(head + b"\r\n" + body)
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
        *["null", "true", "nul", "'sea'", "NaN", "Infinity", "-Infinity"],
        *["0", "-1", "-0", "01", "+1", "0.5", "1.0", "5e-324", "1e308", "1e999"],
        *["2147483648", "-9223372036854775809", "9223372036854775807", "9223372036854775808"],
        *[r'""', r'"sea"', r'"5"', r'"NaN"', r'"tiny"', r'"\ud800"', r'"x\udc00"', r'"\u0000"'],
        *('" "', '"\u202e漢"'),
        *["[]", "{}", "[[]]", "[null]", "[1,2]", '["sea"]', "[0.5]", '{"ids":[1]}', "[1,NaN]"],
        "7" * 5000,
        "[" * 2000 + "]" * 2000,
        '{"a":' * 2000 + "1" + "}" * 2000,
        "[1" + ", 1" * 20_000 + "]",
    ]
)


def json_objects(names: list[str], values: st.SearchStrategy[str] = HOSTILE_JSON) -> st.SearchStrategy[str]:
    """JSON texts of objects; a name can come twice."""
    keys = st.sampled_from([*names, "a", "\\ud800", ""])
    pairs = st.tuples(keys, values).map(lambda pair: f'"{pair[0]}": {pair[1]}')
    return st.lists(pairs, max_size=4).map(lambda parts: "{" + ", ".join(parts) + "}")


FIELDS = [
    name for field in pb.PredictRequest.DESCRIPTOR.fields for name in (field.name, field.json_name)
    if field.name != "timeout_s"
]  # fmt: skip
JSON_REQUESTS = json_objects(FIELDS)
JSON_BATCHES = st.lists(JSON_REQUESTS | HOSTILE_JSON, max_size=3).map(
    lambda parts: '{"requests": [{"prompt": "sea"}, ' + ", ".join(parts) + "]}"
)
NAMES = ["prompt", "input_ids", "served_model", "temperature", "max_tokens"]
DATATYPES = ["BYTES", "INT8", "INT64", "UINT64", "FP32", "FP64"]
SHAPES = st.lists(st.sampled_from([-1, 0, 1, 2, 3, 2**31, 2**63 - 1]), max_size=3)
INFER = "/v2/models/tiny/infer"


def tensor(name: str, datatype: str, data: str, shape: str = "[1]") -> str:
    return f'{{"name": "{name}", "datatype": "{datatype}", "shape": {shape}, "data": {data}}}'


PROMPT_TENSOR = tensor("prompt", "BYTES", '["sea"]')
JSON_TENSORS = st.builds(
    tensor,
    st.sampled_from([*NAMES, "\\ud800", ""]),
    st.sampled_from([*DATATYPES, "\\ud800", ""]),
    HOSTILE_JSON,
    SHAPES.map(str) | st.sampled_from([str([2**63]), str([2**70])]) | HOSTILE_JSON,
)
JSON_INFERENCES = st.builds(
    lambda tensors, outputs, parameters: (
        f'{{"inputs": [{", ".join(tensors)}], "outputs": [{", ".join(outputs)}], "parameters": {parameters}}}'
    ),
    st.lists(st.just(PROMPT_TENSOR) | JSON_TENSORS | HOSTILE_JSON, max_size=3),
    st.lists(json_objects(["name", "parameters"]), max_size=2),
    HOSTILE_JSON | st.just("{}"),
)


# Numbers beyond 64 bits, NaN and lone surrogates were a 500.
@pytest.mark.mend
@fuzzed
@given(
    post=st.one_of(
        st.tuples(st.just("/v1/predict"), JSON_REQUESTS | HOSTILE_JSON),
        st.tuples(st.just("/v1/predict-batch"), JSON_BATCHES | HOSTILE_JSON),
        st.tuples(st.just(INFER), JSON_INFERENCES | json_objects(["inputs", "outputs", "id"]) | HOSTILE_JSON),
    )
)
def test_any_json_over_http(server: Served, post: tuple[str, str]) -> None:
    path, text = post
    status = http_status(server, path, text.encode("utf-8", "surrogatepass"))
    assert is_answered_or_refused(status), (status, text[:500])


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
SEA = b'{"prompt": "sea"}'
BODIES = [SEA, b"", b"\xff", b"\xef\xbb\xbf" + SEA, SEA.decode().encode("utf-16"), gzip.compress(SEA)]


# Headers that are not ASCII and broken bodies were a 500.
@pytest.mark.mend
@fuzzed
@given(
    path=st.sampled_from(["/v1/predict", "/v1/predict-batch", INFER]),
    headers=st.lists(st.tuples(HEADER_NAMES, HEADER_VALUES), max_size=3).map(tuple),
    body=st.sampled_from(BODIES) | st.binary(max_size=60),
)
def test_any_headers_and_bodies_over_http(
    server: Served, path: str, headers: tuple[tuple[bytes, bytes], ...], body: bytes
) -> None:
    assert is_answered_or_refused(http_status(server, path, body, headers))


@pytest.mark.parametrize("path", ODD_PATHS.split())
@pytest.mark.parametrize("verb", ["GET", "POST"])
def test_any_names_in_paths(server: Served, path: str, verb: str) -> None:
    assert 400 <= http_status(server, path, b"{}", verb=verb) < 500


# A body of 0.33 MB stopped the event loop for 33 s: names were counted once for each name. This would take minutes.
@pytest.mark.mend
def test_a_repeated_name_among_many_is_found_in_one_pass(server: Served) -> None:
    names = [*range(100_000), 99_999]
    text = "{" + ",".join(f'"{name}":0' for name in names) + "}"
    with pytest.raises(RepeatedKeyError, match="'99999' occurs twice"):
        parse_json(text, unique_keys=True)
    with pytest.raises(RepeatedKeyError) as error:
        parse_json(f'{{"{names}":1,"{names}":2}}'.replace(" ", ""), unique_keys=True)
    assert len(str(error.value)) < 200
    half = "{" + ",".join(f'"{name}":0' for name in names[-30_000:]) + "}"
    assert http_status(server, "/v1/predict", half.encode()) == 400


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a,:[{\\"]}\n漢'), max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=5),
)


def num_parts(value: object) -> tuple[int, int]:
    """(commas, colons and opening brackets) of the JSON text of a value."""
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [num_parts(item) for item in (value.values() if isinstance(value, dict) else value)]
    commas = sum(part[0] for part in inner) + max(len(value) - 1, 0)
    return commas, sum(part[1] for part in inner) + 1 + (len(value) if isinstance(value, dict) else 0)


# 15 MB of "{}" blocked the event loop for 2.7 s, of "[[]]" for longer: bodies are bounded before they are parsed.
@pytest.mark.mend
@given(value=JSON_VALUES)
def test_values_of_a_body_are_counted_without_parsing(value: object) -> None:
    text = json.dumps(value, ensure_ascii=False).encode()
    num_commas, num_others = num_separators(text)
    assert (num_commas, num_others) == num_parts(value)
    check_num_values(text, max(num_commas, 4 * num_others))
    for maximum in (num_commas - 1, 4 * num_others - 1):
        if maximum >= 0:
            with pytest.raises(ValueError, match="more than"):
                check_num_values(text, maximum)


def _with(name: str, value: str) -> tuple[str, str]:
    return "/v1/predict", f'{{"prompt": "sea", "{name}": {value}}}'


def _inputs(*tensors: str) -> tuple[str, str]:
    return INFER, f'{{"inputs": [{", ".join(tensors)}]}}'


KNOWN_TO_TRIP = [
    *(
        _with("max_tokens", value)
        for value in ("9223372036854775808", "7" * 5000, "1e400", "NaN", '1, "maxTokens": 2')
    ),
    *(_with("max_tokens", f'"{value}"') for value in ("9223372036854775808", "7" * 5000)),
    *(_with("temperature", value) for value in ("NaN", "Infinity")),
    *(_with(name, value) for name, value in {"cvar_level": "NaN", "quantile_levels": "[NaN]"}.items()),
    *(_with(name, '"\\ud800"') for name in ("served_model", "request_id", "\\ud800")),
    *(_with(name, value) for name, value in {"declared_tier": "2147483648", "prompt": '"river"'}.items()),
    *(_with("token_ids", value) for value in ("[1]", "[" * 100_000)),
    ("/v1/predict", '{"a":' * 100_000),
    ("/v1/predict", '{"prompt": "\\ud800"}'),
    ("/v1/predict", '{"messages": [{"role": "user", "content": "\\udc00"}]}'),
    ("/v1/predict-batch", '{"requests": [{"prompt": "\\ud800"}]}'),
    ("/v1/predict-batch", '{"requests": {}}'),
    _inputs(tensor("prompt", "BYTES", '["\\ud800"]')),
    _inputs(tensor("prompt", "BYTES", "[1]")),
    _inputs(tensor("prompt", "\\ud800", '["sea"]')),
    *(_inputs(tensor("prompt", "BYTES", '["sea"]', f"[{size}]")) for size in (2**63, "7" * 5000, "1, 1, 1")),
    _inputs(PROMPT_TENSOR, tensor("served_model", "BYTES", '["\\ud800"]')),
    *(
        _inputs(PROMPT_TENSOR, tensor("max_tokens", "INT64", f"[{value}]"))
        for value in (2**63, "1.5", "true")
    ),
    _inputs(PROMPT_TENSOR, tensor("temperature", "FP32", "[1e39]")),
    _inputs(PROMPT_TENSOR, tensor("\\ud800", "FP32", "[1]")),
    _inputs(tensor("input_ids", "UINT64", f"[{2**64 - 1}]", "[1, 1]")),
    _inputs(tensor("input_ids", "INT64", "[1]", f"[1, {2**63 - 1}]")),
    (INFER, f'{{"inputs": [{PROMPT_TENSOR}], "outputs": [{{"name": "mu", "parameters": 1}}]}}'),
]


# Each of these was a 500, a traceback or a wrong number once.
@pytest.mark.mend
@pytest.mark.parametrize("number", range(len(KNOWN_TO_TRIP)))
def test_what_is_known_to_trip_is_the_callers_fault(server: Served, number: int) -> None:
    path, text = KNOWN_TO_TRIP[number]
    assert http_status(server, path, text.encode()) == 400


@fuzzed
@given(
    name=st.sampled_from(NAMES),
    datatype=st.sampled_from(DATATYPES),
    shape=st.lists(st.sampled_from([0, 1, 2, 3, 2**31, 2**63]), max_size=3),
    data=st.binary(max_size=24),
    size=st.integers(-1, 30) | st.just(2**70),
)
def test_any_binary_tensor_over_http(
    server: Served, name: str, datatype: str, shape: list[int], data: bytes, size: int
) -> None:
    binary = {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [json.loads(PROMPT_TENSOR), binary][name == "prompt" :]}).encode()
    headers = ((b"Inference-Header-Content-Length", b"%d" % len(head)),)
    assert is_answered_or_refused(http_status(server, INFER, head + data, headers))


CONTENTS = st.fixed_dictionaries(
    {},
    optional={
        "int64_contents": st.lists(st.sampled_from([-(2**63), -1, 0, 1, 2**63 - 1]), max_size=3),
        "uint64_contents": st.lists(st.sampled_from([0, 1, 2**63, 2**64 - 1]), max_size=3),
        "fp32_contents": st.lists(st.floats(width=32), max_size=3),
        "bytes_contents": st.lists(st.sampled_from([b"", b"sea", b"\xff", b"tiny-llm"]), max_size=3),
    },
)
TENSORS = st.builds(
    lambda name, datatype, shape, contents: oip.ModelInferRequest.InferInputTensor(
        name=name, datatype=datatype, shape=shape, contents=oip.InferTensorContents(**contents)
    ),
    st.sampled_from(NAMES),
    st.sampled_from(DATATYPES),
    SHAPES,
    CONTENTS,
)


# An INT8 tensor of shape [1000000, 1] held the event loop for seconds: rows are limited before they are built.
@pytest.mark.mend
@fuzzed
@given(
    tensors=st.lists(TENSORS, max_size=3),
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
    assert code in CALLERS_FAULT | {OK}


# A 1 MiB body of a million rows blocked /healthz for up to 7 s and took 1.1 GB.
@pytest.mark.mend
def test_tensors_of_too_many_rows_are_refused_unread(server: Served, channel: grpc.Channel) -> None:
    request = oip.ModelInferRequest(model_name="tiny", raw_input_contents=[bytes(10**6)])
    request.inputs.add(name="input_ids", datatype="INT8", shape=[10**6, 1])
    method = "/inference.GRPCInferenceService/ModelInfer"
    assert status(channel, method, request.SerializeToString(), 5) == INVALID
    parts = {"parameters": {"binary_data_size": 10**6}}
    binary = {"name": "input_ids", "datatype": "INT8", "shape": [10**6, 1], **parts}
    head = json.dumps({"inputs": [binary]}).encode()
    headers = ((b"Inference-Header-Content-Length", b"%d" % len(head)),)
    assert http_status(server, INFER, head + bytes(10**6), headers) == 400


# 90 KB of "://" in a value took an error message 4 s, with the event loop of a server.
@pytest.mark.mend
def test_messages_of_errors_take_linear_time() -> None:
    for text in ("://" * 10**6, "@" + "://" * 10**6, "a://b@" * 10**5, "1" * 10**6 + "x", "é" * 10**6):
        assert len(str(InputError("field", text, "another value"))) < 300
        with pytest.raises(ValueError, match="not a decimal number"):
            parse_number(text)
    error = InputError("field", "see http://user:secret@host:1/x@y and ftp://a:secret@b", "another value")
    assert "secret" not in str(error)
    assert "http://...@y and ftp://...@b" in str(error)
