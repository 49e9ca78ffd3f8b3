"""Policies of "Semantic Scheduling for LLM Inference": urgency only (HPJF), and urgency with the remaining time.

The batch former `stage_aware` implements the paper's batches, evictions and cache-or-recompute rule.

In the paper the predicted urgency of the text is used without a limit. Here it raises a request by at most
`max_promotion` levels above its tier, to the level of least expected cost (`RequestState.effective_level`). With
`max_promotion` of at least 5, the number of levels, f_e is the most probable level, and the order is that of the
paper. A predictor that abstains leaves the request its tier under both; the paper's predictors never do.
"""

import math
from dataclasses import dataclass, field

from scheduler_core.errors import InputError
from scheduler_core.kv_cost import KVCost
from scheduler_core.policies.base import Policy
from scheduler_core.request import RequestState

#: Distance between two levels in seconds: longer than any request, but a float still resolves microseconds.
_LEVEL_S = 1e8


@dataclass(kw_only=True, slots=True)
class Hpjf(Policy):
    """Highest priority job first: the most urgent request, arrival order within a level (section 4).

    key = f_e

    | symbol | meaning | unit |
    | --- | --- | --- |
    | f_e | max_promotion 5 or more: predicted level; else declared tier, raised by at most max_promotion; 0 = most urgent | - |

    Differs from the paper: a predictor can abstain; the default limits the promotion.
    """

    key_changes = "never"
    evicts_by_key = True
    running_keys = "on_event"
    inputs = frozenset({"urgency", "tier"})

    max_promotion: float = 1

    def __post_init__(self) -> None:
        _check_max_promotion(self.max_promotion)

    def key(self, state: RequestState, now: float) -> float:
        return float(state.effective_level(self.max_promotion))


@dataclass(kw_only=True, slots=True)
class Semantic(Policy):
    """Most urgent request first, within a level the one with the least remaining time (sections 3.2-3.3).

    key = (f_e, f_t), compared in this order;   f_t = prefill(n_left) + decode(n, m_left)

    | symbol | meaning | unit |
    | --- | --- | --- |
    | f_e | max_promotion 5 or more: predicted level; else declared tier, raised by at most max_promotion; 0 = most urgent | - |
    | f_t | estimated remaining computation time | s |
    | n, n_left | prompt and generated tokens; those not in the cache | tokens |
    | m_left | middle of the predicted bucket, or predicted median or length, or max_tokens, less generated; >= 1 | tokens |
    | alpha_1, alpha_2, gamma_1, gamma_2 | constants of prefill and decode (`kv_cost.KVCost`); A100 with Qwen1.5-4B | s |

    Under high load, less urgent levels starve, and long requests within a level; the paper accepts this.

    Differs from the paper: the open last bucket ends at max_tokens; a predictor can abstain; the default limits the
    promotion.
    """

    key_changes = "never"
    preemptive = True
    progress = "in_runs"
    inputs = frozenset({"urgency", "tier", "bucket", "length", "point"})

    alpha_1: float = KVCost().alpha_1
    alpha_2: float = KVCost().alpha_2
    gamma_1: float = KVCost().gamma_1
    gamma_2: float = KVCost().gamma_2
    max_promotion: float = 1
    _cost: KVCost = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_max_promotion(self.max_promotion)
        self._cost = KVCost(
            alpha_1=self.alpha_1, alpha_2=self.alpha_2, gamma_1=self.gamma_1, gamma_2=self.gamma_2
        )

    def remaining_s(self, state: RequestState) -> float:
        """f_t, in seconds."""
        remaining = max(self._length(state) - state.num_output_tokens, 1.0)
        to_process = max(state.known_tokens, state.prefill_target_tokens) - state.num_computed_tokens
        if state.num_computed_tokens >= state.prefill_target_tokens > 0:
            to_process = 0
        return self._cost.prefill_s(max(to_process, 0)) + self._cost.decode_s(state.known_tokens, remaining)

    def key(self, state: RequestState, now: float) -> float:
        remaining_s = min(self.remaining_s(state), 0.5 * _LEVEL_S)
        return state.effective_level(self.max_promotion) * _LEVEL_S + remaining_s

    def _length(self, state: RequestState) -> float:
        longest = float(state.request.max_tokens)
        if state.bucket is not None:
            ends = (0.0, *state.bucket.edges, max(longest, *state.bucket.edges))
            index = state.bucket.bucket
            return min(0.5 * (ends[index] + ends[index + 1]), longest)
        if state.prediction is not None:
            return min(math.exp(state.prediction.mu), longest)
        return longest if state.point is None else min(state.point.tokens, longest)


def _check_max_promotion(value: float) -> None:
    if not (value >= 0 and (value == math.inf or value == int(value))):
        raise InputError("max_promotion", value, "integers >= 0; 5 or more: unlimited")
