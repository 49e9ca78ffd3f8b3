"""A real causal model, tiny and random, saved locally as any user's model would be."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a two-layer Llama (grouped KV heads) and a word tokenizer with a chat template."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"), hidden_size=24, heads=6, kv_heads=2)


def save_tiny_llama(folder: Path, *, hidden_size: int, heads: int, kv_heads: int) -> Path:
    """Makes and saves the model; 96 tokens of context."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<end>", "<unk>", "user", "assistant", *(f"w{i}" for i in range(59))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    )
    fast.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant"
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=hidden_size,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=96,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
        initializer_range=0.6,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return folder
