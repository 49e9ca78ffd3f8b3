"""Baselines: predictions without a model, from the training split only.

They are stored with the predictor as a few numbers (`training.json`, the manifest).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from training.evaluating.scores import standard_quantiles
from training.fitting.estimate import SortedLengths, estimate, family_of
from training.fitting.fits import NOT_FITTED, FittedGroups
from training.rows import Rows

FloatArray = NDArray[np.float64]
SIGMA_FLOOR = 1e-6
#: Minimum number of outputs of a served model for a distribution of its own.
MIN_OUTPUTS = 10


@dataclass(frozen=True, slots=True)
class Baselines:
    """Parameters of the baselines; lengths in log tokens, prompts in ln(1 + characters).

    Attributes:
        constant_mu, constant_sigma: Means of the fitted mu and log(1 + sigma): the best constant guess of parameters.
        marginal_mu, marginal_sigma: One distribution fitted to all outputs of all prompts.
        mu_intercept, mu_slope: Line of mu over the prompt's length: least squares, moved to the outputs' median.
        line_sigma: Scale of the outputs about that line.
        nu: Degrees of freedom of all of them.
        served_models: Served model -> mu and sigma of one distribution fitted to all of its outputs. Empty if the data
            name at most one.
    """

    constant_mu: float
    constant_sigma: float
    marginal_mu: float
    marginal_sigma: float
    mu_intercept: float
    mu_slope: float
    line_sigma: float
    nu: float = 3.5
    served_models: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, fits: FittedGroups, prompts: Sequence[str]) -> Baselines:
        """Baselines of the training split.

        Args:
            fits: Fitted groups [G].
            prompts: Their prompts [G].
        """
        groups = fits.groups
        fitted = ~fits.has_flag(*NOT_FITTED)
        return cls.of_outputs(
            prompts,
            groups.column("model") or [None] * len(fits),
            groups.offsets,
            groups.flat_lengths,
            groups.flat_finished,
            np.where(fitted, fits.mu, np.nan),
            np.where(fitted, fits.sigma, np.nan),
            fits.nu,
        )

    @classmethod
    def of_rows(cls, rows: Rows, nu: float = 3.5) -> Baselines:
        """Baselines of training rows.

        Args:
            rows: At least one.
            nu: Degrees of freedom.
        """
        names = [None, *rows.models]
        return cls.of_outputs(
            [rows.prompts[number] for number in rows.prompt],
            [names[number] for number in rows.model],
            rows.offsets,
            rows.lengths.astype(np.int64),
            rows.finished,
            rows.mu,
            rows.sigma,
            nu,
        )

    @classmethod
    def of_outputs(
        cls,
        prompts: Sequence[str],
        served_models: Sequence[str | None],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        finished: NDArray[np.bool_],
        mu: FloatArray,
        sigma: FloatArray,
        nu: float,
    ) -> Baselines:
        """Baselines of G rows with S outputs together.

        Args:
            prompts, served_models: Of each row [G].
            offsets: Outputs of row g are lengths[offsets[g]:offsets[g + 1]], at least one [G + 1].
            lengths: Tokens; of a truncated output the length it was truncated at [S].
            finished: False where the output was truncated [S].
            mu, sigma: Fits, NaN where there is none [G]. Where no row has one, as with a single output per prompt, the
                logarithms of the outputs and the scale of all of them are used.
            nu: Degrees of freedom.

        Raises:
            InputError: No output is finished.
        """
        if not finished.any():
            raise InputError("finished outputs, for baselines", 0, "at least one")
        counts, size = np.diff(offsets), _size(prompts)
        marginal = _pooled(lengths, finished, nu)
        logs = np.log(lengths)
        mean_logs = np.bincount(np.repeat(np.arange(len(counts)), counts), weights=logs) / counts
        fitted = np.isfinite(mu) & np.isfinite(sigma)
        usable = fitted if fitted.any() else np.ones(len(counts), dtype=bool)
        centers = np.where(fitted, mu, mean_logs)[usable]
        scales = sigma[usable] if fitted.any() else np.array([marginal[1]])
        slope, intercept = _line(size[usable], centers)
        residuals = logs - np.repeat(intercept + slope * size, counts)
        center = float(np.median(residuals))
        distance = float(np.median(np.abs(residuals - center)))
        quartile = float(standard_quantiles(np.array([0.75]), nu)[0, 0])
        return cls(
            constant_mu=float(centers.mean()),
            constant_sigma=float(np.expm1(np.log1p(scales).mean())),
            marginal_mu=marginal[0],
            marginal_sigma=marginal[1],
            mu_intercept=intercept + center,
            mu_slope=slope,
            line_sigma=max(distance / quartile, SIGMA_FLOOR),
            nu=nu,
            served_models=_by_served_model(served_models, counts, lengths, finished, nu),
        )

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Baselines:
        """Inverse of `to_json`.

        Raises:
            InputError: A number is missing.
        """
        numbers = [name for name in cls.__dataclass_fields__ if name not in ("nu", "served_models")]
        wrong = [name for name in numbers if not isinstance(content.get(name), int | float)]
        if wrong:
            raise InputError("baselines", sorted(content), f"numbers {', '.join(wrong)}")
        served = content.get("served_models", {})
        try:
            pairs = {str(name): (float(mu), float(sigma)) for name, (mu, sigma) in served.items()}
            nu = float(content.get("nu", 3.5))
        except (AttributeError, TypeError, ValueError) as error:
            raise InputError("baselines, served_models", served, "pairs of numbers by name") from error
        return cls(**{name: float(content[name]) for name in numbers}, nu=nu, served_models=pairs)

    def to_json(self) -> dict[str, Any]:
        """JSON content."""
        content = asdict(self)
        content["served_models"] = {name: list(pair) for name, pair in self.served_models.items()}
        return content

    def predict(
        self, prompts: Sequence[str], served_models: Sequence[str | None] | None = None
    ) -> dict[str, tuple[FloatArray, FloatArray]]:
        """Name of the baseline -> (mu [N], sigma [N]).

        Args:
            prompts: N texts.
            served_models: Of each prompt [N], None where unknown; unset: all unknown. One that the training split did
                not have gets the marginal distribution.
        """
        ones = np.ones(len(prompts))
        size = _size(prompts)
        predictions = {
            "constant": (self.constant_mu * ones, self.constant_sigma * ones),
            "marginal": (self.marginal_mu * ones, self.marginal_sigma * ones),
            "prompt_length": (self.mu_intercept + self.mu_slope * size, self.line_sigma * ones),
        }
        if self.served_models:
            other = (self.marginal_mu, self.marginal_sigma)
            names = [None] * len(prompts) if served_models is None else served_models
            pairs = np.array([self.served_models.get(name or "", other) for name in names]).reshape(-1, 2)
            predictions["per_model"] = (pairs[:, 0], pairs[:, 1])
        return predictions


def _by_served_model(
    names: Sequence[str | None],
    counts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    finished: NDArray[np.bool_],
    nu: float,
) -> dict[str, tuple[float, float]]:
    """One distribution for each served model with enough outputs; none unless there are several models."""
    models = sorted({str(name) for name in names if name is not None})
    if len(models) < 2:
        return {}
    numbers = {name: number for number, name in enumerate(models)}
    of_output = np.repeat([-1 if name is None else numbers[str(name)] for name in names], counts)
    parameters = {}
    for name, number in numbers.items():
        rows = of_output == number
        if rows.sum() >= MIN_OUTPUTS and finished[rows].any():
            parameters[name] = _pooled(lengths[rows], finished[rows], nu)
    return parameters


def _pooled(lengths: NDArray[np.int64], finished: NDArray[np.bool_], nu: float) -> tuple[float, float]:
    """mu and sigma of one log-t fitted to all of these outputs."""
    ends = np.array([0, len(lengths)])
    solution = estimate(SortedLengths.of(lengths, finished, ends), family_of("log-t", nu)).solution
    return float(solution.m[0]), float(np.exp(solution.s[0]))


def _size(prompts: Sequence[str]) -> FloatArray:
    return np.log1p(np.array([len(prompt) for prompt in prompts], dtype=np.float64))


def _line(x: FloatArray, y: FloatArray) -> tuple[float, float]:
    """Slope and intercept of the least-squares line; slope 0 where x does not vary."""
    centered = x - x.mean()
    total = float((centered**2).sum())
    slope = float((centered * y).sum()) / total if total > 1e-12 else 0.0
    return slope, float(y.mean()) - slope * float(x.mean())
