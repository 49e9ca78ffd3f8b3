"""Training steps of `benchmarks.gpu`: `examples.pretrained` on the GPU, its scores, its weights in parts."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from safetensors.torch import load_file, save_file

from examples.pretrained.card import scores_table
from examples.pretrained.prepare import CHOICE, SET_ASIDE, SOURCES
from scheduler_core.shell.files import atomic_file, sha256_file, shared_folder

#: Step -> options of `train` in addition to those of the recipe.
TRAIN_OPTIONS = {
    "minilm": ("--stage1.epochs=8",),
    "smollm2_full": ("--lora=null", "--stage1.epochs=4", "--stage1.learning_rate=1e-4"),
}
#: A teacher's predictions for training prompts, as `examples.pretrained` writes them.
TEACHER = "teacher.parquet"
WEIGHTS = "model.safetensors"
#: Files of the folder of public length sets that `examples.pretrained` reads.
DATA_FILES = (
    "castillo_train.parquet",
    "castillo_validation.parquet",
    *(f"{source.file}.parquet" for source in SOURCES),
    *(f"more/{name}.parquet" for name in (*CHOICE, *SET_ASIDE)),
)
#: Number of prompts in a check, per CASTILLO file and per other source.
NUM_CASTILLO_PROMPTS, NUM_SOURCE_PROMPTS = 120, 24


def training_words(
    step: str, data: Path, out: Path, passes: int | None, *, check: bool, teacher: Path | None
) -> Sequence[str]:
    """Module and options to train minilm and evaluate it, or to train smollm2_full; a check is small.

    Args:
        step: A key of `TRAIN_OPTIONS`.
        data: Folder of public length sets.
        out: Output folder.
        passes: Number of epochs; None: that of `TRAIN_OPTIONS`, or 1 in a check.
        teacher: File of a teacher's predictions for minilm; None: `TEACHER` in `data`, if it exists.
    """
    options = [*TRAIN_OPTIONS[step], "--precision=bf16-mixed", f"--accelerator={'cpu' if check else 'cuda'}"]
    if passes or check:
        options.append(f"--stage1.epochs={passes or 1}")
    rows = teacher or data / TEACHER
    if check:
        data = _few_prompts(data, out.with_name(f"{step}-data"))
    words = ["examples.pretrained", "--data", str(data), "--out", str(out), "--install", "false"]
    words += ["--predictor", step.partition("_")[0], "--train_options", json.dumps(options)]
    if step == "smollm2_full":  # its artifact would be evaluated on the CPU
        return [*words, "--teacher", "null", "--export", "false"]
    if not rows.is_file():
        return [*words, "--teacher", "null"]
    target = shared_folder(out, "pretrained") / "data" / TEACHER
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(rows, target)
    return words


def training_table(step: str, out: Path) -> str:
    """Markdown of a trained predictor: training speed, and scores on the report prompts."""
    training = json.loads((out / "checkpoint" / "training.json").read_text(encoding="utf-8"))
    evaluation = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    speed, metrics = training["throughput"]["stage1"], training["metrics"]
    cells = {
        "prompts": training["data"]["num_prompts"]["train"],
        "outputs": training["data"]["num_samples"]["train"],
        "passes": training["config"]["stage1"]["epochs"],
        "seconds": speed["train_seconds"],
        "tokens/s": speed["tokens_per_second"],
        "best pass": f"{metrics['best_epoch'] + 1} of stage {metrics['best_stage']}",
        "validation loss": f"{metrics['validation_loss']:.4f}",
    }
    rows = {step: evaluation["model"], **evaluation.get("compared", {})}
    table = f"| {' | '.join(cells)} |\n{'|---:' * len(cells)}|\n| {' | '.join(map(str, cells.values()))} |\n"
    return f"{table}\nCASTILLO's report prompts:\n\n{scores_table('predictor', rows)}"


def write_weights(step: str, out: Path, part_mib: float) -> Path:
    """Folder of STEP-fp16, the calibrated checkpoint in float16, and of STEP-int8, if any.

    Each is a tar archive in parts of at most `part_mib` MiB; SHA256SUMS has the sums of the parts.
    """
    parts = out / "parts"
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir()
    with tempfile.TemporaryDirectory(dir=out) as temporary:
        half = Path(shutil.copytree(out / "calibrated", Path(temporary, "checkpoint")))
        halve(half / WEIGHTS, half / WEIGHTS)
        folders = {f"{step}-fp16": half, f"{step}-int8": out / "variants" / "int8"}
        for name, folder in folders.items():
            if folder.is_dir():
                with tarfile.open(parts / f"{name}.tar", "w") as archive:
                    archive.add(folder, name)
                command = ["split", f"-b{int(part_mib * 2**20)}", "-d", "-a3", f"{name}.tar", f"{name}.tar."]
                subprocess.run(command, cwd=parts, check=True)
                (parts / f"{name}.tar").unlink()
    sums = [f"{sha256_file(part)}  {part.name}\n" for part in sorted(parts.iterdir())]
    (parts / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    return parts


def halve(source: Path, target: Path) -> None:
    """Writes the weights of a safetensors file in float16."""
    weights = {name: value.half() for name, value in load_file(source).items()}
    with atomic_file(target) as temporary:
        save_file(weights, str(temporary), metadata={"format": "pt"})


def _few_prompts(data: Path, out: Path) -> Path:
    """Writes a copy of the public length sets with few prompts."""
    for name in DATA_FILES:
        table = pd.read_parquet(data / name)
        prompts = table.prompt.drop_duplicates()
        number = NUM_CASTILLO_PROMPTS if name.startswith("castillo") else NUM_SOURCE_PROMPTS
        few = prompts.sample(min(number, len(prompts)), random_state=0)
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        table[table.prompt.isin(few)].to_parquet(out / name)
    return out
