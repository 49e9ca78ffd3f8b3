"""The two-stage training loop: all parameters, then the heads on features of the frozen encoder, computed once.

Source: TIE, training of the predictor. Unlike in the released code, the encoder is in eval mode in stage 2 (without
dropout), and is run once per prompt instead of once per prompt and epoch.

Each stage is a Lightning `Trainer.fit` with a checkpoint after every epoch, from which an interrupted run is resumed.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import io
import logging
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import distributed as dist

from predictors.modules.predictor import PromptPredictor
from scheduler_core.errors import InputError, first_line
from scheduler_core.shell.files import atomic_file
from scheduler_core.shell.progress import tracked
from training.network.batches import Batching, EpochPlans, padded_widths
from training.network.config import StageConfig, TrainConfig
from training.network.data import Examples, SplitData, TrainingBatch, loader, prompt_weights
from training.network.distributed import is_first_process, launch, node_rank, wait_for_others
from training.network.failures import NoProgressError, memory_errors
from training.network.inference import pooled_features
from training.network.initial_model import InitialModel, merge_adapters
from training.network.module import MONITOR, StageModule

log = logging.getLogger(__name__)

BEST, LAST = "best.ckpt", "last.ckpt"
FEATURES = "features.safetensors"
# Logging interval of TensorBoard in steps.
STEPS_PER_POINT = 20
# Interval between log lines on the progress of an epoch.
PROGRESS_S = 60.0
# Minimum decrease of the validation score for a run that trains only embeddings.
MIN_GAIN = 1e-3
COUNTS = ("num_prompts", "num_rows", "num_tokens", "num_padded_tokens")

History = list[dict[str, Any]]


def train_stages(
    config: TrainConfig,
    initial: InitialModel,
    splits: Mapping[str, SplitData],
    work: Path,
    device: torch.device,
) -> History:
    """Trains the model in place; afterwards it has the weights of the best epoch, on the CPU, in eval mode.

    With several devices or nodes, one process per device is started, and processes of several nodes rendezvous at
    MASTER_ADDR and MASTER_PORT. `work` holds the checkpoints from which an interrupted run is resumed; it must be shared
    by all nodes. The model is updated on the first node only.

    Returns:
        A row of metrics for each epoch of both stages; an empty list on other nodes.

    Raises:
        DivergedError: Loss or gradient was not finite.
        OutOfMemoryError: A batch does not fit into memory.
        TailcastError: One of several processes failed.
        KeyboardInterrupt: Interrupted; `work` holds the checkpoint of the last finished epoch.
    """
    launch(_train_in_process, config, device, config, initial, splits, work)
    if node_rank(config):
        return []
    stages = [number for number in (1, 2) if config.stage(number).epochs]
    history = [row for number in stages for row in read_history(work / f"stage{number}" / LAST)]
    for number in stages:
        if number in (1, best_row(history)["stage"]):
            _load_best(initial.model, work / f"stage{number}")
    if config.lora is not None:
        merge_adapters(initial.model)
    initial.model.requires_grad_(False).eval().to("cpu")
    return history


def _train_in_process(
    device: torch.device,
    config: TrainConfig,
    initial: InitialModel,
    splits: Mapping[str, SplitData],
    work: Path,
) -> None:
    """Runs both stages in one process, possibly of a distributed run."""
    if dist.is_initialized():
        # Spawned processes receive the weights in shared memory, which the optimizer must not modify.
        initial = copy.deepcopy(initial)
    features: dict[str, torch.Tensor] = {}
    for number in (1, 2):
        if not config.stage(number).epochs:
            continue
        folder = work / f"stage{number}"
        folder.mkdir(exist_ok=True)
        if number == 2:
            initial.model.requires_grad_(False).eval()
            features = _features(config, initial, splits, folder, device)
        examples = {
            name: Examples(split, initial.model, int(initial.tokenizer.pad_token_id), features.get(name))
            for name, split in splits.items()
        }
        _fit(config, number, initial, examples, folder, device)
        _load_best(initial.model, folder)


def best_row(history: History) -> dict[str, Any]:
    """Row of the epoch with the best validation score; the first one if several are equal."""
    return min(history, key=lambda row: row[MONITOR])


def _load_state(checkpoint: Path) -> dict[str, Any]:
    """The content of a checkpoint of Lightning; InputError if it is damaged."""
    try:
        return dict(torch.load(checkpoint, weights_only=True, map_location="cpu"))
    except Exception as error:  # pickle, zipfile and torch share no base class
        allowed = f"the whole state of an unfinished run ({first_line(error)}); --resume false starts over"
        raise InputError("out", str(checkpoint), allowed) from error


def _load_best(model: PromptPredictor, folder: Path) -> None:
    weights = _load_state(folder / BEST)["state_dict"]
    model.load_state_dict(
        {name.removeprefix("network."): value for name, value in weights.items()}, strict=False
    )


def _features(
    config: TrainConfig,
    initial: InitialModel,
    splits: Mapping[str, SplitData],
    folder: Path,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Features of both splits from the frozen encoder, cached in a file for a resumed run."""
    from safetensors.torch import load_file, save_file

    path = folder / FEATURES
    if is_first_process() and not path.exists():
        initial.model.to(device)
        with (
            memory_errors(lambda: None, f"computing features of {config.batch_size} prompts at a time"),
            torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16-mixed"),
        ):
            features = {
                name: pooled_features(
                    initial.model,
                    split.token_ids,
                    int(initial.tokenizer.pad_token_id),
                    batch_size=config.batch_size,
                    track=lambda batches: tracked(batches, "features", _shows_bars(config)),
                )
                for name, split in splits.items()
            }
        with atomic_file(path) as temporary:
            save_file(features, str(temporary))
    wait_for_others()
    return dict(load_file(path))


