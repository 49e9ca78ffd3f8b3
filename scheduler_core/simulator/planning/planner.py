"""Search for the cheapest choice that meets the targets of a plan: cheap bounds, then parts of the log, then all of it."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from scheduler_core.errors import InputError, TailcastError
from scheduler_core.lengths.student_t import student_t_quantile
from scheduler_core.policies import policy_class
from scheduler_core.simulator.planning.choices import Choice, variants
from scheduler_core.simulator.planning.config import PlanConfig
from scheduler_core.simulator.planning.search import Probe, Results, Search, probe_level, smallest_level
from scheduler_core.simulator.planning.simulations import Simulations, TrafficCell
from scheduler_core.simulator.planning.targets import Target
from scheduler_core.simulator.planning.traffic import Traffic
from scheduler_core.simulator.steady_state import MAX_ACCUMULATED, MIN_TURNOVERS
from scheduler_core.simulator.step_time import prefill_s, saturation_rate_rps
from scheduler_core.simulator.step_time.base import delays_of
from scheduler_core.simulator.trace import Trace, TraceRequest
from scheduler_core.statistics import Interval

logger = logging.getLogger(__name__)

#: Requests in the first part of the log, and the factor for each next one.
_FIRST_REQUESTS, _GROWTH = 2500, 2
#: Choices whose price at saturation is more than so many times the lowest are not simulated.
_MAX_PRICE = 2.5
#: Choices that are simulated with parts of the log, and with all of it.
_NUM_SCREENED, _NUM_FINAL = 6, 3
#: Relative precision of the load of a replica in the first parts, and of the load at which the target breaks.
_COARSE, _FINE = 0.12, 0.03
#: Load of a replica at which a search for its highest load begins, over the estimate of its saturation.
_FIRST_GUESS = 0.7
#: Improvement below which settings stay as they are.
_MIN_GAIN = 0.02
#: Loads of the curves of latency.
LOADS = (0.5, 0.7, 0.85, 1.0, 1.15, 1.3)
#: Sample from which bounds of the latency on an idle engine are computed, and margin for its error.
_SAMPLE, _SAMPLE_MARGIN = 300, 1.1
#: Relative growth of the requests in the system after the first quarter in an overload: 1.2 if they grow linearly from the
#: start. By chance it is up to 0.6 in runs of some hundred requests.
_OVERLOAD_GROWTH = 0.9
#: Fraction of requests that may be too large for a choice.
_MAX_REFUSED = 0.01


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
        """Requests that accumulate, so that a longer run has higher latencies, or are too large."""
        for result in results:
            metrics = result["metrics"]
            steady, num = metrics["steady_state"], metrics["num_finished"] + metrics["num_refused"]
            if metrics["num_refused"] > _MAX_REFUSED * num:
                return f"{metrics['num_refused']} of {num} requests are too large"
            accumulated, growth = steady["accumulated_fraction"], steady["relative_growth"]
            if "missed" in metrics or accumulated is None:
                continue
            if accumulated > MAX_ACCUMULATED and growth > _OVERLOAD_GROWTH:
                return f"{accumulated:.0%} of the arriving requests accumulate"
        return None


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A choice during the search.

    Attributes:
        saturation: Estimated multiple of the log's rate at which a replica is always busy.
        share: Highest multiple of the log's rate at which a replica meets the targets.
        best, probes: Of the search for the number of replicas.
        curve: Metrics by load at `num_replicas`.
    """

    choice: Choice
    saturation: float
    share: float | None = None
    best: Probe | None = None
    probes: list[Probe] = field(default_factory=list)
    curve: dict[float, dict[str, Any]] = field(default_factory=dict)

    @property
    def num_replicas(self) -> int:
        assert self.best is not None
        return int(self.best["level"])


