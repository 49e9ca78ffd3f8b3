"""An index of what remains of each request's length, kept until it has generated so many tokens more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_core.indices.length_table import LengthTable
from scheduler_core.request import RequestState


@dataclass(slots=True)
class StepwiseIndex:
    """Computed from the predicted length and the tokens generated, rounded down to whole `every_tokens`.

    Without a prediction it is what is left to max_tokens.

    Attributes:
        every_tokens: Tokens after which it is computed anew, >= 1.
        index: (table of the predicted length, tokens generated) -> index, in tokens.
    """

    every_tokens: float
    index: Callable[[LengthTable, float], float]
    _tables: dict[str, LengthTable] = field(default_factory=dict, init=False)
    _seen: dict[str, tuple[float, float]] = field(default_factory=dict, init=False)

    def predicted(self, state: RequestState) -> None:
        """A prediction has come; nothing changes if it is not of the length."""
        if state.prediction is not None:
            self._tables[state.request_id] = LengthTable(state.prediction, state.request.max_tokens)
            self._seen.pop(state.request_id, None)

    def finished(self, state: RequestState) -> None:
        """The request is forgotten."""
        self._tables.pop(state.request_id, None)
        self._seen.pop(state.request_id, None)

    def table(self, state: RequestState) -> LengthTable | None:
        """Of the predicted length; None without a prediction."""
        return self._tables.get(state.request_id)

    def value(self, state: RequestState) -> float:
        """The index, in tokens."""
        table = self._tables.get(state.request_id)
        if table is None:
            return float(state.request.max_tokens - state.num_output_tokens)
        generated = state.num_output_tokens - state.num_output_tokens % self.every_tokens
        seen = self._seen.get(state.request_id)
        if seen is None or seen[0] != generated:
            seen = (generated, self.index(table, generated))
            self._seen[state.request_id] = seen
        return seen[1]
