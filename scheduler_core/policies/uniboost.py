"""DistBoost and UniBoost, policies of "Beyond Prediction: Tail-Aware Scheduling for LLM Inference"."""

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from scheduler_core.policies.base import LAST_RESORT, EngineView, Policy
from scheduler_core.policies.work_left import EventOrder, work_left_s
from scheduler_core.ranges import FINITE, INTEGERS, POSITIVE, check_ranges
from scheduler_core.request import Phase, RequestState

#: ln 5, and the minimum of t99 - t95 in seconds, for degenerate tails.
_LOG_RATIO, _MIN_GAP_S = math.log(5.0), 1e-3

#: Decay factor of the weights in `WorkRate`, per step.
_STEP_FADE = 0.5 ** (1.0 / 1000.0)


def boost_s(work_s: float, gamma_per_s: float) -> float:
    """Boost of a request with known work in seconds, which is subtracted from its arrival time.

    b(w) = (1/gamma) ln( 1 / (1 - exp(-gamma w)) ), which decreases from infinity (w = 0) to 0

    Serving the smallest arrival - boost first is optimal for the decay of P(response > t) in the light-tailed M/G/1 queue (Yu
    & Scully 2024, "Strongly tail-optimal scheduling in the light-tailed M/G/1", Proc. ACM Meas. Anal. Comput. Syst. 8(2)).

    w is the engine time of the request; gamma > 0 is the decay rate of P(response > t).
    """
    return -math.log(-math.expm1(-gamma_per_s * work_s)) / gamma_per_s


@dataclass(slots=True)
class TailRate:
    """gamma-Ada: decay rate of the latency tail, estimated from finished requests (UniBoost, Eq. 9).

    gamma_hat = ln(0.05/0.01)/(t99 - t95) = ln 5/(t99 - t95);   gamma <- (1 - beta) gamma + beta gamma_hat, within bounds

    gamma_per_s is the initial value of gamma, smoothing is beta. An estimate uses the `window` latest
    latencies and is updated after every `update_every` requests.
    """

    gamma_per_s: float
    window: int
    update_every: int
    smoothing: float
    min_per_s: float
    max_per_s: float
    _latencies: deque[float] = field(init=False, repr=False)
    _num_new: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, min_per_s=(POSITIVE, self.max_per_s), smoothing=(POSITIVE, 1.0))
        check_ranges(self, gamma_per_s=(self.min_per_s, self.max_per_s), window=(self.update_every, INTEGERS))
        self._latencies = deque(maxlen=self.window)

    def finished(self, latency_s: float) -> bool:
        """Adds a finished request with its latency; returns whether gamma was updated."""
        self._latencies.append(latency_s)
        self._num_new += 1
        if self._num_new < self.update_every or len(self._latencies) < self.update_every:
            return False
        self._num_new = 0
        t95, t99 = np.quantile(np.fromiter(self._latencies, float), (0.95, 0.99))
        estimate = _LOG_RATIO / max(float(t99 - t95), _MIN_GAP_S)
        gamma = (1.0 - self.smoothing) * self.gamma_per_s + self.smoothing * estimate
        self.gamma_per_s = min(max(gamma, self.min_per_s), self.max_per_s)
        return True


class WorkRate:
    """Measured engine time per prompt token and per output token, in seconds.

    The duration of each step is divided equally among its tokens (a 32nd of a step with 32 decodes); the sums
    decay with a half-life of 1,000 steps. The work of all requests thus adds up to the busy time of the
    engine, like work in an M/G/1 queue. Requires the duration of every step.
    """

    def __init__(self, prefill_token_s: float = 5e-5, decode_token_s: float = 1e-3) -> None:
        self.prefill_token_s = prefill_token_s
        self.decode_token_s = decode_token_s
        self._prefill_s = self._prefill_tokens = self._decode_s = self._decode_tokens = 0.0
        self._step_prefill = self._step_decode = 0

    def on_tokens(self, state: RequestState, num_tokens: int) -> None:
        """Adds tokens of a request that the ending step has processed."""
        if state.num_computed_tokens <= state.prefill_target_tokens:
            self._step_prefill += num_tokens
        else:
            self._step_decode += num_tokens

    def on_step(self, step_s: float, more: int = 0) -> None:
        """Ends a step that took `step_s` seconds; its tokens were added together with those of `more` equal steps."""
        prefill, decode = self._step_prefill // (more + 1), self._step_decode // (more + 1)
        self._step_prefill -= prefill
        self._step_decode -= decode
        if prefill + decode == 0 or step_s <= 0:
            return
        token_s = step_s / (prefill + decode)
        fade = _STEP_FADE
        self._prefill_s = self._prefill_s * fade + token_s * prefill
        self._prefill_tokens = self._prefill_tokens * fade + prefill
        self._decode_s = self._decode_s * fade + token_s * decode
        self._decode_tokens = self._decode_tokens * fade + decode
        if self._prefill_tokens >= 1.0:
            self.prefill_token_s = self._prefill_s / self._prefill_tokens
        if self._decode_tokens >= 1.0:
            self.decode_token_s = self._decode_s / self._decode_tokens


