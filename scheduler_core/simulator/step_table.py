"""The table of steps of a run: one row per step of a replica, or per run of equal steps that was taken at once."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from scheduler_core.plan import StepPlan
from scheduler_core.simulator.column_file import Columns, stacked, write_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scheduler_core.scheduler import Scheduler

SCHEMA = "tailcast.simulated_steps/1"
_FLOATS = ("start_s", "end_s")
_COUNTS = (
    "num_steps",
    "num_decodes",
    "num_prefills",
    "num_prefill_tokens",
    "num_context_tokens",
    "num_swapped_tokens",
    "num_admitted",
    "num_preempted",
    "num_running",
    "num_waiting",
    "num_kv_blocks",
)


class StepTable:
    """Columns that grow by a row with every step, 104 bytes and the name of the replica.

    A row says, of steps taken at once, what each of them did: `num_decodes` requests got a token in each of the
    `num_steps` steps between `start_s` and `end_s`; `num_prefill_tokens` of `num_prefills` requests were processed;
    `num_context_tokens` is what the first of them read from the cache. `num_running`, `num_waiting` (the length of the
    queue) and `num_kv_blocks` (blocks in use) are as of the end.
    """

    def __init__(self) -> None:
        self._floats = {name: array("d") for name in _FLOATS}
        self._counts = {name: array("q") for name in _COUNTS}
        self._replicas: list[str] = []
        self._num_blocks: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._replicas)

    def add(
        self, replica_id: str, span: tuple[float, float], num_steps: int, plan: StepPlan, after: Scheduler
    ) -> None:
        """A step is done.

        Args:
            replica_id: Whose.
            span: Start and end in seconds.
            num_steps: How often the plan was carried out.
            plan: What was done.
            after: The scheduler, which knows already.
        """
        self._replicas.append(replica_id)
        self._num_blocks[replica_id] = after.config.num_kv_blocks
        for name, value in zip(_FLOATS, span, strict=True):
            self._floats[name].append(value)
        counts = (
            num_steps,
            len(plan.decodes),
            len(plan.prefills),
            plan.num_prefill_tokens,
            plan.num_context_tokens,
            plan.num_swapped_tokens,
            len(plan.admitted),
            len(plan.preempted),
            after.num_running,
            after.num_waiting,
            after.config.num_kv_blocks - after.num_free_kv_blocks,
        )
        for name, count in zip(_COUNTS, counts, strict=True):
            self._counts[name].append(count)

    def columns(self, seed: int) -> Columns:
        """Columns [n] in the order in which the steps ended: the seed, the replica, what `add` was told, and
        `step_s` (mean duration of one step), `batch_size` (requests in it), `num_tokens` (tokens it processed) and
        `kv_share` (share of the KV blocks in use at its end)."""
        floats = {name: np.array(values, np.float64) for name, values in self._floats.items()}
        counts = {name: np.array(values, np.int64) for name, values in self._counts.items()}
        blocks = np.array([self._num_blocks[name] for name in self._replicas], np.float64)
        return {
            "seed": np.full(len(self), seed, np.int64),
            "replica_id": np.array(self._replicas, object),
            **floats,
            **counts,
            "step_s": (floats["end_s"] - floats["start_s"]) / counts["num_steps"],
            "batch_size": counts["num_decodes"] + counts["num_prefills"],
            "num_tokens": counts["num_decodes"] + counts["num_prefill_tokens"],
            "kv_share": counts["num_kv_blocks"] / blocks,
        }


def write_steps(parts: Sequence[Columns], path: str | Path) -> None:
    """Writes the tables of one or several seeds as one, as Parquet, CSV or JSON lines by the name's ending.

    Raises:
        InputError: See `check_table_path`.
    """
    write_columns(stacked(parts), path, SCHEMA, "steps")
