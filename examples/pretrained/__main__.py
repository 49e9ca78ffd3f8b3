"""`python -m examples.pretrained`: train a predictor that is shipped with tailcast (tailcast-minilm or the larger
tailcast-smollm2), and write its card."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from examples.pretrained.amounts import NUM_PROMPTS, amount_rows, composed_prompts, real_requests
from examples.pretrained.card import card, training_sentences
from examples.pretrained.distillation import (
    made_up_prompts,
    real_prompts,
    typical_temperatures,
    version_of,
    write_teacher_rows,
)
from examples.pretrained.language_model import TRAINED, split_checkpoint, write_encoder
from examples.pretrained.minilm import write_average, write_checkpoint
from examples.pretrained.minilm import write_encoder as write_minilm
from examples.pretrained.prepare import Prepared, part_of, prepare
from examples.pretrained.unseen import score_sources
from examples.shell import Shell
from predictors.artifact import open_artifact
from predictors.modules.checkpoint import TRAINING
from predictors.pretrained import FOLDERS, PRETRAINED, pin
from predictors.runtime import ArtifactRuntime, open_runtime
from scheduler_core.ranges import POSITIVE, check_ranges
from scheduler_core.shell.command import command
from scheduler_core.shell.files import sha256_file, shared_folder

RECIPES = Path(__file__).parent
#: Number of training prompts to normalize the hidden states of a language model.
NUM_SCALE_PROMPTS = 256
#: Number of synthetic prompts, which have only predictions of the teacher.
MADE_UP = 6_000
#: Maximum number of characters of a real prompt for which the teachers predict; longer ones take most of their time.
TAUGHT_CHARACTERS = 300
#: Weights of the teachers' predictions in the loss, for CASTILLO's prompts, synthetic ones and those of other sources, and of
#: the lengths of prompts that ask for an amount; true lengths of CASTILLO have weight 1.
TEACHER_WEIGHTS = {"castillo": 0.5, "synthetic": 0.5, "others": 0.2, "amounts": 0.6}
#: Learning rates of a training that continues an earlier one.
CONTINUED_RATES = ("--stage1.learning_rate=5e-5", "--stage1.heads_learning_rate=3e-4")
#: Seed of the synthetic prompts and of the random served models.
SEED = 0


@dataclass(frozen=True, kw_only=True)
class PretrainedConfig:
    """Train, calibrate, export and evaluate a predictor that ships with tailcast."""

    INPUTS = ("data",)

    data: str
    """Folder with castillo_train.parquet, castillo_validation.parquet, multi_model/, repeated_samples/ and more/."""
    predictor: Literal["minilm", "smollm2"] = "minilm"
    """minilm: the artifact `pretrained`; smollm2: on 18 layers of a language model, better and slower."""
    out: str = "out/pretrained"
    """Folder for all results; steps whose result exists are skipped."""
    teacher: str | None = "out/smollm2/checkpoint"
    """Checkpoint folder of the teacher; the default is created by `make smollm2`. minilm learns its predictions for the shorter training prompts and for synthetic prompts, in addition to the true lengths. null: only the true lengths."""
    initial: str | None = "pretrained"
    """int8 artifact of a previous version of tailcast-minilm (a folder, or pretrained); training of minilm starts from its encoder, and it is the second teacher. null: training starts from all-MiniLM-L6-v2, which needs more epochs."""
    continued: str | None = None
    """Checkpoint folder of an earlier run, or its int8 artifact (a folder, or pretrained). Training then continues from it, at lower rates, on a `share` of the prompts and on all those with options of reasoning or formats or that ask for an amount; the teacher predicts only for the last."""
    share: float = 0.4
    """Share of the prompts of a continued training."""
    continued_weight: float = 0.5
    """Weight of a continued training in the average of its weights and those that it continued from; 1: no average."""
    train_options: tuple[str, ...] = ()
    """Additional options of `train`, such as --stage1.epochs=8; they override the recipe."""
    export: bool = True
    """Export, evaluate and install the predictor; false: stop after the calibrated checkpoint."""
    install: bool = True
    """Replace the artifact in predictors/pretrained, or the trained weights in examples/pretrained/smollm2."""

    def __post_init__(self) -> None:
        check_ranges(self, share=(POSITIVE, 1), continued_weight=(POSITIVE, 1))


def pretrained(config: PretrainedConfig) -> None:
    """Runs all steps without a result; each prints one line."""
    out = shared_folder(config.out, "pretrained")
    files = prepare(Path(config.data), out / "data")
    steps = _Steps(Shell(out / "logs"), out, files, f"tailcast-{config.predictor}")
    sys.stdout.write(f"{steps.name}, logs in {out / 'logs'}\n")
    options: list[str | Path] = ["--config", RECIPES / f"{config.predictor}.yaml"]
    training, previous = dict(files.training), None
    if config.predictor == "minilm":
        previous = None if config.initial is None else open_runtime(config.initial, provider="cpu")
        if config.teacher is not None and config.continued is None:
            training |= steps.teach(Path(config.teacher), previous)
    if config.continued is not None:
        initial = steps.checkpoint_of(config.continued)
        training = part_of(training, config.share)
        if config.predictor == "minilm" and config.teacher is not None:
            training |= steps.amounts(Path(config.teacher), typical_temperatures(files))
        options += ["--init", initial, *CONTINUED_RATES]
    options += ["--encoder", steps.encoder(config.predictor, previous), *config.train_options]
    steps.train(options, training)
    trained = "checkpoint"
    if config.continued is not None and config.continued_weight < 1:
        trained = steps.average(initial, config.continued_weight)
    steps.calibrate(trained)
    if not config.export:
        return
    steps.export()
    if config.predictor == "minilm":
        steps.quantize()
        start = "checkpoint" if config.continued else "encoder" if previous else None
        training_text = training_sentences(
            start=start, distilled=config.teacher is not None, share=config.share
        )
        steps.evaluate(steps.int8, ["--compare+", f"float32={out / 'artifact'}"], training_text)
    else:
        steps.evaluate(out / "artifact", [], "")
    if config.install and config.predictor == "smollm2":
        shutil.rmtree(TRAINED, ignore_errors=True)
        split_checkpoint(out / "calibrated", out / "encoder", TRAINED)
        shutil.copy(out / "README.md", TRAINED)
    elif config.install:
        steps.install(FOLDERS[PRETRAINED])


@dataclass(frozen=True, slots=True)
class _Steps:
    shell: Shell
    out: Path
    files: Prepared
    name: str

    def encoder(self, predictor: str, previous: ArtifactRuntime | None) -> Path:
        """Creates the encoder folder if necessary, and returns it."""
        folder = self.out / "encoder"
        if folder.is_dir():
            return folder
        if predictor == "minilm":
            write_minilm(folder, None if previous is None else previous.artifact.path)
        else:
            prompts = pd.read_parquet(next(iter(self.files.training))).prompt.drop_duplicates()
            number = min(NUM_SCALE_PROMPTS, len(prompts))
            write_encoder(folder, prompts.sample(number, random_state=0).tolist())
        return folder

    def teach(self, checkpoint: Path, previous: ArtifactRuntime | None) -> dict[Path, float]:
        """Creates the files of the teachers' predictions if necessary, and returns them with their weights in the loss; their
        names have the versions of what they were made from: the checkpoint's weights, the artifact, and the prompts."""
        since, version = time.monotonic(), sha256_file(checkpoint / "model.safetensors")[:8]
        if previous is not None:
            version += f"-{previous.artifact.manifest.artifact_version}"
        castillo, others = real_prompts(self.files)
        made_up = dict.fromkeys(made_up_prompts(castillo, others, MADE_UP, SEED))
        parts = {"synthetic": list(made_up)}
        for name, real in (("castillo", castillo), ("others", others)):
            parts[name] = [prompt for prompt in real if len(prompt) <= TAUGHT_CHARACTERS]
        temperatures, files = typical_temperatures(self.files), dict[Path, float]()
        for name, prompts in parts.items():
            file = self.out / "data" / f"teacher-{version}-{version_of(prompts, temperatures)}-{name}.parquet"
            files[file] = TEACHER_WEIGHTS[name]
            if not file.is_file():
                write_teacher_rows(file, checkpoint, previous, prompts, temperatures, SEED)
            self.shell.finished("t", "teacher", "", since, str(file))
        return files | self.amounts(checkpoint, temperatures)

    def amounts(self, checkpoint: Path, temperatures: Mapping[str, float]) -> dict[Path, float]:
        """Creates the file of composed prompts that ask for an amount if necessary, and returns it with its weight."""
        since, version = time.monotonic(), sha256_file(checkpoint / "model.safetensors")[:8]
        prompts = composed_prompts(real_requests(self.files), NUM_PROMPTS, np.random.default_rng(SEED))
        file = self.out / "data" / f"amounts-{version}-{version_of(prompts, temperatures)}.parquet"
        if not file.is_file():
            amount_rows(file, checkpoint, prompts, temperatures, SEED)
        self.shell.finished("t", "amounts", "", since, str(file))
        return {file: TEACHER_WEIGHTS["amounts"]}

    def checkpoint_of(self, continued: str) -> Path:
        """The checkpoint folder to continue; created if necessary, if `continued` is an artifact."""
        if (Path(continued) / TRAINING).is_file():
            return Path(continued)
        folder = self.out / "initial"
        if not folder.is_dir():
            write_checkpoint(folder, open_artifact(continued))
        return folder

    def train(self, options: Sequence[str | Path], training: Mapping[Path, float]) -> None:
        self._once("a", "checkpoint", [
            "train", *options,
            "--data", json.dumps([str(file) for file in training]),
            "--data_weights", json.dumps(list(training.values())),
            "--validation", json.dumps([str(file) for file in self.files.choice]),
            "--progress", "false",
        ])  # fmt: skip

    def average(self, earlier: Path, weight: float) -> str:
        """Averages the checkpoint with the one that it continued from if necessary, and returns the folder's name."""
        folder = self.out / "averaged"
        if not folder.is_dir():
            write_average(folder, earlier, self.out / "checkpoint", weight)
        return folder.name

    def calibrate(self, checkpoint: str) -> None:
        self._once("b", "calibrated", [
            "calibrate", self.out / checkpoint, "--data", self.files.calibration, "--progress", "false",
        ])  # fmt: skip

    def export(self) -> None:
        """Exports the artifact in single precision."""
        self._once("c", "artifact", [
            "export-onnx", self.out / "calibrated", "--artifact_id", self.name, "--license", "Apache-2.0",
        ])  # fmt: skip

    def quantize(self) -> None:
        """Creates the int8 artifact."""
        self._once("d", "variants", [
            "export-variants", self.out / "artifact", "--data", self.files.calibration,
            "--variants", '["int8"]', "--progress", "false",
        ])  # fmt: skip

    def evaluate(self, artifact: Path, options: Sequence[str | Path], training_text: str) -> None:
        """Evaluates on the report prompts and on the held-out sources, and writes the card."""
        since = time.monotonic()
        report = self.out / "evaluation.json"
        self.shell.run("e", [
            "evaluate", artifact, "--data", self.files.report, "--json", report, "--overwrite", "true",
            *options, "--baselines_from", next(iter(self.files.training)), "--progress", "false",
        ])  # fmt: skip
        withheld, *scores = score_sources(artifact, {"report": self.files.report, **self.files.set_aside})
        text = card(self.name, json.loads(report.read_text()), withheld, scores, artifact, training_text)
        (self.out / "README.md").write_text(text, encoding="utf-8")
        self.shell.finished("e", "evaluate", "", since, str(self.out / "README.md"))

    def install(self, folder: Path) -> None:
        """Copies artifact and card into the package, and pins the SHA-256 of the artifact's files."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.int8, folder)
        shutil.copy(self.out / "README.md", folder.parent)
        pin(folder)

    @property
    def int8(self) -> Path:
        """Folder of the artifact that is shipped."""
        return self.out / "variants" / "int8"

    def _once(self, letter: str, name: str, command: Sequence[str | Path]) -> None:
        since, target = time.monotonic(), self.out / name
        result = "exists"
        if not target.is_dir():
            self.shell.run(letter, [*command, "--out", target])
            result = str(target)
        self.shell.finished(letter, name, "", since, result)


main = command("pretrained", PretrainedConfig, pretrained, extra="dev")


if __name__ == "__main__":
    sys.exit(main())
