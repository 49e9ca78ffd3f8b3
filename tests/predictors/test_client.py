"""Our clients: asynchronous, blocking, and in process; against the service and scripted servers."""

import asyncio
import contextlib
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from predictors import client as clients
from predictors.client import ClientSettings, GrpcPredictor, PredictorError, SyncPredictor
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto import predictor_v1_pb2_grpc
from predictors.runtime import open_runtime
from predictors.service.batcher import BatchingSettings
from predictors.service.in_process import InProcessPredictor
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.prediction.predictor import PredictionRequest
from tests.predictors import fakes
from tests.waiting import until

PROMPTS = ["name three rivers", "sea", "write a long essay about the sea", "a a a"]
KINDS = ("calls", "blocking")
NOBODY = "127.0.0.1:1"  # a reserved port on which nothing listens


def answer(request: pb.PredictRequest) -> pb.PredictResponse:
    """A prediction that tells which prompt it is for: mu is the prompt's length."""
    mu = float(len(request.prompt))
    return pb.PredictResponse(request_id=request.request_id, mu=mu, sigma=0.5, nu=3.5)


class Scripted(predictor_v1_pb2_grpc.PredictorServicer):
    """Fails the first calls with a status, then answers once the gate is open; `calls` has the prompts of each call so far."""

    def __init__(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE, num_failures: int = 0) -> None:
        self.code = code
        self.num_failures = num_failures
        self.calls: list[list[str]] = []
        self.metadata: list[dict[str, str]] = []
        self.num_under_way = 0
        self.num_calls_by_peer: dict[str, int] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    async def Predict(self, request: pb.PredictRequest, context: Any) -> pb.PredictResponse:
        await self._begin([request], context)
        return answer(request)

    async def PredictBatch(self, request: pb.PredictBatchRequest, context: Any) -> pb.PredictBatchResponse:
        await self._begin(list(request.requests), context)
        outcomes = [pb.Outcome(prediction=answer(one)) for one in request.requests]
        return pb.PredictBatchResponse(outcomes=outcomes)

    async def _begin(self, requests: list[pb.PredictRequest], context: Any) -> None:
        self.calls.append([request.prompt for request in requests])
        self.metadata.append({str(key): str(value) for key, value in context.invocation_metadata()})
        peer = context.peer()
        self.num_calls_by_peer[peer] = self.num_calls_by_peer.get(peer, 0) + 1
        number = len(self.calls)
        if number <= self.num_failures:
            await context.abort(self.code, "not now")
        self.num_under_way += 1
        try:
            await self.gate.wait()
        finally:
            self.num_under_way -= 1


@contextlib.asynccontextmanager
async def serving(servicer: predictor_v1_pb2_grpc.PredictorServicer, port: int = 0) -> AsyncIterator[str]:
    """A server on a loopback port, and its address."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    predictor_v1_pb2_grpc.add_PredictorServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(None)


def requests(prompts: list[str] = PROMPTS, **options: Any) -> list[PredictionRequest]:
    return [PredictionRequest(f"r{i}", prompt, 100, **options) for i, prompt in enumerate(prompts)]


class Client:
    """A client of any kind, used from an event loop."""

    def __init__(self, kind: str, address: str, **settings: Any) -> None:
        if kind == "in process":
            self.client: Any = InProcessPredictor(address)
        elif kind == "blocking":
            self.client = SyncPredictor(address, ClientSettings(**settings))
        else:
            self.client = GrpcPredictor(address, ClientSettings(**settings))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of the client, to be awaited."""
        method = getattr(self.client, name)
        return partial(asyncio.to_thread, method) if isinstance(self.client, SyncPredictor) else method

    async def mus(self, *args: Any, **options: Any) -> list[float]:
        return [prediction.length.mu for prediction in await self.predict(*args, **options)]

    async def error(self, *args: Any, **options: Any) -> PredictorError:
        with pytest.raises(PredictorError) as caught:
            await self.predict(*args, **options)
        return caught.value

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


