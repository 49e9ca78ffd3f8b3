"""Comparison of prediction servers with the same ONNX model and prompts; the load comes from another process.

    python -m benchmarks.service [--artifact ARTIFACT]  # default: all-MiniLM-L6-v2 with random heads
    python -m benchmarks.service --quick                # everything once, two seconds each
    python -m benchmarks.service --only tailcast --only 'Mosec, batch 1' --rounds 6

In each round every server is restarted and gets three loads: 20 req/s (open loop), 64 callers (closed loop),
then 70 % of our saturation (open loop). Servers that are not installed are skipped; to install them:

    python3.11 -m venv peers
    peers/bin/pip install mosec==0.9.8 'ray[serve]==2.60.0' onnxruntime tokenizers
    python -m benchmarks.service --peers_python peers/bin/python

"req/cpu-s" is responses per CPU second of the server and all its processes. It is the value to compare: on a
busy machine it changes by less than about 10 %, while rates and latencies change more.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.service.load_generator import OK
from benchmarks.service.servers import OURS, VARIANTS, Variant, is_installed
from benchmarks.shared.command import Parser
from benchmarks.shared.processes import ROOT, Process
from scheduler_core.report.page import markdown_table

CALLERS = 64
HEADER = (
    "server", "saturation req/s", "req/cpu-s", "20: p50/p99 ms", "70 %: p50/p99 ms", "answered", "PSS MB", "start s",
    "CPU s", "lines",
)  # fmt: skip


@dataclass(slots=True)
class Row:
    """Measurements of one server: one entry per round; reports by load."""

    variant: Variant
    processes: list[tuple[float, float, float]] = field(
        default_factory=list
    )  # PSS in MB, start in s and CPU s
    reports: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def values(self, load: str, name: str) -> list[Any]:
        """A value of each report."""
        return [report[name] for report in self.reports.get(load, [])]

    def cells(self) -> list[str]:
        """Cells of the table."""
        if not self.reports:
            return [self.variant.name, *["-"] * (len(HEADER) - 2), "; ".join(self.failures)]
        cells = [
            self.variant.name,
            *(_range(self.values("saturation", name)) for name in ("answers_per_s", "per_cpu_s")),
        ]
        for load in ("20", "70%"):
            latencies = [one for one in self.values(load, "latency_ms") if one]
            medians = [
                f"{statistics.median(one[name] for one in latencies):.0f}"
                for name in ("p50", "p99")
                if latencies
            ]
            cells.append("/".join(medians) or "-")
        total = sum(self.values("70%", "num_requests"))
        answered = sum(statuses.get(OK, 0) for statuses in self.values("70%", "statuses"))
        cells.append(f"{answered / total:.0%}" if total else "-")
        pss_mb, *start = (statistics.median(values) for values in zip(*self.processes, strict=True))
        cells += [f"{pss_mb:.0f}", *(f"{value:.1f}" for value in start), str(self.variant.user_lines)]
        return cells


def _range(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean = statistics.mean(values)
    return f"{mean:.0f} ({min(values):.0f}-{max(values):.0f})" if len(values) > 1 else f"{mean:.0f}"


@dataclass(slots=True)
class Bench:
    """Options of the comparison for one artifact."""

    artifact: Path
    options: argparse.Namespace

    def load(self, url: str, **options: float) -> dict[str, Any]:
        """Runs one load in another process and returns its report; RuntimeError with the end of its stderr if it fails."""
        words = [f"--{name}={value}" for name, value in options.items()]
        words += [f"--{name}={getattr(self.options, name)}" for name in ("seconds", "seed")]
        command = [sys.executable, "-m", "benchmarks.service.load_generator", url]
        result = subprocess.run([*command, *words], check=False, capture_output=True, cwd=ROOT)
        if result.returncode:
            raise RuntimeError(result.stderr.decode(errors="replace")[-500:])
        report: dict[str, Any] = json.loads(result.stdout)
        return report

    def saturation(self) -> float:
        """Approximate saturation of our server in responses per second; loads are fractions of it."""
        with OURS.serve(self.artifact, self.options.peers_python) as (_, url):
            return float(self.load(url, callers=CALLERS, warmup_s=1)["answers_per_s"])

    def measure(self, row: Row, saturation: float) -> None:
        """Measures one server in one round."""
        loads: dict[str, dict[str, float]] = {
            "20": {"rate": 20.0},
            "saturation": {"callers": CALLERS, "warmup_s": 1},
            "70%": {"rate": 0.7 * saturation, "warmup_s": 0.5},
        }
        with row.variant.serve(self.artifact, self.options.peers_python) as (process, url):
            for name, load in loads.items():
                self._phase(row, process, url, name, load)
            row.processes.append((process.pss_mb(), process.start_s, process.start_cpu_s))

    def _phase(self, row: Row, process: Process, url: str, name: str, load: dict[str, float]) -> None:
        before = process.cpu_s()
        report = self.load(url, **load)
        # The warm-up costs CPU too, so its responses count as well.
        per_cpu_s = report["all_answers"] / max(process.cpu_s() - before, 1e-9)
        row.reports.setdefault(name, []).append(report | {"per_cpu_s": per_cpu_s})

    def compare(self, variants: Sequence[Variant]) -> None:
        """Measures all servers and prints the tables."""
        rows = [Row(variant) for variant in variants]
        saturation = self.saturation()
        for turn in range(self.options.rounds):
            for row in rows if turn % 2 == 0 else reversed(rows):
                try:
                    self.measure(row, saturation)
                except RuntimeError as error:
                    row.failures.append(str(error).strip().splitlines()[-1])
                print(f"round {turn + 1}: {row.variant.name}", file=sys.stderr)
        print(
            f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}, 70 % of {saturation:.0f} req/s\n"
        )
        print(markdown_table(HEADER, [row.cells() for row in rows]))


def export_minilm(folder: Path) -> Path:
    """Exports all-MiniLM-L6-v2 with random heads, which is as fast as a trained predictor."""
    from benchmarks.predictors.onnx_latency import ENCODERS, make_model
    from export.exporter import ExportConfig, export_onnx
    from predictors.modules.checkpoint import save_checkpoint
    from predictors.modules.encoder import load_tokenizer

    model, tokenizer = make_model("minilm", max_length=256), load_tokenizer(ENCODERS["minilm"])
    save_checkpoint(folder / "checkpoint", model, tokenizer, {})
    export_onnx(ExportConfig(checkpoint=str(folder / "checkpoint"), out=str(folder / "artifact")))
    return folder / "artifact"


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--artifact", type=Path, help="default: MiniLM with random heads")
    parser.add_argument("--peers_python", default=sys.executable, help="Python with the other servers")
    parser.add_argument(
        "--only", action="append", help="only servers with this name, or else with it in the name"
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="duration of each load")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one round of two seconds")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # also stops the servers
    if options.quick:
        options.seconds, options.rounds = 2.0, 1
    parts = [part.lower() for part in options.only or [""]]
    names = {variant.name.lower(): variant for variant in VARIANTS}
    selected = [
        one for name, one in names.items() if any(p == name or (p not in names and p in name) for p in parts)
    ]
    there = [variant for variant in selected if is_installed(variant.package, options.peers_python)]
    for name in sorted({str(variant.package) for variant in selected if variant not in there}):
        print(f"{name} is not installed: skipped")
    with tempfile.TemporaryDirectory() as folder:
        artifact = options.artifact or export_minilm(Path(folder))
        print(f"{artifact.name}, {options.rounds} rounds of {options.seconds} s for each load")
        Bench(artifact.resolve(), options).compare(there)


if __name__ == "__main__":
    main()
