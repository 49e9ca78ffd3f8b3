"""How a prompt source is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler_core.errors import InputError

Turns = Literal["first", "last", "all"] | int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What to take of each row.

    Attributes:
        layout: Name of a layout of `data_gen.sources.layouts`; None tells it from the source's name or columns.
        turns: Which user turns of a conversation become prompts: "first", "last" (the whole conversation up to it),
            "all" (each one with its history), or a number k (the conversation up to its k-th user turn; shorter ones
            are left out). None: "first" for public sets of conversations, "last" for rows of `messages`.
        languages: Only rows whose language is one of these (case does not count); empty takes all.
        category: Column whose value becomes the category; None: the layout's own.
        repeated: What a prompt id seen before means: "refuse" is an error that names the row, "drop" skips it.
            None: "drop" for public sets, which have many, else "refuse".
    """

    layout: str | None = None
    turns: Turns | None = None
    languages: tuple[str, ...] = ()
    category: str | None = None
    repeated: Literal["refuse", "drop"] | None = None

    def __post_init__(self) -> None:
        whole = isinstance(self.turns, int) and not isinstance(self.turns, bool) and self.turns >= 1
        if self.turns not in (None, "first", "last", "all") and not whole:
            raise InputError("turns", self.turns, "first, last, all or a whole number of at least 1")
        if self.repeated not in (None, "refuse", "drop"):
            raise InputError("repeated", self.repeated, "refuse, drop or unset")
