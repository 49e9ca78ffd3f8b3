"""Options of a plan."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from scheduler_core.errors import InputError
from scheduler_core.policies import policy_class
from scheduler_core.prediction.service_access import ServiceAccess
from scheduler_core.ranges import BELOW_ONE, INTEGERS, POSITIVE, check_choice, check_ranges
from scheduler_core.routing import ROUTERS
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.shell.json_text import read_json_object
from scheduler_core.simulator.clients import ClientPlan
from scheduler_core.simulator.config import MAX_REPLICAS, MAX_SEEDS, SimulationConfig
from scheduler_core.simulator.planning.choices import Choice, parse_prices
from scheduler_core.simulator.planning.targets import COST, Target, parse_targets
from scheduler_core.simulator.step_time.deployment import find_gpu
from scheduler_core.simulator.sweep import MAX_PROCESSES
from scheduler_core.simulator.trace import MAX_TIME_S

#: Devices of a replica to choose from.
_DEVICES = (1, 2, 4, 8)
#: Scenarios of what_if.
SCENARIOS = ("traffic", "outputs", "failed_replicas", "restart_s")


@dataclass(frozen=True, kw_only=True)
class PlanConfig(ServiceAccess):
    """Targets, what to choose from, and how long to search."""

    target: list[str] | str
    """Targets, separated by commas: METRIC.STATISTIC<SECONDS of ttft_s, tpot_s, itl_s, e2e_s with mean, p50, p90, p95, p99, p999
    or max, such as ttft_s.p99<2; goodput>0.99 (fraction of requests that meet the SLOs below); cost_per_million_tokens<1.5
    (output tokens)."""
    gpus: dict[str, float] | str
    """Kinds of GPUs with prices per hour, such as h100-80gb=2.5,l40s-48gb=0.9; see scheduler_core/simulator/step_time."""
    model: str | None = None
    """Served model: a name such as llama-3-8b, or the path of a Hugging Face config.json."""
    step_time_parameters: str | None = None
    """Result of `simulate calibrate` (JSON), which is used instead of the model's data sheet; gpus then has the one kind that was measured,
    with the price of a replica."""
    num_kv_blocks: int | None = None
    """Blocks of 16 tokens in the KV cache of a replica. Unset: what fits into the memory, or what the calibration measured."""
    weights: str | None = None
    """Data type of the weights: bf16, fp8, int4. Unset: that of the model's config."""
    kv_cache: str = "bf16"
    """Data type of keys and values: bf16, fp8."""
    memory_utilization: float = 0.9
    """Fraction of the GPU memory that the engine uses."""
    tensor_parallel: list[int] = field(default_factory=list)
    """Numbers of GPUs of a replica. Empty: 1, 2, 4 and 8."""
    max_num_seqs: list[int] = field(default_factory=lambda: [256, 128])
    """Maximum numbers of requests in a step."""
    max_num_batched_tokens: list[int] = field(default_factory=lambda: [8192, 2048])
    """Maximum numbers of tokens in a step."""
    prefix_caching: list[bool] = field(default_factory=lambda: [True])
    """Whether prompts with the same start share the KV cache."""
    orders: list[str] = field(default_factory=lambda: ["fcfs", "bounded_shortest"])
    """Orders of the queue, see scheduler_core/policies. Those that use lengths need prompts in the log, for the predictor."""
    predictor: str = "tiny"
    """Predictor of the lengths for the orders: tiny or pretrained (shipped), an artifact folder, or oracle (true lengths)."""
    routers: list[str] = field(default_factory=list)
    """Routers in front of several replicas. Empty: jsq (least requests), and endpoint_picker (llm-d) if prompts share
    prefixes."""
    prefill_fractions: list[float] = field(default_factory=lambda: [0.0])
    """Fractions of the replicas that only process prompts (disaggregated serving); 0: none. The others
    are tried for choices that miss the targets without, and where fewer replicas may then be enough."""
    ttft_slo_s: float | None = None
    """Goodput: seconds to the first token of requests without their own SLO."""
    tbt_slo_s: float | None = None
    """Goodput: longest gap between two tokens in seconds."""
    ttlt_slo_s: float | None = None
    """Goodput: seconds to the last token."""
    what_if: list[str] | str = ""
    """Scenarios, separated by commas: traffic=1.5 (times the rate), outputs=2 (times the output lengths), failed_replicas=1 (all
    the time). Those joined by + hold together, as in traffic=1.5+failed_replicas=1. With failed_replicas=1+restart_s=120 the replica
    fails at the busiest time, loses its requests and caches, and runs again after 120 s."""
    min_replicas: int | None = None
    """Also simulate auto-scaling from this number of replicas on (Kubernetes, KEDA), which costs what runs. Unset: a fixed
    number."""
    startup_s: float = 120.0
    """Auto-scaling: seconds until a new replica serves: node, image, weights, compilation."""
    timeout_s: float | None = None
    """Seconds without a token, the first one or between two, after which clients give up and the engine aborts their request. Those
    that give up for good miss every target. Unset: they wait."""
    client_retries: int = 0
    """How often clients that gave up send their request again, at once; 2 is the default of OpenAI's clients."""
    rate: float | None = None
    """Requests per second, for logs without times of arrival: sessions start at random."""
    max_replicas: int = 1000
    """Largest number of replicas to try."""
    max_seeds: int = 8
    """Maximum number of resampled logs, at least 4, after which the interval of the number of replicas is given."""
    max_requests: int = 10_000
    """Number of requests above which only the busiest part of the log is simulated."""
    seed: int = 0
    """Seed of drawn arrivals."""
    workers: int | None = None
    """Processes that simulate. Unset: one for each core."""

    def __post_init__(self) -> None:
        targets, prices = self.targets, self.prices
        check_ranges(
            self, max_replicas=(1, MAX_REPLICAS), max_seeds=(4, MAX_SEEDS), max_requests=(100, 10**8)
        )
        check_ranges(self, workers=(1, MAX_PROCESSES), rate=(POSITIVE, 1e9), seed=(0, 2**63 - 1))
        check_ranges(self, memory_utilization=(POSITIVE, 1), num_kv_blocks=(1, 2**40))
        slos = ("ttft_slo_s", "tbt_slo_s", "ttlt_slo_s")
        check_ranges(self, timeout_s=(POSITIVE, MAX_TIME_S), startup_s=(0, MAX_TIME_S))
        check_ranges(self, client_retries=(0, INTEGERS))
        if self.client_retries and self.timeout_s is None:
            raise InputError("client_retries", self.client_retries, "0 without timeout_s")
        check_ranges(self, min_replicas=(1, self.max_replicas))
        check_ranges(self, **dict.fromkeys(slos, (POSITIVE, MAX_TIME_S)))
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "prefix_caching",
            "orders",
            "prefill_fractions",
        ):
            if not getattr(self, name):
                raise InputError(name, [], "at least one value")
        for name in ("tensor_parallel", "max_num_seqs", "max_num_batched_tokens"):
            for value in getattr(self, name):
                if not 1 <= value <= 2**31:
                    raise InputError(name, value, "integers > 0")
        for fraction in self.prefill_fractions:
            if not 0 <= fraction <= BELOW_ONE:
                raise InputError("prefill_fractions", fraction, "numbers from 0 to below 1")
        for router in self.routers:
            check_choice("routers", router, [name for name in ROUTERS if name != "disaggregated"])
        for order in self.orders:
            policy_class(order)
        if self.model is None and self.step_time_parameters is None:
            raise InputError("model, step_time_parameters", (None, None), "at least one of them")
        if self.step_time_parameters is None:
            for gpu in prices:
                find_gpu(gpu)
        elif len(prices) > 1:
            raise InputError("gpus", list(prices), "one kind, with step_time_parameters (a calibration)")
        if any(target.at_least for target in targets) and not any(getattr(self, name) for name in slos):
            raise InputError("goodput", None, "also ttft_slo_s, tbt_slo_s or ttlt_slo_s, which it counts")
        self.scenarios()

    @property
    def targets(self) -> tuple[Target, ...]:
        return parse_targets(_words(self.target))

    @property
    def latency_targets(self) -> tuple[Target, ...]:
        """Those that simulations are compared with."""
        return tuple(target for target in self.targets if target.metric != COST)

    @property
    def max_cost(self) -> float | None:
        """Highest cost per million output tokens."""
        return next((target.bound for target in self.targets if target.metric == COST), None)

    @property
    def prices(self) -> dict[str, float]:
        return parse_prices(self.gpus)

    @property
    def num_workers(self) -> int:
        if self.workers is not None:
            return self.workers
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def scenarios(self) -> dict[str, dict[str, float]]:
        """The factors (numbers of failed replicas) of each scenario, by its text."""
        scenarios = {}
        for text in _words(self.what_if):
            scenario: dict[str, float] = {}
            for part in text.split("+"):
                name, _, value = part.partition("=")
                allowed = f"NAME=NUMBER with {', '.join(SCENARIOS)}, such as traffic=1.5"
                check_choice("what_if", name.strip(), SCENARIOS)
                try:
                    scenario[name.strip()] = float(value)
                except ValueError as error:
                    raise InputError("what_if", text, allowed) from error
                failed = name.strip() == "failed_replicas"
                low, high = (1.0, float(self.max_replicas)) if failed else (0.01, 100.0)
                if name.strip() == "restart_s":
                    high = MAX_TIME_S
                if not low <= scenario[name.strip()] <= high or (failed and float(value) % 1):
                    raise InputError("what_if", text, f"{name.strip()} from {low:g} to {high:g}")
            if "restart_s" in scenario and "failed_replicas" not in scenario:
                raise InputError("what_if", text, "restart_s with failed_replicas")
            scenarios[text] = scenario
        return scenarios

    def base(self, trace: str, *, has_predictions: bool) -> SimulationConfig:
        """The simulation of the log in a file, without a choice. `InputError` if the size of the KV cache is neither an option
        nor in the calibration."""
        clients = ClientPlan(timeout_s=self.timeout_s, max_retries=self.client_retries)
        config = SimulationConfig(trace=trace, policy="fcfs", clients=clients)
        num_blocks = self.num_kv_blocks
        if num_blocks is None and self.step_time_parameters is not None:
            num_blocks = _measured_blocks(self.step_time_parameters)
        if num_blocks is not None:
            config = replace(config, scheduler=replace(config.scheduler, num_kv_blocks=num_blocks))
        if self.predictor == "oracle" or has_predictions:
            config = replace(config, predictor="oracle" if self.predictor == "oracle" else "trace")
        if self.step_time_parameters is not None:
            return replace(config, step_time_parameters=self.step_time_parameters)
        parameters = {
            "model": self.model,
            "weights": self.weights,
            "kv_cache": self.kv_cache,
            "memory_utilization": self.memory_utilization,
        }
        return replace(config, step_time_model="roofline", step_time_parameters=parameters)

    def hardware(self) -> list[Choice]:
        """Each kind of GPU with each number of them, with the first of each setting."""
        devices = self.tensor_parallel or (_DEVICES if self.step_time_parameters is None else (1,))
        return [
            Choice(
                gpu=gpu,
                devices=num,
                max_num_seqs=self.max_num_seqs[0],
                max_num_batched_tokens=self.max_num_batched_tokens[0],
                prefix_caching=self.prefix_caching[0],
                order=self.orders[0],
                router=(self.routers or ["jsq"])[0],
            )
            for gpu in self.prices
            for num in devices
        ]

    def price(self, choice: Choice, num_replicas: int = 1) -> float:
        """Price of replicas per hour."""
        return self.prices[choice.gpu] * choice.devices * num_replicas


def _measured_blocks(path: str) -> int:
    """Blocks of the KV cache in a result of `simulate calibrate`; `InputError` if it has none."""
    num_tokens = read_json_object(Path(path), "step_time_parameters").get("kv_tokens")
    if not isinstance(num_tokens, int) or num_tokens < SchedulerConfig.kv_block_tokens:
        allowed = f"the blocks of the engine's KV cache, whose size is not in {path}"
        raise InputError("num_kv_blocks", None, allowed)
    return num_tokens // SchedulerConfig.kv_block_tokens


def _words(texts: Sequence[str] | str) -> list[str]:
    words = texts.split(",") if isinstance(texts, str) else list(texts)
    return [word.strip() for word in words if word.strip()]
