"""vLLM on this machine, and what the simulator predicts of a load from measurements of another.

    make vllm-env
    python -m benchmarks.vllm.predicted [--json FILE] [--quick]

vLLM's OpenAI server gets prompts over HTTP in an open loop (Poisson): after a run with all requests at once, which gives the
capacity, a first load, a second one, and the first one again, because the speed of a shared machine changes. Step times are
fitted as by `simulate calibrate` to what a user has of the first load: the times of its requests, in the format of `vllm bench
serve --save-detailed`, vLLM's log with a line for each step, or scrapes of /metrics. With them the simulator predicts the
requests of the second load, of which it gets arrivals and lengths; and `tailcast plan`, from the same log, what one replica has.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.command import Parser
from benchmarks.vllm.client import send_all
from benchmarks.vllm.clock import EngineClock
from benchmarks.vllm.mixes import TOKEN_IDS
from benchmarks.vllm.plan import Ask
from benchmarks.vllm.results import measured_capacity
from benchmarks.vllm.server import MODEL, StepTail, openai_server, run_engines
from scheduler_core.report.page import markdown_table
from scheduler_core.scheduler import SchedulerConfig
from scheduler_core.shell.command import CHECK_FAILED
from scheduler_core.shell.files import write_json
from scheduler_core.simulator.commands.calibrate import EngineCalibrationConfig, calibrate
from scheduler_core.simulator.measurements.prometheus import parse_scrapes
from scheduler_core.simulator.measurements.sources import MeasurementSource, metrics_source, read_sources
from tailcast.commands.plan import main as plan

#: Lengths of prompts and outputs in tokens, log-uniformly distributed.
PROMPTS, OUTPUTS = (16, 256), (8, 128)
#: Maximum number of tokens of a request, and of a step.
STEP_TOKENS = 1024
#: Seconds between two scrapes.
SCRAPE_S = 2.0
#: Seconds between the parts of a load in their common simulation.
PART_GAP_S = 10_000.0
NAMES = {"ttlt_s": "E2E", "ttft_s": "TTFT", "tpot_s": "ITL"}


def draw(count: int, rate: float | None, rng: np.random.Generator) -> list[Ask]:
    """Requests with outputs of fixed lengths; without a rate all arrive at once."""
    prompts, outputs = (
        np.rint(np.exp(rng.uniform(np.log(low), np.log(high), count))).astype(int).tolist()
        for low, high in (PROMPTS, OUTPUTS)
    )
    at_s = np.zeros(count) if rate is None else np.cumsum(rng.exponential(1 / rate, count))
    return [
        Ask(f"r{number}", tuple(rng.integers(*TOKEN_IDS, prompt).tolist()), float(at), number, output)
        for number, (prompt, output, at) in enumerate(zip(prompts, outputs, at_s, strict=True))
    ]


def bench_result(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rows of a run in the format of `vllm bench serve --save-detailed --append-result`."""
    return {
        "input_lens": [row["prompt_tokens"] for row in rows],
        "output_lens": [row["output_tokens"] for row in rows],
        "start_times": [row["sent_s"] for row in rows],
        "ttfts": [row["token_s"][0] - row["sent_s"] for row in rows],
        "itls": [np.diff(row["token_s"]).tolist() for row in rows],
        "errors": ["" for _ in rows],
    }


@contextmanager
def scraping(url: str, path: Path) -> Iterator[None]:
    """Appends /metrics of a server to a file, every `SCRAPE_S` and at both ends."""
    ended = threading.Event()

    def scrape() -> None:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply, path.open("ab") as file:
            file.write(reply.read())

    def repeat() -> None:
        while not ended.wait(SCRAPE_S):
            scrape()

    thread = threading.Thread(target=repeat)
    path.unlink(missing_ok=True)
    scrape()
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        scrape()


