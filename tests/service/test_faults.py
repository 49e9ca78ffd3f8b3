"""What breaks inside: a model call, the clock, a worker, an artifact under way. Nothing else breaks with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from numpy.typing import NDArray

from benchmarks.serving.processes import ROOT, free_port, running
from predictors.artifact import open_artifact
from predictors.client import ClientSettings, GrpcPredictor, PredictorError
from predictors.runtime import Predicted
from predictors.service.batcher import BatchingSettings
from predictors.service.server import PredictionServer, ServerSettings
from scheduler_core.predictor import PredictionRequest
from tests.predictors.fakes import GatedRuntime, expected, running_server, until, write_artifact
from tests.service.harness import JumpingClock, one_answer, rewritten, served

PROMPTS = ["sea" + " a" * (number % 12) for number in range(60)]
ONE_ATTEMPT = ClientSettings(max_attempts=1)
PATIENT = ClientSettings(timeout_s=300.0, num_connections=2, wait_for_ready=True)


def request(number: int) -> PredictionRequest:
    return PredictionRequest(f"r{number}", PROMPTS[number % len(PROMPTS)], 100)


def is_right(number: int, mu: float) -> bool:
    return mu == pytest.approx(expected(PROMPTS[number % len(PROMPTS)])[0], rel=1e-5)


class FailingRuntime(GatedRuntime):
    """Its n-th model call raises."""

    def __init__(self, folder: Path, failing: set[int]) -> None:
        super().__init__(folder)
        self.failing = failing

    def run(
        self,
        prompts: Sequence[NDArray[Any]],
        served_models: Sequence[str | None] | None = None,
        temperatures: Sequence[float | None] | None = None,
    ) -> Predicted:
        if len(self.batches) + 1 in self.failing:
            self.batches.append(len(prompts))
            raise RuntimeError("the session broke")
        return super().run(prompts, served_models, temperatures)


@pytest.mark.parametrize("failing", [{1}, {3}, {2, 3, 4}], ids=["first", "third", "three in a row"])
async def test_a_session_that_raises_fails_just_its_batches(artifact_folder: Path, failing: set[int]) -> None:
    runtime = FailingRuntime(artifact_folder, failing)
    batching = BatchingSettings(max_batch=4, max_wait_s=0.0, num_workers=1)
    async with (
        running_server(runtime, batching=batching) as (_, address),
        GrpcPredictor(address, ONE_ATTEMPT) as predictor,
    ):
        found = await asyncio.gather(
            *(predictor.predict([request(number)]) for number in range(60)), return_exceptions=True
        )
        [after] = await predictor.predict([request(7)])
    failed = [one for one in found if isinstance(one, PredictorError)]
    assert {error.code for error in failed} == {"INTERNAL"}
    assert len(failed) == sum(runtime.batches[number - 1] for number in failing)
    for number, one in enumerate(found):
        if not isinstance(one, BaseException):
            assert is_right(number, one[0].mu)
    assert is_right(7, after.mu)


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0], ids=["forwards", "back"])
@pytest.mark.parametrize("batching", [BatchingSettings.cpu(2), BatchingSettings.gpu()], ids=["cpu", "gpu"])
async def test_the_clock_jumps(artifact_folder: Path, jump_s: float, batching: BatchingSettings) -> None:
    """The system's monotonic clock does not; a suspended machine's may. Nobody hangs, and then all is as before."""
    clock = JumpingClock()
    runtime = GatedRuntime(artifact_folder, is_open=False)
    server = PredictionServer(runtime, batching, ServerSettings(), clock)
    address = f"127.0.0.1:{await server.start()}"
    try:
        async with GrpcPredictor(address, ONE_ATTEMPT) as predictor:
            inside = [asyncio.ensure_future(predictor.predict([request(number)])) for number in range(40)]
            await until(lambda: server.pipeline.num_in_flight == 40)
            clock.offset += jump_s
            runtime.gate.set()
            for number, one in enumerate(await asyncio.gather(*inside, return_exceptions=True)):
                if isinstance(one, PredictorError):
                    assert jump_s > 0
                    assert one.code == "DEADLINE_EXCEEDED"
                else:
                    assert not isinstance(one, BaseException)
                    assert is_right(number, one[0].mu)
            after = await asyncio.gather(*(predictor.predict([request(number)]) for number in range(40)))
    finally:
        await server.stop()
    assert all(is_right(number, one[0].mu) for number, one in enumerate(after))


@pytest.mark.slow
async def test_workers_killed_while_clients_retry_and_nothing_is_lost(artifact_folder: Path) -> None:
    with served(artifact_folder, "--workers=2") as server:
        supervisor = psutil.Process(server.process.popen.pid)

        def workers() -> list[psutil.Process]:
            found = []
            for child in supervisor.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one too
                    if "predictors.service.worker" in " ".join(child.cmdline()):
                        found.append(child)
            return found

        assert len(workers()) == 2
        killed: set[int] = set()
        num_asked = 0
        async with GrpcPredictor(server.address, PATIENT) as predictor:

            async def caller() -> None:
                nonlocal num_asked
                while len(killed) < 4 or num_asked < 500:
                    number = num_asked
                    num_asked += 1
                    [found] = await predictor.predict([request(number)])
                    assert is_right(number, found.mu)

            async def killer() -> None:
                for _ in range(2):
                    await asyncio.sleep(1.0)
                    victims = workers()
                    for victim in victims:  # all of them: for a moment nobody is there
                        os.kill(victim.pid, signal.SIGKILL)
                        killed.add(victim.pid)
                    async with asyncio.timeout(60):
                        while len({one.pid for one in workers()} - killed) < 2:
                            await asyncio.sleep(0.1)

            await asyncio.gather(killer(), *(caller() for _ in range(16)))
        assert len(killed) == 4
        assert num_asked >= 500
        server.process.popen.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.process.popen.wait, 60) == 0


@pytest.mark.slow
async def test_an_artifact_replaced_under_load_loses_no_request(tmp_path: Path) -> None:
    first = write_artifact(tmp_path / "first")
    manifest = open_artifact(first).manifest
    second = tmp_path / "second"
    shutil.copytree(first, second)
    (second / "normalization.json").write_text('{"mu_mean": 1.0}')
    rewritten(second, manifest)
    broken = tmp_path / "broken"
    shutil.copytree(first, broken)
    (broken / "model.onnx").write_bytes(b"not a model")
    place = tmp_path / "artifact"
    place.symlink_to(first)
    versions = {name: _version(tmp_path / name) for name in ("first", "second")}
    assert versions["first"] != versions["second"]
    with served(place) as server:
        seen: list[str] = []
        done = False
        async with GrpcPredictor(server.address, ONE_ATTEMPT) as predictor:

            async def caller(number: int) -> None:
                while not done:
                    [found] = await predictor.predict([request(number)])
                    assert is_right(number, found.mu)
                    seen.append(found.artifact_version)

            async def replace(target: Path) -> None:
                link = tmp_path / "new-link"
                link.symlink_to(target)
                os.replace(link, place)
                server.process.popen.send_signal(signal.SIGHUP)

            callers = [asyncio.ensure_future(caller(number)) for number in range(8)]
            for target, version in (("second", versions["second"]), ("first", versions["first"])):
                await asyncio.sleep(0.3)
                await replace(tmp_path / target)
                start = len(seen)
                async with asyncio.timeout(60):
                    while version not in seen[start:]:
                        await asyncio.sleep(0.05)
                        assert not any(one.done() for one in callers), "a caller failed"
            await replace(broken)
            await asyncio.sleep(1.0)
            start = len(seen)
            await asyncio.sleep(0.5)
            done = True
            await asyncio.gather(*callers)
        assert set(seen) == set(versions.values())
        assert set(seen[start:]) == {versions["first"]}, "a broken artifact was taken"


def _version(folder: Path) -> str:
    return open_artifact(folder).manifest.artifact_version


@pytest.mark.slow
async def test_a_server_that_ends_and_comes_back_on_its_port(artifact_folder: Path) -> None:
    """The supervisor here is the test: the same port, a new process."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "predictors.cli",
        str(artifact_folder),
        f"--port={port}",
        "--provider=cpu",
    ]
    stop = asyncio.Event()
    num_answers = 0

    def process() -> contextlib.AbstractContextManager[Any]:
        return running(
            command, lambda: one_answer(f"127.0.0.1:{port}"), environment={"PYTHONPATH": str(ROOT)}
        )

    async with GrpcPredictor(f"127.0.0.1:{port}", PATIENT) as predictor:

        async def caller(number: int) -> None:
            nonlocal num_answers
            while not stop.is_set():
                [found] = await predictor.predict([request(number)])
                assert is_right(number, found.mu)
                num_answers += 1

        callers: list[asyncio.Task[None]] = []
        for life in range(3):
            context = process()
            running_now = await asyncio.to_thread(context.__enter__)
            callers = callers or [asyncio.ensure_future(caller(number)) for number in range(8)]
            before = num_answers
            async with asyncio.timeout(60):
                while num_answers < before + 50:
                    await asyncio.sleep(0.05)
                    assert not any(one.done() for one in callers), "a caller failed"
            if life == 2:
                stop.set()
                await asyncio.gather(*callers)
            else:
                running_now.popen.kill()
            await asyncio.to_thread(context.__exit__, None, None, None)
