"""CASTILLO's rows that no shipped predictor was trained on."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from data_gen.splits import split_of
from examples.pretrained.prepare import FRACTIONS, SPLIT_SEED, prompt_hash


def report_rows(file: str | Path) -> pd.DataFrame:
    """Rows (prompt, served model) of castillo_validation.parquet of the report split, as in `examples.pretrained`."""
    table = pd.read_parquet(file)
    split = table.prompt.map(lambda text: split_of(prompt_hash(text), SPLIT_SEED, FRACTIONS))
    return table[split == "test"].reset_index(drop=True)
