"""Real vLLM on this machine: our orders against vLLM's own, on the same requests, beside the simulator's prediction.

    make quickstart vllm-env
    python -m benchmarks.vllm_cpu --exclude out/quickstart/samples.parquet [--markdown docs/vllm.md] [--quick]

vLLM's OpenAI server gets chats over HTTP, open loop (Poisson), at shares of its measured capacity. All sides get the same
requests at the same times; repetitions differ in order and times. A sampling seed of its own per request makes an answer
the same in every run (up to rounding: the share that differs is told), ends it where the model ends it, and leaves
`max_tokens`, which policies may see, at the cap: fixing lengths by `max_tokens` would tell them the truth.

| side | what |
| --- | --- |
| fcfs | vLLM as it is |
| bounded_shortest, tie, ssjf | our scheduler in vLLM, asking a running prediction service |
| priority | vLLM's own `--scheduling-policy priority` behind `tailcast-proxy`, which asks that service and sends `priority` |
| oracle | our scheduler, ssjf, told the lengths of the first run |
| fcfs_again | vLLM as it is, after everything else: what differs from fcfs is the machine's doing |

First comes a run in which requests are there from the start: it measures the capacity and tells the oracle how long
answers are, short and long ones are spread over the time of arrivals by it, and the simulator's step times are fitted
to it alone. Later runs go by the engine's clock: it counts seconds of a machine as fast as in that first run, by what
the fit says of each step and what the step took. Requests come, and latencies are told, by it as well as by the wall's:
a shared machine changes its speed by a tenth within minutes, and at 1.2 times the capacity 1 % more time per step means
some 4 % more latency. What a scheduler or a predictor costs counts as the machine's slowness there, so the wall's
throughput and the seconds of scheduling stand beside it. Then all sides at the first load, repetition by repetition,
then those of --low-sides at the others. Every run is a file and the table is written after each (OUT/table.md): an
interrupted benchmark has complete pairs, and goes on where it was. A second call with more repetitions, or with some
sides only, adds to the same table. Each engine starts once; those whose turn it is not are stopped, because five idle
vLLMs make the sixth up to a fifth slower. --table prints what is there and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.pages import put_section
from benchmarks.serving.processes import running
from benchmarks.vllm_runs.client import Ask, send_all
from benchmarks.vllm_runs.clock import EngineClock
from benchmarks.vllm_runs.model import NAME, packaged_model
from benchmarks.vllm_runs.page import Setting, report
from benchmarks.vllm_runs.plan import CAPACITY, ENGINES, SIDES, Cell, arrival_settings, asks, cells
from benchmarks.vllm_runs.results import calibrated, measured_capacity, run_metrics
from benchmarks.vllm_runs.server import MODEL, EngineServer, StepTail, engine_server
from data_gen.sources.open import open_prompts
from scheduler_core.errors import InputError
from scheduler_core.predictions import LengthPrediction
from scheduler_core.simulator.predictions import ORACLE_NU, ORACLE_SIGMA, fetch_predictions
from scheduler_core.simulator.trace import Trace, TraceRequest

SECTION = "vllm cpu"
#: The rest are vLLM's own.
OURS = ("bounded_shortest", "tie", "ssjf", "oracle")


@dataclass(slots=True)
class Bench:
    """Runs what is missing.

    Attributes:
        options: Of the command.
        prompts: Of all runs.
        address: Of the prediction service.
        stack: Ends what is started.
        engines: Those that live, by name, with the address that requests are sent to.
    """

    options: argparse.Namespace
    prompts: list[str]
    address: str
    stack: ExitStack
    engines: dict[str, tuple[EngineServer, str]] = field(default_factory=dict)

    def run(self, cell: Cell) -> None:
        """One cell; writes its file."""
        options = self.options
        rate, lengths, clock = None, None, EngineClock()
        if cell.load is not None:
            measured = self._capacity_run()
            rate = cell.load * measured_capacity(measured["requests"], options.max_num_seqs)
            lengths, clock = self.lengths(), EngineClock(calibrated(measured["steps"]).step_time)
        engine, url = self._engine(ENGINES.get(cell.side, cell.side))
        rows = asks(
            self.prompts, cell.repetition, rate, options.max_tokens, options.seed, lengths, cell.bursts
        )
        run = send_all(url, MODEL, rows, options.temperature, clock, StepTail(engine.steps))
        write_json(cell.file(options.out), run)
        metrics = run_metrics(run["requests"])
        name = cell.file(options.out).stem
        print(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in metrics.items()), flush=True)

    def lengths(self) -> list[int]:
        """Tokens of the answers, by prompt, in the run that measured the capacity."""
        lengths_by_id = {row["request_id"]: row["output_tokens"] for row in self._capacity_run()["requests"]}
        return [int(lengths_by_id[f"q{number}"]) for number in range(len(self.prompts))]

    def _capacity_run(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(CAPACITY.file(self.options.out).read_text(encoding="utf-8"))
        return content

    def _engine(self, name: str) -> tuple[EngineServer, str]:
        for other, (engine, _) in self.engines.items():
            if other != name:
                engine.process.pause()
        if name in self.engines:
            self.engines[name][0].process.resume()
        else:
            options = self.options
            flags: dict[str, str | None] = {"--max-num-seqs": str(options.max_num_seqs)}
            if name == "priority":
                flags["--scheduling-policy"] = "priority"
            settings = self._settings(name) if name in OURS else None
            engine = self.stack.enter_context(
                engine_server(
                    options.vllm_python, options.model, options.out, name, options=flags, settings=settings
                )
            )
            url = engine.url
            if name == "priority":
                url = self.stack.enter_context(self._proxy(url))
            self.engines[name] = engine, url
            rows, tail = warm_up(3 * options.max_num_seqs), StepTail(engine.steps)
            send_all(url, MODEL, rows, options.temperature, EngineClock(), tail)
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

    @contextmanager
    def _proxy(self, engine_url: str) -> Iterator[str]:
        """`tailcast-proxy` with its defaults; its address."""
        port_file = self.options.out / "proxy.port"
        port_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "predictors.cli_proxy", engine_url, "--engine", "vllm"]
        command += ["--predictor", f"grpc://{self.address}", "--max_num_seqs", str(self.options.max_num_seqs)]
        command += ["--served_model", "", "--deadline_s", "1", "--port", "0", "--port_file", str(port_file)]
        with running(command, port_file.exists, environment={}):
            yield f"http://127.0.0.1:{port_file.read_text(encoding='utf-8').split()[0]}"


def warm_up(count: int) -> list[Ask]:
    """Short requests of different lengths, there at once, so that every number of running requests has been there."""
    return [
        Ask(f"w{number}", f"Name {number + 30} rivers.", 0.0, number, 4 + 2 * (number % 16))
        for number in range(count)
    ]


def write_json(path: Path, content: Any) -> None:
    """All or nothing."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(path)


