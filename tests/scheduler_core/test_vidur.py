"""The simulator against Vidur (microsoft/vidur @ 7d47513): the same requests, scheduler and cost tables, the same times.

The whole reference runs are checked where the environment variable TAILCAST_VIDUR_RUNS names their folder.
"""

import csv
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulator import plain_loop, vidur
from benchmarks.simulator.vidur import SARATHI, Case, limits_of, simulate
from scheduler_core.simulator.step_time.operator_table import OperatorTable, read_operator_table

CUT = Path(__file__).parent / "vidur_cut"
RUNS = os.environ.get("TAILCAST_VIDUR_RUNS")
VLLM = {"replica_scheduler_config_type": "vllm", "vllm_scheduler_config_batch_size_cap": "128"}
VLLM["vllm_scheduler_config_max_tokens_in_batch"] = "4096"


def cut_case(num_blocks: int = 30_208) -> tuple[Case, OperatorTable]:
    """The first requests of a run with 1,024, Llama-3-8B and Sarathi with chunks of 512."""
    with (CUT / "requests.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    limits = limits_of(SARATHI, num_blocks)
    table = read_operator_table(CUT, num_layers=32, batching_overhead=0.1)
    return Case("cut", vidur.trace_of(rows[:-1]), limits, 1, "", 1, "", list(rows), 0), table


@pytest.mark.parametrize("exact_steps", [False, True])
def test_the_first_requests_of_a_run_have_vidurs_times(exact_steps: bool) -> None:
    case, table = cut_case()
    found = {record.request_id: record for record in simulate(case, table, exact_steps=exact_steps).records}
    # From the next request's arrival on, Vidur's times depend on requests that are not in the cut.
    until_s = float(case.rows[-1]["arrived_at"])
    compared = 0
    for row in case.rows[:-1]:
        record = found[row["id"]]
        for ours, name in ((record.first_token_s, "prefill_completed_at"), (record.finish_s, "completed_at")):
            if float(row[name]) <= until_s:
                assert ours == pytest.approx(float(row[name]), abs=1e-9)
                compared += 1
    assert compared > 90


@pytest.mark.parametrize("num_blocks", [30_208, 420])
@pytest.mark.parametrize("given", [SARATHI, VLLM], ids=["sarathi", "vllm"])
def test_memory_and_restarts_are_those_of_an_independent_loop(given: dict[str, str], num_blocks: int) -> None:
    case, table = cut_case(num_blocks)
    # Every size gets a time, as fewer blocks and other batches need sizes that the cut has no rows for.
    decode_s = 1e-6 * np.arange(129)[:, None] * np.arange(65)[None, :] + 2e-5
    prefill_s = 1e-7 * (np.arange(65)[:, None] * 64 + np.arange(4097)[None, :])
    table = replace(table, tokens_s=np.arange(4097) * 1e-6 + 2e-4, decode_s=decode_s, prefill_s=prefill_s)
    case = replace(case, limits=limits_of(given, num_blocks))
    requests = [(row.arrival_s, row.prompt_tokens, row.output_tokens) for row in case.trace.requests]
    kind = given["replica_scheduler_config_type"]
    options = {"budget": 512 if kind == "sarathi" else 4096, "num_blocks": num_blocks}
    expected = plain_loop.simulate(requests, table, scheduler=kind, **options)
    out = simulate(case, table)
    for record in out.records:
        times = expected[int(record.request_id)]
        assert (record.first_token_s, record.finish_s) == pytest.approx(times, abs=1e-9)
    restarts = sum(record.num_preemptions for record in out.records)
    assert (len(out.records), restarts > 3) == (len(requests), num_blocks < 1000)


@pytest.mark.slow
@pytest.mark.skipif(RUNS is None, reason="TAILCAST_VIDUR_RUNS does not name the folder of the reference runs")
def test_every_request_of_every_run_has_vidurs_times() -> None:
    folders = sorted(path.parent for path in Path(RUNS or "").glob("*/summary.json"))
    assert folders
    for folder in folders:
        case = vidur.read_case(folder)
        table = vidur.table_of(case, folder.parent / "cost_tables")
        found = vidur.errors(case, simulate(case, table))
        assert max(found.first_token_s, found.finish_s) < 1e-9, (folder.name, found)
        assert (found.num_iterations, found.num_restarts) == (0, 0), (folder.name, found)
