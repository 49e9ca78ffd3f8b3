"""Batches of the papers inside vLLM on this machine, beside vLLM's own, on the same requests; and the simulator's prediction.

    make vllm-env
    python -m benchmarks.vllm.deadlines [--mixes deadlines reasoning levels] [--loads 1.0 0.85 0.7] [--json FILE] [--quick]

vLLM's OpenAI server gets prompts over HTTP in an open loop. All sides of a mix and load get the same requests at the same
times, with outputs of fixed lengths. `mixes.py` has the mixes, limits and sides:

| mix | paper | sides beside vLLM's own scheduler |
| --- | --- | --- |
| deadlines | SLAI: 5 % of the requests have a tight limit between tokens, 95 % a loose one | vLLM's own with `--long-prefill-token-threshold`, and with twice the tokens per step; spf: the order alone; slai: order and batches; slai_fitted: with offsets by the engine's measured step times |
| reasoning | UniBoost: short questions with long outputs, and chats; memory for few requests | uniboost |
| levels | Semantic Scheduling: five levels, spikes | semantic: the order alone; stage_aware: order and batches |

1. A short run of vLLM's own scheduler gives its step times. They are in units of the fixed time of a step, and of the tokens
   that take as long; the papers' lengths, limits, slots, memory and times are scaled to these units (`mixes.Scale`).
2. A run of vLLM's own scheduler with all requests of the first mix present. Its steps are all that the simulator's step times
   are fitted to. The capacity is the rate at which simulated requests end while requests always wait.
3. Each load with all sides, and `spikes` without a load. Arrivals follow the engine clock (`clock.py`), so that a change of the
   machine's speed does not change the load. TTFT and TTLT are in its seconds, time between tokens in those of the wall clock,
   as the limits are.

Every run is a file in OUT, and the results are written after each, so that an interrupted benchmark can be resumed. Idle
engines are paused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.command import Parser
from benchmarks.vllm.client import send_all
from benchmarks.vllm.clock import EngineClock
from benchmarks.vllm.deadlines_page import page
from benchmarks.vllm.mixes import BLOCK_TOKENS, MIXES, STOCK, TOKEN_IDS, VLLM, Mix
from benchmarks.vllm.outcomes import capacity_rps, class_metrics, simulated, step_metrics
from benchmarks.vllm.plan import Ask, Cell
from benchmarks.vllm.results import calibrated, slowness
from benchmarks.vllm.server import MODEL, EngineServer, StepTail, engine_server, run_engines
from scheduler_core.errors import InputError
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.shell.files import write_json
from scheduler_core.simulator.measurements.fit import StepTimeFit
from scheduler_core.simulator.step_time.base import LinearStepTime

#: Requests and slots of the first run.
PROBES, PROBE_SLOTS = 48, 32
PROBE_LIMITS = SchedulerConfig(
    max_num_seqs=PROBE_SLOTS, max_num_batched_tokens=256, num_kv_blocks=1024, kv_block_tokens=BLOCK_TOKENS
)


@dataclass(slots=True)
class Runs:
    """Runs what is missing in the folder of the options.

    Attributes:
        options: Parsed options.
        stack: Closes the engines.
        engines: Running engines by name.
    """

    options: argparse.Namespace
    stack: ExitStack
    engines: dict[str, EngineServer] = field(default_factory=dict)

    def probe(self) -> dict[str, Any]:
        """The first run."""
        rng = np.random.default_rng([self.options.seed, 9])
        levels = (np.arange(PROBES) + 0.5) / PROBES
        prompts = rng.permutation(np.rint(16 * 64**levels)).astype(int).tolist()
        outputs = rng.permutation(np.rint(8 + 120 * levels)).astype(int).tolist()
        rows = [
            Ask(f"p{number}", tuple(rng.integers(*TOKEN_IDS, prompt).tolist()), 0.0, number, output)
            for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        ]
        mix = Mix((), PROBE_LIMITS, 2048, {VLLM: STOCK})
        return self.run(self.options.out / "probe.json", "probe", mix, VLLM, rows, EngineClock())

    def run(
        self,
        file: Path,
        name: str,
        mix: Mix,
        side: str,
        rows: Sequence[Ask],
        clock: EngineClock,
        label: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The run of a file, performed unless it exists. `name` is that of the mix; `label` is written with the run."""
        if not file.exists():
            engine = self._engine(f"{name}-{side}", mix, side)
            run = send_all(engine.url, MODEL, rows, 0.0, clock, StepTail(engine.steps))
            write_json(file, run | {"cell": label})
            print(f"{file.stem}: {len(rows)} requests, {run['end'] - run['begin']:.0f} s", flush=True)
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return content

    def close(self) -> None:
        """Ends all engines."""
        self.stack.close()
        self.engines.clear()

    def _engine(self, name: str, mix: Mix, side: str) -> EngineServer:
        for engine in self.engines.values():
            engine.process.pause()
        if name in self.engines:
            self.engines[name].process.resume()
            return self.engines[name]
        options = self.options
        start = engine_server(
            options.vllm_python,
            options.model,
            options.out,
            name,
            max_num_seqs=mix.limits.max_num_seqs,
            settings=mix.sides[side].settings(),
            options=["--dtype", options.dtype, *mix.server_options(side)],
        )
        self.engines[name] = engine = self.stack.enter_context(start)
        rows = [Ask(f"w{number}", tuple(range(100, 164)), 0.0, number, 4 + number) for number in range(16)]
        send_all(engine.url, MODEL, rows, 0.0, EngineClock(), StepTail(engine.steps))
        return engine


