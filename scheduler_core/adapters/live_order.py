"""The policy's order over the requests of an engine that forms its batches itself."""

from __future__ import annotations

import math
from collections.abc import Iterable

from scheduler_core.policies.base import Policy
from scheduler_core.predictions import LengthPrediction, Prediction
from scheduler_core.request import Request, RequestState, Status
from scheduler_core.waiting_queue import WaitingQueue


class LiveOrder:
    """Keeps a `RequestState` for each live request of the engine, and tells the policy what happens to it.

    The engine decides who is admitted, how many tokens a step has and who holds memory; this only follows. A state lives
    from `arrive` to `leave`, so that a prediction outlasts preemptions. Times are seconds on one clock.

    Args:
        policy: Gives the order; belongs to this object alone.
        max_num_seqs: Most requests that the engine runs at the same time.
    """

    def __init__(self, policy: Policy, max_num_seqs: int) -> None:
        self.policy = policy
        self.states: dict[str, RequestState] = {}
        self.waiting = WaitingQueue(policy)
        self._max_num_seqs = max_num_seqs
        self._num_arrived = 0

    def arrive(self, request: Request, now: float) -> None:
        """A request is new; it is not in the queue yet."""
        assert request.request_id not in self.states, "an id that lives already"
        state = RequestState(request, order=self._num_arrived)
        self._num_arrived += 1
        self.states[request.request_id] = state
        self.policy.on_arrival(state, now)

    def enqueue(self, request_id: str, now: float) -> None:
        """The request is in the waiting queue, new or again."""
        self.waiting.push(self.states[request_id], now)

    def dequeue(self, request_id: str) -> bool:
        """The request is no longer in the waiting queue; False if it was not."""
        if request_id not in self.waiting:
            return False
        self.waiting.remove(self.states[request_id])
        return True

    def predict(
        self, request_id: str, prediction: Prediction | LengthPrediction | None, now: float
    ) -> RequestState | None:
        """A prediction has come, None if the predictor failed: the request is placed anew.

        Returns:
            The request; None if it is gone.
        """
        state = self.states.get(request_id)
        if state is None:
            return None
        if prediction is None:
            state.prediction_failed = True
            return state
        if isinstance(prediction, LengthPrediction):
            prediction = Prediction(length=prediction)
        state.prediction = prediction.length or state.prediction
        state.urgency = prediction.urgency or state.urgency
        state.bucket = prediction.bucket or state.bucket
        state.rank = prediction.rank or state.rank
        state.prediction_failed = False
        self.policy.on_prediction(state)
        self._place(state, now)
        return state

    def start_step(self, now: float) -> bool:
        """Brings the keys up to date before the engine chooses; whether all were computed anew."""
        for state in self.policy.take_changed(now):
            self._place(state, now)
        pressed = self.policy.on_pressure(len(self.waiting), self._max_num_seqs)
        if pressed or self.policy.key_changes == "with_time":
            self.waiting.rekey_all(now)
            return True
        return False

    def schedule(self, request_ids: Iterable[str], now: float) -> None:
        """These requests take part in the step; those that waited run from now on."""
        for request_id in request_ids:
            state = self.states.get(request_id)
            if state is None or state.status is not Status.WAITING:
                continue
            state.status = Status.RUNNING
            state.prefill_target_tokens = state.known_tokens
            if state.first_scheduled_s is None:
                state.first_scheduled_s = now
            self.policy.on_admit(state, now)

    def preempt(self, request_id: str, now: float) -> None:
        """A running request has lost its memory; `enqueue` follows."""
        state = self.states.get(request_id)
        if state is None:
            return
        state.status = Status.WAITING
        state.prefill_target_tokens = state.known_tokens
        state.num_computed_tokens = 0
        state.num_preemptions += 1
        self.policy.on_preempt(state, now)

    def progress(
        self, request_id: str, num_tokens: int, num_computed_tokens: int, num_output_tokens: int, now: float
    ) -> None:
        """A step has processed tokens of the request.

        Args:
            request_id: Who; nothing happens if it is gone or waits again.
            num_tokens: Tokens processed in this step.
            num_computed_tokens: Tokens whose keys and values are there, with those found in a prefix cache.
            num_output_tokens: Tokens generated so far, with those of this step.
            now: End of the step.
        """
        state = self.states.get(request_id)
        if state is None or state.status is not Status.RUNNING:
            return
        state.num_computed_tokens = num_computed_tokens
        state.attained_tokens += num_tokens
        state.last_scheduled_s = now
        if num_output_tokens > state.num_output_tokens:
            state.num_output_tokens = num_output_tokens
            state.last_token_s = now
            if state.first_token_s is None:
                state.first_token_s = now
            if state.decode_entered_s is None:
                state.decode_entered_s = now
        self.policy.on_tokens(state, num_tokens, now)

    def leave(self, request_id: str) -> RequestState | None:
        """The request has finished or was aborted, in whatever state; None if it is gone already."""
        state = self.states.pop(request_id, None)
        if state is None:
            return None
        if request_id in self.waiting:
            self.waiting.remove(state)
        state.status = Status.GONE
        self.policy.on_finish(state)
        return state

    def worst_first(self, request_ids: Iterable[str], now: float) -> list[tuple[float, RequestState]]:
        """Running requests with their eviction keys, the one to be evicted first at the front."""
        found = [
            (self.policy.eviction_key(state, now), state)
            for state in map(self.states.get, request_ids)
            if state
        ]
        found.sort(key=lambda pair: (pair[0], pair[1].request.arrival_s, pair[1].order), reverse=True)
        return found

    def may_displace(
        self, running: RequestState, eviction_key: float, waiting: RequestState, now: float
    ) -> bool:
        """Whether the policy lets the waiting request take the place of the running one."""
        return eviction_key != -math.inf and self.policy.may_preempt(running, waiting, now)

    def _place(self, state: RequestState, now: float) -> None:
        if state.request_id in self.waiting:
            self.waiting.push(state, now)
