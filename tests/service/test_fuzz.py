"""Whatever bytes arrive: no crash, no hang, and a status that tells whose fault it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
    call = channel.unary_unary(SERVICE + method)
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


def test_a_prompt_of_ten_megabytes_is_read_as_far_as_the_model_reads(channel: grpc.Channel) -> None:
    prompt = "name three rivers " * (10 * 2**20 // 18)
    call = channel.unary_unary(SERVICE + "Predict")
    data = call(pb.PredictRequest(prompt=prompt).SerializeToString(), timeout=120)
    assert pb.PredictResponse.FromString(data).truncated
    assert_alive(channel)


@pytest.mark.parametrize("unit", ["x", "\U0001f600", "\n", "\0"])
def test_a_megabyte_of_one_character(channel: grpc.Channel, unit: str) -> None:
    data = pb.PredictRequest(prompt="sea " + unit * (2**20 // len(unit.encode()))).SerializeToString()
    assert status(channel, "Predict", data, 120) in {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
    assert_alive(channel)


def test_a_message_over_the_limit_is_refused(channel: grpc.Channel) -> None:
    data = pb.PredictRequest(prompt="x" * (17 * 2**20)).SerializeToString()
    assert status(channel, "Predict", data, 60) == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert_alive(channel)


def test_a_huge_batch_is_refused_as_a_whole(channel: grpc.Channel) -> None:
    data = pb.PredictBatchRequest(requests=[pb.PredictRequest(prompt="sea")] * 200_000).SerializeToString()
    assert status(channel, "PredictBatch", data, 60) == grpc.StatusCode.INVALID_ARGUMENT
    assert status(channel, "PredictBatch", b"") == grpc.StatusCode.INVALID_ARGUMENT
    assert_alive(channel)


def test_the_server_is_still_the_same_process(server: Served, channel: grpc.Channel) -> None:
    assert_alive(channel)
    assert server.process.popen.poll() is None
    assert server.queue_length() == 0
