"""Texts with urgency levels: the seed set, files of labels, and their mixture; `docs/urgency.md` is the rubric."""
