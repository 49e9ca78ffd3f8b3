"""Options of `serve-predictor`."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Literal

from predictors.hosting.tls import check_tls
from scheduler_core.errors import InputError
from scheduler_core.prediction.predictor import addresses
from scheduler_core.ranges import INTEGERS, check_ranges
from scheduler_core.shell.threads import check_threads


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Serve predictions over gRPC and optionally HTTP. SIGTERM or Ctrl-C stops; SIGHUP reloads artifacts, certificates and tokens."""

    INPUTS = (
        *("artifact", "more_artifacts", "public_key", "token_file"),
        *("tls_cert", "tls_key", "tls_client_ca"),
    )
    OUTPUTS = ("port_file", "calibration_file")

    artifact: str = "pretrained"
    """Artifact folder written by export-onnx, or pretrained or tiny, the artifacts shipped with tailcast. It
    serves all requests that do not name an artifact. Joined by + with artifacts of further heads, as in pretrained+urgency,
    responses have the heads of all."""
    more_artifacts: list[str] = field(default_factory=list)
    """Further artifacts to serve, written as artifact; requests select them by artifact_id."""
    port: int = 50051
    """gRPC port to listen on; 0 selects a free port."""
    http_port: int | None = None
    """HTTP port for JSON, metrics and probes; 0 selects a free port; default: no HTTP."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all IPv4 interfaces."""
    port_file: str | None = None
    """File to write the port number to when the service is ready; removed at startup and at shutdown."""
    provider: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model: auto uses CUDA if it works, otherwise the CPU; cuda fails if it does not work."""
    max_batch: int | None = None
    """Maximum number of requests in one model call; default: 4 on a CPU, 32 on a GPU."""
    max_queue: int = 512
    """Maximum number of requests in flight; further requests fail immediately with RESOURCE_EXHAUSTED."""
    num_workers: int | None = None
    """Number of concurrent model calls; default: one per core on a CPU, 1 on a GPU."""
    max_message_mib: int = 4
    """Maximum gRPC message or HTTP body in MiB; parsing blocks the server for up to 10 ms per MiB."""
    max_prompt_chars: int | None = None
    """Maximum number of characters of a prompt; default: no limit except the message size."""
    cache_entries: int = 0
    """Maximum number of cached predictions per artifact; 0: no cache."""
    workers: int = 1
    """Number of processes that share the ports; a process that dies is restarted."""
    online_calibration: bool = True
    """Correct predictions by the lengths that clients report (Observe); requires workers 1, otherwise it is off."""
    calibration_file: str | None = None
    """File that keeps the state of online calibration across restarts; default: none."""
    tls_cert: str | None = None
    """PEM file with the server certificate; enables TLS on both ports, together with tls_key."""
    tls_key: str | None = None
    """PEM file with the private key of tls_cert."""
    tls_client_ca: str | None = None
    """PEM file with the CA of client certificates; default: clients need no certificate."""
    public_key: str | None = None
    """PEM file of an Ed25519 public key to verify the artifacts' signatures; default: do not verify."""
    token_file: str | None = None
    """File with the valid bearer tokens, one per line; default: no authentication."""
    reload_poll_s: float = 0.0
    """Seconds between checks for a new version of an artifact, new certificates or tokens; 0: only at SIGHUP."""
    log_format: Literal["text", "json"] = "text"
    """Format of log lines: text, or one JSON object per line."""
    traces: bool = False
    """Export OpenTelemetry traces; the OTEL_* environment variables configure the exporter."""
    drain_delay_s: float = 0.0
    """Seconds to keep serving after SIGTERM with health NOT_SERVING, so that load balancers react."""
    drain_timeout_s: float = 30.0
    """Maximum seconds to finish requests in flight; if workers > 1, workers are killed 2.5 s later."""

    def __post_init__(self) -> None:
        for name in ("artifact", "host"):
            if not getattr(self, name):
                raise InputError(name, "", "a non-empty text")
        day_s = (0.0, 86_400.0)
        check_ranges(
            self,
            port=(0, 65535),
            http_port=(0, 65535),
            max_message_mib=(1, 1024),
            max_prompt_chars=(1, INTEGERS),
            cache_entries=(0, INTEGERS),
            workers=(1, 256),
            reload_poll_s=day_s,
            drain_delay_s=day_s,
            drain_timeout_s=day_s,
        )
        check_threads("num_workers", self.num_workers)
        if self.calibration_file is not None and not self.learns:
            raise InputError(
                "calibration_file", self.calibration_file, "a file with online_calibration true and workers 1"
            )
        if self.workers > 1 and not hasattr(socket, "SO_REUSEPORT"):
            raise InputError("workers", self.workers, "1: this system cannot share a port")
        check_tls(self)

    @property
    def num_artifacts(self) -> int:
        """Number of artifacts, each part of joined ones; a part of several counts for each."""
        return sum(len(addresses(each)) for each in (self.artifact, *self.more_artifacts))

    @property
    def learns(self) -> bool:
        """Whether predictions are corrected: each of several processes would learn a part only."""
        return self.online_calibration and self.workers == 1

    @property
    def max_message_bytes(self) -> int:
        """Maximum size of a gRPC message or HTTP body."""
        return self.max_message_mib * 2**20