def _fit(
    config: TrainConfig,
    number: int,
    initial: InitialModel,
    examples: Mapping[str, Examples],
    folder: Path,
    device: torch.device,
) -> None:
    """Trains one stage, resuming from its last checkpoint if there is one."""
    options = config.stage(number)
    last = folder / LAST
    history = read_history(last) if last.exists() else []
    if _is_finished(history, options):
        return
    if history:
        log.info("stage %d resumes after epoch %d", number, len(history))
    splits = {name: part.data for name, part in examples.items()}
    module = StageModule(initial.model, config, number, splits, initial.first_new_model)
    # Lightning keeps the mode of each module, and encoders are loaded in eval mode.
    module.set_modes()
    plans = _plans(config, number, **splits)
    training, validation = (loader(examples[name], plans[name]) for name in ("train", "validation"))
    with _contained(), memory_errors(lambda: module.current):
        trainer = _trainer(config, number, folder, device)
        with _interruptible(trainer):
            start: Any = None
            if initial.first_new_model is not None:
                [start] = trainer.validate(module, validation, verbose=False)
            trainer.fit(
                module, training, validation, ckpt_path=str(last) if history else None, weights_only=True
            )
    if start is not None:
        best = best_row(read_history(last))
        if start[MONITOR] - best[MONITOR] < MIN_GAIN:
            raise NoProgressError(
                f"training the embeddings of the new served models did not reduce the validation loss ({start[MONITOR]:.4f} at "
                f"the start, {best[MONITOR]:.4f} at best); provide more outputs of these models, or change --stage2.learning_rate"
            )


def read_history(checkpoint: Path) -> History:
    """Reads the metrics of the finished epochs from a checkpoint of a stage."""
    content = _load_state(checkpoint)
    return list(content["callbacks"]["EpochHistory"]["rows"])


def _is_finished(history: History, options: StageConfig) -> bool:
    if len(history) >= options.epochs:
        return True
    if not history or options.patience is None:
        return False
    return bool(history[-1]["epoch"] - best_row(history)["epoch"] >= options.patience)


