"""Errors of training that name the batch: divergence and running out of memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from scheduler_core.errors import TailcastError
from training.network.data import SplitData, TrainingBatch

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


class DivergedError(TailcastError):
    """The loss or the gradient is not finite."""

    def __init__(
        self, what: str, epoch: int, batch: TrainingBatch, data: SplitData, losses: Mapping[str, float]
    ) -> None:
        heads = "".join(f"; {name} {value:g}" for name, value in losses.items())
        super().__init__(
            f"training stopped: the {what} of a batch in epoch {epoch} is not finite "
            f"(prompts {_first_prompts(batch, data)}{heads}); try a lower learning rate, or check the targets of these "
            "prompts"
        )


class OutOfMemoryError(TailcastError):
    """A batch does not fit into memory."""


class NoProgressError(TailcastError):
    """The validation loss did not improve."""


def _first_prompts(batch: TrainingBatch, data: SplitData) -> str:
    names = [data.name(number) for number in batch.prompt[:3].tolist()]
    return ", ".join(names) + (", ..." if len(batch.prompt) > 3 else "")


@contextlib.contextmanager
def memory_errors(
    current: Callable[[], tuple[TrainingBatch, SplitData] | None], otherwise: str = "before the first batch"
) -> Iterator[None]:
    """Converts out-of-memory errors of the CPU or the GPU to an OutOfMemoryError that describes the current batch, or
    `otherwise` if there is none."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not any(word in str(error) for word in _OUT_OF_MEMORY):
            raise
        where = otherwise
        if (batch_and_data := current()) is not None:
            batch, data = batch_and_data
            num_prompts, longest = len(batch.prompt), data.num_tokens[batch.prompt.tolist()].max()
            where = (
                f"in a batch of {num_prompts} prompts (the longest has {longest} tokens, so {num_prompts * longest} with "
                f"padding) and {len(batch.row)} rows; prompts {_first_prompts(batch, data)}"
            )
        advice = "reduce batch_tokens, batch_size or max_length"
        raise OutOfMemoryError(f"out of memory {where}; {advice}") from error
