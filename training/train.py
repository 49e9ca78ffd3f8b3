"""The command `train` from data to checkpoint folder: splits, model, recipe, files."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from predictors.modules import PromptPredictor, resolve_encoder, save_checkpoint
from predictors.modules.checkpoint import CONFIG, KIND, WEIGHTS
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.files import existing_file, folder_target, locked_folder, sha256_file, write_json
from training.building import Start, build
from training.config import TrainConfig
from training.data import SplitData
from training.evaluating.baselines import Baselines
from training.failures import DivergedError
from training.labels import Labels, read_split_labels
from training.prediction import pick_device
from training.recipe import Material, RecipeResult, run_recipe
from training.rows import Rows
from training.sources import SplitRows, read_split_rows
from training.state import LAST, write_history
from training.versions import versions_of

log = logging.getLogger(__name__)

PACKAGES = ("torch", "lightning", "transformers", "tokenizers", "safetensors", "numpy", "scipy", "pyarrow")
FILES = ("data", "validation", "urgency_data", "urgency_validation")
IDENTITY = "identity.json"
# Options that do not change what is trained.
NOT_IDENTITY = (*FILES, "out", "overwrite", "resume", "progress", "threads", "tensorboard")


def train(config: TrainConfig) -> dict[str, Any]:
    """Trains a predictor and writes its checkpoint folder; returns the content of `training.json`.

    Raises:
        InputError: An option, the data or the encoder cannot be used; or `OUT.partial` belongs to another run.
        TailcastError: Training diverged (the batch is in `OUT.diverged.json`), or a batch does not fit into memory.
    """
    out = folder_target(config.out, KIND, overwrite=config.overwrite)
    work = out.with_name(out.name + ".partial")
    with locked_folder(work, "out"):
        return _train(config, out, work)


def _train(config: TrainConfig, out: Path, work: Path) -> dict[str, Any]:
    files = {field: [existing_file(path, field) for path in _files(config, field)] for field in FILES}
    if config.init is None:
        resolve_encoder(config.encoder)
    device = pick_device(config.accelerator)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    identity = _identity(config, files)
    _check_state(work, identity, resume=config.resume)

    rows = read_split_rows(config) if config.needs_rows else SplitRows(Rows.none(), Rows.none())
    labels = read_split_labels(config)
    _warn_of_several_models(config, rows.train)
    # Layers draw initial weights, and dropout its masks, from torch's global state: it is put back afterwards.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        start = build(config, rows.train, labels[0])
        if start.first_new_model is not None:
            rows = _of_new_models(rows, start)
        material = _material(start, rows, labels)
        write_json(work / IDENTITY, identity)
        try:
            result = run_recipe(_recipe(config), start.model, material, work, device)
        except DivergedError as error:
            content = {"what": error.what, "epoch": error.epoch, **error.batch, "config": asdict(config)}
            write_json(out.with_name(out.name + ".diverged.json"), _without_nan(content))
            raise TailcastError(f"{error}; all of them are in {out.name}.diverged.json") from error
        except OSError:
            if not any(work.rglob(LAST)):
                _clear(work)  # there is nothing to go on from
            raise
    info = _training_info(config, files, rows, labels, start.model, result)
    write_history(work / "metrics.csv", result.history)
    write_json(
        work / "run.json", {"config": asdict(config), "seed": config.seed, "versions": info["versions"]}
    )
    extra = {name: work / name for name in ("metrics.csv", "run.json")}
    save_checkpoint(out, start.model, start.tokenizer, info, extra_files=extra, overwrite=config.overwrite)
    _clear(work)
    return info


def _files(config: TrainConfig, field: str) -> tuple[str, ...]:
    return {
        "data": config.data_files,
        "validation": config.validation_files,
        "urgency_data": config.urgency_files,
        "urgency_validation": config.urgency_validation_files,
    }[field]


def _recipe(config: TrainConfig) -> TrainConfig:
    """With `only_conditioning` there is nothing for stage 1 to train."""
    if not config.only_conditioning:
        return config
    if not config.stage2.epochs:
        raise InputError("stage2.epochs", 0, "at least 1 with only_conditioning")
    return replace(config, stage1=replace(config.stage1, epochs=0))


def _identity(config: TrainConfig, files: dict[str, list[Path]]) -> dict[str, Any]:
    options = {name: value for name, value in asdict(config).items() if name not in NOT_IDENTITY}
    hashes = {f"{field}_sha256": [sha256_file(path) for path in paths] for field, paths in files.items()}
    if config.init is not None:
        parts = [existing_file(Path(config.init) / name, "init") for name in (CONFIG, WEIGHTS)]
        hashes["init_sha256"] = [sha256_file(part) for part in parts]
    return dict(json.loads(json.dumps(options | hashes | {"versions": versions_of(PACKAGES)})))


def _check_state(work: Path, identity: dict[str, Any], *, resume: bool) -> None:
    """Refuses the state of another run before anything is computed; forgets it if the user wants to start anew."""
    state = work / IDENTITY
    if not any(work.iterdir()):
        return
    if not resume and state.is_file():
        _clear(work)
        return
    try:
        found = json.loads(state.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            "out", str(work), "the readable state of an interrupted run, or no such folder"
        ) from error
    different = sorted(name for name in identity if found.get(name) != identity[name])
    if different:
        raise InputError(
            "out",
            str(work),
            f"the state of a run with the same {', '.join(different)}; --resume false starts anew",
        )
    log.info("going on with an interrupted run")


def _clear(folder: Path) -> None:
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _of_new_models(rows: SplitRows, start: Start) -> SplitRows:
    """Rows of the served models whose embeddings are trained."""
    assert start.first_new_model is not None
    assert start.model.config.conditioning is not None
    new = start.model.config.conditioning.served_models[start.first_new_model - 1 :]
    parts = []
    for name, part in (("train", rows.train), ("validation", rows.validation)):
        is_new = np.array([False, *(model in new for model in part.models)])
        chosen = part.take(np.flatnonzero(is_new[part.model]))
        if len(chosen) == 0:
            raise InputError(f"rows of {', '.join(new)} in the {name} split", 0, "at least one")
        parts.append(chosen)
    return replace(rows, train=parts[0], validation=parts[1])


def _material(start: Start, rows: SplitRows, labels: tuple[Labels, Labels]) -> Material:
    train, validation = (
        SplitData.of(part, own, start.tokenizer, start.model.config)
        for part, own in ((rows.train, labels[0]), (rows.validation, labels[1]))
    )
    log.info(
        "training on %d prompts with %d rows and %d answers; validation has %d prompts with %d rows",
        len(train),
        len(train.rows),
        len(train.rows.lengths),
        len(validation),
        len(validation.rows),
    )
    return Material(
        train=train,
        validation=validation,
        pad_token_id=int(start.tokenizer.pad_token_id),
        first_new_model=start.first_new_model,
    )


def _warn_of_several_models(config: TrainConfig, train: Rows) -> None:
    several = int((np.bincount(train.prompt) > 1).sum()) if len(train) else 0
    if several and config.conditioning is None:
        log.warning(
            "%d of %d training prompts have several rows (several served models?); without conditioning the predictor "
            "sees the prompt alone and learns what they have in common: --served_model takes one of them",
            several,
            len(train.prompts),
        )


def _without_nan(content: Any) -> Any:
    """JSON has no NaN: null takes its place."""
    if isinstance(content, dict):
        return {name: _without_nan(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_without_nan(value) for value in content]
    return content if not isinstance(content, float) or np.isfinite(content) else None


def _training_info(
    config: TrainConfig,
    files: dict[str, list[Path]],
    rows: SplitRows,
    labels: tuple[Labels, Labels],
    model: PromptPredictor,
    result: RecipeResult,
) -> dict[str, Any]:
    best = {name: value for name, value in result.best_row.items() if name.startswith("validation_")}
    split = None
    if not config.validation_files:
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
            "num_answers": {"train": len(rows.train.lengths), "validation": len(rows.validation.lengths)},
            "num_labels": {"train": len(labels[0]), "validation": len(labels[1])},
            "num_test_prompts": rows.num_test_prompts,
            "num_excluded": rows.num_excluded,
            "num_shared_prompts": rows.num_shared,
            "excluded_flags": list(config.exclude_flags) if config.needs_fits else [],
            "baselines": _baselines(config, rows.train),
        },
        "heads": list(model.config.heads.names),
        "metrics": {
            "validation_loss": result.validation_loss,
            "best_stage": result.best_stage,
            "best_epoch": result.best_epoch,
            "validation": {name.removeprefix("validation_"): value for name, value in best.items()},
        },
        "throughput": _throughput(result.history),
        "versions": versions_of(PACKAGES),
    }


def _baselines(config: TrainConfig, train: Rows) -> dict[str, Any] | None:
    """What evaluation compares the predictor with; nothing where no answer ended by itself."""
    if not train.finished.any():
        return None
    return Baselines.of_rows(train, config.length.nu if config.length is not None else 3.5).to_json()


def _throughput(history: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each stage: what the training steps read in a second, validation and saving left out."""
    report: dict[str, Any] = {}
    for stage in sorted({row["stage"] for row in history}):
        rows = [row for row in history if row["stage"] == stage]
        seconds = sum(row["train_seconds"] for row in rows)
        totals = {name: sum(row[name] for row in rows) for name in ("num_prompts", "num_rows", "num_tokens")}
        cells = sum(row["num_padded_tokens"] for row in rows)
        report[f"stage{stage}"] = {
            "train_seconds": round(seconds, 3),
            "prompts_per_second": round(totals["num_prompts"] / max(seconds, 1e-9), 1),
            "rows_per_second": round(totals["num_rows"] / max(seconds, 1e-9), 1),
            "tokens_per_second": round(totals["num_tokens"] / max(seconds, 1e-9), 1),
            "padding_share": round(1 - totals["num_tokens"] / cells, 4) if cells else None,
        }
    return report
