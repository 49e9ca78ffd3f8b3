"""Policies for agents' sessions whose contexts exceed the KV memory, in the simulator, on recorded sessions.

    python -m benchmarks.agents DATA [--sessions held_out] [--seeds 5] [--minutes 40] [--jobs 2] [--quick]
                                     [--runs FOLDER] [--markdown PAGE] [--plot FILE.svg]

DATA is a table (Parquet) of recorded sessions, see `scheduler_core.simulator.workloads.agents`. The policy was chosen on two
thirds of the sessions (`is_development` of `benchmarks.correcting.agent_sessions`), the default; held_out: the others.

A number of sessions run in a closed loop: a turn arrives a recorded pause (at most 60 s) after the end of the turn before it,
and after its last turn the next session takes a session's place. Engine: a step takes 12 ms, 1 / 30,000 s per token of a
prompt, .25 ms per decode; chunks of 4,096 tokens, 64 slots, blocks of 64 tokens. With a host tier, a context that was evicted
comes back at 5 times the speed of its prefill. The tables show each combination of KV memory and number of sessions, and 8
replicas with 8 times the sessions behind routers.

No policy knows an output: all have the same predicted length, `SessionPredictor` without data. True returns: the working set
with the recorded pauses in place of predictions, a bound.

Values are ratios to FCFS with the same seed; mean and half of the 95 % interval over seeds. Turns: ended ones per second.
TTFT: of turns that ended. Longest wait: also of turns that still wait at the end. Jain's index: of the numbers of turns of
the sessions, each with those that follow it. Sessions: those that ended. Hits: prompt tokens found in the KV cache (not in
host memory). Contexts: of all sessions under FCFS, as a multiple of the KV memory. Ended runs are stored in `--runs`; remove
it after a change of code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.agents.page import FCFS, HRRN, OURS, Setting, Values, plot, tables
from benchmarks.agents.simulated import NUM_SESSIONS, QUICK, run_setting, settings
from benchmarks.correcting.agent_sessions import is_development
from benchmarks.shared.command import Parser
from benchmarks.shared.pages import put_section
from scheduler_core.errors import InputError

PLOTTED = (OURS, FCFS, HRRN, "longest_prefix", "uniboost_uncached", "thunder_agent", "continuum")


def run_all(data: Path, options: Any) -> dict[Setting, dict[str, Values]]:
    """Values of all settings: stored ones, and new ones, which are then stored."""
    folder: Path = options.runs / f"{data.stem}-{options.sessions}-{options.minutes:g}"
    folder.mkdir(parents=True, exist_ok=True)
    file, ended_runs = folder / "sessions.parquet", folder / "runs.jsonl"
    if not file.exists():
        table = pq.read_table(data)
        part = [
            is_development(name) == (options.sessions == "development")
            for name in table["session"].to_pylist()
        ]
        pq.write_table(table if options.sessions == "all" else table.filter(pa.array(part)), file)
    all_settings = settings(options.seeds, options.quick)
    runs: dict[Setting, dict[str, Values]] = {}
    for line in ended_runs.read_text().splitlines() if ended_runs.exists() else ():
        row = json.loads(line)
        if (setting := Setting(**row["setting"])) in all_settings:
            runs[setting] = row["values"]
    jobs = [(str(file), setting, options.minutes) for setting in all_settings if setting not in runs]
    if options.only_ended:
        return runs
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool, ended_runs.open("a") as lines:
        futures = [pool.submit(run_setting, *job) for job in jobs]
        for future in as_completed(futures):
            setting, values = future.result()
            runs[setting] = values
            print(json.dumps({"setting": asdict(setting), "values": values}), file=lines, flush=True)
            print(f"{len(runs)} of {len(all_settings)} settings", file=sys.stderr, flush=True)
            num_left = min(each["left"] for each in values.values())
            if num_left < 1:
                print(f"{setting}: some sessions ran out of turns", file=sys.stderr)
    return runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; 2 if DATA is invalid."""
    parser = Parser(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--sessions", choices=("development", "held_out", "all"), default="development")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a few sessions, one seed, one replica")
    parser.add_argument("--runs", type=Path, default=Path("out/agents"), help="folder of ended runs")
    parser.add_argument("--only_ended", action="store_true", help="only show ended runs")
    parser.add_argument("--markdown", type=Path, help="page whose tables are replaced")
    parser.add_argument("--plot", type=Path, help="SVG file")
    options = parser.parse_args(arguments)
    try:
        runs = run_all(options.data, options)
    except (InputError, OSError, pa.ArrowInvalid) as error:
        print(error, file=sys.stderr)
        return 2
    text = tables(runs)
    print(text)
    if options.markdown:
        put_section(options.markdown, "agents", text)
    if options.plot and runs:
        plot(options.plot, runs, QUICK[1][0] if options.quick else NUM_SESSIONS[1], PLOTTED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
