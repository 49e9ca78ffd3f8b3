"""Validation of the simulator against Vidur, per request: same arrivals, lengths, scheduler and step times.

    python -m benchmarks.simulator.vidur DIR [--case NAME ...]
    python -m benchmarks.simulator.vidur DIR --case NAME --cut 60 FOLDER

DIR holds a folder per case (input.parquet, output.parquet, summary.json with the arguments of Vidur's run)
and cost_tables/ with a folder per profile. Prints, for each case, the largest differences of first-token
times, completion times, iterations and restarts. Rules: microsoft/vidur @ 7d47513. --cut writes the first
requests of a case and the rows of the cost tables that they need, as a test case.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_core.policies import make_policy
from scheduler_core.routing import make_router
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.loop import Simulation, SimulationOutcome
from scheduler_core.simulator.predictions import Predictions
from scheduler_core.simulator.step_time.operator_table import (
    TOKEN_OPERATORS,
    OperatorTable,
    read_operator_table,
)
from scheduler_core.simulator.trace import Trace, TraceRequest

#: By model: number of layers, and whether it has grouped-query attention (batches then cost 10 % more).
MODELS = {
    "meta-llama/Llama-2-7b-hf": (32, False),
    "meta-llama/Llama-2-70b-hf": (80, True),
    "meta-llama/Meta-Llama-3-8B": (32, True),
}
BATCHING_OVERHEAD = 0.1


#: Vidur's arguments for Sarathi with chunks of 512, from its examples.
SARATHI = {
    "replica_scheduler_config_type": "sarathi",
    "sarathi_scheduler_config_batch_size_cap": "128",
    "sarathi_scheduler_config_chunk_size": "512",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One run of Vidur.

    Attributes:
        name: Name of the case.
        trace: Arrivals.
        limits: Limits of each replica.
        num_replicas: Replicas, behind "least outstanding requests" if there are several.
        model: Name of the model.
        tensor_parallel: Devices per replica.
        profile: Folder of cost tables.
        rows: Vidur's results for each request.
        num_iterations: Vidur's number of iterations.
    """

    name: str
    trace: Trace
    limits: SchedulerConfig
    num_replicas: int
    model: str
    tensor_parallel: int
    profile: str
    rows: list[dict[str, Any]]
    num_iterations: int


def read_case(folder: Path) -> Case:
    """Reads input, output and arguments of a Vidur run."""
    import pyarrow.parquet as pq  # here, so that memory measurements can avoid it

    summary = json.loads((folder / "summary.json").read_text())
    names = [name.removeprefix("--") for name in summary["args"][::2]]
    arguments = dict(zip(names, summary["args"][1::2], strict=True))
    rows = pq.read_table(folder / "input.parquet").to_pylist()
    return Case(
        name=folder.name,
        trace=trace_of(rows),
        limits=limits_of(arguments, int(summary["num_blocks"])),
        num_replicas=int(arguments["cluster_config_num_replicas"]),
        model=arguments["replica_config_model_name"],
        tensor_parallel=int(arguments.get("replica_config_tensor_parallel_size", 1)),
        profile=arguments["metrics_config_cache_dir"],
        rows=pq.read_table(folder / "output.parquet").to_pylist(),
        num_iterations=summary["batches"],
    )


def trace_of(rows: Sequence[dict[str, Any]]) -> Trace:
    """A trace from rows with id, arrived_at, prompt_tokens and output_tokens."""
    return Trace(
        tuple(
            TraceRequest(
                request_id=str(row["id"]),
                arrival_s=float(row["arrived_at"]),
                prompt_tokens=int(row["prompt_tokens"]),
                output_tokens=int(row["output_tokens"]),
                max_tokens=int(row["output_tokens"]),
            )
            for row in rows
        )
    )


def limits_of(arguments: dict[str, str], num_blocks: int) -> SchedulerConfig:
    """Converts the limits and rules of a Vidur run for our scheduler."""
    parameters: dict[str, bool | int | float | str] = {"spare_block": True}
    kind = arguments["replica_scheduler_config_type"]
    max_num_seqs = int(arguments[f"{kind}_scheduler_config_batch_size_cap"])
    if kind == "vllm":
        budget = int(arguments["vllm_scheduler_config_max_tokens_in_batch"])
        batching = "vllm"
        parameters["padded"] = True
    else:
        chunk = int(arguments["sarathi_scheduler_config_chunk_size"])
        budget = max_num_seqs + chunk
        batching = "chunked_prefill"
        parameters["chunk_tokens"] = chunk
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        num_kv_blocks=num_blocks,
        batching=batching,
        batching_parameters=parameters,
    )


def table_of(case: Case, tables: Path) -> OperatorTable:
    """Step times of a case."""
    layers, grouped = MODELS[case.model]
    return read_operator_table(
        tables / case.profile,
        num_layers=layers,
        tensor_parallel=case.tensor_parallel,
        batching_overhead=BATCHING_OVERHEAD if grouped else 0.0,
    )


