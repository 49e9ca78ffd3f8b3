"""Plans and results: what the scheduler and the engine exchange for each step, all to be read only.

The classes made in every step are not frozen: that would make them several times as slow to construct.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(slots=True)
class PrefillChunk:
    """A piece of a request's prompt (or, after a preemption, of prompt and generated tokens), of which `start_token` tokens
    are in the cache already; after the last one the request's next output token is sampled."""

    request_id: str
    start_token: int
    num_tokens: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """Keys and values of a request's first `num_tokens` tokens, to be copied between the device and the host."""

    request_id: str
    num_tokens: int


@dataclass(slots=True)
class StepPlan:
    """One step of the engine.

    Attributes:
        step: Number of the step, from 0.
        prefills: Chunks to process.
        decodes: Requests that generate one token each.
        num_context_tokens: Keys and values read from the cache: tokens of all planned requests already there.
        admitted: Requests that left the waiting queue for this step.
        preempted: Requests that wait again, those of `swapped_out` among them.
        swapped_out: Copies of preempted requests to the host, before their blocks are used again.
        swapped_in: Copies of admitted requests back to the device, before the step.
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
    """Result of a step.

    Attributes:
        step: The plan's number.
        stopped: Requests whose new token ended their output; not needed for those that reach max_tokens.
        num_steps: How often the plan was carried out in a row, a chunk going on where the last one ended (see
            `Scheduler.steady_steps`); `stopped` is about the last time.
        ends_s: Of several steps: ends of all but the last, for a policy that wants them (`Scheduler.wants_step_ends`); none:
            they took equally long.
    """

    step: int
    stopped: tuple[str, ...] = ()
    num_steps: int = 1
    ends_s: tuple[float, ...] = ()


@dataclass(slots=True)
class Finished:
    """A request that is done and no longer in the scheduler: "stop": the model ended its output; "length": max_tokens were
    generated."""

    request_id: str
    reason: Literal["stop", "length"]
    output_tokens: int
    num_preemptions: int
    first_scheduled_s: float
    first_token_s: float


@dataclass(slots=True)
class Counters:
    """Numbers of events since the scheduler was created.

    `num_added` includes requests of other replicas (`num_moved_in`); `num_swaps` are preemptions with a copy on the host,
    `num_late_predictions` predictions or failures for requests no longer here, `num_rekeys` steps that recomputed all keys.
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
