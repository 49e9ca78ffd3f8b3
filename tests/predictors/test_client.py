from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from predictors.client import ClientSettings, GrpcPredictor, PredictorError, SyncPredictor, connect
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto import predictor_v1_pb2_grpc
from predictors.runtime import open_runtime
from predictors.service.grouping import BatchingSettings
from scheduler_core.errors import InputError
from scheduler_core.predictor import AsyncPredictor, PredictionRequest, Predictor, open_predictor
from tests.predictors.fakes import NU, GatedRuntime, expected, running_server, until

PROMPTS = ["name three rivers", "sea", "write a long essay about the sea", "a a a"]
NOBODY = "127.0.0.1:1"  # a reserved port on which nothing listens


def requests(prompts: list[str] = PROMPTS, **options: Any) -> list[PredictionRequest]:
    return [PredictionRequest(f"r{i}", prompt, 100, **options) for i, prompt in enumerate(prompts)]


@pytest.fixture
async def address(artifact_folder: Path) -> AsyncIterator[str]:
    async with running_server(open_runtime(artifact_folder)) as (_, address):
        yield address


@pytest.mark.parametrize("count", [1, 4])
async def test_predictions_come_in_the_order_of_the_requests(address: str, count: int) -> None:
    async with connect(address) as predictor:
        predictions = await predictor.predict(requests(PROMPTS[:count]))
    for prompt, prediction in zip(PROMPTS, predictions, strict=False):
        assert prediction.mu == pytest.approx(expected(prompt)[0], rel=1e-6)
        assert prediction.sigma == pytest.approx(expected(prompt)[1], rel=1e-6)
        assert (prediction.nu, prediction.artifact_id) == (NU, "tiny")
        assert len(prediction.artifact_version) == 12
    assert len(predictions) == count


async def test_no_requests_need_no_server() -> None:
    async with connect(NOBODY) as predictor:
        assert await predictor.predict([]) == []


async def test_many_requests_are_split_and_put_together_again(address: str) -> None:
    settings = ClientSettings(max_batch_requests=7, max_batch_bytes=300)
    prompts = ["sea" + " a" * (i % 9) for i in range(50)] + ["the " * 500]
    async with GrpcPredictor(address, settings) as predictor:
        predictions = await predictor.predict(requests(prompts))
    assert [p.mu for p in predictions] == pytest.approx([expected(p)[0] for p in prompts], rel=1e-5)


async def test_scheduler_finds_the_client_by_url(address: str) -> None:
    predictor = open_predictor(f"grpc://{address}")
    assert isinstance(predictor, Predictor)
    [prediction] = await predictor.predict(requests(["sea"]))
    assert prediction.mu == pytest.approx(expected("sea")[0], rel=1e-6)
    await predictor.close()


async def test_collector_gets_one_event_for_every_request(address: str) -> None:
    collector = AsyncPredictor(connect(address), max_in_flight=8)
    wanted = requests(["sea", "", *PROMPTS])
    for request in wanted:
        collector.submit(request)
    events = {event.request_id: event for event in [await collector.next_event() for _ in wanted]}
    await collector.close()
    assert set(events) == {request.request_id for request in wanted}
    assert [request_id for request_id, event in events.items() if event.prediction is None] == ["r1"]
    assert "prompt: got ''" in (events["r1"].error or "")


async def test_metadata_names_the_artifact(address: str) -> None:
    async with connect(address) as predictor:
        assert (await predictor.metadata()).artifact_id == "tiny"


@pytest.mark.parametrize("prompts", [[""], ["sea", "", "a"]])
async def test_refused_request_is_named(address: str, prompts: list[str]) -> None:
    async with connect(address) as predictor:
        with pytest.raises(PredictorError, match=r"prompt: got ''; allowed:") as caught:
            await predictor.predict(requests(prompts))
    assert caught.value.code == "INVALID_ARGUMENT"
    assert caught.value.request_id == f"r{prompts.index('')}"
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.code, copy.request_id) == (str(caught.value), "INVALID_ARGUMENT", copy.request_id)


async def test_unknown_served_model_is_refused(address: str) -> None:
    async with connect(address) as predictor:
        with pytest.raises(PredictorError, match="served_model"):
            await predictor.predict(requests(served_model="other-llm"))


async def test_unreachable_server_is_named() -> None:
    async with GrpcPredictor(NOBODY, ClientSettings(max_attempts=2, first_backoff_s=0.005)) as predictor:
        with pytest.raises(PredictorError, match=rf"predictor {NOBODY}:.* UNAVAILABLE") as caught:
            await predictor.predict(requests())
        with pytest.raises(PredictorError, match="UNAVAILABLE"):
            await predictor.metadata()
    assert caught.value.code == "UNAVAILABLE"


async def test_text_that_is_no_unicode_is_refused_before_sending() -> None:
    async with connect(NOBODY) as predictor:
        with pytest.raises(InputError, match=r"prompt of request 'r0'"):
            await predictor.predict(requests(["\ud800"]))


async def test_message_over_the_limit_names_the_limit(address: str) -> None:
    async with GrpcPredictor(address, ClientSettings(max_message_bytes=4096)) as predictor:
        with pytest.raises(PredictorError, match="4096") as caught:
            await predictor.predict(requests(["sea " * 2000]))
    assert caught.value.code == "RESOURCE_EXHAUSTED"


async def test_deadline_ends_the_wait(artifact_folder: Path) -> None:
    runtime = GatedRuntime(artifact_folder, is_open=False)
    async with running_server(runtime, batching=BatchingSettings.cpu(1)) as (_, address):
        async with GrpcPredictor(address, ClientSettings(timeout_s=0.05)) as predictor:
            with pytest.raises(PredictorError, match="DEADLINE_EXCEEDED"):
                await predictor.predict(requests())
        runtime.gate.set()


