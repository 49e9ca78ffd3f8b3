"""Heads: features in, scores out; and scores in the natural units that a scheduler uses.

Scores are what training compares with its targets; `PromptPredictor.outputs` turns them into outputs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from predictors.modules.config import NU_RANGE, Heads, LengthHead, Tower, UrgencyHead
from scheduler_core.errors import InputError

XAVIER_GAIN = 0.5


def build_tower(
    num_features: int, tower: Tower, num_outputs: int = 1, generator: torch.Generator | None = None
) -> nn.Sequential:
    """Features [B, num_features] -> [B, num_outputs], Xavier-uniform with gain 0.5, bias 0.

    Each hidden layer is Linear, LayerNorm (not in the last, and only if wanted), activation, dropout; then Linear.
    """
    layers: list[nn.Module] = []
    width = num_features
    for index, (size, rate) in enumerate(zip(tower.hidden_sizes, tower.dropouts, strict=True)):
        layers.append(nn.Linear(width, size))
        if tower.layer_norm and index < len(tower.hidden_sizes) - 1:
            layers.append(nn.LayerNorm(size))
        layers += [nn.GELU() if tower.activation == "gelu" else nn.ReLU(), nn.Dropout(rate)]
        width = size
    layers.append(nn.Linear(width, num_outputs))
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight, gain=XAVIER_GAIN, generator=generator)
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class ConditionedTower(nn.Module):
    """A tower whose first hidden layer is scaled, and whose outputs are shifted, by linear functions of the conditions.

    What a served model makes of a prompt differs by kind of prompt: a product says that with fewer examples than layers
    that see features and conditions side by side (FiLM: Perez et al. 2018). Both functions start at 0. Without conditions
    it is a plain tower.

    Args:
        num_features: Width F of the prompt's features.
        num_conditions: Width C of the conditions; 0: none.
        tower: Layers.
        num_outputs: Width of the result.
        generator: Draws the initial weights; unset, torch's global generator does.
    """

    def __init__(
        self,
        num_features: int,
        num_conditions: int,
        tower: Tower,
        num_outputs: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        layers = build_tower(num_features + num_conditions, tower, num_outputs, generator)
        num_first = 0
        if num_conditions and tower.hidden_sizes:
            num_first = [isinstance(layer, nn.Dropout) for layer in layers].index(True) + 1
        self.first, self.rest = layers[:num_first], layers[num_first:]
        self.scale = _zero_linear(num_conditions, tower.hidden_sizes[0]) if num_first else None
        self.shift = _zero_linear(num_conditions, num_outputs) if num_conditions else None

    def forward(self, features: Tensor, conditions: Tensor | None) -> Tensor:
        """Features [B, F] and conditions [B, C], None where there are none -> [B, num_outputs]."""
        if conditions is None or self.shift is None:
            plain: Tensor = self.rest(features)
            return plain
        hidden = self.first(torch.cat([features, conditions], dim=-1))
        if self.scale is not None:
            hidden = hidden * (1 + self.scale(conditions))
        scores: Tensor = self.rest(hidden) + self.shift(conditions)
        return scores


def _zero_linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    linear = nn.Linear(num_inputs, num_outputs)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


class LengthTowers(nn.Module):
    """Separate towers for mu, sigma and, where they are wanted, nu and sigma_within."""

    def __init__(
        self, num_features: int, num_conditions: int, head: LengthHead, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        widths = (num_features, num_conditions, head.tower, 1, generator)
        self.mu = ConditionedTower(*widths)
        self.sigma = ConditionedTower(*widths)
        self.nu = ConditionedTower(*widths) if head.learn_nu else None
        self.within = ConditionedTower(*widths) if head.within else None

    def forward(self, features: Tensor, conditions: Tensor | None) -> Tensor:
        """z-scores of mu and log(1 + sigma)(, raw nu)(, z-score of log(1 + sigma_within)) [B, 2 to 4].

        Args:
            features: [B, F].
            conditions: [B, C]; None where there are none.
        """
        towers = [self.mu, self.sigma, *(tower for tower in (self.nu, self.within) if tower is not None)]
        return torch.cat([tower(features, conditions) for tower in towers], dim=-1)


def nu_of(raw: Tensor, initial: float) -> Tensor:
    """Degrees of freedom between 1 and 100 from raw scores [B]; a raw score of 0 gives `initial`.

    ln nu = ln 100 * sigmoid(raw + offset): smooth, so that training can come back from either end.
    """
    low, high = (math.log(bound) for bound in NU_RANGE)
    share = (math.log(initial) - low) / (high - low)
    offset = math.log(share / (1 - share))
    return torch.exp(low + (high - low) * torch.sigmoid(raw + offset))


class OrdinalTower(nn.Module):
    """Proportional odds: one number per prompt against K - 1 ascending thresholds. Source: McCullagh 1980.

    The thresholds start where all levels are equally likely at f = 0.
    """

    def __init__(self, num_features: int, head: UrgencyHead, generator: torch.Generator | None) -> None:
        super().__init__()
        self.tower = build_tower(num_features, head.tower, 1, generator)
        num_levels = len(head.levels)
        shares = [(level + 1) / num_levels for level in range(num_levels - 1)]
        start = torch.tensor([math.log(share / (1 - share)) for share in shares])
        self.first = nn.Parameter(start[:1].clone())
        # softplus of these are the gaps: ascending whatever training does.
        self.gaps = nn.Parameter(torch.log(torch.expm1(start.diff())))

    def set_thresholds(self, thresholds: Tensor) -> None:
        """Puts the thresholds [K-1] in place, such as the logits of the levels' cumulative shares.

        Raises:
            InputError: They are not finite and ascending, or not K - 1.
        """
        gaps = thresholds.diff()
        if thresholds.shape != (len(self.gaps) + 1,) or not (
            torch.isfinite(thresholds).all() and (gaps > 0).all()
        ):
            raise InputError(
                "thresholds", thresholds.tolist(), f"{len(self.gaps) + 1} finite ascending numbers"
            )
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
    """A score for each of K levels; P(level) is their softmax, given as cumulative logits as `OrdinalTower` gives them."""

    def __init__(self, num_features: int, head: UrgencyHead, generator: torch.Generator | None) -> None:
        super().__init__()
        self.num_levels = len(head.levels)
        self.tower = build_tower(num_features, head.tower, self.num_levels, generator)
        self.bias = nn.Parameter(torch.zeros(self.num_levels))

    def set_thresholds(self, thresholds: Tensor) -> None:
        """Lets the levels start with the cumulative shares whose logits these are [K-1], ascending."""
        below = torch.sigmoid(thresholds.double())
        shares = torch.cat([below, below.new_ones(1)]) - torch.cat([below.new_zeros(1), below])
        with torch.no_grad():
            self.bias.copy_(torch.log(shares))

    def forward(self, features: Tensor) -> Tensor:
        """Features [B, F] -> logits of P(level > k) [B, K-1], descending in k."""
        scores = self.tower(features) + self.bias.to(features.dtype)
        return torch.stack(
            [
                torch.logsumexp(scores[:, level + 1 :], dim=-1)
                - torch.logsumexp(scores[:, : level + 1], dim=-1)
                for level in range(self.num_levels - 1)
            ],
            dim=-1,
        )


def urgency_tower(
    num_features: int, head: UrgencyHead, generator: torch.Generator | None
) -> OrdinalTower | FreeOdds:
    """The module of an urgency head."""
    kind = OrdinalTower if head.odds == "proportional" else FreeOdds
    return kind(num_features, head, generator)


def level_probabilities(logits: Tensor) -> Tensor:
    """Logits of P(level > k) [B, K-1], descending in k -> probabilities of the levels [B, K]."""
    above = torch.sigmoid(logits)
    first, last = 1 - above[:, :1], above[:, -1:]
    # Differences of what descends; a rounding error must not make one negative.
    between = (above[:, :-1] - above[:, 1:]).clamp_min(0.0)
    return torch.cat([first, between, last], dim=-1)


class HeadModules(nn.ModuleDict):
    """The modules of `heads`, by name.

    Args:
        heads: Which ones, and their layers.
        num_text_features: Width of the features that the urgency head sees.
        num_features: Width F of those that the other heads see.
        num_conditions: Width C of the conditions; 0: none.
        generator: Draws the initial weights; unset, torch's global generator does.
    """

    def __init__(
        self,
        heads: Heads,
        num_text_features: int,
        num_features: int,
        num_conditions: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        widths = (num_features, num_conditions)
        if heads.length is not None:
            self["length"] = LengthTowers(*widths, heads.length, generator)
        if heads.urgency is not None:
            self["urgency"] = urgency_tower(num_text_features, heads.urgency, generator)
        if heads.bucket is not None:
            self["bucket"] = ConditionedTower(
                *widths, heads.bucket.tower, heads.bucket.num_buckets, generator
            )
        if heads.regression is not None:
            self["regression"] = ConditionedTower(*widths, heads.regression.tower, 1, generator)
        if heads.rank is not None:
            self["rank"] = ConditionedTower(*widths, heads.rank.tower, 1, generator)

    def forward(self, prompts: Tensor, rows: Tensor, conditions: Tensor | None) -> dict[str, Tensor]:
        """Scores by head; see `PromptPredictor.scores`.

        Args:
            prompts: Features of prompts [P, num_text_features], which urgency sees.
            rows: Features of the rows that the other heads see [B, F].
            conditions: Those rows' conditions [B, C]; None where there are none.
        """
        scores: dict[str, Tensor] = {}
        for name, module in self.items():
            score = module(prompts) if name == "urgency" else module(rows, conditions)
            scores[name] = score.squeeze(-1) if name in ("regression", "rank") else score
        return scores
