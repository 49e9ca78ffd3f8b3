"""The command `train` from data to checkpoint folder: splits, model, recipe, test metrics, files."""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from predictors.modules import (
    LengthPredictor,
    Normalization,
    PredictorConfig,
    load_encoder,
    load_tokenizer,
    resolve_encoder,
    save_checkpoint,
)
from predictors.modules.checkpoint import CONFIG
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.files import existing_file, sha256_file, writable_target, write_json
from training.baselines import Baselines
from training.config import TrainConfig
from training.data import SPLITS, SplitFits, split_fits, tokenize
from training.evaluation import full_report, prompts_of, report_lines
from training.fitting.fits import FittedGroups
from training.fitting.fits_file import read_fits_or_fit
from training.fitting.options import FitOptions
from training.prediction import pick_device, predict_prompts
from training.recipe import Material, RecipeResult, run_recipe
from training.stage import DivergedError
from training.state import write_history
from training.versions import versions_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

PACKAGES = ("torch", "lightning", "transformers", "tokenizers", "safetensors", "numpy", "scipy", "pyarrow")
# Options that do not change what is trained.
NOT_IDENTITY = ("data", "out", "resume", "progress", "threads")


def train(config: TrainConfig) -> dict[str, Any]:
    """Trains a predictor and writes its checkpoint folder; returns the content of `training.json`.

    Raises:
        InputError: An option, the data or the encoder cannot be used; or `OUT.partial` belongs to another run.
        TailcastError: Training diverged; the prompts of the batch are in `OUT.diverged.json`.
    """
    out = _checked_target(config.out)
    existing_file(config.data, "data")
    resolve_encoder(config.encoder)
    device = pick_device(config.accelerator)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    work = out.with_name(out.name + ".partial")
    identity = _identity(config)
    _check_state(work, identity, resume=config.resume)

    splits = split_fits(_read(config), config)
    targets = splits.targets["train"]
    _warn_of_several_models(targets)
    tokenizer = load_tokenizer(config.encoder, truncation_side=config.truncation_side)
    # Layers draw initial weights, and dropout its masks, from torch's global state: it is put back afterwards.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model = _model(config, targets)
        _check_vocabulary(config, model, tokenizer)
        _start_state(work, identity)
        try:
            result = run_recipe(config, model, _material(config, splits, tokenizer), work, device)
        except DivergedError as error:
            _save_divergence(out, error, config)
            raise TailcastError(f"{error}; all of them are in {out.name}.diverged.json") from error
    info = _training_info(config, splits, model, tokenizer, result)
    write_history(work / "metrics.csv", result.history)
    write_json(
        work / "run.json", {"config": asdict(config), "seed": config.seed, "versions": info["versions"]}
    )
    extra = {name: work / name for name in ("metrics.csv", "run.json")}
    save_checkpoint(out, model, tokenizer, info, extra_files=extra)
    shutil.rmtree(work)
    return info


def _checked_target(path: str) -> Path:
    out = writable_target(path, "out")
    if out.exists() and not out.is_dir():
        raise InputError("out", path, "a folder path, but a file stands there")
    if out.is_dir() and any(out.iterdir()) and not (out / CONFIG).is_file():
        raise InputError("out", path, "a new or empty folder, or an earlier checkpoint to replace")
    return out


def _read(config: TrainConfig) -> FittedGroups:
    return read_fits_or_fit(
        config.data,
        FitOptions(nu=config.nu, censoring=config.censoring, keys=config.keys, max_tokens=config.max_tokens),
        where={} if config.served_model is None else {"model": config.served_model},
    )


def _identity(config: TrainConfig) -> dict[str, Any]:
    options = {name: value for name, value in asdict(config).items() if name not in NOT_IDENTITY}
    identity = options | {"data_sha256": sha256_file(config.data), "versions": versions_of(PACKAGES)}
    return dict(json.loads(json.dumps(identity)))


def _check_state(work: Path, identity: dict[str, Any], *, resume: bool) -> None:
    """Refuses the state of another run before anything is computed; forgets it if the user wants to start anew."""
    if not work.exists():
        return
    state = work / "identity.json"
    if not resume and (state.is_file() or not any(work.iterdir())):
        shutil.rmtree(work)
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


