"""Tiny random encoders with their tokenizers, and small data sets, for tests without network."""

from __future__ import annotations

import string
from pathlib import Path

import torch

WORDS = [
    "the",
    "a",
    "list",
    "write",
    "story",
    "long",
    "short",
    "essay",
    "of",
    "number",
    "name",
    "rivers",
    "code",
]


def tiny_bert(folder: Path, *, seed: int = 0, hidden_size: int = 32, dropout: float = 0.1) -> str:
    """Writes a 2-layer BERT with random weights and a WordPiece tokenizer; returns the folder."""
    from transformers import BertConfig, BertModel, BertTokenizer

    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *string.ascii_lowercase, *string.digits]
    pieces += [f"##{letter}" for letter in string.ascii_lowercase + string.digits]
    tokenizer = BertTokenizer(vocab={piece: index for index, piece in enumerate(dict.fromkeys(pieces))})
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * hidden_size,
        max_position_embeddings=64,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return _save(folder, BertModel, config, tokenizer, seed)


def tiny_deberta(folder: Path, *, seed: int = 0) -> str:
    """Writes a 2-layer DeBERTa-v2 with the v3 settings, random weights and a unigram tokenizer."""
    from transformers import DebertaV2Config, DebertaV2Model, DebertaV2Tokenizer

    letters = [(piece, -5.0) for piece in ["▁", *string.ascii_lowercase, *string.digits]]
    words = [(f"▁{word}", -3.0) for word in WORDS]
    specials = [("[PAD]", 0.0), ("[CLS]", 0.0), ("[SEP]", 0.0), ("[UNK]", 0.0)]
    tokenizer = DebertaV2Tokenizer(vocab=[*specials, *words, *letters], unk_id=3)
    config = DebertaV2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        type_vocab_size=0,
        relative_attention=True,
        position_buckets=16,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        pad_token_id=0,
    )
    return _save(folder, DebertaV2Model, config, tokenizer, seed)


def _save(folder: Path, model_class: type, config: object, tokenizer: object, seed: int) -> str:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))  # type: ignore[attr-defined]
    return str(folder)
