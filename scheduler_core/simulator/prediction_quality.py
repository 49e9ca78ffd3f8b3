"""How good predicted lengths were, against the lengths that came out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.lengths import LogT
from scheduler_core.simulator.request_columns import FloatArray, RequestColumns

#: Quantiles that pinball loss and coverage are told of.
LEVELS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
NUM_PIT_BINS = 10
#: Degrees of freedom above which Student's t is taken as normal: the CRPS then differs by less than 1e-6.
_NORMAL_NU = 1e6


def prediction_quality(requests: RequestColumns) -> dict[str, Any] | None:
    """Scores of the predicted log-t lengths of the finished requests; None if nobody had a prediction.

    - `num`: requests with a prediction.
    - `mae_tokens`, `rmse_tokens`: of the predicted median; `mae_log`, `rmse_log`, `r2_log`: of mu against ln length.
    - `kendall_tau`: tau-b of the predicted medians and the lengths.
    - `pinball_tokens`: mean pinball loss of the predicted P50, P90, P99; `coverage`: share of lengths up to them.
    - `crps_log`: mean continuous ranked probability score of ln length; None if a nu is 1 or less, where it is infinite.
    - `pit`: share of the requests in each tenth of the probability integral transform; all 0.1 if calibrated.

    What is None: R2 of lengths that do not vary, tau where one side ranks nothing. A request has one length, so there is
    no truth that the predicted sigma could be compared with: CRPS, coverage and PIT judge it.
    """
    known = np.isfinite(requests.predicted_mu)
    if not known.any():
        return None
    if not known.all():
        requests = requests.where(known)
    mu, sigma, nu = requests.predicted_mu, requests.predicted_sigma, requests.predicted_nu
    length = requests.output_tokens
    if (nu == nu[0]).all():
        nu = nu[:1]
    law = LogT(mu, sigma, nu)
    off_tokens, off_log = np.exp(mu) - length, mu - np.log(length)
    spread = float(((np.log(length) - np.log(length).mean()) ** 2).sum())
    # mu + sigma t: one quantile of Student's t for each nu, not one for each request.
    values, places = np.unique(nu, return_inverse=True)
    student = LogT(0.0, 1.0, values)
    quantiles = {
        name: np.exp(mu + sigma * np.asarray(student.logppf(level))[places]) for name, level in LEVELS.items()
    }
    cdf = np.asarray(law.cdf(length))
    pit = np.histogram(cdf, NUM_PIT_BINS, (0.0, 1.0))[0] / len(length)
    return {
        "num": len(length),
        "mae_tokens": float(np.abs(off_tokens).mean()),
        "rmse_tokens": float(np.sqrt((off_tokens**2).mean())),
        "mae_log": float(np.abs(off_log).mean()),
        "rmse_log": float(np.sqrt((off_log**2).mean())),
        "r2_log": 1 - float((off_log**2).sum()) / spread if spread > 0 else None,
        "kendall_tau": kendall_tau(mu, length),
        "pinball_tokens": {
            name: float(np.maximum(level * (length - quantiles[name]), (level - 1) * (length - quantiles[name])).mean())
            for name, level in LEVELS.items()
        },
        "coverage": {name: float((length <= quantile).mean()) for name, quantile in quantiles.items()},
        "crps_log": _crps_log(requests, law, cdf),
        "pit": {f"bin_{place}": float(share) for place, share in enumerate(pit)},
    }  # fmt: skip


def _crps_log(requests: RequestColumns, law: LogT, cdf: FloatArray) -> float | None:
    """Mean CRPS of ln length under mu + sigma T_nu, in closed form (Jordan, Krueger & Lerch 2019, appendix A)."""
    nu, sigma, length = requests.predicted_nu, requests.predicted_sigma, requests.output_tokens
    if not (nu > 1).all():
        return None
    z = (np.log(length) - requests.predicted_mu) / sigma
    density = np.asarray(law.pdf(length)) * length * sigma
    values, places = np.unique(nu, return_inverse=True)
    normal = values > _NORMAL_NU
    finite = np.where(normal, 2.0, values)
    scale = np.where(normal, 1.0, 1 / (finite - 1))[places]
    own = np.where(normal, 1 / math.sqrt(math.pi), [_spread(value) for value in finite])[places]
    squares = np.where(nu > _NORMAL_NU, 1.0, nu + z**2)
    return float((sigma * (z * (2 * cdf - 1) + 2 * density * squares * scale - own)).mean())


def _spread(nu: float) -> float:
    """Half the mean distance of two draws from Student's t: 2 sqrt(nu) / (nu - 1) B(1/2, nu - 1/2) / B(1/2, nu/2)^2."""

    def log_beta(b: float) -> float:
        return math.lgamma(0.5) + math.lgamma(b) - math.lgamma(b + 0.5)

    return 2 * math.sqrt(nu) / (nu - 1) * math.exp(log_beta(nu - 0.5) - 2 * log_beta(nu / 2))


def kendall_tau(one: FloatArray, other: FloatArray) -> float | None:
    """Kendall's tau-b of two rankings [n], in O(n log^2 n) without a loop over n; None if one of them ranks nothing."""
    first = np.unique(one, return_inverse=True)[1]
    second = np.unique(other, return_inverse=True)[1]
    pairs = len(first) * (len(first) - 1) / 2
    tied_first, tied_second = _tied_pairs(first), _tied_pairs(second)
    if tied_first == pairs or tied_second == pairs:
        return None
    both = _tied_pairs(first * (int(second.max()) + 1) + second)
    swaps = _inversions(second[np.lexsort((second, first))])
    concordant_less_discordant = pairs - tied_first - tied_second + both - 2 * swaps
    return float(concordant_less_discordant / math.sqrt((pairs - tied_first) * (pairs - tied_second)))


def _tied_pairs(values: NDArray[np.int64]) -> float:
    counts = np.unique(values, return_counts=True)[1].astype(float)
    return float((counts * (counts - 1) / 2).sum())


def _inversions(ranks: NDArray[np.int64]) -> int:
    """Pairs i < j with ranks[i] > ranks[j], by a merge sort whose merges of one size are done together."""
    above = int(ranks.max()) + 1
    values = np.full(1 << max(0, len(ranks) - 1).bit_length(), above, np.int64)
    values[: len(ranks)] = ranks
    found, width = 0, 1
    while width < len(values):
        rows = values.reshape(-1, 2 * width)
        # Rows are told apart by an offset, so that all their left halves are one sorted array.
        offset = np.arange(len(rows))[:, None] * (above + 1)
        left, right = (rows[:, :width] + offset).ravel(), (rows[:, width:] + offset).ravel()
        not_above = (
            np.searchsorted(left, right, side="right").reshape(-1, width)
            - np.arange(len(rows))[:, None] * width
        )
        found += rows.size // 2 * width - int(not_above.sum())
        values = np.sort(rows, axis=1, kind="stable").ravel()
        width *= 2
    return found