@dataclass(kw_only=True, slots=True)
class DistBoost(Policy):
    """Boosted arrival for prefill, start of decode for decodes (section 3.1, Eqs. 2-6).

    prefill: key = a - b(s_pre);   decode: key = a_dec;   b(w) = (1/gamma) ln(1/(1 - exp(-gamma w)))

    | symbol | meaning | unit |
    | --- | --- | --- |
    | a, a_dec | arrival, start of decode | s |
    | s_pre | engine time of the prompt tokens that are not in the prefix cache | s |
    | gamma | gamma_per_s; large: FCFS, small: shortest prompt first | 1/s |

    No starvation: boosts are finite and fixed, so a request that has waited longer than b(shortest) precedes new ones.

    Differs from the paper, where gamma is per second but work in tokens: tokens are converted to seconds with the measured
    time per prompt token. Keys are recomputed when that time has changed by a tenth.
    """

    key_changes = "on_event"
    progress = "in_runs"

    gamma_per_s: float = 0.1
    prefill_token_s: float = 5e-5
    _rate: WorkRate = field(init=False, repr=False)
    _token_s: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, gamma_per_s=(POSITIVE, FINITE), prefill_token_s=(POSITIVE, FINITE))
        self._rate = WorkRate(self.prefill_token_s)
        self._token_s = self.prefill_token_s

    def on_tokens(self, state: RequestState, num_tokens: int, now: float) -> None:
        self._rate.on_tokens(state, num_tokens)

    def on_step(self, now: float, step_s: float) -> None:
        self._rate.on_step(step_s)

    def on_steps(self, now: float, durations_s: Sequence[float]) -> None:
        # These steps only have decodes, which do not change the time per prompt token.
        for more, step_s in zip(reversed(range(len(durations_s))), durations_s, strict=True):
            self._rate.on_step(step_s, more)

    def on_pressure(self, num_waiting: int, max_num_seqs: int) -> bool:
        if abs(self._rate.prefill_token_s - self._token_s) <= 0.1 * self._token_s:
            return False
        self._token_s = self._rate.prefill_token_s
        return True

    def key(self, state: RequestState, now: float) -> float:
        decoding = state.prefill_target_tokens > 0 and state.phase is Phase.DECODE
        if decoding and state.decode_entered_s is not None:
            return state.decode_entered_s
        tokens = state.known_tokens - state.cached_tokens
        return state.request.arrival_s - boost_s(tokens * self._token_s, self.gamma_per_s)


