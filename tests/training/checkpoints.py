"""Tiny predictors, checkpoints with random weights, and answers drawn from what they predict: nothing has to be trained."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from predictors.heads import Tower
from predictors.modules.checkpoint import load_checkpoint, save_checkpoint
from predictors.modules.config import Conditioning, PredictorConfig
from predictors.modules.encoder import load_encoder, load_tokenizer
from predictors.modules.heads import HEADS, Heads, LengthHead
from predictors.modules.normalization import Normalization
from predictors.modules.predictor import PromptPredictor
from tests.training.data import TOPICS, write_lists
from tests.training.tiny import tiny_bert
from training.network.inference import predict_prompts

NORMALIZATION = Normalization(5.0, 1.2, 0.3, 0.1, 1.0, 0.1, 4.5, 1.5)
TOWER = Tower((16, 16, 8), (0.2, 0.2, 0.1))
#: Options of heads that are not the defaults.
OPTIONS = {"length": {"learn_nu": True, "within": True}, "bucket": {"edges": (64, 512)}}
ALL_HEADS = Heads(**{name: head(TOWER, **OPTIONS.get(name, {})) for name, head in HEADS.items()})
MODELS = ("small-llm", "large-llm")
CONDITIONING = Conditioning(MODELS, width=4)
SMALL_TOWER = Tower((8,), (0.0,))
LENGTH_ONLY = Heads(length=LengthHead(tower=SMALL_TOWER))


def predictor(encoder: str | nn.Module, **options: Any) -> PromptPredictor:
    """All heads, conditioned on two served models and the temperature; 48 tokens; in eval mode."""
    name, module = (encoder, load_encoder(encoder)) if isinstance(encoder, str) else ("encoder", encoder)
    fields = {"heads": ALL_HEADS, "conditioning": CONDITIONING, "max_length": 48} | options
    config, generator = PredictorConfig(encoder=name, **fields), torch.Generator().manual_seed(1)
    model = PromptPredictor(config, module, NORMALIZATION, generator=generator)
    # Large enough weights in the last layers that prompts and conditions differ clearly.
    with torch.no_grad():
        for name, weight in model.heads.named_parameters():
            if weight.ndim == 2 and weight.shape[0] < 8:
                assert name.endswith("weight")
                weight.mul_(20)
    return model.eval()


def random_checkpoint(folder: Path, *, info: dict[str, Any] | None = None, **options: Any) -> Path:
    """A checkpoint folder with random weights; by default a length head that sees served model and temperature.

    Its normalization is made so that mu over some prompts has mean 4.5 and standard deviation 0.8, and sigma about 0.4.
    """
    encoder = tiny_bert(folder / "encoder", dropout=0.0)
    model, tokenizer = predictor(encoder, **({"heads": LENGTH_ONLY} | options)), load_tokenizer(encoder)
    if model.config.heads.length is not None:
        z = [_z_scores(model, tokenizer, name) for name in MODELS]
        mean, std = torch.cat(z).mean(0).tolist(), torch.cat(z).std(0).tolist()
        mu, sigma = 0.8 / std[0], 0.05 / std[1]
        normalization = Normalization(4.5 - mu * mean[0], mu, 0.33 - sigma * mean[1], sigma)
        weights = model.state_dict()
        model = PromptPredictor(model.config, model.encoder, normalization)
        model.load_state_dict(weights)
    save_checkpoint(folder / "checkpoint", model.eval(), tokenizer, info or {"data": {}})
    return folder / "checkpoint"


def _z_scores(model: PromptPredictor, tokenizer: Any, name: str) -> torch.Tensor:
    tokens = tokenizer(prompts(40), padding=True, truncation=True, max_length=48, return_tensors="pt")
    served, temperature = None, None
    if model.config.conditioning is not None:
        served = torch.full((40,), model.config.conditioning.number_of(name))
        temperature = torch.full((40,), 0.7)
    with torch.no_grad():
        features = model.features(tokens["input_ids"], tokens["attention_mask"])
        return model.scores(features, served, temperature)["length"][:, :2]


def prompts(count: int) -> list[str]:
    """Different prompts of words that the tiny tokenizer knows."""
    rng = np.random.default_rng(0)
    words = [*TOPICS, "write", "long", "short", "name", "of", "the"]
    return [" ".join(rng.choice(words, 2 + row % 7)) + f" {row}" for row in range(count)]


def write_drawn_answers(
    path: Path,
    checkpoint: Path,
    *,
    num_prompts: int = 60,
    num_answers: int = 8,
    shift: tuple[float, float] = (0.0, 0.0),
    scale: tuple[float, float] = (1.0, 1.0),
    max_tokens: int | None = None,
    seed: int = 0,
) -> Path:
    """Lists, with dataset and temperature, of outputs of both served models for the same prompts, drawn from the checkpoint's
    predictions with mu moved by `shift` sigmas and sigma times `scale`, of each served model."""
    loaded = load_checkpoint(checkpoint)
    rng = np.random.default_rng(seed)
    texts = [text for text in prompts(num_prompts) for _ in MODELS]
    models = list(MODELS) * num_prompts
    with torch.no_grad():
        found = predict_prompts(loaded.model, loaded.tokenizer, texts, models, [0.7] * len(texts))
    number = np.array([MODELS.index(name) for name in models])
    mu = found["mu"] + np.array(shift)[number] * found["sigma"]
    sigma = found["sigma"] * np.array(scale)[number]
    drawn = np.exp(mu[:, None] + sigma[:, None] * rng.standard_t(3.5, (len(texts), num_answers)))
    lengths = np.clip(np.rint(np.minimum(drawn, 1e6)), 1, max_tokens)
    finished = drawn < (np.inf if max_tokens is None else max_tokens - 0.5)
    columns = {"prompt": texts, "model": models, "finished": finished.tolist()}
    columns |= {"temperature": [0.7] * len(texts), "max_tokens": [max_tokens] * len(texts)}
    columns["prompt_id"] = [f"p{row // 2}" for row in range(len(texts))]
    columns["dataset"] = ["A" if row % 4 < 2 else "B" for row in range(len(texts))]
    return write_lists(path, lengths.astype(int).tolist(), **columns)
