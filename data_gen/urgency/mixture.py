"""Any mix of labeled texts: parts of the seed set, files of labels, and copies with phrases that decide nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from data_gen.splits import SPLITS, unit_hash
from data_gen.urgency.labels import LabeledText, read_labels, write_labels
from data_gen.urgency.seed_set import PARTS, Phrase, read_claims, read_openers, seed_labels
from scheduler_core.errors import InputError
from scheduler_core.files import sha256_file, write_json
from scheduler_core.urgency import LEVELS

KINDS = (*PARTS, "labels")


@dataclass(frozen=True, slots=True)
class LabelSource:
    """A source of texts: a part of the seed set (no path), or a file of labels.

    Raises:
        InputError: The kind is unknown, or a path is missing or too much.
    """

    kind: str
    path: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError("sources", self.kind, ", ".join([*PARTS, "labels=FILE"]))
        if self.kind in PARTS and self.path is not None:
            raise InputError(
                "sources", f"{self.kind}={self.path}", f"{self.kind} without a file: it is built in"
            )
        if self.kind == "labels" and not self.path:
            raise InputError("sources", self.kind, "labels=FILE")

    @classmethod
    def parse(cls, sources: str) -> list[LabelSource]:
        """From `llm,quiet,labels=tickets.parquet`."""
        parsed = [item.strip().partition("=") for item in sources.split(",") if item.strip()]
        if not parsed:
            raise InputError("sources", sources, "one or more sources, separated by commas")
        return [cls(kind, path if equals else None) for kind, equals, path in parsed]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOptions:
    """Treatment of the sources.

    Attributes:
        splits: Splits to keep.
        levels: Value of a file's column label -> level.
        weights: Kind of source -> weight of its texts, instead of their own.
        limit: Maximum number of texts of each source that is a file, chosen by a stable hash; None: all.
        augment_claims: Copies with a claim of urgency of each training text.
        augment_openers: Copies with a phrase that claims nothing of each training text.
        seed: Decides which claims and phrases.
    """

    splits: tuple[str, ...] = SPLITS
    levels: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    limit: int | None = None
    augment_claims: int = 0
    augment_openers: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.splits or not set(self.splits) <= set(SPLITS):
            raise InputError("splits", ",".join(self.splits), f"one or more of {', '.join(SPLITS)}")
        if self.limit is not None and self.limit < 1:
            raise InputError("limit", self.limit, "integers > 0, or unset")
        for kind, weight in self.weights.items():
            if kind not in KINDS:
                raise InputError("weights", kind, ", ".join(KINDS))
            if not 0 < weight < float("inf"):
                raise InputError(f"weights, {kind}", weight, "a finite number above 0")


def mix(sources: Sequence[LabelSource], options: MixtureOptions) -> tuple[list[LabeledText], int]:
    """All texts of the sources, in their order.

    Returns:
        The texts, each once: of one that is in several sources the first stays; and how many were dropped for that.

    Raises:
        InputError: A source cannot be read.
    """
    by_text: dict[str, LabeledText] = {}
    num_read = 0
    for source in sources:
        for text in _read(source, options):
            num_read += 1
            by_text.setdefault(text.text, text)
    texts = [text for text in by_text.values() if text.split in options.splits]
    random = np.random.default_rng(options.seed)
    copies = []
    for name, phrases in (("augment_claims", read_claims()), ("augment_openers", read_openers())):
        num_copies = getattr(options, name)
        if num_copies > len(phrases):
            raise InputError(name, num_copies, f"integers from 0 to {len(phrases)}")
        copies += with_phrases(texts, phrases, num_copies, random, claimed=name == "augment_claims")
    return [*texts, *copies], num_read - len(by_text)


def _read(source: LabelSource, options: MixtureOptions) -> list[LabeledText]:
    if source.path is None:
        texts = seed_labels(source.kind)
    else:
        texts = read_labels(source.path, "sources", options.levels)
        if options.limit is not None and len(texts) > options.limit:
            order = sorted(range(len(texts)), key=lambda at: unit_hash(texts[at].text))
            texts = [texts[at] for at in sorted(order[: options.limit])]
    weight = options.weights.get(source.kind)
    return texts if weight is None else [replace(text, weight=weight) for text in texts]


def with_phrases(
    texts: Sequence[LabeledText],
    phrases: Sequence[Phrase],
    num_copies: int,
    random: np.random.Generator,
    *,
    claimed: bool,
) -> list[LabeledText]:
    """Copies of every training text, each with another phrase and the same level.

    Phrases of the text's own language are drawn half of the time where there are any: mixtures occur, too. Texts of
    the validation and test splits get no copies.

    Args:
        texts: Labeled texts.
        phrases: To draw from.
        num_copies: Copies of each training text, 0 to the number of phrases.
        random: Decides which phrases.
        claimed: The phrases claim urgency.
    """
    copies: list[LabeledText] = []
    for text in texts:
        if text.split != "train":
            continue
        own = np.array([phrase.language == text.language for phrase in phrases])
        probabilities = np.full(len(phrases), 1.0 / len(phrases))
        if own.any():
            probabilities = 0.5 * probabilities + 0.5 * own / own.sum()
        drawn = random.choice(len(phrases), size=num_copies, replace=False, p=probabilities).tolist()
        copies += [
            replace(text, text=phrases[number].added_to(text.text), claimed=claimed) for number in drawn
        ]
    return copies


def write_mixture(
    sources: Sequence[LabelSource], out: str | Path, options: MixtureOptions
) -> list[LabeledText]:
    """Writes the mix as urgency/1, and `OUT.run.json` with the counts and the hashes of the files beside it.

    Raises:
        InputError: A source cannot be read, or no text remains.
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
        **asdict(options),
        "num_texts": len(texts),
        "num_repeated": num_repeated,
        "num_claimed": sum(text.claimed for text in texts),
        "by_source": dict(Counter(text.source for text in texts)),
        "by_split": dict(Counter(text.split for text in texts)),
        "by_level": {name: sum(text.level == level for text in texts) for level, name in enumerate(LEVELS)},
    }
    write_json(target.with_name(target.name + ".run.json"), content)
    return texts