class Study:
    """The mixes, runs and results of the options."""

    def __init__(self, options: argparse.Namespace, runs: Runs) -> None:
        self.options = options
        self.runs = runs
        self._mixes: dict[str, Mix] = {}
        self._capacities: dict[str, float] = {}
        self._rows: dict[Path, dict[str, Any]] = {}

    @cached_property
    def engine(self) -> LinearStepTime:
        """Step times of the first run, to which the mixes are scaled."""
        return _linear(calibrated(self.runs.probe()["steps"]))

    @cached_property
    def fit(self) -> StepTimeFit:
        """Step times for the simulator and the engine clock, from the run with all requests at once."""
        return calibrated(self._first_run()["steps"])

    def mix(self, name: str) -> Mix:
        """A mix, scaled to the engine."""
        if name not in self._mixes:
            self._mixes[name] = MIXES[name](self.options.requests[name], self.engine, self.options.seed)
        return self._mixes[name]

    def capacity_rps(self, name: str) -> float:
        """Capacity of vLLM's own scheduler under a mix."""
        if name not in self._capacities:
            step_time, seed = self.fit.step_time, self.options.seed
            self._capacities[name] = capacity_rps(self.mix(name), VLLM, step_time, seed)
        return self._capacities[name]

    def cells(self, name: str) -> list[Cell]:
        """The runs of a mix in their order."""
        mix, options = self.mix(name), self.options
        loads = (
            [1.0] if mix.gap_s is not None else options.loads if name == "deadlines" else options.long_loads
        )
        sides = [side for side in options.sides if side in mix.sides]
        return [
            Cell(side, repetition, load, mix.gap_s is not None)
            for load in loads
            for repetition in range(options.repetitions)
            for side in sides
        ]

    def run(self, name: str, cell: Cell) -> None:
        """Performs a run of a mix, unless it exists."""
        mix, options = self.mix(name), self.options
        file = cell.file(options.out / name)
        if file.exists():
            return
        assert cell.load is not None
        rows = mix.asks(cell.repetition, cell.load * self.capacity_rps(name), options.seed)
        label = {"load": None if cell.bursts else cell.load, "side": cell.side, "repetition": cell.repetition}
        self.runs.run(file, name, mix, cell.side, rows, EngineClock(self.fit.step_time), label)

    def results(self) -> dict[str, Any]:
        """The results of all existing runs."""
        for name in self.options.mixes:
            for file in sorted((self.options.out / name).glob("*.json")):
                if file not in self._rows:
                    self._rows[file] = self._result(name, json.loads(file.read_text(encoding="utf-8")))
        return {
            "probe": asdict(self.engine),
            "fit": self.fit.parameters | {"median_error": self.fit.median_error},
            "mixes": {name: self._summary(name) for name in self.options.mixes},
            "rows": list(self._rows.values()),
        }

    def _result(self, name: str, run: dict[str, Any]) -> dict[str, Any]:
        mix, responses = self.mix(name), run["requests"]
        requests = {row.request_id: row for row in mix.rows}
        return {
            "mix": name,
            **run["cell"],
            "engine": class_metrics(responses, requests),
            "simulator": simulated(mix, run["cell"]["side"], responses, self.fit.step_time),
            "steps": step_metrics(run["steps"]) | {"slowness": slowness(run["steps"], self.fit)},
            "client_delay_s": max(row["sent_s"] - row["arrival_s"] for row in responses),
        }

    def _summary(self, name: str) -> dict[str, Any]:
        mix = self.mix(name)
        prompts, outputs = (
            [getattr(row, key) for row in mix.rows] for key in ("prompt_tokens", "output_tokens")
        )
        lengths = {
            key: {"mean": float(np.mean(tokens)), "p50": float(np.median(tokens)), "max": max(tokens)}
            for key, tokens in (("prompt_tokens", prompts), ("output_tokens", outputs))
        }
        return {
            "num_requests": len(mix.rows),
            **lengths,
            "tbt_slo_s": {row.tenant: row.tbt_slo_s for row in mix.rows},
            "max_num_seqs": mix.limits.max_num_seqs,
            "max_num_batched_tokens": mix.limits.max_num_batched_tokens,
            "kv_tokens": mix.limits.capacity_blocks * BLOCK_TOKENS,
            "gap_s": mix.gap_s,
            "capacity_rps": self.capacity_rps(name),
            "sides": {side: asdict(own) for side, own in mix.sides.items()},
        }

    def _first_run(self) -> dict[str, Any]:
        """All requests of the first mix at once, in vLLM's own scheduler."""
        name = "deadlines"
        mix, file = self.mix(name), self.options.out / "capacity.json"
        return self.runs.run(file, name, mix, VLLM, mix.asks(0, None, self.options.seed), EngineClock())


