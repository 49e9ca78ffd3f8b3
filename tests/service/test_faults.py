"""What breaks inside: the clock, workers. Nothing else breaks with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from predictors.client import ClientSettings, GrpcPredictor
from scheduler_core.predictor import PredictionRequest
from tests.predictors.fakes import expected
from tests.service.harness import served

PROMPTS = ["sea" + " a" * (number % 12) for number in range(60)]
PATIENT = ClientSettings(timeout_s=300.0, num_connections=2, wait_for_ready=True)


async def checked(predictor: GrpcPredictor, number: int) -> None:
    """Asks for one prediction and checks it."""
    prompt = PROMPTS[number % len(PROMPTS)]
    [prediction] = await predictor.predict([PredictionRequest(f"r{number}", prompt, 100)])
    assert prediction.length is not None
    assert prediction.length.mu == pytest.approx(expected(prompt)[0], rel=1e-5)


@pytest.mark.slow
async def test_workers_killed_while_clients_retry_and_nothing_is_lost(artifact_folder: Path) -> None:
    with served(artifact_folder, "--workers=2") as server:
        supervisor = psutil.Process(server.process.popen.pid)

        def workers() -> set[int]:
            pids = set()
            for child in supervisor.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one too
                    if "predictors.service.worker" in " ".join(child.cmdline()):
                        pids.add(child.pid)
            return pids

        assert len(workers()) == 2
        killed: set[int] = set()
        num_asked = 0
        async with GrpcPredictor(server.address, PATIENT) as predictor:

            async def caller() -> None:
                nonlocal num_asked
                while len(killed) < 4 or num_asked < 500:
                    num_asked += 1
                    await checked(predictor, num_asked)

            async def killer() -> None:
                for _ in range(2):
                    await asyncio.sleep(1.0)
                    for victim in workers():  # all of them: for a moment nobody is there
                        os.kill(victim, signal.SIGKILL)
                        killed.add(victim)
                    async with asyncio.timeout(60):
                        while len(workers() - killed) < 2:
                            await asyncio.sleep(0.1)

            await asyncio.gather(killer(), *(caller() for _ in range(16)))
        server.process.popen.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.process.popen.wait, 60) == 0