@pytest.fixture
async def address(artifact_folder: Path) -> AsyncIterator[str]:
    async with fakes.running_server(open_runtime(artifact_folder)) as (_, address):
        yield address


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, 4, 150])
async def test_predictions_come_in_the_order_of_the_requests(
    address: str, kind: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that many are sent in several calls.
    monkeypatch.setattr(clients.messages, "MAX_BATCH_BYTES", 300)
    monkeypatch.setattr(clients.messages, "MAX_BATCH_REQUESTS", 7)
    prompts = [PROMPTS[index % 4] + " a" * (index % 9) for index in range(count)]
    prompts += ["the " * 500] * (count > 4)
    async with Client(kind, address) as client:
        predictions = await client.predict(requests(prompts))
    for prompt, prediction in zip(prompts, predictions, strict=True):
        length = prediction.length
        assert (length.mu, length.sigma) == pytest.approx(fakes.expected(prompt), rel=1e-5)
        assert (length.nu, length.artifact_id, len(length.artifact_version)) == (fakes.NU, "tiny", 12)


@pytest.mark.parametrize("kind", [*KINDS, "in process"])
async def test_all_heads_and_conditions_pass_through_every_client(rich_folder: Path, kind: str) -> None:
    first = PredictionRequest("a", "sea", 100, "huge-llm", 0.5)
    batch = [first, PredictionRequest("b", "name three rivers", 100, temperature=1.5)]
    rows = [fakes.expected_rich("sea", 2, 0.5), fakes.expected_rich("name three rivers", 0, 1.5)]
    async with (
        fakes.running_server(open_runtime(rich_folder)) as (_, address),
        Client(kind, str(rich_folder) if kind == "in process" else address) as client,
    ):
        predictions = await client.predict(batch)
        responses = await client.responses(batch, truncated_length=True)
        [plain] = await client.responses(batch[:1])
        assert (await client.metadata()).artifact_id == "tiny"
    for prediction, response, row in zip(predictions, responses, rows, strict=True):
        assert (prediction.length.mu, prediction.length.nu) == pytest.approx((row["mu"], row["nu"]), rel=1e-5)
        assert prediction.urgency.probabilities == pytest.approx(tuple(row["urgency"]), rel=1e-5)
        assert prediction.urgency.abstain_threshold == fakes.RICH["abstain_threshold"]
        assert prediction.bucket.probabilities == pytest.approx(tuple(row["bucket"]), rel=1e-5)
        assert prediction.bucket.edges == fakes.RICH["bucket_edges"]
        assert prediction.point.tokens == pytest.approx(max(row["regression_tokens"], 1.0), rel=1e-5)
        assert prediction.rank.score == pytest.approx(row["rank"], rel=1e-5)
        assert response.truncated_length.max_tokens == 100
    assert [response.request_id for response in responses] == ["a", "b"]
    assert not plain.HasField("truncated_length")


@pytest.mark.parametrize("kind", [*KINDS, "in process"])
async def test_refused_requests_are_named(address: str, artifact_folder: Path, kind: str) -> None:
    async with Client(kind, str(artifact_folder) if kind == "in process" else address) as client:
        for batch, request_id, message in (
            (requests([""]), "r0", "prompt: got ''; allowed:"),
            (requests(["sea", "", "a"]), "r1", "prompt: got ''; allowed:"),
            (requests(served_model="other-llm"), "r0", "served_model: got"),
        ):
            error = await client.error(batch)
            assert message in str(error)
            copy = pickle.loads(pickle.dumps(error))
            for one in (error, copy):
                assert (one.code, one.request_id) == ("INVALID_ARGUMENT", request_id)
        with pytest.raises(InputError, match=r"prompt of request 'r0'"):
            await client.predict(requests(["\ud800"]))
        with pytest.raises(InputError, match="timeout_s"):
            await client.predict(requests(), timeout_s=-1)


@pytest.mark.parametrize("kind", KINDS)
async def test_unreachable_server_is_named(kind: str) -> None:
    async with Client(kind, NOBODY, max_attempts=1 if kind == "blocking" else 3) as client:
        error = await client.error(requests())
        assert (error.code, f"predictor {NOBODY}:" in str(error)) == ("UNAVAILABLE", True)
        with pytest.raises(PredictorError, match="UNAVAILABLE"):
            await client.metadata()


async def test_message_over_the_limit_names_the_limit(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients.grpc_client, "MAX_MESSAGE_BYTES", 4096)
    async with Client("calls", address) as client:
        error = await client.error(requests(["sea " * 2000]))
    assert error.code == "RESOURCE_EXHAUSTED"
    assert "4096" in str(error)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_deadline_ends_the_wait_of_its_call_alone(artifact_folder: Path, kind: str) -> None:
    runtime = fakes.GatedRuntime(artifact_folder, is_open=False)
    async with fakes.running_server(runtime) as (_, address), Client(kind, address) as client:
        patient = asyncio.ensure_future(client.mus(requests(["sea"])))
        assert (await client.error(requests(["a"]), timeout_s=0.05)).code == "DEADLINE_EXCEEDED"
        runtime.gate.set()
        assert await patient == pytest.approx([fakes.expected("sea")[0]], rel=1e-6)


async def test_cancelling_the_caller_frees_the_service(artifact_folder: Path) -> None:
    runtime = fakes.GatedRuntime(artifact_folder, is_open=False)
    batching = BatchingSettings(max_batch=1, max_wait_s=0.0)
    async with fakes.running_server(runtime, batching=batching) as (server, address):
        async with GrpcPredictor(address) as predictor:
            call = asyncio.ensure_future(predictor.predict(requests()))
            await until(lambda: server.artifacts.num_in_flight == 4)
            call.cancel()
            await until(lambda: server.artifacts.num_in_flight == 0)
        runtime.gate.set()
    assert len(runtime.batches) <= 1


@pytest.mark.parametrize("kind", KINDS)
async def test_only_what_no_server_took_is_retried_and_not_for_ever(kind: str) -> None:
    for code, num_failures, num_calls in (
        (grpc.StatusCode.UNAVAILABLE, 2, 3),
        (grpc.StatusCode.UNAVAILABLE, 9, 3),
        (grpc.StatusCode.CANCELLED, 1, 2),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 1, 1),
        (grpc.StatusCode.INTERNAL, 1, 1),
    ):
        servicer = Scripted(code, num_failures)
        async with serving(servicer) as address, Client(kind, address, max_attempts=3) as client:
            if num_failures < num_calls:
                assert await client.mus(requests()) == [len(prompt) for prompt in PROMPTS]
            else:
                assert f"{code.name}: not now" in str(await client.error(requests()))
        assert len(servicer.calls) == num_calls, code


