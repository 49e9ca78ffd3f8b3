"""The groups of answers that a study looks at."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scheduler_core.errors import InputError
from training.fitting.estimate import Sample
from training.fitting.families import FloatArray
from training.fitting.goodness import group_seed
from training.fitting.options import Censoring
from training.fitting.reading.blocks import BlockLimits, Grouping, read_blocks
from training.fitting.reading.formats import open_samples
from training.fitting.reading.table import GroupedLengths
from training.progress import tracked


@dataclass(frozen=True, slots=True)
class StudyGroups:
    """Answers of G groups, sorted within each.

    Attributes:
        path: File they came from.
        names: Of the groups, as a person would name them.
        sample: The answers as the fitter takes them.
        caps: Length at which a group's answers are cut, tokens, inf if none is and no cap is known, [G].
        num_in_file: Groups before any were left out.
    """

    path: Path
    names: list[str]
    sample: Sample
    caps: FloatArray
    num_in_file: int

    def __len__(self) -> int:
        return len(self.names)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Answers of each group, [G]."""
        return np.diff(self.sample.offsets)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """All answers, tokens, group after group, ascending in each; of a cut answer where it was cut, [S]."""
        return self.sample.keys >> 1

    @property
    def cut(self) -> NDArray[np.bool_]:
        """Whether each answer was cut, [S]."""
        return (self.sample.keys & 1).astype(bool)

    def take(self, rows: NDArray[np.integer]) -> StudyGroups:
        """The groups at these positions."""
        return StudyGroups(
            self.path,
            [self.names[row] for row in rows.tolist()],
            take_groups(self.sample, rows),
            self.caps[rows],
            self.num_in_file,
        )

    def random_order(self, seed: int, purpose: str) -> NDArray[np.int64]:
        """Positions in an order drawn by seed and the groups' names, whatever their order in the file, [G]."""
        ranks = np.array([group_seed(seed, f"{purpose}|{name}") for name in self.names], dtype=np.uint64)
        return np.argsort(ranks, kind="stable")


def take_groups(sample: Sample, rows: NDArray[np.integer]) -> Sample:
    """The groups of an unweighted sample at these positions."""
    counts = np.diff(sample.offsets)[rows]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    at = np.arange(offsets[-1]) + np.repeat(sample.offsets[:-1][rows] - offsets[:-1], counts)
    return Sample(sample.keys[at], sample.weights, offsets)


def read_groups(
    path: str | Path,
    *,
    keys: tuple[str, ...],
    max_tokens: int | None,
    censoring: Censoring,
    max_groups: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> StudyGroups:
    """Reads a file of answers in any form that `fit-dist` takes; holds the answers of the groups it keeps.

    Args:
        path: The file or folder.
        keys: Columns that name a group.
        max_tokens: Cap on all answers, as in `fit-dist`.
        censoring: "none" takes cut answers for ended ones.
        max_groups: At most so many groups, drawn by `seed`; None = all.
        progress: Whether to show it.

    Raises:
        InputError: As `open_samples` and `group_table`.
    """
    source = open_samples(path, keys=keys)
    with tempfile.TemporaryDirectory(prefix="study-lengths-") as work:
        blocks = read_blocks(source, Grouping(keys=keys, max_tokens=max_tokens), BlockLimits(), Path(work))
        parts: list[StudyGroups] = []
        for block in tracked(blocks, f"reading {source.path.name}", progress):
            parts.append(study_groups(block.load(), censoring))
            if max_groups is not None and sum(map(len, parts)) > 2 * max_groups:
                parts = [_drawn(joined(parts), max_groups, seed)]
        kept = joined(parts)
    if max_groups is not None:
        kept = _drawn(kept, max_groups, seed)
    require_groups(len(kept), kept, "group of answers")
    return kept


def _drawn(groups: StudyGroups, max_groups: int, seed: int) -> StudyGroups:
    if len(groups) <= max_groups:
        return groups
    return groups.take(np.sort(groups.random_order(seed, "groups")[:max_groups]))


def joined(parts: Sequence[StudyGroups]) -> StudyGroups:
    """Several sets of groups of one file as one."""
    counts = np.concatenate([part.counts for part in parts])
    sample = Sample(
        np.concatenate([part.sample.keys for part in parts]),
        parts[0].sample.weights,
        np.concatenate([[0], np.cumsum(counts)]),
    )
    return StudyGroups(
        parts[0].path,
        [name for part in parts for name in part.names],
        sample,
        np.concatenate([part.caps for part in parts]),
        sum(part.num_in_file for part in parts),
    )


def study_groups(groups: GroupedLengths, censoring: Censoring) -> StudyGroups:
    """Groups as the studies take them; those without any answer are left out."""
    some = groups.take(np.flatnonzero(groups.counts > 0))
    finished = some.flat_finished
    caps = np.full(len(some), np.inf)
    if censoring == "none":
        finished = np.ones_like(finished)
    elif len(some):
        longest_cut = np.maximum.reduceat(np.where(finished, 0, some.flat_lengths), some.offsets[:-1])
        known = np.array([0 if cap is None else cap for cap in some.max_tokens])
        limit = np.where(known > 0, known, longest_cut)
        caps[limit > 0] = limit[limit > 0]
    names = [some.name(group) for group in range(len(some))]
    sample = Sample.of(some.flat_lengths, finished, some.offsets)
    return StudyGroups(groups.path, names, sample, caps, len(groups))


def require_groups(count: int, groups: StudyGroups, what: str) -> None:
    """Raises InputError if no group is left to study."""
    if count == 0:
        raise InputError(f"{groups.path.name}, groups", len(groups), f"at least one {what}")
