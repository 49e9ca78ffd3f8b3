"""Plans and results that scheduler and engine exchange in each step. All objects are read-only.

The classes created in every step are not frozen, because frozen classes are several times slower to construct.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(slots=True)
class PrefillChunk:
    """A chunk of a request's prompt (after a preemption also of its generated tokens). The first
    `start_token` tokens are already in the cache. After the last chunk the next output token is sampled."""

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
        num_context_tokens: Tokens of all planned requests whose keys and values are read from the cache.
        admitted: Requests that left the waiting queue for this step.
        preempted: Requests that returned to the waiting queue, including those of `swapped_out`.
        swapped_out: Copies from preempted requests to the host, before their blocks are used again.
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
        step: Number of the plan.
        stopped: Requests whose new token ended their output; not needed for those that reach max_tokens.
        num_steps: Number of times the plan was executed in a row, each chunk continuing the previous one (see
            `Scheduler.steady_steps`). `stopped` refers to the last one.
        ends_s: End times of all steps but the last, if the policy needs them (`Scheduler.wants_step_ends`).
            Empty: all steps took equally long.
        ended_by: How the outputs of requests have ended, by id, as far as known, such as tool_use or end_turn.
    """

    step: int
    stopped: tuple[str, ...] = ()
    num_steps: int = 1
    ends_s: tuple[float, ...] = ()
    ended_by: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Finished:
    """A finished request, which is no longer in the scheduler. Its reason is "stop" if the model ended the
    output, and "length" if max_tokens were generated."""

    request_id: str
    reason: Literal["stop", "length"]
    output_tokens: int
    num_preemptions: int
    first_scheduled_s: float
    first_token_s: float


@dataclass(slots=True)
class Counters:
    """Numbers of events since the scheduler was created.

    `num_added` includes requests from other replicas (`num_moved_in`). `num_swaps` counts preemptions with a copy on
    the host, `num_late_predictions` results for requests that have left, `num_rekeys` steps that recomputed all keys.
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
