"""How far to believe the predictor, learned online: boosts of predicted and of certain work, mixed. Ours; the learner is Freund
& Schapire's Hedge (see `indices.hedge`), the question that of Purohit, Svitkina & Kumar 2018, "Improving online algorithms
via ML predictions", NeurIPS 31."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar

from scheduler_core.errors import InputError
from scheduler_core.indices.boost import boost_s
from scheduler_core.indices.hedge import Hedge
from scheduler_core.policies.base import KeyChanges, Policy
from scheduler_core.request import RequestState

#: Weights of the predicted boost that the learner chooses from.
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(kw_only=True, slots=True)
class MixedBoost(Policy):
    """Arrival order with boosts, of which a learned share comes from the predicted length and the rest from the prompt.

    key = a - [omega b(n t_p + x t_d) + (1 - omega) b(n t_p)];   omega = sum over i of p_i omega_i

    | symbol | meaning | unit |
    | --- | --- | --- |
    | n, x | prompt; predicted median within max_tokens | tokens |
    | t_p, t_d, gamma | engine time of a prompt token, of an output token; rate of the boost | s, s, 1/s |
    | omega_i, p_i | 0, 0.25, 0.5, 0.75, 1; the learner's belief in each | - |

    A round of the learner is a finished request, compared with the `compare` finished before it: an expert loses the share
    of the difference in true length (sum over pairs |x_i - x_j|) that its boosts put the wrong way round, half for a tie.
    That is what a wrong order costs: shortest first loses |x_i - x_j| by one exchange.

    Argument: the lengths of finished requests are seen whatever was believed, so all experts can be judged on each (full
    information), and Hedge's regret is at most 2 sqrt(T ln 5 / 2) + sqrt(ln 5 / 8) after T requests: `regret`, measured,
    against `regret_bound`. With a good predictor omega goes to 1, with a useless one to whatever the prompt is worth.

    No starvation: boosts are finite, and change with omega only.

    Raises:
        InputError: A parameter is outside its range.
    """

    key_changes: ClassVar[KeyChanges] = "on_event"
    sees_every_step: ClassVar[bool] = True
    inputs: ClassVar[frozenset[str]] = frozenset({"length"})

    gamma_per_s: float = 0.02
    prefill_token_s: float = 5e-5
    decode_token_s: float = 1e-3
    compare: float = 32
    _hedge: Hedge = field(init=False, repr=False)
    _share: float = field(default=0.5, init=False, repr=False)
    _finished: deque[tuple[int, float, float]] = field(init=False, repr=False)
    _seen_s: float = field(default=-math.inf, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("gamma_per_s", "prefill_token_s", "decode_token_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(name, getattr(self, name), "numbers > 0")
        if not 1 <= self.compare <= 10_000:
            raise InputError("compare", self.compare, "numbers from 1 to 10000")
        self._hedge = Hedge(len(SHARES))
        self._finished = deque(maxlen=int(self.compare))

    @property
    def share(self) -> float:
        """omega, as keys use it."""
        return self._share

    @property
    def regret(self) -> float:
        """The learner's loss so far less that of the best fixed omega_i."""
        return self._hedge.regret

    @property
    def regret_bound(self) -> float:
        """What `regret` cannot exceed."""
        return self._hedge.regret_bound

    def boosts_s(self, state: RequestState) -> tuple[float, float]:
        """(predicted, certain) boost in seconds."""
        request = state.request
        prompt_s = self.prefill_token_s * (request.prompt_tokens - request.cached_prefix_tokens)
        certain = boost_s(prompt_s, self.gamma_per_s)
        length = float(request.max_tokens)
        if state.prediction is not None:
            length = max(min(math.exp(state.prediction.mu), length), 1e-3)
        return boost_s(prompt_s + self.decode_token_s * length, self.gamma_per_s), certain

    def key(self, state: RequestState, now: float) -> float:
        predicted, certain = self.boosts_s(state)
        return state.request.arrival_s - (self._share * predicted + (1.0 - self._share) * certain)

    def on_step(self, now: float, step_s: float) -> None:
        self._seen_s = now

    def on_finish(self, state: RequestState) -> None:
        # A token later than the last step that has ended: it finishes now. Otherwise it was aborted.
        if state.last_token_s is not None and state.last_token_s > self._seen_s:
            predicted, certain = self.boosts_s(state)
            self._judge(state.num_output_tokens, predicted, certain)
            self._finished.append((state.num_output_tokens, predicted, certain))

    def on_pressure(self, num_waiting: int, max_num_seqs: int) -> bool:
        share = sum(belief * omega for belief, omega in zip(self._hedge.weights, SHARES, strict=True))
        if abs(share - self._share) <= 0.05:
            return False
        self._share = share
        return True

    def _judge(self, tokens: int, predicted: float, certain: float) -> None:
        losses = [0.0] * len(SHARES)
        whole = 0.0
        for other_tokens, other_predicted, other_certain in self._finished:
            cost = float(abs(tokens - other_tokens))
            whole += cost
            for index, omega in enumerate(SHARES):
                lead = omega * (predicted - other_predicted) + (1.0 - omega) * (certain - other_certain)
                wrong = 0.5 if lead == 0 else float((lead > 0) != (tokens < other_tokens))
                losses[index] += cost * wrong
        if whole > 0:
            self._hedge.observe([loss / whole for loss in losses])
