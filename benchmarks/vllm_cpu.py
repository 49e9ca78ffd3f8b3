"""Real vLLM on this machine: our orders against vLLM's own, on the same requests, beside the simulator's prediction.

    python -m benchmarks.vllm_cpu --artifact DIR --vllm-python .venv-vllm/bin/python --model DIR --out DIR
        [--markdown docs/vllm.md] [--quick]

Requests arrive open loop (Poisson) at shares of the measured capacity; all sides get the same prompts, arrival times and
sampling seeds. A seed of its own per request makes an answer the same in every run (up to rounding: the share that differs
is told), ends it where the model ends it, and leaves `max_tokens`, which policies may see, at the cap: fixing lengths by
`max_tokens` would tell them the truth.

| side | what |
| --- | --- |
| fcfs | vLLM as it is |
| tie, ssjf | our scheduler in vLLM, asking a running prediction service |
| priority | vLLM's own `--scheduling-policy priority`; priority = predicted median length, as a proxy would set it |
| oracle | our scheduler, ssjf, told the lengths of the capacity run |
| fcfs_again | vLLM as it is, last in its repetition: what differs from fcfs is the machine's doing |

The capacity is that of a run in which all requests come at once; it also tells the oracle's lengths. Each repetition has
its own seeds. Every run is a file: an interrupted benchmark goes on where it was. One engine lives at a time; sides take
turns within a repetition, so that a slow hour of the machine hits all of them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.processes import running
from benchmarks.vllm_runs.results import METRICS, fit_step_time, interval, run_metrics, run_steps, simulated
from benchmarks.vllm_runs.worker import EngineWorker
from data_gen.prompts import read_prompts
from scheduler_core.errors import InputError
from scheduler_core.predictions import LengthPrediction, Prediction
from scheduler_core.simulator.fetch import ORACLE_NU, ORACLE_SIGMA, fetch_predictions
from scheduler_core.simulator.trace import Trace, TraceRequest
from training.markdown_section import markdown_table, put_section

SIDES = ("fcfs", "tie", "ssjf", "priority", "oracle", "fcfs_again")
SECTION = "vllm cpu"


@dataclass(slots=True)
class Bench:
    """One benchmark: options, prompts and what is known so far."""

    options: argparse.Namespace
    folder: Path
    prompts: list[str]
    address: str
    predictions: dict[str, LengthPrediction] = field(default_factory=dict)

    def requests(self, repetition: int, rate: float | None, priorities: bool) -> list[dict[str, Any]]:
        """The requests of a run, in an order and at times that depend on the repetition alone."""
        draws = np.random.default_rng([self.options.seed, repetition])
        order = draws.permutation(len(self.prompts))
        gaps = draws.exponential(size=len(order))
        at = np.zeros(len(order)) if rate is None else np.cumsum(gaps) / rate
        return [
            {
                "request_id": f"q{number}",
                "prompt": self.prompts[number],
                "at_s": float(when),
                "seed": 1000 * repetition + int(number),
                "max_tokens": self.options.max_tokens,
                "priority": round(math.exp(self.predictions[f"q{number}"].mu)) if priorities else 0,
            }
            for number, when in zip(order.tolist(), at.tolist(), strict=True)
        ]

    def file(self, side: str, repetition: int, load: float | None) -> Path:
        """Where a run's result is, or will be."""
        return self.folder / f"{side}-{repetition}-{'capacity' if load is None else load}.json"

    def capacity_rps(self) -> float:
        """Requests per second while all requests were there from the start, over the first repetition's run."""
        rows = json.loads(self.file("fcfs", 0, None).read_text(encoding="utf-8"))["requests"]
        finish = np.sort([row["finish_s"] for row in rows])
        full = len(rows) - self.options.max_num_seqs  # until then no seat was empty
        return float(full / finish[full - 1])

    def settings(self, side: str, repetition: int) -> dict[str, Any] | None:
        """Those of our scheduler; None where vLLM's own runs."""
        if side in ("fcfs", "priority", "fcfs_again"):
            return None
        if side != "oracle":
            return {"policy": side, "predictor": f"grpc://{self.address}"}
        told = json.loads(self.file("fcfs", repetition, None).read_text(encoding="utf-8"))["requests"]
        table = {
            self.prompts[int(row["request_id"][1:])]: [
                math.log(row["output_tokens"]),
                ORACLE_SIGMA,
                ORACLE_NU,
            ]
            for row in told
        }
        path = self.folder / f"oracle-{repetition}.table.json"
        path.write_text(json.dumps(table), encoding="utf-8")
        return {"policy": "ssjf", "predictor": f"table://{path.resolve()}"}

    def run_side(self, side: str, repetition: int) -> None:
        """The runs of a side in a repetition that have no file yet, in one engine."""
        loads: list[float | None] = [None] if side == "fcfs" else []
        loads += self.options.loads
        missing = [load for load in loads if not self.file(side, repetition, load).exists()]
        if not missing:
            return
        engine = {
            "model": str(self.options.model), "dtype": "float32", "max_model_len": 1024, "enforce_eager": True,
            "max_num_seqs": self.options.max_num_seqs, "enable_prefix_caching": False,
            "scheduling_policy": "priority" if side == "priority" else "fcfs",
        }  # fmt: skip
        settings = self.settings(side, repetition)
        task = {"engine": engine, "kind": "stock" if settings is None else "tailcast"}
        name = f"{side}-{repetition}"
        worker = EngineWorker(self.options.vllm_python, task, self.folder, name, settings)
        try:
            for load in missing:
                rate = None if load is None else load * self.capacity_rps()
                out = self.file(side, repetition, load)
                rows = self.requests(repetition, rate, side == "priority")
                run = {"out": str(out.resolve()), "temperature": self.options.temperature, "requests": rows}
                found = worker.run(run)
                metrics = run_metrics(found["requests"])
                print(f"{out.stem}: " + ", ".join(f"{key} {metrics[key]:.3f}" for key in METRICS), flush=True)
        finally:
            worker.close()

    def predict(self) -> None:
        """Asks the service about all prompts: for the declared priorities and the simulator."""
        rows = tuple(
            TraceRequest(
                request_id=f"q{number}", arrival_s=0.0, prompt_tokens=1, output_tokens=1,
                max_tokens=self.options.max_tokens, prompt=prompt,
            )
            for number, prompt in enumerate(self.prompts)
        )  # fmt: skip
        found = fetch_predictions(Trace(rows), f"grpc://{self.address}", timeout_s=60.0)
        for name, answer in found.answers.items():
            length = answer.length if isinstance(answer, Prediction) else answer
            if length is not None:
                self.predictions[name] = length
        if len(self.predictions) < len(rows):
            raise InputError(
                "artifact", str(self.options.artifact), f"one that predicts every prompt ({found.errors})"
            )


