"""Times between tokens (TBT) of a whole run, in little memory: a histogram per class, the longest gap per request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from scheduler_core.request import RequestState

#: Ratio of the bounds of a bin: quantiles are right to half a percent.
_RATIO = math.log(1.005)
_LOWEST_S = 1e-6
_NUM_BINS = 5600  # to 1e6 s


@dataclass(slots=True, eq=False)
class GapHistogram:
    """Gaps in bins whose bounds grow by 0.5 %.

    Attributes:
        counts: Number in each bin.
        total_s: Their sum.
        longest_s: The longest.
    """

    counts: np.ndarray = field(default_factory=lambda: np.zeros(_NUM_BINS, np.int64))
    total_s: float = 0.0
    longest_s: float = 0.0

    def add(self, gap_s: float, num: int = 1) -> None:
        """Counts `num` gaps of this length."""
        place = math.log(gap_s / _LOWEST_S) / _RATIO if gap_s > _LOWEST_S else 0.0
        self.counts[min(int(place), _NUM_BINS - 1)] += num
        self.total_s += gap_s * num
        self.longest_s = max(self.longest_s, gap_s)

    def quantile(self, share: float) -> float:
        """Gap that this share of the gaps does not exceed, right to 0.5 %; NaN without gaps."""
        total = int(self.counts.sum())
        if total == 0:
            return math.nan
        index = int(np.searchsorted(np.cumsum(self.counts), share * total))
        return min(_LOWEST_S * math.exp((index + 0.5) * _RATIO), self.longest_s)

    def summary(self) -> dict[str, float] | None:
        """mean, p50, p90, p95, p99, p999, max in seconds; None without gaps."""
        total = int(self.counts.sum())
        if total == 0:
            return None
        shares = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}
        values = {name: self.quantile(share) for name, share in shares.items()}
        return {"mean": self.total_s / total, **values, "max": self.longest_s}

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """(gaps in seconds, share of gaps up to there), for a distribution function."""
        used = np.flatnonzero(self.counts)
        total = max(1, int(self.counts.sum()))
        return _LOWEST_S * np.exp((used + 0.5) * _RATIO), np.cumsum(self.counts)[used] / total

    @classmethod
    def merged(cls, parts: Iterable[GapHistogram]) -> GapHistogram:
        """All gaps together."""
        whole = cls()
        for part in parts:
            whole.counts += part.counts
            whole.total_s += part.total_s
            whole.longest_s = max(whole.longest_s, part.longest_s)
        return whole


@dataclass(slots=True)
class TokenGaps:
    """Gaps between the tokens of the same request.

    Of decode steps that were taken at once all gaps count as their mean, which is exact where a step's duration does not
    grow with the context, and near it elsewhere; with `exact_steps` every gap is its own.

    Attributes:
        by_class: By (tier, tenant): the gaps.
        longest_s: By request id: its longest gap.
    """

    by_class: dict[tuple[int, str], GapHistogram] = field(default_factory=dict)
    longest_s: dict[str, float] = field(default_factory=dict)

    def decoded(self, states: Sequence[RequestState], start_s: float, end_s: float, num_steps: int) -> None:
        """Requests that each got a token in each of `num_steps` steps; called before those are counted."""
        step_s = (end_s - start_s) / num_steps
        plain: dict[tuple[int, str], int] = {}
        longest = self.longest_s
        for state in states:
            request = state.request
            kind = (request.tier, request.tenant)
            last_s = start_s if state.last_token_s is None else state.last_token_s
            first_s = start_s - last_s + step_s
            if first_s == step_s:
                plain[kind] = plain.get(kind, 0) + num_steps
            else:
                self._of(kind).add(first_s)
                if num_steps > 1:
                    plain[kind] = plain.get(kind, 0) + num_steps - 1
            if first_s > longest.get(request.request_id, 0.0):
                longest[request.request_id] = first_s
        for kind, num in plain.items():
            self._of(kind).add(step_s, num)

    def _of(self, kind: tuple[int, str]) -> GapHistogram:
        if kind not in self.by_class:
            self.by_class[kind] = GapHistogram()
        return self.by_class[kind]

    def total(self) -> GapHistogram:
        """The gaps of all requests."""
        return GapHistogram.merged(self.by_class.values())
