"""Sizes of the quickstart: `full`, and `tiny`, which runs the same steps in a few minutes for the tests."""

from __future__ import annotations

from dataclasses import dataclass

SHIPPED_PROMPTS = "templates:512?seed=2026"
SHIPPED_LIMIT = 500


@dataclass(frozen=True, slots=True)
class Size:
    """Settings that differ between the sizes.

    Attributes:
        num_live_prompts: Number of prompts that are sampled during the run; they follow the shipped ones in the same list.
        num_samples: Number of samples per live prompt.
        max_tokens: Maximum number of output tokens of live samples.
        num_shipped_prompts: Number of prompts used from the shipped samples; None: all.
        train_options: Options of `train` in addition to its YAML file.
        load: Offered load of the simulation, relative to the throughput of the engine with a full batch.
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
