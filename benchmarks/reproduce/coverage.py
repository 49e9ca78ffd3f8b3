"""The study of every table and figure of the five papers, or the reason why there is none."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Covered:
    """Tables or figures of a paper and their studies.

    Attributes:
        paper: Short name of the paper, as in the studies.
        where: Tables or figures.
        studies: Names of their studies; can be empty.
        note: Reason for no study, or the differences from the paper.
    """

    paper: str
    where: str
    studies: tuple[str, ...] = ()
    note: str = ""


with Path(__file__).with_suffix(".csv").open(newline="", encoding="utf-8") as _file:
    COVERAGE = tuple(
        Covered(row["paper"], row["where"], tuple(row["studies"].split()), row["note"])
        for row in csv.DictReader(_file)
    )
