"""Targets of a plan, such as `ttft_s.p99<2`, and when a run can no longer meet them."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler_core.errors import InputError
from scheduler_core.ranges import parse_number
from scheduler_core.simulator.latencies import NAMES
from scheduler_core.simulator.records import RequestRecord
from scheduler_core.simulator.trace import TraceRequest

#: Cost target, in units of the prices per million output tokens; it is no metric of a simulation.
COST = "cost_per_million_tokens"
#: Fraction of requests that meet all their own targets.
GOODPUT = "slo_attainment"
#: Other names of metrics: those of vLLM's `bench serve` and of the literature.
ALIASES = {"e2e_s": "ttlt_s", "itl_s": "tbt_s", "goodput": GOODPUT}
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}
STATISTICS = ("mean", *QUANTILES, "max")
#: Number of requests above a quantile below which the quantile of a log is not known.
MIN_ABOVE = 10
#: Fraction of requests that their clients may give up, with a target that has no level.
MAX_GIVEN_UP = 0.01
_TARGET = re.compile(r"\s*([\w.]+)\s*(<=?|>=?)\s*(\S+)\s*")


@dataclass(frozen=True, slots=True)
class Target:
    """A bound of a metric: `value <= bound`, or `value >= bound` for `at_least`."""

    metric: str
    bound: float
    at_least: bool = False

    @classmethod
    def of(cls, text: str) -> "Target":
        """The target in a text, such as `ttft_s.p99<2` or `goodput>0.99`; `InputError` if it is none."""
        parts = _TARGET.fullmatch(text)
        allowed = (
            "METRIC.STATISTIC<SECONDS such as ttft_s.p99<2, tpot_s.p90<0.05, itl_s.p99<0.1, e2e_s.mean<20; goodput>0.99; "
            f"or {COST}<3. Statistics: {', '.join(STATISTICS)}"
        )
        if parts is None:
            raise InputError("target", text, allowed)
        name, sign, number = parts.groups()
        head, _, statistic = name.partition(".")
        head = ALIASES.get(head, head)
        try:
            bound = parse_number(number)
        except ValueError as error:
            raise InputError("target", text, allowed) from error
        is_ratio = head in (GOODPUT, COST)
        if not (is_ratio and not statistic) and not (head in NAMES and statistic in STATISTICS):
            raise InputError("target", text, allowed)
        if (sign[0] == ">") != (head == GOODPUT):
            raise InputError("target", text, f"{name} with the other sign")
        if not 0 < bound < (1 if head == GOODPUT else math.inf):
            raise InputError("target", text, f"a bound > 0{' and < 1' if head == GOODPUT else ''}")
        return cls(head if is_ratio else f"{head}.{statistic}", bound, head == GOODPUT)

    def __str__(self) -> str:
        return f"{self.metric}{'>' if self.at_least else '<'}{self.bound:g}"

    @property
    def head(self) -> str:
        """Name of the latency."""
        return self.metric.partition(".")[0]

    @property
    def level(self) -> float | None:
        """Level of the quantile; None for a mean, a maximum or a ratio."""
        return QUANTILES.get(self.metric.partition(".")[2])

    @property
    def min_requests(self) -> int:
        """Number of requests below which a log does not determine the metric: ten are above the quantile, or outside the
        fraction; a hundred for a mean."""
        if self.at_least:
            return math.ceil(MIN_ABOVE / (1 - self.bound))
        if self.level is not None:
            return math.ceil(round(MIN_ABOVE / (1 - self.level), 6))
        return 1000 if self.metric.endswith(".max") else 100

    @property
    def max_given_up(self) -> float:
        """Fraction of requests that their clients may give up, because the others can still meet the target; 1 % for a mean or a
        maximum."""
        level = self.bound if self.at_least else self.level
        return MAX_GIVEN_UP if level is None else round(1.0 - level, 12)  # 1 - 0.9 is below 0.1

    def slack(self, value: float) -> float:
        """How far a value is from the bound: 1 at the bound, below 1 if the target is met."""
        if self.at_least:
            return (1 - value) / (1 - self.bound)
        return value / self.bound


class MissedTargets:
    """Tells during a run whether a target can no longer be met, however the requests end that have not finished.

    With n requests, a quantile at level q is certainly above the bound if n - floor(q (n - 1)) finished requests are above it
    (linear interpolation), a mean if their sum is above n times the bound. Any target is missed once clients have given
    up more requests than it allows (`Target.max_given_up`). Gaps between all tokens (tbt_s) are not counted, nor are arrivals
    before `from_s`.
    """

    def __init__(self, targets: Iterable[Target], num_requests: int, from_s: float = -math.inf) -> None:
        self._num = num_requests
        self._from_s = from_s
        self._all = tuple(targets)
        self._num_given_up = 0
        self._targets = [target for target in self._all if target.head not in (COST, "tbt_s", "slowdown")]
        self._above = [0] * len(self._targets)
        self._sums = [0.0] * len(self._targets)
        #: The first target that is missed.
        self.missed: Target | None = None

    def __call__(self, ended: RequestRecord | TraceRequest) -> bool:
        """Counts a finished request, or the row of one that was given up; returns whether a target is missed."""
        if ended.arrival_s < self._from_s:
            return False
        return self._finished(ended) if isinstance(ended, RequestRecord) else self._given_up()

    def _given_up(self) -> bool:
        self._num_given_up += 1
        for target in self._all:
            if self._num_given_up > target.max_given_up * self._num:
                self.missed = target
                return True
        return False

    def _finished(self, record: RequestRecord) -> bool:
        for index, target in enumerate(self._targets):
            if target.at_least:
                self._above[index] += not _meets_slo(record)
                is_missed = (self._num - self._above[index]) / self._num < target.bound
            else:
                value = getattr(record, target.head)
                if value is None:
                    continue
                self._above[index] += value > target.bound
                self._sums[index] += value
                if target.level is not None:
                    limit = self._num - math.floor(target.level * (self._num - 1))
                    is_missed = self._above[index] >= limit
                elif target.metric.endswith(".mean"):
                    is_missed = self._sums[index] > target.bound * self._num
                else:
                    is_missed = self._above[index] > 0
            if is_missed:
                self.missed = target
                return True
        return False


def _meets_slo(record: RequestRecord) -> bool:
    """Whether a request met its targets, without the one of its longest gap, which is not known yet."""
    pairs = ((record.ttft_s, record.ttft_slo_s), (record.ttlt_s, record.ttlt_slo_s))
    return all(slo is None or value <= slo for value, slo in pairs)


def parse_targets(texts: Sequence[str]) -> tuple[Target, ...]:
    """The targets in texts, each metric once; `InputError` otherwise."""
    targets = tuple(Target.of(text) for text in texts)
    metrics = [target.metric for target in targets]
    if not any(target.metric != COST for target in targets):
        allowed = "at least one target of a latency or of goodput, such as ttft_s.p99<2"
        raise InputError("target", list(texts), allowed)
    for metric in metrics:
        if metrics.count(metric) > 1:
            raise InputError("target", list(texts), f"{metric} once")
    return targets