def main(args: Sequence[str] | None = None) -> int:
    """Runs what is missing and prints the table; 2 where something needed is missing."""
    options = _parser().parse_args(args)
    if options.quick:
        options.num_prompts, options.repetitions, options.max_tokens = 24, 1, 32
        options.loads, options.sides = [1.2], ["fcfs", "tie", "oracle"]
    try:
        return _run(options)
    except (InputError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    for name in ("artifact", "vllm_python", "model"):
        path = getattr(options, name)
        if not path.exists():
            raise InputError(name, str(path), "an existing path; --help says which")
    options.out.mkdir(parents=True, exist_ok=True)
    prompts = [prompt.text for prompt in read_prompts(options.prompts)]
    seen = set(_texts(options.exclude))
    prompts = [prompt for prompt in dict.fromkeys(prompts) if prompt not in seen][: options.num_prompts]
    if len(prompts) < options.num_prompts:
        raise InputError(
            "prompts", options.prompts, f"at least {options.num_prompts} that are not in --exclude"
        )
    _same_as_before(options, prompts)
    with _service(options) as address:
        bench = Bench(options, options.out, prompts, address)
        bench.predict()
        for repetition in range(options.repetitions):
            for side in options.sides:
                bench.run_side(side, repetition)
    _report(bench)
    return 0


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


def _texts(path: Path | None) -> list[str]:
    if path is None:
        return []
    import pyarrow.parquet as pq

    found: list[str] = pq.read_table(path, columns=["prompt"])["prompt"].to_pylist()
    return found


def _report(bench: Bench) -> None:
    options = bench.options
    runs = {
        (side, repetition, load): json.loads(bench.file(side, repetition, load).read_text(encoding="utf-8"))
        for side in options.sides
        for repetition in range(options.repetitions)
        for load in options.loads
    }
    rows, fits = [], []
    for load in options.loads:
        real: dict[str, list[dict[str, float]]] = {side: [] for side in options.sides}
        model: dict[str, list[dict[str, float]]] = {side: [] for side in options.sides}
        for repetition in range(options.repetitions):
            base = runs["fcfs", repetition, load]
            step_time, r2 = fit_step_time(run_steps(base))
            fits.append(f"{load}x/{repetition}: R2 {r2:.2f}, {1e3 * step_time.base_s:.1f} ms")
            for side in options.sides:
                run = runs[side, repetition, load]
                step_s = float(run_steps(run)[:, 0].mean())
                real[side].append(run_metrics(run["requests"]) | {"step_s": step_s})
                model[side].append(
                    simulated(
                        side, base, bench.predictions, step_time, options.max_num_seqs, options.max_tokens
                    )
                )
        rows += [_row(load, side, real, model) for side in options.sides]
    header = ["load", "side", *(f"{name} ({unit})" for name, unit in METRICS.items())]
    header += ["step (s)", "per token, change to fcfs", "throughput, change to fcfs"]
    header += ["simulated per_token_mean (s/token)", "simulated, change to fcfs"]
    table = markdown_table(header, rows)
    notes = [
        f"{len(bench.prompts)} prompts, cap {options.max_tokens} tokens, max_num_seqs {options.max_num_seqs}, "
        f"{options.repetitions} repetitions, capacity {bench.capacity_rps():.3f} requests/s; mean and 95 % interval over "
        "repetitions (Student's t; none for one repetition); changes are paired within repetitions. Steps of different "
        "length on different sides mean that the machine was not quiet, and that the sides cannot be compared.",
        f"Answers as long as in fcfs's run: {100 * _share_repeated(runs, options):.1f} %.",
        "Step-time models: " + "; ".join(fits) + ".",
    ]
    text = table + "\n\n" + "\n".join(notes)
    print(text)
    if options.markdown:
        put_section(options.markdown, SECTION, text)


def _row(
    load: float,
    side: str,
    real: Mapping[str, list[dict[str, float]]],
    model: Mapping[str, list[dict[str, float]]],
) -> list[str]:
    cells = [f"{load}x", side]
    cells += [_cell(*interval([metrics[name] for metrics in real[side]])) for name in (*METRICS, "step_s")]
    cells += [_change(side, real, "per_token_mean"), _change(side, real, "tokens_per_s")]
    cells.append(_cell(*interval([metrics["per_token_mean"] for metrics in model[side]])))
    cells.append(_change(side, model, "per_token_mean"))
    return cells


def _change(side: str, found: Mapping[str, list[dict[str, float]]], name: str) -> str:
    """Against fcfs, in percent, paired within repetitions."""
    if side == "fcfs":
        return "-"
    pairs = zip(found[side], found["fcfs"], strict=True)
    return _cell(*interval([100 * (mine[name] / base[name] - 1) for mine, base in pairs]), digits=1) + " %"


def _cell(mean: float, half: float, digits: int = 3) -> str:
    return f"{mean:.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")


