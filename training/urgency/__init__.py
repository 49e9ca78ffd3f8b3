"""Evaluation of urgency predictors by the rubric in `docs/urgency.md`: metrics, abstention, adversarial check, baselines."""
