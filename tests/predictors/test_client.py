from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from predictors.client import (
    ClientSettings,
    GrpcPredictor,
    PredictorError,
    SyncPredictor,
    TlsSettings,
    channel,
    connect,
    messages,
)
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto import predictor_v1_pb2_grpc
from predictors.runtime import open_runtime
from predictors.service.batcher import BatchingSettings
from scheduler_core.errors import InputError
from scheduler_core.predictor import AsyncPredictor, PredictionRequest, Predictor, open_predictor
from tests.predictors.fakes import NU, GatedRuntime, expected, running_server, until
from tests.predictors.scripted import NOBODY, Scripted, serving

PROMPTS = ["name three rivers", "sea", "write a long essay about the sea", "a a a"]
ONE_TRY = ClientSettings(max_attempts=1)
QUICK: dict[str, Any] = {"max_attempts": 3}


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


async def test_many_requests_are_split_and_put_together_again(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MAX_BATCH_BYTES", 300)
    settings = ClientSettings(max_batch_requests=7)
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
    async with GrpcPredictor(NOBODY, ClientSettings(**QUICK)) as predictor:
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
            await until(lambda: server.pipeline.num_in_flight == 4)
            call.cancel()
            await until(lambda: server.pipeline.num_in_flight == 0)
        runtime.gate.set()
    assert len(runtime.batches) <= 1


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
@pytest.mark.parametrize("client", ["asynchronous", "blocking"])
async def test_only_what_no_server_took_is_retried_and_not_for_ever(
    client: str, code: grpc.StatusCode, num_failures: int, num_calls: int
) -> None:
    servicer = Scripted(code, num_failures)
    settings = ClientSettings(**QUICK)
    async with serving(servicer) as address:
        if client == "blocking":
            asking = asyncio.to_thread(SyncPredictor(address, settings).predict, requests())
        else:
            asking = GrpcPredictor(address, settings).predict(requests())
        if num_failures < num_calls:
            assert [found.mu for found in await asking] == [len(prompt) for prompt in PROMPTS]
        else:
            with pytest.raises(PredictorError, match=f"{code.name}: not now"):
                await asking
    assert len(servicer.calls) == num_calls


async def test_wrong_number_of_answers_is_an_error() -> None:
    class Short(predictor_v1_pb2_grpc.PredictorServicer):
        async def PredictBatch(self, request: Any, context: Any) -> pb.PredictBatchResponse:
            return pb.PredictBatchResponse()

    async with serving(Short()) as address, connect(address) as predictor:
        with pytest.raises(PredictorError, match="0 outcomes for 4 requests"):
            await predictor.predict(requests())


@pytest.mark.parametrize("nu", [0.0, float("nan")])
async def test_numbers_that_no_scheduler_can_use_are_an_error_of_the_service(nu: float) -> None:
    class Odd(predictor_v1_pb2_grpc.PredictorServicer):
        async def Predict(self, request: Any, context: Any) -> pb.PredictResponse:
            return pb.PredictResponse(request_id=request.request_id, mu=1.0, sigma=0.5, nu=nu)

    async with serving(Odd()) as address, connect(address) as predictor:
        with pytest.raises(PredictorError, match="predicted nu") as caught:
            await predictor.predict(requests(["sea"]))
    assert (caught.value.code, caught.value.request_id) == ("INTERNAL", "r0")


@pytest.mark.parametrize("client", ["asynchronous", "blocking"])
async def test_a_call_may_have_its_own_deadline(client: str) -> None:
    async with serving(Scripted(num_silent=1)) as address:
        with pytest.raises(PredictorError, match="DEADLINE_EXCEEDED"):
            if client == "blocking":
                await asyncio.to_thread(SyncPredictor(address).predict, requests(["sea"]), timeout_s=0.05)
            else:
                await connect(address).predict(requests(["sea"]), timeout_s=0.05)
    with pytest.raises(InputError, match="timeout_s"):
        await connect(NOBODY).predict(requests(), timeout_s=-1)


@pytest.mark.parametrize("client", ["asynchronous", "blocking"])
async def test_capped_numbers_come_when_asked_for(address: str, client: str) -> None:
    async def ask(capped: bool) -> pb.PredictResponse:
        wanted = requests(["sea"])
        if client == "blocking":
            [found] = await asyncio.to_thread(
                SyncPredictor(address).responses, wanted, truncated_length=capped
            )
        else:
            async with connect(address) as predictor:
                [found] = await predictor.responses(wanted, truncated_length=capped)
        return found

    assert (await ask(True)).truncated_length.max_tokens == 100
    assert not (await ask(False)).HasField("truncated_length")


async def test_concurrent_callers_get_their_own_predictions(address: str) -> None:
    prompts = ["sea" + " a" * (index % 12) for index in range(100)]
    async with connect(address) as predictor:
        found = await asyncio.gather(*(predictor.predict(requests([prompt])) for prompt in prompts))
    assert [one.mu for [one] in found] == pytest.approx([expected(prompt)[0] for prompt in prompts], rel=1e-5)


async def test_every_caller_has_a_call_of_its_own() -> None:
    servicer = Scripted()
    async with serving(servicer) as address, connect(address) as predictor:
        await asyncio.gather(*(predictor.predict(requests(["sea"])) for _ in range(5)))
        await predictor.predict(requests())
    assert servicer.calls == [["sea"]] * 5 + [PROMPTS]


async def test_several_connections_are_used_and_answer_alike() -> None:
    servicer = Scripted()
    servicer.gate.clear()
    settings = ClientSettings(num_connections=3)
    async with serving(servicer) as address, GrpcPredictor(address, settings) as predictor:
        calls = [asyncio.ensure_future(predictor.predict(requests(["sea"]))) for _ in range(6)]
        await until(lambda: servicer.num_under_way == 6)
        assert sorted(servicer.num_calls_by_peer.values()) == [2, 2, 2]
        servicer.gate.set()
        assert [one.mu for [one] in await asyncio.gather(*calls)] == [3.0] * 6


@pytest.mark.parametrize("target", ["nobody", "silent"])
async def test_the_callers_loop_is_never_blocked(target: str) -> None:
    """While requests wait for a service that is not there or does not answer, the loop turns freely."""
    async with serving(Scripted(num_silent=100)) as address:
        settings = ClientSettings(timeout_s=0.3)
        async with GrpcPredictor(NOBODY if target == "nobody" else address, settings) as predictor:
            wanted = [requests([f"sea {index} " * 100]) for index in range(50)]
            calls = [asyncio.ensure_future(predictor.predict(one)) for one in wanted]
            turns = 0
            while not all(call.done() for call in calls):
                await asyncio.sleep(0.005)
                turns += 1
            assert all(isinstance(call.exception(), PredictorError) for call in calls)
    # 0.3 s have room for 60 turns; a blocked loop would have a handful, a slow machine some of them.
    assert turns >= 8


async def test_every_call_carries_the_token() -> None:
    servicer = Scripted()
    settings = ClientSettings(token="secret-1")
    async with serving(servicer) as address:
        async with GrpcPredictor(address, settings) as predictor:
            await predictor.predict(requests(["sea"]))
        await asyncio.to_thread(SyncPredictor(address, settings).predict, requests(["sea"]))
    assert [metadata["authorization"] for metadata in servicer.metadata] == ["Bearer secret-1"] * 2
    assert "secret" not in repr(settings)


async def test_unreadable_certificate_is_named(tmp_path: Path) -> None:
    settings = ClientSettings(tls=TlsSettings(ca=str(tmp_path / "none.pem")))
    with pytest.raises(InputError, match=r"tls ca: got .*none\.pem"):
        await GrpcPredictor(NOBODY, settings).predict(requests())
    with pytest.raises(InputError, match="together with its key"):
        TlsSettings(certificate="client.pem")


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
    with SyncPredictor(NOBODY, ONE_TRY) as predictor:
        with pytest.raises(PredictorError, match="UNAVAILABLE"):
            predictor.predict(requests())
        with pytest.raises(PredictorError, match="UNAVAILABLE"):
            predictor.metadata()


def test_one_client_serves_one_event_loop_after_the_other() -> None:
    predictor = GrpcPredictor(NOBODY, ONE_TRY)

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
        ("max_batch_requests", 0),
        ("max_message_bytes", 0),
        ("num_connections", 0),
        ("transport", "pigeon"),
        ("max_attempts", 0),
        ("max_attempts", 6),
        ("token", ""),
        ("token", "two\nlines"),
    ],
)
def test_bad_client_setting_is_named(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=field):
        ClientSettings(**{field: value})


async def test_retries_stop_while_most_calls_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's throttling: with a bucket of 4 tokens a failing service is called again once, then no more."""
    monkeypatch.setattr(channel, "RETRY_THROTTLING", {"maxTokens": 4, "tokenRatio": 0.2})
    servicer = Scripted(num_failures=100)
    settings = ClientSettings()
    async with serving(servicer) as address, GrpcPredictor(address, settings) as predictor:
        for _ in range(10):
            with pytest.raises(PredictorError, match="UNAVAILABLE"):
                await predictor.predict(requests(["sea"]))
    assert len(servicer.calls) == 11


async def test_a_call_may_wait_for_a_service_that_is_not_there_yet() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    settings = ClientSettings(timeout_s=60.0, wait_for_ready=True)
    async with GrpcPredictor(f"127.0.0.1:{port}", settings) as predictor:
        call = asyncio.ensure_future(predictor.predict(requests(["sea"])))
        await asyncio.sleep(0)
        async with serving(Scripted(), port):
            [prediction] = await call
    assert prediction.mu == 3.0
