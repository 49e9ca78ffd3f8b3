"""Texts with urgency levels: the seed set, label files, and mixtures of them; `docs/urgency.md` has the rubric."""
