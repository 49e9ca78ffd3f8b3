"""Search for the number of replicas of a choice that meets the targets of a plan, and how certain it is."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.lengths.student_t import student_t_quantile
from scheduler_core.policies import policy_class
from scheduler_core.simulator.failures import Failure
from scheduler_core.simulator.metrics import metric
from scheduler_core.simulator.planning.choices import Choice
from scheduler_core.simulator.planning.config import PlanConfig
from scheduler_core.simulator.planning.search import (
    Probe,
    Results,
    Search,
    means_of,
    probe_level,
    smallest_level,
)
from scheduler_core.simulator.planning.simulations import GIVEN_UP, Simulations, TrafficCell
from scheduler_core.simulator.planning.targets import Target
from scheduler_core.simulator.planning.traffic import Traffic
from scheduler_core.simulator.steady_state import MAX_ACCUMULATED, MIN_TURNOVERS
from scheduler_core.simulator.trace import Trace
from scheduler_core.statistics import Interval

#: Improvement below which settings stay as they are.
MIN_GAIN = 0.02
#: Relative growth of the requests in the system after the first quarter in an overload: 1.2 if they grow linearly from the
#: start. By chance it is up to 0.6 in runs of some hundred requests.
_OVERLOAD_GROWTH = 0.9
#: Standard deviations of the number of requests in the system that their growth exceeds, over the part of the arrivals of which
#: `steady_state` measures it.
_MIN_SIGMAS, _AFTER_WARM_UP = 4.0, 0.75
_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
#: Fraction of requests that may be too large for a choice.
MAX_REFUSED = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLevels:
    """The targets of a plan, with the simulations `make(level, seed)`; seed 0 is the log itself, others resample it.

    The spread over resampled logs is that of the log's own uncertainty. It does not shrink with their number.
    """

    targets: tuple[Target, ...]
    make: Callable[[float, int], TrafficCell]
    max_seeds: int = 1
    seed: int = 0

    @property
    def at_most(self) -> dict[str, float]:
        return {target.metric: target.bound for target in self.targets if not target.at_least}

    @property
    def at_least(self) -> dict[str, float]:
        return {target.metric: target.bound for target in self.targets if target.at_least}

    def cell(self, level: float, seed: int) -> TrafficCell:
        return self.make(level, seed)

    def warnings(self, results: Results) -> dict[str, str]:
        missed = [result["metrics"]["missed"] for result in results if "missed" in result["metrics"]]
        return {"missed": missed[0]} if missed else {}

    def estimate(self, values: Sequence[float], bounds: tuple[float, float]) -> Interval:
        mean, num = float(np.mean(values)), len(values)
        if num == 1:
            return Interval(mean, -math.inf, math.inf, 1)
        half = student_t_quantile(0.975, num - 1) * float(np.std(values, ddof=1))
        return Interval(mean, max(mean - half, bounds[0]), min(mean + half, bounds[1]), num)

    def problem(self, results: Results) -> str | None:
        """Requests that accumulate, so that a longer run has higher latencies, or are too large, or given up by their clients."""
        for result in results:
            metrics = result["metrics"]
            steady, num = metrics["steady_state"], metrics["num_finished"] + metrics["num_failed"]
            num += metrics["num_refused"]
            given_up = metrics.get(GIVEN_UP, 0.0)
            if any(given_up > target.max_given_up for target in self.targets):
                return f"{given_up:.1%} of the clients give up"
            if metrics["num_refused"] > MAX_REFUSED * num:
                return f"{metrics['num_refused']} of {num} requests are too large"
            accumulated, growth = steady["accumulated_fraction"], steady["relative_growth"]
            if "missed" in metrics or accumulated is None:
                continue
            # Of N requests in the system, their number varies by about sqrt(N).
            is_significant = accumulated * _AFTER_WARM_UP * num * growth > _MIN_SIGMAS**2
            if accumulated > MAX_ACCUMULATED and growth > _OVERLOAD_GROWTH and is_significant:
                return f"{accumulated:.0%} of the arriving requests accumulate"
        return None


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A choice during the search.

    Attributes:
        saturation: Estimated multiple of the log's rate at which a replica is always busy.
        share: Highest multiple of the log's rate at which a replica meets the targets.
        best, probes: Of the search for the number of replicas.
        curve: Results by load at `num_replicas`.
    """

    choice: Choice
    saturation: float
    share: float | None = None
    best: Probe | None = None
    probes: list[Probe] = field(default_factory=list)
    curve: dict[float, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def num_replicas(self) -> int:
        assert self.best is not None
        return int(self.best["level"])


class Planner:
    """What all steps of a plan for a log share; its simulations read the trace at `path`."""

    def __init__(self, config: PlanConfig, log: Trace, path: str, simulations: Simulations) -> None:
        self.config = config
        self.log = log
        self.run = simulations.run
        has_predictions = any(row.prediction is not None for row in log.requests)
        self.base = config.base(path, has_predictions=has_predictions)
        self.targets = config.latency_targets
        rate = log.mean_rate_rps
        if rate is None:
            raise InputError("log", log.source, "times of arrival; or rate, with which they are drawn")
        self.rate_rps = rate
        #: Choices that were not simulated, and why.
        self.excluded: list[dict[str, str]] = []
        self.shares_prefixes = any(row.content for row in log.requests)
        #: Repetitions with which all of the log reaches a steady state.
        self.num_repeats = 1
        size = config.max_requests
        self._size = size if len(log) > size else None

    def exclude(self, choice: Choice, reason: str) -> None:
        """Notes why a choice is left out."""
        self.excluded.append({"choice": choice.hardware, "reason": reason})

    def orders(self) -> list[str]:
        """The orders that can be simulated."""
        if self.base.predictor is not None:
            return self.config.orders
        orders = [order for order in self.config.orders if "length" not in policy_class(order).inputs]
        if not orders:
            allowed = "fcfs too, because the log has no prompts from which a predictor could tell lengths; or predictor oracle"
            raise InputError("orders", self.config.orders, allowed)
        return orders

    def routers(self) -> list[str]:
        """The routers to choose from, the first one first."""
        return self.config.routers or [*(["endpoint_picker"] if self.shares_prefixes else []), "jsq"]

    def cell(
        self,
        choice: Choice,
        num_replicas: int,
        traffic: Traffic,
        *,
        stop: bool = True,
        cluster: Mapping[str, Any] = _NO_OPTIONS,
    ) -> TrafficCell:
        """So many replicas with all of the log; `cluster` are other options of `ClusterConfig`."""
        simulation = choice.config(self.base, num_replicas, cluster)
        settings = {"replicas": num_replicas, "choice": str(choice)}
        targets = self.targets if stop else ()
        return TrafficCell(simulation, settings, self._whole(traffic), targets)

    def _whole(self, traffic: Traffic) -> Traffic:
        """The traffic of all of the log, or of its busiest part, in a steady state."""
        return replace(traffic, num_requests=self._size, num_repeats=self.num_repeats)

    def failures(self, num: int, down_s: float, traffic: Traffic) -> tuple[Failure, ...]:
        """Failures of `num` replicas at the start of the `down_s` seconds with the most arrivals, after which they run again."""
        rows = self._whole(traffic).apply(self.log).requests
        times = np.array([row.arrival_s for row in rows]) - rows[0].arrival_s
        arrivals = np.searchsorted(times, times + down_s, side="right") - np.arange(len(times))
        at_s = float(times[int(np.argmax(arrivals))])
        return tuple([Failure(at_s=at_s, replica=number, down_s=down_s) for number in range(num)])

    def levels(
        self,
        choice: Choice,
        traffic: Traffic,
        max_seeds: int = 1,
        cluster: Mapping[str, Any] = _NO_OPTIONS,
    ) -> PlanLevels:
        """Numbers of replicas as levels."""
        return PlanLevels(
            targets=self.targets,
            make=lambda level, seed: self.cell(
                choice, int(level), replace(traffic, seed=seed), cluster=cluster
            ),
            max_seeds=max_seeds,
        )

    def reach_steady_state(self, candidates: Sequence[Candidate]) -> float:
        """Sets `num_repeats` to what the log needs to last for enough mean latencies of every candidate; returns for how many
        it lasts."""
        cells = [
            self.cell(one.choice, max(1, math.ceil(1.0 / (one.share or 1.0))), Traffic(), stop=False)
            for one in candidates
        ]
        results = self.run([only([cell]) for cell in cells])
        values = [result["metrics"]["steady_state"]["turnovers"] for [result] in results]
        if None in values:
            raise InputError("log", self.log.source, "requests that arrive at several times")
        turnovers = min(map(float, values))
        if turnovers < MIN_TURNOVERS:
            self.num_repeats = math.ceil(1.2 * MIN_TURNOVERS / turnovers)
        return turnovers

    def metrics_of(self, one: Candidate) -> Mapping[str, Any]:
        """Metrics of a choice with its replicas at the load of the log."""
        cell = self.cell(one.choice, one.num_replicas, Traffic(), stop=False)
        [[result]] = self.run([only([cell])])
        metrics: Mapping[str, Any] = result["metrics"]
        return metrics

    def search_replicas(
        self,
        choice: Choice,
        guess: int,
        traffic: Traffic,
        cluster: Mapping[str, Any] = _NO_OPTIONS,
        most: int | None = None,
    ) -> Search[tuple[Probe | None, list[Probe]]]:
        """The smallest number of replicas, of at most `most` (None: max_replicas), that meets the targets with the log itself."""
        levels = self.levels(choice, traffic, cluster=cluster)
        least = max(2 if choice.prefill_fraction else 1, len(cluster.get("failures", ())))
        limit = self.config.max_replicas if most is None else min(most, self.config.max_replicas)
        return (
            yield from smallest_level(
                lambda level: probe_level(levels, max(level, least), 1),
                limit,
                max(least, min(guess, limit)),
                1.25,
            )
        )

    def finish(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Finds the number of replicas of each; the cheapest first. `InputError` if max_replicas are not enough."""

        def search(one: Candidate) -> Search[Candidate]:
            guess = math.ceil(1.0 / (one.share or 1.0))
            one.best, one.probes = yield from self.search_replicas(one.choice, guess, Traffic())
            return one

        finished = [one for one in self.run([search(one) for one in candidates]) if one.best is not None]
        if not finished:
            first, num = candidates[0], self.config.max_replicas
            allowed = f"more; with {num} of {first.choice.hardware}: {means_of(first.probes[-1])}"
            raise InputError("max_replicas", self.config.max_replicas, allowed)
        return sorted(
            finished, key=lambda one: (self.config.price(one.choice, one.num_replicas), self.distance(one))
        )

    def distance(self, one: Candidate) -> float:
        """Slack of the targets at the number of replicas."""
        assert one.best is not None
        estimates = one.best["estimates"]
        return max(target.slack(estimates[target.metric]["mean"]) for target in self.targets)

    def route(self, finished: Sequence[Candidate]) -> None:
        """Changes the router of each choice, or splits prefill and decode, where fewer replicas are then enough. The first one is
        the cheapest; others are only simulated with numbers of replicas that cost less."""
        lowest = self.config.price(finished[0].choice, finished[0].num_replicas)

        def fewer(choice: Choice, most: int) -> Search[Candidate | None]:
            levels, best = self.levels(choice, Traffic()), None
            for level in range(most, 1 if choice.prefill_fraction else 0, -1):
                probe = yield from probe_level(levels, level, 1)
                if not probe["meets"]:
                    break
                best = Candidate(choice=choice, saturation=0.0, best=probe)
            return best

        searches, owners = [], []
        for one in finished:
            most = one.num_replicas
            if one is not finished[0]:
                most = min(most, math.ceil(lowest / self.config.price(one.choice)) - 1)
            if one.num_replicas < 2:
                continue
            routers = [router for router in self.routers() if router != one.choice.router]
            splits = [fraction for fraction in self.config.prefill_fractions if fraction]
            choices = [replace(one.choice, router=router) for router in routers]
            choices += [replace(one.choice, prefill_fraction=fraction) for fraction in splits]
            searches += [fewer(choice, most) for choice in choices]
            owners += [one] * len(choices)
        for one, other in zip(owners, self.run(searches), strict=True):
            if other is None:
                continue
            before, now = ((each.num_replicas, self.distance(each)) for each in (one, other))
            if now < (before[0], before[1] * (1 - MIN_GAIN)):
                one.choice, one.best = other.choice, other.best

    def replicas_interval(self, one: Candidate) -> tuple[int, int | None, dict[str, Any]]:
        """Smallest and largest number of replicas that the log's uncertainty allows (None: more than can be told), and the
        estimates at `num_replicas` over resampled logs."""
        levels = self.levels(one.choice, Traffic(), self.config.max_seeds)
        num, limit = one.num_replicas, math.ceil(1.5 * one.num_replicas) + 1

        def search() -> Search[tuple[int, int | None, Probe]]:
            at = yield from probe_level(levels, num, 4)
            low, high = num, num if at["clear"] and at["meets"] else None
            level = num + 1
            while high is None and level <= limit:
                probe = yield from probe_level(levels, level, 4)
                if probe["clear"] and probe["meets"]:
                    high = level
                level += 1
            while low > 1:
                probe = yield from probe_level(levels, low - 1, 4)
                if probe["clear"] and not probe["meets"]:
                    break
                low -= 1
                if low <= num / 2:
                    break
            return low, high, at

        [(low, high, at)] = self.run([search()])
        return low, high, at["estimates"]


def only(cells: Sequence[TrafficCell]) -> Search[Results]:
    """The results of some cells."""
    return (yield cells)


def value_of(result: Mapping[str, Any], target: Target) -> float:
    """The value of a target's metric; `InputError` if the run has none, such as a TPOT if all outputs have one token."""
    return metric(result["metrics"], target.metric)


def headline(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a run that a plan reports."""
    names = ("ttft_s", "tpot_s", "tbt_s", "ttlt_s", "slo_attainment", "throughput_rps", "prefix_hit_fraction")
    return {name: metrics[name] for name in (*names, *([GIVEN_UP] if GIVEN_UP in metrics else []))}
