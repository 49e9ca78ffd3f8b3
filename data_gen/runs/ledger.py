"""Which answers a run has: one byte for each (prompt, sample index), filled from the shards and kept up to date."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_gen.runs.records import PROMPT, RESULT, Damage, Record, read_records, result_indices
from data_gen.runs.survey import Survey, fingerprint
from scheduler_core.errors import InputError

log = logging.getLogger(__name__)

MISSING, DONE, FAILED, GIVEN_UP = range(4)


class Ledger:
    """The state of every answer of a run.

    Attributes:
        state: [prompts, samples], uint8: MISSING, DONE, FAILED (may be tried again) or GIVEN_UP.
        stored: [prompts], bool: whether a shard holds the prompt itself.
        num_surplus: Answers in the shards to prompts beyond the present ones.
        damage: What could not be read.
    """

    def __init__(self, prompts: Survey, num_samples: int) -> None:
        self._fingerprints = prompts.fingerprints
        self.state: NDArray[np.uint8] = np.zeros((len(prompts), num_samples), np.uint8)
        self.stored: NDArray[np.bool_] = np.zeros(len(prompts), np.bool_)
        self.num_surplus = 0
        self.damage = Damage()

    def load(self, shards: Iterable[Path]) -> None:
        """Takes in what earlier processes have done; failures are forgotten, so they are tried again.

        Records of prompts beyond the present ones are passed over: the source may have become shorter.

        Raises:
            InputError: A shard has another prompt at a position than the source.
        """
        for shard in shards:
            for record in read_records(shard, self.damage):
                self._take(record)
        if self.damage.num_lines:
            log.warning(
                "%d damaged or torn records (%d bytes) are left out; their answers are asked for again",
                self.damage.num_lines,
                self.damage.num_bytes,
            )

    def _take(self, record: Record) -> None:
        known = record.position < len(self.stored)
        if record.kind == RESULT:
            answered, _ = result_indices(record.payload)
            if not known:
                self.num_surplus += len(answered)
            elif self.stored[record.position]:
                # Without its prompt, which a damaged record may have held, a result is asked for again.
                self.state[record.position, answered] = DONE
        elif record.kind == PROMPT and known:
            found = json.loads(record.payload)
            if fingerprint(found["prompt_id"], found["prompt_sha256"]) != self._fingerprints[record.position]:
                raise InputError(
                    "prompts",
                    f"another prompt at position {record.position}",
                    f"the prompts of the interrupted run in their order, {found['prompt_id']!r} there; or another --out",
                )
            self.stored[record.position] = True

    def matches(self, position: int, prompt_id: str, sha256: str) -> bool:
        """Whether the source has this prompt at this position."""
        return position < len(self.stored) and fingerprint(prompt_id, sha256) == self._fingerprints[position]

    def open_indices(self, position: int) -> tuple[int, ...]:
        """The sample indices that are missing or may be tried again, increasing."""
        row = self.state[position]
        return tuple(int(index) for index in np.flatnonzero((row == MISSING) | (row == FAILED)))

    def count(self, *states: int) -> int:
        """How many answers are in one of these states."""
        return int(np.isin(self.state, states).sum())
