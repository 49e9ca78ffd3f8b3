"""How much the quickstart does: `full` is the real thing, `tiny` the same path in a few minutes for the tests."""

from __future__ import annotations

from dataclasses import dataclass

SHIPPED_PROMPTS = "templates:512?seed=2026"
SHIPPED_LIMIT = 500


@dataclass(frozen=True, slots=True)
class Size:
    """Numbers that differ between the sizes.

    Attributes:
        num_live_prompts: Prompts sampled while you wait; they follow the shipped ones in the same list.
        num_samples: Answers per live prompt.
        max_tokens: Cap of the live answers.
        num_shipped_prompts: Prompts taken from the shipped set; None takes all.
        train_options: Options of `train` beside its YAML file.
        load: Offered load of the simulation: arriving work over what the engine can do with a full batch.
    """

    num_live_prompts: int
    num_samples: int
    max_tokens: int
    num_shipped_prompts: int | None
    train_options: tuple[str, ...]
    load: float


SIZES = {
    "full": Size(8, 20, 128, None, (), 1.2),
    "tiny": Size(2, 4, 16, 60, ("--stage1.epochs", "1", "--stage2.epochs", "1"), 1.2),
}
