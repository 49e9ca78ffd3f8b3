"""The predicted output length of one prompt, and its urgency: statistics, a text chart, a figure."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np

from scheduler_core.errors import InputError
from scheduler_core.prediction.predictions import (
    DEFAULT_MAX_TOKENS,
    LengthPrediction,
    MissingPart,
    Prediction,
    UrgencyPrediction,
)
from scheduler_core.prediction.urgency import LEVELS

_NUM_BARS = 8
_BAR_CHARS = 32
#: Quantile levels of the range of the chart; the first and the last bar include the tails.
_CHART_LEVELS = (0.02, 0.98)


@dataclass(frozen=True, slots=True)
class OutputLength:
    """Predicted distribution of min(X, max_tokens), the output length of a prompt in tokens.

    Attributes:
        prediction: Parameters of the log-t distribution of X, and their artifact.
        max_tokens: Maximum number of output tokens, >= 1; without a limit the expectation is infinite.
        urgency: Predicted urgency of the request; None if the predictor does not predict it.
        missing: Parts of the predictor that failed, such as that of urgency.
    """

    prediction: LengthPrediction
    max_tokens: int = DEFAULT_MAX_TOKENS
    urgency: UrgencyPrediction | None = None
    missing: tuple[MissingPart, ...] = ()

    @classmethod
    def of(cls, prediction: Prediction, max_tokens: int) -> Self:
        """The length and the urgency of a prediction that has a length."""
        assert prediction.length is not None
        return cls(prediction.length, max_tokens, prediction.urgency, prediction.missing)

    def __post_init__(self) -> None:
        if not 1 <= self.max_tokens < math.inf:
            raise InputError("max_tokens", self.max_tokens, "an integer >= 1")

    @property
    def median(self) -> float:
        """Median length in tokens."""
        return self.quantile(0.5)

    @property
    def expected_tokens(self) -> float:
        """Mean length in tokens."""
        return float(self.prediction.distribution().expected(self.max_tokens))

    def quantile(self, level: float) -> float:
        """Quantile of the length in tokens; InputError unless 0 <= level <= 1."""
        return min(float(self.prediction.distribution().ppf(level)), float(self.max_tokens))

    def probability_longer_than(self, tokens: float) -> float:
        """Probability of a length > `tokens`; 0 if `tokens` >= max_tokens."""
        return float(self.prediction.distribution().sf(tokens)) if tokens < self.max_tokens else 0.0

    def plot(self) -> Any:
        """A `matplotlib.figure.Figure` of the density with median and 90 % quantile; needs matplotlib."""
        from scheduler_core.report.plotting import COLORS, new_figure

        figure, [axis] = new_figure(6.0, 3.0)
        distribution = self.prediction.distribution()
        low, high = (float(distribution.ppf(level)) for level in (0.005, 0.995))
        tokens = np.geomspace(max(low, 1e-3), max(min(high, self.max_tokens), 2 * low), 400)
        axis.plot(tokens, distribution.pdf(tokens) * tokens, color=COLORS[0])
        for level, name, dash in ((0.5, "median", "-"), (0.9, "90 %", "--")):
            value = self.quantile(level)
            axis.axvline(value, color=COLORS[1], linestyle=dash, label=f"{name}: {value:.0f}")
        axis.set_xscale("log")
        axis.set_xlabel("output tokens")
        axis.set_ylabel("density of ln tokens")
        axis.legend(frameon=False)
        return figure

    def bins(self) -> list[tuple[str, float]]:
        """Ascending ranges of lengths as text, with their probabilities, which sum to 1."""
        low, high = (max(1.0, self.quantile(level)) for level in _CHART_LEVELS)
        edges = sorted({_rounded(edge) for edge in np.geomspace(low, high, _NUM_BARS + 1)[1:-1]})
        edges = [edge for edge in edges if edge < self.max_tokens] or [max(1, self.max_tokens // 2)]
        survival = [1.0, *map(self.probability_longer_than, edges), 0.0]
        names = [f"{first + 1} - {last}" for first, last in pairwise([0, *edges])] + [f"> {edges[-1]}"]
        return [(name, start - end) for name, (start, end) in zip(names, pairwise(survival), strict=True)]

    def __str__(self) -> str:
        bins = self.bins()
        largest = max(probability for _, probability in bins)
        bars = [
            f"{name:>15} {'█' * round(_BAR_CHARS * probability / largest):<{_BAR_CHARS}} {probability:4.0%}"
            for name, probability in bins
        ]
        return "\n".join([self._summary(), *bars, *self._urgency_lines()])

    def _repr_html_(self) -> str:
        bins = self.bins()
        largest = max(probability for _, probability in bins)
        rows = [
            f'<tr><td style="text-align:right">{html.escape(name)}</td><td style="text-align:left"><div style="background:'
            f'#0072B2;height:0.8em;width:{200 * probability / largest:.0f}px"></div></td><td>{probability:.0%}</td></tr>'
            for name, probability in bins
        ]
        urgency = "".join(map(html.escape, self._urgency_lines()))
        return f"<div>{html.escape(self._summary())}<table>{''.join(rows)}</table>{urgency}</div>"

    def _urgency_lines(self) -> list[str]:
        urgency = self.urgency
        if urgency is None:
            return [f"missing: {part}" for part in self.missing]
        probability = max(urgency.probabilities)
        names = LEVELS if len(urgency.probabilities) == len(LEVELS) else range(len(urgency.probabilities))
        if urgency.abstains:
            likely = f"most likely {names[urgency.level]}, {probability:.0%}"
            return [f"urgency: uncertain, the declared tier counts ({likely})"]
        return [f"urgency: {names[urgency.level]} (level {urgency.level}, {probability:.0%})"]

    def _summary(self) -> str:
        numbers = f"median {self.median:.0f}, P90 {self.quantile(0.9):.0f}"
        numbers += f", expected {self.expected_tokens:.0f}"
        truncated = float(self.prediction.distribution().sf(self.max_tokens))
        return f"output tokens: {numbers} of at most {self.max_tokens} (reached with probability {truncated:.1%})"


def _rounded(value: float) -> int:
    """Rounds a number >= 1 to two significant digits."""
    return int(round(value, min(0, 1 - math.floor(math.log10(value)))))
