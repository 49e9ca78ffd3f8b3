from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from predictors.artifact import FORMAT_VERSION
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto.predictor_v1_pb2_grpc import PredictorStub
from predictors.runtime import open_runtime
from predictors.service.batcher import BatchingSettings
from predictors.service.messages import truncated_length
from predictors.service.pipeline import PredictionPipeline
from predictors.service.server import OIP_SERVICE, SERVICE, PredictionServer, ServerSettings
from predictors.tokenizer import TokenizedPrompt
from scheduler_core.errors import InputError
from scheduler_core.lengths import LogT
from tests.predictors.fakes import NU, GatedRuntime, expected, running_server, server_and_stub, until

ONE_BY_ONE = BatchingSettings(max_batch=1, max_wait_s=0.0, max_queue=2)
SEA = pb.PredictRequest(prompt="sea")
INPUTS = {"prompt", "token_ids", "messages"}


@pytest.fixture
async def stub(artifact_folder: Path) -> AsyncIterator[Any]:
    async with server_and_stub(open_runtime(artifact_folder)) as (_, stub):
        yield stub


async def status(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def test_predict_gives_the_artifacts_own_numbers(stub: Any, artifact_folder: Path) -> None:
    response = await stub.Predict(pb.PredictRequest(request_id="r1", prompt="name three rivers"))
    mu, sigma = expected("name three rivers")
    assert response.request_id == "r1"
    assert response.mu == pytest.approx(mu, rel=1e-6)
    assert response.sigma == pytest.approx(sigma, rel=1e-6)
    manifest = open_runtime(artifact_folder).artifact.manifest
    assert (response.nu, response.artifact_id) == (NU, "tiny")
    assert response.artifact_version == manifest.artifact_version
    assert (response.prompt_tokens, response.truncated) == (5, False)
    assert not response.HasField("truncated_length")
    assert response.durations.inference_ns > 0
    assert response.durations.tokenize_ns > 0
    assert response.durations.queue_ns >= 0
    assert response.durations.batch_size == 1


async def test_max_tokens_adds_the_numbers_of_the_truncated_length(stub: Any) -> None:
    response = await stub.Predict(pb.PredictRequest(prompt="sea", max_tokens=300))
    lengths = LogT(response.mu, response.sigma, response.nu)
    numbers = response.truncated_length
    assert numbers.max_tokens == 300
    assert numbers.expected_tokens == pytest.approx(float(lengths.expected(300)), rel=1e-9)
    assert numbers.cvar_level == 0.9
    assert numbers.cvar_tokens == pytest.approx(float(lengths.cvar(0.9, 300)), rel=1e-9)
    assert [quantile.level for quantile in numbers.quantiles] == [0.5, 0.9, 0.99]
    assert [quantile.tokens for quantile in numbers.quantiles] == pytest.approx(
        [min(float(lengths.ppf(level)), 300.0) for level in (0.5, 0.9, 0.99)], rel=1e-9
    )


async def test_levels_are_the_callers_choice(stub: Any) -> None:
    request = pb.PredictRequest(prompt="sea", max_tokens=10_000, cvar_level=0.25, quantile_levels=[0.95, 0.1])
    response = await stub.Predict(request)
    lengths = LogT(response.mu, response.sigma, response.nu)
    assert response.truncated_length.cvar_tokens == pytest.approx(float(lengths.cvar(0.25, 10_000)), rel=1e-9)
    assert [quantile.tokens for quantile in response.truncated_length.quantiles] == pytest.approx(
        [float(lengths.ppf(0.95)), float(lengths.ppf(0.1))], rel=1e-9
    )


@given(
    mu=st.floats(-2, 12),
    sigma=st.floats(1e-6, 5),
    max_tokens=st.integers(1, 1_000_000),
    cvar_level=st.sampled_from([None, 0.0, 0.3, 0.5, 0.9, 0.999]),
    level=st.floats(1e-4, 0.9999),
)
@hypothesis_settings(deadline=None)
def test_truncated_length_equals_the_distribution(
    mu: float, sigma: float, max_tokens: int, cvar_level: float | None, level: float
) -> None:
    numbers = truncated_length(mu, sigma, NU, max_tokens=max_tokens, cvar_level=cvar_level, levels=[level])
    lengths = LogT(mu, sigma, NU)
    used = 0.9 if cvar_level is None else cvar_level
    assert numbers.expected_tokens == pytest.approx(float(lengths.expected(max_tokens)), rel=1e-6)
    assert numbers.cvar_tokens == pytest.approx(float(lengths.cvar(used, max_tokens)), rel=1e-6)
    assert numbers.quantiles[0].tokens == pytest.approx(min(float(lengths.ppf(level)), max_tokens), rel=1e-9)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": " \n\t"}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": -5}),
        ("cvar_level", {"max_tokens": 5, "cvar_level": 1.0}),
        ("cvar_level", {"max_tokens": 5, "cvar_level": math.nan}),
        ("quantile_levels", {"max_tokens": 5, "quantile_levels": [0.5, math.nan]}),
        ("quantile_levels", {"max_tokens": 5, "quantile_levels": [0.0]}),
        ("quantile_levels", {"max_tokens": 5, "quantile_levels": [0.5] * 101}),
        ("served_model", {"served_model": "other-llm"}),
        ("temperature", {"temperature": -0.5}),
        ("temperature", {"temperature": math.inf}),
        ("temperature", {"temperature": 1e200}),
        ("request_id", {"request_id": "x" * 2000}),
        ("token_ids", {"token_ids": pb.TokenIds()}),
        ("token_ids", {"token_ids": pb.TokenIds(ids=[1] * 17)}),
        ("token_ids", {"token_ids": pb.TokenIds(ids=[-1])}),
        ("token_ids", {"token_ids": pb.TokenIds(ids=[17])}),
        ("messages", {"messages": pb.ChatMessages()}),
        ("messages", {"messages": pb.ChatMessages(messages=[pb.ChatMessage(role="assistant", content="a")])}),
        ("messages", {"messages": pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=" ")])}),
        ("declared_tier", {"declared_tier": -1}),
        ("timeout_s", {"timeout_s": 0.0}),
        ("timeout_s", {"timeout_s": math.nan}),
    ],
)
async def test_bad_field_is_an_invalid_argument_that_names_it(
    stub: Any, field: str, changes: dict[str, Any]
) -> None:
    code, message = await status(
        stub.Predict(
            pb.PredictRequest(**(changes if changes.keys() & INPUTS else {"prompt": "sea"} | changes))
        )
    )
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert message.startswith(f"{field}: got ")
    assert "allowed: " in message


