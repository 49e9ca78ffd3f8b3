"""One row per simulated request."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_core.plan import Finished
from scheduler_core.predictions import LengthPrediction, Prediction
from scheduler_core.simulator.trace import TraceRequest


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What became of a finished request, to be read only. Times are seconds on the simulated clock; durations end in _s too.

    Not frozen, as that would take several times as long to make, and there may be millions.

    Attributes:
        request_id: Id in the trace.
        arrival_s: When it arrived.
        first_scheduled_s: When it first left the waiting queue.
        first_token_s: When its first token was there.
        finish_s: When its last token was there.
        prompt_tokens: Length of the prompt.
        output_tokens: Tokens generated.
        max_tokens: Its own cap.
        finish_reason: "stop", or "length" if the cap was reached.
        num_preemptions: How often it lost its cache.
        predicted_mu: Predicted location of ln length; None without a prediction.
        predicted_sigma: Predicted scale; None without a prediction.
        predicted_nu: Degrees of freedom of the prediction; None without a prediction.
        tier: Its declared level of urgency, 0 the most urgent.
        tenant: Who sent it.
        category: Kind of request.
        ttft_slo_s: Its target for ttft_s; None: none.
        tbt_slo_s: Its target for the longest gap between two tokens; None: none.
        ttlt_slo_s: Its target for ttlt_s; None: none.
        session_id: Conversation that it was a turn of; None if it was none.
        turn: Number of the turn, from 0.
        max_tbt_s: Longest gap between two of its tokens; None if it had only one, or nobody measured it. Steps taken at once
            and one by one give the same but for rounding, so it is not compared.
        replica_id: Where it finished; None with one replica.
    """

    request_id: str
    arrival_s: float
    first_scheduled_s: float
    first_token_s: float
    finish_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    finish_reason: str
    num_preemptions: int
    predicted_mu: float | None = None
    predicted_sigma: float | None = None
    predicted_nu: float | None = None
    tier: int = 2
    tenant: str = ""
    category: str = ""
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    ttlt_slo_s: float | None = None
    session_id: str | None = None
    turn: int = 0
    max_tbt_s: float | None = field(default=None, compare=False)
    replica_id: str | None = None

    @property
    def queueing_delay_s(self) -> float:
        """From arrival to admission."""
        return self.first_scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_token_s - self.arrival_s

    @property
    def ttlt_s(self) -> float:
        """Time to last token, also called end-to-end latency."""
        return self.finish_s - self.arrival_s

    @property
    def per_token_latency_s(self) -> float:
        """End-to-end latency per output token."""
        return self.ttlt_s / self.output_tokens

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between output tokens; None if there was only one token."""
        if self.output_tokens == 1:
            return None
        return (self.finish_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def normalized_waiting_s(self) -> float:
        """Queueing delay per output token (Semantic Scheduling, section 4)."""
        return self.queueing_delay_s / self.output_tokens

    @property
    def has_slo(self) -> bool:
        """It has a target of any kind."""
        return not (self.ttft_slo_s is None and self.tbt_slo_s is None and self.ttlt_slo_s is None)

    @property
    def meets_slo(self) -> bool:
        """It met all the targets it has. Without a measured longest gap the mean gap stands for it."""
        gap_s = self.tpot_s if self.max_tbt_s is None else self.max_tbt_s
        pairs = ((self.ttft_s, self.ttft_slo_s), (gap_s, self.tbt_slo_s), (self.ttlt_s, self.ttlt_slo_s))
        return all(target is None or value is None or value <= target for value, target in pairs)


def finished_record(
    item: Finished, row: TraceRequest, seen: Prediction | LengthPrediction | None, finish_s: float
) -> RequestRecord:
    """What became of a request that has just finished.

    Args:
        item: What the scheduler says.
        row: What the trace says, with the arrival that really was.
        seen: What was predicted.
        finish_s: When its last token was there.
    """
    length = seen.length if isinstance(seen, Prediction) else seen
    return RequestRecord(
        request_id=item.request_id,
        arrival_s=row.arrival_s,
        first_scheduled_s=item.first_scheduled_s,
        first_token_s=item.first_token_s,
        finish_s=finish_s,
        prompt_tokens=row.prompt_tokens,
        output_tokens=item.output_tokens,
        max_tokens=row.max_tokens,
        finish_reason=item.reason,
        num_preemptions=item.num_preemptions,
        predicted_mu=None if length is None else length.mu,
        predicted_sigma=None if length is None else length.sigma,
        predicted_nu=None if length is None else length.nu,
        tier=row.tier,
        tenant=row.tenant,
        category=row.category,
        ttft_slo_s=row.ttft_slo_s,
        tbt_slo_s=row.tbt_slo_s,
        ttlt_slo_s=row.ttlt_slo_s,
        session_id=row.session_id,
        turn=row.turn,
    )


#: The latencies every result summarises.
LATENCIES = (
    "ttft_s",
    "ttlt_s",
    "per_token_latency_s",
    "tpot_s",
    "queueing_delay_s",
    "normalized_waiting_s",
)
