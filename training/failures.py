"""Errors of training that name the batch: divergence and running out of memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from scheduler_core.errors import TailcastError
from training.data import SplitData, TrainingBatch

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


class DivergedError(TailcastError):
    """Loss or gradient is no finite number."""

    def __init__(
        self, what: str, epoch: int, batch: TrainingBatch, data: SplitData, losses: Mapping[str, float]
    ) -> None:
        heads = "".join(f"; {name} {value:g}" for name, value in losses.items())
        super().__init__(
            f"training stopped: the {what} of a batch in epoch {epoch} is not finite "
            f"(prompts {_first_prompts(batch, data)}{heads}); a lower learning rate, or other targets for these prompts, "
            "may help"
        )


class OutOfMemoryError(TailcastError):
    """A batch does not fit into memory."""


class NoProgressError(TailcastError):
    """The loss did not move."""


def _first_prompts(batch: TrainingBatch, data: SplitData) -> str:
    names = [data.name(number) for number in batch.prompt[:3].tolist()]
    return ", ".join(names) + (", ..." if len(batch.prompt) > 3 else "")


@contextlib.contextmanager
def memory_errors(
    current: Callable[[], tuple[TrainingBatch, SplitData] | None], otherwise: str = "before the first batch"
) -> Iterator[None]:
    """Turns running out of memory, on a GPU or not, into an OutOfMemoryError that names the batch, or `otherwise` if none is
    under way."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not any(word in str(error) for word in _OUT_OF_MEMORY):
            raise
        where = otherwise
        if (under_way := current()) is not None:
            batch, data = under_way
            num_prompts, longest = len(batch.prompt), data.num_tokens[batch.prompt.tolist()].max()
            where = (
                f"in a batch of {num_prompts} prompts (the longest has {longest} tokens, so {num_prompts * longest} with "
                f"padding) and {len(batch.row)} rows; prompts {_first_prompts(*under_way)}"
            )
        advice = "smaller batch_tokens, batch_size or max_length help"
        raise OutOfMemoryError(f"out of memory {where}; {advice}") from error