def logging_to(path: Path) -> dict[str, str]:
    """Environment of a vLLM server whose log is a file."""
    handler = {"class": "logging.FileHandler", "formatter": "plain", "filename": str(path.resolve())}
    content = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "plain": {"format": "%(levelname)s %(asctime)s %(message)s", "datefmt": "%m-%d %H:%M:%S"}
        },
        "handlers": {"file": handler},
        "loggers": {"vllm": {"handlers": ["file"], "level": "INFO", "propagate": False}},
    }
    target = path.with_suffix(".logging.json")
    write_json(target, content)
    return {"VLLM_LOGGING_CONFIG_PATH": str(target.resolve())}


def size_line(log: Path) -> bytes:
    """The line with the size of the KV cache."""
    lines = [line for line in log.read_bytes().splitlines(keepends=True) if b"KV cache size" in line]
    return b"".join(lines[:1])


def measure(options: argparse.Namespace) -> dict[str, list[Path]]:
    """Runs the engine; the files of each load, by its name."""
    out, rng = options.out, np.random.default_rng(options.seed)
    out.mkdir(parents=True, exist_ok=True)
    words = ["--max-model-len", str(STEP_TOKENS), "--max-num-batched-tokens", str(STEP_TOKENS)]
    words += ["--max-num-seqs", str(options.max_num_seqs), "--no-enable-prefix-caching"]
    words += ["--enable-logging-iteration-details"]
    files: dict[str, list[Path]] = {"first": [], "second": []}
    log = out / "engine.log"
    log.unlink(missing_ok=True)
    with openai_server(options.vllm_python, options.model, words, logging_to(log)) as (url, _):

        def send(rows: Sequence[Ask]) -> list[dict[str, Any]]:
            run = send_all(url, MODEL, rows, 0.0, EngineClock(), StepTail(out / "no.steps"))
            content: list[dict[str, Any]] = run["requests"]
            return content

        send([Ask(f"w{number}", tuple(range(100, 164)), 0.0, number, 4 + number) for number in range(16)])
        rows = send(draw(options.at_once, None, rng))
        capacity = measured_capacity(rows, options.max_num_seqs)
        print(f"capacity {capacity:.2f} requests/s", flush=True)
        for index, (name, load, seconds) in enumerate(
            [
                ("first", options.loads[0], options.first_s),
                ("second", options.loads[1], options.second_s),
                ("first", options.loads[0], options.first_s),
            ]
        ):
            rate = load * capacity
            path = out / f"{name}-{index}.jsonl"
            begin = log.stat().st_size
            with scraping(url, path.with_suffix(".metrics")):
                rows = send(draw(max(4, round(rate * seconds)), rate, rng))
            path.write_text(json.dumps(bench_result(rows)), encoding="utf-8")
            path.with_suffix(".log").write_bytes(size_line(log) + log.read_bytes()[begin:])
            files[name].append(path)
            print(f"{path.name}: {len(rows)} requests at {rate:.2f} per second", flush=True)
    return files


def joined(sources: Sequence[MeasurementSource], name: str) -> MeasurementSource:
    """The parts of a load as one source, far apart in time."""
    whole = MeasurementSource(name, [])
    for index, source in enumerate(sources):
        whole.measurements += source.measurements
        for probe in source.probes:
            probe.sent_s += index * PART_GAP_S
            probe.token_s = [at_s + index * PART_GAP_S for at_s in probe.token_s]
        whole.probes += source.probes
    return whole


def predict(options: argparse.Namespace, files: Mapping[str, Sequence[Path]]) -> dict[str, Any]:
    """Fits to the first load by what was measured of it, with the prediction of the second."""
    limits = SchedulerConfig(max_num_seqs=options.max_num_seqs, max_num_batched_tokens=STEP_TOKENS)
    config = EngineCalibrationConfig(json="", measurements=["-"], scheduler=limits)
    first, second = (
        joined(read_sources([str(path) for path in files[name]], limits), name)
        for name in ("first", "second")
    )
    scrapes = [path.with_suffix(".metrics") for path in files["first"]]
    metrics = [metrics_source(parse_scrapes(path.read_text(), str(path)), limits) for path in scrapes]
    logs = read_sources([str(path.with_suffix(".log")) for path in files["first"]], limits)
    fits = {
        "requests": first,
        "log of steps": joined(logs, "first"),
        "metrics": joined(metrics, "first"),
    }
    results = {}
    for name, source in fits.items():
        result = calibrate(config, [source], [second])
        names = ("step_time", "intervals", "num_steps", "held_out_step_errors", "region", "warnings")
        results[name] = {each: result[each] for each in names} | result["loads"][0]
    calibration = options.out / "calibration.json"
    write_json(calibration, {"step_time": results["requests"]["step_time"]})
    results["plan"] = planned(options, files["second"][0], calibration, results["requests"])
    return {"loads": options.loads, "max_num_seqs": options.max_num_seqs, "fits": results}


