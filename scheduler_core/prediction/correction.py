"""Correction of predicted output lengths by the traffic: memory of past requests, then a linear correction.

For each pair of tenant and served model there are two corrections of a prediction, learned from each ended request:

    calibrated:  the linear correction of `linear_correction`, with forgetting;
    remembered:  first moved by the `Memory` of the tenant, then by a linear correction of its own.

The memory learns the order of lengths (which applications write long outputs), the linear correction location and scale.
Both end with mu'' = mu' + c sigma', where c makes the median exact in the long run: c <- c + 0.01 (1[x > median] - 1/2)
(Gibbs and Candes 2021, section 2), because the location of a skewed distribution is not its median. Of a censored output, the
indicator is replaced by its probability given that x is longer than observed.
The calibrated version is used if it has a higher likelihood than the prediction over the latest outputs, and the remembered
one with the weight g: mu' is the mean, and sigma' the geometric mean, of both with weights 1 - g and g,

    ln(g / (1 - g)) = (ln likelihood of remembered - ln likelihood of the other one) / 2 - 1,

as in Bayesian model averaging, tempered, so that a memory that does not help costs little. A request without an embedding of
its prompt has g = 0.

Tenants. A tenant has its own corrections and memory after `OWN_OUTPUTS` outputs of a served model; what others send does not
change them. Before that, and if there are too many pairs, it uses and teaches those of the tenant "", as do requests without
a tenant. So a flood from one tenant leaves at most `OWN_OUTPUTS` entries where others read.

Drift. If remembered (without a memory: calibrated) predictions fail the test of `drift`, the model behind a name has
changed: only the fraction `KEPT_AT_ALARM` of the information, and the newest entries of its memory are kept.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from scheduler_core.errors import InputError
from scheduler_core.prediction.drift import DriftAlarm, DriftDetector
from scheduler_core.prediction.linear_correction import (
    MIN_SIGMA,
    Coefficients,
    Estimate,
    features_of,
    log_likelihood,
)
from scheduler_core.prediction.memory import CAUTION, Memory, Neighbor, Shift
from scheduler_core.prediction.outcome import Outcome
from scheduler_core.prediction.predictions import Embedding, LengthPrediction
from scheduler_core.prediction.score_window import ScoreWindow
from scheduler_core.ranges import FINITE, check_ranges

#: Outputs since the start or the last alarm before the test begins.
MIN_OUTPUTS = 50
MAX_WINDOW = 100_000
#: Minimum outputs of a pair that replaces another one, and maximum characters of a name.
ADMITTED_OUTPUTS, MAX_NAME_CHARS = 20, 256
#: Outputs of a pair before its own corrections are used.
OWN_OUTPUTS = 50
#: Fraction of the information that is kept at an alarm.
KEPT_AT_ALARM = 0.2
#: Outputs before c changes, because the linear correction still does; step of c; weight of the memory that counts as none.
FIRST_OUTPUTS, MEDIAN_STEP, MIN_MEMORY_WEIGHT = 200, 0.01, 0.01
STATE_FORMAT, OLD_STATE_FORMAT = "tailcast-online-calibration/2", "tailcast-online-calibration/1"
_COUNTS = ("num_outputs", "num_censored", "num_alarms", "num_hits")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """What is known of a request before its output.

    Attributes:
        served_model: Name of the LLM, at most `MAX_NAME_CHARS` characters; empty if there is only one.
        tenant: At most `MAX_NAME_CHARS` characters; empty if unknown.
        prompt_tokens: Length of the prompt; None if unknown.
        system_prompt: Key of the system prompt (an integer of 64 bits, see `prompt_key`); 0 if there is none.
        embedding: Unit vector [D] of the prompt; None: the memory is not used.
    """

    served_model: str = ""
    tenant: str = ""
    prompt_tokens: int | None = None
    system_prompt: int = 0
    embedding: Embedding | None = None


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Parameters of `Correction`.

    Attributes:
        memory: Number of outputs after which the weight of an output has decayed to 1/e in the linear correction, and
            number of past requests in the memory of a tenant.
        window: Number of latest outputs for metrics and for the choice of a correction.
        arl: Lower bound of the mean number of outputs to a false drift alarm (average run length).
        max_models: Maximum number of pairs of tenant and served model. A further one replaces the least used one once it
            has had `ADMITTED_OUTPUTS` outputs, and as many as that one: names that a client invents displace none.
    """

    memory: int = 5000
    window: int = 500
    arl: float = 100_000.0
    max_models: int = 64

    def __post_init__(self) -> None:
        check_ranges(self, memory=(10, 1_000_000), window=(MIN_OUTPUTS, MAX_WINDOW))
        check_ranges(self, arl=(10.0, FINITE), max_models=(1, 100_000))