async def test_batch_keeps_order_and_gives_each_request_its_own_outcome(stub: Any) -> None:
    prompts = ["name three rivers", "", "sea", "write a long essay about the sea"]
    requests = [pb.PredictRequest(request_id=str(i), prompt=prompt) for i, prompt in enumerate(prompts)]
    response = await stub.PredictBatch(pb.PredictBatchRequest(requests=requests))
    kinds = [outcome.WhichOneof("outcome") for outcome in response.outcomes]
    assert kinds == ["prediction", "error", "prediction", "prediction"]
    for i in (0, 2, 3):
        assert response.outcomes[i].prediction.request_id == str(i)
        assert response.outcomes[i].prediction.mu == pytest.approx(expected(prompts[i])[0], rel=1e-6)
    error = response.outcomes[1].error
    assert (error.request_id, error.field) == ("1", "requests[1].prompt")
    assert error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


@pytest.mark.parametrize("count", [0, 257])
async def test_batch_of_a_wrong_size_is_refused(stub: Any, count: int) -> None:
    requests = [pb.PredictRequest(prompt="sea")] * count
    code, message = await status(stub.PredictBatch(pb.PredictBatchRequest(requests=requests)))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert f"requests: got '{count} requests'; allowed: 1 to 256" in message


async def test_metadata_tells_what_is_served(stub: Any) -> None:
    metadata = await stub.GetMetadata(pb.GetMetadataRequest())
    assert (metadata.artifact_id, metadata.format_version, metadata.nu) == ("tiny", FORMAT_VERSION, NU)
    assert list(metadata.served_models) == ["tiny-llm"]
    assert (metadata.max_length_tokens, metadata.truncation_side) == (16, "right")
    assert metadata.provider == "CPUExecutionProvider"
    assert metadata.max_batch_requests == 256
    assert metadata.max_message_bytes == 4 * 2**20
    assert list(metadata.heads) == ["length"]
    assert not metadata.conditioned_on_served_model
    assert not metadata.accepts_unknown_models
    assert not metadata.HasField("abstain_threshold")


async def test_a_prompt_of_almost_four_mebibytes_is_truncated_and_answered(stub: Any) -> None:
    response = await stub.Predict(pb.PredictRequest(prompt="sea " * (2**20 - 10)))
    assert (response.prompt_tokens, response.truncated) == (16, True)
    assert response.mu == pytest.approx(expected("sea " * 14)[0], rel=1e-6)


