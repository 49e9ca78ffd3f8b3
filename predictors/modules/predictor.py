"""The predictor: one encoder, its pooled features, and any set of heads.

Source: TIE, section on the predictor (DeBERTa-v3-base, [CLS; mean; max] features, separate towers).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from predictors.modules.config import Calibration, Conditioning, PredictorConfig
from predictors.modules.encoder import num_positions, pool, state_width
from predictors.modules.heads import SIGMA_FLOOR
from predictors.modules.normalization import Normalization
from scheduler_core.errors import InputError

# ln(512) / 5 is about 1, the size of the other features.
PROMPT_LENGTH_SCALE = 5.0
# Greedy decoding has temperature 0, which has no logarithm; below this, sampling is as good as greedy.
GREEDY_TEMPERATURE = 0.05
EMBEDDING_STD = 0.1


class ConditionFeatures(nn.Module):
    """Embedding of the served model (drawn from N(0, 0.1^2)), ln temperature, and whether the temperature is known."""

    def __init__(self, conditioning: Conditioning, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.has_temperature = conditioning.temperature
        self.num_features = conditioning.width + 2 * conditioning.temperature
        self.served_model = nn.Embedding(len(conditioning.served_models) + 1, conditioning.width)
        nn.init.normal_(self.served_model.weight, std=EMBEDDING_STD, generator=generator)

    def forward(self, features: Tensor, served_model: Tensor | None, temperature: Tensor | None) -> Tensor:
        """The conditions of each row [B, num_features], in dtype and device of the prompts' features [B, F]. Numbers of
        served models are int64 [B], 0 = unknown; temperatures at least 0 [B], NaN = unknown; None: all unknown."""
        if served_model is None:
            served_model = torch.zeros(features.shape[0], dtype=torch.int64, device=features.device)
        parts = [self.served_model(served_model).to(features.dtype)]
        if self.has_temperature:
            if temperature is None:
                temperature = torch.full((features.shape[0],), torch.nan, device=features.device)
            is_set = ~torch.isnan(temperature)
            # NaN is replaced before the logarithm, not after: its gradient would be NaN too.
            filled = torch.where(is_set, temperature, torch.ones_like(temperature))
            logs = torch.log(filled.clamp_min(GREEDY_TEMPERATURE))
            parts.append(torch.stack([logs, is_set.to(logs.dtype)], dim=-1).to(features.dtype))
        return torch.cat(parts, dim=-1)


class PromptPredictor(nn.Module):
    """Prompt tokens in; length distribution, urgency, bucket, length and rank out.

    Args:
        encoder: A transformers encoder: called with input_ids and attention_mask, gives last_hidden_state.
        calibration: Applied to mu and sigma by `outputs`; None: identity.
        generator: Draws the heads' initial weights; unset, torch's global generator does.

    Raises:
        InputError: `max_length` is beyond the encoder's positions, or the calibration is for other served models.
    """

    sigma_scale: Tensor
    mu_shift: Tensor

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
        self.num_features = state_width(encoder) * len(config.pooling) + config.prompt_length
        self.conditions: ConditionFeatures | None = None
        num_conditions = 0
        if config.conditioning is not None:
            self.conditions = ConditionFeatures(config.conditioning, generator)
            num_conditions = self.conditions.num_features
        self.heads = nn.ModuleDict()
        for name, head in config.heads.items():
            self.heads[name] = head.build(self.num_features, num_conditions, generator)
        self.set_calibration(calibration)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def num_models(self) -> int:
        """Served models the heads can tell apart, the unknown one not counted."""
        return 0 if self.config.conditioning is None else len(self.config.conditioning.served_models)

    def set_calibration(self, calibration: Calibration | None) -> None:
        """Replaces the calibration that `outputs` applies (None: identity); InputError for one of other served models."""
        calibration = calibration or Calibration.identity(self.num_models)
        if calibration.num_models != self.num_models:
            allowed = f"{self.num_models} of them"
            raise InputError("calibration", f"{calibration.num_models} served models", allowed)
        self.calibration = calibration
        # Not in the weights file: config.json is the one place that holds them.
        for name in ("sigma_scale", "mu_shift"):
            table = torch.tensor(getattr(calibration, name), dtype=torch.float32, device=self.device)
            self.register_buffer(name, table, persistent=False)

    def features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Features [B, F] of prompts' token ids [B, S], with a mask that is 1 at tokens and 0 at padding on the right [B, S].
        They depend neither on the other rows of the batch nor on how far a row is padded."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        features = pool(states, attention_mask, self.config.pooling)
        if self.config.prompt_length:
            num_tokens = attention_mask.sum(dim=1, keepdim=True).to(torch.float32)
            scaled = torch.log(num_tokens) / PROMPT_LENGTH_SCALE
            features = torch.cat([features, scaled.to(features.dtype)], dim=-1)
        return features

    def scores(
        self,
        features: Tensor,
        served_model: Tensor | None = None,
        temperature: Tensor | None = None,
        row_prompt: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Scores of each head, which training compares with its targets (see the heads' `build`): [R, ...], of heads that are
        not conditioned [P, ...]; of prompts' features [P, F].

        Served models and temperatures, [R], are as in `ConditionFeatures.forward`; a predictor without conditioning ignores both.
        `row_prompt` is the prompt of each row (prompt, served model, temperature), int64 [R]; None: one row per prompt.
        """
        conditions = None
        if self.conditions is not None:
            rows = features if row_prompt is None else features[row_prompt]
            conditions = self.conditions(rows, served_model, temperature)
        return {
            name: self.heads[name](features, conditions, row_prompt)
            if head.is_conditioned
            else self.heads[name](features)
            for name, head in self.config.heads.items()
        }

    def length_parameters(self, scores: Tensor) -> dict[str, Tensor]:
        """Uncalibrated parameters of the log-t distribution, for losses on raw samples; see `LengthHead.parameters`."""
        head = self.config.heads.length
        assert head is not None
        return head.parameters(scores, self.normalization, differentiable_floor=self.training)

    def outputs(self, scores: Mapping[str, Tensor], served_model: Tensor | None = None) -> dict[str, Tensor]:
        """Scores, as `scores` returns them, in natural units, calibrated for the served models (numbers, int64 [B]; None: unknown).

        Returns:
            Of the heads that are there: mu [B], sigma [B] (log tokens), nu [B] where it is learned, sigma_within [B] (log
            tokens, not calibrated) and quantiles [B, K] (log tokens) where they are predicted, urgency [B, K] and bucket [B,
            K] (probabilities), regression_tokens [B] (tokens, at least 0), rank [B].
        """
        outputs: dict[str, Tensor] = {}
        for name, head in self.config.heads.items():
            if name in scores:
                outputs |= head.outputs(scores[name], self.normalization)
        if "mu" in outputs:
            row = 0 if self.conditions is None or served_model is None else served_model
            mu, sigma = outputs["mu"], outputs["sigma"]
            outputs["mu"] = mu + self.mu_shift[row] * sigma
            outputs["sigma"] = (sigma * self.sigma_scale[row]).clamp_min(SIGMA_FLOOR)
            if "quantiles" in outputs:
                factor = outputs["sigma"] / sigma
                outputs["quantiles"] = _moved(outputs["quantiles"], mu, outputs["mu"], factor)
        return outputs

    def predict(
        self, features: Tensor, served_model: Tensor | None = None, temperature: Tensor | None = None
    ) -> dict[str, Tensor]:
        """As `outputs`, of prompts' features [B, F]; served_model and temperature as in `scores`, [B]. With
        `Conditioning.unknown_is_mean` an unknown served model gets the means of the outputs for all known ones; for sigma^2,
        the mean of sigma^2 and the variance of mu (law of total variance). Quantiles are scaled about mu like sigma."""
        conditioning = self.config.conditioning
        if conditioning is None or not conditioning.unknown_is_mean:
            return self.outputs(self.scores(features, served_model, temperature), served_model)
        if served_model is None:
            served_model = torch.zeros(features.shape[0], dtype=torch.int64, device=features.device)
        # A known served model is predicted by itself, an unknown one by all of them.
        numbers, of = torch.arange(1, self.num_models + 1, device=features.device), served_model[:, None]
        row, member = torch.where((of == 0) | (of == numbers))
        number = member + 1
        scores = self.scores(features, number, None if temperature is None else temperature[row], row)
        heads = self.config.heads.items()
        conditioned = {name: scores.pop(name) for name, head in heads if head.is_conditioned}
        of_rows = self.outputs(conditioned, number)
        weight = (row == torch.arange(features.shape[0], device=row.device)[:, None]).float()
        weight = weight / weight.sum(dim=1, keepdim=True)
        outputs = self.outputs(scores) | {name: weight @ values for name, values in of_rows.items()}
        if "mu" in outputs:
            deviation = of_rows["mu"] - outputs["mu"][row]
            mean_sigma = outputs["sigma"]
            outputs["sigma"] = torch.sqrt(weight @ (of_rows["sigma"] ** 2 + deviation**2))
            if "quantiles" in outputs:
                mu, factor = outputs["mu"], outputs["sigma"] / mean_sigma
                outputs["quantiles"] = _moved(outputs["quantiles"], mu, mu, factor)
        return outputs

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        served_model: Tensor | None = None,
        temperature: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Outputs of all heads, float32, as `outputs`, of int64 token ids and mask [B, S] with at least one token in each row;
        served_model and temperature as in `scores`, [B]."""
        return self.predict(self.features(input_ids, attention_mask), served_model, temperature)


def _moved(quantiles: Tensor, before: Tensor, after: Tensor, factor: Tensor) -> Tensor:
    """Quantiles [B, K] with their distances from mu [B] times `factor` [B], about another mu [B]."""
    distances = quantiles - before.unsqueeze(-1)
    return after.unsqueeze(-1) + distances * factor.unsqueeze(-1)
