"""Texts with urgency levels: the seed set, label files, and mixtures; see `docs/urgency.md` for the rubric."""
