"""Sequential test of whether predicted distributions are still right: u ~ uniform on [0, 1], u = F(x).

Bets. Each bet j multiplies by b_j(u) = 1 + l g(u), where g has mean 0 over [0, 1] and values in [-1, 1], 0 < |l| < 1, so
that E b_j(u) = 1 while the predictions are right. Three g, each for both signs of l:

- 2 u - 1: outputs have become longer or shorter;
- 2 |2 u - 1| - 1: they vary more or less than predicted;
- 1 if u > 0.9 and -1/9 else: the long tail has changed.

Of u only an interval [a, b] is observed: a length of x tokens stands for [F(x - 1/2), F(x + 1/2)], a truncated output
for [F(max_tokens - 1/2), 1]. A bet then multiplies by its mean over the interval, which is its conditional expectation and so keeps
the mean of 1.

Alarm. R_j <- (1 + R_j) b_j(u), from 0 (Shiryaev-Roberts: a bet opened at every step); S = mean of the R_j. S - t is a
martingale while predictions are right, so with an alarm at S >= A the mean time to a false alarm is at least A,
whatever nu, mu, sigma and max_tokens the requests have (e-detectors: Shin, Ramdas, Rinaldo 2023). A is the option `arl`.
"""

import numpy as np

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


class DriftDetector:
    """The test of one served model, in constant memory: `value` is S, `num_steps` the outputs since the start or the last
    alarm, and there is an alarm where S reaches `arl`, the least mean number of outputs to a false one."""

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

    def update(self, low: float, high: float) -> bool:
        """Updates the test with an interval that holds u; returns whether there is an alarm."""
        location, scale, tail = interval_means(low, high)
        gains = np.array([location, location, scale, scale, tail, tail])[:, None]
        # Far beyond the alarm; keeps the sums finite.
        self._sums = np.minimum((1.0 + self._sums) * (1.0 + self._stakes * gains), 1e100)
        self.value = float(self._sums.mean())
        self.num_steps += 1
        return self.value >= self.arl

    @property
    def reason(self) -> str:
        """The kind of bet with the largest gain."""
        return KINDS[int(np.argmax(self._sums.sum(axis=1)))]
