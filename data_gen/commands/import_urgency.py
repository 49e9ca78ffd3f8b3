"""The command `import-urgency`: collect labeled texts for the urgency head from the seed set and label files."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from data_gen.splits import SPLITS, unit_hash
from data_gen.urgency.labels import LabeledText, read_labels, write_labels
from data_gen.urgency.seed_set import PARTS, read_claims, read_openers, seed_labels, with_phrases
from scheduler_core.errors import InputError
from scheduler_core.prediction.urgency import LEVELS
from scheduler_core.ranges import INTEGERS, check_ranges, parse_number
from scheduler_core.shell.command import command
from scheduler_core.shell.files import sha256_file, write_json

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
    """Sources, separated by commas: llm, quiet, extra (training only) and triage (built in), labels=FILE (Parquet with columns text and level, or text and label with --levels). If several sources have the same text, the label of the first one is used."""
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
    """Writes the texts without duplicates as urgency/1, and `OUT.run.json` with counts and the hashes of the source files.

    The first source of a text takes precedence. InputError if an option or a source is invalid, or no text remains.
    """
    splits = _listed(config.splits)
    if not splits or not set(splits) <= set(SPLITS):
        raise InputError("splits", config.splits, f"one or more of {', '.join(SPLITS)}")
    sources = _sources(config.sources)
    levels = dict(_pairs(config.levels, "levels", "LABEL=LEVEL"))
    weights = _weights(config.weights)
    by_text: dict[str, LabeledText] = {}
    num_read = 0
    for kind, path in sources:
        for text in _read(kind, path, levels, config.limit):
            num_read += 1
            by_text.setdefault(text.text, replace(text, weight=weights.get(kind, text.weight)))
    texts = [text for text in by_text.values() if text.split in splits]
    random = np.random.default_rng(config.seed)
    for name, phrases in (("augment_claims", read_claims()), ("augment_openers", read_openers())):
        if getattr(config, name) > len(phrases):
            raise InputError(name, getattr(config, name), f"integers from 0 to {len(phrases)}")
    claims = with_phrases(texts, read_claims(), config.augment_claims, random, claimed=True)
    openers = with_phrases(texts, read_openers(), config.augment_openers, random, claimed=False)
    texts = [*texts, *claims, *openers]
    write_labels(config.out, texts)
    content = {
        "schema": "urgency/1",
        "options": asdict(config),
        "sources": [
            {"kind": kind} | ({"sha256": sha256_file(path)} if path else {}) for kind, path in sources
        ],
        "num_texts": len(texts),
        "num_repeated": num_read - len(by_text),
        "num_claimed": sum(text.claimed for text in texts),
        "by_source": dict(Counter(text.source for text in texts)),
        "by_split": dict(Counter(text.split for text in texts)),
        "by_level": {name: sum(text.level == level for text in texts) for level, name in enumerate(LEVELS)},
    }
    write_json(Path(f"{config.out}.run.json"), content)
    log.info("%s: %d labeled texts", config.out, len(texts))


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _pairs(text: str, field: str, form: str) -> list[tuple[str, str]]:
    pairs = [item.partition("=") for item in _listed(text)]
    for name, equals, value in pairs:
        if not (name and equals and value):
            raise InputError(field, f"{name}{equals}{value}", f"{form}, separated by commas")
    return [(name.strip(), value.strip()) for name, _, value in pairs]


def _sources(text: str) -> list[tuple[str, str]]:
    """Parses sources such as `llm,quiet,labels=tickets.parquet` to (kind, path); parts of the seed set have no path."""
    sources = [item.partition("=") for item in _listed(text)]
    if not sources:
        raise InputError("sources", text, "one or more sources, separated by commas")
    for kind, equals, path in sources:
        if not (path if kind == "labels" else kind in PARTS and not equals):
            raise InputError("sources", f"{kind}{equals}{path}", ", ".join([*PARTS, "labels=FILE"]))
    return [(kind, path) for kind, _, path in sources]


def _weights(text: str) -> dict[str, float]:
    """Parses the weight of each kind of source, which overrides the weights of the texts."""
    weights = {}
    for kind, value in _pairs(text, "weights", "KIND=WEIGHT"):
        if kind not in (*PARTS, "labels"):
            raise InputError("weights", kind, ", ".join((*PARTS, "labels")))
        try:
            weights[kind] = parse_number(value)
        except ValueError:
            weights[kind] = math.nan
        if not 0 < weights[kind] < math.inf:
            raise InputError(f"weights, {kind}", value, "a finite number above 0")
    return weights


def _read(kind: str, path: str, levels: Mapping[str, str], limit: int | None) -> list[LabeledText]:
    if kind in PARTS:
        return seed_labels(kind)
    texts = read_labels(path, "sources", levels)
    order = sorted(range(len(texts)), key=lambda number: unit_hash(texts[number].text))
    return [texts[number] for number in sorted(order[:limit])]


main = command("import-urgency", ImportUrgencyConfig, import_urgency, positionals=("out",), extra="gen")


if __name__ == "__main__":
    raise SystemExit(main())
