"""The predictor: one encoder, its pooled features, and any set of heads.

Source: TIE, section on the predictor (DeBERTa-v3-base, [CLS; mean; max] features, separate towers).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from predictors.modules.calibration import Calibration, CalibrationTable
from predictors.modules.conditioning import ConditionFeatures
from predictors.modules.config import PredictorConfig
from predictors.modules.encoder import num_positions, state_width
from predictors.modules.heads import HeadModules, level_probabilities, nu_of
from predictors.modules.lexical_columns import LexicalColumns
from predictors.modules.normalization import Normalization
from predictors.modules.pooling import pool
from scheduler_core.errors import InputError

# Smallest sigma a predictor gives, log tokens: the inverse of log(1 + sigma) may be negative.
SIGMA_FLOOR = 1e-6
# ln(512) / 5 is about 1, the size of the other features.
PROMPT_LENGTH_SCALE = 5.0


class PromptPredictor(nn.Module):
    """Prompt tokens in; length distribution, urgency, bucket, length and rank out.

    Args:
        config: Poolings, heads and conditioning.
        encoder: A transformers encoder: called with input_ids and attention_mask, gives last_hidden_state.
        normalization: Statistics of the targets.
        calibration: What `outputs` does to mu and sigma; None: nothing.
        generator: Draws the heads' initial weights; unset, torch's global generator does.

    Raises:
        InputError: `max_length` is beyond the encoder's positions, or the calibration is for other served models.
    """

    mu_mean: Tensor
    mu_std: Tensor
    sigma_log_mean: Tensor
    sigma_log_std: Tensor
    within_log_mean: Tensor
    within_log_std: Tensor
    regression_mean: Tensor
    regression_std: Tensor

    def __init__(
        self,
        config: PredictorConfig,
        encoder: nn.Module,
        normalization: Normalization,
        *,
        calibration: Calibration | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        positions = num_positions(encoder)
        if positions is not None and config.max_length > positions:
            raise InputError("max_length", config.max_length, f"at most the encoder's {positions} positions")
        self.config = config
        self.normalization = normalization
        self.encoder = encoder
        self.num_text_features = state_width(encoder) * len(config.pooling) + config.prompt_length
        self.lexical = None if config.lexical is None else LexicalColumns(config.lexical)
        self.num_features = self.num_text_features + (0 if self.lexical is None else self.lexical.width)
        self.conditions: ConditionFeatures | None = None
        num_conditions = 0
        if config.conditioning is not None:
            self.conditions = ConditionFeatures(config.conditioning, generator)
            num_conditions = self.conditions.num_features
        self.heads = HeadModules(
            config.heads, self.num_text_features, self.num_features, num_conditions, generator
        )
        for name, value in normalization.to_json().items():
            # Not in the weights file: normalization.json is the one place that holds them.
            self.register_buffer(name, torch.tensor(value, dtype=torch.float32), persistent=False)
        self.set_calibration(calibration)

    @property
    def num_models(self) -> int:
        """Served models the heads can tell apart, the unknown one not counted."""
        return 0 if self.config.conditioning is None else len(self.config.conditioning.served_models)

    def set_calibration(self, calibration: Calibration | None) -> None:
        """Replaces the calibration that `outputs` applies; None: identity.

        Raises:
            InputError: It has another number of served models than the predictor.
        """
        calibration = calibration or Calibration.identity(self.num_models)
        if calibration.num_models != self.num_models:
            raise InputError(
                "calibration", f"{calibration.num_models} served models", f"{self.num_models} of them"
            )
        self.calibration = calibration
        self.calibration_table = CalibrationTable(calibration).to(self.mu_mean.device)

    def features(self, input_ids: Tensor, attention_mask: Tensor, lexical: Tensor | None = None) -> Tensor:
        """Features of prompts; they do not depend on the other rows of the batch, nor on how far a row is padded.

        Args:
            input_ids: Token ids [B, S].
            attention_mask: 1 at tokens, 0 at padding on the right [B, S].
            lexical: Lexical features [B, L], NaN where they are unknown; None: all unknown. A predictor without a
                lexical input does not look at them.

        Returns:
            [B, F]: what the encoder's states are pooled to, then what depends on `lexical`.
        """
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        features = pool(states, attention_mask, self.config.pooling)
        if self.config.prompt_length:
            num_tokens = attention_mask.sum(dim=1, keepdim=True).to(torch.float32)
            scaled = torch.log(num_tokens) / PROMPT_LENGTH_SCALE
            features = torch.cat([features, scaled.to(features.dtype)], dim=-1)
        if self.lexical is not None:
            if lexical is None:
                lexical = self.lexical.mean.new_full((len(input_ids), self.lexical.width - 1), math.nan)
            features = torch.cat([features, self.lexical(lexical).to(features.dtype)], dim=-1)
        return features

    def text_features(self, features: Tensor) -> Tensor:
        """Features [B, F] without what depends on lexical features: what the urgency head sees."""
        return features[:, : self.num_text_features]

    def without_lexical(self, features: Tensor, hidden: Tensor) -> Tensor:
        """Features [B, F] as if lexical features were unknown in the rows `hidden`, bool [B]."""
        is_lexical = torch.arange(features.shape[1], device=features.device) >= self.num_text_features
        return features.masked_fill(hidden[:, None] & is_lexical, 0.0)

    def scores(
        self, features: Tensor, served_model: Tensor | None = None, temperature: Tensor | None = None
    ) -> dict[str, Tensor]:
        """What training compares with its targets.

        Args:
            features: Features [B, F], one row per (prompt, served model, temperature): with several rows of a prompt,
                the caller repeats the prompt's features.
            served_model: Numbers of served models, int64 [B], 0 = unknown; None: all unknown.
            temperature: Sampling temperatures [B], at least 0, NaN = unknown; None: all unknown.
                A predictor without conditioning looks at neither.

        Returns:
            By head, of those that are there:
            length [B, 2]: z-scores of mu and of log(1 + sigma); then the raw score of nu where it is learnt; last the
            z-score of log(1 + sigma_within) where it is predicted.
            urgency [B, K-1]: logits of P(level > k).
            bucket [B, K]: logits.
            regression [B]: z-score of ln(1 + tokens).
            rank [B]: score, larger = longer.
        """
        conditions = None
        if self.conditions is not None:
            conditions = self.conditions(features, served_model, temperature)
        found: dict[str, Tensor] = self.heads(self.text_features(features), features, conditions)
        return found

    def length_parameters(self, scores: Tensor) -> dict[str, Tensor]:
        """Uncalibrated parameters of the log-t distribution, for objectives on raw answers.

        In training mode the gradient of sigma goes on where the floor holds, so that it can come back.

        Args:
            scores: Scores of the length head [B, 2 to 4].

        Returns:
            mu [B] and sigma [B] in log tokens, sigma at least 1e-6; nu [B] where it is learnt; sigma_within [B] in log
            tokens, at least 1e-6, where it is predicted.
        """
        head = self.config.heads.length
        assert head is not None
        scores = scores.float()  # expm1 of a half-precision number has no digits to spare
        sigma = torch.expm1(scores[:, 1] * self.sigma_log_std + self.sigma_log_mean)
        floored = sigma.clamp_min(SIGMA_FLOOR)
        if self.training:
            floored = sigma + (floored - sigma).detach()
        parameters = {"mu": scores[:, 0] * self.mu_std + self.mu_mean, "sigma": floored}
        if head.learn_nu:
            parameters["nu"] = nu_of(scores[:, 2], head.nu)
        if head.within:
            within = torch.expm1(scores[:, -1] * self.within_log_std + self.within_log_mean)
            parameters["sigma_within"] = within.clamp_min(SIGMA_FLOOR)
        return parameters

    def outputs(self, scores: Mapping[str, Tensor], served_model: Tensor | None = None) -> dict[str, Tensor]:
        """Scores in natural units, calibration included.

        Args:
            scores: As `scores` gives them.
            served_model: Numbers of served models, int64 [B], for the calibration; None: all unknown.

        Returns:
            Of the heads that are there: mu [B], sigma [B] (log tokens), nu [B] where it is learnt, sigma_within [B] (log
            tokens, not calibrated) where it is predicted, urgency [B, K] and
            bucket [B, K] (probabilities), regression_tokens [B] (tokens, at least 0), rank [B].
        """
        found: dict[str, Tensor] = {}
        if "length" in scores:
            parameters = self.length_parameters(scores["length"])
            row = None if self.conditions is None else served_model
            mu, sigma = self.calibration_table(parameters["mu"], parameters["sigma"], row)
            found |= parameters | {"mu": mu, "sigma": sigma.clamp_min(SIGMA_FLOOR)}
        if "urgency" in scores:
            found["urgency"] = level_probabilities(scores["urgency"].float())
        if "bucket" in scores:
            found["bucket"] = torch.softmax(scores["bucket"].float(), dim=-1)
        if "regression" in scores:
            logs = scores["regression"].float() * self.regression_std + self.regression_mean
            found["regression_tokens"] = torch.expm1(logs).clamp_min(0.0)
        if "rank" in scores:
            found["rank"] = scores["rank"].float()
        return found

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        served_model: Tensor | None = None,
        temperature: Tensor | None = None,
        lexical: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Predicts.

        Args:
            input_ids: Token ids, int64 [B, S].
            attention_mask: 1 at tokens, 0 at padding, int64 [B, S]; at least one token in each row.
            served_model, temperature: As in `scores`.
            lexical: As in `features`.

        Returns:
            As `outputs`, float32.
        """
        scores = self.scores(self.features(input_ids, attention_mask, lexical), served_model, temperature)
        return self.outputs(scores, served_model)
