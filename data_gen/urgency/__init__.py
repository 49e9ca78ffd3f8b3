"""Texts with urgency levels: the seed set, importers of public sets, claims of urgency for training and attack.

`docs/urgency.md` is the rubric of the levels; `import-urgency` writes any mix as one Parquet file.
"""
