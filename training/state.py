"""State of an unfinished run, so that an interrupted stage goes on as if nothing had happened."""

from __future__ import annotations

import csv
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from scheduler_core.files import atomic_file
from training.stage import StageModule

log = logging.getLogger(__name__)

LAST = "last.ckpt"
BEST = "best.safetensors"
COLUMNS = (
    "stage",
    "epoch",
    "learning_rate",
    "sigma_weight",
    "train_mse_mu",
    "train_mse_sigma",
    "validation_mse_mu",
    "validation_mse_sigma",
    "validation_loss",
    "is_best",
    "seconds",
)


class StageState(L.Callback):
    """Seeds each epoch, and after it writes what resuming needs: trainer state, best weights, history.

    Args:
        folder: Where LAST and BEST are kept.
        stage: Number of the stage, 1 or 2.
        seed: Base seed; dropout in an epoch follows from it, the stage and the epoch alone.
        log_every: Epochs between log lines.

    Attributes:
        best_loss: Smallest unweighted validation loss so far.
        best_epoch: Its epoch; None before the first.
        history: One row for each finished epoch, with COLUMNS.
    """

    def __init__(self, folder: Path, stage: int, seed: int, log_every: int = 1) -> None:
        self.folder = folder
        self.stage = stage
        self.seed = seed
        self.log_every = log_every
        self.best_loss = float("inf")
        self.best_epoch: int | None = None
        self.history: list[dict[str, Any]] = []
        self._since = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Seeds torch at an epoch's first batch: trainer checkpoints hold no random state."""
        if batch_idx == 0:
            self._since = time.monotonic()
            entropy = np.random.SeedSequence([self.seed, self.stage, trainer.current_epoch])
            torch.manual_seed(int(entropy.generate_state(1)[0]))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Best weights first, then the trainer's state: a crash in between repeats the epoch and nothing else."""
        module: StageModule = pl_module
        train, validation = module.losses("train"), module.losses("validation")
        loss = sum(validation)
        is_best = loss < self.best_loss
        if is_best:
            self.best_loss, self.best_epoch = loss, trainer.current_epoch
            save_weights(self.folder / BEST, module.network.state_dict())
        row = (
            self.stage,
            trainer.current_epoch,
            float(trainer.optimizers[0].param_groups[0]["lr"]),
            module.sigma_weight,
            *train,
            *validation,
            loss,
            int(is_best),
            round(time.monotonic() - self._since, 3),
        )
        self.history.append(dict(zip(COLUMNS, row, strict=True)))
        partial = self.folder / f"{LAST}.partial"
        trainer.save_checkpoint(partial)
        os.replace(partial, self.folder / LAST)
        self._report(trainer, train)

    def _report(self, trainer: L.Trainer, train: Sequence[float]) -> None:
        epoch, epochs = trainer.current_epoch + 1, trainer.max_epochs or 0
        if epoch % self.log_every == 0 or epoch == epochs:
            row = self.history[-1]
            log.info(
                "stage %d epoch %d/%d: loss %.4f, validation %.4f (mu %.4f, sigma %.4f)%s, %.1f s",
                self.stage,
                epoch,
                epochs,
                sum(train),
                row["validation_loss"],
                row["validation_mse_mu"],
                row["validation_mse_sigma"],
                " best" if row["is_best"] else "",
                row["seconds"],
            )

    def state_dict(self) -> dict[str, Any]:
        """What the trainer's checkpoint keeps of this callback."""
        return {"best_loss": self.best_loss, "best_epoch": self.best_epoch, "history": list(self.history)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up what `state_dict` gave."""
        self.best_loss = state_dict["best_loss"]
        self.best_epoch = state_dict["best_epoch"]
        self.history = list(state_dict["history"])


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
    with atomic_file(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(history)
