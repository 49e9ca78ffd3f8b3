"""Conversations: turns that follow each other with time to think, and share their growing prefix."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.simulator.trace import MAX_TIME_S, TraceRequest


@dataclass(frozen=True, kw_only=True)
class Sessions:
    """Makes every drawn request the first turn of a conversation.

    Raises:
        InputError: A value is outside its range.
    """

    mean_turns: float = 4.0
    """Mean number of turns, at least 1; they have a geometric distribution."""
    max_turns: int = 32
    """Conversations end here at the latest."""
    mean_think_time_s: float = 10.0
    """Mean seconds between an answer's last token and the next turn; exponential."""
    max_prompt_tokens: int = 4096
    """A turn whose prompt (all before it and the new text) would be longer is not made."""

    def __post_init__(self) -> None:
        if not 1 <= self.mean_turns < math.inf:
            raise InputError("mean_turns", self.mean_turns, "numbers >= 1")
        if self.max_turns < 1:
            raise InputError("max_turns", self.max_turns, "integers > 0")
        if not 0 <= self.mean_think_time_s <= MAX_TIME_S:
            raise InputError("mean_think_time_s", self.mean_think_time_s, f"seconds from 0 to {MAX_TIME_S:g}")
        if self.max_prompt_tokens < 1:
            raise InputError("max_prompt_tokens", self.max_prompt_tokens, "integers > 0")

    def conversations(self, rows: list[TraceRequest], rng: np.random.Generator) -> list[TraceRequest]:
        """Rows put together to conversations, until all are used.

        The rows are taken in order: the k-th conversation begins when the k-th row arrives, and each of its turns adds
        the next unused row's prompt as new text. A later turn's prompt is all that was said before it (`prefix_tokens`)
        and its new text; its arrival is that of the turn before plus the time to think, as if answers took no time,
        and `think_time_s` tells a closed loop what to wait after the answer.

        Args:
            rows: Requests in the order of arrival.
            rng: Source of randomness.

        Returns:
            The turns, conversation by conversation.
        """
        made: list[TraceRequest] = []
        number = 0
        while len(made) < len(rows):
            turns = min(int(rng.geometric(1.0 / self.mean_turns)), self.max_turns)
            new = rows[len(made) : len(made) + turns]
            made.extend(self._turns(new, f"s{number}", rows[number].arrival_s, rng))
            number += 1
        return made

    def _turns(
        self, rows: list[TraceRequest], name: str, arrival_s: float, rng: np.random.Generator
    ) -> list[TraceRequest]:
        """The turns of one conversation: as many of the rows as its prompt has room for."""
        first, said = rows[0], 0
        turns: list[TraceRequest] = []
        for turn, row in enumerate(rows):
            prompt = said + row.prompt_tokens
            if turn and prompt > self.max_prompt_tokens:
                break
            think_s = float(rng.exponential(self.mean_think_time_s)) if turn else None
            arrival_s += think_s or 0.0
            turns.append(
                replace(
                    row,
                    arrival_s=arrival_s,
                    prompt_tokens=prompt,
                    prefix_tokens=said,
                    session_id=name,
                    turn=turn,
                    think_time_s=think_s,
                    tier=first.tier,
                    tenant=first.tenant,
                    priority=first.priority,
                )
            )
            said = prompt + row.output_tokens
        return turns