class _Corrector:
    """A linear correction with forgetting, and c, which makes the median exact in the long run."""

    def __init__(self, prior: Coefficients | None, decay: float) -> None:
        self.estimate, self.median_shift, self._decay = Estimate(prior), 0.0, decay
        self._num_outputs = 0

    def corrected(self, prediction: LengthPrediction, prompt_tokens: int | None) -> LengthPrediction:
        """The corrected prediction."""
        linear = self.estimate.coefficients.corrected(prediction, features_of(prediction, prompt_tokens))
        return self._centered(linear)

    def _centered(self, linear: LengthPrediction) -> LengthPrediction:
        mu = linear.mu + self.median_shift * linear.sigma
        # Below MIN_SIGMA, rounding to whole tokens would count as an error of many sigma.
        return linear.moved(min(max(mu, -50.0), 50.0), max(linear.sigma, MIN_SIGMA))

    def observe(self, prediction: LengthPrediction, outcome: Outcome) -> LengthPrediction:
        """Learns an output; returns the corrected prediction before that."""
        features = features_of(prediction, outcome.prompt_tokens)
        linear = self.estimate.coefficients.corrected(prediction, features)
        corrected = self._centered(linear)
        longer = float(math.log(outcome.output_tokens) > corrected.mu)
        if not (longer or outcome.is_finished):
            longer = min(0.5 / max(1.0 - corrected.cdf(outcome.output_tokens), 0.5), 1.0)
        self._num_outputs += 1
        if self._num_outputs > FIRST_OUTPUTS:
            self.median_shift = min(max(self.median_shift + MEDIAN_STEP * (longer - 0.5), -1.0), 1.0)
        self.estimate.update(prediction, linear, outcome, features, self._decay)
        return corrected

    def state(self) -> dict[str, Any]:
        return self.estimate.state() | {"median_shift": self.median_shift, "num_updates": self._num_outputs}

    def restore(self, content: Mapping[str, Any]) -> None:
        """Restores a `state`; raises an error if the content is invalid."""
        self._num_outputs = _count(content, "num_updates")
        self.median_shift = float(content["median_shift"])
        if not -1.0 <= self.median_shift <= 1.0:
            raise ValueError("median_shift")
        self.estimate.restore(content)


