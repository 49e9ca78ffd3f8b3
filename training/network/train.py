"""The training run, from data to checkpoint folder: splits, initial model, stages, metadata."""

from __future__ import annotations

import json
import logging
import shutil
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_gen.splits import smallest_hashes
from predictors.modules.checkpoint import CONFIG, KIND, WEIGHTS, save_checkpoint
from predictors.modules.encoder import resolve_encoder
from predictors.modules.predictor import PromptPredictor
from scheduler_core.errors import InputError
from scheduler_core.shell.command import report_left_out
from scheduler_core.shell.files import (
    existing_file,
    folder_target,
    locked_folder,
    sha256_file,
    write_json,
)
from scheduler_core.shell.versions import versions_of
from training.fitting.baselines import Baselines
from training.fitting.rows import SCHEMA, Rows
from training.network.config import FILE_OPTIONS, TrainConfig
from training.network.data import SplitData, UrgencyLabels
from training.network.distributed import node_rank
from training.network.failures import NoProgressError
from training.network.inference import has_bfloat16, pick_device
from training.network.initial_model import InitialModel, initial_model, with_architecture_of_init
from training.network.splits import SplitRows, read_split_labels, read_split_rows
from training.network.trainer import COUNTS, LAST, History, best_row, train_stages, write_history

log = logging.getLogger(__name__)

PACKAGES = ("torch", "lightning", "transformers", "tokenizers", "safetensors", "numpy", "scipy", "pyarrow")
IDENTITY = "identity.json"
# Options that are not compared when a run is resumed: they do not affect the result, or their files are hashed.
NOT_IDENTITY = (*FILE_OPTIONS, "out", "overwrite", "resume", "progress", "threads", "tensorboard")


def run(config: TrainConfig) -> int:
    """Runs the command; returns its exit code, see `report_left_out`."""
    data = train(config).get("data")
    if data is None:  # another process writes the checkpoint
        return 0
    reasons = {
        "no usable fit, such as too few samples": data["num_excluded"],
        "same text as a prompt of validation or test": data["num_shared_prompts"],
    }
    num_prompts = sum(data["num_prompts"].values()) + data["num_test_prompts"] + sum(reasons.values())
    return report_left_out(reasons, num_prompts, "prompts")


def train(config: TrainConfig) -> dict[str, Any]:
    """Trains a predictor and writes its checkpoint folder; returns the content of `training.json`.

    InputError if an option, the data or the encoder is invalid, or `OUT.partial` belongs to another run; TailcastError if
    training diverges, or a batch does not fit into memory.
    """
    out = folder_target(config.out, KIND, overwrite=config.overwrite)
    work = out.with_name(out.name + ".partial")
    is_first = node_rank(config) == 0
    with locked_folder(work, "out") if is_first else nullcontext():
        return _train(config, out, work, is_first)


def _train(config: TrainConfig, out: Path, work: Path, is_first: bool) -> dict[str, Any]:
    files = {name: [existing_file(path, name) for path in paths] for name, paths in config.files.items()}
    if config.init is None:
        resolve_encoder(config.encoder)
    if config.only_conditioning:
        config = with_architecture_of_init(config)
    device = pick_device(config.accelerator)
    if config.precision == "bf16-mixed" and not has_bfloat16(device):
        log.warning(
            "precision bf16-mixed: this device has no bfloat16 instructions, 32-true is several times faster"
        )
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    identity = _identity(config, files)
    if is_first:
        _check_state(work, identity, resume=config.resume)
    if config.precision == "auto":
        config = replace(config, precision="bf16-mixed" if has_bfloat16(device) else "32-true")

    no_rows = Rows(SCHEMA.empty_table())
    rows = read_split_rows(config) if config.needs_rows else SplitRows(no_rows, no_rows)
    labels = read_split_labels(config)
    _warn_of_several_models(config, rows.train)
    # Layer initialization and dropout use torch's global random state, which is restored afterwards.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        initial = initial_model(config, rows.train, labels[0])
        if initial.first_new_model is not None:
            rows = _of_new_models(rows, initial)
        splits = _splits(initial, rows, labels)
        if is_first:
            write_json(work / IDENTITY, identity)
        try:
            history = train_stages(config, initial, splits, work, device)
        except NoProgressError:
            if is_first:
                _clear(work)
            raise
        except OSError:
            if is_first and not any(work.rglob(LAST)):
                _clear(work)  # no epoch was finished, so there is nothing to resume
            raise
    if not is_first:
        return {}
    info = _training_info(config, files, rows, labels, initial.model, history)
    write_history(work / "metrics.csv", history)
    write_json(work / "run.json", {name: info[name] for name in ("config", "seed", "versions")})
    extra = {name: work / name for name in ("metrics.csv", "run.json")}
    model, tokenizer = initial.model, initial.tokenizer
    save_checkpoint(out, model, tokenizer, info, extra_files=extra, overwrite=config.overwrite)
    _clear(work)
    return info


def _identity(config: TrainConfig, files: dict[str, list[Path]]) -> dict[str, Any]:
    options = {name: value for name, value in asdict(config).items() if name not in NOT_IDENTITY}
    hashes = {f"{field}_sha256": [sha256_file(path) for path in paths] for field, paths in files.items()}
    if config.init is not None:
        parts = [existing_file(Path(config.init) / name, "init") for name in (CONFIG, WEIGHTS)]
        hashes["init_sha256"] = [sha256_file(part) for part in parts]
    return dict(json.loads(json.dumps(options | hashes | {"versions": versions_of(PACKAGES)})))


