"""Clients of the prediction service.

`GrpcPredictor("host:port")` is asynchronous, a `scheduler_core.prediction.predictor.Predictor`; `SyncPredictor` is
blocking. Both connect at the first call.
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

from predictors.client.access import TlsSettings
from predictors.client.grpc_client import ClientSettings, GrpcPredictor, SyncPredictor
from predictors.client.messages import PredictorError

__all__ = ["ClientSettings", "GrpcPredictor", "PredictorError", "SyncPredictor", "TlsSettings"]
