"""The two-stage recipe: all parameters, then the heads on features of the frozen encoder, computed once.

Source: TIE, training of the predictor. Differs from the released code: in stage 2 the encoder is in eval mode too (its
dropout is off) and is run once for each prompt instead of once for each prompt and epoch.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray

from predictors.modules import PromptPredictor
from training.batches import Batching, EpochPlans, sampling_weights
from training.config import StageConfig, TrainConfig
from training.data import Batch, Examples, SplitData, loader
from training.failures import memory_errors
from training.objectives.mse import sigma_weight
from training.objectives.total import Objectives
from training.prediction import pooled_features
from training.progress import tracked
from training.stage import StageModule, StageSettings
from training.state import (
    BEST,
    EPOCHS,
    LAST,
    StageResult,
    StageState,
    load_weights,
    read_result,
    save_weights,
)

log = logging.getLogger(__name__)

DONE = "done.json"
FEATURES = "features.safetensors"


@dataclass(frozen=True, slots=True)
class RecipeResult:
    """Both stages; `best_stage` is the one whose weights the predictor has now."""

    best_stage: int
    best_epoch: int | None
    validation_loss: float
    history: list[dict[str, Any]]

    @property
    def best_row(self) -> dict[str, Any]:
        """Row of the history of the epoch whose weights the predictor has."""
        wanted = (self.best_stage, self.best_epoch)
        return next(row for row in self.history if (row["stage"], row["epoch"]) == wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Training and validation split of a run.

    Attributes:
        train, validation: The splits, tokenised.
        pad_token_id: Token id of padding.
        first_new_model: Train the embeddings of served models from this number on alone; None: all parameters.
    """

    train: SplitData
    validation: SplitData
    pad_token_id: int
    first_new_model: int | None = None

    def examples(
        self, split: SplitData, model: PromptPredictor, features: torch.Tensor | None = None
    ) -> Examples:
        """A split as the predictor numbers its served models."""
        conditioning = model.config.conditioning
        known = [0 if conditioning is None else conditioning.number_of(name) for name in split.rows.models]
        table = np.array([0, *known], dtype=np.int64)
        return Examples(split, model.normalization, table, pad_token_id=self.pad_token_id, features=features)


def run_recipe(
    config: TrainConfig, model: PromptPredictor, material: Material, work: Path, device: torch.device
) -> RecipeResult:
    """Trains `model` in place; it ends with the weights of the best epoch, on the CPU, in eval mode.

    Args:
        config: The recipe.
        model: Pretrained encoder, fresh heads; or what a checkpoint holds.
        material: Splits and tokens.
        work: Folder for the state of the run; what it holds of the same run is taken up.
        device: Where to train.

    Raises:
        DivergedError: Loss or gradient was not finite.
        OutOfMemoryError: A batch does not fit.
        KeyboardInterrupt: Interrupted; `work` holds the state after the last finished epoch.
    """
    first = second = StageResult()
    stage1, stage2 = work / "stage1", work / "stage2"
    if config.stage1.epochs:
        examples = tuple(material.examples(split, model) for split in (material.train, material.validation))
        first = _fit(config, 1, model, examples, material, stage1, device)
        model.load_state_dict(load_weights(stage1 / BEST))
    model.requires_grad_(False).eval()
    if config.stage2.epochs:
        stage2.mkdir(exist_ok=True)
        features = _features(config, model, material, stage2, device)
        examples = (
            material.examples(material.train, model, features["train"]),
            material.examples(material.validation, model, features["validation"]),
        )
        second = _fit(config, 2, model, examples, material, stage2, device)
        chosen = stage2 / BEST if second.best_rank < first.best_rank else stage1 / BEST
        model.load_state_dict(load_weights(chosen), strict=False)
        model.requires_grad_(False).eval()
    model.to("cpu")
    best_stage = 2 if second.best_rank < first.best_rank else 1
    best = second if best_stage == 2 else first
    return RecipeResult(best_stage, best.best_epoch, best.best_loss, first.history + second.history)


def _features(
    config: TrainConfig, model: PromptPredictor, material: Material, folder: Path, device: torch.device
) -> dict[str, torch.Tensor]:
    """Features of both splits by the frozen encoder: computed once, kept for a resumed run."""
    path = folder / FEATURES
    if not path.exists():
        model.to(device)
        splits = {"train": material.train, "validation": material.validation}
        with memory_errors(lambda: None, f"computing features of {config.batch_size} prompts at a time"):
            found = {
                name: pooled_features(
                    model,
                    split.token_ids,
                    material.pad_token_id,
                    split.lexical,
                    batch_size=config.batch_size,
                    track=lambda batches: tracked(batches, "features", _shows_bars(config)),
                )
                for name, split in splits.items()
            }
        save_weights(path, found)
    return load_weights(path)


