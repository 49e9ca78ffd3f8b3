"""Checkpoints as predictors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from predictors.modules import Checkpoint, load_checkpoint
from training.evaluating.predictors import DEFAULT_NU, OpenedPredictor, Prediction, RunOptions
from training.prediction import pick_device, predict_prompts
from training.progress import tracked


def open_checkpoint_predictor(folder: Path, options: RunOptions) -> OpenedPredictor:
    """Loads a checkpoint, on CUDA where there is a device."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    checkpoint = load_checkpoint(folder)
    checkpoint.model.to(pick_device("auto"))
    config = checkpoint.config
    data = checkpoint.training_info.get("data", {})
    length, bucket = config.heads.length, config.heads.bucket
    return OpenedPredictor(
        kind="checkpoint",
        name={"folder": folder.resolve().name, "encoder": config.encoder},
        nu=None if length is None or length.learn_nu else length.nu,
        bucket_edges=() if bucket is None else bucket.edges,
        served_models=() if config.conditioning is None else config.conditioning.served_models,
        data=data if isinstance(data, dict) else {},
        conversations=config.conversations,
        folder=folder,
        predict=lambda prompts, models, temperatures: predict_rows(
            checkpoint, prompts, models, temperatures, options
        ),
    )


def predict_rows(
    checkpoint: Checkpoint,
    prompts: Sequence[str],
    served_models: Sequence[str | None],
    temperatures: Sequence[float | None],
    options: RunOptions,
) -> Prediction:
    """Predicts G rows.

    Args:
        checkpoint: On any device.
        prompts, served_models, temperatures: One of each row [G].
        options: Prompts per call of the encoder.

    Raises:
        InputError: A served model is unknown to a predictor that was not trained for unknown ones.
    """
    found = predict_prompts(
        checkpoint.model,
        checkpoint.tokenizer,
        prompts,
        served_models,
        temperatures,
        batch_size=options.batch_size,
        track=lambda batches: tracked(batches, "predict", options.progress),
    )
    length = checkpoint.config.heads.length
    fixed = DEFAULT_NU if length is None else length.nu
    return Prediction(
        mu=found.get("mu"),
        sigma=found.get("sigma"),
        nu=found.get("nu", fixed),
        bucket=found.get("bucket"),
        regression_tokens=found.get("regression_tokens"),
        rank=found.get("rank"),
        sigma_within=found.get("sigma_within"),
    )