async def test_message_over_the_limit_is_refused_with_both_sizes(artifact_folder: Path) -> None:
    async with (
        running_server(open_runtime(artifact_folder), max_message_bytes=2048) as (_, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        call = PredictorStub(channel).Predict(pb.PredictRequest(prompt="sea " * 1000))
        code, message = await status(call)
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in message
    assert "2048" in message


async def test_concurrent_requests_get_their_own_answers(stub: Any) -> None:
    words = ["sea", "name three rivers", "a a a", "write a long essay", "the long sea"]
    prompts = [words[i % 5] + " a" * (i % 7) for i in range(100)]
    responses = await asyncio.gather(*(stub.Predict(pb.PredictRequest(prompt=prompt)) for prompt in prompts))
    for prompt, response in zip(prompts, responses, strict=True):
        assert response.mu == pytest.approx(expected(prompt)[0], rel=1e-5)


async def test_full_queue_is_resource_exhausted_with_a_delay_and_recovers(artifact_folder: Path) -> None:
    runtime = GatedRuntime(artifact_folder, is_open=False)
    async with server_and_stub(runtime, batching=ONE_BY_ONE) as (server, stub):
        accepted = [asyncio.ensure_future(stub.Predict(SEA)) for _ in range(2)]
        await until(lambda: server.pipeline.num_in_flight == 2)
        with pytest.raises(grpc.aio.AioRpcError, match="fewer than 2") as caught:
            await stub.Predict(SEA)
        runtime.gate.set()
        assert len(await asyncio.gather(*accepted)) == 2
        assert (await stub.Predict(SEA)).mu > 0
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    details = rich(caught.value).details
    assert details[0].Unpack(info)
    assert details[1].Unpack(retry)
    assert info.reason == "QUEUE_FULL"
    assert 0 < retry.retry_delay.ToTimedelta().total_seconds() < 1


@pytest.mark.parametrize(("timeout", "timeout_s"), [(0.05, None), (None, 0.01)])
async def test_passed_deadline_costs_no_work(
    artifact_folder: Path, timeout: float | None, timeout_s: float | None
) -> None:
    runtime = GatedRuntime(artifact_folder, is_open=False)
    async with server_and_stub(runtime, batching=ONE_BY_ONE) as (server, stub):
        first = asyncio.ensure_future(stub.Predict(SEA))
        await until(lambda: server.pipeline.num_in_flight == 1)
        late = stub.Predict(pb.PredictRequest(prompt="a", timeout_s=timeout_s), timeout=timeout)
        code, _ = await status(late)
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: server.pipeline.num_in_flight == 1)
        runtime.gate.set()
        await first
    assert runtime.batches == [1]


async def test_cancelled_call_leaves_the_queue(artifact_folder: Path) -> None:
    runtime = GatedRuntime(artifact_folder, is_open=False)
    async with server_and_stub(runtime, batching=ONE_BY_ONE) as (server, stub):
        first = asyncio.ensure_future(stub.Predict(SEA))
        await until(lambda: server.pipeline.num_in_flight == 1)
        second = stub.Predict(pb.PredictRequest(prompt="a"))
        await until(lambda: server.pipeline.num_in_flight == 2)
        second.cancel()
        await until(lambda: server.pipeline.num_in_flight == 1)
        runtime.gate.set()
        await first
    assert runtime.batches == [1]


async def test_failing_batch_is_internal_for_all_its_callers_and_the_next_one_works(
    artifact_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = GatedRuntime(artifact_folder, num_failures=1)
    batching = BatchingSettings(max_batch=3, max_wait_s=60.0)
    async with server_and_stub(runtime, batching=batching) as (_, stub):
        requests = [pb.PredictRequest(prompt="sea")] * 3
        with caplog.at_level(logging.CRITICAL, logger="predictors.service.pipeline"):
            outcomes = [await status(call) for call in [stub.Predict(request) for request in requests]]
        assert {code for code, _ in outcomes} == {grpc.StatusCode.INTERNAL}
        assert all("the batch failed (RuntimeError)" in message for _, message in outcomes)
        answers = await asyncio.gather(*(stub.Predict(request) for request in requests))
    assert len(answers) == 3
    assert runtime.batches == [3, 3]


async def test_numbers_that_are_no_distribution_are_internal(stub: Any) -> None:
    code, message = await status(stub.Predict(pb.PredictRequest(prompt="nan")))
    assert code == grpc.StatusCode.INTERNAL
    assert "mu = nan" in message


async def test_prompt_without_tokens_is_an_invalid_argument(tmp_path: Path, artifact_folder: Path) -> None:
    runtime = GatedRuntime(artifact_folder)
    real = runtime.tokenizer

    def no_tokens(prompts: list[str]) -> list[Any]:
        return [TokenizedPrompt(prompt.ids[:0], False) for prompt in real(prompts)]

    runtime.tokenizer = no_tokens  # type: ignore[assignment]
    async with running_server(runtime) as (_, address), grpc.aio.insecure_channel(address) as channel:
        code, message = await status(PredictorStub(channel).Predict(pb.PredictRequest(prompt="sea")))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "at least one token" in message


async def test_not_ready_is_unavailable(artifact_folder: Path) -> None:
    pipeline = PredictionPipeline(open_runtime(artifact_folder), BatchingSettings.cpu(1))
    with pytest.raises(Exception, match="the service is starting"):
        await pipeline.predict("sea")
    await pipeline.close()


class SlowWarmUp(GatedRuntime):
    """Its warm-up waits for the gate."""

    def warm_up(self) -> None:
        self.gate.wait(timeout=30)


async def test_health_is_serving_only_after_warm_up(artifact_folder: Path) -> None:
    runtime = SlowWarmUp(artifact_folder, is_open=False)
    server = PredictionServer(runtime, BatchingSettings.cpu(1), ServerSettings(port=free_port()))
    address = f"127.0.0.1:{server.settings.port}"
    starting = asyncio.create_task(server.start())
    async with grpc.aio.insecure_channel(address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        early = await health.Check(request, wait_for_ready=True)
        code, message = await status(PredictorStub(channel).Predict(pb.PredictRequest(prompt="sea")))
        runtime.gate.set()
        assert await starting == server.settings.port
        late = await health.Check(request)
        whole = await health.Check(health_pb2.HealthCheckRequest())
    await server.stop()
    assert early.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert (code, message) == (grpc.StatusCode.UNAVAILABLE, "the service is starting")
    assert late.status == whole.status == health_pb2.HealthCheckResponse.SERVING


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def test_stop_answers_what_is_inside_and_ends_health_watchers(artifact_folder: Path) -> None:
    runtime = GatedRuntime(artifact_folder, is_open=False)
    server = PredictionServer(runtime, ONE_BY_ONE, ServerSettings())
    address = f"127.0.0.1:{await server.start()}"
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = PredictorStub(channel)  # type: ignore[no-untyped-call]
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        inside = [asyncio.ensure_future(stub.Predict(SEA)) for _ in range(2)]
        await until(lambda: server.pipeline.num_in_flight == 2)
        stopping = asyncio.create_task(server.stop())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        refused = await status(stub.Predict(SEA))
        assert refused == (grpc.StatusCode.UNAVAILABLE, "the service is shutting down")
        batch = pb.PredictBatchRequest(requests=[pb.PredictRequest(prompt="sea")] * 2)
        assert await status(stub.PredictBatch(batch)) == refused
        runtime.gate.set()
        answers = await asyncio.gather(*inside)
        await asyncio.wait_for(stopping, timeout=20)
    assert len(answers) == 2


async def test_stop_does_not_wait_longer_than_allowed(artifact_folder: Path) -> None:
    runtime = GatedRuntime(artifact_folder, is_open=False)
    server = PredictionServer(runtime, ONE_BY_ONE, ServerSettings(drain_timeout_s=0.01))
    address = f"127.0.0.1:{await server.start()}"
    async with grpc.aio.insecure_channel(address) as channel:
        call = asyncio.ensure_future(PredictorStub(channel).Predict(pb.PredictRequest(prompt="sea")))  # type: ignore[no-untyped-call]
        await until(lambda: server.pipeline.num_in_flight == 1)
        stopping = asyncio.create_task(server.stop())
        await status(call)
        runtime.gate.set()
        await stopping
    assert server.pipeline.num_in_flight == 0


async def test_port_in_use_is_an_input_error(artifact_folder: Path) -> None:
    runtime = open_runtime(artifact_folder)
    async with running_server(runtime) as (_, address):
        port = int(address.rpartition(":")[2])
        second = PredictionServer(runtime, BatchingSettings.cpu(1), ServerSettings(port=port))
        with pytest.raises(InputError, match=rf"port: got '127.0.0.1:{port}'.*in use"):
            await second.start()


async def test_reflection_lists_the_service(artifact_folder: Path) -> None:
    async with (
        running_server(open_runtime(artifact_folder)) as (_, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        response = await call.read()
        call.cancel()
    names = {service.name for service in response.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host", ""),
        ("port", -1),
        ("port", 65536),
        ("max_message_bytes", 10),
        ("max_batch_requests", 0),
        ("drain_timeout_s", -1.0),
        ("drain_timeout_s", math.nan),
    ],
)
def test_bad_server_setting_is_named(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=field):
        ServerSettings(**{field: value})


async def test_gpu_style_batching_serves_the_same_numbers(artifact_folder: Path) -> None:
    runtime = GatedRuntime(artifact_folder, is_open=False)
    async with server_and_stub(runtime, batching=BatchingSettings.gpu()) as (server, stub):
        prompts = ["sea" + " a" * (i % 12) for i in range(40)]
        calls = [asyncio.ensure_future(stub.Predict(pb.PredictRequest(prompt=p))) for p in prompts]
        await until(lambda: server.pipeline.num_in_flight == 40)
        runtime.gate.set()
        responses = await asyncio.gather(*calls)
    assert max(response.durations.batch_size for response in responses) > 4
    for prompt, response in zip(prompts, responses, strict=True):
        assert response.mu == pytest.approx(expected(prompt)[0], rel=1e-5)


async def test_bytes_that_are_no_message_are_an_invalid_argument(stub: Any, artifact_folder: Path) -> None:
    async with (
        running_server(open_runtime(artifact_folder)) as (_, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        invalid_utf8 = b"\x12\x02\xff\xfe"  # field 2 (prompt) with two bytes that are no UTF-8
        for method in ("Predict", "PredictBatch", "GetMetadata"):
            for data in (b"\xff\xff\xff", invalid_utf8 if method == "Predict" else b"\x0a\x05abc"):
                code, message = await status(channel.unary_unary(f"/{SERVICE}/{method}")(data))
                assert code == grpc.StatusCode.INVALID_ARGUMENT, (method, data)
                assert message.startswith("request: got ")


async def test_errors_carry_details(stub: Any, artifact_folder: Path) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Predict(pb.PredictRequest(prompt="sea", max_tokens=0))
    details = rich(caught.value)
    assert details.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert details.details[0].Unpack(info)
    assert details.details[1].Unpack(bad)
    assert (info.reason, info.domain) == ("INPUT", "tailcast")
    assert [violation.field for violation in bad.field_violations] == ["max_tokens"]
    assert bad.field_violations[0].description == caught.value.details()


def rich(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    [data] = [value for key, value in error.trailing_metadata() or () if key == "grpc-status-details-bin"]
    assert isinstance(data, bytes)
    return status_pb2.Status.FromString(data)


async def test_health_is_told_for_each_service_and_artifact(artifact_folder: Path) -> None:
    async with (
        running_server(open_runtime(artifact_folder)) as (_, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        health: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE, OIP_SERVICE, "tiny"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, service
        code, _ = await status(health.Check(health_pb2.HealthCheckRequest(service="other")))
        assert code == grpc.StatusCode.NOT_FOUND


MESSAGES = pb.ChatMessages(
    messages=[
        pb.ChatMessage(role="system", content="a a a a"),
        pb.ChatMessage(role="user", content="name three rivers"),
    ]
)


async def test_token_ids_and_chat_messages_give_the_numbers_of_the_text(
    stub: Any, artifact_folder: Path
) -> None:
    ids = open_runtime(artifact_folder).tokenizer(["name three rivers"])[0].ids.tolist()
    text = await stub.Predict(pb.PredictRequest(prompt="name three rivers"))
    by_ids = await stub.Predict(pb.PredictRequest(token_ids=pb.TokenIds(ids=ids)))
    chat = await stub.Predict(pb.PredictRequest(messages=MESSAGES))
    assert text.mu == by_ids.mu == chat.mu == pytest.approx(expected("name three rivers")[0], rel=1e-6)
    assert text.prompt_tokens == by_ids.prompt_tokens == chat.prompt_tokens == 5


async def test_prompts_over_the_limit_are_refused(artifact_folder: Path) -> None:
    async with server_and_stub(open_runtime(artifact_folder), max_prompt_chars=10) as (_, stub):
        assert (await stub.Predict(pb.PredictRequest(prompt="a" * 10))).mu > 0
        code, message = await status(stub.Predict(pb.PredictRequest(prompt="a" * 11)))
        metadata = await stub.GetMetadata(pb.GetMetadataRequest())
    assert (code, message) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "prompt: got '11 characters'; allowed: at most 10",
    )
    assert metadata.max_prompt_chars == 10
