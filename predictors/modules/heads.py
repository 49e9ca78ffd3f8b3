"""Prediction heads: the options, network and outputs of each, and their registry `Heads`.

A head maps the prompt's features to scores, which training compares with its targets, and scores to outputs in the
natural units that a scheduler uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, get_args, get_type_hints

import torch
from torch import Tensor, nn

from predictors.modules.normalization import Normalization
from predictors.modules.towers import ConditionedTower, Tower, build_tower
from scheduler_core.errors import InputError
from scheduler_core.lengths.quantiles import LEVELS
from scheduler_core.lengths.student_t import student_t_quantile
from scheduler_core.ranges import check_choice

URGENCY_LEVELS = ("emergency", "interactive", "standard", "batch", "background")
# A learned number of degrees of freedom stays between these: below 1 not even the median is well determined, above 100
# the distribution is a log-normal.
NU_RANGE = (1.0, 100.0)
# Minimum sigma, log tokens: the inverse of log(1 + sigma) may be negative.
SIGMA_FLOOR = 1e-6
# Minimum gap between quantiles, log tokens.
MIN_GAP = 1e-4
MEDIAN = LEVELS.index(0.5)


@dataclass(frozen=True, slots=True)
class Head:
    """Options of a head, what they build, and what its scores mean.

    One that `is_conditioned` also sees the served model and the temperature, a row per (prompt, served model, temperature).
    """

    is_conditioned: ClassVar[bool] = True
    tower: Tower = field(default_factory=Tower)

    @property
    def num_scores(self) -> int | None:
        """Scores of each row; None: one, without an axis of its own."""
        return None

    def build(self, num_features: int, num_conditions: int, generator: torch.Generator | None) -> nn.Module:
        """The network: features [P, F] and, if conditioned, conditions [R, C] or None and row_prompt, to scores [R, ...]."""
        return ConditionedTower(num_features, num_conditions, self.tower, self.num_scores, generator)

    def outputs(self, scores: Tensor, statistics: Normalization) -> dict[str, Tensor]:
        """Scores [B, ...] in natural units, by name of the output."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class LengthHead(Head):
    """Parameters of the log-t distribution of the length; a tower each for mu, sigma (nu, sigma_within). Source: TIE.

    sigma is the scale of the length given all that is known before decoding, the predictor's own error in mu included;
    sigma_within that of samples of one prompt. For a predictor without error in mu they would be equal.

    Attributes:
        nu: Degrees of freedom; with `learn_nu` the output of an untrained head, inside (1, 100).
        learn_nu: Predict nu, between 1 and 100, instead of keeping it fixed.
        within: Also predict sigma_within.
        quantiles: Predict mu, which is the median, and the gaps between the quantiles at `LEVELS`; sigma is then that of the
            log-t closest to these. Untrained, they are those of a log-t.
    """

    nu: float = 3.5
    learn_nu: bool = False
    within: bool = False
    quantiles: bool = False

    def __post_init__(self) -> None:
        low, high = NU_RANGE
        if self.learn_nu and not low < self.nu < high:
            raise InputError("nu", self.nu, f"numbers between {low:g} and {high:g} where nu is learned")
        if not 0 < self.nu < math.inf:
            raise InputError("nu", self.nu, "finite numbers > 0")
        if self.learn_nu and self.quantiles:
            raise InputError("learn_nu", True, "false, with quantiles")

    def build(self, num_features: int, num_conditions: int, generator: torch.Generator | None) -> nn.Module:
        """z-scores of mu and log(1 + sigma)(, raw nu)(, z-score of log(1 + sigma_within)) [B, 2 to 4]; with quantiles raw gaps
        in place of sigma."""
        return LengthTowers(num_features, num_conditions, self, generator)

    def parameters(
        self, scores: Tensor, statistics: Normalization, *, differentiable_floor: bool = False
    ) -> dict[str, Tensor]:
        """Uncalibrated mu and sigma in log tokens [B]; nu [B] where it is learned, sigma_within [B] and quantiles [B, K] where
        they are predicted.

        The scores are those of `build`; through a `differentiable_floor` of sigma the gradient passes, so that training can
        leave it again.
        """
        scores = scores.float()  # expm1 of a half-precision number has no digits to spare
        parameters = {"mu": scores[:, 0] * statistics.mu_std + statistics.mu_mean}
        if self.quantiles:
            parameters |= self._quantiles(parameters["mu"], scores[:, 1 : len(LEVELS)], statistics)
        else:
            sigma = torch.expm1(scores[:, 1] * statistics.sigma_log_std + statistics.sigma_log_mean)
            floored = sigma.clamp_min(SIGMA_FLOOR)
            if differentiable_floor:
                floored = sigma + (floored - sigma).detach()
            parameters["sigma"] = floored
        if self.learn_nu:
            parameters["nu"] = self._nu(scores[:, 2])
        if self.within:
            within = torch.expm1(scores[:, -1] * statistics.within_log_std + statistics.within_log_mean)
            parameters["sigma_within"] = within.clamp_min(SIGMA_FLOOR)
        return parameters

    def outputs(self, scores: Tensor, statistics: Normalization) -> dict[str, Tensor]:
        return self.parameters(scores, statistics)

    def _quantiles(self, mu: Tensor, raw: Tensor, statistics: Normalization) -> dict[str, Tensor]:
        """sigma and quantiles, ascending in any precision: a sum of positive gaps, moved so that mu is the median.

        sigma: least squares over the quantiles of Student's t, each weighted by the precision of a sample quantile.
        """
        levels = torch.tensor(LEVELS, dtype=torch.float64)
        t = torch.tensor([student_t_quantile(level, self.nu) for level in LEVELS], dtype=torch.float64)
        initial = torch.log(torch.expm1(t.diff() * math.expm1(statistics.sigma_log_mean)))
        gaps = nn.functional.softplus(raw + initial.to(raw)) + MIN_GAP
        sums = nn.functional.pad(torch.cumsum(gaps, dim=-1), (1, 0))
        distances = sums - sums[:, MEDIAN : MEDIAN + 1]
        weighted = t * (1 + t**2 / self.nu) ** -(self.nu + 1) / (levels * (1 - levels))
        sigma = (distances * (weighted / (weighted * t).sum()).to(raw)).sum(dim=-1)
        return {"sigma": sigma, "quantiles": mu.unsqueeze(-1) + distances}

    def _nu(self, raw: Tensor) -> Tensor:
        """ln nu = ln 100 * sigmoid(raw + offset): smooth, so that training can come back from either end."""
        low, high = (math.log(bound) for bound in NU_RANGE)
        initial = (math.log(self.nu) - low) / (high - low)
        offset = math.log(initial / (1 - initial))
        return torch.exp(low + (high - low) * torch.sigmoid(raw + offset))


