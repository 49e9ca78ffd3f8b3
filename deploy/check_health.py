"""Exit code 0 when a prediction service is serving: `python check_health.py HOST:PORT`."""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def is_serving(address: str, timeout_s: float = 4.0) -> bool:
    """Whether the standard health service reports SERVING."""
    with grpc.insecure_channel(address) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s
            )
        except grpc.RpcError:
            return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    raise SystemExit(0 if is_serving(sys.argv[1]) else 1)
