"""vLLM on this machine: our policies and vLLM's own on the same requests, and the simulator's prediction.

    make quickstart vllm-env
    python -m benchmarks.vllm.serving --exclude out/quickstart/samples.parquet [--markdown benchmarks/results/vllm.md] [--quick]

vLLM's OpenAI server gets chats over HTTP in an open loop (Poisson) at fractions of its measured capacity. All
sides get the same requests at the same times; order and times differ between repetitions. Each request has
its own sampling seed, so that its output is the same in every run (except for rounding; the fraction that
differs is reported) and ends where the model ends it. `max_tokens`, which policies may use, stays at the same
limit: fixing the lengths by `max_tokens` would reveal them to the policies.

| side | what |
| --- | --- |
| fcfs | vLLM without changes |
| bounded_shortest, tie, ssjf | our scheduler in vLLM, with predictions from a running prediction service |
| oracle | our scheduler with ssjf and the output lengths of the first run |

In the first run all requests are present from the start. It yields the capacity and the output lengths: the
oracle uses them, and short and long outputs are distributed evenly over the arrivals. Only this run is used
to fit the simulator's step times. Later runs use the engine clock, which counts seconds of a machine as fast
as in the first run, from the fitted and the actual duration of each step. Arrivals follow it, and latencies
are reported in engine time and in wall-clock time: the speed of a shared machine changes by a tenth within
minutes, and at 1.2 times the capacity 1 % more time per step means about 4 % more latency. The engine clock
also hides the cost of a scheduler or predictor, so the table also has the throughput in wall-clock time and
the seconds of scheduling.

All sides run at each load, repetition by repetition. Every run is a file, and the table is written after each (OUT/table.md), so that an interrupted benchmark has complete
pairs and can be resumed. A second call with more repetitions, or with fewer sides, adds to the same table.
Each engine starts once; idle engines are paused with SIGSTOP, because five idle vLLMs make the sixth up to a
fifth slower.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.shared.command import Parser
from benchmarks.shared.pages import put_section
from benchmarks.shared.processes import command_ports
from benchmarks.vllm.client import send_all
from benchmarks.vllm.clock import EngineClock
from benchmarks.vllm.page import report
from benchmarks.vllm.plan import CAPACITY, SIDES, Ask, Cell, asks, cells
from benchmarks.vllm.results import calibrated, measured_capacity, run_metrics
from benchmarks.vllm.server import MODEL, EngineServer, StepTail, engine_server, run_engines
from data_gen.sources.open import open_prompts
from scheduler_core.errors import InputError
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.shell.files import write_json
from scheduler_core.simulator.trace import Trace, TraceRequest
from scheduler_core.simulator.trace_predictions import ORACLE_NU, ORACLE_SIGMA, fetch_predictions

SECTION = "vllm cpu"


@dataclass(slots=True)
class Bench:
    """Runs the missing cells of the plan.

    Attributes:
        options: Parsed options.
        prompts: Prompts of all runs.
        address: Address of the prediction service.
        stack: Closes what has been started.
        engines: Running engines by side.
    """

    options: argparse.Namespace
    prompts: list[str]
    address: str
    stack: ExitStack
    engines: dict[str, EngineServer] = field(default_factory=dict)

    def run(self, cell: Cell) -> None:
        """Runs one cell and writes its file."""
        options = self.options
        rate, lengths, clock = None, None, EngineClock()
        if cell.load is not None:
            measured = self._capacity_run()
            rate = cell.load * measured_capacity(measured["requests"], options.max_num_seqs)
            lengths, clock = self.lengths(), EngineClock(calibrated(measured["steps"]).step_time)
        engine = self._engine(cell.side)
        rows = asks(
            self.prompts, cell.repetition, rate, options.max_tokens, options.seed, lengths, cell.bursts
        )
        run = send_all(engine.url, MODEL, rows, options.temperature, clock, StepTail(engine.steps))
        write_json(cell.file(options.out), run)
        metrics = run_metrics(run["requests"])
        name = cell.file(options.out).stem
        print(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in metrics.items()), flush=True)

    def lengths(self) -> list[int]:
        """Output tokens by prompt in the capacity run."""
        lengths_by_id = {row["request_id"]: row["output_tokens"] for row in self._capacity_run()["requests"]}
        return [int(lengths_by_id[f"q{number}"]) for number in range(len(self.prompts))]

    def _capacity_run(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(CAPACITY.file(self.options.out).read_text(encoding="utf-8"))
        return content

    def _engine(self, name: str) -> EngineServer:
        for engine in self.engines.values():
            engine.process.pause()
        if name in self.engines:
            self.engines[name].process.resume()
        else:
            options = self.options
            settings = None if name == "fcfs" else self._settings(name)
            python, model, slots = options.vllm_python, options.model, options.max_num_seqs
            start = engine_server(python, model, options.out, name, max_num_seqs=slots, settings=settings)
            self.engines[name] = engine = self.stack.enter_context(start)
            rows, tail = warm_up(3 * slots), StepTail(engine.steps)
            send_all(engine.url, MODEL, rows, options.temperature, EngineClock(), tail)
        return self.engines[name]

    def _settings(self, name: str) -> dict[str, Any]:
        if name != "oracle":
            return {"policy": name, "predictor": f"grpc://{self.address}"}
        table = self.options.out / "oracle.table.json"
        lengths_by_id = zip(self.prompts, self.lengths(), strict=True)
        write_json(
            table, {prompt: [math.log(length), ORACLE_SIGMA, ORACLE_NU] for prompt, length in lengths_by_id}
        )
        return {"policy": "ssjf", "predictor": f"table://{table.resolve()}"}


def warm_up(count: int) -> list[Ask]:
    """Short simultaneous requests of different lengths, so that every number of running requests occurs."""
    return [
        Ask(f"w{number}", f"Name {number + 30} rivers.", 0.0, number, 4 + 2 * (number % 16))
        for number in range(count)
    ]


def predict(options: argparse.Namespace, prompts: Sequence[str], address: str) -> None:
    """Requests predictions for all prompts once, for the simulator."""
    path = options.out / "predictions.json"
    if path.exists():
        return
    rows = tuple(
        TraceRequest(
            request_id=f"q{number}", arrival_s=0.0, prompt_tokens=1, output_tokens=1,
            max_tokens=options.max_tokens, prompt=prompt,
        )
        for number, prompt in enumerate(prompts)
    )  # fmt: skip
    content = fetch_predictions(Trace(rows), f"grpc://{address}")
    lengths_by_id = {}
    for name, prediction in content.by_id.items():
        if prediction is not None and prediction.length is not None:
            length = prediction.length
            lengths_by_id[name] = [length.mu, length.sigma, length.nu]
    if len(lengths_by_id) < len(rows):
        raise InputError(
            "artifact", str(options.artifact), f"an artifact that predicts every prompt ({content.errors})"
        )
    write_json(path, lengths_by_id)


def main(args: Sequence[str] | None = None) -> int:
    """Runs the missing cells and prints the table; returns 2 if a requirement is missing."""
    options = _parser().parse_args(args)
    if options.quick:
        options.num_prompts, options.repetitions, options.max_tokens, options.max_num_seqs = 20, 1, 32, 4
        options.loads, options.burst_loads, options.sides = [1.2], [], ["fcfs", "bounded_shortest"]
    return run_engines(_run, options, "artifact")


def _run(options: argparse.Namespace) -> int:
    if options.sides[0] != "fcfs":
        raise InputError("sides", options.sides, "fcfs first, because the others are compared with it")
    if options.num_prompts <= 2 * options.max_num_seqs:
        raise InputError("num_prompts", options.num_prompts, "more than twice max_num_seqs")
    prompts = _prompts(options)
    options.out.mkdir(parents=True, exist_ok=True)
    _same_as_before(options, prompts)
    plan = cells(_loads(options), options.repetitions, options.sides)
    missing = [cell for cell in plan if not cell.file(options.out).exists()]
    with ExitStack() as stack:
        _, [port, *_] = stack.enter_context(command_ports("serve_predictor", str(options.artifact)))
        address = f"127.0.0.1:{port}"
        predict(options, prompts, address)
        bench = Bench(options, prompts, address, stack)
        for cell in missing:
            bench.run(cell)
            (options.out / "table.md").write_text(_table(options), encoding="utf-8")
    print(_table(options))
    if options.markdown:
        put_section(options.markdown, SECTION, _table(options))
    return 0


def _prompts(options: argparse.Namespace) -> list[str]:
    texts = [prompt.text for prompt in open_prompts(options.prompts)]
    excluded = {text for path in options.exclude for text in _texts(path)}
    content = [text for text in dict.fromkeys(texts) if text not in excluded][: options.num_prompts]
    if len(content) < options.num_prompts:
        raise InputError(
            "prompts", options.prompts, f"at least {options.num_prompts} prompts that are not in --exclude"
        )
    return content


def _table(options: argparse.Namespace) -> str:
    lengths_by_id = json.loads((options.out / "predictions.json").read_text(encoding="utf-8"))
    predictions = {name: LengthPrediction(*values) for name, values in lengths_by_id.items()}
    return report(options, _loads(options), predictions)


def _same_as_before(options: argparse.Namespace, prompts: Sequence[str]) -> None:
    """Checks that the folder has runs of the same benchmark; other requests would not be comparable."""
    names = ("max_tokens", "max_num_seqs", "temperature", "seed")
    now = {name: getattr(options, name) for name in names} | {"prompts": list(prompts)}
    path = options.out / "requests.json"
    if not path.exists():
        path.write_text(json.dumps(now, indent=1), encoding="utf-8")
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    for name, value in now.items():
        if before.get(name) != value:
            raise InputError(name, value, f"the value of the runs in {options.out}, or another --out")


def _loads(options: argparse.Namespace) -> list[tuple[float, bool]]:
    """(load, bursts) in the order of runs and of the table."""
    return [(load, False) for load in options.loads] + [(load, True) for load in options.burst_loads]


def _texts(path: Path) -> list[str]:
    import pyarrow.parquet as pq

    content: list[str] = pq.read_table(path, columns=["prompt"])["prompt"].to_pylist()
    return content


def _parser() -> argparse.ArgumentParser:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--artifact", type=Path, default=Path("out/quickstart/artifact"), help="artifact for the predictions")
    add("--vllm_python", type=Path, default=Path(".venv-vllm/bin/python"), help="see make vllm-env")
    add(
        "--model", type=Path, help="model folder for vLLM; default: SmolLM2, saved next to vLLM's environment"
    )
    add(
        "--out",
        type=Path,
        default=Path("out/vllm_cpu"),
        help="folder of the runs; a second call resumes there",
    )
    add("--prompts", default="templates:2000?seed=77", help="see gen-samples")
    add(
        "--exclude",
        type=Path,
        nargs="+",
        default=[],
        help="training samples of the artifact: their prompts are not used",
    )
    add("--num_prompts", type=int, default=300)
    add("--max_tokens", type=int, default=80)
    add("--max_num_seqs", type=int, default=20)
    add("--temperature", type=float, default=1.0)
    add("--repetitions", type=int, default=3)
    add("--loads", type=float, nargs="+", default=[1.2, 0.9], help="mean loads as fractions of the capacity")
    add("--burst_loads", type=float, nargs="*", default=[0.8], help="mean loads with half of it in bursts")
    add("--sides", nargs="+", choices=SIDES, default=SIDES, help="fcfs first")
    add("--seed", type=int, default=0)
    add("--markdown", help="Markdown page for the table")
    add("--quick", action="store_true", help="few short requests and two sides, to check that it works")
    return parser


if __name__ == "__main__":
    sys.exit(main())
