"""Batch inference with a torch predictor: pooled features and predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from predictors.modules.config import PredictorConfig
from predictors.modules.encoder import load_encoder, load_tokenizer, num_positions, tokenize
from predictors.modules.heads import Heads, RankHead
from predictors.modules.normalization import Normalization
from predictors.modules.predictor import PromptPredictor
from scheduler_core.errors import InputError
from training.network.data import length_ordered_batches, pad

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Track = Callable[[Iterable[list[int]]], Iterable[list[int]]]

_CPU = torch.device("cpu")
# Rows per call of the heads.
ROWS_PER_CALL = 16_384


def pick_device(accelerator: str) -> torch.device:
    """The torch device for "auto", "cpu" or "cuda"; InputError for "cuda" without a CUDA device."""
    has_cuda = torch.cuda.is_available()
    if accelerator == "cuda" and not has_cuda:
        raise InputError("accelerator", accelerator, "cpu or auto: there is no CUDA device")
    return torch.device("cuda" if has_cuda and accelerator != "cpu" else "cpu")


def has_bfloat16(device: torch.device = _CPU) -> bool:
    """Whether a device has instructions for bfloat16 products; without them, these are several times slower than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))


def pooled_features(
    model: PromptPredictor,
    token_ids: Sequence[NDArray[np.int32]],
    pad_token_id: int,
    *,
    batch_size: int = 32,
    track: Track = lambda batches: batches,
) -> torch.Tensor:
    """Features of N prompts, float32 [N, F] on the CPU, computed in eval mode without gradients.

    The model may be on any device; its mode is restored. `track` wraps the iterable of batches, e.g. in a progress bar.
    """
    was_training = model.training
    device = model.device
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


def frozen_features(
    encoder: str, max_length: int, batch_size: int = 32, **settings: Any
) -> Callable[[Sequence[str]], torch.Tensor]:
    """A function that returns the pooled features of N texts, float32 [N, F], from a frozen encoder, with `settings` as in
    `PredictorConfig`."""
    network, tokenizer = load_encoder(encoder), load_tokenizer(encoder)
    limit = min(max_length, num_positions(network) or max_length)
    config = PredictorConfig(encoder=encoder, heads=Heads(rank=RankHead()), max_length=limit, **settings)
    model = PromptPredictor(config, network, Normalization())

    def features(texts: Sequence[str]) -> torch.Tensor:
        token_ids = tokenize(tokenizer, texts, max_length=limit, truncation_side=config.truncation_side)
        return pooled_features(model, token_ids, int(tokenizer.pad_token_id), batch_size=batch_size)

    return features


def predict_prompts(
    model: PromptPredictor,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    served_models: Sequence[str | None] | None = None,
    temperatures: Sequence[float | None] | None = None,
    *,
    batch_size: int = 32,
    track: Track = lambda batches: batches,
) -> dict[str, NDArray[np.float64]]:
    """Calibrated predictions of N rows in natural units; each distinct prompt is encoded once.

    A served model that is None, or that the predictor was not trained on, is predicted as the unknown model.

    Returns:
        Outputs of the model's heads, float64, as in `PromptPredictor.outputs`: mu [N], sigma [N], nu [N] if it is
        learned, urgency [N, K], bucket [N, K], regression_tokens [N], rank [N].

    Raises:
        InputError: A served model is unknown, and the predictor does not support unknown models.
    """
    numbers: dict[str, int] = {}
    row_prompt = torch.tensor([numbers.setdefault(text, len(numbers)) for text in prompts], dtype=torch.int64)
    config, texts = model.config, list(numbers)
    token_ids = tokenize(
        tokenizer,
        texts,
        max_length=config.max_length,
        truncation_side=config.truncation_side,
        amounts=config.amounts,
    )
    features = pooled_features(
        model, token_ids, int(tokenizer.pad_token_id), batch_size=batch_size, track=track
    )
    served = _served_models(model, served_models, len(prompts))
    temperature = torch.tensor(
        [np.nan if value is None else value for value in temperatures or [None] * len(prompts)],
        dtype=torch.float32,
    )
    was_training, device = model.training, model.device
    model.eval()
    parts: list[dict[str, torch.Tensor]] = []
    with torch.inference_mode():
        # A row of an unknown served model may be expanded to one row for each known model.
        step = max(1, ROWS_PER_CALL // max(1, model.num_models))
        for start in range(0, max(len(prompts), 1), step):
            rows = slice(start, start + step)
            prompts_of_rows = features[row_prompt[rows]].to(device)
            parts.append(
                model.predict(prompts_of_rows, served[rows].to(device), temperature[rows].to(device))
            )
    model.train(was_training)
    return {name: torch.cat([part[name] for part in parts]).cpu().double().numpy() for name in parts[0]}


def _served_models(
    model: PromptPredictor, served_models: Sequence[str | None] | None, count: int
) -> torch.Tensor:
    conditioning = model.config.conditioning
    if conditioning is None:
        return torch.zeros(count, dtype=torch.int64)
    names = served_models or [None] * count
    table = {name: conditioning.number_of(name) for name in dict.fromkeys(names)}
    unknown = [name for name, number in table.items() if number == 0]
    if unknown and not conditioning.unknown:
        raise InputError("served model", unknown[0], f"one of {', '.join(conditioning.served_models)}")
    return torch.tensor([table[name] for name in names], dtype=torch.int64)
