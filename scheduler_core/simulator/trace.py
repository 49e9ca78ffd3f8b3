"""Request traces: what arrives when, and (for the simulator only) how long the answers really were."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler_core.errors import InputError
from scheduler_core.predictions import LengthPrediction
from scheduler_core.request import Request

#: Latest arrival in seconds: the simulated clock is a float, which has a resolution of 2 microseconds there. Times since
#: 1970 are below it.
MAX_TIME_S = 1e10
#: Most tokens of a prompt or an answer.
MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One row of a trace.

    Attributes:
        request_id: Unique in the trace.
        arrival_s: Seconds from the start of the trace. A later turn of a conversation says when its user would come at
            the earliest; see `think_time_s`.
        prompt_tokens: Length of the prompt, > 0.
        output_tokens: True length of the answer, from 1 to max_tokens. Known to the simulator alone.
        max_tokens: The request's own cap, or the default for requests without one.
        prompt: Text of the prompt; None if the trace has none.
        prompt_id: Which prompt it is; None if the trace does not say.
        prediction: Predicted length found in the trace; None if there is none.
        tier: Declared level of urgency, 0 the most urgent.
        priority: Declared priority, smaller first.
        tenant: Who sent it: a user, an application, a class of customers.
        category: Kind of request, such as reasoning or chat.
        ttft_slo_s: Wanted time to the first token in seconds > 0; None: no target.
        tbt_slo_s: Wanted time between two tokens in seconds > 0; None: no target.
        ttlt_slo_s: Wanted time to the last token in seconds > 0; None: no target.
        session_id: Conversation that it is a turn of; None if it is none.
        turn: Number of the turn in its conversation, from 0.
        think_time_s: Seconds between the end of the turn before and this turn's arrival; None: it arrives at
            `arrival_s` whatever happened to the turn before.
        prefix_tokens: First tokens of the prompt that the turn before has in the cache already, 0 to prompt_tokens - 1.

    Raises:
        InputError: What a `Request` made of it could not have.
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    prompt: str | None = None
    prompt_id: str | None = None
    prediction: LengthPrediction | None = None
    tier: int = 2
    priority: int = 0
    tenant: str = ""
    category: str = ""
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    ttlt_slo_s: float | None = None
    session_id: str | None = None
    turn: int = 0
    think_time_s: float | None = None
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        if not -MAX_TIME_S <= self.arrival_s <= MAX_TIME_S:
            allowed = f"seconds up to {MAX_TIME_S:g}"
            raise InputError(f"arrival_s of request {self.request_id}", self.arrival_s, allowed)
        if not max(self.prompt_tokens, self.max_tokens) <= MAX_TOKENS:
            allowed = f"prompt_tokens and max_tokens of at most {MAX_TOKENS}"
            raise InputError(
                f"tokens of request {self.request_id}", (self.prompt_tokens, self.max_tokens), allowed
            )
        if self.turn < 0:
            raise InputError(f"turn of request {self.request_id}", self.turn, "integers >= 0")
        if self.think_time_s is not None and not 0 <= self.think_time_s < math.inf:
            raise InputError(f"think_time_s of request {self.request_id}", self.think_time_s, "seconds >= 0")
        if not 0 <= self.prefix_tokens < self.prompt_tokens:
            allowed = "integers from 0 to prompt_tokens - 1"
            raise InputError(f"prefix_tokens of request {self.request_id}", self.prefix_tokens, allowed)

    def request(self, arrival_s: float | None = None, cached_prefix_tokens: int = 0) -> Request:
        """The request that the scheduler gets to see: without the true length.

        Args:
            arrival_s: When it really arrives; None: at its own `arrival_s`.
            cached_prefix_tokens: Tokens of the prompt that are in the cache then.
        """
        return Request(
            request_id=self.request_id,
            arrival_s=self.arrival_s if arrival_s is None else arrival_s,
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.max_tokens,
            priority=self.priority,
            tier=self.tier,
            tenant=self.tenant,
            ttft_slo_s=self.ttft_slo_s,
            tbt_slo_s=self.tbt_slo_s,
            ttlt_slo_s=self.ttlt_slo_s,
            cached_prefix_tokens=cached_prefix_tokens,
        )


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival.

    Attributes:
        requests: The rows.
        source: Where they come from.
        sha256: Hash of the file; empty if it was not a file.
    """

    requests: tuple[TraceRequest, ...]
    source: str = ""
    sha256: str = ""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def has_predictions(self) -> bool:
        """At least one row carries a prediction."""
        return any(row.prediction is not None for row in self.requests)
