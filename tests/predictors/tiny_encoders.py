"""Tiny random encoders of every supported architecture, saved as transformers saves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.training.tiny import tiny_bert, tiny_deberta

POSITIONS = 64


def _like_bert(folder: Path, make: Callable[[int, int], Any]) -> str:
    """The tokenizer of `tiny_bert` beside another model; `make(vocab_size, pad_token_id)` gives it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_bert(folder))
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make(len(tokenizer), tokenizer.pad_token_id)
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return str(folder)


def tiny_distilbert(folder: Path) -> str:
    """Writes a 2-layer DistilBERT; returns the folder."""
    from transformers import DistilBertConfig, DistilBertModel

    return _like_bert(
        folder,
        lambda size, pad: DistilBertModel(
            DistilBertConfig(
                vocab_size=size,
                pad_token_id=pad,
                dim=32,
                hidden_dim=64,
                n_layers=2,
                n_heads=2,
                max_position_embeddings=POSITIONS,
            )
        ),
    )


def tiny_modernbert(folder: Path) -> str:
    """Writes a 3-layer ModernBERT, one layer of them with global attention; returns the folder."""
    from transformers import ModernBertConfig, ModernBertModel

    return _like_bert(
        folder,
        lambda size, pad: ModernBertModel(
            ModernBertConfig(
                vocab_size=size,
                pad_token_id=pad,
                bos_token_id=2,
                cls_token_id=2,
                eos_token_id=3,
                sep_token_id=3,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=3,
                num_attention_heads=2,
                local_attention=8,
                max_position_embeddings=POSITIONS,
            )
        ),
    )


def tiny_opt(folder: Path) -> str:
    """Writes a 2-layer OPT, a decoder, with word embeddings narrower than its states; returns the folder."""
    from transformers import OPTConfig, OPTModel

    return _like_bert(
        folder,
        lambda size, pad: OPTModel(
            OPTConfig(
                vocab_size=size,
                pad_token_id=pad,
                bos_token_id=2,
                eos_token_id=3,
                hidden_size=32,
                word_embed_proj_dim=24,
                ffn_dim=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=POSITIONS,
            )
        ),
    )


ENCODERS: dict[str, Callable[[Path], str]] = {
    "bert": tiny_bert,
    "deberta": tiny_deberta,
    "distilbert": tiny_distilbert,
    "modernbert": tiny_modernbert,
    "opt": tiny_opt,
}
