"""Description of a workload (requests, classes, tiers, conversations, agents), and traces drawn from it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.ranges import FINITE, POSITIVE, check_choice, check_ranges
from scheduler_core.request import MAX_TIERS, Segment
from scheduler_core.simulator.content import session_content
from scheduler_core.simulator.trace import MAX_REQUESTS, MAX_TIME_S, MAX_TOKENS, Trace, TraceRequest
from scheduler_core.simulator.workloads.agents import Agents
from scheduler_core.simulator.workloads.arrivals import Arrivals, at_rate, check_rate
from scheduler_core.simulator.workloads.lengths import IntArray, Lengths, TokenDistribution, read_lengths
from scheduler_core.statistics import FloatArray

#: Fields of a class that are copied to its requests.
_CLASS_FIELDS = ("tenant", "category", "priority", "ttft_slo_s", "tbt_slo_s", "ttlt_slo_s")
Mix = Literal["uniform", "gaussian", "gaussian_released", "enterprise"]
_ENTERPRISE = {
    1: (1.0,), 2: (0.10, 0.90), 3: (0.10, 0.30, 0.60), 4: (0.10, 0.15, 0.15, 0.60), 5: (0.10, 0.30, 0.50, 0.08, 0.02)
}  # fmt: skip
_GAUSSIAN_RELEASED = {2: (0.3, 0.7), 3: (0.15, 0.70, 0.15), 5: (0.05, 0.2, 0.5, 0.2, 0.05)}


def tier_weights(mix: str, num_tiers: int) -> FloatArray:
    """Fraction of requests of each tier, most urgent first; shape [K], with sum 1 (multi-tier paper, section 4.2).

    - uniform: 1/K each.
    - gaussian: as described in the paper, a normal density around the middle tier with standard deviation K/4.
    - gaussian_released: as in its code, fixed fractions for K = 2, 3, 5, else exp(-2 d^2 / K) at distance d from the middle.
    - enterprise: the fractions of its code for K = 3, 4, 5; for more tiers, as described in the paper, 10 % for the first
      tier, 70 % for the middle ones, and 20 % for the last.
    """
    check_choice("mix", mix, get_args(Mix))
    if not 1 <= num_tiers <= MAX_TIERS:
        raise InputError("num_tiers", num_tiers, f"integers from 1 to {MAX_TIERS}")
    distance = np.arange(num_tiers) - (num_tiers - 1) / 2
    if mix == "uniform":
        weights = np.ones(num_tiers)
    elif mix == "gaussian":
        weights = np.exp(-0.5 * (distance / (num_tiers / 4)) ** 2)
    elif mix == "gaussian_released":
        fixed = _GAUSSIAN_RELEASED.get(num_tiers)
        weights = np.exp(-2 * distance**2 / num_tiers) if fixed is None else np.array(fixed)
    else:
        middle = (0.70 / max(1, num_tiers - 2),) * (num_tiers - 2)
        weights = np.array(_ENTERPRISE.get(num_tiers, (0.10, *middle, 0.20)))
    return np.asarray(weights / weights.sum())


@dataclass(frozen=True, kw_only=True)
class RequestClass:
    """One class of requests."""

    weight: float = 1.0
    """Relative weight; the fraction of requests is the weight divided by the sum of all weights."""
    tenant: str = ""
    """User or group of users, such as paying or free."""
    category: str = ""
    """Kind of work, such as reasoning or chat."""
    tier: int | None = None
    """Declared urgency, 0 = most urgent. Unset: drawn from the workload's tiers, or 2."""
    priority: int = 0
    """Declared priority, smaller first."""
    ttft_slo_s: float | None = None
    """Target of the time to the first token."""
    tbt_slo_s: float | None = None
    """Target of the time between two tokens."""
    ttlt_slo_s: float | None = None
    """Target of the time to the last token."""
    lengths: Lengths | None = None
    """Lengths of this class. Unset: those of the workload."""

    def __post_init__(self) -> None:
        check_ranges(self, weight=(POSITIVE, FINITE))


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """Distribution of tiers, drawn independently for every request."""

    num_tiers: int = 1
    """Number of tiers K; tiers are 0 (most urgent) to K - 1."""
    mix: Mix = "uniform"
    """Fractions of the tiers: uniform; gaussian (normal density around the middle, standard deviation K/4);
    gaussian_released (as in the multi-tier paper's code); enterprise (10 % critical, most in the middle or last)."""

    def __post_init__(self) -> None:
        tier_weights(self.mix, self.num_tiers)


