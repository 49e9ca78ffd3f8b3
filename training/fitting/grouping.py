"""Options that every command has whose input is a file of output lengths."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_core.errors import InputError
from scheduler_core.ranges import check_ranges


@dataclass(frozen=True, kw_only=True)
class GroupingOptions:
    """Grouping of output lengths."""

    group_by: str = "prompt_id,model"
    """Columns that identify a group of samples, separated by commas."""
    max_tokens: int | None = None
    """Limit of all samples: longer ones are censored at this length. Needed for lists without a column `finished`, where samples of at least this length are censored."""

    def __post_init__(self) -> None:
        check_ranges(self, max_tokens=(1, 2**31 - 1))
        if not all(self.keys) or len(set(self.keys)) < len(self.keys):
            raise InputError("group_by", self.group_by, "column names separated by commas, each once")

    @property
    def keys(self) -> tuple[str, ...]:
        """Columns that identify a group."""
        return tuple(name.strip() for name in self.group_by.split(","))
