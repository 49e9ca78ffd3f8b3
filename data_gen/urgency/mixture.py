"""Any mix of labelled texts: parts of the seed set, public sets, files of labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from data_gen.splits import SPLITS, unit_hash
from data_gen.urgency.augment import with_phrases
from data_gen.urgency.labels import LabelledText, read_labels, write_labels
from data_gen.urgency.public_sets import PUBLIC_SETS, read_public_set
from data_gen.urgency.seed_set import PARTS, read_claims, read_openers, seed_labels
from scheduler_core.errors import InputError
from scheduler_core.files import sha256_file, write_json
from scheduler_core.urgency import LEVELS


@dataclass(frozen=True, slots=True)
class Source:
    """Where texts come from: a part of the seed set (no path), a public set, or a file of labels.

    Raises:
        InputError: The kind is unknown, or a path is missing or too much.
    """

    kind: str
    path: str | None = None

    def __post_init__(self) -> None:
        if self.kind in PARTS:
            if self.path is not None:
                raise InputError("sources", f"{self.kind}={self.path}", f"{self.kind} alone: it is built in")
        elif self.kind not in PUBLIC_SETS and self.kind != "labels":
            kinds = [*PARTS, *(f"{name}=FILE" for name in PUBLIC_SETS), "labels=FILE"]
            raise InputError("sources", self.kind, ", ".join(kinds))
        elif not self.path:
            raise InputError("sources", self.kind, f"{self.kind}=FILE")

    @classmethod
    def parse(cls, sources: str) -> list[Source]:
        """From `llm,quiet,support-tickets=tickets.parquet`."""
        parsed = [item.strip().partition("=") for item in sources.split(",") if item.strip()]
        if not parsed:
            raise InputError("sources", sources, "one or more sources, separated by commas")
        return [cls(kind, path if equals else None) for kind, equals, path in parsed]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOptions:
    """What becomes of the sources.

    Attributes:
        splits: Splits to keep.
        levels: Kind of public set -> its label -> level, where it is to differ from the default.
        weights: Kind of source -> weight of its texts; without an entry the default (1 for the seed set).
        limit: Most texts taken of each source that is a file, chosen by a stable hash; None: all.
        augment_claims: Copies with a claim of urgency of each training text.
        augment_openers: Copies with a phrase that claims nothing of each training text.
        seed: Decides which claims and phrases.
    """

    splits: tuple[str, ...] = SPLITS
    levels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    limit: int | None = None
    augment_claims: int = 0
    augment_openers: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.splits or not set(self.splits) <= set(SPLITS):
            raise InputError("splits", ",".join(self.splits), f"one or more of {', '.join(SPLITS)}")
        if self.limit is not None and self.limit < 1:
            raise InputError("limit", self.limit, "a whole number of at least 1, or unset")
        for kind in self.levels:
            if kind not in PUBLIC_SETS:
                raise InputError("levels", kind, f"labels of {', '.join(PUBLIC_SETS)}")
        for kind, weight in self.weights.items():
            if kind not in PARTS and kind not in PUBLIC_SETS and kind != "labels":
                raise InputError("weights", kind, ", ".join([*PARTS, *PUBLIC_SETS, "labels"]))
            if not 0 < weight < float("inf"):
                raise InputError(f"weights, {kind}", weight, "a finite number above 0")


def mix(sources: Sequence[Source], options: MixtureOptions) -> tuple[list[LabelledText], int]:
    """All texts of the sources, in their order.

    Returns:
        The texts, each once: of one that is in several sources the first stays; and how many were dropped for that.

    Raises:
        InputError: A source cannot be read.
    """
    found: dict[str, LabelledText] = {}
    num_read = 0
    for source in sources:
        for text in _read(source, options):
            num_read += 1
            found.setdefault(text.text, text)
    kept = [text for text in found.values() if text.split in options.splits]
    return [*kept, *_copies(kept, options)], num_read - len(found)


def _copies(texts: Sequence[LabelledText], options: MixtureOptions) -> list[LabelledText]:
    random = np.random.default_rng(options.seed)
    claimed = with_phrases(
        texts, read_claims(), options.augment_claims, random, claimed=True, field="augment_claims"
    )
    opened = with_phrases(
        texts, read_openers(), options.augment_openers, random, claimed=False, field="augment_openers"
    )
    return [*claimed, *opened]


def write_mixture(sources: Sequence[Source], out: str | Path, options: MixtureOptions) -> list[LabelledText]:
    """Writes the mix as urgency/1, and `OUT.run.json` with the counts and the hashes of the files beside it.

    Raises:
        InputError: A source cannot be read, or nothing is left.
    """
    texts, num_repeated = mix(sources, options)
    write_labels(out, texts)
    target = Path(out)
    content = {
        "schema": "urgency/1",
        "sources": [
            {"kind": source.kind} | ({} if source.path is None else {"sha256": sha256_file(source.path)})
            for source in sources
        ],
        "splits": list(options.splits),
        "levels": {kind: dict(changes) for kind, changes in options.levels.items()},
        "weights": dict(options.weights),
        "limit": options.limit,
        "augment_claims": options.augment_claims,
        "augment_openers": options.augment_openers,
        "seed": options.seed,
        "num_texts": len(texts),
        "num_repeated": num_repeated,
        "num_claimed": sum(text.claimed for text in texts),
        "by_source": dict(Counter(text.source for text in texts)),
        "by_split": dict(Counter(text.split for text in texts)),
        "by_level": {name: sum(text.level == level for text in texts) for level, name in enumerate(LEVELS)},
    }
    write_json(target.with_name(target.name + ".run.json"), content)
    return texts


def _read(source: Source, options: MixtureOptions) -> list[LabelledText]:
    weight = options.weights.get(source.kind)
    if source.path is None:
        texts = seed_labels(source.kind)
        return texts if weight is None else _weighted(texts, weight)
    if source.kind == "labels":
        texts = read_labels(source.path, "sources")
        texts = texts if weight is None else _weighted(texts, weight)
    else:
        changes = options.levels.get(source.kind)
        texts = read_public_set(source.kind, source.path, levels=changes, weight=weight)
    if options.limit is not None and len(texts) > options.limit:
        order = sorted(range(len(texts)), key=lambda at: unit_hash(texts[at].text))
        texts = [texts[at] for at in sorted(order[: options.limit])]
    return texts


def _weighted(texts: list[LabelledText], weight: float) -> list[LabelledText]:
    return [replace(text, weight=weight) for text in texts]
