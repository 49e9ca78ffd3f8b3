"""The two-stage recipe: all parameters, then the towers on features of the frozen encoder, computed once.

Source: TIE, training of the predictor. Differs from the released code: in stage 2 the encoder is in eval mode too (its
dropout is off) and is run once for each prompt instead of once for each prompt and epoch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch

from predictors.modules import LengthPredictor
from scheduler_core.files import write_json
from training.config import StageConfig, TrainConfig
from training.data import EpochSampler, Examples, loader, sampling_weights
from training.prediction import pooled_features
from training.progress import tracked
from training.stage import StageModule, StageSettings
from training.state import BEST, LAST, StageState, load_weights, save_weights

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from training.fitting.fits import FittedGroups

log = logging.getLogger(__name__)

DONE = "done.json"
FEATURES = "features.safetensors"


@dataclass(frozen=True, slots=True)
class StageResult:
    """What a stage found: its best weights' validation loss and epoch, and a row for each epoch."""

    best_loss: float
    best_epoch: int | None
    history: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RecipeResult:
    """Both stages; `best_stage` is the one whose weights the predictor has now (0: nothing was trained better)."""

    best_stage: int
    best_epoch: int | None
    validation_loss: float
    history: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Training and validation split of a run, tokenised.

    Attributes:
        train, validation: Groups that are targets.
        train_tokens, validation_tokens: Token ids of their prompts.
        pad_token_id: Token id of padding.
    """

    train: FittedGroups
    validation: FittedGroups
    train_tokens: list[NDArray[Any]]
    validation_tokens: list[NDArray[Any]]
    pad_token_id: int


def run_recipe(
    config: TrainConfig, model: LengthPredictor, material: Material, work: Path, device: torch.device
) -> RecipeResult:
    """Trains `model` in place; it ends with the weights of the smallest validation loss, on the CPU, in eval mode.

    Args:
        config: The recipe.
        model: Pretrained encoder, fresh towers.
        material: Splits and tokens.
        work: Folder for the state of the run; what it holds of the same run is taken up.
        device: Where to train.

    Raises:
        DivergedError: Loss or gradient was not finite.
        KeyboardInterrupt: Interrupted; `work` holds the state after the last finished epoch.
    """
    first = second = StageResult(float("inf"), None, [])
    stage1, stage2 = work / "stage1", work / "stage2"
    if config.stage1.epochs:
        first = _stage_1(config, model, material, stage1, device)
        model.load_state_dict(load_weights(stage1 / BEST))
    model.requires_grad_(False).eval()
    if config.stage2.epochs:
        second = _stage_2(config, model, material, stage2, device)
        if second.best_loss < first.best_loss:
            model.towers.load_state_dict(load_weights(stage2 / BEST))
    model.to("cpu")
    best_stage = 2 if second.best_loss < first.best_loss else 1
    best = second if best_stage == 2 else first
    return RecipeResult(best_stage, best.best_epoch, best.best_loss, first.history + second.history)


def _stage_1(
    config: TrainConfig, model: LengthPredictor, material: Material, folder: Path, device: torch.device
) -> StageResult:
    train, validation = (
        Examples(fits, model.normalization, token_ids=tokens, pad_token_id=material.pad_token_id)
        for fits, tokens in (
            (material.train, material.train_tokens),
            (material.validation, material.validation_tokens),
        )
    )
    module = _module(config, 1, model, model.normalized, train)
    return _fit(config, 1, module, (train, validation), material.train, folder, device)


def _stage_2(
    config: TrainConfig, model: LengthPredictor, material: Material, folder: Path, device: torch.device
) -> StageResult:
    folder.mkdir(exist_ok=True)
    features = _features(config, model, material, folder, device)
    train = Examples(material.train, model.normalization, features=features["train"])
    validation = Examples(material.validation, model.normalization, features=features["validation"])
    towers = model.towers.requires_grad_(True)
    module = _module(config, 2, towers, towers, train)
    result = _fit(config, 2, module, (train, validation), material.train, folder, device)
    model.requires_grad_(False).eval()
    return result


def _features(
    config: TrainConfig, model: LengthPredictor, material: Material, folder: Path, device: torch.device
) -> dict[str, torch.Tensor]:
    """Features of both splits by the frozen encoder: computed once, kept for a resumed run."""
    path = folder / FEATURES
    if not path.exists():
        model.to(device)
        tokens = {"train": material.train_tokens, "validation": material.validation_tokens}
        save_weights(
            path,
            {
                name: pooled_features(
                    model,
                    ids,
                    material.pad_token_id,
                    batch_size=config.batch_size,
                    track=lambda batches: tracked(batches, "features", _shows_bars(config)),
                )
                for name, ids in tokens.items()
            },
        )
    return load_weights(path)


def _module(
    config: TrainConfig,
    stage: int,
    network: torch.nn.Module,
    forward: Callable[..., Any],
    train: Examples,
) -> StageModule:
    options = _stage_config(config, stage)
    first_epoch = 0 if stage == 1 else config.stage1.epochs
    if stage == 2 and options.towers_learning_rate is not None:
        options = replace(options, learning_rate=options.towers_learning_rate)
    settings = StageSettings(
        stage=options,
        steps_per_epoch=-(-len(train) // config.batch_size),
        sigma_weights=tuple(config.sigma_weight(first_epoch + epoch) for epoch in range(options.epochs)),
        weight_decay=config.weight_decay,
        adam_epsilon=config.adam_epsilon,
        clip_norm=config.clip_norm,
        prompt_ids=train.prompt_ids,
    )
    return StageModule(network, forward, settings)


def _fit(
    config: TrainConfig,
    stage: int,
    module: StageModule,
    splits: tuple[Examples, Examples],
    targets: FittedGroups,
    folder: Path,
    device: torch.device,
) -> StageResult:
    done = folder / DONE
    if done.exists():
        content = json.loads(done.read_text(encoding="utf-8"))
        log.info("stage %d was finished before", stage)
        return StageResult(content["best_loss"], content["best_epoch"], content["history"])
    folder.mkdir(exist_ok=True)
    epochs = _stage_config(config, stage).epochs
    state = StageState(folder, stage, config.seed, log_every=max(1, epochs // 10))
    sampler = EpochSampler(sampling_weights(targets, config.oversampling), 2 * config.seed + stage)
    last = folder / LAST
    if last.exists():
        log.info("stage %d goes on after its last finished epoch", stage)
    # Where the trainer starts from, modules are in the mode they were left in, and encoders are loaded in eval mode.
    module.train()
    with _calm():
        trainer = L.Trainer(
            accelerator=device.type,
            devices=1,
            precision=config.precision if stage == 1 else "32-true",
            max_epochs=epochs,
            callbacks=[state],
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=_shows_bars(config),
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            default_root_dir=str(folder),
        )
        with _interruptible(trainer):
            trainer.fit(
                module,
                loader(splits[0], config.batch_size, sampler),
                loader(splits[1], config.batch_size),
                ckpt_path=str(last) if last.exists() else None,
                weights_only=True,
            )
    result = StageResult(state.best_loss, state.best_epoch, state.history)
    write_json(
        done, {"best_loss": result.best_loss, "best_epoch": result.best_epoch, "history": result.history}
    )
    return result


def _stage_config(config: TrainConfig, stage: int) -> StageConfig:
    return config.stage1 if stage == 1 else config.stage2


def _shows_bars(config: TrainConfig) -> bool:
    return config.progress and sys.stderr.isatty()


@contextlib.contextmanager
def _calm() -> Iterator[None]:
    """Without the trainer's remarks on devices and worker processes: batches are small and made in no time."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            warnings.filterwarnings("ignore", message=".*GPU available but not used.*")
            warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _interruptible(trainer: L.Trainer) -> Iterator[None]:
    """Turns the trainer's own way to end on Ctrl-C (ignore the signal, exit with 1) back into KeyboardInterrupt."""
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if is_main else None
    try:
        yield
    except SystemExit as error:
        if trainer.interrupted:
            raise KeyboardInterrupt from error
        raise
    finally:
        if is_main:
            signal.signal(signal.SIGINT, handler)
