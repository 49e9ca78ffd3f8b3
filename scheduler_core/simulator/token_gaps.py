"""Times between tokens (TBT) of a whole run, in little memory: a histogram per class, the longest gap per request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from scheduler_core.request import RequestState
from scheduler_core.simulator.decode_run import Steps

#: Ratio of the bounds of a bin: quantiles are right to half a percent.
_RATIO = math.log(1.005)
_LOWEST_S = 1e-6
_NUM_BINS = 5600  # to 1e6 s


#: (tier, tenant).
Kind = tuple[int, str]


def kind_of(state: RequestState) -> Kind:
    """Class of requests that it belongs to."""
    return (state.request.tier, state.request.tenant)


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

    def add_steps(self, steps: Steps, num: int) -> None:
        """Counts the duration of every step as `num` gaps; O(bins that they fall into)."""
        for group in steps:
            if group.growth_s == 0.0:
                self.add(group.first_s, num * group.num_steps)
                continue
            gap_s, left = group.first_s, group.num_steps
            while left:
                place = math.log(gap_s / _LOWEST_S) / _RATIO if gap_s > _LOWEST_S else 0.0
                index = min(int(place), _NUM_BINS - 1)
                inside = left
                if index < _NUM_BINS - 1:
                    bound_s = _LOWEST_S * math.exp((index + 1) * _RATIO)
                    inside = min(left, max(1, math.ceil((bound_s - gap_s) / group.growth_s)))
                self.counts[index] += num * inside
                gap_s += inside * group.growth_s
                left -= inside
            self.total_s += group.total_s * num
            self.longest_s = max(self.longest_s, group.longest_s)

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

    Steps that were taken at once count each with its own duration, and cost no more for that.

    Attributes:
        by_class: By (tier, tenant): the gaps.
        longest_s: By request id: its longest gap.
    """

    by_class: dict[Kind, GapHistogram] = field(default_factory=dict)
    longest_s: dict[str, float] = field(default_factory=dict)

    def decoded(
        self, states: Sequence[RequestState], start_s: float, first_end_s: float, rest: Steps = ()
    ) -> None:
        """Requests that each got a token in every one of some steps; called before those are counted.

        Args:
            states: The requests.
            start_s: Start of the first step.
            first_end_s: Its end.
            rest: Durations of the other steps.
        """
        step_s = first_end_s - start_s
        rest_s = max([steps.longest_s for steps in rest], default=0.0)
        plain: dict[Kind, int] = {}
        others: dict[Kind, int] = {}
        for state in states:
            kind = kind_of(state)
            last_s = start_s if state.last_token_s is None else state.last_token_s
            gap_s = first_end_s - last_s
            if gap_s == step_s:
                plain[kind] = plain.get(kind, 0) + 1
            else:
                self.of(kind).add(gap_s)
            others[kind] = others.get(kind, 0) + 1
            self.saw(state.request_id, max(gap_s, rest_s))
        for kind, num in plain.items():
            self.of(kind).add(step_s, num)
        if rest:
            for kind, num in others.items():
                self.of(kind).add_steps(rest, num)

    def saw(self, request_id: str, gap_s: float) -> None:
        """The request has had a gap of this length."""
        if gap_s > self.longest_s.get(request_id, 0.0):
            self.longest_s[request_id] = gap_s

    def of(self, kind: Kind) -> GapHistogram:
        """The gaps of a class of requests."""
        if kind not in self.by_class:
            self.by_class[kind] = GapHistogram()
        return self.by_class[kind]

    def total(self) -> GapHistogram:
        """The gaps of all requests."""
        return GapHistogram.merged(self.by_class.values())