def predict(options: argparse.Namespace, prompts: Sequence[str], address: str) -> None:
    """Asks the service about all prompts, once, for the simulator."""
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
            "artifact", str(options.artifact), f"one that predicts every prompt ({content.errors})"
        )
    write_json(path, lengths_by_id)


def main(args: Sequence[str] | None = None) -> int:
    """Runs what is missing and prints the table; 2 where something needed is missing."""
    options = _parser().parse_args(args)
    if options.quick:
        options.num_prompts, options.repetitions, options.max_tokens, options.controls = 20, 1, 32, 0
        options.max_num_seqs, options.loads, options.sides = (
            4,
            [1.2],
            ["fcfs", "bounded_shortest", "priority"],
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the engines are ended too
    try:
        return _run(options)
    except (InputError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    if options.model is None:
        options.model = options.vllm_python.parents[1] / "models" / NAME
        if options.vllm_python.exists() and not options.table:
            packaged_model(options.model)
    for name in () if options.table else ("artifact", "vllm_python", "model"):
        path = getattr(options, name)
        if not path.exists():
            raise InputError(name, str(path), "an existing path; --help says which")
    if options.sides[0] != "fcfs" or options.low_sides[0] != "fcfs":
        raise InputError("sides", options.sides, "fcfs first: the others are compared with it")
    if options.num_prompts <= 2 * options.max_num_seqs:
        raise InputError("num_prompts", options.num_prompts, "more than twice max_num_seqs")
    prompts = _prompts(options)
    options.out.mkdir(parents=True, exist_ok=True)
    _same_as_before(options, prompts)
    if not options.table:
        plan = cells(
            options.loads,
            options.burst_loads,
            options.repetitions,
            options.sides,
            options.low_sides,
            options.controls,
        )
        missing = [cell for cell in plan if not cell.file(options.out).exists()]
        with ExitStack() as stack:
            address = stack.enter_context(_service(options))
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
            "prompts", options.prompts, f"at least {options.num_prompts} that are not in --exclude"
        )
    return content


def _table(options: argparse.Namespace) -> str:
    path = options.out / "predictions.json"
    lengths_by_id = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    predictions = {name: LengthPrediction(*values) for name, values in lengths_by_id.items()}
    return report(
        Setting(
            options.out,
            options.num_prompts,
            options.max_tokens,
            options.max_num_seqs,
            arrival_settings(options.loads, options.burst_loads),
            predictions,
        )
    )


def _same_as_before(options: argparse.Namespace, prompts: Sequence[str]) -> None:
    """A folder holds the runs of one benchmark; other requests would not be comparable."""
    names = ("max_tokens", "max_num_seqs", "temperature", "seed")
    now = {name: getattr(options, name) for name in names} | {"prompts": list(prompts)}
    path = options.out / "requests.json"
    if not path.exists():
        path.write_text(json.dumps(now, indent=1), encoding="utf-8")
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    for name, value in now.items():
        if before.get(name) != value:
            raise InputError(name, value, f"what the runs in {options.out} have; else another --out")


@contextmanager
def _service(options: argparse.Namespace) -> Iterator[str]:
    """The prediction service; its address."""
    port_file = options.out / "port"
    port_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "predictors.cli", str(options.artifact)]
    command += ["--port", "0", "--port_file", str(port_file)]
    with running(command, port_file.exists, environment={}, timeout_s=300.0):
        yield f"127.0.0.1:{port_file.read_text(encoding='utf-8').strip()}"


