"""The service over gRPC: its answers, refusals, deadlines, health and end."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
import psutil
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shared.processes import free_port
from predictors.client import GrpcPredictor, PredictorError
from predictors.manifest import FORMAT_VERSION, Conditions
from predictors.proto import open_inference_pb2 as oip
from predictors.proto import predictor_v1_pb2 as pb
from predictors.runtime import open_runtime
from predictors.service.batcher import BatchingSettings
from predictors.service.messages import truncated_length
from predictors.service.server import OIP_SERVICE, SERVICE, PredictionServer
from predictors.tokenizer import TokenizedPrompt
from predictors.wire import response_fields
from scheduler_core.errors import InputError
from scheduler_core.lengths import LogT
from scheduler_core.prediction.predictions import DEFAULT_MAX_TOKENS, LengthPrediction, Prediction
from scheduler_core.prediction.predictor import PredictionRequest
from tests.predictors import fakes
from tests.waiting import until

ONE_BY_ONE = BatchingSettings(max_batch=1, max_wait_s=0.0, max_queue=2)
SEA = pb.PredictRequest(prompt="sea")
INPUTS = {"prompt", "token_ids", "messages"}
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
EXHAUSTED, INVALID = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
ONE_WORKER = BatchingSettings(max_batch=1, max_wait_s=0.0, max_queue=50)
EOF: Any = grpc.aio.EOF
PROMPTS = ["sea", "name three rivers", "a a a", "write a long essay"]


@pytest.fixture
async def stub(artifact_folder: Path) -> AsyncIterator[Any]:
    async with fakes.server_and_stub(open_runtime(artifact_folder)) as (_, stub):
        yield stub


async def test_predict_gives_the_artifacts_own_numbers(stub: Any, artifact_folder: Path) -> None:
    response = await stub.Predict(pb.PredictRequest(request_id="r1", prompt="name three rivers"))
    assert response.request_id == "r1"
    assert (response.mu, response.sigma) == pytest.approx(fakes.expected("name three rivers"), rel=1e-6)
    assert (response.nu, response.artifact_id) == (fakes.NU, "tiny")
    assert response.artifact_version == open_runtime(artifact_folder).artifact.manifest.artifact_version
    assert (response.prompt_tokens, response.truncated) == (5, False)
    assert not response.HasField("truncated_length")
    lengths = LogT(response.mu, response.sigma, response.nu)
    assert response.median_tokens == pytest.approx(math.exp(response.mu))
    assert response.p90_tokens == pytest.approx(float(lengths.ppf(0.9)))
    assert response.expected_tokens == pytest.approx(float(lengths.expected(DEFAULT_MAX_TOKENS)))
    assert response.durations.inference_ns > 0
    assert response.durations.tokenize_ns > 0
    assert response.durations.batch_size == 1


@pytest.mark.parametrize("options", [{}, {"cvar_level": 0.25, "quantile_levels": [0.95, 0.1]}])
async def test_max_tokens_adds_numbers_of_the_truncated_length(stub: Any, options: dict[str, Any]) -> None:
    response = await stub.Predict(pb.PredictRequest(prompt="sea", max_tokens=300, **options))
    levels = options.get("quantile_levels", [0.5, 0.9, 0.99])
    assert response.expected_tokens == response.truncated_length.expected_tokens
    assert response.median_tokens == pytest.approx(math.exp(response.mu))
    assert response.p90_tokens <= 300
    length = LengthPrediction(response.mu, response.sigma, response.nu)
    cvar_level = options.get("cvar_level", 0.9)
    expected = truncated_length(length, max_tokens=300, cvar_level=cvar_level, levels=levels)
    assert response.truncated_length == expected


@given(
    mu=st.floats(-2, 12),
    sigma=st.floats(1e-6, 5),
    max_tokens=st.integers(1, 1_000_000),
    cvar_level=st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.999]),
    level=st.floats(1e-4, 0.9999),
)
def test_truncated_length(mu: float, sigma: float, max_tokens: int, cvar_level: float, level: float) -> None:
    length = LengthPrediction(mu, sigma, fakes.NU)
    numbers = truncated_length(length, max_tokens=max_tokens, cvar_level=cvar_level, levels=[level])
    lengths = LogT(mu, sigma, fakes.NU)
    assert numbers.expected_tokens == pytest.approx(float(lengths.expected(max_tokens)), rel=1e-6)
    assert numbers.cvar_tokens == pytest.approx(float(lengths.cvar(cvar_level, max_tokens)), rel=1e-6)
    assert numbers.quantiles[0].tokens == pytest.approx(min(float(lengths.ppf(level)), max_tokens), rel=1e-9)


def chat(*messages: tuple[str, str]) -> pb.ChatMessages:
    chat_messages = [pb.ChatMessage(role=role, content=content) for role, content in messages]
    return pb.ChatMessages(messages=chat_messages)


BAD_FIELDS: dict[str, list[Any]] = {
    "prompt": ["", " \n\t"],
    "max_tokens": [0],
    "cvar_level": [math.nan],
    "quantile_levels": [[0.5, math.nan], [0.5] * 101],
    "served_model": ["other-llm"],
    "temperature": [-0.5, 1e200],
    "request_id": ["x" * 2000],
    "token_ids": [pb.TokenIds(ids=ids) for ids in ([], [1] * 17, [-1], [17])],
    "messages": [chat(), chat(("assistant", "")), chat(("user", " ")), chat(*[("user", "a")] * 4097)],
    "declared_tier": [-1],
    "timeout_s": [math.nan],
}


@pytest.mark.parametrize("field", BAD_FIELDS)
async def test_bad_field_is_an_invalid_argument_that_names_it(stub: Any, field: str) -> None:
    for value in BAD_FIELDS[field]:
        options = {"max_tokens": 5} | ({} if field in INPUTS else {"prompt": "sea"}) | {field: value}
        code, message = await fakes.status(stub.Predict(pb.PredictRequest(**options)))
        assert code == INVALID
        assert message.startswith(f"{field}: got ")
        assert "allowed: " in message


async def test_batch_keeps_order_and_gives_each_request_its_own_outcome(stub: Any) -> None:
    prompts = ["name three rivers", "", "sea", "write a long essay about the sea"]
    requests = [pb.PredictRequest(request_id=str(i), prompt=prompt) for i, prompt in enumerate(prompts)]
    response = await stub.PredictBatch(pb.PredictBatchRequest(requests=requests))
    for i in (0, 2, 3):
        assert response.outcomes[i].prediction.request_id == str(i)
        assert response.outcomes[i].prediction.mu == pytest.approx(fakes.expected(prompts[i])[0], rel=1e-6)
    error = response.outcomes[1].error
    assert (error.request_id, error.field, error.code) == ("1", "requests[1].prompt", INVALID.value[0])
    for count in (0, 257):
        code, message = await fakes.status(stub.PredictBatch(pb.PredictBatchRequest(requests=[SEA] * count)))
        assert (code, message) == (INVALID, f"requests: got '{count} requests'; allowed: 1 to 256 requests")


async def test_a_prompt_of_almost_four_mebibytes_is_truncated_and_one_of_more_refused(stub: Any) -> None:
    response = await stub.Predict(pb.PredictRequest(prompt="sea " * (2**20 - 10)))
    assert (response.prompt_tokens, response.truncated) == (16, True)
    assert response.mu == pytest.approx(fakes.expected("sea " * 14)[0], rel=1e-6)
    code, message = await fakes.status(stub.Predict(pb.PredictRequest(prompt="sea " * 2**20)))
    assert code == EXHAUSTED
    assert f"larger than max ({4 * 2**20 + 5} vs. {4 * 2**20})" in message


def details(error: grpc.aio.AioRpcError, kind: Any) -> Any:
    """The detail of that kind of a status."""
    [data] = [value for key, value in error.trailing_metadata() or () if key == "grpc-status-details-bin"]
    rich = status_pb2.Status.FromString(data)
    assert rich.code == error.code().value[0]
    message = kind()
    assert any(detail.Unpack(message) for detail in rich.details)
    return message


async def test_errors_carry_details(stub: Any) -> None:
    error = await fakes.failure(stub.Predict(pb.PredictRequest(prompt="sea", max_tokens=0)))
    info, bad = details(error, error_details_pb2.ErrorInfo), details(error, error_details_pb2.BadRequest)
    assert (info.reason, info.domain) == ("INPUT", "tailcast")
    assert [violation.field for violation in bad.field_violations] == ["max_tokens"]
    assert bad.field_violations[0].description == error.details()


@pytest.fixture
def runtime(artifact_folder: Path) -> fakes.GatedRuntime:
    """Its gate is closed."""
    return fakes.GatedRuntime(artifact_folder, is_open=False)


@contextlib.asynccontextmanager
async def full(runtime: fakes.GatedRuntime, others: Any = ()) -> AsyncIterator[tuple[Any, Any]]:
    """A server whose first artifact has no free slot, until the runtime's gate opens."""
    async with fakes.server_and_stub([runtime, *others], batching=ONE_BY_ONE) as (server, stub):
        accepted = [asyncio.ensure_future(stub.Predict(SEA)) for _ in range(2)]
        await until(lambda: server.artifacts.num_in_flight == 2)
        yield server, stub
        runtime.gate.set()
        await asyncio.gather(*accepted)


