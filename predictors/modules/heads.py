"""Prediction heads: the options, network and outputs of each, and their registry `Heads`.

A head maps the features of a prompt to scores (for losses), and scores to outputs in natural units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, get_args, get_type_hints

import torch
from torch import Tensor, nn

from predictors.heads import Tower
from predictors.modules.normalization import Normalization
from predictors.modules.towers import ConditionedTower, build_tower
from scheduler_core.errors import InputError
from scheduler_core.lengths.quantiles import LEVELS
from scheduler_core.lengths.student_t import student_t_quantile
from scheduler_core.prediction.urgency import LEVELS as URGENCY_LEVELS
from scheduler_core.ranges import check_choice

# Range of learned degrees of freedom: below 1 the median is poorly determined, above 100 the distribution is
# nearly log-normal.
NU_RANGE = (1.0, 100.0)
# Minimum sigma in log tokens, because expm1 of a predicted log(1 + sigma) can be negative.
SIGMA_FLOOR = 1e-6
# Minimum gap between quantiles in log tokens.
MIN_GAP = 1e-4
MEDIAN = LEVELS.index(0.5)


@dataclass(frozen=True, slots=True)
class Head:
    """Options of a head, its network and its outputs.

    If `is_conditioned`, rows are (prompt, served model, temperature); otherwise they are prompts.
    """

    is_conditioned: ClassVar[bool] = True
    tower: Tower = field(default_factory=Tower)

    @property
    def num_scores(self) -> int | None:
        """Number of scores of each row; None: one, without a score axis."""
        return None

    def build(self, num_features: int, num_conditions: int, generator: torch.Generator | None) -> nn.Module:
        """The network: features [P, F] (and conditions [R, C], row_prompt) -> scores [R, ...]."""
        return ConditionedTower(num_features, num_conditions, self.tower, self.num_scores, generator)

    def outputs(self, scores: Tensor, statistics: Normalization) -> dict[str, Tensor]:
        """Outputs in natural units by name, from scores [B, ...]."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class LengthHead(Head):
    """Parameters of the log-t distribution of the length, with one tower per parameter. Source: TIE.

    sigma is the scale of the length given the inputs, so it includes the error of the predictor in mu.
    sigma_within is the scale of samples of one prompt. They are equal if mu has no error.

    Attributes:
        nu: Degrees of freedom; with `learn_nu` the initial value, between 1 and 100.
        learn_nu: Whether to predict nu, between 1 and 100, instead of using a fixed value.
        within: Whether to predict sigma_within.
        quantiles: Whether to predict the median mu and the gaps between the quantiles at `LEVELS`, initially
            those of a log-t; sigma is then that of the closest log-t.
    """

    nu: float = 3.5
    learn_nu: bool = False
    within: bool = False
    quantiles: bool = False

    def __post_init__(self) -> None:
        low, high = NU_RANGE
        if self.learn_nu and not low < self.nu < high:
            raise InputError("nu", self.nu, f"numbers between {low:g} and {high:g} if learn_nu is true")
        if not 0 < self.nu < math.inf:
            raise InputError("nu", self.nu, "finite numbers > 0")
        if self.learn_nu and self.quantiles:
            raise InputError("learn_nu", True, "false if quantiles is true")

    def build(self, num_features: int, num_conditions: int, generator: torch.Generator | None) -> nn.Module:
        """Network with the scores [B, 2 to 4]: z-scores of mu and log(1 + sigma), optionally raw nu and the
        z-score of log(1 + sigma_within). With quantiles, raw gaps replace the score of sigma."""
        return LengthTowers(num_features, num_conditions, self, generator)

    def parameters(
        self, scores: Tensor, statistics: Normalization, *, differentiable_floor: bool = False
    ) -> dict[str, Tensor]:
        """Uncalibrated mu, sigma [B] (log tokens); if predicted, nu, sigma_within [B] and quantiles [B, K].

        The scores are those of `build`. With `differentiable_floor` the floor of sigma passes gradients, so
        that training does not get stuck at the floor.
        """
        scores = scores.float()  # half precision is too low for expm1
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
        """sigma [B] and quantiles [B, K]. Quantiles ascend as sums of positive gaps; mu is the median.

        sigma is a least-squares fit to Student's t, weighted by the precision of sample quantiles.
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
        """ln nu = ln 100 * sigmoid(raw + offset), which has a gradient at both ends of the range."""
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
        """Arguments as in `ConditionedTower.forward`; scores as in `LengthHead.build`."""
        towers = [tower for tower in (self.mu, self.sigma, self.nu, self.within) if tower is not None]
        return torch.cat([tower(features, conditions, row_prompt) for tower in towers], dim=-1)


@dataclass(frozen=True, slots=True)
class UrgencyHead(Head):
    """Probabilities of ordered urgency levels, level 0 the most urgent. The prompt is the only input.

    Attributes:
        levels: Names of the levels, most urgent first.
        odds: "proportional" (McCullagh 1980): logit P(level > k) = f(prompt) - theta_k with ascending
            thresholds theta. "free": P(level) is the softmax of one score per level.
    """

    is_conditioned: ClassVar[bool] = False
    levels: tuple[str, ...] = URGENCY_LEVELS
    odds: str = "proportional"

    def __post_init__(self) -> None:
        check_choice("urgency.odds", self.odds, ("proportional", "free"))
        if len(self.levels) < 2 or len(set(self.levels)) < len(self.levels) or not all(self.levels):
            raise InputError("levels", self.levels, "two or more distinct names, most urgent first")

    def build(self, num_features: int, num_conditions: int, generator: torch.Generator | None) -> nn.Module:
        """Network with the logits of P(level > k) [B, K-1], descending in k, as scores."""
        module = ProportionalOdds if self.odds == "proportional" else FreeOdds
        return module(num_features, self, generator)

    def outputs(self, scores: Tensor, statistics: Normalization) -> dict[str, Tensor]:
        return {"urgency": level_probabilities(scores.float())}


class ProportionalOdds(nn.Module):
    """One score f per prompt and K - 1 ascending thresholds; initially f = 0 has equally likely levels."""

    def __init__(self, num_features: int, head: UrgencyHead, generator: torch.Generator | None) -> None:
        super().__init__()
        self.tower = build_tower(num_features, head.tower, 1, generator)
        cumulative = torch.arange(1, len(head.levels)) / len(head.levels)
        thresholds = torch.logit(cumulative)
        self.first = nn.Parameter(thresholds[:1].clone())
        # The gaps are softplus of these parameters, so the thresholds always ascend.
        self.gaps = nn.Parameter(torch.log(torch.expm1(thresholds.diff())))

    def set_thresholds(self, thresholds: Tensor) -> None:
        """Sets the K - 1 thresholds, for example logits of the cumulative frequencies of the levels."""
        gaps = thresholds.diff()
        count = len(self.gaps) + 1
        if len(thresholds) != count or not (torch.isfinite(thresholds).all() and (gaps > 0).all()):
            raise InputError("thresholds", thresholds.tolist(), f"{count} finite ascending numbers")
        with torch.no_grad():
            self.first.copy_(thresholds[:1])
            self.gaps.copy_(gaps + torch.log(-torch.expm1(-gaps)))

    def thresholds(self) -> Tensor:
        """Ascending thresholds theta [K-1]."""
        gaps = nn.functional.softplus(self.gaps)
        return torch.cat([self.first, self.first + torch.cumsum(gaps, dim=0)])

    def forward(self, features: Tensor) -> Tensor:
        """Features [B, F] -> logits of P(level > k) [B, K-1], descending in k."""
        scores: Tensor = self.tower(features)
        return scores - self.thresholds().to(scores.dtype)


class FreeOdds(nn.Module):
    """One score per level, with P(level) their softmax; returns the same logits as `ProportionalOdds`."""

    def __init__(self, num_features: int, head: UrgencyHead, generator: torch.Generator | None) -> None:
        super().__init__()
        self.num_levels = len(head.levels)
        self.tower = build_tower(num_features, head.tower, self.num_levels, generator)
        self.bias = nn.Parameter(torch.zeros(self.num_levels))

    def set_thresholds(self, thresholds: Tensor) -> None:
        """Sets the bias to the frequencies of the levels, from the logits of their cumulative sums [K-1]."""
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
    # Differences of a descending sequence, clamped because rounding errors can make them negative.
    between = (above[:, :-1] - above[:, 1:]).clamp_min(0.0)
    return torch.cat([first, between, last], dim=-1)


@dataclass(frozen=True, slots=True)
class BucketHead(Head):
    """Probabilities of length buckets. Source: S3 (equal buckets over the maximum length).

    `edges` are ascending bounds; bucket k contains edges[k-1] <= tokens < edges[k], K = len(edges) + 1.
    """

    edges: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        is_ascending = sorted(set(self.edges)) == list(self.edges)
        if not self.edges or not is_ascending or not all(0 < edge < math.inf for edge in self.edges):
            raise InputError("edges", self.edges, "one or more finite ascending numbers of tokens > 0")

    @property
    def num_scores(self) -> int:
        """Number of buckets K."""
        return len(self.edges) + 1

    def outputs(self, scores: Tensor, statistics: Normalization) -> dict[str, Tensor]:
        return {"bucket": torch.softmax(scores.float(), dim=-1)}


@dataclass(frozen=True, slots=True)
class RegressionHead(Head):
    """Point prediction of the number of tokens; the score is the z-score of ln(1 + tokens). Source: SSJF."""

    def outputs(self, scores: Tensor, statistics: Normalization) -> dict[str, Tensor]:
        logs = scores.float() * statistics.regression_std + statistics.regression_mean
        return {"regression_tokens": torch.expm1(logs).clamp_min(0.0)}


@dataclass(frozen=True, slots=True)
class RankHead(Head):
    """A score for ranking, larger = longer, on an arbitrary scale. Source: LTR (learning to rank)."""

    def outputs(self, scores: Tensor, statistics: Normalization) -> dict[str, Tensor]:
        return {"rank": scores.float()}


@dataclass(frozen=True, slots=True)
class Heads:
    """Registry of heads; at least one must be set. Losses: `training.network.tasks`."""

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


#: Name of the head -> class.
HEADS: dict[str, type[Head]] = {name: get_args(kind)[0] for name, kind in get_type_hints(Heads).items()}
