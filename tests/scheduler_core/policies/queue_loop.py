"""One server, preemption free of charge: the M/G/1 queue of theory, ordered by a policy's keys. A token takes a second."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler_core.policies import Policy
from scheduler_core.predictions import LengthPrediction
from scheduler_core.request import Request, RequestState

FloatArray = NDArray[np.float64]


def latencies(
    policy: Policy,
    arrivals: FloatArray,
    tokens: NDArray[np.int64],
    predictions: list[LengthPrediction],
    *,
    cap: int,
    look_every: int | None = None,
) -> FloatArray:
    """Time from arrival to last token of each request.

    Args:
        policy: Keys alone are used; the smallest, then the earliest, is served.
        arrivals: Ascending, in seconds.
        tokens: True lengths.
        predictions: Of each request.
        cap: max_tokens of all.
        look_every: Tokens after which the choice is reconsidered; None: at arrivals and ends only.
    """
    present: dict[int, RequestState] = {}
    keys: dict[int, float] = {}
    found = np.zeros(len(arrivals))
    now, coming = 0.0, 0
    while coming < len(arrivals) or present:
        if not present:
            now = max(now, float(arrivals[coming]))
        while coming < len(arrivals) and arrivals[coming] <= now:
            request = Request(
                request_id=str(coming), arrival_s=float(arrivals[coming]), prompt_tokens=1, max_tokens=cap
            )
            state = RequestState(request, order=coming, prediction=predictions[coming])
            policy.on_prediction(state)
            present[coming], keys[coming] = state, policy.key(state, now)
            coming += 1
        best = min(present, key=lambda index: (keys[index], index))
        state = present[best]
        left = float(tokens[best]) - state.num_output_tokens
        work = left if look_every is None else min(left, look_every - state.num_output_tokens % look_every)
        if coming < len(arrivals):
            work = min(work, float(arrivals[coming]) - now)
        now += work
        # Parts of a token are work too: the policies only read the number.
        state.num_output_tokens += work  # type: ignore[assignment]
        if tokens[best] - state.num_output_tokens <= 1e-9:
            found[best] = now - arrivals[best]
            policy.on_finish(state)
            del present[best], keys[best]
        else:
            keys[best] = policy.key(state, now)
    return found