async def test_a_full_queue_refuses_at_once_without_parsing_and_recovers(runtime: fakes.GatedRuntime) -> None:
    unknown = pb.PredictRequest(prompt="sea", artifact_id="unknown artifact")
    async with full(runtime) as (server, stub):
        for data in (b"\xff\xff\xff", SEA.SerializeToString(), unknown.SerializeToString()):
            error = await fakes.failure(stub.call("Predict", data))
            assert error.code() == EXHAUSTED
            assert "fewer than 2" in (error.details() or "")
            assert details(error, error_details_pb2.ErrorInfo).reason == "QUEUE_FULL"
            retry = details(error, error_details_pb2.RetryInfo)
            assert 0 < retry.retry_delay.ToTimedelta().total_seconds() < 1
        assert server.artifacts.num_in_flight == 2
        assert 'code="RESOURCE_EXHAUSTED",method="Predict"} 3.0' in server.metrics.exposition().decode()
        runtime.gate.set()
        await until(lambda: server.artifacts.num_in_flight == 0)
        assert (await stub.Predict(SEA)).mu > 0
        assert (await fakes.failure(stub.call("Predict", b"\xff\xff\xff"))).code() == INVALID


async def test_a_full_artifact_does_not_close_the_others(tmp_path: Path, runtime: fakes.GatedRuntime) -> None:
    other = open_runtime(fakes.write_artifact(tmp_path / "second", artifact_id="second"))
    async with full(runtime, [other]) as (_, stub):
        # The first artifact keeps the only thread busy, so the second takes what its queue holds, and no more.
        request = pb.PredictRequest(prompt="sea", artifact_id="second")
        inside = [asyncio.ensure_future(stub.Predict(request)) for _ in range(2)]
        assert (await fakes.failure(stub.Predict(SEA))).code() == EXHAUSTED
        runtime.gate.set()
        assert {answer.artifact_id for answer in await asyncio.gather(*inside)} == {"second"}