def _check_state(work: Path, identity: dict[str, Any], *, resume: bool) -> None:
    """Raises InputError if `work` holds the state of a different run; deletes the state if `resume` is false."""
    state = work / IDENTITY
    if not any(work.iterdir()):
        return
    if not resume and state.is_file():
        _clear(work)
        return
    try:
        earlier = json.loads(state.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        allowed = "the readable state of an interrupted run, or no such folder"
        raise InputError("out", str(work), allowed) from error
    different = sorted(name for name in identity if earlier.get(name) != identity[name])
    if different:
        allowed = f"the state of a run with the same {', '.join(different)}; --resume false starts over"
        raise InputError("out", str(work), allowed)
    log.info("resuming an interrupted run")


def _clear(folder: Path) -> None:
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _of_new_models(rows: SplitRows, initial: InitialModel) -> SplitRows:
    """Rows of the served models whose embeddings are trained."""
    conditioning = initial.model.config.conditioning
    assert initial.first_new_model is not None and conditioning is not None  # noqa: PT018
    new = conditioning.served_models[initial.first_new_model - 1 :]
    parts = []
    for name, part in (("train", rows.train), ("validation", rows.validation)):
        is_new = np.array([False, *(model in new for model in part.models)])
        parts.append(part.take(np.flatnonzero(is_new[part.model])))
        if len(parts[-1]) == 0:
            raise InputError(f"rows of {', '.join(new)} in the {name} split", 0, "at least one")
    return replace(rows, train=parts[0], validation=parts[1])


def _splits(
    initial: InitialModel, rows: SplitRows, labels: tuple[UrgencyLabels, UrgencyLabels]
) -> dict[str, SplitData]:
    parts = {"train": (rows.train, labels[0]), "validation": (rows.validation, labels[1])}
    splits = {
        name: SplitData.of(part, part_labels, initial.tokenizer, initial.model.config)
        for name, (part, part_labels) in parts.items()
    }
    for name, split in splits.items():
        sizes = len(split), len(split.rows), len(split.rows.lengths)
        log.info("%s: %d prompts with %d rows and %d samples", name, *sizes)
    return splits


def _warn_of_several_models(config: TrainConfig, train: Rows) -> None:
    several = int((np.bincount(train.prompt) > 1).sum()) if len(train) else 0
    if several and config.conditioning is None:
        log.warning(
            "%d of %d training prompts have several rows (several served models?); without conditioning the predictor "
            "learns their average; --model selects one of them",
            several,
            len(train.prompts),
        )


def _training_info(
    config: TrainConfig,
    files: dict[str, list[Path]],
    rows: SplitRows,
    labels: tuple[UrgencyLabels, UrgencyLabels],
    model: PromptPredictor,
    history: History,
) -> dict[str, Any]:
    best = best_row(history)
    split = None
    if not config.files["validation"]:
        split = {"seed": config.split_seed, "fractions": list(config.fractions)}
    return {
        "config": asdict(config),
        "seed": config.seed,
        "data": {
            "name": ", ".join(path.name for paths in files.values() for path in paths),
            "files": {
                field: [{"name": path.name, "sha256": sha256_file(path)} for path in paths]
                for field, paths in files.items()
                if paths
            },
            "split": split,
            "num_prompts": {"train": len(rows.train.prompts), "validation": len(rows.validation.prompts)},
            "num_rows": {"train": len(rows.train), "validation": len(rows.validation)},
            "num_samples": {"train": len(rows.train.lengths), "validation": len(rows.validation.lengths)},
            "num_labels": {"train": len(labels[0]), "validation": len(labels[1])},
            "smallest_hashes": smallest_hashes(rows.train.prompts),
            "num_test_prompts": rows.num_test_prompts,
            "num_excluded": rows.num_excluded,
            "num_shared_prompts": rows.num_shared,
            "baselines": _baselines(config, rows.train),
        },
        "heads": list(model.config.heads.names),
        "metrics": {
            "validation_loss": best["validation_loss"],
            "best_stage": best["stage"],
            "best_epoch": best["epoch"],
            "validation": {
                name.removeprefix("validation_"): value
                for name, value in best.items()
                if name.startswith("validation_")
            },
        },
        "throughput": _throughput(history),
        "versions": versions_of(PACKAGES),
    }


def _baselines(config: TrainConfig, train: Rows) -> dict[str, Any] | None:
    """Baselines for evaluation; None if all samples are censored."""
    if not train.finished.any():
        return None
    return asdict(Baselines.of(train, config.length.nu if config.length is not None else 3.5))


def _throughput(history: History) -> dict[str, Any]:
    """Prompts, rows and tokens per second of the training steps of each stage, excluding validation and checkpoints."""
    report: dict[str, Any] = {}
    for stage in sorted({row["stage"] for row in history}):
        names = ("train_seconds", *COUNTS)
        seconds, *totals, cells = (
            sum(row[name] for row in history if row["stage"] == stage) for name in names
        )
        rates = [round(total / max(seconds, 1e-9), 1) for total in totals]
        report[f"stage{stage}"] = {
            "train_seconds": round(seconds, 3),
            **dict(zip(("prompts_per_second", "rows_per_second", "tokens_per_second"), rates, strict=True)),
            "padding_fraction": round(1 - totals[-1] / cells, 4) if cells else None,
        }
    return report
