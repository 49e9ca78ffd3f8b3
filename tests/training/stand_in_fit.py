"""Fits that only count, in a file of their own: what a worker process has to import is little."""

import os
import signal

import numpy as np
import pyarrow as pa

from scheduler_core.errors import InputError


def mean_lengths(groups, options=None, log=None, stop_at=None, how=signal.SIGKILL):
    """Stands in for a fit. `log` names its groups; at group `stop_at` it ends its own process."""
    names = [groups.name(number) for number in range(len(groups))]
    if log is not None:
        with open(log, "a", encoding="utf-8") as stream:
            stream.writelines(f"{name}\n" for name in names)
    if stop_at in names:
        if how is KeyboardInterrupt:
            raise KeyboardInterrupt
        if how is InputError:
            raise InputError("nu", 0, "more")
        os.kill(os.getppid() if how == "parent" else os.getpid(), signal.SIGKILL)
        signal.pause()
    sums = np.add.reduceat(np.append(groups.flat_lengths, 0), groups.offsets[:-1])
    sums[groups.counts == 0] = 0
    table = groups.rows.append_column("total", pa.array(sums))
    table = table.append_column("num_samples", pa.array(groups.counts))
    return table.replace_schema_metadata({"kind": "totals"})
