"""SIGTERM to a real server: readiness goes first, what comes in the delay is still answered, and it exits with 0."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from predictors.proto import open_inference_pb2 as oip
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto.open_inference_pb2_grpc import GRPCInferenceServiceStub
from predictors.proto.predictor_v1_pb2_grpc import PredictorStub
from tests.predictors.fakes import write_artifact
from tests.predictors.test_workers import PATIENCE_S, Process, get, running, version

DELAY_S = 8.0
"""Long enough that a machine many times slower still makes a few calls in it."""


def ready_everywhere(server: Process, channel: grpc.Channel, http_port: int) -> list[bool]:
    """Readiness as every probe tells it."""
    health: Any = health_pb2_grpc.HealthStub(channel)
    inference: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
    serving = health_pb2.HealthCheckResponse.SERVING
    return [
        health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S).status == serving,
        health.Check(health_pb2.HealthCheckRequest(service="tiny"), timeout=PATIENCE_S).status == serving,
        inference.ServerReady(oip.ServerReadyRequest(), timeout=PATIENCE_S).ready,
        inference.ModelReady(oip.ModelReadyRequest(name="tiny"), timeout=PATIENCE_S).ready,
        get(http_port, "/readyz")[0] == 200,
        get(http_port, "/v2/health/ready")[0] == 200,
        get(http_port, "/v2/models/tiny/ready")[0] == 200,
        server.port_file.exists(),
    ]


def test_readiness_goes_first_and_calls_are_answered_until_the_delay_ends(tmp_path: Path) -> None:
    with running(tmp_path, write_artifact(tmp_path / "tiny"), f"--drain_delay_s={DELAY_S:g}") as server:
        port, http_port = server.ports()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            predictor: Any = PredictorStub(channel)  # type: ignore[no-untyped-call]
            assert predictor.Predict(pb.PredictRequest(prompt="sea"), timeout=PATIENCE_S).prompt_tokens == 3
            assert all(ready_everywhere(server, channel, http_port))
            health: Any = health_pb2_grpc.HealthStub(channel)
            watched = health.Watch(health_pb2.HealthCheckRequest())
            assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
            server.process.send_signal(signal.SIGTERM)
            signalled = time.monotonic()
            assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watched.cancel()
            assert not any(ready_everywhere(server, channel, http_port))
            # On the connection that was there, on a new one, and over HTTP, which goes on to say that it lives.
            assert predictor.Predict(pb.PredictRequest(prompt="sea"), timeout=PATIENCE_S).prompt_tokens == 3
            assert version(port)
            assert get(http_port, "/healthz")[0] == 200
            assert get(http_port, "/v1/metadata")[0] == 200
            assert server.process.poll() is None
        assert server.process.wait(timeout=PATIENCE_S) == 0
        # It did wait, and the calls above were made while it did.
        assert time.monotonic() - signalled >= DELAY_S - 0.1
        assert "Traceback" not in server.log


def test_workers_drain_with_their_delay_too(tmp_path: Path) -> None:
    options = ("--workers=2", f"--drain_delay_s={DELAY_S:g}")
    with running(tmp_path, write_artifact(tmp_path / "tiny"), *options) as server:
        port, http_port = server.ports()
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: get(http_port, "/readyz")[0] == 503)
        assert not server.port_file.exists()
        assert all(version(port) for _ in range(4))
        assert server.process.poll() is None
        assert server.process.wait(timeout=PATIENCE_S) == 0
