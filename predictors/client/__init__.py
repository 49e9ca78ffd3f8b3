"""Clients of the prediction service.

`connect("host:port")` gives the asynchronous client of schedulers and simulators (the `Predictor` protocol of
scheduler_core); `SyncPredictor` is the same for programs without an event loop. Both open their connections at the
first call, give every call a deadline, and leave retries to gRPC's own retry policy. `InProcessPredictor` runs the
artifact in this process instead; without an event loop that is `predictors.runtime.open_runtime`.
"""

from __future__ import annotations

from scheduler_core.errors import MissingExtraError

try:
    import grpc
    from google.protobuf import message

    del grpc, message
except ModuleNotFoundError as error:
    package = {"grpc": "grpcio", "google": "protobuf"}.get((error.name or "").partition(".")[0])
    if package is None:
        raise
    raise MissingExtraError(package, "client") from error

from predictors.client.channel import ClientSettings, TlsSettings
from predictors.client.grpc_client import GrpcPredictor, SyncPredictor
from predictors.client.in_process import InProcessPredictor
from predictors.client.messages import PredictorError

__all__ = [
    "ClientSettings",
    "GrpcPredictor",
    "InProcessPredictor",
    "PredictorError",
    "SyncPredictor",
    "TlsSettings",
    "connect",
    "load",
]


def connect(address: str) -> GrpcPredictor:
    """A client for "host:port", as `open_predictor("grpc://host:port")` makes it; connects at the first call."""
    return GrpcPredictor(address)


def load(path: str) -> InProcessPredictor:
    """A client for an artifact folder, run in this process, as `open_predictor("local://PATH")` makes it."""
    return InProcessPredictor(path)
