"""Options of `tailcast-proxy`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from scheduler_core.errors import InputError
from scheduler_core.ranges import FINITE, INTEGERS, POSITIVE, check_ranges
from scheduler_core.urgency import LEVELS

PromptText = Literal["last", "conversation"]
#: Least and greatest value of options.
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("release", "max_waiting", "max_num_seqs", "max_in_flight"), (1, INTEGERS)),
    **dict.fromkeys(("resolution", "connect_timeout_s", "idle_timeout_s"), (POSITIVE, FINITE)),
    **dict.fromkeys(("aging_per_s", "drain_delay_s", "drain_timeout_s"), (0.0, FINITE)),
    **dict.fromkeys(("warm_up_s", "request_timeout_s"), (POSITIVE, 3600)),
    **dict.fromkeys(("default_tier", "most_urgent_tier"), (0, len(LEVELS) - 1)),
    **dict.fromkeys(("port", "admin_port"), (0, 65535)),
    "deadline_s": (POSITIVE, 60),
    "max_body_mib": (1, 1024),
    "default_max_tokens": (1, 2**31 - 1),
    "feedback_segment_mib": (1, 2**20),
}


@dataclass(frozen=True, kw_only=True)
class ProxyConfig:
    """Proxies the OpenAI API in front of an engine: predicts the output length of each request, and sends it to the engine as a priority, or holds the queue where the engine knows none. SIGTERM finishes the requests in flight."""

    INPUTS = ("predictor", "shadow_predictor")
    OUTPUTS = ("port_file", "feedback", "calibration_file")

    engine_url: str
    """URL of the engine: http://HOST:PORT, maybe with a path in front of /v1."""
    engine: Literal["vllm", "sglang", "dynamo", "llm-d", "none"] = "none"
    """Kind of engine; none (Ollama, llama.cpp server, ...): the proxy holds the queue itself."""
    predictor: str = "pretrained"
    """pretrained or tiny (they come with tailcast), an artifact folder, or grpc://HOST:PORT of serve-predictor; none: no predictions."""
    policy: str | None = None
    """Order of the requests: a policy of `simulate` that leaves memory and batches to the engine, or package.module:Class.
    Unset: bounded_shortest where the proxy holds the queue (engine none), else tie, whose key can be sent once."""
    policy_parameters: dict[str, float] = field(default_factory=dict)
    """Overrides of the policy's parameters."""
    aging_per_s: float = 0.0
    """Gain of a request per second of waiting, in the policy's own unit, in addition to the policy's own aging."""
    resolution: float = 1000.0
    """Integers per unit of the policy's key in an engine's priority."""
    max_num_seqs: int = 256
    """Requests the engine runs at a time (its own setting): beyond them requests queue there."""
    release: int = 4
    """With engine none: requests let through at a time; the engine's number of slots."""
    max_waiting: int = 10_000
    """With engine none: requests held; further ones are refused with 429."""
    deadline_s: float = 0.1
    """Seconds a request waits for its prediction; then it goes on without. With engine none a request never waits for it."""
    warm_up_s: float = 60.0
    """Longest wait for the predictors at the start, in seconds; then the proxy serves without them."""
    without_prediction: Literal["policy", "nothing"] = "policy"
    """Hint of a request without prediction: the policy's key for unknown lengths, or nothing, which most engines take for priority 0."""
    prompt_text: PromptText = "last"
    """Text the artifact was trained on: the last user message, or the whole conversation."""
    served_model: str | None = None
    """Name of the engine's model in the artifact, or "" to send none; default: the request's own `model`."""
    default_max_tokens: int = 4096
    """max_tokens assumed where a request has none."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all IPv4 interfaces."""
    port: int = 8080
    """Port for clients; 0 takes a free one."""
    admin_port: int | None = None
    """Port for /metrics, /healthz and /readyz; default: none. On the other port all paths are the engine's."""
    port_file: str | None = None
    """File that gets the port numbers, one a line, once the proxy is ready; removed at the end."""
    max_body_mib: int = 16
    """Largest body of a request in MiB; larger ones get 413."""
    max_in_flight: int = 4096
    """Requests in flight; further ones that may make the engine generate get 429."""
    request_timeout_s: float = 30.0
    """Seconds in which a client has to send a request's headers, and then its body; idle client connections are closed after them."""
    connect_timeout_s: float = 5.0
    """Seconds to connect to the engine."""
    idle_timeout_s: float = 600.0
    """Longest silence of the engine, before a response and inside one, in seconds."""
    tenant_header: str = "x-tailcast-tenant"
    """Header with the tenant's name, for fair policies and the log; without it a hash of the API key is the name."""
    tier_header: str = "x-tailcast-tier"
    """Header with the declared urgency, 0 (most urgent) to 4."""
    default_tier: int = 2
    """Urgency of requests that declare none."""
    most_urgent_tier: int = 0
    """Most urgent tier that clients may declare; others get 400. Above 0 a client's own hints are replaced."""
    client_priority: Literal["keep", "replace"] = "keep"
    """A client's own hints to the engine, such as `priority`: kept, or replaced by the policy's."""
    slo_ttft_ms: list[int] = field(default_factory=list)
    """For llm-d: target of the time to the first token for each of the five tiers, the most urgent first."""
    slo_tpot_ms: list[int] = field(default_factory=list)
    """For llm-d: target of the time per output token for each tier."""
    objectives: list[str] = field(default_factory=list)
    """For llm-d: name of the InferenceObjective of each tier."""
    online_calibration: bool = True
    """Correct the predicted lengths of each served model by the outputs that have ended, see docs/online-calibration.md. Streams without token counts do not count: see feedback_usage."""
    calibration_file: str | None = None
    """JSON file that keeps what online calibration has learned over restarts; default: none."""
    feedback: str | None = None
    """Folder for the log of finished requests; default: none."""
    feedback_prompts: Literal["stored", "hashed"] = "hashed"
    """Whether the log has the prompts (needed for training) or only their SHA-256."""
    feedback_segment_mib: int = 64
    """Size at which a segment of the log ends."""
    feedback_usage: bool = False
    """Requests token counts of streams from the engine, and removes the event with them where the client has not requested it; with vLLM the last event then lacks its system_fingerprint. Default: streams pass unchanged, and the events of those without counts are counted, which neither training nor drift uses."""
    shadow_predictor: str | None = None
    """A second predictor, as `predictor`, queried for the log only."""
    drain_delay_s: float = 0.0
    """Seconds after SIGTERM in which the proxy goes on to serve while /readyz gives 503."""
    drain_timeout_s: float = 600.0
    """Seconds after SIGTERM for the requests in flight."""
    access_log: bool = False
    """A log line for each request."""
    log_format: Literal["text", "json"] = "text"
    """Log lines for people, or one JSON object a line."""

    def __post_init__(self) -> None:
        if not _is_http_url(self.engine_url):
            allowed = "http://HOST:PORT or https://HOST:PORT, maybe with a path"
            raise InputError("engine_url", self.engine_url, allowed)
        if self.shadow_predictor is not None and self.feedback is None:
            raise InputError("shadow_predictor", self.shadow_predictor, "only together with feedback")
        check_ranges(self, **RANGES)
        for name in ("slo_ttft_ms", "slo_tpot_ms", "objectives"):
            values = getattr(self, name)
            if len(values) not in (0, len(LEVELS)):
                raise InputError(name, values, f"no entry, or {len(LEVELS)}: one for each level of urgency")
        for value in (*self.slo_ttft_ms, *self.slo_tpot_ms):
            if value < 1:
                raise InputError("slo_ttft_ms, slo_tpot_ms", value, "integer milliseconds >= 1")
        for name in self.objectives:
            if not name.isascii() or not name.isprintable() or not name.strip():
                raise InputError("objectives", name, "names of printable ASCII characters")


def _is_http_url(url: str) -> bool:
    try:
        parsed = urlsplit(url)
        parsed.port  # noqa: B018  # raises
    except ValueError:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.hostname) and not parsed.query
