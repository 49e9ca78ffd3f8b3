"""The orders of "Semantic Scheduling for LLM Inference": urgency alone (HPJF), and urgency with the remaining time.

The batches, eviction and cache-or-recompute rule of the paper are those of the batch former `stage_aware`.

A text that claims urgency raises its own request as far as the predictor believes it, as in the paper; where that must
not be, order by `RequestState.effective_level`, as `slo_tie` does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from scheduler_core.kv_cost import KVCost
from scheduler_core.policies.base import Policy
from scheduler_core.request import RequestState

#: Seconds between two levels: longer than any request, short enough that a float still tells microseconds apart.
_LEVEL_S = 1e8


@dataclass(kw_only=True, slots=True)
class Hpjf(Policy):
    """Highest priority job first: the most urgent request, arrival order within a level (section 4).

    key = f_e

    | symbol | meaning | unit |
    | --- | --- | --- |
    | f_e | predicted urgency level, 0 = most urgent .. 4; the declared tier, 0 to K - 1, without a prediction | - |

    Differs from the paper: the level is the one of least expected cost, not the most probable one (see
    `UrgencyPrediction.level`).
    """

    key_changes = "never"
    running_keys = "on_event"
    inputs = frozenset({"urgency", "tier"})

    _levels: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    def on_prediction(self, state: RequestState) -> None:
        if state.urgency is not None:
            self._levels[state.request_id] = float(state.urgency.level)

    def on_finish(self, state: RequestState) -> None:
        self._levels.pop(state.request_id, None)

    def key(self, state: RequestState, now: float) -> float:
        return self._levels.get(state.request_id, float(state.request.tier))


@dataclass(kw_only=True, slots=True)
class Semantic(Policy):
    """The most urgent request goes first, within a level the one that needs least time (sections 3.2-3.3).

    key = (f_e, f_t), compared in this order;   f_t = prefill(n_left) + decode(n, m_left)

    | symbol | meaning | unit |
    | --- | --- | --- |
    | f_e | predicted urgency level, 0 = most urgent .. 4; the declared tier, 0 to K - 1, without a prediction | - |
    | f_t | estimated remaining computation time | s |
    | n, n_left | tokens known so far; of these, not in the cache | tokens |
    | m_left | middle of the predicted bucket, or predicted median, or max_tokens, less what is generated; >= 1 | tokens |
    | alpha_1, alpha_2, gamma_1, gamma_2 | constants of prefill and decode, see `kv_cost.KVCost`; A100 with Qwen1.5-4B | s |

    Within a level long requests starve under load, and so do all less urgent levels: that is the paper's constraint.

    Differs from the paper: the open last bucket ends at max_tokens; the level is that of least expected cost.
    """

    key_changes = "never"
    preemptive = True
    progress = "in_runs"
    inputs = frozenset({"urgency", "tier", "bucket", "length"})

    alpha_1: float = KVCost().alpha_1
    alpha_2: float = KVCost().alpha_2
    gamma_1: float = KVCost().gamma_1
    gamma_2: float = KVCost().gamma_2
    _cost: KVCost = field(init=False, repr=False)
    _levels: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self._cost = KVCost(
            alpha_1=self.alpha_1, alpha_2=self.alpha_2, gamma_1=self.gamma_1, gamma_2=self.gamma_2
        )

    def on_prediction(self, state: RequestState) -> None:
        if state.urgency is not None:
            self._levels[state.request_id] = state.urgency.level

    def on_finish(self, state: RequestState) -> None:
        self._levels.pop(state.request_id, None)

    def level(self, state: RequestState) -> int:
        """f_e."""
        return self._levels.get(state.request_id, state.request.tier)

    def remaining_s(self, state: RequestState) -> float:
        """f_t, in seconds."""
        left = max(self._length(state) - state.num_output_tokens, 1.0)
        to_process = max(state.known_tokens, state.prefill_target_tokens) - state.num_computed_tokens
        if state.num_computed_tokens >= state.prefill_target_tokens > 0:
            to_process = 0
        return self._cost.prefill_s(max(to_process, 0)) + self._cost.decode_s(state.known_tokens, left)

    def key(self, state: RequestState, now: float) -> float:
        return self.level(state) * _LEVEL_S + min(self.remaining_s(state), 0.5 * _LEVEL_S)

    def _length(self, state: RequestState) -> float:
        longest = float(state.request.max_tokens)
        if state.bucket is not None:
            ends = (0.0, *state.bucket.edges, max(longest, *state.bucket.edges))
            index = state.bucket.bucket
            return min(0.5 * (ends[index] + ends[index + 1]), longest)
        return longest if state.prediction is None else min(math.exp(state.prediction.mu), longest)
