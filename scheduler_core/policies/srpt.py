"""SRPT: shortest remaining processing time (Schrage 1968, "A proof of the optimality of the shortest remaining processing
time discipline", Operations Research 16, 687-690)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from scheduler_core.policies.base import KeyChanges, Policy
from scheduler_core.request import RequestState


@dataclass(kw_only=True, slots=True)
class Srpt(Policy):
    """The request with the fewest tokens left goes first, and takes the place of one with more.

    key = max(min(exp(mu), M) - g, 0)

    | symbol | meaning | unit |
    | --- | --- | --- |
    | exp(mu) | median of the predicted length | tokens |
    | M | the request's own max_tokens; also the length without a prediction | tokens |
    | g | tokens generated so far | tokens |

    With an oracle predictor this is SRPT on the true lengths, the least mean response time there is in one server.

    Differs from the paper: lengths are predicted once; an answer longer than predicted has 0 left and stays in front
    (`trail`, `elis` and `gittins` correct that); a displaced request computes its prefix again, which SRPT holds to be
    free; only the output counts.
    """

    key_changes: ClassVar[KeyChanges] = "never"
    preemptive: ClassVar[bool] = True
    inputs: ClassVar[frozenset[str]] = frozenset({"length"})

    def key(self, state: RequestState, now: float) -> float:
        length = float(state.request.max_tokens)
        if state.prediction is not None:
            length = min(math.exp(state.prediction.mu), length)
        return max(length - state.num_output_tokens, 0.0)