def _settings(config: TrainConfig, stage: int, material: Material) -> StageSettings:
    options = _stage_config(config, stage)
    first_epoch = 0 if stage == 1 else config.stage1.epochs
    if stage == 2 and options.heads_learning_rate is not None:
        options = replace(options, learning_rate=options.heads_learning_rate)
    num_epochs = config.stage1.epochs + config.stage2.epochs
    weights = [1.0] * options.epochs
    if config.length is not None and config.length.objective == "mse":
        start, end = config.length.sigma_weight_start, config.length.sigma_weight_end
        weights = [
            sigma_weight(start, end, first_epoch + epoch, num_epochs) for epoch in range(options.epochs)
        ]
    hides = config.conditioning is not None and material.first_new_model is None
    return StageSettings(
        stage=options,
        trains_encoder=stage == 1,
        sigma_weights=tuple(weights),
        served_model_dropout=config.conditioning.served_model_dropout
        if hides and config.conditioning
        else 0.0,
        optimizer=config.optimizer,
        weight_decay=config.weight_decay,
        adam_epsilon=config.adam_epsilon,
        clip_norm=config.clip_norm,
        first_new_model=material.first_new_model,
        lexical_dropout=config.lexical_dropout if config.lexical else 0.0,
    )


def _plans(
    config: TrainConfig, stage: int, train: SplitData, validation: SplitData
) -> tuple[EpochPlans, EpochPlans]:
    options = _stage_config(config, stage)
    batching = Batching(
        batch_size=options.batch_size or config.batch_size,
        batch_tokens=config.batch_tokens if stage == 1 else None,
        by_length=config.batching == "sorted" and stage == 1,
        rows_per_prompt=config.rows_per_prompt,
    )
    training = EpochPlans(
        train.num_tokens,
        train.row_offsets,
        batching,
        seed=2 * config.seed + stage,
        num_epochs=options.epochs,
        weights=_prompt_weights(config, train),
        shared=stage == 1 and config.devices > 1,
    )
    in_order = replace(batching, shuffled=False, by_length=stage == 1, rows_per_prompt=None)
    return training, EpochPlans(validation.num_tokens, validation.row_offsets, in_order)


def _prompt_weights(config: TrainConfig, train: SplitData) -> NDArray[np.float64] | None:
    """How often each prompt is drawn: the largest weight of one of its rows; None: every prompt once."""
    if not config.oversampling:
        return None
    weights = np.ones(len(train))
    rows = train.rows
    np.maximum.at(weights, rows.prompt, sampling_weights(rows.mu, rows.sigma, config.oversampling))
    return weights


def _fit(
    config: TrainConfig,
    stage: int,
    model: PromptPredictor,
    examples: tuple[Examples, ...],
    material: Material,
    folder: Path,
    device: torch.device,
) -> StageResult:
    done = folder / DONE
    if done.exists():
        log.info("stage %d was finished before", stage)
        return read_result(done)
    folder.mkdir(exist_ok=True)
    options = _stage_config(config, stage)
    module = StageModule(
        model, Objectives(config), _settings(config, stage, material), material.train, material.validation
    )
    # Modules are in the mode they were left in, and encoders are loaded in eval mode.
    module.set_modes()
    tensorboard = None if config.tensorboard is None else Path(config.tensorboard)
    state = StageState(
        folder,
        stage,
        config.seed,
        log_every=1 if stage == 1 else max(1, options.epochs // 10),
        patience=options.patience,
        tensorboard=tensorboard,
    )
    last = folder / LAST
    if last.exists():
        log.info("stage %d goes on after its last finished epoch", stage)
    plans = _plans(config, stage, material.train, material.validation)
    training, validation = (loader(*pair) for pair in zip(examples, plans, strict=True))
    with _calm(), _determinism(), memory_errors(lambda: _under_way(module, material)):
        trainer = _trainer(config, stage, state, folder, device)
        with _interruptible(trainer):
            trainer.fit(
                module,
                training,
                validation,
                ckpt_path=str(last) if last.exists() else None,
                weights_only=True,
            )
    result = read_result(folder / EPOCHS)
    (folder / EPOCHS).replace(done)
    return result


def _under_way(module: StageModule, material: Material) -> tuple[Batch, SplitData] | None:
    if module.batch is None:
        return None
    return module.batch, material.train if module.split == "train" else material.validation


def _trainer(
    config: TrainConfig, stage: int, state: StageState, folder: Path, device: torch.device
) -> L.Trainer:
    devices = config.devices if stage == 1 else 1
    several = "ddp_spawn" if config.strategy == "auto" else config.strategy
    return L.Trainer(
        accelerator=device.type,
        devices=devices,
        strategy=several if devices > 1 else "auto",
        precision=config.precision if stage == 1 else "32-true",
        max_epochs=_stage_config(config, stage).epochs,
        callbacks=[state],
        deterministic=config.deterministic,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=_shows_bars(config),
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        default_root_dir=str(folder),
    )


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
            warnings.filterwarnings("ignore", message=".*module.s. in eval mode at the start.*")
            warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _determinism() -> Iterator[None]:
    """Puts torch's choice of algorithms back, which the trainer sets for the whole process."""
    before = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


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