def simulate(case: Case, table: OperatorTable, *, exact_steps: bool = False) -> SimulationOutcome:
    """Simulates a case."""
    schedulers = {
        str(index): Scheduler(case.limits, make_policy("fcfs")) for index in range(case.num_replicas)
    }
    router = make_router("jsq", {"waiting_only": True}) if case.num_replicas > 1 else None
    return Simulation(case.trace, schedulers, table, Predictions(), router, exact_steps=exact_steps).run()


@dataclass(frozen=True, slots=True)
class Errors:
    """Largest differences from Vidur.

    Attributes:
        first_token_s: Difference of a first-token time, in seconds.
        finish_s: Difference of a completion time, in seconds.
        num_iterations: Difference of the number of iterations.
        num_restarts: Difference of the number of restarts of a request.
    """

    first_token_s: float
    finish_s: float
    num_iterations: int
    num_restarts: int


def errors(case: Case, out: SimulationOutcome) -> Errors:
    """Compares a run with Vidur's; the run must contain every request of the case."""
    expected = {str(row["id"]): row for row in case.rows}
    records = {record.request_id: record for record in out.records}
    assert records.keys() == expected.keys(), "requests are missing"
    pairs = [(records[name], row) for name, row in expected.items()]
    return Errors(
        max(abs(record.first_token_s - row["prefill_completed_at"]) for record, row in pairs),
        max(abs(record.finish_s - row["completed_at"]) for record, row in pairs),
        out.num_steps - case.num_iterations,
        max(abs(record.num_preemptions - row["num_restarts"]) for record, row in pairs),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WatchedTable(OperatorTable):
    """Records which entries are used.

    Attributes:
        used: Indices of the entries by table.
    """

    used: dict[str, set[tuple[int, int]]] = field(default_factory=dict)

    def _tokens(self, num_tokens: int) -> float:
        self.used.setdefault("tokens", set()).add((num_tokens, 0))
        return OperatorTable._tokens(self, num_tokens)

    def _attention(self, table: Any, rows: Any, index: tuple[int, int], num: int, what: Any) -> float:
        self.used.setdefault("decode" if table is self.decode_s else "prefill", set()).add(index)
        return OperatorTable._attention(self, table, rows, index, num, what)


def cut(case: Case, tables: Path, num: int, folder: Path) -> None:
    """Writes the first requests of a case, and the rows of the cost tables that they need."""
    whole = table_of(case, tables)
    table = WatchedTable(
        **{item.name: getattr(whole, item.name) for item in fields(OperatorTable) if item.init}
    )
    head = Trace(case.trace.requests[:num])
    core = Scheduler(case.limits, make_policy("fcfs"))
    Simulation(head, core, table, Predictions(), exact_steps=True).run()
    folder.mkdir(parents=True, exist_ok=True)
    names = ("id", "arrived_at", "prompt_tokens", "output_tokens", "prefill_completed_at", "completed_at")
    _write(folder / "requests.csv", names, [[row[name] for name in names] for row in case.rows[: num + 1]])
    used = {name: sorted(entries) for name, entries in table.used.items()}
    exact = {tokens for tokens, _ in used["tokens"]}
    rounded = {-(-tokens // 8) * 8 for tokens in exact}
    source = tables / case.profile
    for operator in (*TOKEN_OPERATORS, "attn_kv_cache_save"):
        keys = exact if operator == "attn_kv_cache_save" else rounded
        _copy(source, folder, operator, {(str(key),) for key in keys | {max(rounded)}})
    _copy(source, folder, "attn_decode", {(str(num), str(column * 64)) for num, column in used["decode"]})
    _copy(source, folder, "attn_prefill", {(str(row * 64), str(size**2)) for row, size in used["prefill"]})


def _copy(source: Path, folder: Path, operator: str, keys: set[tuple[str, ...]]) -> None:
    with gzip.open(source / f"{operator}.csv.gz", "rt", newline="") as stream:
        head, *rows = list(csv.reader(stream))
    _write(folder / f"{operator}.csv", head, [row for row in rows if tuple(row[:-1]) in keys])


def _write(path: Path, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(head)
        writer.writerows(rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--case", nargs="*", default=None)
    parser.add_argument("--cut", nargs=2, metavar=("NUM", "FOLDER"))
    options = parser.parse_args(argv)
    folders = sorted(path.parent for path in options.directory.glob("*/summary.json"))
    cases = [read_case(path) for path in folders if options.case is None or path.name in options.case]
    tables = options.directory / "cost_tables"
    if options.cut:
        cut(cases[0], tables, int(options.cut[0]), Path(options.cut[1]))
        return
    print("| case | requests | first token, s | completion, s | iterations | restarts |")
    print("|---|---|---|---|---|---|")
    for case in cases:
        records = errors(case, simulate(case, table_of(case, tables)))
        print(
            f"| {case.name} | {len(case.trace)} | {records.first_token_s:.1e} | {records.finish_s:.1e} "
            f"| {records.num_iterations:+d} of {case.num_iterations} | {records.num_restarts:+d} |"
        )


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
