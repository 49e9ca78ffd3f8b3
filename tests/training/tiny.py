"""Tiny random encoders of every supported architecture with their tokenizers, for tests without network."""

import string
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

WORDS = "the a list write story long short essay of number name rivers code".split()  # noqa: SIM905
CHARACTERS = string.ascii_lowercase + string.digits
_BLOCKS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES = _BLOCKS | {"max_position_embeddings": 64}


def tiny_bert(folder: Path, *, seed: int = 0, hidden_size: int = 32, dropout: float = 0.1) -> str:
    """Writes a 2-layer BERT with random weights and a WordPiece tokenizer; returns the folder."""
    from transformers import BertConfig, BertModel, BertTokenizer

    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *CHARACTERS]
    pieces += [f"##{letter}" for letter in CHARACTERS]
    tokenizer = BertTokenizer(vocab={piece: index for index, piece in enumerate(dict.fromkeys(pieces))})
    sizes = SIZES | {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size}
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = BertConfig(vocab_size=len(tokenizer), **sizes, **dropouts)
    return _save(folder, BertModel, config, tokenizer, seed)


def tiny_deberta(folder: Path, *, seed: int = 0) -> str:
    """Writes a 2-layer DeBERTa-v2 with the v3 settings, random weights and a unigram tokenizer."""
    from transformers import DebertaV2Config, DebertaV2Model, DebertaV2Tokenizer

    letters = [(piece, -5.0) for piece in ["▁", *CHARACTERS]]
    words = [(f"▁{word}", -3.0) for word in WORDS]
    specials = [("[PAD]", 0.0), ("[CLS]", 0.0), ("[SEP]", 0.0), ("[UNK]", 0.0)]
    tokenizer = DebertaV2Tokenizer(vocab=[*specials, *words, *letters], unk_id=3)
    attention = {"relative_attention": True, "position_buckets": 16, "share_att_key": True}
    attention |= {"pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm"}
    sizes = SIZES | {"vocab_size": len(tokenizer), "intermediate_size": 64, "type_vocab_size": 0}
    config = DebertaV2Config(pad_token_id=0, position_biased_input=False, **sizes, **attention)
    return _save(folder, DebertaV2Model, config, tokenizer, seed)


def _save(folder: Path, model_class: type, config: object, tokenizer: object, seed: int) -> str:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))  # type: ignore[attr-defined]
    return str(folder)


_ENDS = {"cls_token_id": 2, "sep_token_id": 3}
#: Model type -> its configuration beside the tokenizer's ids.
CONFIGS: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2},
    # One of three layers has global attention.
    "modernbert": _BLOCKS | {"num_hidden_layers": 3, "intermediate_size": 48, "local_attention": 8} | _ENDS,
    # A decoder whose word embeddings are narrower than its states.
    "opt": _BLOCKS | {"word_embed_proj_dim": 24, "ffn_dim": 64},
}


def _of_type(kind: str, folder: Path) -> str:
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


ENCODERS: dict[str, Callable[[Path], str]] = {"bert": tiny_bert, "deberta": tiny_deberta}
ENCODERS |= {kind: partial(_of_type, kind) for kind in CONFIGS}