class Planner:
    """The steps of a plan for a log (see `Plan`), whose simulations read the trace at `path`."""

    def __init__(self, config: PlanConfig, log: Trace, path: str, simulations: Simulations) -> None:
        self.config = config
        self.log = log
        self._run = simulations.run
        has_predictions = any(row.prediction is not None for row in log.requests)
        self._base = config.base(path, has_predictions=has_predictions)
        self.targets = config.latency_targets
        rate = log.mean_rate_rps
        if rate is None:
            raise InputError("log", log.source, "times of arrival; or rate, with which they are drawn")
        self.rate_rps = rate
        #: Choices that were not simulated, and why.
        self.excluded: list[dict[str, str]] = []
        self._shares_prefixes = any(row.content for row in log.requests)
        #: Repetitions with which all of the log reaches a steady state.
        self.num_repeats = 1
        size = config.max_requests
        self._size = size if len(log) > size else None

    # Candidates and bounds

    def orders(self) -> list[str]:
        """The orders that can be simulated."""
        if self._base.predictor is not None:
            return self.config.orders
        orders = [order for order in self.config.orders if "length" not in policy_class(order).inputs]
        if not orders:
            allowed = "fcfs too, because the log has no prompts from which a predictor could tell lengths; or predictor oracle"
            raise InputError("orders", self.config.orders, allowed)
        return orders

    def routers(self) -> list[str]:
        return self.config.routers or ["jsq", *(["endpoint_picker"] if self._shares_prefixes else [])]

    def candidates(self) -> list[Candidate]:
        """Hardware that fits, is fast enough when idle, and may be the cheapest; `InputError` if there is none."""
        uncached = _without_hits(self.log)
        found: list[Candidate] = []
        problems: list[tuple[float, str]] = []
        for choice in self.config.hardware():
            choice = replace(choice, order=self.orders()[0], router=self.routers()[0])
            try:
                simulation = choice.config(self._base, 1)
                limits, step_time = simulation.limits, simulation.make_step_time()
            except InputError as error:
                self._exclude(choice, str(error))
                continue
            capacity = limits.num_kv_blocks * limits.kv_block_tokens
            too_large = sum(row.prompt_tokens + row.max_tokens > capacity for row in self.log.requests)
            if too_large > _MAX_REFUSED * len(self.log):
                self._exclude(
                    choice, f"{too_large} requests are longer than its KV cache of {capacity} tokens"
                )
                continue
            slack, problem = self._idle_slack(limits, step_time)
            if slack > 1:
                self._exclude(choice, problem)
                problems.append((slack, f"{problem} on {choice.hardware}"))
                continue
            saturation = saturation_rate_rps(uncached, limits, step_time) / self.rate_rps
            found.append(Candidate(choice=choice, saturation=saturation))
        if not found and problems:
            raise InputError("target", str(self.config.target), f"more; the closest: {min(problems)[1]}")
        if not found:
            reasons = "; ".join(f"{one['choice']}: {one['reason']}" for one in self.excluded)
            raise InputError("gpus", list(self.config.prices), f"devices on which the model fits ({reasons})")
        found.sort(key=self._price_at_saturation)
        lowest = self._price_at_saturation(found[0])
        for number, one in enumerate(found):
            ratio = self._price_at_saturation(one) / lowest
            if ratio > _MAX_PRICE or number >= _NUM_SCREENED:
                self._exclude(one.choice, f"its price at saturation is {ratio:.2g} times the lowest")
        return [one for one in found[:_NUM_SCREENED] if self._price_at_saturation(one) <= _MAX_PRICE * lowest]

    def _exclude(self, choice: Choice, reason: str) -> None:
        self.excluded.append({"choice": choice.hardware, "reason": reason})

    def _price_at_saturation(self, one: Candidate) -> float:
        return self.config.price(one.choice) * max(1.0, 1.0 / one.saturation)

    def _idle_slack(self, limits: Any, step_time: Any) -> tuple[float, str]:
        """How far the latencies of an idle engine are from the targets, at most, and the sentence about it. With shared
        prefixes, prompts count as cached."""
        rng = np.random.default_rng(0)
        rows = self.log.requests
        if len(rows) > _SAMPLE:
            rows = tuple(rows[int(at)] for at in rng.choice(len(rows), _SAMPLE, replace=False))
        prompts_s = np.zeros(len(rows))
        if not self._shares_prefixes:
            prompts_s = np.array(
                [prefill_s(row.prompt_tokens, limits.max_num_batched_tokens, step_time) for row in rows]
            )
        prompts_s += delays_of(step_time).frontend_s
        decodes_s = np.array(
            [
                step_time.run([row.prompt_tokens], 0.0).end_s(row.output_tokens - 1)
                if row.output_tokens > 1
                else 0.0
                for row in rows
            ]
        )
        gaps = np.array([row.output_tokens - 1 for row in rows])
        values = {
            "ttft_s": prompts_s,
            "ttlt_s": prompts_s + decodes_s,
            "tpot_s": decodes_s[gaps > 0] / gaps[gaps > 0],
        }
        worst, text = 0.0, ""
        for target in self.targets:
            if target.head not in values or not len(values[target.head]):
                continue
            if target.level is None and not target.metric.endswith(".mean"):
                continue
            array = values[target.head]
            value = float(array.mean() if target.level is None else np.quantile(array, target.level))
            slack = target.slack(value / _SAMPLE_MARGIN)
            if slack > worst:
                worst, text = slack, f"{target.metric} is {value:.3g} s for requests alone on an idle engine"
        return worst, text

    # The load of a replica

    def _share_cell(self, choice: Choice, size: int, level: float, *, stop: bool = True) -> TrafficCell:
        """One replica with `level` times the log's rate, and `size` requests."""
        traffic = Traffic(fraction=min(level, 1.0), load=max(level, 1.0), num_requests=size)
        simulation = choice.config(self._base, 1)
        settings = {"share": level, "choice": str(choice)}
        return TrafficCell(simulation, settings, traffic, self.targets if stop else ())

    def search_share(self, one: Candidate, size: int) -> Search[Candidate]:
        """Finds `share`; None if no load meets the targets."""
        levels = PlanLevels(
            targets=self.targets, make=lambda level, _: self._share_cell(one.choice, size, level)
        )
        guess = one.share or _FIRST_GUESS * one.saturation
        level, good, bad, step = min(guess, 1.25), None, None, 1.3
        least = self._least_share
        while good is None or bad is None:
            if good is not None and good >= 1.25:
                break
            if good is None and (level < least or level < one.saturation / 64):
                one.share = None
                return one
            if (yield from probe_level(levels, level, 1))["meets"]:
                good, level = level, min(level * step, 1.25)
            else:
                bad, level = level, level / step
            if good is None or bad is None:
                step = min(step**1.5, 3.0)
        assert good is not None
        while bad is not None and bad / good > 1 + _COARSE:
            level = math.sqrt(good * bad)
            if (yield from probe_level(levels, level, 1))["meets"]:
                good = level
            else:
                bad = level
        one.share = good
        return one

    def _price(self, one: Candidate) -> float:
        assert one.share is not None
        return self.config.price(one.choice) * max(1.0, 1.0 / one.share)

    def screen(self, candidates: list[Candidate]) -> list[Candidate]:
        """Halves the candidates with parts of the log of increasing length; `InputError` if no load meets the targets."""
        size = min(_FIRST_REQUESTS, len(self.log))
        while True:
            searched = self._run([self.search_share(one, size) for one in candidates])
            for one in searched:
                if one.share is None:
                    self._exclude(one.choice, "the targets are missed at any load")
            left = sorted((one for one in searched if one.share is not None), key=self._price)
            if not left:
                raise self._infeasible(candidates)
            if len(left) <= _NUM_FINAL or size >= len(self.log):
                for one in left[_NUM_FINAL:]:
                    self._exclude(
                        one.choice, f"it needs {self._price(one) / self._price(left[0]):.2g} times the price"
                    )
                return left[:_NUM_FINAL]
            num = max(_NUM_FINAL, math.ceil(len(left) / 2))
            for one in left[num:]:
                self._exclude(
                    one.choice, f"it needs {self._price(one) / self._price(left[0]):.2g} times the price"
                )
            candidates, size = left[:num], min(_GROWTH * size, len(self.log))

    @property
    def _least_share(self) -> float:
        """Load of a replica below which max_replicas are surely not enough."""
        return 1.0 / (4 * self.config.max_replicas)

    def _infeasible(self, candidates: Sequence[Candidate]) -> InputError:
        """The refusal of targets that no load meets, with the closest choice."""
        size = min(_FIRST_REQUESTS, len(self.log))
        loads = [one.saturation / 64 for one in candidates]
        cells = [
            self._share_cell(one.choice, size, min(load, 1.0), stop=False)
            for one, load in zip(candidates, loads, strict=True)
        ]
        results = self._run([_only([cell]) for cell in cells])
        distances = []
        for one, [result] in zip(candidates, results, strict=True):
            values = [(target.slack(value_of(result, target)), target) for target in self.targets]
            slack, target = max(values, key=lambda pair: pair[0])
            value = value_of(result, target)
            distances.append((slack, f"{target.metric} is {value:.3g} at low load on {one.choice.hardware}"))
        if min(distances)[0] <= 1:
            allowed = (
                f"more; a replica bears less than {self._least_share:.2g} of the load: {min(distances)[1]}"
            )
            return InputError("max_replicas", self.config.max_replicas, allowed)
        return InputError("target", str(self.config.target), f"more; the closest: {min(distances)[1]}")

    def settings(self) -> dict[str, list[Any]]:
        return {
            "max_num_seqs": self.config.max_num_seqs,
            "max_num_batched_tokens": self.config.max_num_batched_tokens,
            "prefix_caching": self.config.prefix_caching,
            "order": self.orders(),
        }

    def tune(self, candidates: Sequence[Candidate]) -> None:
        """Changes each setting to the value that is best at the highest load of the first ones, if the targets are then met
        at a higher load."""
        size = min(_FIRST_REQUESTS, len(self.log))

        def distance(one: Candidate, choice: Choice) -> Search[float]:
            assert one.share is not None
            cell = self._share_cell(choice, size, one.share * (1 + _COARSE / 2), stop=False)
            [result] = yield [cell]
            return max(target.slack(value_of(result, target)) for target in self.targets)

        pairs = [
            (one, choice)
            for one in candidates
            for choice in (one.choice, *variants(one.choice, self.settings()))
        ]
        pairs = [(one, choice) for one, choice in pairs if self._fits(choice)]
        slacks = self._run([distance(one, choice) for one, choice in pairs])
        tuned = []
        for one in candidates:
            own = {
                choice: slack for (other, choice), slack in zip(pairs, slacks, strict=True) if other is one
            }
            best = one.choice
            for name in self.settings():
                changed = [choice for choice in own if getattr(choice, name) != getattr(one.choice, name)]
                choice = min(changed, key=lambda choice: own[choice], default=one.choice)
                if own[choice] < own[one.choice] * (1 - _MIN_GAIN):
                    best = replace(best, **{name: getattr(choice, name)})
            if best != one.choice and self._fits(best):
                tuned.append((one, Candidate(choice=best, saturation=one.saturation, share=one.share)))
        for (one, other), _ in zip(
            tuned, self._run([self.search_share(other, size) for _, other in tuned]), strict=True
        ):
            if other.share is not None and one.share is not None and other.share >= one.share:
                one.choice, one.share = other.choice, other.share

    def _fits(self, choice: Choice) -> bool:
        try:
            return choice.config(self._base, 1).limits.num_kv_blocks > 0
        except TailcastError:
            return False

    # Replicas, with all of the log

    def cell(self, choice: Choice, num_replicas: int, traffic: Traffic, *, stop: bool = True) -> TrafficCell:
        """So many replicas with all of the log."""
        traffic = replace(traffic, num_requests=self._size, num_repeats=self.num_repeats)
        simulation = choice.config(self._base, num_replicas)
        settings = {"replicas": num_replicas, "choice": str(choice)}
        return TrafficCell(simulation, settings, traffic, self.targets if stop else ())

    def levels(self, choice: Choice, traffic: Traffic, max_seeds: int = 1) -> PlanLevels:
        """Numbers of replicas as levels."""
        return PlanLevels(
            targets=self.targets,
            make=lambda level, seed: self.cell(choice, int(level), replace(traffic, seed=seed)),
            max_seeds=max_seeds,
        )

    def reach_steady_state(self, candidates: Sequence[Candidate]) -> float:
        """Sets `num_repeats` to what the log needs to last for enough mean latencies of every candidate; returns for how many
        it lasts."""
        cells = [
            self.cell(one.choice, max(1, math.ceil(1.0 / (one.share or 1.0))), Traffic(), stop=False)
            for one in candidates
        ]
        results = self._run([_only([cell]) for cell in cells])
        turnovers = min(float(result["metrics"]["steady_state"]["turnovers"]) for [result] in results)
        if turnovers < MIN_TURNOVERS:
            self.num_repeats = math.ceil(1.2 * MIN_TURNOVERS / turnovers)
        return turnovers

    def search_replicas(
        self, choice: Choice, guess: int, traffic: Traffic
    ) -> Search[tuple[Probe | None, list[Probe]]]:
        """The smallest number of replicas that meets the targets with the log itself."""
        levels = self.levels(choice, traffic)
        least = 2 if choice.prefill_fraction else 1
        limit = self.config.max_replicas
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

        finished = [one for one in self._run([search(one) for one in candidates]) if one.best is not None]
        if not finished:
            values = ", ".join(
                f"{name} = {estimate['mean']:.4g}"
                for name, estimate in candidates[0].probes[-1]["estimates"].items()
            )
            allowed = f"more; with {self.config.max_replicas} of {candidates[0].choice.hardware}: {values}"
            raise InputError("max_replicas", self.config.max_replicas, allowed)
        return sorted(
            finished, key=lambda one: (self.config.price(one.choice, one.num_replicas), self.distance(one))
        )

    def distance(self, one: Candidate) -> float:
        """Slack of the targets at the number of replicas."""
        assert one.best is not None
        estimates = one.best["estimates"]
        return max(target.slack(estimates[target.metric]["mean"]) for target in self.targets)

    def route(self, one: Candidate) -> None:
        """Changes the router, or splits prefill and decode, where fewer replicas are then enough."""
        if one.num_replicas < 2:
            return
        routers = [
            replace(one.choice, router=router) for router in self.routers() if router != one.choice.router
        ]
        splits = [
            replace(one.choice, prefill_fraction=fraction)
            for fraction in self.config.prefill_fractions
            if fraction
        ]

        def fewer(choice: Choice) -> Search[tuple[Choice, Probe | None, list[Probe]]]:
            levels = self.levels(choice, Traffic())
            best, probes, level = None, [], one.num_replicas
            while level >= (2 if choice.prefill_fraction else 1):
                probes.append((yield from probe_level(levels, level, 1)))
                if not probes[-1]["meets"]:
                    break
                best, level = probes[-1], level - 1
            return choice, best, probes

        for choice, best, probes in self._run([fewer(choice) for choice in (*routers, *splits)]):
            if best is None:
                continue
            before = one.num_replicas, self.distance(one)
            now = Candidate(choice=choice, saturation=one.saturation, best=best)
            if (now.num_replicas, self.distance(now)) < (before[0], before[1] * (1 - _MIN_GAIN)):
                one.choice, one.best = choice, best
                one.probes = probes

    def replicas_interval(self, one: Candidate) -> tuple[int, int | None, dict[str, Any]]:
        """Smallest and largest number of replicas that the log's uncertainty allows (None: more than can be told), and the
        estimates at the answer over resampled logs."""
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

        [(low, high, at)] = self._run([search()])
        return low, high, at["estimates"]

    def margin(self, one: Candidate) -> float:
        """Multiple of the load at which the targets break, at least; 1 is the log's."""
        levels = PlanLevels(
            targets=self.targets,
            make=lambda load, _: self.cell(one.choice, one.num_replicas, Traffic(load=load)),
        )

        def search() -> Search[float]:
            good, bad, step = 1.0, None, 1.15
            while bad is None and good < 4:
                if (yield from probe_level(levels, good * step, 1))["meets"]:
                    good, step = good * step, step**1.5
                else:
                    bad = good * step
            while bad is not None and bad / good > 1 + _FINE:
                middle = math.sqrt(good * bad)
                if (yield from probe_level(levels, middle, 1))["meets"]:
                    good = middle
                else:
                    bad = middle
            return good

        return self._run([search()])[0]

    def curves(self, candidates: Sequence[Candidate]) -> None:
        """Metrics at several loads for each candidate with its replicas."""
        cells = [
            self.cell(one.choice, one.num_replicas, Traffic(load=load), stop=False)
            for one in candidates
            for load in LOADS
        ]
        results = iter(self._run([_only([cell]) for cell in cells]))
        for one in candidates:
            for load in LOADS:
                [result] = next(results)
                one.curve[load] = dict(result["metrics"])

    def sizes(self, candidates: Sequence[Candidate]) -> list[list[dict[str, Any]]]:
        """For each candidate the metrics with more replicas than necessary."""

        def search(one: Candidate) -> Search[list[dict[str, Any]]]:
            numbers = sorted({one.num_replicas + 1, math.ceil(1.5 * one.num_replicas)})
            results = yield [self.cell(one.choice, num, Traffic(), stop=False) for num in numbers]
            return [
                {"num_replicas": num, "price_per_hour": self.config.price(one.choice, num)}
                | headline(result["metrics"])
                for num, result in zip(numbers, results, strict=True)
            ]

        return self._run([search(one) for one in candidates])

    def order_gain(self, one: Candidate) -> list[dict[str, Any]]:
        """Every order at the same number of replicas, and the number that it needs."""

        def search(order: str) -> Search[dict[str, Any]]:
            choice = replace(one.choice, order=order)
            [result] = yield [self.cell(choice, one.num_replicas, Traffic(), stop=False)]
            best, _ = yield from self.search_replicas(choice, one.num_replicas, Traffic())
            return {
                "order": order,
                "num_replicas": None if best is None else int(best["level"]),
                "metrics": headline(result["metrics"]),
            }

        orders = [order for order in self.orders() if self._fits(replace(one.choice, order=order))]
        return self._run([search(order) for order in orders])

    def what_if(self, one: Candidate) -> list[dict[str, Any]]:
        """For each scenario the metrics with the replicas of the answer, and the number of replicas that it needs."""

        def search(text: str, scenario: Mapping[str, float]) -> Search[dict[str, Any]]:
            traffic = Traffic(load=scenario.get("traffic", 1.0), outputs=scenario.get("outputs", 1.0))
            failed = int(scenario.get("failed_replicas", 0))
            left = one.num_replicas - failed
            metrics, meets = None, False
            if left >= 1:
                cell = self.cell(one.choice, left, traffic, stop=False)
                [result] = yield [cell]
                metrics = headline(result["metrics"])
                meets = all(target.slack(value_of(result, target)) <= 1 for target in self.targets)
                meets = (
                    meets and PlanLevels(targets=self.targets, make=lambda *_: cell).problem([result]) is None
                )
            guess = math.ceil(one.num_replicas * traffic.load * traffic.outputs)
            best, _ = yield from self.search_replicas(one.choice, guess, traffic)
            needed = None if best is None else int(best["level"]) + failed
            price = None if needed is None else self.config.price(one.choice, needed)
            return {
                "scenario": text,
                "meets": meets,
                "metrics": metrics,
                "num_replicas": needed,
                "price_per_hour": price,
            }

        return self._run([search(text, scenario) for text, scenario in self.config.scenarios().items()])