async def test_cancelling_the_caller_frees_the_service(artifact_folder: Path) -> None:
    runtime = GatedRuntime(artifact_folder, is_open=False)
    batching = BatchingSettings(max_batch=1, max_wait_s=0.0)
    async with running_server(runtime, batching=batching) as (server, address):
        async with connect(address) as predictor:
            call = asyncio.ensure_future(predictor.predict(requests()))
            await until(lambda: server.pipeline.num_inside == 4)
            call.cancel()
            await until(lambda: server.pipeline.num_inside == 0)
        runtime.gate.set()
    assert len(runtime.batches) <= 1


class Flaky(predictor_v1_pb2_grpc.PredictorServicer):
    """Fails the first calls with a status, then answers."""

    def __init__(self, code: grpc.StatusCode, num_failures: int) -> None:
        self.code = code
        self.num_failures = num_failures
        self.num_calls = 0

    async def PredictBatch(self, request: pb.PredictBatchRequest, context: Any) -> pb.PredictBatchResponse:
        self.num_calls += 1
        if self.num_calls <= self.num_failures:
            await context.abort(self.code, "not now")
        answer = pb.Outcome(prediction=pb.PredictResponse(mu=1.0, sigma=0.5, nu=NU))
        return pb.PredictBatchResponse(outcomes=[answer] * len(request.requests))


@pytest.mark.parametrize(
    ("code", "num_failures", "num_calls"),
    [
        (grpc.StatusCode.UNAVAILABLE, 2, 3),
        (grpc.StatusCode.UNAVAILABLE, 9, 3),
        (grpc.StatusCode.CANCELLED, 1, 2),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 1, 1),
        (grpc.StatusCode.INTERNAL, 1, 1),
    ],
)
async def test_only_what_no_server_took_is_retried_and_not_for_ever(
    code: grpc.StatusCode, num_failures: int, num_calls: int
) -> None:
    servicer = Flaky(code, num_failures)
    server = grpc.aio.server()
    predictor_v1_pb2_grpc.add_PredictorServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    settings = ClientSettings(max_attempts=3, first_backoff_s=0.005)
    async with GrpcPredictor(address, settings) as predictor:
        if num_failures < num_calls:
            assert len(await predictor.predict(requests())) == 4
        else:
            with pytest.raises(PredictorError, match=f"{code.name}: not now"):
                await predictor.predict(requests())
    await server.stop(None)
    assert servicer.num_calls == num_calls


async def test_wrong_number_of_answers_is_an_error() -> None:
    class Short(predictor_v1_pb2_grpc.PredictorServicer):
        async def PredictBatch(self, request: Any, context: Any) -> pb.PredictBatchResponse:
            return pb.PredictBatchResponse()

    server = grpc.aio.server()
    predictor_v1_pb2_grpc.add_PredictorServicer_to_server(Short(), server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with connect(address) as predictor:
        with pytest.raises(PredictorError, match="0 outcomes for 4 requests"):
            await predictor.predict(requests())
    await server.stop(None)


async def test_closed_client_opens_again(address: str) -> None:
    predictor = connect(address)
    first = await predictor.predict(requests(["sea"]))
    await predictor.close()
    assert await predictor.predict(requests(["sea"])) == first
    await predictor.close()


async def test_blocking_client_gives_the_same_answers(address: str) -> None:
    def use() -> Any:
        with SyncPredictor(address, ClientSettings(max_batch_requests=3)) as predictor:
            return predictor.predict(requests()), predictor.metadata().artifact_id

    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as pool:
        predictions, artifact_id = await loop.run_in_executor(pool, use)
    async with connect(address) as predictor:
        assert predictions == await predictor.predict(requests())
    assert artifact_id == "tiny"


def test_blocking_client_names_an_unreachable_server() -> None:
    with SyncPredictor(NOBODY, ClientSettings(max_attempts=1)) as predictor:
        with pytest.raises(PredictorError, match="UNAVAILABLE"):
            predictor.predict(requests())
        with pytest.raises(PredictorError, match="UNAVAILABLE"):
            predictor.metadata()


def test_one_client_serves_one_event_loop_after_the_other() -> None:
    predictor = GrpcPredictor(NOBODY, ClientSettings(max_attempts=1))

    async def use() -> str:
        with pytest.raises(PredictorError) as caught:
            await predictor.predict(requests())
        return caught.value.code

    assert asyncio.run(use()) == "UNAVAILABLE"
    assert asyncio.run(use()) == "UNAVAILABLE"
    asyncio.run(predictor.close())


@pytest.mark.parametrize(
    "address", ["", "localhost", "localhost:", "localhost:0", "host:99999", "http://h:1", "a b:1"]
)
def test_bad_address_is_refused_without_connecting(address: str) -> None:
    for client in (connect, SyncPredictor):
        with pytest.raises(InputError, match="HOST:PORT"):
            client(address)


@pytest.mark.parametrize(
    "address", ["localhost:1", "10.0.0.1:65535", "[::1]:50051", "unix:/run/predictor.sock"]
)
def test_good_address_is_accepted(address: str) -> None:
    assert connect(address).address == address


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timeout_s", 0.0),
        ("timeout_s", float("nan")),
        ("max_attempts", 0),
        ("max_attempts", 6),
        ("first_backoff_s", 0.001),
        ("max_batch_requests", 0),
        ("max_batch_bytes", 0),
        ("max_message_bytes", 0),
    ],
)
def test_bad_client_setting_is_named(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=field):
        ClientSettings(**{field: value})