async def test_a_full_service_answers_from_its_cache(artifact_folder: Path) -> None:
    runtime = fakes.GatedRuntime(artifact_folder)
    async with fakes.server_and_stub(runtime, batching=ONE_BY_ONE, cache_entries=8) as (server, stub):
        await stub.Predict(pb.PredictRequest(prompt="a long essay"))
        runtime.gate.clear()
        requests = [pb.PredictRequest(prompt=text) for text in ("sea", "name")]
        inside = [asyncio.ensure_future(stub.Predict(request)) for request in requests]
        await until(lambda: server.artifacts.num_in_flight == 2)
        response = await stub.Predict(pb.PredictRequest(prompt="a long essay"))
        assert response.cached
        assert response.mu == pytest.approx(fakes.expected("a long essay")[0], rel=1e-6)
        assert (await fakes.failure(stub.Predict(pb.PredictRequest(prompt="rivers")))).code() == EXHAUSTED
        runtime.gate.set()
        await asyncio.gather(*inside)


@pytest.mark.parametrize(("timeout", "timeout_s"), [(0.05, None), (None, 0.01), (None, None)])
async def test_late_and_cancelled_calls_leave_the_queue_and_cost_no_work(
    runtime: fakes.GatedRuntime, timeout: float | None, timeout_s: float | None
) -> None:
    async with fakes.server_and_stub(runtime, batching=ONE_BY_ONE) as (server, stub):
        first = asyncio.ensure_future(stub.Predict(SEA))
        await until(lambda: server.artifacts.num_in_flight == 1)
        second = stub.Predict(pb.PredictRequest(prompt="a", timeout_s=timeout_s), timeout=timeout)
        if timeout is None and timeout_s is None:
            await until(lambda: server.artifacts.num_in_flight == 2)
            second.cancel()
        else:
            assert (await fakes.failure(second)).code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: server.artifacts.num_in_flight == 1)
        runtime.gate.set()
        await first
    assert runtime.batches == [1]