def planned(
    options: argparse.Namespace, log: Path, calibration: Path, fit: Mapping[str, Any]
) -> dict[str, Any]:
    """What `tailcast plan` says about one replica with the load of a log, beside what was measured."""
    target = options.out / "plan.json"
    words = [str(log), "--step_time_parameters", str(calibration), "--gpus", "cpu=1", "--json", str(target)]
    words += ["--target", "e2e_s.mean<1000", "--num_kv_blocks", "1456", "--prefix_caching", "[false]"]
    words += ["--max_num_seqs", f"[{options.max_num_seqs}]", "--max_num_batched_tokens", f"[{STEP_TOKENS}]"]
    words += ["--orders", "[fcfs]", "--workers", "1", "--overwrite", "true"]
    if (code := plan(words)) not in (0, CHECK_FAILED):
        raise RuntimeError(f"tailcast plan {' '.join(words)} ended with {code}")
    content = json.loads(target.read_text(encoding="utf-8"))
    metrics = content["answer"]["metrics"]
    simulated = {name: metrics[name]["mean"] for name in NAMES}
    measured = {name: fit[name] for name in ("num_requests", "measured")}
    return measured | {"simulated": simulated, "exit_code": code, "text": content["text"]}


def table(results: Mapping[str, Any]) -> str:
    """A row for each prediction: measured and predicted means of the second load in seconds, and errors."""
    rows = []
    for name, fit in results["fits"].items():
        cells = [name, str(fit["num_requests"])]
        for metric in NAMES:
            measured, simulated = fit["measured"][metric], fit["simulated"][metric]
            cells += [f"{measured:.3g}", f"{simulated:.3g}", f"{100 * (simulated / measured - 1):+.1f} %"]
        rows.append(cells)
    header = ["from", "requests"]
    for name in NAMES.values():
        header += [f"{name} mean", "predicted", "error"]
    return markdown_table(header, rows)


def main(args: Sequence[str] | None = None) -> int:
    """Runs the engine and prints the table; returns 2 if a requirement is missing."""
    options = _parser().parse_args(args)
    if options.quick:
        options.first_s, options.second_s, options.at_once, options.max_num_seqs = 12.0, 12.0, 12, 4
    return run_engines(_run, options)


def _run(options: argparse.Namespace) -> int:
    results = predict(options, measure(options))
    print(table(results))
    write_json(options.json or options.out / "results.json", json.loads(json.dumps(results)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(__doc__)
    add = parser.add_argument
    add(
        "--vllm_python", type=Path, default=Path(".venv-vllm/bin/python"), help="Python of vLLM's environment"
    )
    add(
        "--model", type=Path, help="model folder for vLLM; default: SmolLM2, saved next to vLLM's environment"
    )
    add("--out", type=Path, default=Path("out/vllm_predicted"), help="folder of the runs")
    add("--json", type=Path, help="file of the results; default: results.json in the folder")
    add("--loads", type=float, nargs=2, default=[0.35, 0.55], help="loads as fractions of the capacity")
    add("--first_s", type=float, default=35.0, help="seconds of each of the two parts of the first load")
    add("--second_s", type=float, default=90.0, help="seconds of the second load")
    add("--at_once", type=int, default=48, help="requests of the run that gives the capacity")
    add("--max_num_seqs", type=int, default=16)
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="short runs, to check that it works")
    return parser


if __name__ == "__main__":
    sys.exit(main())
