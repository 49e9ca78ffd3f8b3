"""The steps of the CASTILLO example, with their commands and files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import training
from examples.castillo.prepare import prepare
from examples.shell import Shell

CONFIGS = Path(training.__file__).parent / "configs"
#: Name of a data set -> its weight in the loss; 1 for CASTILLO.
WEIGHTS = {"alpaca_eval": 0.3, "oasst": 0.5, "alpaca_52k": 0.5, "alpaca_52k_vicuna": 0.5}
#: Unused sets: short mathematical questions, unlike the prompts of the report.
LEFT_OUT = ("zeroeval",)
#: Sets with many prompts but a single served model, used in the first training run only.
FIRST_PASS_ONLY = ("alpaca_52k", "alpaca_52k_vicuna")
#: Options of the second training run, which starts from the predictor of the first one.
SECOND_PASS = [
    "--stage1.epochs", "4",
    "--stage1.patience", "1",
    "--stage1.learning_rate", "1e-4",
    "--stage1.heads_learning_rate", "5e-4",
]  # fmt: skip
#: Predictors of other papers; their heads are trained on the frozen encoder of minilm-cpu.
BASELINES = {
    "ssjf": "ssjf-bert.yaml",
    "s3": "s3-distilbert-buckets.yaml",
    "ltr": "ltr-opt125m-listmle.yaml",
}
#: Augmentation of each training text: a copy with a claim of urgency, and a copy with a phrase without a claim.
COPIES = ["--augment_claims", "1", "--augment_openers", "1"]


@dataclass(frozen=True, slots=True)
class Castillo:
    """Runs the steps; all files are written to `out`, `shell` runs and records the commands."""

    shell: Shell
    data: Path
    out: Path
    alpaca_share: float
    epochs: int | None

    def run(self, markdown: str) -> None:
        """Runs all steps."""
        start = time.monotonic()
        files = prepare(self.data, self.out / "data", alpaca_share=self.alpaca_share)
        self.shell.finished("a", "prepare", "", start, f"{len(files)} files to train on")
        files = [file for file in files if _set(file) not in LEFT_OUT]
        self._minilm(files)
        self._calibrate("c", "minilm-cpu")
        self._multitask(files)
        self._calibrate("e", "multitask")
        for name, config in BASELINES.items():
            self._baseline(name, config)
        self._urgency()
        for name in ("minilm-cpu", "multitask"):
            self._export(name)
        self._evaluate(markdown)

    def _minilm(self, files: list[Path]) -> None:
        """Trains on all sets, then continues with those that have several served models per prompt."""
        epochs = [] if self.epochs is None else ["--stage1.epochs", str(self.epochs)]
        self._train("b", "minilm-first", "minilm-cpu.yaml", [*self._lengths(files), *epochs])
        again = [file for file in files if _set(file) not in FIRST_PASS_ONLY]
        start = ["--init", str(self.out / "minilm-first")]
        self._train("b", "minilm-cpu", "minilm-cpu.yaml", [*self._lengths(again), *start, *SECOND_PASS])

    def _lengths(self, files: list[Path]) -> list[str]:
        return [
            "--data", json.dumps([str(file) for file in files]),
            "--data_weights", json.dumps([WEIGHTS.get(_set(file), 1.0) for file in files]),
            "--validation", str(self._file("calibration")),
        ]  # fmt: skip

    def _multitask(self, files: list[Path]) -> None:
        own = [file for file in files if _set(file) in ("tune", "castillo")]
        words: list[str] = [
            "--data", json.dumps([str(file) for file in own]),
            "--validation", str(self._file("calibration")),
            *self._urgency_texts(),
            *self._on_own_encoder(),
        ]  # fmt: skip
        self._train("d", "multitask", "multitask.yaml", words)

    def _baseline(self, name: str, config: str) -> None:
        files = [self._file("tune"), self._file("train_castillo")]
        words: list[str] = [
            "--data", json.dumps([str(file) for file in files]),
            "--validation", str(self._file("calibration")),
            *self._on_own_encoder(),
            "--max_length", "192",
            "--stage2.epochs", "6",
            "--stage2.learning_rate", "3e-4",
            "--stage2.batch_size", "32",
        ]  # fmt: skip
        self._train("g", name, config, words)

    def _on_own_encoder(self) -> list[str]:
        return ["--encoder", str(self.out / "minilm-cpu"), "--stage1.epochs", "0"]

    def _calibrate(self, letter: str, name: str) -> None:
        words: list[str | Path] = [
            "calibrate",
            self.out / name,
            "--data",
            self._file("calibration"),
            "--progress",
            "false",
        ]
        self._once(letter, f"{name}-calibrated", lambda out: self.shell.run(letter, [*words, "--out", out]))

    def _export(self, name: str) -> None:
        words: list[str | Path] = [
            "export-onnx",
            self.out / f"{name}-calibrated",
            "--artifact_id",
            f"castillo-{name}",
        ]
        self._once("h", f"{name}-artifact", lambda out: self.shell.run("h", [*words, "--out", out]))

    def _evaluate(self, markdown: str) -> None:
        names = ["minilm-cpu", *BASELINES]
        folders = {name: self.out / name for name in names}
        folders["minilm-cpu"] = self.out / "minilm-cpu-artifact"
        start = time.monotonic()
        command: list[str | Path] = [
            "evaluate", self.out / "multitask-artifact",
            "--data", self._file("report"),
            "--json", self.out / "evaluation.json",
            "--html", self.out / "evaluation.html",
            "--markdown", markdown,
            "--overwrite", "true",
            "--baselines_from", self._file("tune"),
            "--progress", "false",
        ]  # fmt: skip
        for name, folder in folders.items():
            command += ["--compare+", f"{name}={folder}"]
        self.shell.run("i", command)
        self.shell.finished("i", "evaluate", "", start, markdown)

    def _urgency_texts(self) -> list[str]:
        """Options of `train` for labelled texts, with augmented copies of the training texts."""
        return [
            "--urgency_data", str(self._labels("train", ["--splits", "train", *COPIES])),
            "--urgency_validation", str(self._labels("validation", ["--splits", "validation"])),
        ]  # fmt: skip

    def _labels(self, name: str, options: list[str]) -> Path:
        path = self._file(f"urgency_{name}")
        if not path.exists():
            self.shell.run("d", ["import-urgency", path, *options])
        return path

    def _urgency(self) -> None:
        self._train("j", "urgency-minilm", "urgency-minilm.yaml", self._urgency_texts())
        start = time.monotonic()
        command: list[str | Path] = [
            "evaluate-urgency", self.out / "urgency-minilm",
            "--name", "urgency-minilm",
            "--compare", json.dumps([f"multitask={self.out / 'multitask-calibrated'}"]),
            "--data", self._labels("all", COPIES),
            "--json", self.out / "urgency.json",
            "--overwrite", "true",
            "--save_threshold", "true",
        ]  # fmt: skip
        # Exit code 3: claims of urgency raise levels more often than allowed; the JSON file has the details.
        self.shell.run("j", command, allowed=(0, 3))
        self.shell.finished("j", "urgency", "", start, str(self.out / "urgency.json"))

    def _train(self, letter: str, name: str, config: str, words: list[str]) -> None:
        command: list[str | Path] = ["train", "--config", CONFIGS / config, *words, "--progress", "false"]
        self._once(letter, name, lambda out: self.shell.run(letter, [*command, "--out", out]))

    def _once(self, letter: str, name: str, make: Callable[[Path], None]) -> None:
        """Creates a folder with `make` unless it exists; commands resume from their own partial results."""
        out = self.out / name
        start = time.monotonic()
        if out.is_dir():
            self.shell.finished(letter, name, "", start, "exists")
            return
        make(out)
        self.shell.finished(letter, name, "", start, str(out))

    def _file(self, name: str) -> Path:
        return self.out / "data" / f"{name}.parquet"


def _set(file: Path) -> str:
    return file.stem.removeprefix("train_")
