"""How long an answer was, from what was seen of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from predictors.proxy.answers import Seen
from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.files import existing_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CountedBy = Literal["usage", "tokenizer", "deltas"]


@dataclass(frozen=True, slots=True)
class Counted:
    """The length of an answer in tokens, and where it comes from: the engine's own count, the served model's tokenizer
    over the answer's text, or the number of events, which is a lower bound where an engine puts several tokens in one.
    """

    output_tokens: int
    by: CountedBy


class LengthCounter:
    """Takes the best count there is.

    Args:
        tokenizer: `tokenizer.json` of the served model; None: none.

    Raises:
        InputError: The file is no tokenizer.
    """

    def __init__(self, tokenizer: str | Path | None = None) -> None:
        self._tokenizer: Tokenizer | None = None if tokenizer is None else _open(tokenizer)

    @property
    def needs_text(self) -> bool:
        """Whether the answer's text has to be kept."""
        return self._tokenizer is not None

    def count(self, seen: Seen) -> Counted | None:
        """The length; None where nothing was generated, or nothing is known."""
        if seen.output_tokens is not None:
            return Counted(seen.output_tokens, "usage") if seen.output_tokens else None
        if self._tokenizer is not None and seen.text:
            found = self._tokenizer.encode("".join(seen.text), add_special_tokens=False)
            ended = seen.finish_reason in ("stop", "tool_calls")  # the token that ends an answer has no text
            return Counted(max(1, len(found.ids) + ended), "tokenizer")
        return Counted(seen.num_deltas, "deltas") if seen.num_deltas else None


def _open(path: str | Path) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingExtraError("tokenizers", "serve") from error
    file = existing_file(path, "served_tokenizer")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise InputError("served_tokenizer", str(path), f"a tokenizer.json ({error})") from error