class _Pair:
    """Both corrections of one pair of tenant and served model."""

    def __init__(self, config: CorrectionConfig, prior: Coefficients | None) -> None:
        decay = 1.0 - 1.0 / config.memory
        self.calibrated, self.remembered = _Corrector(prior, decay), _Corrector(prior, decay)
        self.num_outputs = self.num_censored = self.num_alarms = self.num_hits = self._num_since_alarm = 0
        self._has_memory = False
        #: Outputs, halved after every `memory` outputs of all pairs.
        self.use = 0
        self.detector = DriftDetector(config.arl)
        #: Gains in ln likelihood by both corrections, for each output of the window.
        self._gains: deque[tuple[float, float]] = deque()
        self.gain_sums = (0.0, 0.0)
        self._max_gains = config.window
        self.scores = ScoreWindow(config.window, 3)

    @property
    def memory_weight(self) -> float:
        """g, the weight of the remembered version in [0, 1]."""
        if not self._has_memory:
            return 0.0
        calibrated, remembered = self.gain_sums
        advantage = remembered - max(calibrated, 0.0)
        return 1.0 / (1.0 + math.exp(-min(max(0.5 * advantage - 1.0, -30.0), 30.0)))

    @property
    def is_used(self) -> bool:
        """Whether predictions are corrected."""
        return self.gain_sums[0] > 0.0 or self.memory_weight >= MIN_MEMORY_WEIGHT

    def used(
        self, prediction: LengthPrediction, shift: Shift | None, prompt_tokens: int | None
    ) -> LengthPrediction:
        """The version of a prediction that is used; without a shift it is not the remembered one."""
        calibrated = self.calibrated.corrected(prediction, prompt_tokens)
        if shift is None:
            return self._mixture(prediction, calibrated, None)
        return self._mixture(
            prediction, calibrated, self.remembered.corrected(shift.prediction, prompt_tokens)
        )

    def _mixture(
        self, prediction: LengthPrediction, calibrated: LengthPrediction, remembered: LengthPrediction | None
    ) -> LengthPrediction:
        base = calibrated if self.gain_sums[0] > 0.0 else prediction
        weight = self.memory_weight
        if remembered is None or weight < MIN_MEMORY_WEIGHT:
            return base
        log_sigma = (1.0 - weight) * math.log(base.sigma) + weight * math.log(remembered.sigma)
        return base.moved(base.mu + weight * (remembered.mu - base.mu), math.exp(log_sigma))

    def observe(
        self, prediction: LengthPrediction, shift: Shift | None, outcome: Outcome
    ) -> tuple[tuple[LengthPrediction, ...], DriftAlarm | None]:
        """Tests and learns an output; returns its prediction as made, calibrated, and as corrected, all before that."""
        calibrated = self.calibrated.observe(prediction, outcome)
        if shift is None:
            versions = (prediction, calibrated, calibrated)
            self._add_gains(versions, outcome)
        else:
            remembered = self.remembered.observe(shift.prediction, outcome)
            versions = (prediction, calibrated, self._mixture(prediction, calibrated, remembered))
            self._add_gains((prediction, calibrated, remembered), outcome)
            self._has_memory = self._has_memory or shift.weight >= CAUTION
        return versions, self._test(calibrated if shift is None else remembered, outcome)

    def record(self, learned: "_Learned", outcome: Outcome) -> None:
        """Adds an output to the counts and metrics, with the versions of its prediction in the scope that was used."""
        self.num_outputs += 1
        self.num_censored += not outcome.is_finished
        self.num_alarms += learned.alarm is not None
        self.num_hits += learned.is_hit
        self.scores.add(learned.versions, outcome)

    def _add_gains(self, versions: tuple[LengthPrediction, ...], outcome: Outcome) -> None:
        log_length, finished = math.log(outcome.output_tokens), outcome.is_finished
        raw, calibrated, remembered = (log_likelihood(each, log_length, finished) for each in versions)
        self._gains.append((calibrated - raw, remembered - raw))
        dropped = self._gains.popleft() if len(self._gains) > self._max_gains else (0.0, 0.0)
        one, two = self.gain_sums
        self.gain_sums = (one + calibrated - raw - dropped[0], two + remembered - raw - dropped[1])

    def _test(self, corrected: LengthPrediction, outcome: Outcome) -> DriftAlarm | None:
        """Updates the drift test with an output; at an alarm, reduces the information to `KEPT_AT_ALARM`."""
        self._num_since_alarm += 1
        if self._num_since_alarm <= MIN_OUTPUTS:
            return None
        alarm = self.detector.observe(corrected, outcome.output_tokens, finished=outcome.is_finished)
        if alarm is not None:
            self._num_since_alarm = 0
            self.calibrated.estimate.scale(KEPT_AT_ALARM)
            self.remembered.estimate.scale(KEPT_AT_ALARM)
        return alarm

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _COUNTS} | {
            "gain_sums": list(self.gain_sums),
            "calibrated": self.calibrated.state(),
            "remembered": self.remembered.state(),
        }

    def restore(self, content: Mapping[str, Any]) -> None:
        """Restores a `state`; raises an error if the content is invalid."""
        for name in _COUNTS:
            setattr(self, name, _count(content, name))
        self.use, self._has_memory = self.num_outputs, self.num_hits > 0
        calibrated, remembered = map(float, content["gain_sums"])
        if not (math.isfinite(calibrated) and math.isfinite(remembered)):
            raise ValueError("gain_sums")
        self.gain_sums = (calibrated, remembered)
        self._gains = deque([self.gain_sums])
        self.calibrated.restore(content["calibrated"])
        self.remembered.restore(content["remembered"])