@dataclass(kw_only=True, slots=True)
class UniBoost(Policy):
    """One boosted order over both phases, without predictions (sections 3.2-3.4, Eqs. 2, 7-9). Batch former `uniboost`
    forms the batches of its algorithm 1; with `chunked_prefill` the order only applies to admissions and evictions.

    key = Phi = a - b(w^);   b(w) = (1/gamma) ln(1/(1 - exp(-gamma w)));   j displaces i if Phi(j) < Phi(i) - delta

    | symbol | meaning | unit |
    | --- | --- | --- |
    | w~ | effective work: max(attained, s_pre - h) = s_pre - h and, in decode, the generated tokens | tokens |
    | h | cached tokens of the prompt, as of the first admission | tokens |
    | w^ | MemGuard: w~ rounded down to the grid k, 2k, 4k, ... (at least k), where Phi changes; without it w~ | tokens |
    | k | bin_tokens | tokens |
    | delta | hysteresis_s | s |
    | gamma | gamma_per_s; gamma-Ada: ln 5/(t99 - t95) of the latest latencies, smoothed (`TailRate`) | 1/s |

    MemGuard (`mem_guard`): a running request can only be displaced in the step after its w^ has grown. If memory runs out
    for the running requests themselves, one may go earlier, but none twice with the same w^: one that comes back is only
    admitted if all such requests have memory up to their next thresholds. So a request with S tokens of work is preempted at
    most 1 + floor(log2(S/k)) times (w^ has no more values), and at most 3 S of its tokens are copied out, with every batch
    former, if k is a multiple of the block size. gamma-Ada: `adapt_gamma`. `signal_by_phase`: w~ is the prompt in prefill
    and the generated tokens in decode, as in the paper's algorithm.

    No starvation: boosts are at most b(k), and those of waiting requests do not grow, so a request that has waited longer
    precedes new ones; its latency is that of FCFS plus the work that overtakes it by boosts (paper, A.2).

    Differs from the paper: (1) gamma is per second but work is in tokens: tokens are converted to engine seconds with the
    measured times per prompt and output token; (2) bins use floor
    (algorithm), not ceiling (Eq. 8), because the stated bound holds for floor; (3) gamma is that of Eq. 9;
    the algorithm's line 17 gives a 39th of it; (4) work lost in a preemption does not count as attained; (5)
    all keys are recomputed when gamma or the times per token have changed by `refresh`, not at every step; (6) in the paper
    no request is evicted between two thresholds, but then paused requests fill the memory, and the engine is slower; (7) the
    bound is that of one engine: a migration starts the count anew.
    """

    key_changes = "on_event"
    preemptive = True
    running_keys = "on_event"
    progress = "in_runs"

    gamma_per_s: float = 0.1
    hysteresis_s: float = 0.1
    mem_guard: bool = True
    adapt_gamma: bool = True
    signal_by_phase: bool = False
    bin_tokens: float = 256
    window: float = 1000
    update_every: float = 100
    smoothing: float = 0.2
    gamma_min_per_s: float = 1e-4
    gamma_max_per_s: float = 100.0
    prefill_token_s: float = 5e-5
    decode_token_s: float = 1e-3
    refresh: float = 0.1
    _rate: WorkRate = field(init=False, repr=False)
    _tail: TailRate = field(init=False, repr=False)
    _used: tuple[float, float, float] = field(init=False, repr=False)
    #: gamma at the start of the step.
    _latest_gamma: float = field(init=False, repr=False)
    #: Whether `_used` has changed between steps that were completed at once.
    _moved: bool = field(default=False, init=False, repr=False)
    #: Of admitted and preempted requests: s_pre - h, and w^.
    _prompts: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _bins: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    #: Generated tokens at which w^ grows, of those that may not be displaced before.
    _next: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    #: Requests that may be displaced in this step, and those that were preempted since their w^ has grown.
    _open: set[str] = field(default_factory=set, init=False, repr=False)
    _spent: set[str] = field(default_factory=set, init=False, repr=False)
    #: Of those of `_spent` that run: tokens that they may need up to their next threshold.
    _kept: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _capacity_tokens: float = field(default=math.inf, init=False, repr=False)
    _changed: list[RequestState] = field(default_factory=list, init=False, repr=False)
    _last_step_s: float = field(default=-math.inf, init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, hysteresis_s=(0, FINITE), bin_tokens=(1, FINITE), refresh=(POSITIVE, 0.999))
        check_ranges(self, prefill_token_s=(POSITIVE, FINITE), decode_token_s=(POSITIVE, FINITE))
        self._rate = WorkRate(self.prefill_token_s, self.decode_token_s)
        self._tail = TailRate(
            self.gamma_per_s,
            window=int(self.window),
            update_every=int(self.update_every),
            smoothing=self.smoothing,
            min_per_s=self.gamma_min_per_s,
            max_per_s=self.gamma_max_per_s,
        )
        self._latest_gamma = self.gamma_per_s
        self._used = (self.gamma_per_s, self.prefill_token_s, self.decode_token_s)

    @property
    def gamma(self) -> float:
        """gamma of the current keys, per second."""
        return self._used[0]

    def effective_tokens(self, state: RequestState) -> tuple[int, int]:
        """w~ as (prompt tokens, generated tokens)."""
        prompt = self._prompts.get(state.request_id)
        if prompt is None:
            prompt = state.request.prompt_tokens - state.cached_tokens
        if self.signal_by_phase and state.num_output_tokens > 0 and state.phase is Phase.DECODE:
            return 0, state.num_output_tokens
        return prompt, 0 if self.signal_by_phase else state.num_output_tokens

    def quantized(self, tokens: float) -> float:
        """w^ = k 2^floor(log2(max(1, w/k))), in tokens."""
        if tokens < 2.0 * self.bin_tokens:
            return float(self.bin_tokens)
        return float(self.bin_tokens * 2.0 ** math.floor(math.log2(tokens / self.bin_tokens)))

    def key(self, state: RequestState, now: float) -> float:
        gamma, prefill_token_s, decode_token_s = self._used
        work: tuple[float, float] = self.effective_tokens(state)
        if self.mem_guard:
            work = self._at_threshold(*work)
        return state.request.arrival_s - boost_s(work[0] * prefill_token_s + work[1] * decode_token_s, gamma)

    def _at_threshold(self, prompt: float, generated: float) -> tuple[float, float]:
        """w^ as (prompt tokens, generated tokens), as of the step in which it was reached; in the first bin all are the prompt's."""
        tokens = self.quantized(prompt + generated)
        if prompt and tokens > self.quantized(prompt):
            return prompt, tokens - prompt
        return (tokens, 0.0) if prompt else (0.0, tokens)

    def may_preempt(self, running: RequestState, waiting: RequestState, now: float) -> bool:
        guarded = self.mem_guard and running.request_id not in self._open
        return not guarded and self.key(waiting, now) < self.key(running, now) - self.hysteresis_s

    def eviction_key(self, state: RequestState, now: float) -> float:
        if not self.mem_guard or state.request_id in self._open:
            return self.key(state, now)
        return -math.inf if state.request_id in self._spent else LAST_RESORT

    def bind(self, engine: EngineView) -> None:
        self._capacity_tokens = engine.capacity_tokens

    def may_admit(self, state: RequestState, now: float) -> bool:
        if state.request_id not in self._spent:
            return True
        need = sum(self._kept.values()) + self._tokens_to_threshold(state)
        return need + self.bin_tokens <= self._capacity_tokens

    def _tokens_to_threshold(self, state: RequestState) -> float:
        """Tokens of the request in the cache when it reaches its next threshold, rounded up to a multiple of k."""
        reached = state.num_output_tokens if self.signal_by_phase else sum(self.effective_tokens(state))
        tokens = state.known_tokens + 2.0 * self._bins[state.request_id] - reached
        longest = state.request.prompt_tokens + state.request.max_tokens
        return math.ceil(min(tokens, longest) / self.bin_tokens) * self.bin_tokens

    def on_admit(self, state: RequestState, now: float) -> None:
        name = state.request_id
        if name not in self._bins:
            self._prompts[name] = state.request.prompt_tokens - state.cached_tokens
            self._bins[name] = self.quantized(sum(self.effective_tokens(state)))
        if name in self._spent:
            self._kept[name] = self._tokens_to_threshold(state)

    def on_preempt(self, state: RequestState, now: float) -> None:
        self._open.discard(state.request_id)
        self._kept.pop(state.request_id, None)
        if self.mem_guard:
            self._spent.add(state.request_id)

    def on_tokens(self, state: RequestState, num_tokens: int, now: float) -> None:
        self._rate.on_tokens(state, num_tokens)
        name = state.request_id
        if state.num_output_tokens < self._next.get(name, 0):
            return  # most calls
        if not self.mem_guard:
            self._changed.append(state)
            return
        tokens = sum(self.effective_tokens(state))
        self._next.pop(name, None)
        if tokens < 2.0 * self._bins[name]:
            if name in self._open:
                self._open.discard(name)
                self._changed.append(state)
            if not self.signal_by_phase:
                self._next[name] = state.num_output_tokens + 2.0 * self._bins[name] - tokens
            return
        self._changed.append(state)
        self._spent.discard(name)
        self._kept.pop(name, None)
        decodes = state.num_computed_tokens > state.prefill_target_tokens
        for reached in range(tokens - num_tokens + 1 if decodes else tokens, tokens + 1):  # token by token
            self._open.discard(name)
            if reached >= 2.0 * self._bins[name]:
                self._bins[name] = self.quantized(reached)
                self._open.add(name)

    def on_prefill_end(self, state: RequestState, now: float) -> None:
        if self.signal_by_phase:
            self._changed.append(state)

    def take_changed(self, now: float) -> Collection[RequestState]:
        changed, self._changed = self._changed, []
        return changed

    def on_step(self, now: float, step_s: float) -> None:
        self._rate.on_step(step_s)
        self._last_step_s = now

    def on_steps(self, now: float, durations_s: Sequence[float]) -> None:
        for more, step_s in zip(reversed(range(len(durations_s))), durations_s, strict=True):
            self._rate.on_step(step_s, more)
            if more:
                # Requests that finish in the last step do not contribute to gamma yet.
                self._moved = self._refresh(self._latest_gamma) or self._moved
        self._last_step_s = now

    def on_finish(self, state: RequestState) -> None:
        # It finishes now if its last token is later than the last completed step; otherwise it was aborted.
        if self.adapt_gamma and state.last_token_s is not None and state.last_token_s > self._last_step_s:
            self._tail.finished(state.last_token_s - state.request.arrival_s)
        self._prompts.pop(state.request_id, None)
        self._bins.pop(state.request_id, None)
        self._next.pop(state.request_id, None)
        self._open.discard(state.request_id)
        self._spent.discard(state.request_id)
        self._kept.pop(state.request_id, None)

    def on_pressure(self, num_waiting: int, max_num_seqs: int) -> bool:
        moved, self._moved = self._moved, False
        self._latest_gamma = self._tail.gamma_per_s
        return self._refresh(self._latest_gamma) or moved

    def _refresh(self, gamma: float) -> bool:
        """Updates gamma and the times per token of the keys if one has changed enough; returns whether."""
        rates = (gamma, self._rate.prefill_token_s, self._rate.decode_token_s)
        if all(abs(new - old) <= self.refresh * old for new, old in zip(rates, self._used, strict=True)):
            return False
        self._used = rates
        return True


