"""Text encoders: where they come from and how they are loaded, the same for every architecture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from scheduler_core.errors import InputError, MissingExtraError
from scheduler_core.files import PACKAGE_SCHEME, inside_package

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ALLOWED = (
    "a local model folder, package:NAME/PATH for a folder inside an installed package, "
    "or the name of a model on the Hugging Face hub (network or local cache needed)"
)
# Weights that an encoder may lack, because nothing here uses them.
UNUSED_WEIGHTS = ("pooler.",)
# These number their positions from the padding token's id + 1.
OFFSET_POSITIONS = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer")


def resolve_encoder(encoder: str) -> str:
    """Local folder or hub name of an encoder; `package:NAME/PATH` is a folder inside an installed package.

    Raises:
        InputError: The package is not installed or has no such folder, or a path does not exist.
    """
    if encoder.startswith(PACKAGE_SCHEME):
        path = inside_package(encoder, "encoder")
    else:
        path = Path(encoder).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError("encoder", encoder, "a model folder with a config.json")
        return str(path)
    parts = encoder.split("/")
    if len(parts) > 2 or not all(parts) or parts[0] in (".", "..", "~") or path.exists():
        raise InputError("encoder", encoder, ALLOWED)
    return encoder


def load_encoder(encoder: str) -> nn.Module:
    """A pretrained encoder in float32 without its pooling layer, in eval mode.

    Args:
        encoder: Local folder, `package:NAME/PATH` or hub name.

    Raises:
        InputError: It cannot be found or read, or its folder lacks weights of the encoder.
    """
    source = resolve_encoder(encoder)
    transformers = _transformers()
    try:
        model, report = transformers.AutoModel.from_pretrained(
            source, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # transformers, huggingface_hub and safetensors share no base class
        raise InputError("encoder", encoder, f"{ALLOWED} ({_first_line(error)})") from error
    missing = [name for name in report["missing_keys"] if not name.startswith(UNUSED_WEIGHTS)]
    if missing:
        raise InputError("encoder", encoder, f"a model with all its weights (missing: {missing[0]}, ...)")
    return _as_text_encoder(model).eval()


def build_encoder(config: Mapping[str, Any]) -> nn.Module:
    """An encoder with random weights from the content of a transformers `config.json`.

    Raises:
        InputError: The configuration is of no known architecture.
    """
    transformers = _transformers()
    try:
        model_class = transformers.CONFIG_MAPPING[config["model_type"]]
        model = transformers.AutoModel.from_config(model_class.from_dict(dict(config)), dtype=torch.float32)
    except Exception as error:
        raise InputError(
            "encoder_config", config.get("model_type"), f"a transformers encoder ({_first_line(error)})"
        ) from error
    return _as_text_encoder(model).eval()


def load_tokenizer(encoder: str, *, truncation_side: str = "right") -> PreTrainedTokenizerBase:
    """The tokenizer of an encoder; it pads on the right, because CLS pooling reads position 0.

    Raises:
        InputError: It cannot be found or read, or it has no padding token.
    """
    source = resolve_encoder(encoder)
    transformers = _transformers()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            source,
            # A tokenizer knows no middle; `read_tokens` cuts it out.
            truncation_side="right" if truncation_side == "middle" else truncation_side,
            padding_side="right",
        )
    except Exception as error:
        raise InputError(
            "encoder", encoder, f"{ALLOWED}; its tokenizer failed ({_first_line(error)})"
        ) from error
    if tokenizer.pad_token_id is None or not tokenizer.is_fast:
        raise InputError("encoder", encoder, "an encoder with a tokenizer.json and a padding token")
    return tokenizer  # type: ignore[no-any-return]


def config_of(encoder: nn.Module) -> dict[str, Any]:
    """The encoder's configuration as JSON, without the path it was loaded from."""
    config = dict(encoder.config.to_dict())  # type: ignore[operator,union-attr]
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    return config


def state_width(encoder: nn.Module) -> int:
    """Width H of the encoder's last hidden states."""
    config: Any = encoder.config
    # OPT-350m projects its states back to the width of its word embeddings.
    return int(getattr(config, "word_embed_proj_dim", None) or config.hidden_size)


def num_positions(encoder: nn.Module) -> int | None:
    """Most tokens the encoder can read; None where its positions have no end."""
    config: Any = encoder.config
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if positions is not None and config.model_type in OFFSET_POSITIONS:
        positions -= config.pad_token_id + 1
    return positions


def _as_text_encoder(model: Any) -> nn.Module:
    # BERT-likes bring a tanh layer on CLS; we pool ourselves, and an unused layer would only be exported.
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    # Decoders would also give their keys and values, for tokens that never come.
    if getattr(model.config, "use_cache", None):
        model.config.use_cache = False
    return model  # type: ignore[no-any-return]


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("transformers", "train") from error
    return transformers


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
