"""Clients of the prediction service.

`connect("host:port")` returns the asynchronous client (the `Predictor` protocol of scheduler_core);
`SyncPredictor` is the blocking client. Both connect at the first call. `InProcessPredictor` runs the artifact
in this process; its blocking counterpart is `predictors.runtime.open_runtime`.
"""

from __future__ import annotations

from predictors.pretrained import artifact_folder
from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.prediction.predictor import PREDICTORS

try:
    import grpc
    from google.protobuf import message

    del grpc, message
except ModuleNotFoundError as error:
    package = {"grpc": "grpcio", "google": "protobuf"}.get((error.name or "").partition(".")[0])
    if package is None:
        raise
    raise MissingExtraError(package, "client") from error

from predictors.client.grpc_client import ClientSettings, GrpcPredictor, SyncPredictor, TlsSettings
from predictors.client.in_process import InProcessPredictor
from predictors.client.messages import AsyncClient, PredictorError

__all__ = [
    "ClientSettings",
    "GrpcPredictor",
    "InProcessPredictor",
    "PredictorError",
    "SyncPredictor",
    "TlsSettings",
    "connect",
    "load",
    "open_client",
]


def connect(address: str) -> GrpcPredictor:
    """Returns a client of the service at "host:port"; it connects at the first call."""
    return GrpcPredictor(address)


def load(artifact: str, field: str = "predictor") -> InProcessPredictor:
    """Returns a client that runs an artifact in this process and loads it at the first call. `artifact` is
    "pretrained", "tiny" or a folder; InputError about the option `field` if it does not exist."""
    folder = artifact_folder(artifact)
    if not folder.is_dir():
        raise InputError(field, artifact, PREDICTORS)
    return InProcessPredictor(folder)


def open_client(predictor: str, field: str = "predictor") -> AsyncClient:
    """Returns the client of "pretrained", "tiny", a folder, or grpc://HOST:PORT; raises as `load`."""
    scheme, separator, address = predictor.partition("://")
    if not separator or scheme not in ("grpc", "local"):
        return load(predictor, field)
    return connect(address) if scheme == "grpc" else load(address, field)
