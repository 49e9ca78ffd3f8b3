"""Options of `tailcast-proxy`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal
from urllib.parse import urlsplit

from predictors.hosting.tls import check_tls
from scheduler_core.errors import InputError
from scheduler_core.prediction.predictor import PredictorAddress
from scheduler_core.prediction.service_access import ACCESS_FILES, ServiceAccess
from scheduler_core.prediction.urgency import LEVELS
from scheduler_core.ranges import FINITE, INTEGERS, POSITIVE, check_ranges

#: Minimum and maximum value of options.
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("release", "max_waiting", "max_num_seqs", "max_in_flight"), (1, INTEGERS)),
    "engine_kv_tokens": (1, INTEGERS),
    **dict.fromkeys(("resolution", "idle_timeout_s"), (POSITIVE, FINITE)),
    **dict.fromkeys(("aging_per_s", "drain_delay_s", "drain_timeout_s"), (0.0, FINITE)),
    **dict.fromkeys(("warm_up_s", "request_timeout_s"), (POSITIVE, 3600)),
    **dict.fromkeys(("port", "admin_port"), (0, 65535)),
    "deadline_s": (POSITIVE, 60),
    "max_body_mib": (1, 1024),
    "max_held_mib": (1, 2**20),
    "engine_probe_s": (0.0, 3600.0),
    "reload_poll_s": (0.0, 86_400.0),
    "default_max_tokens": (1, 2**31 - 1),
    "most_urgent_tier": (0, len(LEVELS) - 1),
}
#: Options that SIGHUP applies. The others need a restart: ports and files are open, and the keys of waiting requests, the
#: priorities of requests in the engine and the state of the policy depend on the policy and its parameters.
RELOADED = (
    *("predictor", "shadow_predictor", "deadline_s", "warm_up_s", "served_model"),
    *("default_max_tokens", "max_num_seqs", "release", "max_waiting", "max_in_flight", "max_body_mib"),
    *("max_held_mib", "idle_timeout_s", "tenant_header"),
    *("most_urgent_tier", "client_priority", "slo_ttft_ms", "slo_tpot_ms", "objectives"),
    *("tls_cert", "tls_key", "tls_client_ca", "engine_ca", *ACCESS_FILES),
    *("feedback_prompts", "drain_delay_s", "access_log"),
)


@dataclass(frozen=True, kw_only=True)
class ProxyConfig(ServiceAccess):
    """Run an OpenAI-compatible proxy that predicts output lengths, and sends priorities to the engine or
    queues requests itself. On SIGTERM it finishes the requests in flight; on SIGHUP it reads its options again."""

    INPUTS = (
        *("predictor", "shadow_predictor", *ACCESS_FILES),
        *("tls_cert", "tls_key", "tls_client_ca", "engine_ca"),
    )
    OUTPUTS = ("port_file", "feedback", "calibration_file", "session_file")
    SPELLINGS = (("served_model", "model"),)

    engine_url: str
    """URL of the engine: http://HOST:PORT, optionally with a path in front of /v1."""
    replicas: list[str] = field(default_factory=list)
    """URLs of further engines with the same model, for engine none: sessions stay on the one that has their context, and
    leave an engine that is down. Options of the engine and of its queue apply to each."""
    engine: Literal["vllm", "sglang", "dynamo", "llm-d", "none"] = "none"
    """Kind of engine; none (Ollama, llama.cpp server, ...): the proxy queues the requests itself."""
    predictor: str = "pretrained"
    """pretrained or tiny (shipped with tailcast), an artifact folder, or grpc://HOST:PORT (grpcs:// with TLS) of serve-predictor; none: no predictions."""
    policy: str | None = None
    """Scheduling policy: one of `simulate` that does not manage memory or batches, or package.module:Class.
    Default: bounded_shortest for engine none, otherwise tie."""
    policy_parameters: dict[str, float] = field(default_factory=dict)
    """Overrides of the policy's parameters."""
    aging_per_s: float = 0.0
    """Priority gain per second of waiting, in units of the policy's key; added to the policy's own aging."""
    resolution: float | None = None
    """Steps of the integer priority per unit of the policy's key; default: 1000, for dynamo 100."""
    max_num_seqs: int = 256
    """Maximum number of requests the engine runs concurrently; must match its configuration."""
    release: int = 4
    """For engine none: maximum number of concurrent requests to the engine, usually its slots."""
    engine_kv_tokens: int | None = None
    """Tokens that the engine's KV cache has memory for, for policies that use sessions; default: read from /metrics of vLLM and SGLang."""
    session_file: str | None = None
    """File that keeps sessions across restarts, and when they return, for policies that use sessions; default: none."""
    max_waiting: int = 10_000
    """For engine none: maximum number of queued requests; further requests get 429."""
    deadline_s: float = 0.1
    """Maximum seconds a request waits for its prediction; for engine none it never waits."""
    warm_up_s: float = 60.0
    """Maximum seconds to wait for the predictors at startup; then the proxy serves without them."""
    served_model: str | None = None
    """Served model name for the predictor, or "" to send none; default: `model` of the request."""
    default_max_tokens: int = 4096
    """max_tokens of requests that do not set it."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all IPv4 interfaces."""
    port: int = 8080
    """Port for clients; 0 selects a free port."""
    admin_port: int | None = None
    """Port for /metrics, /healthz and /readyz; default: none. They are not on the client port."""
    tls_cert: str | None = None
    """PEM file with the server certificate; enables TLS on both ports, together with tls_key."""
    tls_key: str | None = None
    """PEM file with the private key of tls_cert."""
    tls_client_ca: str | None = None
    """PEM file with the CA of client certificates, which the client port then demands; default: clients need none."""
    engine_ca: str | None = None
    """PEM file with the CA of engines at https://; default: those of the system."""
    reload_poll_s: float = 0.0
    """Seconds between checks for new certificates and tokens, which are followed by a reload; 0: only at SIGHUP."""
    port_file: str | None = None
    """File to write the port numbers to, one per line, when the proxy is ready; removed at shutdown."""
    max_body_mib: int = 16
    """Maximum request body in MiB; larger bodies get 413."""
    max_held_mib: int = 512
    """Maximum size in MiB of all request bodies in memory, parsed; further requests get 429."""
    max_in_flight: int = 4096
    """Maximum number of generation requests in flight, and of all other requests; further ones get 429."""
    request_timeout_s: float = 30.0
    """Timeout in seconds for request headers, for the request body, and for idle client connections."""
    idle_timeout_s: float = 600.0
    """Maximum seconds without data from the engine, before or during a response. Responses to GET, HEAD, OPTIONS and DELETE must begin within request_timeout_s."""
    engine_probe_s: float = 5.0
    """Seconds between probes (GET /health) of an engine that no request reaches; 0: probe only when /readyz is requested."""
    tenant_header: str = "x-tailcast-tenant"
    """Header with the tenant's name, for fair policies and the log; default tenant: a hash of the API key."""
    most_urgent_tier: int = 0
    """Most urgent tier that clients may declare; others get 400. Above 0, clients' hints are replaced."""
    client_priority: Literal["keep", "replace"] = "keep"
    """keep: a client's `priority` comes before the policy's key, and its other hints pass; replace: both are removed."""
    slo_ttft_ms: list[int] = field(default_factory=list)
    """For llm-d: target TTFT of each of the five tiers in milliseconds, most urgent first."""
    slo_tpot_ms: list[int] = field(default_factory=list)
    """For llm-d: target TPOT of each tier in milliseconds."""
    objectives: list[str] = field(default_factory=list)
    """For llm-d: name of the InferenceObjective of each tier."""
    online_calibration: bool | Literal["shared"] = True
    """Correct predicted lengths by finished outputs, see docs/online-calibration.md. shared: report the outputs to the service at `predictor`, which corrects the predictions of all its proxies."""
    calibration_file: str | None = None
    """File that keeps the state of online calibration across restarts; default: none."""
    feedback: str | None = None
    """Folder for the log of finished requests; default: none."""
    feedback_prompts: Literal["stored", "hashed"] = "hashed"
    """Whether to log the prompts (required for training) or only their SHA-256."""
    feedback_usage: bool | Literal["auto"] = "auto"
    """Request the token counts of streamed chat and text completions, and remove the usage event if the client did not request it (with vLLM, also its system_fingerprint). auto: for vllm, sglang, dynamo and llm-d, until the engine refuses it. Otherwise events are counted."""
    shadow_predictor: str | None = None
    """A second predictor, with the values of `predictor`, whose predictions are only logged."""
    drain_delay_s: float = 0.0
    """Seconds to keep serving after SIGTERM while /readyz returns 503."""
    drain_timeout_s: float = 600.0
    """Maximum seconds after SIGTERM to finish requests in flight."""
    access_log: bool = False
    """Log one line per request."""
    log_format: Literal["text", "json"] = "text"
    """Format of log lines: text, or one JSON object per line."""
    traces: bool = False
    """Export OpenTelemetry traces; the OTEL_* environment variables configure the exporter."""

    @property
    def urls(self) -> list[str]:
        """URLs of all engines."""
        return [self.engine_url, *self.replicas]

    def changed(self, other: ProxyConfig) -> list[str]:
        """Names of the options with another value in `other`."""
        names = [option.name for option in fields(self)]
        return [name for name in names if getattr(self, name) != getattr(other, name)]

    def __post_init__(self) -> None:
        check_http_url("engine_url", self.engine_url)
        for url in self.replicas:
            check_http_url("replicas", url)
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise InputError(
                "replicas", self.replicas, "URLs that differ from each other and from engine_url"
            )
        if self.replicas and self.engine != "none":
            allowed = "none with several engines: the proxy chooses among them while it holds the queues"
            raise InputError("engine", self.engine, allowed)
        if self.replicas and not self.engine_probe_s:
            raise InputError("engine_probe_s", 0.0, "> 0 with several engines, to find one that is back")
        if self.shadow_predictor is not None and self.feedback is None:
            raise InputError("shadow_predictor", self.shadow_predictor, "only together with feedback")
        check_ranges(self, **RANGES)
        check_tls(self)
        if self.engine_ca is not None and not any(url.lower().startswith("https:") for url in self.urls):
            raise InputError("engine_ca", self.engine_ca, "none without an engine at https://")
        if self.online_calibration == "shared":
            if not PredictorAddress.of(self.predictor, others="none, ").is_service:
                allowed = "shared with a predictor at grpc://HOST:PORT or grpcs://, or true or false"
                raise InputError("online_calibration", "shared", allowed)
            if self.calibration_file is not None:
                allowed = "none with shared calibration: the service has the file"
                raise InputError("calibration_file", self.calibration_file, allowed)
        for name in ("slo_ttft_ms", "slo_tpot_ms", "objectives"):
            values = getattr(self, name)
            if len(values) not in (0, len(LEVELS)):
                raise InputError(name, values, f"no entries, or {len(LEVELS)}, one for each urgency level")
        for value in (*self.slo_ttft_ms, *self.slo_tpot_ms):
            if value < 1:
                raise InputError("slo_ttft_ms, slo_tpot_ms", value, "integer milliseconds >= 1")
        for name in self.objectives:
            if not name.isascii() or not name.isprintable() or not name.strip():
                raise InputError("objectives", name, "names of printable ASCII characters")


def check_http_url(field: str, url: str) -> None:
    """Raises InputError unless it is an HTTP URL without credentials and query."""
    allowed = "http://HOST:PORT or https://HOST:PORT, optionally with a path"
    try:
        parsed = urlsplit(url)
        parsed.port  # noqa: B018  # raises
    except ValueError:
        raise InputError(field, url, allowed) from None
    if parsed.username is not None or parsed.password is not None:
        allowed += ", without user or password: clients send their own keys"
        raise InputError(field, url.partition("?")[0], allowed)
    allowed += ", without query"
    if parsed.scheme not in ("http", "https") or not parsed.hostname or parsed.query or parsed.fragment:
        raise InputError(field, url.partition("?")[0], allowed)
