"""Policies by size: SSJF (median length), SEPT (mean length), HRRN (uncached prompt and wait), SRPT (remaining length)."""

import math
from dataclasses import dataclass

from scheduler_core.policies.base import Policy
from scheduler_core.policies.estimates import median_tokens, risk_tokens
from scheduler_core.policies.work_left import EventOrder, WorkLeft, work_left_s
from scheduler_core.request import RequestState


@dataclass(kw_only=True, slots=True)
class Ssjf(WorkLeft):
    """Speculative shortest job first (Qiu et al. 2024, "Efficient Interactive LLM Serving with Proxy Model-based
    Sequence Length Prediction", arXiv:2404.08509).

    key = ln min(y, M);   with `work_left` the engine time of prompt and min(y, M)

    | symbol | meaning | unit |
    | --- | --- | --- |
    | y | predicted length; else the median of the predicted distribution | tokens |
    | M | max_tokens of the request; also the length assumed without a prediction | tokens |

    With an oracle predictor this is SJF on the true lengths, the usual reference.

    Differs from the paper: without a regression head in the artifact, y is the median of the predicted distribution;
    requests do not wait for their predictions, which update the order on arrival.
    """

    inputs = frozenset({"length", "point"})

    def key(self, state: RequestState, now: float) -> float:
        if self.work_left:
            tokens = median_tokens(state) if state.point is None else state.point.tokens
            return self.work(state, min(tokens, state.request.max_tokens))
        longest = math.log(state.request.max_tokens)
        if state.point is not None:
            return min(math.log(state.point.tokens), longest)
        return longest if state.prediction is None else min(state.prediction.mu, longest)


@dataclass(kw_only=True, slots=True)
class Sept(WorkLeft):
    """Shortest expected processing time (Weber 1983, "Scheduling jobs with stochastic processing requirements on
    parallel machines", J. Appl. Probab. 20, 841-847); TIE's ablation with beta = 0 (TIE, table 4).

    key = E[min(X, M)];   with `work_left` the engine time of prompt and E[min(X, M)]

    | symbol | meaning | unit |
    | --- | --- | --- |
    | X | predicted output length, log-t | tokens |
    | M | max_tokens of the request; also the length assumed without a prediction | tokens |

    Differs from the paper: the expectation is of the censored length, as in TIE (Eq. 9), because the mean of a
    log-t is infinite; as in TIE, the key ignores the prompt.
    """

    inputs = frozenset({"length"})

    def key(self, state: RequestState, now: float) -> float:
        return self.work(state, risk_tokens(state)[0])


@dataclass(kw_only=True, slots=True)
class Hrrn(EventOrder):
    """Highest response ratio next: short requests first, but all rise while waiting, short ones faster (Brinch Hansen 1971,
    "An analysis of response ratio scheduling", IFIP Congress; SGLang's `hrrn`, sgl-project/sglang #32911).

    ratio = (wait + s) / s, largest first;   key = -ratio;   s = prefill_s(n - h)

    | symbol | meaning | unit |
    | --- | --- | --- |
    | wait | from the arrival until the latest event | s |
    | s | service time: engine time of the prompt, as measured; with `count_outputs` also of E[min(X, M)] tokens | s |
    | n, h | length of the prompt, and of its prefix in the prefix cache | tokens |
    | X, M | predicted output length, log-t; the request's max_tokens, also the length without a prediction | tokens |

    No starvation: the ratio of a waiting request grows without bound, and only shorter new requests can overtake it.

    Differs from SGLang: a wait is in seconds, not in prompt tokens that the engine has processed meanwhile, which is the same
    at constant speed; sorted after events, not before every step, and also with more than 128 waiting requests.
    """

    inputs = frozenset({"cached", "costs", "length"})

    count_outputs: bool = False

    def key(self, state: RequestState, now: float) -> float:
        output_tokens = risk_tokens(state)[0] if self.count_outputs else 0.0
        return -1.0 - (self._key_s - state.request.arrival_s) / work_left_s(state, self._times, output_tokens)


@dataclass(kw_only=True, slots=True)
class Srpt(Policy):
    """Shortest remaining processing time (Schrage 1968, "A proof of the optimality of the shortest remaining processing
    time discipline", Operations Research 16, 687-690).

    key = max(min(exp(mu), M) - g, 0)

    | symbol | meaning | unit |
    | --- | --- | --- |
    | exp(mu) | median of the predicted length | tokens |
    | M | max_tokens of the request; also the length without a prediction | tokens |
    | g | tokens generated so far | tokens |

    With an oracle predictor this is SRPT on the true lengths, which minimizes the mean response time of a single server.

    Differs from the paper: lengths are predicted once; an output longer than predicted has remaining length 0 and stays
    first (`trail` and `elis` correct that); a displaced request recomputes its prefix, which is free in SRPT;
    the key ignores the prompt.
    """

    key_changes = "never"
    preemptive = True
    progress = "in_runs"
    inputs = frozenset({"length"})

    def key(self, state: RequestState, now: float) -> float:
        length = float(state.request.max_tokens)
        if state.prediction is not None:
            length = min(math.exp(state.prediction.mu), length)
        return max(length - state.num_output_tokens, 0.0)
