"""Text encoders: loading, tokenization, and pooling of their hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from predictors.tokenizer import keep_ends
from scheduler_core.errors import InputError, first_line
from scheduler_core.prediction.requested_amount import with_amount
from scheduler_core.shell.files import PACKAGE_SCHEME, inside_package

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ALLOWED = (
    "a local model folder, package:NAME/PATH for a folder inside an installed package, "
    "or the name of a model on the Hugging Face hub (network or local cache needed)"
)
# Prefixes of weights that are not used, so an encoder may lack them.
UNUSED_WEIGHTS = ("pooler.",)
# Architectures whose positions start at pad_token_id + 1.
OFFSET_POSITIONS = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer")


def resolve_encoder(encoder: str) -> str:
    """Local folder or hub name of an encoder; `package:NAME/PATH` is a folder inside an installed package.
    InputError if it does not exist."""
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
    """Loads a pretrained encoder (see `resolve_encoder`) in float32 and eval mode, without its pooling layer.
    InputError if it cannot be found or loaded, or if weights are missing."""
    source = resolve_encoder(encoder)
    import transformers

    try:
        model, report = transformers.AutoModel.from_pretrained(
            source, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # transformers, huggingface_hub and safetensors share no base class
        raise InputError("encoder", encoder, f"{ALLOWED} ({first_line(error)})") from error
    missing = [name for name in report["missing_keys"] if not name.startswith(UNUSED_WEIGHTS)]
    if missing:
        raise InputError("encoder", encoder, f"a model with all its weights (missing: {missing[0]}, ...)")
    return _as_text_encoder(model).eval()


def build_encoder(config: Any) -> nn.Module:
    """An encoder with random weights from a transformers configuration; InputError if that is invalid."""
    import transformers

    try:
        model_class = transformers.CONFIG_MAPPING[config["model_type"]]
        auto: Any = transformers.AutoModel
        model = auto.from_config(model_class.from_dict(dict(config)), dtype=torch.float32)
    except Exception as error:  # KeyError for an unknown type; configurations raise any type
        reason = f"the configuration of a transformers encoder ({first_line(error)})"
        raise InputError("encoder_config", config, reason) from error
    return _as_text_encoder(model).eval()


def load_tokenizer(encoder: str, *, truncation_side: str = "right") -> PreTrainedTokenizerBase:
    """The tokenizer of an encoder, with padding on the right, because CLS pooling uses position 0. InputError
    if it cannot be found or loaded, or has no padding token."""
    source = resolve_encoder(encoder)
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            source,
            # Tokenizers do not support "middle"; `tokenize` implements it.
            truncation_side="right" if truncation_side == "middle" else truncation_side,
            padding_side="right",
        )
    except Exception as error:
        reason = f"{ALLOWED}; its tokenizer failed ({first_line(error)})"
        raise InputError("encoder", encoder, reason) from error
    if tokenizer.pad_token_id is None or not tokenizer.is_fast:
        raise InputError("encoder", encoder, "an encoder with a tokenizer.json and a padding token")
    return tokenizer


def tokenize(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    max_length: int,
    truncation_side: str = "right",
    amounts: bool = False,
) -> list[NDArray[np.int32]]:
    """Token ids of each prompt, truncated to `max_length` including special tokens. `truncation_side` is the
    dropped part, left, right or middle; `tokenizer` must come from `load_tokenizer` with the same side. With
    `amounts`, texts are those `with_amount`."""
    if not prompts:
        return []
    is_middle = truncation_side == "middle"
    encoded = tokenizer(
        [with_amount(prompt) if amounts else prompt for prompt in prompts],
        truncation=not is_middle,
        max_length=None if is_middle else max_length,
        padding=False,
        return_attention_mask=False,
        verbose=False,
    )
    token_ids = [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]
    return [keep_ends(ids, max_length) for ids in token_ids] if is_middle else token_ids


def config_of(encoder: nn.Module) -> dict[str, Any]:
    """The configuration of the encoder as JSON, without the path and the transformers version."""
    config = dict(encoder.config.to_dict())  # type: ignore[operator,union-attr]
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    return config


def state_width(encoder: nn.Module) -> int:
    """Width H of the encoder's last hidden states."""
    config: Any = encoder.config
    # OPT-350m projects its hidden states to the width of its word embeddings.
    return int(getattr(config, "word_embed_proj_dim", None) or config.hidden_size)


def num_positions(encoder: nn.Module) -> int | None:
    """Maximum number of tokens of the encoder; None if its positions are not limited."""
    config: Any = encoder.config
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if positions is not None and config.model_type in OFFSET_POSITIONS:
        positions -= config.pad_token_id + 1
    return positions


def mean_pool(states: Tensor, mask: Tensor) -> Tensor:
    """Mean over the unmasked positions; [B, S, H], bool [B, S] -> [B, H]."""
    # masked_fill instead of a product, because states at padding can be infinite or NaN.
    total = states.masked_fill(~mask.unsqueeze(-1), 0.0).sum(dim=1)
    return total / mask.sum(dim=1, keepdim=True).to(states.dtype)


def max_pool(states: Tensor, mask: Tensor) -> Tensor:
    """Maximum over the unmasked positions; [B, S, H], bool [B, S] -> [B, H]."""
    return states.masked_fill(~mask.unsqueeze(-1), torch.finfo(states.dtype).min).amax(dim=1)


def last_pool(states: Tensor, mask: Tensor) -> Tensor:
    """State of the last unmasked position, for decoders; [B, S, H], bool [B, S] -> [B, H]."""
    last = mask.sum(dim=1, keepdim=True).to(torch.int64) - 1  # padding is on the right
    return states.gather(1, last.unsqueeze(-1).expand(-1, -1, states.shape[-1])).squeeze(1)


POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": lambda states, mask: states[:, 0],
    "mean": mean_pool,
    "max": max_pool,
    "last": last_pool,
}


def pool(states: Tensor, attention_mask: Tensor, poolings: Sequence[str]) -> Tensor:
    """Concatenated poolings [B, len(poolings) * H] of the last hidden states [B, S, H]. The mask [B, S] is 1
    at tokens, at least one per row, and 0 at padding on the right."""
    mask = attention_mask.to(torch.bool)
    return torch.cat([POOLINGS[name](states, mask) for name in poolings], dim=-1)


def _as_text_encoder(model: Any) -> nn.Module:
    # BERT has a tanh layer on CLS; it is not used here, but would be exported.
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    # Decoders would also return their KV cache, which is not needed without generation.
    if getattr(model.config, "use_cache", None):
        model.config.use_cache = False
    return model  # type: ignore[no-any-return]
