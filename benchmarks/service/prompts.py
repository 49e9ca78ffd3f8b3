"""Prompts with a length distribution as in chat traffic."""

from __future__ import annotations

import numpy as np

TEXT = (
    "write name list the a long short story essay river mountain code function proof of in about with for and "
    "explain compare summarise table python history why how between first every answer steps simple"
)


def make_prompts(count: int, seed: int, median_words: float = 22.0) -> list[str]:
    """`count` different texts of 4 to 200 words, log-normal around `median_words`, 1 % above 6 times that."""
    words = TEXT.split()
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(rng.normal(np.log(median_words), 0.75, size=count)), 4, 200).astype(int)
    return [" ".join(rng.choice(words, size=length)) for length in lengths]