async def test_retries_stop_while_most_calls_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's throttling: with a bucket of 4 tokens a failing service is called again once, then no more."""
    monkeypatch.setattr(clients.grpc_client, "RETRY_THROTTLING", {"maxTokens": 4, "tokenRatio": 0.2})
    servicer = Scripted(num_failures=100)
    async with serving(servicer) as address, Client("calls", address) as client:
        for _ in range(10):
            assert (await client.error(requests(["sea"]))).code == "UNAVAILABLE"
    assert len(servicer.calls) == 11


async def test_a_call_may_wait_for_a_service_that_is_not_there_yet() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    async with Client("calls", f"127.0.0.1:{port}", timeout_s=60.0, wait_for_ready=True) as client:
        call = asyncio.ensure_future(client.mus(requests(["sea"])))
        await asyncio.sleep(0)
        async with serving(Scripted(), port):
            assert await call == [3.0]


class Odd(predictor_v1_pb2_grpc.PredictorServicer):
    """Answers that no service should give."""

    async def Predict(self, request: Any, context: Any) -> pb.PredictResponse:
        nu = float("nan") if request.prompt == "nan" else 0.0
        return pb.PredictResponse(request_id=request.request_id, mu=1.0, sigma=0.5, nu=nu)

    async def PredictBatch(self, request: Any, context: Any) -> pb.PredictBatchResponse:
        return pb.PredictBatchResponse()


async def test_answers_that_no_scheduler_can_use_are_errors_of_the_service() -> None:
    async with serving(Odd()) as address, Client("calls", address) as client:
        too_few, no_number = (PROMPTS, "0 outcomes for 4 requests"), (["nan"], "predicted nu")
        for prompts, message in (too_few, no_number, (["sea"], "predicted nu")):
            error = await client.error(requests(prompts))
            assert (error.code, error.request_id, message in str(error)) == ("INTERNAL", "r0", True)


async def test_every_caller_has_a_call_of_its_own_over_connections_in_turn() -> None:
    servicer = Scripted()
    servicer.gate.clear()
    async with serving(servicer) as address, Client("calls", address, num_connections=3) as client:
        calls = [asyncio.ensure_future(client.mus(requests(["sea"]))) for _ in range(6)]
        await until(lambda: servicer.num_under_way == 6)
        assert sorted(servicer.num_calls_by_peer.values()) == [2, 2, 2]
        servicer.gate.set()
        assert await asyncio.gather(*calls) == [[3.0]] * 6
        await client.predict(requests())
    assert servicer.calls == [["sea"]] * 6 + [PROMPTS]


