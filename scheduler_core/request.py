"""Requests in the scheduler: their limits, targets and progress, without the true output length."""

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from scheduler_core.errors import InputError
from scheduler_core.prediction.predictions import (
    BucketPrediction,
    LengthPrediction,
    PointPrediction,
    Prediction,
    RankPrediction,
    UrgencyPrediction,
)

#: Maximum number of tiers, limited by policies that combine tier and key in one float.
MAX_TIERS = 100
#: Tier of requests that declare none.
DEFAULT_TIER = 2


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    GONE = "gone"


class Phase(Enum):
    """Phase of a running request: processing its prompt, or generating one token per step."""

    PREFILL = "prefill"
    DECODE = "decode"


class Segment(NamedTuple):
    """The first `num_tokens` tokens, > 0, of the text that is named `key`, as a part of a prompt."""

    key: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request at its arrival. `InputError` if a field is outside its range.

    Attributes:
        request_id: Unique among the requests that are in the scheduler at the same time.
        arrival_s: Arrival time in seconds on the clock of the caller.
        prompt_tokens: Length of the prompt, > 0.
        max_tokens: Maximum number of output tokens, > 0.
        priority: Declared by the client, smaller first under every policy (as in vLLM).
        tier: Declared service tier, 0 (most urgent) to MAX_TIERS - 1; tiers 0 to 4 are also the levels of
            urgency, `scheduler_core.prediction.urgency.LEVELS`.
        tenant: Owner of the request; the empty name is also a tenant.
        ttft_slo_s: Target of the time from arrival to the first token, in seconds > 0.
        tbt_slo_s: Target of the time between two tokens, in seconds > 0.
        ttlt_slo_s: Target of the time from arrival to the last token, in seconds > 0.
        session: Identity of the agent or chat session of which it is a turn; empty: none.
        content: Segments of which the prompt consists, in order, for prefix caching. Two prompts have the same leading
            tokens as far as their segments are equal, and within the first pair of segments that only have the same key
            up to the shorter length. Nobody shares the rest of a prompt that is longer than its segments; the
            output continues the last segment of a prompt that is not.
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int
    max_tokens: int
    priority: int = 0
    tier: int = DEFAULT_TIER
    tenant: str = ""
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    ttlt_slo_s: float | None = None
    session: str = ""
    content: tuple[Segment, ...] = ()

    def __post_init__(self) -> None:
        if not self.request_id:
            raise InputError("request_id", self.request_id, "a string that is not empty")
        if not math.isfinite(self.arrival_s):
            raise InputError("arrival_s", self.arrival_s, "a finite number of seconds")
        self._check_integer("prompt_tokens", 1, math.inf, "integers > 0")
        self._check_integer("max_tokens", 1, math.inf, "integers > 0")
        self._check_integer("tier", 0, MAX_TIERS - 1, f"integers from 0 to {MAX_TIERS - 1}")
        self._check_integer("priority", -math.inf, math.inf, "integers")
        if self.content:
            sizes = [segment.num_tokens for segment in self.content]
            if min(sizes) < 1 or sum(sizes) > self.prompt_tokens:
                allowed = "segments of at least one token, together at most prompt_tokens"
                raise InputError(f"content of request {self.request_id}", sizes, allowed)
        for name in ("ttft_slo_s", "tbt_slo_s", "ttlt_slo_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{name} of request {self.request_id}", value, "seconds > 0, or None")

    def _check_integer(self, name: str, low: float, high: float, allowed: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise InputError(f"{name} of request {self.request_id}", value, allowed)


@dataclass(slots=True, eq=False)
class RequestState:
    """A live request in the scheduler. Policies read it; only the scheduler changes it.

    Predictions are None until they arrive and are kept across preemptions. Times are None before the event.

    Attributes:
        order: Arrival number; breaks ties.
        declared_level: What the client has declared, before the policy's order under every policy: requests of smaller
            levels are served first, and preempted last. The priority; an adapter may add the tier.
        prediction: Predicted length.
        prefill_target_tokens: Tokens to process before the next token can be sampled: the prompt, and after a
            preemption by recompute also the tokens generated so far.
        cached_tokens: Leading tokens that need no prefill because the engine's prefix cache had them at the latest look:
            before each step while it waits, at its admission while it runs.
        host_cached_tokens: Those of them that have to be copied from host memory.
        ended_by: How its output ended, as far as that is known at the end, such as tool_use or end_turn; else empty.
        num_computed_tokens: Tokens with keys and values: in the cache while it runs, on the host while it waits.
        kv_tokens: Tokens for which it holds blocks of the cache; 0 while it waits.
        num_output_tokens: Tokens generated so far.
        decode_entered_s: End of its latest prefill.
        last_token_s: Time of its latest token.
        last_scheduled_s: End of the latest step it took part in.
    """

    request: Request
    order: int
    status: Status = Status.WAITING
    prediction: LengthPrediction | None = None
    urgency: UrgencyPrediction | None = None
    bucket: BucketPrediction | None = None
    rank: RankPrediction | None = None
    point: PointPrediction | None = None
    prefill_target_tokens: int = 0
    cached_tokens: int = 0
    host_cached_tokens: int = 0
    ended_by: str = ""
    num_computed_tokens: int = 0
    kv_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    decode_entered_s: float | None = None
    last_token_s: float | None = None
    last_scheduled_s: float | None = None
    request_id: str = field(init=False)
    declared_level: int = field(init=False)
    #: Prediction, alpha and result of the latest `expected_and_cvar`.
    _risk: tuple[LengthPrediction, float, tuple[float, float]] | None = field(
        default=None, init=False, repr=False
    )

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        self.declared_level = self.request.priority
        self.prefill_target_tokens = self.request.prompt_tokens

    @property
    def phase(self) -> Phase:
        """PREFILL until the target is reached, then DECODE."""
        return Phase.PREFILL if self.num_computed_tokens < self.prefill_target_tokens else Phase.DECODE

    @property
    def uncached_tokens(self) -> int:
        """Tokens to process before the next output token if it is admitted now; for waiting requests."""
        return max(self.known_tokens - max(self.cached_tokens, self.num_computed_tokens), 0)

    @property
    def known_tokens(self) -> int:
        """Prompt plus output tokens generated so far."""
        return self.request.prompt_tokens + self.num_output_tokens

    def apply_prediction(self, prediction: Prediction | None) -> bool:
        """Stores the heads that `prediction` has and keeps the others; None means that the predictor failed.
        Returns whether there was a prediction, so that the key of the request may have changed."""
        if prediction is None:
            return False
        self.prediction = prediction.length or self.prediction
        self.urgency = prediction.urgency or self.urgency
        self.bucket = prediction.bucket or self.bucket
        self.rank = prediction.rank or self.rank
        self.point = prediction.point or self.point
        return True

    @property
    def has_prediction(self) -> bool:
        """Whether the request has a prediction of any head."""
        heads = (self.prediction, self.urgency, self.bucket, self.rank, self.point)
        return any(head is not None for head in heads)

    def expected_and_cvar(self, alpha: float = 0.9) -> tuple[float, float] | None:
        """(E[X~], CVaR_alpha(X~)) of the predicted X~ = min(X, max_tokens) in tokens, computed once for each prediction;
        None without a predicted length."""
        length, risk = self.prediction, self._risk
        if length is None:
            return None
        if risk is None or risk[0] is not length or risk[1] != alpha:
            pair = length.expected_and_cvar(self.request.max_tokens, alpha)
            risk = self._risk = (length, alpha, pair)
        return risk[2]

    def effective_level(self, max_promotion: float = 1) -> int:
        """The level at which the request is scheduled, 0 = most urgent; the declared tier without a predicted urgency.

        Policies, routers and engine hints all use this level; see `UrgencyPrediction.effective_level`.
        """
        tier = self.request.tier
        return tier if self.urgency is None else self.urgency.effective_level(tier, max_promotion)
