"""The policy's key of a request at the moment it is sent on: what a hint is made from."""

from __future__ import annotations

from dataclasses import dataclass, field

from predictors.proxy.aged import Aged
from scheduler_core.errors import InputError
from scheduler_core.policies import POLICIES, make_policy
from scheduler_core.policies.base import Policy
from scheduler_core.predictions import Prediction
from scheduler_core.request import RequestState


def aged_policy(name: str, parameters: dict[str, float], aging_per_s: float) -> Aged:
    """A policy by name with ageing.

    Raises:
        InputError: Name or parameter is unknown, or a value outside its range.
    """
    return Aged(make_policy(name, parameters), aging_per_s)


def take_prediction(policy: Policy, state: RequestState, prediction: Prediction | None) -> None:
    """Writes a prediction, or that there is none, where policies read it."""
    if prediction is None:
        state.prediction_failed = True
        return
    state.prediction = prediction.length or state.prediction
    state.urgency = prediction.urgency or state.urgency
    state.bucket = prediction.bucket or state.bucket
    state.rank = prediction.rank or state.rank
    policy.on_prediction(state)


@dataclass(slots=True)
class SentOrder:
    """Keys of requests that an engine will order by itself: each is computed once, when the request is sent.

    Args:
        name: Of the policy, for messages.
        policy: Gives the keys.
        max_num_seqs: Requests the engine works on at a time; what is beyond it waits there, and is the queue length
            that TIE's beta depends on.

    Raises:
        InputError: The policy's key changes while a request waits, so that one number cannot stand for it.
    """

    name: str
    policy: Aged
    max_num_seqs: int
    num_inside: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.policy.policy.key_changes == "with_time":
            allowed = ", ".join(name for name, kind in POLICIES.items() if kind.key_changes != "with_time")
            raise InputError("policy for an engine that orders by itself", self.name, allowed)
        if self.max_num_seqs < 1:
            raise InputError("max_num_seqs", self.max_num_seqs, "an integer >= 1")

    def enter(self, state: RequestState, now: float) -> None:
        """A request has arrived."""
        self.num_inside += 1
        self.policy.on_arrival(state, now)

    def key(self, state: RequestState, prediction: Prediction | None, now: float) -> float:
        """Its key with what is known of it now; smaller goes first. It counts as sent from here on."""
        take_prediction(self.policy, state, prediction)
        self.policy.on_pressure(max(0, self.num_inside - self.max_num_seqs), self.max_num_seqs)
        self.policy.take_changed(now)
        key = self.policy.key(state, now)
        self.policy.on_admit(state, now)
        return key

    def leave(self, state: RequestState) -> None:
        """It has been answered, or is gone."""
        self.num_inside -= 1
        self.policy.on_finish(state)
