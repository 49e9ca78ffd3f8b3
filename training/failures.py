"""Ways in which training ends early, told with the batch at fault."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from scheduler_core.errors import TailcastError
from training.data import Batch, SplitData

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


class DivergedError(TailcastError):
    """Loss or gradient is no finite number.

    Attributes:
        what: "loss" or "gradient".
        epoch: Epoch of the stage.
        batch: What is in the batch, see `describe`.
    """

    def __init__(self, what: str, split: str, epoch: int, batch: dict[str, Any]) -> None:
        where = "" if split == "train" else f" of the {split} split"
        super().__init__(
            f"training stopped: the {what} of a batch{where} in epoch {epoch} is not finite "
            f"(prompts {_shown(batch)}); a lower learning rate, or other targets for these prompts, may help"
        )
        self.what = what
        self.epoch = epoch
        self.batch = batch


class OutOfMemoryError(TailcastError):
    """A batch does not fit into memory."""


def describe(batch: Batch, data: SplitData) -> dict[str, Any]:
    """A batch as JSON: its prompts with their texts and labels, and its rows with their answers."""
    rows = data.rows
    prompts = []
    for number, weight, level in zip(
        batch.prompt.tolist(), batch.level_weight.tolist(), batch.level.tolist(), strict=True
    ):
        prompt: dict[str, Any] = {"prompt_id": data.name(number), "text": data.texts[number]}
        prompt["num_tokens"] = len(data.token_ids[number])
        prompts.append(prompt | ({"level": level} if weight else {}))
    described = []
    for row, place in zip(batch.row.tolist(), batch.row_prompt.tolist(), strict=True):
        answers = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
        model, temperature = int(rows.model[row]), float(rows.temperature[row])
        described.append(
            {
                "prompt_id": prompts[place]["prompt_id"],
                "model": rows.models[model - 1] if model else None,
                "temperature": None if temperature != temperature else temperature,
                "output_tokens": rows.lengths[answers].tolist(),
                "finished": rows.finished[answers].tolist(),
            }
        )
    return {"prompts": prompts, "rows": described}


def _shown(batch: dict[str, Any]) -> str:
    names = [prompt["prompt_id"] for prompt in batch["prompts"]]
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


@contextlib.contextmanager
def memory_errors(
    batch: Callable[[], tuple[Batch, SplitData] | None], otherwise: str = "before the first batch"
) -> Iterator[None]:
    """Turns running out of memory into an error that says which batch did.

    Args:
        batch: Gives the batch under way, if there is one.
        otherwise: What to say where there is none.

    Raises:
        OutOfMemoryError: Memory ran out, on a GPU or not.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not any(word in str(error) for word in _OUT_OF_MEMORY):
            raise
        found = batch()
        where = otherwise
        if found is not None:
            content = describe(*found)
            tokens = [prompt["num_tokens"] for prompt in content["prompts"]]
            where = (
                f"in a batch of {len(tokens)} prompts (the longest has {max(tokens)} tokens, so {len(tokens) * max(tokens)} "
                f"with padding) and {len(content['rows'])} rows; prompts {_shown(content)}"
            )
        raise OutOfMemoryError(
            f"out of memory {where}; smaller batch_tokens, batch_size or max_length help"
        ) from error