class _Learned(NamedTuple):
    """What `_Pair.observe` returned, and whether there were similar past requests."""

    versions: tuple[LengthPrediction, ...]
    alarm: DriftAlarm | None
    is_hit: bool


_Key = tuple[str, str]


class Correction:
    """Corrected predictions for each tenant and served model; bounded memory, no I/O.

    Not for several threads at once, except for `correct` and `neighbors`, which may run while one other thread observes.
    """

    def __init__(self, config: CorrectionConfig | None = None) -> None:
        self._config = config or CorrectionConfig()
        #: (tenant, served model) -> corrections; the tenant "" is for requests without one, and for tenants with few outputs.
        self._pairs: OrderedDict[_Key, _Pair] = OrderedDict()
        self._memories: dict[str, Memory] = {}
        #: Outputs of pairs that have not been admitted, at most `max_models` of them.
        self._candidates: dict[_Key, int] = {}
        self._num_outputs = 0

    @property
    def served_models(self) -> tuple[str, ...]:
        """Served models with outputs, the least recently observed one first."""
        return tuple(served_model for tenant, served_model in self._pairs if not tenant)

    @property
    def num_scopes(self) -> int:
        """Number of memories: tenants that have their own, and one for requests without a tenant."""
        return len(self._memories)

    @property
    def num_remembered(self) -> int:
        """Number of past requests in all memories."""
        return sum(len(memory) for memory in self._memories.values())

    def coefficients(self, served_model: str) -> Coefficients | None:
        """The coefficients of the calibrated version for requests without a tenant, if it is better than the raw one; else None."""
        pair = self._pairs.get(("", served_model))
        return None if pair is None or pair.gain_sums[0] <= 0.0 else pair.calibrated.estimate.coefficients

    def correct(self, context: RequestContext, prediction: LengthPrediction) -> LengthPrediction:
        """The corrected prediction; `prediction` itself while no correction is in use for the served model."""
        scope = self.scope(context)
        pair = self._pairs.get((scope, context.served_model))
        if pair is None or not pair.is_used:
            return prediction
        needs_memory = pair.memory_weight >= MIN_MEMORY_WEIGHT
        shift = self._shift(scope, context, prediction) if needs_memory else None
        return pair.used(prediction, shift, context.prompt_tokens)

    def neighbors(self, context: RequestContext) -> list[Neighbor]:
        """The past requests that the memory uses for a request, the most similar one first."""
        memory = self._memories.get(self.scope(context))
        if memory is None or context.embedding is None:
            return []
        return memory.neighbors(context.embedding, context.served_model, context.system_prompt)

    def observe(self, context: RequestContext, outcome: Outcome) -> DriftAlarm | None:
        """Updates the corrections with an ended request; returns the alarm, if any.

        The outcome has the uncorrected prediction and at least one token; its prompt_tokens replace those of the context
        if they are known. Outputs aborted below their limit are not in the metrics. `InputError` for an invalid number or name.
        """
        prediction = outcome.prediction
        if prediction is None:
            raise InputError("an outcome without a prediction cannot be learned")
        _check_tokens("output_tokens", outcome.output_tokens, 1)
        if outcome.prompt_tokens is not None:
            _check_tokens("prompt_tokens", outcome.prompt_tokens, 0)
        for name in ("served_model", "tenant"):
            if len(getattr(context, name)) > MAX_NAME_CHARS:
                raise InputError(name, getattr(context, name), f"at most {MAX_NAME_CHARS} characters")
        scope = self.scope(context)
        pairs = {"": self._admitted(("", context.served_model))}
        if context.tenant:
            pairs[context.tenant] = self._admitted((context.tenant, context.served_model), pairs[""])
        learned = {
            name: self._learn(name, pair, context, outcome, prediction)
            for name, pair in pairs.items()
            if pair is not None and name in (scope, context.tenant)
        }
        if not learned:
            return None
        used = learned[scope if scope in learned else context.tenant]
        for pair in pairs.values():
            if pair is not None:
                pair.record(used, outcome)
        return used.alarm

    def scope(self, context: RequestContext) -> str:
        """The tenant whose corrections are used for a request; "" until its own has `OWN_OUTPUTS` outputs."""
        pair = self._pairs.get((context.tenant, context.served_model))
        return context.tenant if pair is not None and pair.num_outputs >= OWN_OUTPUTS else ""

    def _learn(
        self, scope: str, pair: _Pair, context: RequestContext, outcome: Outcome, prediction: LengthPrediction
    ) -> _Learned:
        """Updates the corrections and the memory of a scope."""
        shift = self._shift(scope, context, prediction, observes=True)
        versions, alarm = pair.observe(prediction, shift, outcome)
        if alarm is not None and scope in self._memories:
            self._memories[scope].forget(context.served_model)
        if shift is not None:
            self._remember(scope, context, outcome, prediction, shift)
        return _Learned(versions, alarm, shift is not None and shift.weight >= CAUTION)

    def _shift(
        self, scope: str, context: RequestContext, prediction: LengthPrediction, *, observes: bool = False
    ) -> Shift | None:
        """The prediction moved by the memory of a scope; None without an embedding."""
        if context.embedding is None:
            return None
        memory = self._memories.get(scope)
        if memory is None:
            return Shift(prediction, 0.0)
        return memory.shift(
            context.embedding, context.served_model, context.system_prompt, prediction, observes=observes
        )

    def _remember(
        self,
        scope: str,
        context: RequestContext,
        outcome: Outcome,
        prediction: LengthPrediction,
        shift: Shift,
    ) -> None:
        memory = self._memories.get(scope)
        if memory is None:
            memory = self._memories[scope] = Memory(self._config.memory)
        assert context.embedding is not None
        memory.observe(
            context.embedding,
            context.served_model,
            context.system_prompt,
            prediction,
            shift,
            outcome.output_tokens,
            finished=outcome.is_finished,
            request_id=(outcome.request_id or "")[:MAX_NAME_CHARS],
        )

    def _admitted(self, key: _Key, shared: _Pair | None = None) -> _Pair | None:
        """The state of a pair with a further output; None while it is a candidate. `shared` is that of the tenant ""."""
        self._num_outputs += 1
        if self._num_outputs % self._config.memory == 0:
            for other in self._pairs.values():
                other.use //= 2
            self._candidates = {name: use // 2 for name, use in self._candidates.items() if use > 1}
        pair = self._pairs.get(key)
        if pair is None:
            if len(self._pairs) >= self._config.max_models and not self._replaces(key):
                return None
            prior = None if shared is None else shared.calibrated.estimate.coefficients
            pair = self._pairs[key] = _Pair(self._config, prior)
            pair.use = self._candidates.pop(key, 0)
        pair.use += 1
        self._pairs.move_to_end(key)
        return pair

    def _replaces(self, key: _Key) -> bool:
        """Counts an output of a candidate, and drops the least used pair if the candidate may replace it."""
        use = self._candidates.get(key, 0) + 1
        least = min(self._pairs, key=lambda other: self._pairs[other].use)
        if use >= max(ADMITTED_OUTPUTS, self._pairs[least].use):
            del self._pairs[least]
            tenant, served_model = least
            memory = self._memories.get(tenant)
            if memory is not None:
                memory.drop(served_model)
            if not any(other == tenant for other, _ in self._pairs):
                self._memories.pop(tenant, None)
            return True
        if use == 1 and len(self._candidates) >= self._config.max_models:
            del self._candidates[min(self._candidates, key=self._candidates.__getitem__)]
        self._candidates[key] = use
        return False

    def metrics(self, served_model: str, tenant: str = "") -> dict[str, Any]:
        """Prediction quality of a served model over the window, by default of all tenants. `InputError` if it has no outputs.

        Keys: num_outputs, num_censored, num_alarms (since the start), num_hits (outputs with similar past requests); is_used
        (whether predictions are corrected); memory_weight (g); num_window; before, calibrated and after (uncorrected, without
        the memory, and corrected), each as `ScoreWindow.scores`. The corrections of an output are those before its update.
        """
        pair = self._pairs.get((tenant, served_model))
        if pair is None:
            raise InputError("served_model", served_model, ", ".join(self.served_models) or "none yet")
        names = ("before", "calibrated", "after")
        return {
            **{name: getattr(pair, name) for name in _COUNTS},
            "is_used": pair.is_used,
            "memory_weight": pair.memory_weight,
            "num_window": len(pair.scores),
            **{name: pair.scores.scores(version) for version, name in enumerate(names)},
        }

    def state(self) -> dict[str, Any]:
        """The learned state, without the metrics window and the running drift tests: JSON content, except for the arrays of
        the memories."""
        return {
            "format": STATE_FORMAT,
            "pairs": [[*key, pair.state()] for key, pair in self._pairs.items()],
            "memories": [[tenant, memory.state()] for tenant, memory in self._memories.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a `state`, or one of format `OLD_STATE_FORMAT`. `InputError`, without any change, if it is invalid."""
        formats = (STATE_FORMAT, OLD_STATE_FORMAT)
        if not isinstance(state, Mapping) or state.get("format") not in formats:
            raise InputError("state", state, f"a mapping of format {' or '.join(formats)}")
        restored = Correction(self._config)
        try:
            rows = _old_pairs(state) if state["format"] == OLD_STATE_FORMAT else state["pairs"]
            rows = [row for row in rows if max(len(str(row[0])), len(str(row[1]))) <= MAX_NAME_CHARS]
            for tenant, served_model, content in rows[-self._config.max_models :]:
                pair = restored._pairs[str(tenant), str(served_model)] = _Pair(self._config, None)
                pair.restore(content)
            tenants = {tenant for tenant, _ in restored._pairs}
            for tenant, content in state.get("memories", []):
                if tenant in tenants:
                    restored._memories[tenant] = Memory(self._config.memory)
                    restored._memories[tenant].restore(content)
        except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError) as error:
            raise InputError(f"state cannot be used: {error!r}") from error
        self._pairs, self._memories = restored._pairs, restored._memories
        self._candidates.clear()


def _old_pairs(state: Mapping[str, Any]) -> list[list[Any]]:
    """The pairs of a state of the format before: served models, without memories."""
    pairs = []
    for name, content in state["served_models"].items():
        estimate = {key: content[key] for key in ("information", "response")}
        estimate |= {"prior": [[0.0] * 4] * 2, "median_shift": 0.0, "num_updates": content["num_outputs"]}
        gains = [float(content["gain_sum"])] * 2
        counts = {**{key: content[key] for key in _COUNTS[:3]}, "num_hits": 0}
        pairs.append(
            ["", name, {**counts, "gain_sums": gains, "calibrated": estimate, "remembered": estimate}]
        )
    return pairs


def _count(content: Mapping[str, Any], name: str) -> int:
    value = content[name]
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError(name)
    return value


def is_model_name(name: str) -> bool:
    """Whether a text of a log or request is the name of a served model: printable, 1 to `MAX_NAME_CHARS` characters."""
    return 0 < len(name) <= MAX_NAME_CHARS and name.isprintable()


def _check_tokens(name: str, value: int, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 2**53:
        raise InputError(name, value, f"integers from {low} to 2^53")
