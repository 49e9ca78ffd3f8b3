"""Tiny random encoders of every supported architecture, saved as transformers saves them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.training.tiny import tiny_bert, tiny_deberta

#: Model type -> its configuration beside the tokenizer's ids.
CONFIGS: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2},
    # One of three layers has global attention.
    "modernbert": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "local_attention": 8,
        "cls_token_id": 2,
        "sep_token_id": 3,
    },
    # A decoder whose word embeddings are narrower than its states.
    "opt": {
        "hidden_size": 32,
        "word_embed_proj_dim": 24,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
}


def tiny(kind: str, folder: Path) -> str:
    """Writes an encoder of `CONFIGS` with the tokenizer of `tiny_bert`; returns the folder."""
    from transformers import CONFIG_MAPPING, AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_bert(folder))
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    if kind != "distilbert":
        ids |= {"bos_token_id": 2, "eos_token_id": 3}
    config = CONFIG_MAPPING[kind](max_position_embeddings=64, **ids, **CONFIGS[kind])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModel.from_config(config).save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return str(folder)


ENCODERS: dict[str, Callable[[Path], str]] = {
    "bert": tiny_bert,
    "deberta": tiny_deberta,
    **{kind: partial(tiny, kind) for kind in CONFIGS},
}
