"""Command `tailcast-proxy`: an OpenAI-compatible proxy before an engine, until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from scheduler_core.command import run_command
from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.files import atomic_file, remove_output, writable_target

if TYPE_CHECKING:
    from predictors.proxy.forecast import Responder
    from predictors.proxy.server import ProxyServer
    from predictors.proxy.tenants import TenantBook

logger = logging.getLogger(__name__)
#: Arrivals count from here (2026-01-01 UTC), so that proxies, and a proxy and its successor, have one order.
ORIGIN_S = 1_767_225_600.0


@dataclass(frozen=True, kw_only=True)
class ProxyConfig:
    """Proxies the OpenAI API before an engine: predicts how long each answer will be, tells the engine, or holds the queue where it cannot be told. SIGTERM answers what is inside."""

    INPUTS = ("predictor", "shadow_predictor", "tenants", "served_tokenizer")
    OUTPUTS = ("port_file", "feedback")

    engine_url: str
    """Where the engine is: http://HOST:PORT, maybe with a path in front of /v1."""
    engine: Literal["vllm", "sglang", "dynamo", "llm-d", "none"] = "none"
    """What the engine understands; none (Ollama, llama.cpp server, ...): the proxy holds the queue itself."""
    predictor: str | None = None
    """grpc://HOST:PORT of serve-predictor, or an artifact folder to run in this process; default: none."""
    policy: str = "tie"
    """Order of the requests; any policy of `simulate`."""
    policy_parameters: dict[str, float] = field(default_factory=dict)
    """Parameters of the policy that shall not have their default."""
    aging_per_s: float = 0.0
    """By how much of the policy's own unit a request gains for each second of waiting, beside what the policy does itself."""
    resolution: float = 1000.0
    """Integers per unit of the policy's key in an engine's priority."""
    max_num_seqs: int = 256
    """Requests the engine works on at a time (its own setting): beyond them requests queue there."""
    release: int = 4
    """Of engine none: requests let through at a time; the engine's number of slots."""
    max_waiting: int = 10_000
    """Of engine none: requests held; further ones are refused with 429."""
    deadline_s: float = 0.1
    """Seconds a request waits for its prediction; then it goes on without. Of engine none requests wait for their turn only."""
    warm_up_s: float = 60.0
    """Longest wait for the predictors at the start, in seconds; then the proxy serves without them."""
    without_prediction: Literal["policy", "nothing"] = "policy"
    """What the engine is told of a request without prediction: the policy's key for unknown lengths, or nothing, which most engines take for priority 0."""
    reads: Literal["last", "conversation"] = "last"
    """What the artifact was trained on: the last user message, or the whole conversation."""
    served_model: str | None = None
    """Name by which the artifact knows the engine's model, or "" to tell none; default: the request's own `model`."""
    default_max_tokens: int = 4096
    """Cap on answers that is assumed where a request has none."""
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
    max_inside: int = 4096
    """Requests inside the proxy; further ones that may make the engine generate get 429."""
    request_timeout_s: float = 30.0
    """Seconds in which a client has to send a request's headers, and then its body; idle connections of clients are closed after them."""
    connect_timeout_s: float = 5.0
    """Seconds to connect to the engine."""
    idle_timeout_s: float = 600.0
    """Longest silence of the engine in seconds."""
    tenant_header: str = "x-tailcast-tenant"
    """Header with the tenant's name; without it the API key tells tenants apart, by its hash."""
    tenant_max_concurrent: int | None = None
    """Completions of one tenant at a time; default: no limit."""
    tenant_rate_per_s: float | None = None
    """Completions of one tenant per second in the long run; default: no limit."""
    tenant_burst: int = 10
    """Completions of one tenant at once after a pause, where there is a rate."""
    tenants: str | None = None
    """YAML file with limits by tenant name, and a default for the others; see docs/proxy.md. What its default leaves out is as the three options above."""
    tier_header: str = "x-tailcast-tier"
    """Header with the declared urgency, 0 (most urgent) to 4."""
    default_tier: int = 2
    """Urgency of who declares none."""
    most_urgent_tier: int = 0
    """Most urgent tier that clients may declare; others get 400."""
    client_priority: Literal["keep", "replace"] = "keep"
    """A client's own hints to the engine, such as `priority`: kept, or replaced by the policy's."""
    lowest_priority: int | None = None
    """Least priority that a client may send; default: any."""
    highest_priority: int | None = None
    """Greatest priority that a client may send; default: any."""
    slo_ttft_ms: list[int] = field(default_factory=list)
    """Of llm-d: target of the time to the first token for each of the five tiers, the most urgent first."""
    slo_tpot_ms: list[int] = field(default_factory=list)
    """Of llm-d: target of the time per output token for each tier."""
    objectives: list[str] = field(default_factory=list)
    """Of llm-d: name of the InferenceObjective of each tier."""
    feedback: str | None = None
    """Folder for the log of finished requests; default: none."""
    feedback_prompts: Literal["stored", "hashed"] = "hashed"
    """Whether the log has the prompts (needed for training) or only their SHA-256."""
    feedback_fsync: Literal["always", "interval", "never"] = "interval"
    """When the log is forced to the disk."""
    feedback_fsync_s: float = 1.0
    """Seconds between two of these, where it is interval."""
    feedback_segment_mib: int = 64
    """Size at which a segment of the log ends."""
    feedback_usage: bool = False
    """Asks the engine for token counts of streams, and takes them out again where the client has not asked; with vLLM the last event then lacks its system_fingerprint. Default: streams pass untouched."""
    served_tokenizer: str | None = None
    """tokenizer.json of the served model: counts streams that carry no counts; default: their events are counted, which neither training nor drift uses."""
    shadow_predictor: str | None = None
    """A second predictor, as `predictor`: asked beside the first, only for the log."""
    drain_delay_s: float = 0.0
    """Seconds that SIGTERM goes on to serve while /readyz says 503."""
    drain_timeout_s: float = 600.0
    """Seconds that SIGTERM leaves to the requests inside."""
    access_log: bool = False
    """A log line for each request."""
    log_format: Literal["text", "json"] = "text"
    """Log lines for people, or one JSON object a line."""

    def __post_init__(self) -> None:
        if self.shadow_predictor is not None and self.feedback is None:
            raise InputError("shadow_predictor", self.shadow_predictor, "only together with feedback")
        if not 0 < self.warm_up_s <= 3600:
            raise InputError("warm_up_s", self.warm_up_s, "seconds in (0, 3600]")
        if not 1 <= self.max_body_mib <= 1024:
            raise InputError("max_body_mib", self.max_body_mib, "1 to 1024")
        if not 1 <= self.default_max_tokens < 2**31:
            raise InputError("default_max_tokens", self.default_max_tokens, "1 to 2147483647")
        if not 1 <= self.feedback_segment_mib <= 2**20:
            raise InputError("feedback_segment_mib", self.feedback_segment_mib, "1 to 1048576")


