"""Importers of public sets whose priorities are mapped to levels.

Both scales were made for something else than LLM traffic, so their labels get a weight below 1 and never the level
`emergency`: a ticket's priority says how much a disturbance matters to a business, not that a person is in danger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from data_gen.tables import read_parquet, require_columns
from data_gen.urgency.labels import LabelledText, level_number, text_split
from scheduler_core.errors import InputError
from scheduler_core.urgency import LEVELS


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicSet:
    """How a set is read.

    Attributes:
        name: Name of the kind, and source of its texts.
        levels: The set's label -> name of a level.
        weight: Weight of a text in a loss.
        literal_newlines: The texts carry the two characters backslash and n where a line ends.
        language: Language of all texts, where the set has no column `language`.
        note: What its labels are.
    """

    name: str
    levels: Mapping[str, str]
    weight: float
    note: str
    literal_newlines: bool = False
    language: str | None = None

    def with_levels(self, changes: Mapping[str, str]) -> dict[str, str]:
        """The mapping with some labels mapped otherwise.

        Raises:
            InputError: A label is not in the set's scale, or a level is unknown.
        """
        for label, level in changes.items():
            if label not in self.levels:
                raise InputError(f"levels, label of {self.name}", label, ", ".join(self.levels))
            level_number(level, f"levels, {self.name}.{label}")
        return {
            **self.levels,
            **{label: LEVELS[level_number(level, label)] for label, level in changes.items()},
        }


PUBLIC_SETS: dict[str, PublicSet] = {
    entry.name: entry
    for entry in (
        PublicSet(
            name="support-tickets",
            levels={
                "critical": "interactive",
                "high": "interactive",
                "medium": "standard",
                "low": "batch",
                "very_low": "background",
            },
            weight=0.1,
            note="priority of machine-written support tickets; hardly decided by the text",
            literal_newlines=True,
        ),
        PublicSet(
            name="seamonkey",
            levels={
                "P1": "interactive",
                "P2": "interactive",
                "P3": "standard",
                "P4": "batch",
                "P5": "background",
            },
            weight=0.1,
            note="priority of bugs, which is about a project's plans and not about waiting",
            language="en",
        ),
    )
}


def read_public_set(
    kind: str,
    path: str | Path,
    *,
    levels: Mapping[str, str] | None = None,
    weight: float | None = None,
) -> list[LabelledText]:
    """Reads a Parquet file with columns text, label and, if it has one, language.

    Args:
        kind: A name of `PUBLIC_SETS`.
        path: The file.
        levels: Labels mapped otherwise than by the set's default.
        weight: Another weight than the set's default.

    Returns:
        One entry for each different text, in the order of the file; of a text with several labels the first.

    Raises:
        InputError: The file or a column is missing, or a label is not in the scale; names the row.
    """
    if kind not in PUBLIC_SETS:
        raise InputError("kind of set", kind, ", ".join(PUBLIC_SETS))
    known = PUBLIC_SETS[kind]
    mapping = known.with_levels(levels or {})
    table = read_parquet(path, kind)
    name = Path(path).name
    require_columns(table, ["text", "label"], f"{name}, columns")
    has_language = "language" in table.column_names
    found: dict[str, LabelledText] = {}
    for row, values in enumerate(table.to_pylist()):
        text, label = values["text"], values["label"]
        if label not in mapping:
            raise InputError(f"{name}, row {row}, column label", label, ", ".join(mapping))
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{name}, row {row}, column text", text, "text that is not empty")
        if known.literal_newlines:
            text = text.replace("\\n", "\n")
        if text not in found:
            found[text] = LabelledText(
                text=text,
                level=LEVELS.index(mapping[label]),
                source=kind,
                split=text_split(text),
                weight=known.weight if weight is None else weight,
                language=values["language"] if has_language else known.language,
            )
    return list(found.values())