def _linear(fit: StepTimeFit) -> LinearStepTime:
    model = fit.step_time
    assert isinstance(model, LinearStepTime)
    if not model.base_s > 0 or not model.per_prefill_token_s > 0:
        raise InputError(
            "step times of the first run", fit.parameters, "a fixed time and a time per prompt token > 0"
        )
    return model


def main(args: Sequence[str] | None = None) -> int:
    """Runs what is missing and prints the table; returns 2 if a requirement is missing."""
    options = _parser().parse_args(args)
    if options.quick:
        options.requests, options.loads, options.long_loads = dict.fromkeys(MIXES, 8), [1.0], [1.0]
    return run_engines(_run, options)


def _run(options: argparse.Namespace) -> int:
    for name in options.mixes:
        (options.out / name).mkdir(parents=True, exist_ok=True)
    _same_as_before(options)
    with ExitStack() as stack:
        runs = Runs(options, stack)
        study = Study(options, runs)
        for name in options.mixes:
            for cell in study.cells(name):
                study.run(name, cell)
                _write(options, study.results())
            runs.close()
        print(_write(options, study.results()))
    return 0


def _write(options: argparse.Namespace, results: dict[str, Any]) -> str:
    """Writes results and tables, and returns the tables."""
    text = page(results)
    (options.out / "table.md").write_text(text, encoding="utf-8")
    write_json(options.json or options.out / "results.json", rounded(results))
    return text


def rounded(value: Any) -> Any:
    """The same JSON value with four significant digits."""
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _same_as_before(options: argparse.Namespace) -> None:
    """Checks that the folder has runs of the same requests."""
    names = ("requests", "seed", "dtype")
    now = {name: getattr(options, name) for name in names}
    path = options.out / "options.json"
    if not path.exists():
        write_json(path, now)
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    for name, value in now.items():
        if before.get(name) != value:
            raise InputError(name, value, f"the value of the runs in {options.out}, or another --out")


class _Requests(argparse.Action):
    """Numbers of requests as MIX=NUMBER."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        numbers = dict(getattr(namespace, self.dest))
        for word in values:
            name, _, number = word.partition("=")
            if name not in MIXES or not number.isdecimal() or int(number) < 8:
                raise argparse.ArgumentError(self, f"MIX=NUMBER, at least 8, of {', '.join(MIXES)}: {word}")
            numbers[name] = int(number)
        setattr(namespace, self.dest, numbers)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    add(
        "--loads",
        type=float,
        nargs="+",
        default=[1.0, 0.85, 0.7],
        help="mix deadlines: fractions of the capacity",
    )
    add("--long_loads", type=float, nargs="+", default=[1.0], help="mix reasoning: fractions of the capacity")
    sides = (
        "vllm",
        "vllm_threshold",
        "vllm_twice",
        "slai",
        "slai_fitted",
        "spf",
        "uniboost",
        "semantic",
        "stage_aware",
    )
    add("--sides", nargs="+", choices=sides, default=list(sides))
    numbers = {"deadlines": 120, "reasoning": 100, "levels": 60}
    add(
        "--requests",
        nargs="+",
        action=_Requests,
        default=numbers,
        metavar="MIX=NUMBER",
        help="requests of a run",
    )
    add("--repetitions", type=int, default=1)
    add("--vllm_python", type=Path, default=Path(".venv-vllm/bin/python"), help="see make vllm-env")
    add(
        "--model", type=Path, help="model folder for vLLM; default: SmolLM2, saved next to vLLM's environment"
    )
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="type of the weights")
    add(
        "--out",
        type=Path,
        default=Path("out/vllm_deadlines"),
        help="folder of the runs; a second call resumes there",
    )
    add("--json", type=Path, help="file of the results; default: OUT/results.json")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="few requests and one load, to check that it works")
    return parser


if __name__ == "__main__":
    sys.exit(main())