async def test_every_call_carries_the_token() -> None:
    servicer = Scripted()
    async with serving(servicer) as address:
        for kind in ("calls", "blocking"):
            async with Client(kind, address, token="secret-1") as client:
                await client.predict(requests(["sea"]))
    assert [metadata["authorization"] for metadata in servicer.metadata] == ["Bearer secret-1"] * 2
    assert "secret" not in repr(ClientSettings(token="secret-1"))


@pytest.mark.parametrize("kind", [*KINDS, "in process"])
async def test_closed_client_opens_again(address: str, artifact_folder: Path, kind: str) -> None:
    client = Client(kind, str(artifact_folder) if kind == "in process" else address)
    for _ in range(2):
        async with client:
            assert await client.mus(requests(["sea"])) == pytest.approx([fakes.expected("sea")[0]], rel=1e-6)


@pytest.mark.parametrize("kind", ["calls", "in process"])
def test_one_client_serves_one_event_loop_after_the_other(artifact_folder: Path, kind: str) -> None:
    client = Client(kind, str(artifact_folder) if kind == "in process" else NOBODY, max_attempts=1)

    async def use() -> object:
        call = client.mus(requests(["sea"])) if kind == "in process" else client.error(requests())
        return str(await call)

    assert asyncio.run(use()) == asyncio.run(use())
    asyncio.run(client.__aexit__())


@pytest.mark.parametrize("address", ["", "host", "host:", "host:0", "host:99999", "http://h:1", "a b:1"])
def test_bad_address_is_refused_without_connecting(address: str) -> None:
    for client in (GrpcPredictor, SyncPredictor):
        with pytest.raises(InputError, match="HOST:PORT"):
            client(address)
    assert GrpcPredictor("[::1]:50051").address == "[::1]:50051"
    assert GrpcPredictor("unix:/run/predictor.sock").address == "unix:/run/predictor.sock"


def test_bad_client_settings_are_named() -> None:
    settings = {"timeout_s": 0.0, "num_connections": 0, "max_attempts": 6, "token": "\n"}
    for field, value in settings.items():
        with pytest.raises(InputError, match=field):
            ClientSettings(**{field: value})


async def test_in_process_a_full_queue_and_a_passed_deadline_are_told(artifact_folder: Path) -> None:
    batching = BatchingSettings(max_batch=1, max_wait_s=0.0, max_queue=2)
    async with InProcessPredictor(artifact_folder, batching) as predictor:
        full, late = (PROMPTS, None, "RESOURCE_EXHAUSTED"), (["a"], 1e-9, "DEADLINE_EXCEEDED")
        for prompts, timeout_s, code in (full, late):
            with pytest.raises(PredictorError) as caught:
                await predictor.predict(requests(prompts), timeout_s=timeout_s)
            assert caught.value.code == code


async def test_missing_artifact_is_an_input_error_and_closing_it_is_harmless(tmp_path: Path) -> None:
    async with InProcessPredictor(tmp_path / "none") as predictor:
        assert await predictor.predict([]) == []
        with pytest.raises(InputError, match="artifact"):
            await predictor.predict(requests())


async def test_an_artifact_that_cannot_predict_is_refused_and_leaves_no_thread(tmp_path: Path) -> None:
    folder = fakes.without_numbers(fakes.write_artifact(tmp_path / "a"))
    before = set(threading.enumerate())
    async with InProcessPredictor(folder) as predictor:
        for _ in range(3):
            with pytest.raises(TailcastError, match="the model returned mu = nan"):
                await predictor.predict(requests(["sea"]))

    def num_threads() -> int:
        return sum(thread.name.startswith("tailcast") for thread in set(threading.enumerate()) - before)

    await until(lambda: num_threads() == 0)


def test_client_imports_without_what_only_the_service_needs() -> None:
    code = (
        "import sys; blocked = ('torch', 'pydantic', 'onnxruntime', 'tokenizers', 'grpc_health', 'jsonargparse')\n"
        "for name in blocked: sys.modules[name] = None\n"
        "import predictors.client as c; c.GrpcPredictor('127.0.0.1:1'); c.SyncPredictor('127.0.0.1:1')\n"
        "assert not any(name.startswith(('predictors.service', 'predictors.runtime')) for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
