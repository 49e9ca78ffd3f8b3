"""The predictor: one encoder, its pooled features, and one or more heads.

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
from scheduler_core.lengths.quantiles import moved
from scheduler_core.prediction.linear_correction import CENTERS, MAX_FEATURE

# ln(512) / 5 is about 1, the scale of the other features.
PROMPT_LENGTH_SCALE = 5.0
# Minimum temperature in the logarithm, for greedy decoding (0); sampling below this is nearly greedy.
GREEDY_TEMPERATURE = 0.05
EMBEDDING_STD = 0.1


class ConditionFeatures(nn.Module):
    """Embedding of the served model (initially N(0, 0.1^2)), ln temperature, flag for known temperature."""

    def __init__(self, conditioning: Conditioning, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.has_temperature = conditioning.temperature
        self.num_features = conditioning.width + 2 * conditioning.temperature
        self.served_model = nn.Embedding(len(conditioning.served_models) + 1, conditioning.width)
        nn.init.normal_(self.served_model.weight, std=EMBEDDING_STD, generator=generator)

    def forward(self, features: Tensor, served_model: Tensor | None, temperature: Tensor | None) -> Tensor:
        """Conditions [B, num_features], with dtype and device of the features [B, F]. `served_model` has
        numbers, int64 [B], 0 = unknown; `temperature` is [B], NaN = unknown. None: all unknown."""
        if served_model is None:
            served_model = torch.zeros(features.shape[0], dtype=torch.int64, device=features.device)
        parts = [self.served_model(served_model).to(features.dtype)]
        if self.has_temperature:
            if temperature is None:
                temperature = torch.full((features.shape[0],), torch.nan, device=features.device)
            is_set = ~torch.isnan(temperature)
            # NaN is replaced before the logarithm, because otherwise the gradient would be NaN.
            filled = torch.where(is_set, temperature, torch.ones_like(temperature))
            logs = torch.log(filled.clamp_min(GREEDY_TEMPERATURE))
            parts.append(torch.stack([logs, is_set.to(logs.dtype)], dim=-1).to(features.dtype))
        return torch.cat(parts, dim=-1)


class PromptPredictor(nn.Module):
    """Predicts the outputs of one or more heads from prompt tokens.

    Args:
        encoder: A transformers encoder: input_ids, attention_mask -> last_hidden_state.
        calibration: Applied to mu and sigma by `outputs`; None: identity.
        generator: Random generator of initial weights; None: torch's global generator.

    Raises:
        InputError: `max_length` exceeds the encoder's positions, or the calibration has other served models.
    """

    sigma_scale: Tensor
    mu_shift: Tensor
    location: Tensor
    log_scale: Tensor

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
        """Device of the weights."""
        return next(self.parameters()).device

    @property
    def num_models(self) -> int:
        """Number of served models that the heads are conditioned on, without the unknown one."""
        return 0 if self.config.conditioning is None else len(self.config.conditioning.served_models)

    def set_calibration(self, calibration: Calibration | None) -> None:
        """Sets the calibration of `outputs` (None: identity); InputError if it has other served models."""
        calibration = calibration or Calibration.identity(self.num_models)
        if calibration.num_models != self.num_models:
            allowed = f"{self.num_models} served models"
            raise InputError("calibration", f"{calibration.num_models} served models", allowed)
        self.calibration = calibration
        # Not saved with the weights, because config.json contains the calibration.
        for name in ("sigma_scale", "mu_shift", "location", "log_scale"):
            table = torch.tensor(getattr(calibration, name), dtype=torch.float32, device=self.device)
            self.register_buffer(name, table, persistent=False)

    def features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Features [B, F] of token ids [B, S]; the mask [B, S] is 1 at tokens and 0 at padding on the right.
        They do not depend on the other rows of the batch or on the amount of padding."""
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
        """Scores [R, ...] ([P, ...] if not conditioned) of each head from features [P, F]; see its `build`.

        Served models and temperatures [R] are as in `ConditionFeatures.forward`. `row_prompt` is the index of
        the prompt of each row, int64 [R]; None: one row per prompt.
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
        """Uncalibrated log-t parameters for training losses; see `LengthHead.parameters`."""
        head = self.config.heads.length
        assert head is not None
        return head.parameters(scores, self.normalization, differentiable_floor=self.training)

    def outputs(self, scores: Mapping[str, Tensor], served_model: Tensor | None = None) -> dict[str, Tensor]:
        """Outputs in natural units from `scores`, calibrated for served models, int64 [B] (None: unknown).

        Returns:
            Depending on the heads: mu and sigma [B] (log tokens), nu [B], sigma_within [B] (log tokens, not
            calibrated), quantiles [B, K] (log tokens), urgency and bucket [B, K] (probabilities),
            regression_tokens [B] (tokens, at least 0), rank [B].
        """
        outputs: dict[str, Tensor] = {}
        for name, head in self.config.heads.items():
            if name in scores:
                outputs |= head.outputs(scores[name], self.normalization)
        if "mu" in outputs:
            row = 0 if self.conditions is None or served_model is None else served_model
            mu, sigma = outputs["mu"], outputs["sigma"]
            outputs["mu"] = mu + self.mu_shift[row] * sigma
            scale = self.sigma_scale[row]
            if self.calibration.location:
                columns = torch.stack(
                    [torch.ones_like(mu), mu - CENTERS[0], sigma.log() - CENTERS[1]], dim=-1
                )
                features = columns.clamp(-MAX_FEATURE, MAX_FEATURE)
                outputs["mu"] = outputs["mu"] + (features * self.location[row]).sum(dim=-1)
                scale = scale * (features * self.log_scale[row]).sum(dim=-1).exp()
            outputs["sigma"] = (sigma * scale).clamp_min(SIGMA_FLOOR)
            if "quantiles" in outputs:
                factor = outputs["sigma"] / sigma
                outputs["quantiles"] = moved(outputs["quantiles"], mu, outputs["mu"], factor)
        return outputs

    def predict(
        self, features: Tensor, served_model: Tensor | None = None, temperature: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The `outputs` for features [B, F]; served_model and temperature [B] are as in `scores`. With
        `Conditioning.unknown_is_mean`, outputs for an unknown served model are means over the known ones; the
        variance of mu adds to the mean of sigma^2, and quantiles are scaled like sigma."""
        conditioning = self.config.conditioning
        if conditioning is None or not conditioning.unknown_is_mean:
            return self.outputs(self.scores(features, served_model, temperature), served_model)
        if served_model is None:
            served_model = torch.zeros(features.shape[0], dtype=torch.int64, device=features.device)
        # One row per known served model; an unknown one has a row for each of them.
        numbers = torch.arange(1, self.num_models + 1, device=features.device)
        row, member = torch.where((served_model[:, None] == 0) | (served_model[:, None] == numbers))
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
                outputs["quantiles"] = moved(outputs["quantiles"], mu, mu, factor)
        return outputs

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        served_model: Tensor | None = None,
        temperature: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The `outputs` in float32 for int64 token ids and mask [B, S], with at least one token in each row;
        served_model and temperature [B] are as in `scores`."""
        return self.predict(self.features(input_ids, attention_mask), served_model, temperature)