class EpochHistory(Callback):
    """Records a row of metrics for each epoch, stores it in the checkpoints, and logs it every `log_every` epochs."""

    def __init__(self, stage: int, log_every: int) -> None:
        self._stage = stage
        self._log_every = log_every
        self._rows: History = []
        self._start = self._train_seconds = 0.0
        self._next_progress_s = PROGRESS_S
        self._counts = [0, 0, 0, 0]

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Starts the timer and resets the counters of an epoch."""
        self._start = time.monotonic()
        self._next_progress_s = PROGRESS_S
        self._counts = [0, 0, 0, 0]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: TrainingBatch, batch_idx: int
    ) -> None:
        """Counts prompts, rows, tokens, and tokens including padding; logs the progress of long epochs."""
        mask = batch.inputs[1] if len(batch.inputs) > 1 else torch.empty(0)
        counts = (len(batch.prompt), len(batch.row), int(mask.sum()), mask.numel())
        self._counts = [total + count for total, count in zip(self._counts, counts, strict=True)]
        self._train_seconds = seconds = time.monotonic() - self._start
        done, total = batch_idx + 1, int(trainer.num_training_batches)
        if seconds >= self._next_progress_s and done < total:
            self._next_progress_s = seconds + PROGRESS_S
            epoch, left_s = (
                f"{trainer.current_epoch + 1}/{trainer.max_epochs}",
                seconds / done * (total - done),
            )
            rate = f"{self._counts[2] / seconds:,.0f} tokens/s, " if self._counts[2] else ""
            text = "stage %d epoch %s: %.0f %%, %s%.0f min left of this epoch"
            log.info(text, self._stage, epoch, 100 * done / total, rate, left_s / 60)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Adds the row of the epoch, before the checkpoint callbacks run."""
        metrics = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if name.startswith(("train_", "validation_"))
        }
        counts = trainer.strategy.reduce(torch.tensor(self._counts, device=pl_module.device), reduce_op="sum")
        row = {
            "stage": self._stage,
            "epoch": trainer.current_epoch,
            "learning_rate": float(trainer.optimizers[0].param_groups[-1]["lr"]),
            "sigma_weight": pl_module.sigma_weight,
            **metrics,
            **dict(zip(COUNTS, counts.tolist(), strict=True)),
            "train_seconds": round(self._train_seconds, 3),
            "seconds": round(time.monotonic() - self._start, 3),
        }
        self._rows.append(row)
        epoch, epochs = trainer.current_epoch + 1, trainer.max_epochs or 0
        if epoch % self._log_every == 0 or epoch == epochs:
            text = ", ".join(
                f"{name.removeprefix('validation_')} {value:.4f}"
                for name, value in metrics.items()
                if name.startswith("validation_") and name != MONITOR
            )
            best = " best" if best_row(self._rows) is row else ""
            seconds = row["seconds"]
            log.info("stage %d epoch %d/%d: %s%s, %.1f s", self._stage, epoch, epochs, text, best, seconds)

    def state_dict(self) -> dict[str, Any]:
        """State for the checkpoint."""
        return {"rows": self._rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the rows from `state_dict`."""
        self._rows = list(state_dict["rows"])


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoint files atomically."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes to a temporary file next to `path` and renames it."""
        content = io.BytesIO()
        torch.save(checkpoint, content)
        with atomic_file(Path(path)) as temporary:
            temporary.write_bytes(content.getbuffer())


def _trainer(config: TrainConfig, number: int, folder: Path, device: torch.device) -> L.Trainer:
    options = config.stage(number)
    several = config.devices * config.num_nodes > 1
    files: dict[str, Any] = {
        "dirpath": str(folder),
        "enable_version_counter": False,
        "save_on_train_epoch_end": True,
    }
    # The best weights are saved before the state, so a crash in between only repeats the epoch.
    callbacks: list[Callback] = [
        EpochHistory(number, log_every=1 if number == 1 else max(1, options.epochs // 10)),
        ModelCheckpoint(**files, filename=Path(BEST).stem, monitor=MONITOR, save_weights_only=True),
        ModelCheckpoint(**files, filename=Path(LAST).stem),
    ]
    if options.patience is not None:
        callbacks.append(EarlyStopping(MONITOR, patience=options.patience, check_on_train_epoch_end=True))
    logger = None
    if config.tensorboard is not None:
        logger = TensorBoardLogger(config.tensorboard, name="", version=f"stage{number}")
        callbacks.append(LearningRateMonitor("step"))
    return L.Trainer(
        accelerator=device.type,
        devices=config.devices,
        num_nodes=config.num_nodes,
        strategy="ddp" if several else "auto",
        precision="bf16-mixed" if number == 1 and config.precision == "bf16-mixed" else "32-true",
        max_epochs=options.epochs,
        callbacks=callbacks,
        plugins=[AtomicCheckpointIO(), *([LightningEnvironment()] if several else [])],
        deterministic=config.deterministic,
        logger=logger or False,
        log_every_n_steps=STEPS_PER_POINT,
        enable_model_summary=False,
        enable_progress_bar=_shows_bars(config),
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        default_root_dir=str(folder),
    )


def _plans(
    config: TrainConfig, number: int, train: SplitData, validation: SplitData
) -> dict[str, EpochPlans]:
    options = config.stage(number)
    batching = Batching(
        batch_size=options.batch_size or config.batch_size,
        batch_tokens=config.batch_tokens if number == 1 else None,
        by_length=config.batching == "sorted" and number == 1,
        rows_per_prompt=config.rows_per_prompt,
    )
    widths = {
        name: padded_widths(split.num_tokens, config.max_length)
        for name, split in (("train", train), ("validation", validation))
    }
    training = EpochPlans(
        widths["train"],
        train.row_offsets,
        batching,
        seed=2 * config.seed + number,
        num_epochs=options.epochs,
        weights=prompt_weights(train, config.oversampling) if config.oversampling else None,
        distributed=True,
    )
    in_order = replace(batching, shuffled=False, by_length=number == 1, rows_per_prompt=None)
    return {
        "train": training,
        "validation": EpochPlans(widths["validation"], validation.row_offsets, in_order),
    }


def _shows_bars(config: TrainConfig) -> bool:
    return config.progress and sys.stderr.isatty()


@contextlib.contextmanager
def _contained() -> Iterator[None]:
    """Suppresses Lightning's log messages and warnings on devices, data-loading workers and files, and restores torch's
    deterministic-algorithms setting, which the trainer changes globally."""
    logger = logging.getLogger("lightning.pytorch")
    level, deterministic = logger.level, torch.are_deterministic_algorithms_enabled()
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.")
            yield
    finally:
        logger.setLevel(level)
        torch.use_deterministic_algorithms(deterministic)


@contextlib.contextmanager
def _interruptible(trainer: L.Trainer) -> Iterator[None]:
    """Raises KeyboardInterrupt on Ctrl-C instead of the trainer's SystemExit(1), and restores the signal handler."""
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


def write_history(path: Path, history: History) -> None:
    """Writes the rows of all epochs as a CSV file."""
    columns = list(dict.fromkeys(name for row in history for name in row))
    with atomic_file(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(history)
