"""A request as the scheduler knows it: what the user asked for, and how far it has come.

The true output length is nowhere in here: schedulers and policies cannot see it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from scheduler_core.errors import InputError
from scheduler_core.predictions import (
    BucketPrediction,
    LengthPrediction,
    RankPrediction,
    UrgencyPrediction,
)

#: Most tiers there can be; the orders that keep tiers apart by whole numbers in one float have room for so many.
MAX_TIERS = 100


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
        priority: Declared by the client, smaller first (as in vLLM).
        tier: Declared tier of service, 0 (most urgent) to MAX_TIERS - 1. How many tiers there are is up to who uses them
            (`routing.Headroom`, `routing.TierPromotion` refuse others); tiers 0 to 4 are also the levels of urgency that
            texts are judged by, `scheduler_core.urgency.LEVELS`.
        tenant: Whose request it is; the empty name is a tenant like any other.
        ttft_slo_s: Wanted time from arrival to the first token, in seconds > 0; None: no target.
        tbt_slo_s: Wanted time between two tokens, in seconds > 0; None: no target.
        ttlt_slo_s: Wanted time from arrival to the last token, in seconds > 0; None: no target.
        cached_prefix_tokens: First tokens of the prompt whose keys and values the engine has already (prefix-cache
            hits), 0 to prompt_tokens - 1. They need no prefill when the request is first admitted.

    Raises:
        InputError: A field is outside its range.
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int
    max_tokens: int
    priority: int = 0
    tier: int = 2
    tenant: str = ""
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    ttlt_slo_s: float | None = None
    cached_prefix_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.request_id:
            raise InputError("request_id", self.request_id, "a string that is not empty")
        if not math.isfinite(self.arrival_s):
            raise InputError("arrival_s", self.arrival_s, "a finite number of seconds")
        for name in ("prompt_tokens", "max_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise InputError(f"{name} of request {self.request_id}", value, "integers > 0")
        self._check_optional()

    def _check_optional(self) -> None:
        for name, allowed, highest in (
            ("tier", f"integers from 0 to {MAX_TIERS - 1}", MAX_TIERS - 1),
            ("cached_prefix_tokens", "integers from 0 to prompt_tokens - 1", self.prompt_tokens - 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= highest:
                raise InputError(f"{name} of request {self.request_id}", value, allowed)
        if not isinstance(self.priority, int) or isinstance(self.priority, bool):
            raise InputError(f"priority of request {self.request_id}", self.priority, "integers")
        for name in ("ttft_slo_s", "tbt_slo_s", "ttlt_slo_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{name} of request {self.request_id}", value, "seconds > 0, or None")


@dataclass(slots=True, eq=False)
class RequestState:
    """A live request inside the scheduler; policies read it, only the scheduler writes it.

    Attributes:
        request: What arrived.
        order: Running number given on arrival; breaks ties.
        status: Where it is kept.
        prediction: Predicted length; None until it comes. Kept across preemptions.
        urgency: Predicted urgency; None until it comes. Kept like the length, as the next two.
        bucket: Predicted class of length.
        rank: Predicted score to rank by.
        prediction_failed: The predictor gave up on this request.
        prefill_target_tokens: Tokens to process before the next token can be sampled: the prompt, and after a
            preemption by recompute also the tokens generated so far.
        num_computed_tokens: Tokens whose keys and values are there: in the cache while it runs, offloaded to the host's
            memory while it waits.
        kv_tokens: Tokens for which it holds blocks of the cache; 0 while it waits.
        num_output_tokens: Tokens generated so far.
        attained_tokens: Tokens of work done for it so far in both phases: processed prompt tokens and decode steps.
            Grows only; what is computed again after a preemption counts again.
        num_preemptions: How often it lost its place among the running requests.
        first_scheduled_s: When it was first admitted; None before.
        first_token_s: When its first token was there; None before.
        decode_entered_s: When its prefill (the latest, after preemptions) was done; None before the first was.
        last_token_s: When its latest token was there; None before the first.
        last_scheduled_s: End of the latest step it took part in; None before the first.
        request_id: Id of the request.
    """

    request: Request
    order: int
    status: Status = Status.WAITING
    prediction: LengthPrediction | None = None
    urgency: UrgencyPrediction | None = None
    bucket: BucketPrediction | None = None
    rank: RankPrediction | None = None
    prediction_failed: bool = False
    prefill_target_tokens: int = 0
    num_computed_tokens: int = 0
    kv_tokens: int = 0
    num_output_tokens: int = 0
    attained_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    decode_entered_s: float | None = None
    last_token_s: float | None = None
    last_scheduled_s: float | None = None
    request_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        self.prefill_target_tokens = self.request.prompt_tokens

    @property
    def phase(self) -> Phase:
        """PREFILL until the target is reached, then DECODE."""
        return Phase.PREFILL if self.num_computed_tokens < self.prefill_target_tokens else Phase.DECODE

    @property
    def known_tokens(self) -> int:
        """Prompt plus output tokens generated so far."""
        return self.request.prompt_tokens + self.num_output_tokens
