"""Validation of the simulator against Vidur, per request: same arrivals, lengths, scheduler and step times.

    python -m benchmarks.simulator.vidur DIR [--case NAME ...]

DIR holds a folder per case (input.parquet, output.parquet, summary.json with the arguments of Vidur's run)
and cost_tables/ with a folder per profile. Prints, for each case, the largest differences of first-token
times, completion times, iterations and restarts. Rules: microsoft/vidur @ 7d47513.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.command import Parser
from scheduler_core.policies import make_policy
from scheduler_core.report.page import markdown_table
from scheduler_core.routing import make_router
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.loop import Simulation, SimulationOutcome
from scheduler_core.simulator.step_time.operator_table import OperatorTable, read_operator_table
from scheduler_core.simulator.trace import Trace, TraceRequest
from scheduler_core.simulator.trace_predictions import Predictions

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


def trace_of(rows: Iterable[dict[str, Any]]) -> Trace:
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
    kind = arguments["replica_scheduler_config_type"]
    max_num_seqs = int(arguments[f"{kind}_scheduler_config_batch_size_cap"])
    parameters: dict[str, bool | int | float | str]
    if kind == "vllm":
        budget, parameters = int(arguments["vllm_scheduler_config_max_tokens_in_batch"]), {"padded": True}
    else:
        chunk = int(arguments["sarathi_scheduler_config_chunk_size"])
        budget, parameters = max_num_seqs + chunk, {"chunk_tokens": chunk}
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        num_kv_blocks=num_blocks,
        batching="vllm" if kind == "vllm" else "chunked_prefill",
        batching_parameters={"spare_block": True, **parameters},
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args(argv)
    rows = []
    for path in sorted(path.parent for path in options.directory.glob("*/summary.json")):
        case = read_case(path)
        most = errors(case, simulate(case, table_of(case, options.directory / "cost_tables")))
        cells = (f"{most.first_token_s:.1e}", f"{most.finish_s:.1e}")
        num_iterations = f"{most.num_iterations:+d} of {case.num_iterations}"
        rows.append((case.name, str(len(case.trace)), *cells, num_iterations, f"{most.num_restarts:+d}"))
    header = ("case", "requests", "first token, s", "completion, s", "iterations", "restarts")
    print(markdown_table(header, rows))


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
