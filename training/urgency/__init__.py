"""Evaluation of urgency predictors (`docs/urgency.md`): metrics, abstention, adversarial check, baselines."""