async def test_prompt_without_tokens_is_an_invalid_argument(artifact_folder: Path) -> None:
    runtime = fakes.GatedRuntime(artifact_folder)
    real = runtime.tokenizer
    runtime.tokenizer = lambda prompts: [TokenizedPrompt(one.ids[:0], False) for one in real(prompts)]  # type: ignore[assignment,misc]
    async with fakes.server_and_stub(runtime) as (_, stub):
        code, message = await fakes.status(stub.Predict(SEA))
    assert code == INVALID
    assert "at least one token" in message


class SlowWarmUp(fakes.GatedRuntime):
    """Its warm-up waits for the gate."""

    def warm_up(self) -> None:
        self.gate.wait(timeout=30)


async def health_of(stub: Any, service: str = "", **options: Any) -> int:
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), **options)
    return int(answer.status)


async def test_health_is_serving_only_after_warm_up(artifact_folder: Path) -> None:
    runtime = SlowWarmUp(artifact_folder, is_open=False)
    server = PredictionServer([runtime], BatchingSettings.cpu(1), fakes.serve_config(port=free_port()))
    starting = asyncio.create_task(server.start())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.config.port}") as channel:
        stub = fakes.Stub(channel)
        assert await health_of(stub, SERVICE, wait_for_ready=True) == NOT_SERVING
        assert await fakes.status(stub.Predict(SEA)) == (UNAVAILABLE, "the service is starting")
        runtime.gate.set()
        assert await starting == server.config.port
        for service in ("", SERVICE, OIP_SERVICE, "tiny"):
            assert await health_of(stub, service) == SERVING
        code, _ = await fakes.status(stub.Check(health_pb2.HealthCheckRequest(service="other")))
        assert code == grpc.StatusCode.NOT_FOUND
    await server.stop()


async def test_stop_answers_what_is_inside_and_ends_health_watchers(runtime: fakes.GatedRuntime) -> None:
    server = PredictionServer([runtime], ONE_BY_ONE, fakes.serve_config())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await server.start()}") as channel:
        stub: Any = fakes.Stub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == SERVING
        inside = [asyncio.ensure_future(stub.Predict(SEA)) for _ in range(2)]
        await until(lambda: server.artifacts.num_in_flight == 2)
        stopping = asyncio.create_task(server.stop())
        assert (await watch.read()).status == NOT_SERVING
        refused = await fakes.status(stub.Predict(SEA))
        assert refused == (UNAVAILABLE, "the service is shutting down")
        assert await fakes.status(stub.PredictBatch(pb.PredictBatchRequest(requests=[SEA] * 2))) == refused
        runtime.gate.set()
        assert len(await asyncio.gather(*inside)) == 2
        await asyncio.wait_for(stopping, timeout=20)


