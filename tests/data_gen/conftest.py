"""A real causal model, tiny and random, saved locally as any user's model would be; and where vLLM is.

vLLM needs an environment of its own, because it pins other packages than ours: `make vllm-env` prepares `.venv-vllm`,
or TAILCAST_VLLM_ENV names one.
"""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Python of the environment that has vLLM."""
    folder = Path(os.environ.get("TAILCAST_VLLM_ENV", ROOT / ".venv-vllm"))
    python = folder / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no vLLM environment at {folder}; `make vllm-env` prepares it")
    return python


def vllm_environment() -> dict[str, str]:
    """Variables of a process with vLLM: no network, little memory, two threads; modules of ours only if asked for."""
    limits = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2"}
    environment = os.environ | limits | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment.pop("PYTHONPATH", None)
    return environment


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> Path:
    """A folder with a tokenizer.json that splits at white space."""
    return save_word_tokenizer(tmp_path / "tokenizer").parent


def save_word_tokenizer(folder: Path) -> Path:
    """The tokenizer.json of `word_tokenizer` in a new folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


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
    special = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant"
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(words), "hidden_size": hidden_size, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    tokens = {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
    config = LlamaConfig(**sizes, **tokens, max_position_embeddings=96, initializer_range=0.6)
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    return folder