def _share_repeated(runs: Mapping[tuple[str, int, float], Any], options: argparse.Namespace) -> float:
    """Share of the requests of the other sides whose answer is as long as in the run of fcfs at the same load."""
    same = []
    for (side, repetition, load), run in runs.items():
        base = {row["request_id"]: row["output_tokens"] for row in runs["fcfs", repetition, load]["requests"]}
        if side != "fcfs":
            same += [base[row["request_id"]] == row["output_tokens"] for row in run["requests"]]
    return float(np.mean(same)) if same else 1.0


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
    add("--model", type=Path, default=Path(".venv-vllm/models/SmolLM2-135M-Instruct"), help="folder for vLLM")
    add(
        "--out",
        type=Path,
        default=Path("out/vllm_cpu"),
        help="folder of the runs; a second call goes on there",
    )
    add("--prompts", default="templates:2000?seed=77", help="as for gen-samples")
    add("--exclude", type=Path, help="samples the artifact was trained on: their prompts are not used")
    add("--num-prompts", type=int, default=320)
    add("--max-tokens", type=int, default=128)
    add("--max-num-seqs", type=int, default=8)
    add("--temperature", type=float, default=1.0)
    add("--repetitions", type=int, default=3)
    add("--loads", type=float, nargs="+", default=[0.7, 1.2], help="shares of the measured capacity")
    add("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="fcfs must be among them, first")
    add("--seed", type=int, default=0)
    add("--markdown", help="page that gets the table")
    add("--quick", action="store_true", help="few short requests, three sides: does it work?")
    return parser


if __name__ == "__main__":
    sys.exit(main())
