"""The command `import-urgency`: labeled texts for the urgency head, from the seed set and files of labels."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_core.command import run_command
from scheduler_core.errors import InputError, MissingExtraError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ImportUrgencyConfig:
    """Write texts with urgency levels (schema urgency/1), from the built-in seed set and files of labels."""

    INPUTS = ("sources",)
    OUTPUTS = ("out", "{out}.run.json")

    out: str
    """Parquet file to write."""
    sources: str = "llm,quiet"
    """What to take, separated by commas: llm, quiet and triage (built in), labels=FILE (Parquet with columns text and level, or text and label with --levels). Of a text in several sources the first one's label counts."""
    splits: str = "train,validation,test"
    """Splits to write, separated by commas; a text's split is decided by its hash."""
    levels: str = ""
    """Levels of the values of a column label, LABEL=LEVEL separated by commas, e.g. critical=interactive,low=batch."""
    weights: str = ""
    """Weights of sources, KIND=WEIGHT separated by commas, e.g. labels=0.1; default 1, and for labels the column weight."""
    limit: int | None = None
    """Maximum number of texts of each source that is a file; unset: all."""
    augment_claims: int = 0
    """Copies of each training text with a claim of urgency and the same level, so that a predictor learns to ignore claims."""
    augment_openers: int = 0
    """Copies of each training text with a greeting, thanks or the like, so that a predictor learns to ignore these."""
    seed: int = 0
    """Decides which phrases are added."""

    def __post_init__(self) -> None:
        for name in ("augment_claims", "augment_openers", "seed"):
            if getattr(self, name) < 0:
                raise InputError(name, getattr(self, name), "integers >= 0")


def import_urgency(config: ImportUrgencyConfig) -> None:
    """Runs the command; see `data_gen.urgency.mixture.write_mixture`."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("pyarrow", "gen") from error
    from data_gen.urgency.mixture import LabelSource, MixtureOptions, write_mixture

    weights: dict[str, float] = {}
    for kind, value in _pairs(config.weights, "weights", "KIND=WEIGHT"):
        try:
            weights[kind] = float(value)
        except ValueError as error:
            raise InputError(f"weights, {kind}", value, "a finite number above 0") from error
    options = MixtureOptions(
        splits=tuple(item.strip() for item in config.splits.split(",") if item.strip()),
        levels=dict(_pairs(config.levels, "levels", "LABEL=LEVEL")),
        weights=weights,
        limit=config.limit,
        augment_claims=config.augment_claims,
        augment_openers=config.augment_openers,
        seed=config.seed,
    )
    texts = write_mixture(LabelSource.parse(config.sources), config.out, options)
    log.info("%s: %d labeled texts", config.out, len(texts))


def _pairs(text: str, field: str, form: str) -> list[tuple[str, str]]:
    pairs = [item.strip().partition("=") for item in text.split(",") if item.strip()]
    for name, equals, value in pairs:
        if not (name and equals and value):
            raise InputError(field, f"{name}{equals}{value}", f"{form}, separated by commas")
    return [(name.strip(), value.strip()) for name, _, value in pairs]


def main(args: Sequence[str] | None = None) -> int:
    """Entry point of `import-urgency`."""
    return run_command(
        "import-urgency", ImportUrgencyConfig, import_urgency, positionals=("out",), extra="gen", args=args
    )


if __name__ == "__main__":
    raise SystemExit(main())