def main(args: Sequence[str] | None = None) -> int:
    """Console script `tailcast-proxy`; returns the exit code."""
    return run_command(
        "tailcast-proxy", ProxyConfig, serve, positionals=("engine_url",), extra="serve", args=args
    )


def serve(config: ProxyConfig) -> int:
    """Serves until SIGTERM or SIGINT; requests inside are answered first."""
    try:
        import aiohttp
        import prometheus_client

        del aiohttp, prometheus_client
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "aiohttp", "serve") from error
    from predictors.service.logs import set_up_logs
    from predictors.service.loop import run

    port_file = None if config.port_file is None else writable_target(config.port_file, "port_file")
    set_up_logs(config.log_format)
    run(_serve(config, build_proxy(config), port_file))
    logger.info("stopped")
    return 0


def build_proxy(config: ProxyConfig) -> ProxyServer:
    """The proxy that `config` asks for; nothing is bound or connected yet.

    Raises:
        InputError: An option is outside its range.
    """
    from predictors.proxy.engines import LlmDLevels, make_engine
    from predictors.proxy.feedback_log import FeedbackLog
    from predictors.proxy.forecast import Forecaster
    from predictors.proxy.handling import Completions
    from predictors.proxy.holding import HoldQueue
    from predictors.proxy.lengths import LengthCounter
    from predictors.proxy.metrics import ProxyMetrics
    from predictors.proxy.order import SentOrder, aged_policy
    from predictors.proxy.recording import Recorder
    from predictors.proxy.relay import EngineAddress, Relay
    from predictors.proxy.rules import ClientRules
    from predictors.proxy.server import PortSettings, ProxyServer
    from predictors.proxy.tenants import Tenants

    metrics = ProxyMetrics()
    clock = RunningClock()
    settings = PortSettings(
        host=config.host,
        port=config.port,
        admin_port=config.admin_port,
        max_body_bytes=config.max_body_mib * 2**20,
        max_inside=config.max_inside,
        tenant_header=config.tenant_header,
        request_timeout_s=config.request_timeout_s,
        drain_delay_s=config.drain_delay_s,
        drain_timeout_s=config.drain_timeout_s,
        access_log=config.access_log,
    )
    levels = LlmDLevels(
        slo_ttft_ms=tuple(config.slo_ttft_ms),
        slo_tpot_ms=tuple(config.slo_tpot_ms),
        objectives=tuple(config.objectives),
    )
    engine = make_engine(config.engine, config.resolution, levels)
    policy = aged_policy(config.policy, config.policy_parameters, config.aging_per_s)
    order = queue = None
    book = _tenant_book(config)
    if engine is None:
        queue = HoldQueue(
            policy, max_running=config.release, max_waiting=config.max_waiting, clock=clock, book=book
        )
    else:
        order = SentOrder(config.policy, policy, config.max_num_seqs)
    address = EngineAddress(
        url=config.engine_url,
        connect_timeout_s=config.connect_timeout_s,
        idle_timeout_s=config.idle_timeout_s,
    )
    rules = ClientRules(
        tier_header=config.tier_header,
        default_tier=config.default_tier,
        most_urgent_tier=config.most_urgent_tier,
        client_priority=config.client_priority,
        lowest_priority=config.lowest_priority,
        highest_priority=config.highest_priority,
    )
    forecasters = [Forecaster(_predictor(config.predictor, "predictor"), config.deadline_s)]
    rival = None
    if config.shadow_predictor is not None:
        rival = Forecaster(_predictor(config.shadow_predictor, "shadow_predictor"), 10.0)
        forecasters.append(rival)
    tenants = Tenants(book, time.monotonic, metrics)
    recorder = None
    if config.feedback is not None:
        counter = LengthCounter(config.served_tokenizer)
        log = FeedbackLog(
            config.feedback,
            segment_bytes=config.feedback_segment_mib * 2**20,
            fsync=config.feedback_fsync,
            fsync_s=config.feedback_fsync_s,
            counted=lambda outcome: metrics.records.labels(outcome).inc(),
        )
        recorder = Recorder(
            log=log,
            counter=counter,
            metrics=metrics,
            prompts=config.feedback_prompts,
            usage=config.feedback_usage,
            rival=rival,
        )
    completions = Completions(
        relay=Relay(address, settings.max_body_bytes, settings.request_timeout_s),
        forecaster=forecasters[0],
        engine=engine,
        order=order,
        queue=queue,
        rules=rules,
        book=book,
        recorder=recorder,
        metrics=metrics,
        clock=clock,
        reads=config.reads,
        served_model=config.served_model,
        default_max_tokens=config.default_max_tokens,
        sends_unpredicted=config.without_prediction == "policy",
    )
    return ProxyServer(
        completions, tenants, settings, forecasters=forecasters, recorder=recorder, metrics=metrics
    )


