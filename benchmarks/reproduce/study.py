"""Data types: the paper's values, ours, and whether both have the same direction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scheduler_core.errors import InputError

#: Effects within this factor of no effect count as none.
NO_EFFECT = 1.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Cost and inputs of a study.

    Attributes:
        quick: Few requests and settings, one seed.
        scale: Fraction of the requests of the full study (and of the seeds), in (0, 1].
        num_seeds: Seeds of each simulation at scale 1.
        data: Folder of public length sets and traces (traces/slai_sharegpt4_8k.parquet and so on); None:
            distributions with the statistics that the papers print.
        predictions: Output of `benchmarks.reproduce.predict`, for TIE: real prompts and outputs with trained
            predictions; None: predictions with a given error.

    Raises:
        InputError: The scale or the number of seeds is outside its range.
    """

    quick: bool = False
    scale: float = 1.0
    num_seeds: int = 3
    data: Path | None = None
    predictions: Path | None = None

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise InputError("--scale", self.scale, "numbers in (0, 1]")
        if self.num_seeds < 1:
            raise InputError("--seeds", self.num_seeds, "integers > 0")

    @property
    def seeds(self) -> range:
        """Seeds of each simulation, at least one."""
        return range(1 if self.quick else max(1, round(self.num_seeds * self.scale)))

    def num(self, full: int, quick: int) -> int:
        """Number of requests (or seconds): `full` scaled, at least `quick`; `quick` in the quick version."""
        return quick if self.quick else max(quick, round(full * self.scale))

    def size(self, full: int, quick: int, unit: str = "requests") -> str:
        """`num` as text, for `Findings.size`."""
        return f"{self.num(full, quick):,} of {full:,} {unit}"

    def file(self, name: str) -> Path | None:
        """Path of a file in `data`, if it exists."""
        path = None if self.data is None else self.data / name
        return path if path is not None and path.exists() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One value of a paper and ours.

    Attributes:
        where: Table or figure, and its cell.
        what: What is measured.
        paper: The paper's value; None: the paper shows it in a figure without a number.
        ours: Our value; None: it could not be computed, see the note.
        neutral: Value of no effect, 1 for a ratio, 0 for a change; None: the value has no direction.
        more: Other columns of ours, by heading.
        note: Reason for a difference that is specific to this row.
    """

    where: str
    what: str
    paper: float | None
    ours: float | None
    neutral: float | None = None
    more: Mapping[str, float | None] = field(default_factory=dict)
    note: str = ""

    @property
    def verdict(self) -> str:
        """Whether our value has the same direction as the paper's."""
        if self.neutral is None or self.ours is None or self.paper is None:
            return "-"
        ours, paper = (_direction(value, self.neutral) for value in (self.ours, self.paper))
        if ours == 0:
            return "same: no effect" if paper == 0 else "no effect"
        return "same" if ours == paper else "opposite" if paper else "paper: no effect"


def _direction(value: float, neutral: float) -> int:
    """1 above, -1 below, 0 within 3 % of the value of no effect (for a change in percent: within 3 points)."""
    if neutral == 0:
        return 0 if abs(value) <= 100 * (NO_EFFECT - 1) else int(math.copysign(1, value))
    ratio = value / neutral
    return 0 if 1 / NO_EFFECT <= ratio <= NO_EFFECT else 1 if ratio > 1 else -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A sentence of the paper, or a check of ours, in one case.

    Attributes:
        where: Section, table or figure with the sentence, the same for all cases.
        text: The sentence, quoted or closely paraphrased. Claims with the same text count once.
        holds: Whether it holds here.
        evidence: The numbers behind the verdict.
        case: Cell in which it is tested; empty: there is only one.
        cause: Why it fails, one sentence; shown if it does not hold.
        ours: Whether it is a check of ours, which the paper does not state; counted separately.
    """

    where: str
    text: str
    holds: bool
    evidence: str
    case: str = ""
    cause: str = ""
    ours: bool = False


@dataclass(slots=True)
class Findings:
    """Results of a study.

    Attributes:
        rows: Values.
        claims: Sentences of the paper, and checks of ours.
        notes: Paragraphs above the tables, about this run.
        size: Extent of the simulation relative to the full study, as text.
    """

    rows: list[Row] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    size: str = ""

    def row(
        self, where: str, what: str, ours: float | None, paper: float | None = None, **other: Any
    ) -> None:
        """Adds a `Row` with its other attributes."""
        self.rows.append(Row(where=where, what=what, paper=paper, ours=ours, **other))

    def claim(self, where: str, text: str, holds: bool, evidence: str, **other: Any) -> None:
        """Adds a sentence of the paper: a `Claim` with its other attributes."""
        self.claims.append(Claim(where=where, text=text, holds=holds, evidence=evidence, **other))

    def check(self, where: str, text: str, holds: bool, evidence: str, **other: Any) -> None:
        """Adds a check of ours, which the paper does not state; see `Claim`."""
        self.claim(where, text, holds, evidence, ours=True, **other)


def listed(values: Mapping[Any, float], form: str) -> str:
    """Names with their values in a format: "a 1.2 s, b 3.4 s"."""
    return ", ".join(f"{name} {form.format(value)}" for name, value in values.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One table or figure, or several that use the same simulations.

    Attributes:
        name: Short name, for the command line.
        paper: Short name of the paper.
        title: Heading.
        why: Reasons for differences from the paper, in paragraphs.
        paper_size: Extent of the paper's own measurement, for comparison with `Findings.size`.
        cost_s: Expected CPU seconds, quick and at scale 1 with 3 seeds.
        run: Runs the study.
        measures: Parts of the names of the measures that the page shows; all are in the data. Empty: all.
        columns: Names of the other columns (`Row.more`) that the page shows.
    """

    name: str
    paper: str
    title: str
    why: str
    paper_size: str = ""
    cost_s: tuple[float, float]
    run: Callable[[Effort], Findings]
    measures: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
