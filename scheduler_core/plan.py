"""What goes back and forth between the scheduler and whatever executes its steps.

All of it is to be read only. What is made in every step is not frozen: that would make it several times as slow to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(slots=True)
class PrefillChunk:
    """A piece of a request's prompt (or, after a preemption, of prompt and generated tokens).

    Attributes:
        request_id: Whose.
        start_token: Tokens of it already in the cache.
        num_tokens: Tokens to process now.
        is_last: After this chunk the request's next output token is sampled.
    """

    request_id: str
    start_token: int
    num_tokens: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """Keys and values to be copied between the device and the host.

    Attributes:
        request_id: Whose.
        num_tokens: The first so many tokens of it.
    """

    request_id: str
    num_tokens: int


@dataclass(slots=True)
class StepPlan:
    """One step of the engine.

    Attributes:
        step: Running number, from 0.
        prefills: Chunks to process.
        decodes: Requests that generate one token each.
        num_context_tokens: Keys and values read from the cache: tokens already there of all planned requests.
        admitted: Requests that left the waiting queue for this step.
        preempted: Requests that lost their place and wait again, those of `swapped_out` among them.
        swapped_out: What of preempted requests is to be copied to the host, before their blocks are used again.
        swapped_in: What of admitted requests is to be copied back, before the step.
    """

    step: int
    prefills: tuple[PrefillChunk, ...]
    decodes: tuple[str, ...]
    num_context_tokens: int
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    swapped_out: tuple[KVTransfer, ...] = ()
    swapped_in: tuple[KVTransfer, ...] = ()

    @property
    def num_swapped_tokens(self) -> int:
        """Tokens whose keys and values are copied in this step, in either direction."""
        return sum(transfer.num_tokens for transfer in (*self.swapped_out, *self.swapped_in))

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens processed in this step."""
        return sum(chunk.num_tokens for chunk in self.prefills)


@dataclass(slots=True)
class StepResult:
    """What the engine saw.

    Attributes:
        step: The plan's number.
        stopped: Requests whose new token ended their output. Reaching max_tokens need not be told.
        num_steps: How often the plan was carried out in a row, a chunk going on where the last one ended (see
            `Scheduler.steady_steps`); `stopped` is about the last time.
    """

    step: int
    stopped: tuple[str, ...] = ()
    num_steps: int = 1


@dataclass(slots=True)
class Finished:
    """A request that is done and no longer known to the scheduler.

    Attributes:
        request_id: Which.
        reason: "stop": the model ended its output; "length": max_tokens were generated.
        output_tokens: Tokens generated.
        num_preemptions: How often it lost its place among the running requests.
        first_scheduled_s: When it was first admitted.
        first_token_s: When its first token was there.
    """

    request_id: str
    reason: Literal["stop", "length"]
    output_tokens: int
    num_preemptions: int
    first_scheduled_s: float
    first_token_s: float


@dataclass(slots=True)
class Counters:
    """Events since the scheduler was made.

    Attributes:
        num_added: Requests accepted, those from other replicas among them.
        num_finished: Requests finished.
        num_aborted: Requests aborted.
        num_moved_in: Requests that came from another replica.
        num_moved_out: Requests that left for another replica.
        num_preemptions: Times a request lost its place among the running ones.
        num_swaps: Times it kept a copy of its cache on the host then.
        num_predictions: Predictions that came in time.
        num_failed_predictions: Requests for which the predictor gave up.
        num_late_predictions: Predictions (or failures) for requests no longer here.
        num_rekeys: Times all waiting requests got new keys.
    """

    num_added: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_moved_in: int = 0
    num_moved_out: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    num_predictions: int = 0
    num_failed_predictions: int = 0
    num_late_predictions: int = 0
    num_rekeys: int = 0