class RunningClock:
    """Seconds since `ORIGIN_S`: the system's time when made, and from there on monotonic."""

    def __init__(self) -> None:
        self._offset_s = time.time() - ORIGIN_S - time.monotonic()

    def __call__(self) -> float:
        return self._offset_s + time.monotonic()


def _tenant_book(config: ProxyConfig) -> TenantBook:
    from predictors.proxy.tenant_file import read_tenants
    from predictors.proxy.tenants import TenantBook, TenantLimits

    default = TenantLimits(
        max_concurrent=config.tenant_max_concurrent,
        rate_per_s=config.tenant_rate_per_s,
        burst=config.tenant_burst,
    )
    if config.tenants is None:
        return TenantBook(default=default)
    book = read_tenants(config.tenants, default)
    if config.engine != "none" and book.needs_queue is not None:
        allowed = f"none with engine {config.engine}, which holds the queue: only engine none leaves it to the proxy"
        raise InputError(f"tenants, limit {book.needs_queue}", config.tenants, allowed)
    return book


def _predictor(place: str | None, field: str) -> Responder | None:
    from predictors.client import connect, load

    if place is None:
        return None
    scheme, separator, address = place.partition("://")
    if separator and scheme == "grpc":
        return connect(address)
    if separator or not Path(place).is_dir():
        raise InputError(field, place, "grpc://HOST:PORT, or an artifact folder")
    return load(place)


async def _serve(config: ProxyConfig, server: ProxyServer, port_file: Path | None) -> None:
    stop = asyncio.Event()
    for name in ("SIGTERM", "SIGINT"):
        try:
            asyncio.get_running_loop().add_signal_handler(getattr(signal, name), stop.set)
        except NotImplementedError:  # Windows: Ctrl-C ends asyncio.run by itself
            break
    try:
        port, admin = await server.start(config.warm_up_s)
        if port_file is not None:
            with atomic_file(port_file) as temporary:
                temporary.write_text(f"{port}\n" + ("" if admin is None else f"{admin}\n"), encoding="ascii")
        probes = "" if admin is None else f", probes and metrics on {config.host}:{admin}"
        logger.info("ready on %s:%d before %s%s", config.host, port, config.engine_url, probes)
        await stop.wait()
        logger.info("draining %d requests", server.num_inside)
    finally:
        if port_file is not None:
            remove_output(port_file)
        await server.stop()


if __name__ == "__main__":
    raise SystemExit(main())
