"""Running a predictor over many prompts outside of training: pooled features, parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from predictors.modules import LengthPredictor
from scheduler_core.errors import InputError
from training.data import length_ordered_batches, pad, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Track = Callable[[Iterable[list[int]]], Iterable[list[int]]]


def pick_device(accelerator: str) -> torch.device:
    """The torch device for "auto", "cpu" or "cuda".

    Raises:
        InputError: CUDA is asked for, but there is none.
    """
    has_cuda = torch.cuda.is_available()
    if accelerator == "cuda" and not has_cuda:
        raise InputError("accelerator", accelerator, "cpu or auto: torch finds no CUDA device here")
    return torch.device("cuda" if has_cuda and accelerator != "cpu" else "cpu")


def pooled_features(
    model: LengthPredictor,
    token_ids: Sequence[NDArray[np.int64]],
    pad_token_id: int,
    *,
    batch_size: int = 32,
    track: Track = lambda batches: batches,
) -> torch.Tensor:
    """Features float32 [N, F] on the CPU of N prompts, encoder in eval mode, without gradients.

    Args:
        model: On any device; its mode is left as it was.
        token_ids: Tokens of each prompt [N].
        pad_token_id: Token id of padding.
        batch_size: Prompts per call of the encoder.
        track: Wraps the loop over batches, e.g. in a progress bar.
    """
    was_training = model.training
    device = model.mu_mean.device
    features = torch.empty(len(token_ids), model.num_features)
    model.eval()
    try:
        with torch.inference_mode():
            for numbers in track(list(length_ordered_batches(token_ids, batch_size))):
                input_ids, mask = pad([token_ids[number] for number in numbers], pad_token_id)
                features[numbers] = model.features(input_ids.to(device), mask.to(device)).float().cpu()
    finally:
        model.train(was_training)
    return features


def predict_prompts(
    model: LengthPredictor,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    batch_size: int = 32,
    track: Track = lambda batches: batches,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """mu [N] and sigma [N] in log tokens of N prompts, in their order.

    Args:
        model: On any device; predicts in eval mode.
        tokenizer: Of the checkpoint.
        prompts: N texts.
        batch_size: Prompts per call of the encoder.
        track: Wraps the loop over batches.
    """
    token_ids = tokenize(tokenizer, prompts, model.config.max_length)
    features = pooled_features(
        model, token_ids, int(tokenizer.pad_token_id), batch_size=batch_size, track=track
    )
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        mu, sigma = model.denormalize(model.towers(features.to(model.mu_mean.device)))
    model.train(was_training)
    return mu.cpu().double().numpy(), sigma.cpu().double().numpy()
