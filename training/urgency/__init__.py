"""Evaluation of urgency predictors: metrics, abstention, adversarial check, baselines.

`evaluate-urgency` puts them together; `docs/urgency.md` is the rubric of the levels.
"""
