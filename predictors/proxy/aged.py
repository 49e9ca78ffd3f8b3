"""A policy whose requests gain with waiting, whatever the policy itself does."""

from __future__ import annotations

import math
from collections.abc import Collection

from scheduler_core.errors import InputError
from scheduler_core.policies import Policy
from scheduler_core.request import RequestState


class Aged(Policy):
    """key = the policy's key + aging_per_s * arrival.

    Who arrived w seconds earlier is ahead by w * aging_per_s of the policy's own unit (tokens for `sept`, ln tokens for
    `tie`), so nobody is overtaken for ever. The term does not change while a request waits: a heap stays exact, and
    one number, told to an engine once, ages by itself.

    Args:
        policy: Whose key.
        aging_per_s: At least 0, per second; 0 leaves the policy as it is.

    Raises:
        InputError: `aging_per_s` is outside its range.
    """

    __slots__ = ("aging_per_s", "policy")

    def __init__(self, policy: Policy, aging_per_s: float) -> None:
        if not 0 <= aging_per_s < math.inf:
            raise InputError("aging_per_s", aging_per_s, "a finite number >= 0")
        self.policy = policy
        self.aging_per_s = aging_per_s

    def key(self, state: RequestState, now: float) -> float:
        return self.policy.key(state, now) + self.aging_per_s * state.request.arrival_s

    def on_pressure(self, num_waiting: int, max_num_seqs: int) -> bool:
        return self.policy.on_pressure(num_waiting, max_num_seqs)

    def take_changed(self, now: float) -> Collection[RequestState]:
        return self.policy.take_changed(now)

    def on_arrival(self, state: RequestState, now: float) -> None:
        self.policy.on_arrival(state, now)

    def on_prediction(self, state: RequestState) -> None:
        self.policy.on_prediction(state)

    def on_admit(self, state: RequestState, now: float) -> None:
        self.policy.on_admit(state, now)

    def on_finish(self, state: RequestState) -> None:
        self.policy.on_finish(state)