@dataclass(frozen=True, kw_only=True)
class Sessions:
    """Conversations: every drawn request becomes a turn; turns have think times and a growing prefix."""

    mean_turns: float = 4.0
    """Mean number of turns, at least 1, geometrically distributed."""
    max_turns: int = 32
    """Maximum number of turns of a conversation."""
    mean_think_time_s: float = 10.0
    """Mean seconds between the last token of an output and the next turn, exponentially distributed."""
    max_prompt_tokens: int = 4096
    """Maximum prompt (previous turns and new text) in tokens; a conversation ends before a turn that exceeds it."""

    def __post_init__(self) -> None:
        check_ranges(self, mean_turns=(1.0, FINITE), max_turns=(1, MAX_REQUESTS))
        check_ranges(self, mean_think_time_s=(0, MAX_TIME_S), max_prompt_tokens=(1, MAX_TOKENS))

    def conversations(self, rows: list[TraceRequest], rng: np.random.Generator) -> list[TraceRequest]:
        """Groups all rows into turns of conversations, one conversation after the other.

        The k-th conversation starts at the arrival of the k-th row. Each of its turns uses the next unused
        row, whose prompt is the new text. The prompt of a later turn consists of all previous turns
        (`prefix_tokens`) and the new text. Its arrival is that of the previous turn plus the think time,
        without the time of outputs; `think_time_s` is the wait after the previous output in the simulation.
        """
        turns: list[TraceRequest] = []
        number = 0
        while len(turns) < len(rows):
            num_turns = min(int(rng.geometric(1.0 / self.mean_turns)), self.max_turns)
            unused = rows[len(turns) : len(turns) + num_turns]
            turns.extend(self._turns(unused, f"s{number}", rows[number].arrival_s, rng))
            number += 1
        return turns

    def _turns(
        self, rows: list[TraceRequest], name: str, arrival_s: float, rng: np.random.Generator
    ) -> list[TraceRequest]:
        """The turns of one conversation: as many rows as `max_prompt_tokens` allows."""
        first, prefix = rows[0], 0
        turns: list[TraceRequest] = []
        for turn, row in enumerate(rows):
            prompt = prefix + row.prompt_tokens
            if turn and prompt > self.max_prompt_tokens:
                break
            think_s = float(rng.exponential(self.mean_think_time_s)) if turn else None
            arrival_s += think_s or 0.0
            turns.append(replace(
                row, arrival_s=arrival_s, prompt_tokens=prompt, prefix_tokens=prefix, session_id=name, turn=turn,
                think_time_s=think_s, tier=first.tier, tenant=first.tenant, priority=first.priority,
            ))  # fmt: skip
            prefix = prompt + row.output_tokens
        contents = session_content(turns)
        return [replace(row, content=content) for row, content in zip(turns, contents, strict=True)]


@dataclass(frozen=True, kw_only=True)
class SharedPrefix:
    """Groups of requests with the same start of the prompt, such as a system prompt or a document. The lengths of the workload
    are those of the rest of each prompt."""

    num_groups: int = 10
    """Number of groups; each has about num_requests / num_groups requests, in random order."""
    prefix: TokenDistribution = field(
        default_factory=lambda: TokenDistribution(kind="fixed", low=2048, high=2048)
    )
    """Tokens of a group's shared start."""

    def __post_init__(self) -> None:
        check_ranges(self, num_groups=(1, MAX_REQUESTS))

    def prompts(self, rows: list[TraceRequest], rng: np.random.Generator) -> list[TraceRequest]:
        """The rows with the prefix of a group before each prompt."""
        groups = rng.permutation(len(rows)) % self.num_groups
        lengths = self.prefix.draw(self.num_groups, rng)
        prompts = []
        for row, group in zip(rows, groups.tolist(), strict=True):
            prefix, rest = (
                Segment(f"g{group}", int(lengths[group])),
                Segment(row.request_id, row.prompt_tokens),
            )
            num_tokens = prefix.num_tokens + rest.num_tokens
            prompts.append(replace(row, prompt_tokens=num_tokens, content=(prefix, rest)))
        return prompts


