"""Tiny random encoders with their tokenizers, and small data sets, for tests without network."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

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
CHARACTERS = string.ascii_lowercase + string.digits
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}


def _word_pieces() -> Any:
    from transformers import BertTokenizer

    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *CHARACTERS]
    pieces += [f"##{letter}" for letter in CHARACTERS]
    return BertTokenizer(vocab={piece: index for index, piece in enumerate(dict.fromkeys(pieces))})


def tiny_bert(folder: Path, *, seed: int = 0, hidden_size: int = 32, dropout: float = 0.1) -> str:
    """Writes a 2-layer BERT with random weights and a WordPiece tokenizer; returns the folder."""
    from transformers import BertConfig, BertModel

    tokenizer = _word_pieces()
    config = BertConfig(
        vocab_size=len(tokenizer),
        intermediate_size=2 * hidden_size,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **SIZES | {"hidden_size": hidden_size},
    )
    return _save(folder, BertModel, config, tokenizer, seed)


def tiny_deberta(folder: Path, *, seed: int = 0) -> str:
    """Writes a 2-layer DeBERTa-v2 with the v3 settings, random weights and a unigram tokenizer."""
    from transformers import DebertaV2Config, DebertaV2Model, DebertaV2Tokenizer

    letters = [(piece, -5.0) for piece in ["▁", *CHARACTERS]]
    words = [(f"▁{word}", -3.0) for word in WORDS]
    specials = [("[PAD]", 0.0), ("[CLS]", 0.0), ("[SEP]", 0.0), ("[UNK]", 0.0)]
    tokenizer = DebertaV2Tokenizer(vocab=[*specials, *words, *letters], unk_id=3)
    config = DebertaV2Config(
        vocab_size=len(tokenizer),
        intermediate_size=64,
        type_vocab_size=0,
        relative_attention=True,
        position_buckets=16,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        pad_token_id=0,
        **SIZES,
    )
    return _save(folder, DebertaV2Model, config, tokenizer, seed)


def tiny_distilbert(folder: Path, *, seed: int = 0) -> str:
    """Writes a 2-layer DistilBERT with random weights and a WordPiece tokenizer."""
    from transformers import DistilBertConfig, DistilBertModel

    tokenizer = _word_pieces()
    config = DistilBertConfig(
        vocab_size=len(tokenizer), dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=64
    )
    return _save(folder, DistilBertModel, config, tokenizer, seed)


def tiny_opt(folder: Path, *, seed: int = 0, padding: bool = True) -> str:
    """Writes a 2-layer OPT decoder with random weights; without `padding` its tokenizer has no padding token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import OPTConfig, OPTModel, PreTrainedTokenizerFast

    pieces = ["</s>", "<pad>", "<unk>", *WORDS, *CHARACTERS]
    pieces += [f"##{letter}" for letter in CHARACTERS]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 0)])
    special = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if padding:
        special["pad_token"] = "<pad>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    config = OPTConfig(
        vocab_size=len(tokenizer),
        word_embed_proj_dim=32,
        ffn_dim=64,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=0,
        **SIZES,
    )
    return _save(folder, OPTModel, config, tokenizer, seed)


def _save(folder: Path, model_class: type, config: object, tokenizer: object, seed: int) -> str:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))  # type: ignore[attr-defined]
    return str(folder)
