"""Sequential test of whether predicted distributions are calibrated: u = F(x) is uniform on [0, 1].

Bets. Bet j multiplies its wealth by b_j(u) = 1 + l g(u), where g has mean 0 over [0, 1] and values in [-1, 1], and
0 < |l| < 1, so that E b_j(u) = 1 while predictions are calibrated. There are three g, each with both signs of l:

- 2 u - 1: outputs have become longer or shorter;
- 2 |2 u - 1| - 1: they vary more or less than predicted;
- 1 if u > 0.9 and -1/9 else: the long tail has changed.

Only an interval [a, b] that contains u is observed: [F(x - 1/2), F(x + 1/2)] for a length of x tokens, and
[F(max_tokens - 1/2), 1] for a truncated output. The factor of a bet is then its mean over the interval. That
is its conditional expectation, so its mean is still 1.

Alarm. R_j <- (1 + R_j) b_j(u), from 0 (Shiryaev-Roberts: a bet opened at every step); S = mean of the R_j. S - t is a
martingale while predictions are calibrated. With an alarm at S >= A the mean time to a false alarm is thus at least A,
for any nu, mu, sigma and max_tokens of the requests (e-detectors: Shin, Ramdas, Rinaldo 2023). A is the option `arl`.
"""

from dataclasses import dataclass

import numpy as np

from scheduler_core.prediction.predictions import LengthPrediction

STAKES = (0.05, 0.15, 0.4, 0.8)
TAIL = 0.9
KINDS = ("longer", "shorter", "wider", "narrower", "more_tail", "less_tail")


def interval_means(low: float, high: float) -> tuple[float, float, float]:
    """Means of the three g over [low, high], 0 <= low <= high <= 1."""
    if high - low < 1e-9:
        u = 0.5 * (low + high)
        return 2 * u - 1, 2 * abs(2 * u - 1) - 1, (1.0 if u > TAIL else 0.0) * 10 / 9 - 1 / 9
    width = high - low
    beyond = max(high - max(low, TAIL), 0.0) / width
    return low + high - 1, (_scale_integral(high) - _scale_integral(low)) / width, beyond * 10 / 9 - 1 / 9


def _scale_integral(u: float) -> float:
    """Integral of 2 |2 v - 1| - 1 from 0 to u."""
    return u - 2 * u * u if u <= 0.5 else 2 * u * u - 3 * u + 1


@dataclass(frozen=True, slots=True)
class DriftAlarm:
    """Alarm that outputs no longer follow their predictions. `statistic` is S, at least `arl`; `reason` one of `KINDS`;
    `num_outputs` the outputs since the test began."""

    statistic: float
    reason: str
    num_outputs: int


class DriftDetector:
    """Drift test of one served model, in constant memory. `value` is S; `num_steps` is the number of outputs since the
    start or the last alarm. The alarm is raised when S reaches `arl`, a lower bound of the mean time to a false alarm."""

    def __init__(self, arl: float) -> None:
        self.arl = arl
        stakes = np.array(STAKES)
        self._stakes = np.stack([sign * stakes for _ in range(3) for sign in (1.0, -1.0)])
        self.reset()

    def reset(self) -> None:
        """Starts the test again."""
        self._sums = np.zeros_like(self._stakes)
        self.value = 0.0
        self.num_steps = 0

    def observe(
        self, prediction: LengthPrediction, output_tokens: int, *, finished: bool
    ) -> DriftAlarm | None:
        """Updates the test with an output; after an alarm it starts again."""
        low, high = (prediction.cdf(output_tokens + half) for half in (-0.5, 0.5))
        if not self.update(low, high if finished else 1.0):
            return None
        alarm = DriftAlarm(self.value, self.reason, self.num_steps)
        self.reset()
        return alarm

    def update(self, low: float, high: float) -> bool:
        """Updates the test with an interval that contains u; returns whether an alarm is raised."""
        location, scale, tail = interval_means(low, high)
        gains = np.array([location, location, scale, scale, tail, tail])[:, None]
        # The limit is far above any alarm threshold; it keeps the sums finite.
        self._sums = np.minimum((1.0 + self._sums) * (1.0 + self._stakes * gains), 1e100)
        self.value = float(self._sums.mean())
        self.num_steps += 1
        return self.value >= self.arl

    @property
    def reason(self) -> str:
        """The kind of bet with the largest gain."""
        return KINDS[int(np.argmax(self._sums.sum(axis=1)))]
