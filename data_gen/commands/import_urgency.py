"""The command `import-urgency`: collect labeled texts for the urgency head from the seed set and label files."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from scheduler_core.ranges import INTEGERS, check_ranges
from scheduler_core.shell.command import command

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ImportUrgencyConfig:
    """Write texts with urgency levels (schema urgency/1) from the built-in seed set and label files."""

    INPUTS = ("sources",)
    OUTPUTS = ("out", "{out}.run.json")

    out: str
    """Parquet file to write."""
    overwrite: bool = False
    """Replace files at the outputs."""
    sources: str = "llm,quiet"
    """Sources, separated by commas: llm, quiet and triage (built in), labels=FILE (Parquet with columns text and level, or text and label with --levels). If several sources have the same text, the label of the first one is used."""
    splits: str = "train,validation,test"
    """Splits to write, separated by commas; the split of a text is determined by its hash."""
    levels: str = ""
    """Mapping of the values of a column label to levels, LABEL=LEVEL separated by commas, e.g. critical=interactive,low=batch."""
    weights: str = ""
    """Weights of sources, KIND=WEIGHT separated by commas, e.g. labels=0.1; default 1, and for labels the column weight."""
    limit: int | None = None
    """Maximum number of texts from each label file; unset: all."""
    augment_claims: int = 0
    """Number of copies of each training text with an added claim of urgency and the same level, so that a predictor learns to ignore claims."""
    augment_openers: int = 0
    """Number of copies of each training text with an added greeting, thanks or similar phrase, so that a predictor learns to ignore these."""
    seed: int = 0
    """Seed of the choice of added phrases."""

    def __post_init__(self) -> None:
        counts = dict.fromkeys(("augment_claims", "augment_openers", "seed"), (0, INTEGERS))
        check_ranges(self, limit=(1, INTEGERS), **counts)


def import_urgency(config: ImportUrgencyConfig) -> None:
    """Runs the command; see `data_gen.urgency.mixture.write_mixture`."""
    from data_gen.urgency.mixture import write_mixture

    log.info("%s: %d labeled texts", config.out, len(write_mixture(config)))


main = command("import-urgency", ImportUrgencyConfig, import_urgency, positionals=("out",), extra="gen")


if __name__ == "__main__":
    raise SystemExit(main())