class LengthTowers(nn.Module):
    """Separate towers for mu, sigma (or the gaps between quantiles) and optionally nu and sigma_within."""

    def __init__(
        self, num_features: int, num_conditions: int, head: LengthHead, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        options = (num_features, num_conditions, head.tower, 1, generator)
        self.mu = ConditionedTower(*options)
        num_gaps = len(LEVELS) - 1
        gaps = (num_features, num_conditions, head.tower, num_gaps, generator)
        self.sigma = ConditionedTower(*(gaps if head.quantiles else options))
        self.nu = ConditionedTower(*options) if head.learn_nu else None
        self.within = ConditionedTower(*options) if head.within else None

    def forward(
        self, features: Tensor, conditions: Tensor | None, row_prompt: Tensor | None = None
    ) -> Tensor:
        """As `ConditionedTower.forward`; scores as of `LengthHead.build`."""
        towers = [tower for tower in (self.mu, self.sigma, self.nu, self.within) if tower is not None]
        return torch.cat([tower(features, conditions, row_prompt) for tower in towers], dim=-1)


@dataclass(frozen=True, slots=True)
class UrgencyHead(Head):
    """Probabilities of ordered urgency levels, level 0 the most urgent; sees the prompt alone.

    Odds "proportional" (McCullagh 1980): logit P(level > k) = f(prompt) - theta_k with ascending thresholds theta. Odds
    "free": a score for each level, P(level) their softmax; levels that are different kinds of text do not lie on a line.

    `levels` are their names, the most urgent first.
    """

    is_conditioned: ClassVar[bool] = False
    levels: tuple[str, ...] = URGENCY_LEVELS
    odds: str = "proportional"

    def __post_init__(self) -> None:
        check_choice("urgency.odds", self.odds, ("proportional", "free"))
        if len(self.levels) < 2 or len(set(self.levels)) < len(self.levels) or not all(self.levels):
            raise InputError("levels", self.levels, "two or more different names, the most urgent first")

    def build(self, num_features: int, num_conditions: int, generator: torch.Generator | None) -> nn.Module:
        """Logits of P(level > k) [B, K-1], descending in k."""
        module = ProportionalOdds if self.odds == "proportional" else FreeOdds
        return module(num_features, self, generator)

    def outputs(self, scores: Tensor, statistics: Normalization) -> dict[str, Tensor]:
        return {"urgency": level_probabilities(scores.float())}


class ProportionalOdds(nn.Module):
    """One number per prompt against K - 1 ascending thresholds, at first with all levels equally likely at f = 0."""

    def __init__(self, num_features: int, head: UrgencyHead, generator: torch.Generator | None) -> None:
        super().__init__()
        self.tower = build_tower(num_features, head.tower, 1, generator)
        cumulative = torch.arange(1, len(head.levels)) / len(head.levels)
        thresholds = torch.logit(cumulative)
        self.first = nn.Parameter(thresholds[:1].clone())
        # softplus of these are the gaps: ascending whatever training does.
        self.gaps = nn.Parameter(torch.log(torch.expm1(thresholds.diff())))

    def set_thresholds(self, thresholds: Tensor) -> None:
        """Sets the thresholds: K - 1 finite ascending numbers, such as the logits of the levels' cumulative frequencies."""
        gaps = thresholds.diff()
        count = len(self.gaps) + 1
        if len(thresholds) != count or not (torch.isfinite(thresholds).all() and (gaps > 0).all()):
            raise InputError("thresholds", thresholds.tolist(), f"{count} finite ascending numbers")
        with torch.no_grad():
            self.first.copy_(thresholds[:1])
            self.gaps.copy_(gaps + torch.log(-torch.expm1(-gaps)))

    def thresholds(self) -> Tensor:
        """theta [K-1], ascending."""
        gaps = nn.functional.softplus(self.gaps)
        return torch.cat([self.first, self.first + torch.cumsum(gaps, dim=0)])

    def forward(self, features: Tensor) -> Tensor:
        """Features [B, F] -> logits of P(level > k) [B, K-1], descending in k."""
        scores: Tensor = self.tower(features)
        return scores - self.thresholds().to(scores.dtype)


class FreeOdds(nn.Module):
    """A score for each of K levels; P(level) is their softmax, as the cumulative logits of `ProportionalOdds`."""

    def __init__(self, num_features: int, head: UrgencyHead, generator: torch.Generator | None) -> None:
        super().__init__()
        self.num_levels = len(head.levels)
        self.tower = build_tower(num_features, head.tower, self.num_levels, generator)
        self.bias = nn.Parameter(torch.zeros(self.num_levels))

    def set_thresholds(self, thresholds: Tensor) -> None:
        """Sets the levels' frequencies by the logits of their cumulative sums [K-1], ascending."""
        cumulative = torch.sigmoid(thresholds.double())
        frequencies = torch.cat([cumulative, cumulative.new_ones(1)]).diff(prepend=cumulative.new_zeros(1))
        with torch.no_grad():
            self.bias.copy_(torch.log(frequencies))

    def forward(self, features: Tensor) -> Tensor:
        """Features [B, F] -> logits of P(level > k) [B, K-1], descending in k."""
        scores = self.tower(features) + self.bias.to(features.dtype)
        above = [torch.logsumexp(scores[:, level:], dim=-1) for level in range(1, self.num_levels)]
        below = [torch.logsumexp(scores[:, :level], dim=-1) for level in range(1, self.num_levels)]
        return torch.stack(above, dim=-1) - torch.stack(below, dim=-1)


def level_probabilities(logits: Tensor) -> Tensor:
    """Logits of P(level > k) [B, K-1], descending in k -> probabilities of the levels [B, K]."""
    above = torch.sigmoid(logits)
    first, last = 1 - above[:, :1], above[:, -1:]
    # Differences of a descending sequence; a rounding error must not make one negative.
    between = (above[:, :-1] - above[:, 1:]).clamp_min(0.0)
    return torch.cat([first, between, last], dim=-1)


@dataclass(frozen=True, slots=True)
class BucketHead(Head):
    """Probabilities of length buckets. Source: S3 (equal buckets over the maximum length).

    `edges` are bounds in tokens, ascending; bucket k holds edges[k-1] <= tokens < edges[k], so K = len(edges) + 1.
    """

    edges: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        is_ascending = sorted(set(self.edges)) == list(self.edges)
        if not self.edges or not is_ascending or not all(0 < edge < math.inf for edge in self.edges):
            raise InputError("edges", self.edges, "one or more finite ascending numbers of tokens > 0")

    @property
    def num_scores(self) -> int:
        """K."""
        return len(self.edges) + 1

    def outputs(self, scores: Tensor, statistics: Normalization) -> dict[str, Tensor]:
        return {"bucket": torch.softmax(scores.float(), dim=-1)}


@dataclass(frozen=True, slots=True)
class RegressionHead(Head):
    """One number of tokens: z-score of ln(1 + tokens). Source: SSJF."""

    def outputs(self, scores: Tensor, statistics: Normalization) -> dict[str, Tensor]:
        logs = scores.float() * statistics.regression_std + statistics.regression_mean
        return {"regression_tokens": torch.expm1(logs).clamp_min(0.0)}


@dataclass(frozen=True, slots=True)
class RankHead(Head):
    """A score that orders requests, larger = longer; its scale has no meaning. Source: LTR (learning to rank)."""

    def outputs(self, scores: Tensor, statistics: Normalization) -> dict[str, Tensor]:
        return {"rank": scores.float()}


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads on one encoder; at least one. The fields are the registry of heads; how each is trained:
    `training.losses.head_loss`."""

    length: LengthHead | None = None
    urgency: UrgencyHead | None = None
    bucket: BucketHead | None = None
    regression: RegressionHead | None = None
    rank: RankHead | None = None

    def __post_init__(self) -> None:
        if not self.names:
            raise InputError("heads", None, f"one or more of {', '.join(HEADS)}")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the heads that are set, in the order of `HEADS`."""
        return tuple(name for name in HEADS if getattr(self, name) is not None)

    def items(self) -> list[tuple[str, Head]]:
        """Name and options of the heads that are set."""
        return [(name, getattr(self, name)) for name in self.names]


#: Name of each head -> its class.
HEADS: dict[str, type[Head]] = {name: get_args(kind)[0] for name, kind in get_type_hints(Heads).items()}