def _start_state(work: Path, identity: dict[str, Any]) -> None:
    work.mkdir(exist_ok=True)
    write_json(work / "identity.json", identity)


def _model(config: TrainConfig, targets: FittedGroups) -> LengthPredictor:
    models = targets.groups.column("model") or []
    predictor = PredictorConfig(
        encoder=config.encoder,
        max_length=config.max_length,
        truncation_side=config.truncation_side,
        pooling=config.pooling,
        hidden_sizes=config.hidden_sizes,
        dropouts=config.dropouts,
        nu=targets.nu,
        served_models=tuple(sorted({str(model) for model in models})),
    )
    normalization = Normalization.of(targets.mu, targets.sigma)
    generator = torch.Generator().manual_seed(config.seed)
    return LengthPredictor(predictor, load_encoder(config.encoder), normalization, generator=generator)


def _check_vocabulary(
    config: TrainConfig, model: LengthPredictor, tokenizer: PreTrainedTokenizerBase
) -> None:
    embeddings = getattr(model.encoder.config, "vocab_size", None)
    highest = max(tokenizer.get_vocab().values())
    if embeddings is not None and highest >= embeddings:
        raise InputError(
            "encoder", config.encoder, f"a tokenizer with ids below {embeddings}; it has ids up to {highest}"
        )


def _material(config: TrainConfig, splits: SplitFits, tokenizer: PreTrainedTokenizerBase) -> Material:
    train_fits, validation_fits = splits.targets["train"], splits.targets["validation"]
    return Material(
        train=train_fits,
        validation=validation_fits,
        train_tokens=tokenize(tokenizer, prompts_of(train_fits), config.max_length),
        validation_tokens=tokenize(tokenizer, prompts_of(validation_fits), config.max_length),
        pad_token_id=int(tokenizer.pad_token_id),
    )


def _warn_of_several_models(targets: FittedGroups) -> None:
    ids = Counter(targets.groups.column("prompt_id") or [])
    several = sum(count > 1 for count in ids.values())
    if several:
        log.warning(
            "%d of %d training prompts have several fits (several served models?); the predictor sees the prompt alone "
            "and learns their mean: --served_model takes one of them",
            several,
            len(ids),
        )


def _save_divergence(out: Path, error: DivergedError, config: TrainConfig) -> None:
    content = {
        "what": error.what,
        "epoch": error.epoch,
        "prompt_ids": error.prompt_ids,
        "config": asdict(config),
    }
    write_json(out.with_name(out.name + ".diverged.json"), content)


def _training_info(
    config: TrainConfig,
    splits: SplitFits,
    model: LengthPredictor,
    tokenizer: PreTrainedTokenizerBase,
    result: RecipeResult,
) -> dict[str, Any]:
    targets = splits.targets["train"]
    baselines = Baselines.of(targets, prompts_of(targets))
    metrics: dict[str, Any] = {
        "validation_loss": result.validation_loss,
        "best_stage": result.best_stage,
        "best_epoch": result.best_epoch,
    }
    if len(splits.test):
        mu, sigma = predict_prompts(model, tokenizer, prompts_of(splits.test), batch_size=config.batch_size)
        metrics["test"] = full_report(splits.test, mu, sigma, baselines)
        log.info("test split, %d prompts:", len(splits.test))
        for line in report_lines(metrics["test"]):
            log.info("%s", line)
    else:
        log.warning("the test split is empty: no test metrics")
    return {
        "config": asdict(config),
        "seed": config.seed,
        "data": {
            "name": Path(config.data).name,
            "sha256": sha256_file(config.data),
            "split": {"seed": config.split_seed, "fractions": list(config.fractions)},
            "num_targets": {name: len(splits.targets[name]) for name in SPLITS},
            "num_excluded": splits.num_excluded,
            "excluded_flags": list(config.exclude_flags),
            "baselines": baselines.to_json(),
        },
        "metrics": metrics,
        "versions": versions_of(PACKAGES),
    }
