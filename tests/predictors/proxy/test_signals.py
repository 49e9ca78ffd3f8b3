"""What a proxy does on SIGHUP, what its log and /readyz say about engine and predictor."""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from predictors.proxy import engine_monitor
from predictors.proxy.config import RELOADED, ProxyConfig
from predictors.proxy.engine_monitor import FRESH_S, GONE_S, EngineMonitor
from predictors.proxy.errors import engine_failed
from predictors.proxy.forecast import GONE_S as PREDICTOR_GONE_S
from predictors.proxy.forecast import REFUSED_S, WINDOW, Forecaster, PredictorLog
from predictors.proxy.server import ProxyServer
from predictors.service.workers import Supervisor
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.prediction.predictor import PredictionRequest
from tests.predictors.fakes import replace_artifact
from tests.predictors.proxy import fake_engine
from tests.predictors.proxy.fake_engine import CHAT, chat, running_engine, running_proxy, until
from tests.predictors.test_client import Scripted, serving
from tests.scheduler_core.helpers import Clock

ROOT = Path(__file__).parents[3]


def config_of(server: ProxyServer, **options: Any) -> ProxyConfig:
    return replace(server.handler.config, **options)


@pytest.mark.mend  # SIGHUP ended the proxy, its requests in flight and its feedback (exit code 129)
async def test_sighup_reloads_and_loses_nothing(tmp_path: Path) -> None:
    go = asyncio.Event()
    ports, log, options = tmp_path / "ports", tmp_path / "log", tmp_path / "options.yaml"
    replace_artifact(tmp_path, "v1")
    content: dict[str, Any] = {"engine": "vllm", "predictor": str(tmp_path / "current"), "served_model": ""}
    content |= {"port": 0, "port_file": str(ports), "feedback": str(log), "deadline_s": 20.0}
    options.write_text(json.dumps(content))
    async with running_engine(fake_engine.paused(fake_engine.stream_events(["a", "b"], 2), go)) as fake:
        words = [
            sys.executable,
            "-m",
            "predictors.commands.tailcast_proxy",
            fake.url,
            "--config",
            str(options),
        ]
        process = await asyncio.create_subprocess_exec(*words, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
        assert process.stderr is not None
        lines: list[str] = []

        async def logged(text: str) -> str:
            assert process.stderr is not None
            while not lines or text not in lines[-1]:
                line = await process.stderr.readline()
                assert line, lines
                lines.append(line.decode())
            return lines[-1]

        async with asyncio.timeout(120), aiohttp.ClientSession() as client:
            await logged("ready on")
            url = f"http://127.0.0.1:{int(ports.read_text())}{CHAT}"
            async with client.post(url, json=chat("name sea", stream=True)) as response:
                assert await response.content.readany()
                replace_artifact(tmp_path, "v2")
                options.write_text(json.dumps(content | {"access_log": True, "policy": "fcfs"}))
                process.send_signal(signal.SIGHUP)
                reloaded = await logged("reloaded:")
                assert "access_log = True" in reloaded
                assert "predictor: version v2" in reloaded
                assert "these options need a restart: policy" in await logged("restart")
                for broken in ("max_in_flight: -1", "port: [", "predictor: nowhere"):
                    options.write_text(broken)
                    process.send_signal(signal.SIGHUP)
                    assert "everything stays as it was" in await logged("the reload failed")
                go.set()
                assert (await response.read()).endswith(b"data: [DONE]\n\n")
            async with client.post(url, json=chat("name sea")) as response:
                assert response.status == 200
            assert CHAT in await logged(f"POST {CHAT}")
            process.send_signal(signal.SIGTERM)
            rest = await process.stderr.read()
    await process.wait()
    assert process.returncode == 0, rest
    records = [json.loads(line) for file in sorted(log.iterdir()) for line in file.read_text().splitlines()]
    assert len(records) == 2
    assert all("mu" in record for record in records)


async def test_limits_change_while_requests_are_in_flight(caplog: pytest.LogCaptureFixture) -> None:
    go = asyncio.Event()
    caplog.set_level(logging.INFO)
    async with running_engine(fake_engine.gated(go)) as fake, running_proxy(fake.url, release=1) as proxy:
        posts = [asyncio.create_task(proxy.post(chat("x"))) for _ in range(3)]
        await until(lambda: proxy.server.num_in_flight == 3 and fake.num_in_flight == 1)
        new = config_of(proxy.server, release=2, max_in_flight=3, engine_probe_s=9.0, access_log=True)
        await proxy.server.reload(new)
        await until(lambda: fake.num_in_flight == 2)
        assert (await proxy.post(chat("x")))[0] == 429
        go.set()
        assert [status for status, _ in await asyncio.gather(*posts)] == [200] * 3
    assert "reloaded: release = 2; max_in_flight = 3; access_log = True" in caplog.text
    assert "these options need a restart: engine_probe_s" in caplog.text


async def test_rules_and_objectives_change() -> None:
    options: dict[str, Any] = {"engine": "llm-d", "slo_ttft_ms": [1, 2, 3, 4, 5]}
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        changes: dict[str, Any] = {"slo_ttft_ms": [6, 7, 8, 9, 10], "client_priority": "replace"}
        await proxy.server.reload(config_of(proxy.server, **changes))
        await proxy.post(chat("x"), {"x-slo-ttft-ms": "1"})
        headers = {name.lower(): value for name, value in fake.requests[0][2].items()}
        assert headers["x-llm-d-slo-ttft-ms"] == "8"
        assert "x-slo-ttft-ms" not in headers


async def test_a_reload_that_fails_changes_nothing(artifact_folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"engine": "vllm", "predictor": str(artifact_folder)}
    answered = 'tailcast_proxy_predictions_total{outcome="answered"}'
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        (tmp_path / "empty").mkdir()
        for predictor in (str(tmp_path / "none"), str(tmp_path / "empty"), "grpc://127.0.0.1:1"):
            new = config_of(proxy.server, predictor=predictor, max_in_flight=1, warm_up_s=0.5)
            with pytest.raises(TailcastError):
                await proxy.server.reload(new)
        assert proxy.server.handler.config.max_in_flight > 1
        assert (await proxy.post(chat("name sea")))[0] == 200
        assert await proxy.metric(answered) == 1


async def test_no_prediction_is_lost_while_artifacts_are_replaced(tmp_path: Path) -> None:
    replace_artifact(tmp_path, "v0")
    options: dict[str, Any] = {"engine": "vllm", "predictor": str(tmp_path / "current")}
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        posts: list[asyncio.Task[tuple[int, bytes]]] = []
        for version in range(1, 4):
            posts += [asyncio.create_task(proxy.post(chat("name sea"))) for _ in range(10)]
            replace_artifact(tmp_path, f"v{version}")
            await proxy.server.reload(proxy.server.handler.config)
        assert [status for status, _ in await asyncio.gather(*posts)] == [200] * 30
        assert await proxy.metric('tailcast_proxy_predictions_total{outcome="answered"}') == 30


def test_the_reloaded_options_exist() -> None:
    assert set(RELOADED) <= set(ProxyConfig.__dataclass_fields__)
    assert len(set(RELOADED)) == len(RELOADED)


WORKER = """
import os, signal, sys
folder = sys.argv[1]
open(folder + "/started", "w").close()
open(folder + "/go").close()  # a pipe
signal.signal(signal.SIGHUP, lambda *_: open(folder + "/reloaded", "w").close())
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
os.write(1, b"x")
while True:
    signal.pause()
"""


@pytest.mark.mend  # SIGHUP ended workers that were still loading
async def test_a_worker_that_is_starting_reloads_when_it_is_ready(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    supervisor = Supervisor([sys.executable, "-S", "-c", WORKER, str(tmp_path)], 1, stop_timeout_s=60)
    running = asyncio.create_task(supervisor.run(lambda: None))
    await until(lambda: (tmp_path / "started").exists())
    supervisor.reload()
    open(tmp_path / "go", "w").close()
    await until(lambda: (tmp_path / "reloaded").exists())
    supervisor.stop()
    assert await running == 0


# The engine.


@pytest.fixture
async def monitored(
    caplog: pytest.LogCaptureFixture,
) -> AsyncIterator[tuple[EngineMonitor, Clock, list[int]]]:
    """A monitor, its clock, and the probes: each entry is the status of an answer, 0 for none."""
    caplog.set_level(logging.INFO, engine_monitor.__name__)
    clock, answers = Clock(), [200]

    async def probe() -> None:
        await asyncio.sleep(0)
        answers.append(answers[-1])
        if not answers[-1]:
            raise engine_failed("cannot be reached (test)")

    monitor = EngineMonitor(probe, clock)
    yield monitor, clock, answers
    await monitor.close()


async def test_probes_are_shared_and_bounded(monitored: tuple[EngineMonitor, Clock, list[int]]) -> None:
    monitor, clock, answers = monitored
    assert all(await asyncio.gather(*(monitor.check() for _ in range(20))))
    assert len(answers) == 2
    clock.now += FRESH_S / 2
    assert await monitor.check()
    assert len(answers) == 2
    clock.now += FRESH_S
    monitor.succeeded()  # a request: no probe is needed
    assert await monitor.check()
    assert len(answers) == 2


async def test_an_engine_is_gone_once_and_back_once(
    monitored: tuple[EngineMonitor, Clock, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    monitor, clock, answers = monitored
    answers[-1] = 0
    for _ in range(3):
        assert not await monitor.check()
        monitor.failed("cannot be reached")
        clock.now += FRESH_S
    answers[-1] = 200
    for _ in range(3):
        assert await monitor.check()
        clock.now += FRESH_S
    assert [record.getMessage() for record in caplog.records] == [
        "the engine is gone: it cannot be reached (test); /readyz is 503 until it responds",
        f"the engine is back after {3 * FRESH_S:.0f} s; /readyz is 200",
    ]


async def test_an_engine_that_comes_and_goes_does_not_flood_the_log(
    monitored: tuple[EngineMonitor, Clock, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    monitor, clock, _ = monitored
    for _ in range(100):
        monitor.failed("cannot be reached")
        clock.now += 0.1
        monitor.succeeded()
    assert len(caplog.records) == 2
    clock.now += GONE_S
    monitor.failed("cannot be reached")
    assert len(caplog.records) == 3


async def test_readyz_follows_the_engine(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_monitor, "FRESH_S", 0.0)
    caplog.set_level(logging.INFO)

    async def ready(proxy: fake_engine.RunningProxy) -> int:
        async with proxy.client.get(proxy.admin + "/readyz") as response:
            return response.status

    async with running_engine() as fake, running_proxy(fake.url, engine="vllm") as proxy:
        assert await ready(proxy) == 200
        await fake.stop()
        assert await ready(proxy) == 503
        assert (await proxy.post(chat("x")))[0] == 502
        assert await proxy.metric("tailcast_proxy_engine_up") == 0
        await fake.start()
        assert await ready(proxy) == 200
        assert await proxy.metric("tailcast_proxy_engine_up") == 1
    assert caplog.text.count("the engine is gone") == caplog.text.count("the engine is back") == 1


async def test_a_request_finds_that_the_engine_is_gone_and_back() -> None:
    async with running_engine() as fake, running_proxy(fake.url, engine="vllm") as proxy:
        await fake.stop()
        assert (await proxy.post(chat("x")))[0] == 502
        assert await proxy.metric("tailcast_proxy_engine_up") == 0
        await fake.start()
        assert (await proxy.post(chat("x")))[0] == 200
        assert await proxy.metric("tailcast_proxy_engine_up") == 1


@pytest.mark.parametrize(("status", "ready"), [(404, 200), (401, 200), (500, 200), (503, 503), (502, 503)])
async def test_any_answer_but_that_it_does_not_serve_is_one(status: int, ready: int) -> None:
    async def script(request: Any, body: bytes) -> Any:
        return aiohttp.web.Response(status=status)

    async with running_engine(script) as fake, running_proxy(fake.url + "/base") as proxy:
        async with proxy.client.get(proxy.admin + "/readyz") as response:
            assert response.status == ready
        assert fake.requests[0][:2] == ("GET", "/base/health")


# The predictor.


@pytest.fixture
def predictor_log(caplog: pytest.LogCaptureFixture) -> tuple[PredictorLog, Clock]:
    caplog.set_level(logging.INFO)
    clock = Clock()
    return PredictorLog("predictor", 0.1, clock), clock


def test_a_slow_predictor_is_logged_once(
    predictor_log: tuple[PredictorLog, Clock], caplog: pytest.LogCaptureFixture
) -> None:
    log, _ = predictor_log
    for _ in range(WINDOW):
        log.observe("answered")
    for number in range(1, 2 * WINDOW):
        log.observe("late" if number % 5 == 0 else "answered")
    assert caplog.messages == [
        "the predictor is slow: 10 of its last 100 predictions were later than 0.1 s; their requests continue without"
    ]
    for _ in range(WINDOW):
        log.observe("answered")
    assert caplog.messages[1:] == ["the predictor is in time again: 4 of its last 100 predictions were late"]


def test_a_predictor_that_never_answers_is_slow_after_a_few_requests(
    predictor_log: tuple[PredictorLog, Clock], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        predictor_log[0].observe("late")
    [message] = caplog.messages
    assert "5 of its last 5 predictions" in message


def test_a_predictor_that_is_gone_and_back_is_logged_without_a_flood(
    predictor_log: tuple[PredictorLog, Clock], caplog: pytest.LogCaptureFixture
) -> None:
    log, clock = predictor_log
    for _ in range(50):
        log.observe("failed", OSError("x"))
        log.observe("answered")
    assert caplog.messages == [
        "the predictor is gone, requests continue without: OSError",
        "the predictor is back",
    ]
    clock.now += PREDICTOR_GONE_S
    log.observe("failed", OSError("x"))
    assert len(caplog.messages) == 3


@pytest.mark.mend
async def test_a_service_that_has_ended_is_gone_and_not_slow(caplog: pytest.LogCaptureFixture) -> None:
    """The client retries until the deadline, so that the log said "slow", after five requests."""
    caplog.set_level(logging.INFO)
    request = PredictionRequest("r", "sea", 100)
    async with serving(Scripted()) as address:
        forecaster = Forecaster(f"grpc://{address}", "predictor", 20.0)
        assert (await forecaster.forecast(request)).outcome == "answered"
    forecaster.deadline_s = 0.05
    outcomes = [(await forecaster.forecast(request)).outcome for _ in range(6)]
    assert outcomes == ["failed"] * 6
    assert [line for line in caplog.messages if "the predictor is" in line] == [
        "the predictor is gone, requests continue without: ConnectionError"
    ]
    forecaster.deadline_s = 20.0
    async with serving(Scripted(), int(address.rpartition(":")[2])):
        while (await forecaster.forecast(request)).outcome != "answered":
            pass
    assert caplog.messages[-1] == "the predictor is back"
    await forecaster.close()


def test_refused_requests_are_logged_once_per_hour(
    predictor_log: tuple[PredictorLog, Clock], caplog: pytest.LogCaptureFixture
) -> None:
    log, clock = predictor_log
    for now in (0.0, 1.0, REFUSED_S, REFUSED_S + 1.0):
        clock.now = now
        log.observe("refused", InputError("served_model", "x", "y"))
        log.observe("answered")
    assert len(caplog.messages) == 2
    assert "set --model" in caplog.messages[0]
