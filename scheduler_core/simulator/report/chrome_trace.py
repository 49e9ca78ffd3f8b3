"""A run as a timeline for chrome://tracing, Perfetto and other readers of the Trace Event Format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scheduler_core.errors import InputError
from scheduler_core.files import atomic_file
from scheduler_core.simulator.records import RequestRecord
from scheduler_core.simulator.watch import LoadTimeline, RunWatch

_US = 1e6


def write_chrome_trace(watch: RunWatch, records: Sequence[RequestRecord], path: str | Path) -> None:
    """Writes the timeline: a process per replica, a row per request, counters of memory and requests.

    Args:
        watch: A watch with segments.
        records: The finished requests.
        path: Where to write, as JSON.

    Raises:
        InputError: The watch kept no segments.
    """
    if watch.segments is None:
        raise InputError("timeline", None, "a run that was watched with segments")
    replicas = {name: index for index, name in enumerate(watch.loads)}
    order = sorted(records, key=lambda one: (one.arrival_s, one.request_id))
    rows = {one.request_id: place for place, one in enumerate(order)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": index, "args": {"name": f"replica {name}"}}
        for name, index in replicas.items()
    ]
    events.extend(
        {
            "ph": "X",
            "name": one.kind,
            "cat": one.kind,
            "pid": replicas[one.replica_id],
            "tid": rows[one.request_id],
            "ts": one.start_s * _US,
            "dur": (one.end_s - one.start_s) * _US,
            "args": {"request_id": one.request_id, "tokens": one.num_tokens},
        }
        for one in watch.segments
    )
    events.extend(_waits(order, rows, replicas))
    for name, line in watch.loads.items():
        events.extend(_counters(replicas[name], line))
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _waits(
    order: Sequence[RequestRecord], rows: Mapping[str, int], replicas: Mapping[str, int]
) -> list[dict[str, Any]]:
    first = next(iter(replicas))
    return [
        {
            "ph": "X",
            "name": "waiting",
            "cat": "waiting",
            "pid": replicas[one.replica_id or first],
            "tid": rows[one.request_id],
            "ts": one.arrival_s * _US,
            "dur": one.queueing_delay_s * _US,
            "args": {"request_id": one.request_id},
        }
        for one in order
        if one.queueing_delay_s > 0
    ]


def _counters(pid: int, line: LoadTimeline) -> list[dict[str, Any]]:
    return [
        {
            "ph": "C",
            "name": name,
            "pid": pid,
            "ts": point.time_s * _US,
            "args": {name: value},
        }
        for point in line.points
        for name, value in (
            ("KV share", point.kv_share),
            ("running", point.num_running),
            ("waiting", point.num_waiting),
        )
    ]
