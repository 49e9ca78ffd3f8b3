"""Exit code 0 when a prediction service is serving: `python check_health.py HOST:PORT`.

With TLS, the certificate that the service shows is trusted, as the check runs beside it. A service that asks for client
certificates needs a check of its own.
"""

from __future__ import annotations

import socket
import ssl
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def is_serving(address: str, timeout_s: float = 4.0) -> bool:
    """Whether the standard health service reports SERVING, without or with TLS."""
    try:
        certificate, name = _certificate(address, timeout_s)
    except OSError:  # without TLS, or without a server
        channel = grpc.insecure_channel(address)
    else:
        credentials = grpc.ssl_channel_credentials(certificate.encode())
        channel = grpc.secure_channel(address, credentials, [("grpc.ssl_target_name_override", name)])
    with channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s
            )
        except grpc.RpcError:
            return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def _certificate(address: str, timeout_s: float) -> tuple[str, str]:
    """The certificate that a server shows (PEM), and a name that it is for; `OSError` without TLS."""
    host, _, port = address.rpartition(":")
    certificate = ssl.get_server_certificate((host, int(port)), timeout=timeout_s)
    context = ssl.create_default_context(cadata=certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    with socket.create_connection((host, int(port)), timeout_s) as plain, context.wrap_socket(plain) as tls:
        names = tls.getpeercert()
    assert names, "a verified certificate"
    return certificate, str(names["subjectAltName"][0][1])


if __name__ == "__main__":
    raise SystemExit(0 if is_serving(sys.argv[1]) else 1)