def _only(cells: Sequence[TrafficCell]) -> Search[Results]:
    """The results of some cells."""
    return (yield cells)


def value_of(result: Mapping[str, Any], target: Target) -> float:
    """The value of a target's metric."""
    head, _, statistic = target.metric.partition(".")
    value = result["metrics"][head]
    number = value[statistic] if statistic else value
    return float(number)


def headline(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a run that a plan reports."""
    names = ("ttft_s", "tpot_s", "tbt_s", "ttlt_s", "slo_attainment", "throughput_rps", "prefix_hit_fraction")
    return {name: metrics[name] for name in names}


def _without_hits(log: Trace) -> Trace:
    """The log with prompts without what an infinite prefix cache would have."""
    lengths: dict[str, int] = {}
    rows: list[TraceRequest] = []
    for row in log.requests:
        cached = 0
        for key, num_tokens in row.content:
            known = lengths.get(key, 0)
            cached += min(known, num_tokens)
            if known < num_tokens:
                break
        for key, num_tokens in row.content:
            lengths[key] = max(lengths.get(key, 0), num_tokens)
        if row.content:
            lengths[row.content[-1].key] += row.output_tokens
        rows.append(replace(row, prompt_tokens=max(1, row.prompt_tokens - cached)) if cached else row)
    return replace(log, requests=tuple(rows))
