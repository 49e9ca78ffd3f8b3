"""Scores of predicted distributions, answer by answer; all of them know about cut answers.

- pit: u = F(x), the predicted probability of an answer at most as long. Of a cut answer only u >= F(cap) is known.
- coverage at level p: how often a length is at most its predicted p-quantile q, that is u <= p. Where q is below the cap
  that is seen of every answer, cut or not, and whether q is below the cap depends on the prediction alone: so the
  estimate is the share among the answers of such prompts, without bias. Beside it stand the bounds over all answers
  that result if the cut answers with q beyond their cap are all longer, or all shorter, than q.
- pinball loss and CRPS: of the served length min(X, cap), which a cut answer shows exactly (it is the cap); the
  predicted quantile is min(q, cap) too. In tokens, and of ln tokens, where long answers count no more than short ones.
- nll: -ln f(x), for cut answers -ln(1 - F(x)); in nats, x in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.lengths import LogT
from training.evaluating.metrics import finite

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
Rows = NDArray[np.bool_] | NDArray[np.intp] | slice
COVERAGE_LEVELS = (0.5, 0.9, 0.99)
CALIBRATION_LEVELS = tuple(round(0.05 * step, 2) for step in range(1, 20))
#: CRPS is twice the mean pinball loss over all levels; this grid is its midpoint rule.
CRPS_LEVELS = (np.arange(100) + 0.5) / 100
PIT_BINS = 20
#: Probabilities closer than this are equal.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Answers:
    """N answers to G prompts.

    Attributes:
        owner: Prompt of each answer [N].
        lengths: In tokens [N]; of a cut answer the length it was cut at.
        finished: False where the answer was cut [N].
        caps: Cap on the answers of each prompt in tokens, infinite if there is none [G].
    """

    owner: NDArray[np.intp]
    lengths: FloatArray
    finished: BoolArray
    caps: FloatArray

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, slots=True)
class AnswerScores:
    """Scores of N answers under predicted distributions.

    Attributes:
        finished: False where the answer was cut [N].
        pit: F(x) [N], of a cut answer at the length it was cut at.
        pit_at_cap: F(cap of its prompt) [N], 1 without a cap.
        pinball_tokens: At each of COVERAGE_LEVELS [N, 3].
        crps_tokens, crps_log: [N].
        nll: [N].
    """

    finished: BoolArray
    pit: FloatArray
    pit_at_cap: FloatArray
    pinball_tokens: FloatArray
    crps_tokens: FloatArray
    crps_log: FloatArray
    nll: FloatArray

    def coverage(self, level: float, rows: Rows = slice(None)) -> dict[str, float | None]:
        """Observed coverage of the predicted quantile of a level.

        Args:
            level: Its nominal probability.
            rows: Answers that count, at least one.

        Returns:
            level; estimate (None if no quantile lies below its cap); known_share, the share of answers it is made
            from; low and high, bounds over all answers.
        """
        pit, finished = self.pit[rows], self.finished[rows]
        covered = finished & (pit <= level + _ROUNDING)
        # At q = cap the answer that was cut there is longer than q.
        known = self.pit_at_cap[rows] >= level - _ROUNDING
        unknown = ~finished & (pit < level - _ROUNDING)
        return {
            "level": level,
            "estimate": float(covered[known].mean()) if known.any() else None,
            "known_share": float(known.mean()),
            "low": float(covered.mean()),
            "high": float((covered | unknown).mean()),
        }

    def pit_histogram(self, rows: Rows = slice(None)) -> list[float]:
        """Share of answers in each of 20 equal parts of [0, 1]; a cut answer is spread over [F(cap), 1]."""
        pit, finished = self.pit[rows], self.finished[rows]
        counts = np.histogram(pit[finished], bins=PIT_BINS, range=(0.0, 1.0))[0].astype(np.float64)
        cut = np.minimum(pit[~finished], 1 - 1e-12)
        edges = np.linspace(0.0, 1.0, PIT_BINS + 1)
        for number in range(PIT_BINS if len(cut) else 0):
            inside = np.clip(edges[number + 1] - np.maximum(cut, edges[number]), 0.0, None)
            counts[number] += float((inside / (1 - cut)).sum())
        total = counts.sum()
        return [float(count / total) if total else 0.0 for count in counts]

    def summary(self, rows: Rows = slice(None)) -> dict[str, Any]:
        """Means over the chosen answers; see `docs/evaluation-format.md`."""
        if not len(self.pit[rows]):
            return dict(NO_SUMMARY)
        pinball = self.pinball_tokens[rows].mean(axis=0)
        return {
            "coverage": {percent(level): self.coverage(level, rows) for level in COVERAGE_LEVELS},
            "calibration": [self.coverage(level, rows) for level in CALIBRATION_LEVELS],
            "pit": self.pit_histogram(rows),
            "pinball_tokens": {
                percent(level): finite(loss) for level, loss in zip(COVERAGE_LEVELS, pinball, strict=True)
            },
            "crps_tokens": finite(self.crps_tokens[rows].mean()),
            "crps_log_tokens": finite(self.crps_log[rows].mean()),
            "nll": finite(self.nll[rows].mean()),
        }


#: The summary of no answers, or of a predictor without a distribution.
NO_SUMMARY: dict[str, Any] = {
    "coverage": {},
    "calibration": [],
    "pit": [],
    "pinball_tokens": {},
    "crps_tokens": None,
    "crps_log_tokens": None,
    "nll": None,
}


def percent(level: float) -> str:
    """Name of a level: p50, p90, p99."""
    return f"p{100 * level:g}"


def standard_quantiles(levels: FloatArray, nu: float | FloatArray) -> FloatArray:
    """Quantiles of Student-t(nu) [G or 1, L] at levels [L], for one nu or one for each prompt [G]; inf is normal."""
    from scipy import stats

    values, inverse = np.unique(np.atleast_1d(np.asarray(nu, dtype=np.float64)), return_inverse=True)
    normal = stats.norm.ppf(levels)
    table = np.array([normal if np.isinf(value) else stats.t.ppf(levels, value) for value in values])
    return np.asarray(table[inverse])


def score_answers(
    mu: FloatArray, sigma: FloatArray, nu: float | FloatArray, answers: Answers
) -> AnswerScores:
    """Scores N answers under the log-t predicted for their prompts.

    Args:
        mu, sigma: Parameters for each prompt [G], log tokens.
        nu: Degrees of freedom, one for all or [G].
        answers: The answers and their caps.
    """
    owner, lengths = answers.owner, answers.lengths
    nu_of = nu if np.ndim(nu) == 0 else np.asarray(nu)[owner]
    each = LogT(mu[owner], sigma[owner], nu_of)
    log_sf = np.asarray(each.logsf(lengths))
    has_cap = np.isfinite(answers.caps)
    at_cap = np.ones(len(mu))
    if has_cap.any():
        nu_at = nu if np.ndim(nu) == 0 else np.asarray(nu)[has_cap]
        at_cap[has_cap] = -np.expm1(LogT(mu[has_cap], sigma[has_cap], nu_at).logsf(answers.caps[has_cap]))
    served = np.minimum(lengths, answers.caps[owner])
    losses = _Losses(mu, sigma, nu, answers, served)
    tokens, logs = losses.crps()
    return AnswerScores(
        finished=answers.finished,
        pit=np.asarray(each.cdf(lengths)),
        pit_at_cap=at_cap[owner],
        pinball_tokens=losses.pinball_tokens(),
        crps_tokens=tokens,
        crps_log=logs,
        nll=-np.where(answers.finished, each.logpdf(lengths), log_sf),
    )


class _Losses:
    """Pinball losses of served lengths [N], in tokens and log tokens."""

    def __init__(
        self,
        mu: FloatArray,
        sigma: FloatArray,
        nu: float | FloatArray,
        answers: Answers,
        served: FloatArray,
    ) -> None:
        self._mu, self._sigma, self._nu = mu, sigma, nu
        self._owner = answers.owner
        with np.errstate(divide="ignore"):
            self._log_caps = np.log(answers.caps)
        self._served, self._log_served = served, np.log(served)

    def _log_quantile(self, z: FloatArray) -> FloatArray:
        return np.asarray(np.minimum(self._mu + self._sigma * z, self._log_caps))

    def crps(self) -> tuple[FloatArray, FloatArray]:
        tokens, logs = np.zeros(len(self._served)), np.zeros(len(self._served))
        z = standard_quantiles(CRPS_LEVELS, self._nu)
        for number, level in enumerate(CRPS_LEVELS.tolist()):
            quantile = self._log_quantile(z[:, number])
            logs += _pinball(self._log_served, quantile[self._owner], level)
            tokens += _pinball(self._served, _exp(quantile)[self._owner], level)
        scale = 2 / len(CRPS_LEVELS)
        return tokens * scale, logs * scale

    def pinball_tokens(self) -> FloatArray:
        z = standard_quantiles(np.array(COVERAGE_LEVELS), self._nu)
        return np.stack(
            [
                _pinball(self._served, _exp(self._log_quantile(z[:, number]))[self._owner], level)
                for number, level in enumerate(COVERAGE_LEVELS)
            ],
            axis=1,
        )


def _exp(values: FloatArray) -> FloatArray:
    with np.errstate(over="ignore"):
        return np.asarray(np.exp(values))


def _pinball(served: FloatArray, quantile: FloatArray, level: float) -> FloatArray:
    gap = served - quantile
    return np.maximum(level * gap, (level - 1) * gap)
