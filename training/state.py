"""State of an unfinished run, so that an interrupted stage goes on as if nothing had happened."""

from __future__ import annotations

import csv
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from scheduler_core.files import atomic_file, write_json
from training.data import Batch
from training.stage import StageModule

log = logging.getLogger(__name__)

LAST = "last.ckpt"
BEST = "best.safetensors"
EPOCHS = "epochs.json"
FIRST_COLUMNS = ("stage", "epoch", "is_best", "learning_rate", "sigma_weight", "validation_loss")
# Steps between two points of the curves in TensorBoard.
STEPS_PER_POINT = 20


@dataclass(frozen=True, slots=True)
class StageResult:
    """What a stage found: how its best weights rank (smaller is better), their epoch, and a row for each epoch."""

    best_rank: tuple[float, float] = (float("inf"), float("inf"))
    best_epoch: int | None = None
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def best_loss(self) -> float:
        """Unweighted validation loss of the best weights."""
        return self.best_rank[1]

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {"best_rank": list(self.best_rank), "best_epoch": self.best_epoch, "history": self.history}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> StageResult:
        """From the content of `to_json`."""
        first, second = content["best_rank"]
        return cls((float(first), float(second)), content["best_epoch"], list(content["history"]))


class StageState(L.Callback):
    """Seeds each epoch, and after it writes what resuming needs: trainer state, best weights, history.

    Args:
        folder: Where LAST, BEST and EPOCHS are kept.
        stage: Number of the stage, 1 or 2.
        seed: Base seed; dropout in an epoch follows from it, the stage and the epoch alone.
        log_every: Epochs between log lines.
        patience: Stop after this many epochs without a better one; None: never.
        tensorboard: Folder for event files; None: none are written.
    """

    def __init__(
        self,
        folder: Path,
        stage: int,
        seed: int,
        *,
        log_every: int = 1,
        patience: int | None = None,
        tensorboard: Path | None = None,
    ) -> None:
        self.folder = folder
        self.stage = stage
        self.seed = seed
        self.log_every = log_every
        self.patience = patience
        self.result = StageResult()
        self._tensorboard = tensorboard
        self._writer: Any = None
        self._since = 0.0
        self._seen = np.zeros(4, dtype=np.int64)
        self._train_seconds = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Opens the event file; a run that had been stopped early stays stopped."""
        if self._tensorboard is not None and trainer.is_global_zero:
            from torch.utils.tensorboard import SummaryWriter

            folder = self._tensorboard / f"stage{self.stage}"
            self._writer = SummaryWriter(str(folder), purge_step=trainer.global_step)
        self._stop_if_stale(trainer, trainer.current_epoch - 1)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Seeds torch at an epoch's first batch: trainer checkpoints hold no random state."""
        if batch_idx == 0:
            self._since = time.monotonic()
            self._seen = np.zeros(4, dtype=np.int64)
            entropy = np.random.SeedSequence([self.seed, self.stage, trainer.current_epoch])
            torch.manual_seed(int(entropy.generate_state(1)[0]) + trainer.global_rank)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Counts what was read, and adds a point to the curves."""
        tokens, cells = 0, 0
        if len(batch.inputs) > 1:
            tokens, cells = int(batch.inputs[1].sum()), batch.inputs[1].numel()
        self._seen += np.array([len(batch.prompt), len(batch.row), tokens, cells])
        self._train_seconds = time.monotonic() - self._since
        if self._writer is not None and trainer.global_step % STEPS_PER_POINT == 0:
            loss = float(outputs["loss"] if isinstance(outputs, Mapping) else outputs)
            self._writer.add_scalar("step/loss", loss, trainer.global_step)
            rate = float(trainer.optimizers[0].param_groups[-1]["lr"])
            self._writer.add_scalar("step/learning_rate", rate, trainer.global_step)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Best weights first, then the trainer's state: a crash in between repeats the epoch and nothing else."""
        module: StageModule = pl_module
        rank, epoch = module.rank(), trainer.current_epoch
        is_best = rank < self.result.best_rank
        row = self._row(trainer, module, rank, is_best=is_best)
        history = [*self.result.history, row]
        self.result = StageResult(
            rank if is_best else self.result.best_rank,
            epoch if is_best else self.result.best_epoch,
            history,
        )
        if trainer.is_global_zero:
            if is_best:
                save_weights(self.folder / BEST, module.trained_weights())
            write_history(self.folder.parent / f"metrics-stage{self.stage}.csv", history)
            self._report(trainer)
        partial = self.folder / f"{LAST}.partial"
        trainer.save_checkpoint(partial)
        if trainer.is_global_zero:
            os.replace(partial, self.folder / LAST)
            write_json(self.folder / EPOCHS, self.result.to_json())
        self._stop_if_stale(trainer, epoch)

    def _row(
        self, trainer: L.Trainer, module: StageModule, rank: tuple[float, float], *, is_best: bool
    ) -> dict[str, Any]:
        prompts, rows, tokens, cells = self._seen.tolist()
        return {
            "stage": self.stage,
            "epoch": trainer.current_epoch,
            "learning_rate": float(trainer.optimizers[0].param_groups[-1]["lr"]),
            "sigma_weight": module.sigma_weight,
            **{f"train_{name}": value for name, value in module.losses("train").items()},
            **{f"validation_{name}": value for name, value in module.losses("validation").items()},
            **{f"validation_{name}": value for name, value in module.metrics().items()},
            "validation_loss": rank[1],
            "is_best": int(is_best),
            "num_prompts": prompts,
            "num_rows": rows,
            "num_tokens": tokens,
            "num_padded_tokens": cells,
            "train_seconds": round(self._train_seconds, 3),
            "seconds": round(time.monotonic() - self._since, 3),
        }

    def _stop_if_stale(self, trainer: L.Trainer, epoch: int) -> None:
        best = self.result.best_epoch
        if self.patience is not None and best is not None and epoch - best >= self.patience:
            log.info("stage %d stops: no better epoch since %d", self.stage, best + 1)
            trainer.should_stop = True

    def _report(self, trainer: L.Trainer) -> None:
        row = self.result.history[-1]
        epoch, epochs = trainer.current_epoch + 1, trainer.max_epochs or 0
        values = {
            name.removeprefix("validation_"): value
            for name, value in row.items()
            if name.startswith("validation_") and name != "validation_loss"
        }
        if self._writer is not None:
            for name, value in row.items():
                if name.startswith(("train_", "validation_")):
                    self._writer.add_scalar(name.replace("_", "/", 1), value, epoch)
            self._writer.flush()
        if epoch % self.log_every == 0 or epoch == epochs:
            log.info(
                "stage %d epoch %d/%d: validation loss %.4f (%s)%s, %.1f s",
                self.stage,
                epoch,
                epochs,
                row["validation_loss"],
                ", ".join(f"{name} {value:.4f}" for name, value in values.items()),
                " best" if row["is_best"] else "",
                row["seconds"],
            )

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Closes the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def state_dict(self) -> dict[str, Any]:
        """What the trainer's checkpoint keeps of this callback."""
        return self.result.to_json()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up what `state_dict` gave."""
        self.result = StageResult.from_json(state_dict)


def read_result(path: Path) -> StageResult:
    """A file that holds `StageResult.to_json`."""
    return StageResult.from_json(json.loads(path.read_text(encoding="utf-8")))


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Tensors by name as safetensors, atomically."""
    from safetensors.torch import save_file

    with atomic_file(path) as temporary:
        save_file(
            {name: value.detach().cpu().contiguous() for name, value in weights.items()}, str(temporary)
        )


def load_weights(path: Path) -> dict[str, Tensor]:
    """What `save_weights` wrote."""
    from safetensors.torch import load_file

    return dict(load_file(str(path)))


def write_history(path: Path, history: Sequence[Mapping[str, Any]]) -> None:
    """Rows of all epochs as CSV."""
    known = {name for row in history for name in row}
    columns = [name for name in FIRST_COLUMNS if name in known]
    columns += sorted(known - set(columns))
    with atomic_file(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(history)
