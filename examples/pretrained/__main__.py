"""`python -m examples.pretrained`: makes the predictor that ships with tailcast, tailcast-minilm, and its card."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.pretrained.card import card
from examples.pretrained.prepare import Prepared, prepare
from examples.pretrained.unseen import score_sources
from examples.shell import Shell
from predictors.pretrained import FOLDERS, PRETRAINED, pin
from scheduler_core.command import command
from scheduler_core.files import shared_folder

FOLDER = FOLDERS[PRETRAINED]
NAME = FOLDER.name
RECIPE = Path(__file__).parent / "train.yaml"


@dataclass(frozen=True, kw_only=True)
class PretrainedConfig:
    """Train, calibrate, export and judge the predictor that ships with tailcast."""

    INPUTS = ("data",)

    data: str
    """Folder with castillo_train.parquet, castillo_validation.parquet, multi_model/, repeated_samples/ and more/."""
    out: str = "out/pretrained"
    """Folder for everything that is made; a step whose result is there is left out."""
    install: bool = True
    """Replace the artifact in predictors/pretrained by the new one."""


def pretrained(config: PretrainedConfig) -> None:
    """Runs all steps that have not been done; each prints one line."""
    out = shared_folder(config.out, "pretrained")
    steps = _Steps(Shell(out / "logs"), out, prepare(Path(config.data), out / "data"))
    sys.stdout.write(f"{NAME}, logs in {out / 'logs'}\n")
    steps.train()
    steps.calibrate()
    steps.export()
    steps.evaluate()
    if config.install:
        steps.install()


@dataclass(frozen=True, slots=True)
class _Steps:
    shell: Shell
    out: Path
    files: Prepared

    def train(self) -> None:
        self._once("a", "checkpoint", [
            "train", "--config", RECIPE,
            "--data", json.dumps([str(file) for file in self.files.training]),
            "--data_weights", json.dumps(list(self.files.training.values())),
            "--validation", self.files.calibration,
            "--progress", "false",
        ])  # fmt: skip

    def calibrate(self) -> None:
        self._once("b", "calibrated", [
            "calibrate", self.out / "checkpoint", "--data", self.files.calibration, "--progress", "false",
        ])  # fmt: skip

    def export(self) -> None:
        """The artifact in single precision, and of it the int8 one."""
        self._once("c", "artifact", [
            "export-onnx", self.out / "calibrated", "--artifact_id", NAME, "--license", "Apache-2.0",
        ])  # fmt: skip
        self._once("d", "variants", [
            "export-variants", self.out / "artifact", "--data", self.files.calibration,
            "--variants", '["int8"]', "--progress", "false",
        ])  # fmt: skip

    def evaluate(self) -> None:
        """Figures on the report prompts, and of the sources set aside; writes the card."""
        since = time.monotonic()
        report = self.out / "evaluation.json"
        self.shell.run("e", [
            "evaluate", self.int8, "--data", self.files.report, "--json", report,
            "--compare+", f"float32={self.out / 'artifact'}",
            "--baselines_from", next(iter(self.files.training)), "--progress", "false",
        ])  # fmt: skip
        withheld, *scores = score_sources(self.int8, {"report": self.files.report, **self.files.set_aside})
        text = card(json.loads(report.read_text()), withheld, scores, self.int8)
        (self.out / "README.md").write_text(text, encoding="utf-8")
        self.shell.finished("e", "evaluate", "", since, str(self.out / "README.md"))

    def install(self) -> None:
        """Copies artifact and card to where the package has them, and pins their SHA-256."""
        shutil.rmtree(FOLDER, ignore_errors=True)
        shutil.copytree(self.int8, FOLDER)
        shutil.copy(self.out / "README.md", FOLDER.parent)
        pin(FOLDER)

    @property
    def int8(self) -> Path:
        """The artifact that ships."""
        return self.out / "variants" / "int8"

    def _once(self, letter: str, name: str, command: Sequence[str | Path]) -> None:
        since, target = time.monotonic(), self.out / name
        result = "is there"
        if not target.is_dir():
            self.shell.run(letter, [*command, "--out", target])
            result = str(target)
        self.shell.finished(letter, name, "", since, result)


main = command("pretrained", PretrainedConfig, pretrained, extra="dev")


if __name__ == "__main__":
    sys.exit(main())