#: Default lengths, typical of chats.
_CHAT = Lengths(
    prompt=TokenDistribution(kind="log_t", mu=5.5, sigma=0.8, high=4096),
    output=TokenDistribution(kind="log_t", mu=5.0, sigma=0.7, high=2048),
)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Description of the requests that arrive at the engine: number, arrivals, lengths, classes.

    Arrivals, lengths, classes and conversations use separate random streams, so that another rate does not
    change the lengths.
    """

    num_requests: int = 1000
    """Number of requests."""
    arrivals: Arrivals = field(default_factory=Arrivals)
    """Arrival times."""
    lengths: Lengths = _CHAT
    """Lengths of prompts and outputs."""
    classes: tuple[RequestClass, ...] = ()
    """Classes of requests with their own weights, targets and lengths, such as paying and free, or reasoning and chat."""
    tiers: Tiers | None = None
    """Distribution of tiers for requests whose class has none. Unset: tier 2."""
    sessions: Sessions | None = None
    """Conversations of several turns; rate_rps is then the rate of conversations. Unset: requests are independent."""
    shared_prefix: SharedPrefix | None = None
    """Groups of requests with a shared start of the prompt. Unset: prompts share nothing."""
    agents: Agents | None = None
    """Agent sessions in a closed loop, instead of all other parts. num_requests is rounded up to a multiple of their number;
    with a horizon, choose so many that none runs out. Unset: none."""

    def __post_init__(self) -> None:
        check_ranges(self, num_requests=(1, MAX_REQUESTS))
        if self.agents is not None:
            for name, default in (
                ("arrivals", Arrivals()),
                ("lengths", _CHAT),
                ("classes", ()),
                ("tiers", None),
            ):
                if getattr(self, name) != default:
                    raise InputError(name, getattr(self, name), "unset together with agents")
        parts = [name for name in ("sessions", "shared_prefix", "agents") if getattr(self, name) is not None]
        if len(parts) > 1:
            raise InputError(", ".join(parts), "set", "one of them")
        if self.arrivals.rate_rps is not None:
            check_rate("rate_rps", self.arrivals.rate_rps, self.num_requests)
        if self.arrivals.process == "trace" and self.lengths.file is None:
            raise InputError("arrivals.process", "trace", "another process, unless lengths.file is set")
        if self.arrivals.process == "trace" and not self.lengths.in_order:
            raise InputError("lengths.in_order", False, "true with arrivals.process = trace")

    def trace(self, seed: int) -> Trace:
        """Draws the requests in order of arrival, reproducibly by seed; `InputError` if a file is invalid."""
        source = f"workload, seed {seed}"
        if self.agents is not None:
            rows, problem = self.agents.requests(self.num_requests, seed)
            return Trace(tuple(sorted(rows, key=lambda row: row.arrival_s)), source, problem=problem)
        streams = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(4))
        arrival_rng, length_rng, class_rng, session_rng = streams
        classes, tiers = np.zeros(self.num_requests, np.int64), np.full(self.num_requests, 2)
        if self.classes:
            classes = _choices([item.weight for item in self.classes], self.num_requests, class_rng)
        if self.tiers is not None:
            weights = tier_weights(self.tiers.mix, self.tiers.num_tiers)
            tiers = _choices(weights, self.num_requests, class_rng)
        values = self._request_values(classes, tiers, length_rng)
        times = self._times(arrival_rng)
        rows = [TraceRequest(arrival_s=float(time), **row) for row, time in zip(values, times, strict=True)]
        if self.sessions is not None:
            rows = self.sessions.conversations(rows, session_rng)
        elif self.shared_prefix is not None:
            rows = self.shared_prefix.prompts(rows, session_rng)
        rows.sort(key=lambda row: row.arrival_s)
        return Trace(tuple(rows), source)

    def _times(self, rng: np.random.Generator) -> FloatArray:
        if self.arrivals.process != "trace":
            return self.arrivals.times(self.num_requests, rng)
        assert self.lengths.file is not None
        rows = read_lengths(self.lengths.file)
        if rows.arrival_s is None or np.any(np.diff(rows.arrival_s) < 0):
            allowed = "a file with arrival_s in all rows, in the order of arrival"
            raise InputError("lengths.file", rows.source, allowed)
        times = rows.arrival_s - rows.arrival_s[0]
        if self.num_requests > len(times):
            raise InputError("num_requests", self.num_requests, f"at most {len(times)}, the rows of the file")
        times = times[: self.num_requests]
        return times if self.arrivals.rate_rps is None else at_rate(times, self.arrivals.rate_rps)

    def _request_values(
        self, indices: IntArray, tiers: IntArray, rng: np.random.Generator
    ) -> list[dict[str, Any]]:
        """Fields of every request except its arrival."""
        values: list[dict[str, Any]] = [{} for _ in range(self.num_requests)]
        classes: Sequence[RequestClass] = self.classes or (RequestClass(),)
        for index, item in enumerate(classes):
            members = np.flatnonzero(indices == index)
            if not len(members):
                continue
            prompt, output, max_tokens, predictions = (item.lengths or self.lengths).draw(len(members), rng)
            for position, member in enumerate(members):
                values[member] = dict(
                    request_id=f"r{member}",
                    prompt_tokens=int(prompt[position]),
                    output_tokens=int(output[position]),
                    max_tokens=max_tokens,
                    prediction=predictions[position] if predictions else None,
                    tier=int(tiers[member]) if item.tier is None else item.tier,
                    **{name: getattr(item, name) for name in _CLASS_FIELDS},
                )
        return values


def _choices(weights: Sequence[float] | FloatArray, num: int, rng: np.random.Generator) -> IntArray:
    """Draws indices [num] with probabilities proportional to their weights."""
    fractions = np.asarray(weights) / np.sum(weights)
    return np.asarray(rng.choice(len(fractions), num, p=fractions))
