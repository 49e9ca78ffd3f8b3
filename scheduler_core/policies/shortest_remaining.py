"""Policies by the expected remaining length, updated during decoding: TRAIL and ELIS."""

import math
from dataclasses import dataclass, field

from scheduler_core.lengths.table import LengthTable
from scheduler_core.policies.base import Policy
from scheduler_core.ranges import FINITE, check_ranges
from scheduler_core.request import RequestState


@dataclass(kw_only=True, slots=True)
class _ExpectedRemaining(Policy):
    """key = E[X~ - g | X~ > g], X~ = min(X, M), for g rounded down to a multiple of an interval.

    Without a prediction it is max_tokens less the generated tokens.
    """

    key_changes = "never"
    preemptive = True
    progress = "in_runs"
    inputs = frozenset({"length"})

    _tables: dict[str, LengthTable] = field(default_factory=dict, init=False, repr=False)
    #: (rounded generated tokens, expected remaining tokens) by request.
    _remaining: dict[str, tuple[float, float]] = field(default_factory=dict, init=False, repr=False)

    def on_prediction(self, state: RequestState) -> None:
        length = state.prediction
        if length is not None:
            self._tables[state.request_id] = length.table(state.request.max_tokens)
            self._remaining.pop(state.request_id, None)

    def on_finish(self, state: RequestState) -> None:
        self._tables.pop(state.request_id, None)
        self._remaining.pop(state.request_id, None)

    def _expected_remaining(self, state: RequestState, interval_tokens: float) -> float:
        """The key, recomputed every `interval_tokens` tokens."""
        table = self._tables.get(state.request_id)
        if table is None:
            return float(state.request.max_tokens - state.num_output_tokens)
        generated = state.num_output_tokens - state.num_output_tokens % interval_tokens
        cached = self._remaining.get(state.request_id)
        if cached is None or cached[0] != generated:
            cached = self._remaining[state.request_id] = (generated, table.expected_remaining(generated))
        return cached[1]


@dataclass(kw_only=True, slots=True)
class Trail(_ExpectedRemaining):
    """TRAIL: shortest remaining predicted time with limited preemption (Shahout et al. 2024, "Don't Stop Me Now:
    Embedding Based Scheduling for LLMs", arXiv:2410.01035, section 3.3).

    key = E[X~ - g | X~ > g], X~ = min(X, M);   not displaced once g >= C r

    | symbol | meaning | unit |
    | --- | --- | --- |
    | X, M | predicted output length, log-t; max_tokens, also the length without a prediction | tokens |
    | g | tokens generated, rounded down to a multiple of `update_tokens` | tokens |
    | r | E[X~], the initially predicted length | tokens |
    | C | limit, 0.8; 0: requests are never displaced | - |

    Differs from the paper: the remaining length is the conditional expectation of the initial prediction, not the output
    of a probe on hidden states of the served model; it is updated every `update_tokens` tokens, not with every token.
    """

    limit: float = 0.8
    update_tokens: float = 16

    def __post_init__(self) -> None:
        check_ranges(self, limit=(0, FINITE), update_tokens=(1, FINITE))

    def key(self, state: RequestState, now: float) -> float:
        return self._expected_remaining(state, self.update_tokens)

    def eviction_key(self, state: RequestState, now: float) -> float:
        table = self._tables.get(state.request_id)
        first = float(state.request.max_tokens) if table is None else table.expected_remaining()
        return -math.inf if state.num_output_tokens >= self.limit * first else self.key(state, now)


@dataclass(kw_only=True, slots=True)
class Elis(_ExpectedRemaining):
    """ELIS: iterative shortest remaining time first (Choi et al. 2025, "ELIS: Efficient LLM Iterative Scheduling System
    with Response Length Predictor", arXiv:2505.09142): a new prediction, and possible displacement, every n tokens.

    key = E[X~ - g_n | X~ > g_n], g_n = n floor(g / n)

    | symbol | meaning | unit |
    | --- | --- | --- |
    | X~ = min(X, M) | predicted output length, log-t; max_tokens, also the length without a prediction | tokens |
    | g, n | tokens generated; window_tokens, 50 | tokens |

    Differs from the paper: instead of calling a model, the prediction of each window is the conditional expectation of the
    initial one; a new prediction from `update` is used at once.
    """

    window_tokens: float = 50

    def __post_init__(self) -> None:
        check_ranges(self, window_tokens=(1, FINITE))

    def key(self, state: RequestState, now: float) -> float:
        return self._expected_remaining(state, self.window_tokens)

    def eviction_key(self, state: RequestState, now: float) -> float:
        within = state.num_output_tokens % self.window_tokens != 0
        return -math.inf if within else self.key(state, now)