def _texts(path: Path) -> list[str]:
    import pyarrow.parquet as pq

    content: list[str] = pq.read_table(path, columns=["prompt"])["prompt"].to_pylist()
    return content


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--artifact",
        type=Path,
        default=Path("out/quickstart/artifact"),
        help="predicts for tie, ssjf, priority",
    )
    add("--vllm-python", type=Path, default=Path(".venv-vllm/bin/python"), help="see make vllm-env")
    add(
        "--model",
        type=Path,
        help="folder for vLLM; default: the packaged SmolLM2, saved beside vLLM's environment",
    )
    add(
        "--out",
        type=Path,
        default=Path("out/vllm_cpu"),
        help="folder of the runs; a second call goes on there",
    )
    add("--prompts", default="templates:2000?seed=77", help="as for gen-samples")
    add(
        "--exclude",
        type=Path,
        nargs="+",
        default=[],
        help="samples the artifact was trained on: their prompts are not used",
    )
    add("--num-prompts", type=int, default=300)
    add("--max-tokens", type=int, default=80)
    add("--max-num-seqs", type=int, default=20)
    add("--temperature", type=float, default=1.0)
    add("--repetitions", type=int, default=3)
    add(
        "--loads",
        type=float,
        nargs="+",
        default=[1.2, 0.9],
        help="mean loads as fractions of the capacity, the main one first",
    )
    add(
        "--burst-loads", type=float, nargs="*", default=[0.8], help="the same, half of the requests in bursts"
    )
    sides = [side for side in SIDES if side != "fcfs_again"]
    add("--sides", nargs="+", choices=sides, default=sides, help="of the first load; fcfs first")
    add(
        "--low-sides",
        nargs="+",
        choices=sides,
        default=["fcfs", "bounded_shortest"],
        help="of the other loads",
    )
    add("--controls", type=int, default=1, help="repetitions with fcfs_again, at the first load")
    add("--seed", type=int, default=0)
    add("--markdown", help="page that gets the table")
    add("--table", action="store_true", help="prints the table of the runs that are there")
    add("--quick", action="store_true", help="few short requests, three sides: does it work?")
    return parser


if __name__ == "__main__":
    sys.exit(main())
