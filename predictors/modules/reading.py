"""What a predictor reads of prompts on the torch side: token ids and lexical features, as its configuration says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from predictors.lexical_reader import LexicalReader
from predictors.manifest import LexicalInput
from predictors.tokenizer import keep_ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_tokens(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    max_length: int,
    truncation_side: str = "right",
) -> list[NDArray[np.int32]]:
    """Token ids of each prompt, special tokens included.

    Args:
        tokenizer: As `load_tokenizer` gives it for the same truncation side.
        prompts: N texts.
        max_length: Most tokens of each.
        truncation_side: left, right or middle: what of a longer prompt is dropped.
    """
    if not prompts:
        return []
    is_middle = truncation_side == "middle"
    encoded = tokenizer(
        list(prompts),
        truncation=not is_middle,
        max_length=None if is_middle else max_length,
        padding=False,
        return_attention_mask=False,
        verbose=False,
    )
    ids = [np.asarray(found, dtype=np.int32) for found in encoded["input_ids"]]
    return [keep_ends(found, max_length) for found in ids] if is_middle else ids


def read_lexical(lexical: LexicalInput | None, prompts: Sequence[str]) -> NDArray[np.float32] | None:
    """Lexical features [N, F] of N texts; None where there are none to read.

    Raises:
        InputError: They are of another version than this program computes.
    """
    if lexical is None:
        return None
    found = [prompt.features for prompt in LexicalReader(lexical)(prompts)]
    return np.stack(found) if found else np.zeros((0, len(lexical.feature_names)), dtype=np.float32)
