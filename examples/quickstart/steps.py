"""The steps of the quickstart, with their commands, files, and a one-line result for each."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import training
from data_gen.samples import read_samples, write_samples
from data_gen.splits import split_of
from examples.quickstart.sizes import SHIPPED_LIMIT, SHIPPED_PROMPTS, Size
from examples.quickstart.tables import join_samples, trace_of, write_trace
from examples.shell import Shell, StepFailedError
from predictors.client import GrpcPredictor
from scheduler_core.prediction.predictor import PredictionRequest
from scheduler_core.shell.files import write_json
from scheduler_core.simulator.workloads.arrivals import Arrivals

SHIPPED_SAMPLES = Path(__file__).parent / "data" / "smollm2_135m.parquet"
TRAIN_CONFIG = Path(training.__file__).parent / "configs" / "minilm-quickstart.yaml"
SPLIT_SEED = 0
MAX_NUM_SEQS = 32
# (label in the report, policy, whether it uses predictions of the endpoint).
POLICIES = (
    ("FCFS", "fcfs", False),
    ("SSJF", "ssjf", True),
    ("TIE", "tie", True),
    ("bounded shortest first", "bounded_shortest", True),
    ("SJF, true lengths", "sjf", False),
)


@dataclass(frozen=True, slots=True)
class Quickstart:
    """Runs the steps; all files are written to `out`, `shell` runs and records the commands."""

    shell: Shell
    out: Path
    size: Size

    def run(self) -> None:
        """Runs steps a to g, which write the input of the report to `out`."""
        self._gen_samples()
        self._join()
        self._fit_dist()
        self._train()
        self._export()
        with self._served() as address:
            self._predict(address)
            self._simulate(address)

    def _gen_samples(self) -> None:
        size, live = self.size, self.out / "live.parquet"
        command = [
            "gen-samples",
            SHIPPED_PROMPTS,
            "--skip",
            str(SHIPPED_LIMIT),
            "--limit",
            str(size.num_live_prompts),
            "--out",
            str(live),
            "--num-samples",
            str(size.num_samples),
            "--max-tokens",
            str(size.max_tokens),
            "--overwrite",
            "true",
        ]
        start = time.monotonic()
        self.shell.run("a", command)
        samples = read_samples(live)
        tokens = pc.sum(samples.column("output_tokens")).as_py()
        model = samples.column("model")[0].as_py()
        self._finished(
            "a", "gen-samples", command, start, f"{samples.num_rows} samples, {tokens} tokens from {model}"
        )

    def _join(self) -> None:
        start = time.monotonic()
        shipped = read_samples(SHIPPED_SAMPLES)
        if self.size.num_shipped_prompts is not None:
            prompt_ids = list(dict.fromkeys(shipped.column("prompt_id").to_pylist()))[
                : self.size.num_shipped_prompts
            ]
            shipped = shipped.filter(pc.is_in(shipped.column("prompt_id"), pa.array(prompt_ids)))
        part = self.out / "shipped.parquet"
        write_samples(part, shipped)
        joined = join_samples([part, self.out / "live.parquet"])
        write_samples(self.out / "samples.parquet", joined)
        prompts = pc.count_distinct(joined.column("prompt_id")).as_py()
        self._finished(
            "b", "join", [], start, f"{joined.num_rows} samples of {prompts} prompts with the shipped set"
        )

    def _fit_dist(self) -> None:
        summary = self.out / "fit-dist.json"
        command = [
            "fit-dist",
            str(self.out / "samples.parquet"),
            "--out",
            str(self.out / "fits.parquet"),
            "--json",
            str(summary),
            "--figure",
            str(self.out / "fits.png"),
            "--overwrite",
            "true",
        ]
        start = time.monotonic()
        self.shell.run("c", command)
        rates = _read(summary)["ks"]
        rates_text = ", ".join(f"{name} {_percent(row['pass_rate'])}" for name, row in rates.items())
        self._finished("c", "fit-dist", command, start, f"KS pass rates: {rates_text}")

    def _train(self) -> None:
        checkpoint, metrics = self.out / "checkpoint", self.out / "evaluation-checkpoint.json"
        command = [
            "train",
            "--config",
            _relative(TRAIN_CONFIG),
            "--data",
            str(self.out / "fits.parquet"),
            "--out",
            str(checkpoint),
            "--split-seed",
            str(SPLIT_SEED),
            "--overwrite",
            "true",
            "--resume",
            "false",
            *self.size.train_options,
        ]
        start = time.monotonic()
        self.shell.run("d", command)
        self._evaluate("d", checkpoint, metrics)
        self._finished("d", "train", command, start, _quality(_read(metrics)["model"]))

    def _export(self) -> None:
        artifact, metrics = self.out / "artifact", self.out / "evaluation-artifact.json"
        command = ["export-onnx", str(self.out / "checkpoint"), "--out", str(artifact), "--overwrite", "true"]
        start = time.monotonic()
        self.shell.run("e", command)
        self._evaluate("e", artifact, metrics)
        difference = max(_read(artifact / "manifest.json")["parity"]["max_abs_diff"].values())
        size_mb = (artifact / "model.onnx").stat().st_size / 1e6
        self._finished(
            "e",
            "export-onnx",
            command,
            start,
            f"{size_mb:.0f} MB, torch and ONNX differ by at most {difference:.1e}",
        )

    def _evaluate(self, letter: str, model: Path, metrics: Path) -> None:
        self.shell.run(
            letter,
            [
                "evaluate",
                str(model),
                "--data",
                str(self.out / "fits.parquet"),
                "--split",
                "test",
                "--json",
                str(metrics),
                "--overwrite",
                "true",
            ],
        )

    @contextmanager
    def _served(self) -> Iterator[str]:
        port_file = self.out / "port"
        port_file.unlink(missing_ok=True)
        command = [
            "serve-predictor",
            str(self.out / "artifact"),
            "--port",
            "0",
            "--port-file",
            str(port_file),
        ]
        with self.shell.serving("f", command, port_file) as port:
            yield f"127.0.0.1:{port}"

    def _predict(self, address: str) -> None:
        """Predicts all test prompts in one call of the asynchronous client, and writes the predictions for the report."""
        fits = pq.read_table(self.out / "fits.parquet").to_pylist()
        test = [fit for fit in fits if split_of(fit["prompt_id"], SPLIT_SEED) == "test"]
        requests = [PredictionRequest(fit["prompt_id"], fit["prompt"], fit["max_tokens"]) for fit in test]
        start = time.monotonic()

        async def healthy_and_predicted() -> Any:
            predictor = GrpcPredictor(address)
            try:
                await _check_health(address)
                return [prediction.length for prediction in await predictor.predict(requests)]
            finally:
                await predictor.close()

        predictions = asyncio.run(healthy_and_predicted())
        rows = [
            {
                "prompt_id": request.request_id,
                "mu": prediction.mu,
                "sigma": prediction.sigma,
                "nu": prediction.nu,
            }
            for request, prediction in zip(requests, predictions, strict=True)
        ]
        write_json(self.out / "predictions.json", rows)
        seconds = time.monotonic() - start
        command = ["serve-predictor", str(self.out / "artifact"), "--port", "0"]
        self._finished(
            "f",
            "serve-predictor",
            command,
            start,
            f"{len(rows)} predictions over gRPC at {len(rows) / seconds:.0f} per second",
        )

    def _simulate(self, address: str) -> None:
        start = time.monotonic()
        samples = read_samples(self.out / "samples.parquet")
        test = {
            name for name in samples.column("prompt_id").to_pylist() if split_of(name, SPLIT_SEED) == "test"
        }
        trace = self.out / "trace.parquet"
        # The times only determine the order; `simulate` draws arrival times for the configured load.
        write_trace(trace, trace_of(samples, Arrivals(rate_rps=10.0), 1, test))
        commands: list[str] = []
        ttft: dict[str, float] = {}
        for label, policy, uses_predictions in POLICIES:
            result = self.out / f"simulation-{policy}.json"
            command = [
                "simulate",
                "run",
                "--trace",
                str(trace),
                "--policy",
                policy,
                "--json",
                str(result),
                "--load",
                str(self.size.load),
                "--seed",
                "1",
                "--scheduler.max-num-seqs",
                str(MAX_NUM_SEQS),
                "--overwrite",
                "true",
            ]
            if uses_predictions:
                command += ["--predictor", f"grpc://{address}"]
            self.shell.run("g", command)
            commands.append(" ".join(command))
            ttft[label] = _read(result)["metrics"]["ttft_s"]["mean"]
        means = ", ".join(f"{label} {seconds:.2f} s" for label, seconds in ttft.items())
        self.shell.finished("g", "simulate", "\n".join(commands), start, f"mean TTFT: {means}")

    def _finished(self, letter: str, title: str, command: Sequence[str], start: float, result: str) -> None:
        self.shell.finished(letter, title, " ".join(command), start, result)


async def _check_health(address: str) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with grpc.aio.insecure_channel(address) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    if health.status != health_pb2.HealthCheckResponse.SERVING:
        raise StepFailedError(f"step f: the endpoint at {address} reports that it is not serving")


def _relative(path: Path) -> str:
    """The path relative to the working directory if it is inside, for short command lines in the report."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _quality(metrics: dict[str, Any]) -> str:
    levels = metrics["coverage"]
    tau = metrics["kendall_tau"]["median_vs_fitted_mu"]
    covered = " / ".join(_percent(levels[level]["estimate"]) for level in ("p50", "p90", "p99"))
    return (
        f"test R2 {_number(metrics['mu']['r2'])} (mu) {_number(metrics['sigma']['r2'])} (sigma), "
        f"tau {_number(tau)}, coverage of P50/P90/P99 {covered}"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.0f} %"
