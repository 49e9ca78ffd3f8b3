"""Proxies that share the memory of one service."""

import asyncio
import logging
from collections import Counter
from typing import Any

import pytest

from predictors.client import GrpcPredictor, PredictorError
from predictors.pretrained import TINY
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proxy import shared_calibration
from predictors.proxy.config import ProxyConfig
from predictors.proxy.shared_calibration import SharedCalibration
from predictors.runtime import open_runtime
from scheduler_core.errors import InputError
from scheduler_core.prediction.correction import RequestContext
from scheduler_core.prediction.outcome import Outcome
from tests.predictors.fakes import running_server
from tests.predictors.proxy.fake_engine import running_engine, running_proxy
from tests.predictors.proxy.test_memory import LENGTHS, OPTIONS, priorities, respond, send
from tests.waiting import until


async def test_what_one_proxy_observes_corrects_the_predictions_of_another() -> None:
    async with running_server(open_runtime(TINY)) as (server, address), running_engine(respond) as fake:
        options: dict[str, Any] = {
            "predictor": f"grpc://{address}",
            "online_calibration": "shared",
            **OPTIONS,
        }
        async with running_proxy(fake.url, **options) as first, running_proxy(fake.url, **options) as second:
            await send(first, range(90), Authorization="Bearer a")
            calibration = server._calls.learner.calibration.calibration  # type: ignore[union-attr]
            await until(lambda: calibration.num_remembered >= 90)
            await send(second, range(300, 303), Authorization="Bearer a")
            assert priorities(fake) == pytest.approx(list(LENGTHS.values()), rel=0.6)
            assert await first.metric("tailcast_proxy_calibration_remembered") == 0
            assert {tenant for tenant, _ in calibration._pairs} > {""}


async def test_options_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(InputError, match="online_calibration.*grpc://"):
        ProxyConfig(engine_url="http://127.0.0.1:1", online_calibration="shared", predictor="tiny")
    with pytest.raises(InputError, match="calibration_file"):
        ProxyConfig(
            engine_url="http://127.0.0.1:1",
            online_calibration="shared",
            predictor="grpc://h:1",
            calibration_file="x",
        )


class Client:
    """A service that is not there for the first `num_failures` calls, and refuses lengths of 13."""

    def __init__(self, num_failures: int = 0) -> None:
        self.num_failures = num_failures
        self.batches: list[list[int]] = []

    async def observe(self, observations: Any) -> list[pb.ObservationError]:
        if self.num_failures:
            self.num_failures -= 1
            raise PredictorError("gone", "UNAVAILABLE")
        self.batches.append([each.output_tokens for each in observations])
        return [pb.ObservationError(message="unlucky") for each in observations if each.output_tokens == 13]


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INTERVAL_S", "RETRY_S"):
        monkeypatch.setattr(shared_calibration, name, 0.0)
    monkeypatch.setattr(shared_calibration, "CLOSE_S", 0.2)


def outcome(tokens: int) -> Outcome:
    return Outcome(output_tokens=tokens, finished=True, request_id=str(tokens))


@pytest.mark.usefixtures("fast")
async def test_lengths_survive_a_service_that_is_away(caplog: pytest.LogCaptureFixture) -> None:
    client, skipped = Client(num_failures=3), Counter[str]()

    def count(reason: str, number: int) -> None:
        skipped[reason] += number

    shared = SharedCalibration(lambda: client, count)
    for tokens in range(1, 1201):
        assert shared.observe(RequestContext(), outcome(tokens))
    await until(lambda: sum(map(len, client.batches)) == 1200)
    assert [tokens for batch in client.batches for tokens in batch] == list(range(1, 1201))
    assert max(map(len, client.batches)) == shared_calibration.MAX_CALL
    assert skipped == {"refused": 1}
    assert "unlucky" in caplog.text
    assert caplog.text.count("cannot be reported") == 1
    await shared.close()


@pytest.mark.mend
@pytest.mark.usefixtures("fast")
async def test_a_service_that_does_not_learn_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing was logged until the queue was full, and then that the service is too slow."""
    options: dict[str, Any] = {"online_calibration": False}
    server = running_server(open_runtime(TINY), **options)
    async with server as (_, address), GrpcPredictor(address) as client:
        shared = SharedCalibration(lambda: client, lambda reason, count: None)
        shared.observe(RequestContext(), outcome(5))
        await until(lambda: "--online_calibration true" in caplog.text)
        await shared.close()


@pytest.mark.usefixtures("fast")
async def test_what_is_lost_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_calibration, "MAX_PENDING", 5)
    skipped = Counter[str]()

    def count(reason: str, number: int) -> None:
        skipped[reason] += number

    client = Client(num_failures=10**9)
    shared = SharedCalibration(lambda: client, count)
    with caplog.at_level(logging.WARNING):
        accepted = [shared.observe(RequestContext(), outcome(tokens)) for tokens in range(1, 9)]
        await asyncio.sleep(0)
        await shared.close()
    assert accepted == [True] * 5 + [False] * 3
    assert skipped == {"queue_full": 3, "lost": 5}
    assert caplog.text.count("as fast as requests end") == 1
    without = SharedCalibration(lambda: None, count)
    without.observe(RequestContext(), outcome(5))
    await without.close()
    assert skipped["lost"] == 6