async def test_stop_does_not_wait_longer_than_allowed(runtime: fakes.GatedRuntime) -> None:
    server = PredictionServer([runtime], ONE_BY_ONE, fakes.serve_config(drain_timeout_s=0.01))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await server.start()}") as channel:
        call = asyncio.ensure_future(fakes.Stub(channel).Predict(SEA))
        await until(lambda: server.artifacts.num_in_flight == 1)
        stopping = asyncio.create_task(server.stop())
        await fakes.status(call)
        runtime.gate.set()
        await stopping
    assert server.artifacts.num_in_flight == 0


async def test_readiness_ends_before_service(artifact_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a delay before the drain, load balancers look away while requests are still answered."""
    delay = asyncio.Event()
    config = fakes.serve_config(drain_delay_s=60.0, http_port=0)
    server = PredictionServer([open_runtime(artifact_folder)], ONE_BY_ONE, config)
    real_sleep = asyncio.sleep

    async def sleep(seconds: float, *args: Any) -> None:
        await (delay.wait() if seconds == 60.0 else real_sleep(seconds, *args))

    monkeypatch.setattr(asyncio, "sleep", sleep)
    address = f"127.0.0.1:{await server.start()}"
    client = aiohttp.ClientSession(base_url=f"http://127.0.0.1:{server.http_port}")
    async with grpc.aio.insecure_channel(address) as channel, client as http:
        stub: Any = fakes.Stub(channel)

        async def readiness() -> list[bool]:
            probes = [await health_of(stub, name) == SERVING for name in ("", "tiny")]
            probes.append((await stub.ServerReady(oip.ServerReadyRequest())).ready)
            probes.append((await stub.ModelReady(oip.ModelReadyRequest(name="tiny"))).ready)
            for path in ("/readyz", "/v2/health/ready", "/v2/models/tiny/ready"):
                async with http.get(path) as response:
                    probes.append(response.status == 200)
            return probes

        assert all(await readiness())
        stopping = asyncio.create_task(server.stop())
        await until(lambda: not server.artifacts.is_ready)
        assert not any(await readiness())
        assert (await stub.Predict(SEA)).prompt_tokens == 3
        async with http.get("/healthz") as response:
            assert response.status == 200
        delay.set()
        await stopping


async def test_reflection_lists_the_service(stub: Any) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = reflection_pb2_grpc.ServerReflectionStub(stub.channel).ServerReflectionInfo(iter([request]))
    response = await call.read()
    call.cancel()
    names = {service.name for service in response.list_services_response.service}
    assert {SERVICE, OIP_SERVICE, "grpc.health.v1.Health"} <= names


async def test_listeners_share_a_port_that_no_other_server_gets(artifact_folder: Path) -> None:
    async with fakes.running_server(open_runtime(artifact_folder), num_listeners=3) as (_, address):
        port = int(address.rpartition(":")[2])

        def num_listening() -> int:
            connections = psutil.Process().net_connections("tcp")
            return sum(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in connections)

        assert num_listening() == 3
        own = [("grpc.use_local_subchannel_pool", 1)]
        async with contextlib.AsyncExitStack() as stack:
            channels = [grpc.aio.insecure_channel(address, options=own) for _ in range(12)]
            stubs = [fakes.Stub(await stack.enter_async_context(channel)) for channel in channels]
            answers = await asyncio.gather(*(one.Predict(SEA, wait_for_ready=True) for one in stubs))
        assert len({answer.mu for answer in answers}) == 1
        other = PredictionServer([open_runtime(artifact_folder)], ONE_BY_ONE, fakes.serve_config(port=port))
        with pytest.raises(InputError, match=rf"port: got '127.0.0.1:{port}'.*in use"):
            await other.start()
        await other.stop()
    assert num_listening() == 0


async def test_an_artifact_for_conversations_encodes_all_messages(tmp_path: Path) -> None:
    folder = fakes.write_artifact(tmp_path / "a", conversations=True)
    async with fakes.server_and_stub(open_runtime(folder)) as (_, stub):
        messages = chat(("system", "name rivers"), ("user", "the sea"))
        response = await stub.Predict(pb.PredictRequest(messages=messages))
    assert response.mu == pytest.approx(fakes.expected("system: name rivers\n\nuser: the sea")[0], rel=1e-6)


async def test_prompts_over_the_limit_are_refused(artifact_folder: Path) -> None:
    async with fakes.server_and_stub(open_runtime(artifact_folder), max_prompt_chars=10) as (_, stub):
        assert (await stub.Predict(pb.PredictRequest(prompt="a" * 10))).mu > 0
        refusal = await fakes.status(stub.Predict(pb.PredictRequest(prompt="a" * 11)))
        metadata = await stub.GetMetadata(pb.GetMetadataRequest())
    assert refusal == (INVALID, "prompt: got '11 characters'; allowed: at most 10")
    assert metadata.max_prompt_chars == 10


async def test_one_batch_holds_rows_of_different_served_models_and_every_head(rich_folder: Path) -> None:
    runtime = fakes.GatedRuntime(rich_folder)
    batching = BatchingSettings(max_batch=4, max_wait_s=60.0)
    names, temperatures = ["tiny-llm", "huge-llm", "", "never heard of"], [0.5, None, 1.0, 0.0]
    requests = [
        pb.PredictRequest(prompt=prompt, served_model=name, temperature=temperature)
        for prompt, name, temperature in zip(PROMPTS, names, temperatures, strict=True)
    ]
    async with fakes.server_and_stub(runtime, batching=batching) as (_, rich_stub):
        responses = await asyncio.gather(*(rich_stub.Predict(request) for request in requests))
    assert runtime.batches == [4]
    numbers = [1, 2, 0, 0]
    for prompt, number, temperature, response in zip(PROMPTS, numbers, temperatures, responses, strict=True):
        row = fakes.expected_rich(prompt, number, temperature or 0.0)
        for name in ("mu", "sigma", "nu", "regression_tokens", "rank"):
            assert getattr(response, name) == pytest.approx(row[name], rel=1e-5), name
        np.testing.assert_allclose(response.urgency.probabilities, row["urgency"], rtol=1e-5)
        np.testing.assert_allclose(response.bucket_probabilities, row["bucket"], rtol=1e-5)
        assert response.bucket == int(np.argmax(row["bucket"]))
        assert tuple(response.bucket_edges) == fakes.RICH["bucket_edges"]
        assert response.served_model_known == (number > 0)
        assert response.urgency.abstain == (max(row["urgency"]) < fakes.RICH["abstain_threshold"])


def test_urgency_abstains_below_the_threshold_and_decides_the_effective_level(rich_folder: Path) -> None:
    runtime = open_runtime(rich_folder)
    for probabilities, threshold, declared, level, abstain, effective in (
        ([0.25, 0.5, 0.25], 0.6, None, 1, True, None),
        ([0.25, 0.5, 0.25], 0.5, None, 1, False, None),
        ([0.0, 1.0, 0.0], 1.0, None, 1, True, None),
        ([0.45, 0.45, 0.1], 0.3, None, 0, False, None),
        # At most one level more urgent than declared, never less urgent.
        ([0.7, 0.2, 0.1], None, 2, 0, False, 1),
        ([0.1, 0.1, 0.8], None, 0, 2, False, 0),
        # Abstaining leaves the declared tier.
        ([0.7, 0.2, 0.1], 0.8, 2, 0, True, 2),
        ([0.7, 0.2, 0.1], 0.7, 2, 0, False, 1),
        # Nearly uniform: it abstains whatever the threshold.
        ([0.4, 0.3, 0.3], None, 2, 0, True, 2),
        ([0.4, 0.3, 0.3], 0.0, 2, 0, True, 2),
        # In half precision a softmax has a sum of nearly 1.
        ([0.7003, 0.2, 0.1], None, 2, 0, False, 1),
    ):
        urgency = runtime.prediction({"urgency": probabilities}).urgency
        assert urgency is not None
        urgency = replace(urgency, abstain_threshold=threshold)
        message = response_fields(Prediction(urgency=urgency))["urgency"]
        assert sum(message.probabilities) == pytest.approx(1.0, abs=1e-12)
        assert (message.level, message.abstain) == (level, abstain)
        assert message.level == urgency.level
        assert (None if declared is None else urgency.effective_level(declared)) == effective
        assert (message.abstain_threshold if message.HasField("abstain_threshold") else None) == threshold


async def test_metadata_tells_heads_and_conditions(rich_folder: Path) -> None:
    async with fakes.server_and_stub(open_runtime(rich_folder)) as (_, rich_stub):
        metadata = await rich_stub.GetMetadata(pb.GetMetadataRequest())
    assert tuple(metadata.heads) == fakes.RICH["heads"]
    assert tuple(metadata.served_models) == fakes.SERVED_MODELS
    assert metadata.conditioned_on_served_model
    assert metadata.conditioned_on_temperature
    assert metadata.accepts_unknown_models
    assert tuple(metadata.urgency_levels) == fakes.RICH["urgency_levels"]
    assert metadata.abstain_threshold == fakes.RICH["abstain_threshold"]
    assert tuple(metadata.bucket_edges) == fakes.RICH["bucket_edges"]
    assert not metadata.HasField("nu")
    assert (metadata.artifact_id, metadata.format_version) == ("tiny", FORMAT_VERSION)
    assert (metadata.max_length_tokens, metadata.truncation_side) == (16, "right")
    assert (metadata.max_batch_requests, metadata.max_message_bytes) == (256, 4 * 2**20)


async def test_artifact_that_knows_only_its_own_models_refuses_others(tmp_path: Path) -> None:
    conditioning = Conditions(unknown_models=False, temperature=True)
    folder = fakes.write_rich_artifact(tmp_path / "a", conditioning=conditioning)
    async with fakes.server_and_stub(open_runtime(folder)) as (_, rich_stub):
        for name in ("other", ""):
            sea = pb.PredictRequest(prompt="sea", served_model=name)
            _, message = await fakes.status(rich_stub.Predict(sea))
            assert message == f"served_model: got {name!r}; allowed: one of tiny-llm, huge-llm"
        requests = [pb.PredictRequest(prompt="sea", served_model=name) for name in ("other", "tiny-llm")]
        batch = await rich_stub.PredictBatch(pb.PredictBatchRequest(requests=requests))
    assert batch.outcomes[0].error.field == "requests[0].served_model"
    assert batch.outcomes[1].prediction.served_model_known


async def test_an_artifact_without_a_length_predicts_what_it_has(tmp_path: Path) -> None:
    folder = fakes.write_rich_artifact(tmp_path / "a", heads=("urgency", "rank"))
    async with (
        fakes.running_server(open_runtime(folder)) as (_, address),
        GrpcPredictor(address) as predictor,
    ):
        [response] = await predictor.responses([PredictionRequest("r", "sea", 100)], truncated_length=True)
        [prediction] = await predictor.predict([PredictionRequest("r", "sea", 100)])
        with pytest.raises(PredictorError, match="the model returned .*rank = nan") as caught:
            await predictor.predict([PredictionRequest("r", "nan", 100)])
    assert caught.value.code == "INTERNAL"
    absent = ["mu", "sigma", "nu", "truncated_length", "regression_tokens", "bucket"]
    absent += ["median_tokens", "p90_tokens", "expected_tokens"]
    assert not any(response.HasField(name) for name in absent)
    assert (prediction.length, prediction.bucket, prediction.point) == (None, None, None)
    assert prediction.rank.score == response.rank
    assert prediction.urgency.probabilities == tuple(response.urgency.probabilities)