@dataclass(kw_only=True, slots=True)
class UniBoostUncached(EventOrder):
    """UniBoost of the waiting queue alone, as its authors propose it for agents' prompts (sgl-project/sglang #35637).

    key = Phi = a - b(w),   w = alpha (n - h),   b(w) = (1/gamma) ln(1/(1 - exp(-gamma w)))

    | symbol | meaning | unit |
    | --- | --- | --- |
    | a | arrival | s |
    | n, h | length of the prompt, and of its prefix in the prefix cache | tokens |
    | alpha | engine time per prompt token, as measured; a copy from host memory counts with its own time | s |
    | gamma | gamma_per_s; gamma-Ada (`adapt_gamma`): ln 5/(t99 - t95) of the latest latencies, smoothed (`TailRate`) | 1/s |

    No starvation: boosts are finite, so a request that has waited longer than that of a request without a prefill precedes it.

    Differs from the proposal: alpha is measured instead of set; sorted after events instead of before every admission; a
    latency is that of the whole request, and also counts if it was aborted after its first token.
    """

    inputs = frozenset({"cached", "costs"})

    gamma_per_s: float = 0.1
    adapt_gamma: bool = True
    window: float = 1000
    update_every: float = 100
    smoothing: float = 0.2
    gamma_min_per_s: float = 1e-4
    gamma_max_per_s: float = 100.0
    _tail: TailRate = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._tail = TailRate(
            self.gamma_per_s,
            window=int(self.window),
            update_every=int(self.update_every),
            smoothing=self.smoothing,
            min_per_s=self.gamma_min_per_s,
            max_per_s=self.gamma_max_per_s,
        )

    def on_finish(self, state: RequestState) -> None:
        EventOrder.on_finish(self, state)
        if self.adapt_gamma and state.last_token_s is not None:
            self._tail.finished(state.last_token_s - state.request.arrival_s)

    def key(self, state: RequestState, now: float) -> float:
        return state.request.arrival_s - boost_s(work_left_s(state, self._times), self._tail.gamma_per_s)
