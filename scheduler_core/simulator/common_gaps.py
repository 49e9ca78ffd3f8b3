"""Gaps between tokens of requests that get their tokens at the same times: what a step adds does not depend on their number."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from scheduler_core.request import RequestState
from scheduler_core.simulator.decode_run import Steps
from scheduler_core.simulator.token_gaps import Kind, TokenGaps, kind_of


class CommonGaps:
    """Requests that decode together (see `Scheduler.num_common_steps`), and the gaps between their tokens.

    The longest gap of a request is that of its first step, or the longest of all gaps since. Of those only the ones are
    kept that no later gap exceeds: the first of them after a request's own beginning is its longest.

    Args:
        gaps: Where the gaps are counted.
    """

    __slots__ = (
        "_first_s",
        "_gaps",
        "_last_s",
        "_long_at",
        "_long_s",
        "_new",
        "_num_gaps",
        "_num_of",
        "_since",
    )

    def __init__(self, gaps: TokenGaps) -> None:
        self._gaps = gaps
        #: End of the last step that they have taken together.
        self._last_s = 0.0
        #: Those who have not taken part in a step yet, and when their last token was there.
        self._new: dict[str, tuple[Kind, float]] = {}
        #: Of the others: class, number of the first gap after their own first one, and that first one.
        self._since: dict[str, tuple[Kind, int]] = {}
        self._first_s: dict[str, float] = {}
        self._num_of: dict[Kind, int] = {}
        #: Numbers and lengths of the gaps that no later one exceeds; the lengths fall.
        self._long_at: list[int] = []
        self._long_s: list[float] = []
        self._num_gaps = 0

    def __len__(self) -> int:
        return len(self._new) + len(self._since)

    def join(self, state: RequestState, last_s: float) -> None:
        """A request takes part from the next step on; its last token was there at `last_s`."""
        self._new[state.request_id] = (kind_of(state), last_s)

    def leave(self, request_id: str) -> None:
        """A request takes part no longer; nothing happens if it did not."""
        if self._new.pop(request_id, None) is not None or request_id not in self._since:
            return
        kind, since = self._since.pop(request_id)
        self._num_of[kind] -= 1
        if not self._num_of[kind]:
            del self._num_of[kind]
        longest_s = self._first_s.pop(request_id)
        place = bisect_left(self._long_at, since)
        if place < len(self._long_at):
            longest_s = max(longest_s, self._long_s[place])
        self._gaps.saw(request_id, longest_s)

    def leave_all(self) -> None:
        """Nobody takes part any longer."""
        for name in [*self._new, *self._since]:
            self.leave(name)

    def keep(self, request_ids: Sequence[str]) -> None:
        """All others have left without a word."""
        for name in {*self._new, *self._since}.difference(request_ids):
            self.leave(name)

    def decoded(self, first_end_s: float, end_s: float, rest: Steps) -> None:
        """They have all taken some steps.

        Args:
            first_end_s: End of the first of them.
            end_s: End of the last.
            rest: Durations of all but the first.
        """
        gaps, num_of = self._gaps, self._num_of
        if num_of:
            gap_s = first_end_s - self._last_s
            for kind, num in num_of.items():
                gaps.of(kind).add(gap_s, num)
            self._note(gap_s)
        if self._new:
            for name, (kind, last_s) in self._new.items():
                gap_s = first_end_s - last_s
                gaps.of(kind).add(gap_s)
                self._since[name] = (kind, self._num_gaps)
                self._first_s[name] = gap_s
                num_of[kind] = num_of.get(kind, 0) + 1
            self._new.clear()
        if rest:
            for kind, num in num_of.items():
                gaps.of(kind).add_steps(rest, num)
            self._note(max([steps.longest_s for steps in rest]))
        self._last_s = end_s

    def _note(self, gap_s: float) -> None:
        """The next gap of everybody; those before that are not longer are of no use any more."""
        at, lengths = self._long_at, self._long_s
        while lengths and lengths[-1] <= gap_s:
            at.pop()
            lengths.pop()
        at.append(self._num_gaps)
        lengths.append(gap_s)
        self._num_gaps += 1
