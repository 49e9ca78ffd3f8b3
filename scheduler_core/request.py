"""A request as the scheduler knows it: what the user asked for, and how far it has come.

The true output length is nowhere in here: schedulers and policies cannot see it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from scheduler_core.errors import InputError
from scheduler_core.predictions import LengthPrediction


class Status(Enum):
    """Where a live request is kept."""

    WAITING = "waiting"
    RUNNING = "running"
    GONE = "gone"


class Phase(Enum):
    """What a running request does next: process its prompt, or generate one token per step."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What arrives.

    Attributes:
        request_id: Unique among the requests that are in the scheduler at the same time.
        arrival_s: When it arrived, in seconds on the clock of the caller.
        prompt_tokens: Length of the prompt, > 0.
        max_tokens: The request's own cap on output tokens, > 0.

    Raises:
        InputError: A field is outside its range.
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        if not self.request_id:
            raise InputError("request_id", self.request_id, "a string that is not empty")
        if not math.isfinite(self.arrival_s):
            raise InputError("arrival_s", self.arrival_s, "a finite number of seconds")
        for name in ("prompt_tokens", "max_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise InputError(f"{name} of request {self.request_id}", value, "integers > 0")


@dataclass(slots=True, eq=False)
class RequestState:
    """A live request inside the scheduler; policies read it, only the scheduler writes it.

    Attributes:
        request: What arrived.
        order: Running number given on arrival; breaks ties.
        status: Where it is kept.
        prediction: Predicted length; None until it comes. Kept across preemptions.
        prediction_failed: The predictor gave up on this request.
        prefill_target_tokens: Tokens to process before the next token can be sampled: the prompt, and after a
            preemption also the tokens generated so far (recompute).
        num_computed_tokens: Tokens whose keys and values are in the cache.
        num_output_tokens: Tokens generated so far.
        num_preemptions: How often it lost its cache.
        first_scheduled_s: When it was first admitted; None before.
        first_token_s: When its first token was there; None before.
        request_id: Id of the request.
    """

    request: Request
    order: int
    status: Status = Status.WAITING
    prediction: LengthPrediction | None = None
    prediction_failed: bool = False
    prefill_target_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    request_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id

    @property
    def phase(self) -> Phase:
        """PREFILL until everything known is in the cache, then DECODE."""
        return Phase.PREFILL if self.num_computed_tokens < self.prefill_target_tokens else Phase.DECODE

    @property
    def known_tokens(self) -> int:
        """Prompt plus output tokens generated so far."""
        return self.request.prompt_tokens + self.num_output_tokens
