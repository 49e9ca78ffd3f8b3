"""Sizes of served models from their Hugging Face config.json: weights, KV cache and operations, by kind of layer.

A config with a field that may change these and is not known here is an error that names it.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from scheduler_core.errors import InputError, unknown_name
from scheduler_core.shell.json_text import parse_json, read_json_object

#: Bits of a weight: of its value, and with int4 and mxfp4 of the scale that 32 to 128 weights share.
WEIGHT_BITS = {"bf16": 16.0, "fp8": 8.0, "int4": 4.25}
#: Values of model_type whose feed-forward layers have three matrices (gated), and two.
GATED = {
    "baichuan", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "exaone4", "gemma", "gemma2",
    "gemma3_text", "glm4", "glm4_moe", "gpt_oss", "granite", "granitemoe", "hunyuan_v1_dense", "internlm2", "kimi_k2", "llama",
    "llama4_text", "ministral", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "phi3", "qwen2", "qwen2_5_vl",
    "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_moe_text", "qwen3_vl_text",
    "seed_oss", "smollm3", "stablelm",
}  # fmt: skip
UNGATED = {"apertus", "arcee", "gpt2", "gpt_neox", "nemotron", "opt", "phi", "starcoder2"}
_TIED_BY_DEFAULT = {
    "cohere",
    "cohere2",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "opt",
    "smollm3",
    "starcoder2",
}
#: Words in the names of versions with the same size, and data types at the end of names.
_TUNED = {"base", "chat", "hf", "instruct", "it", "meta"}
_QUANTIZED = re.compile(
    r"[-_.](fp8(-dynamic|-kv)?|w8a8|int8|gptq-int8|(quantized\.)?w4a16|awq|gptq(-int4)?|int4)$"
)
#: Fields that have a meaning here, and fields of similar names that change neither size nor operations.
_KNOWN = {
    "attention_chunk_size", "decoder_sparse_step", "ffn_dim", "first_k_dense_replace", "head_dim", "hidden_size",
    "interleave_moe_layer_step", "intermediate_size", "intermediate_size_mlp", "kv_lora_rank", "layer_types",
    "max_window_layers", "mlp_only_layers", "moe_intermediate_size", "moe_layer_freq", "moe_layers", "n_embd", "n_head",
    "n_inner", "n_layer", "n_routed_experts", "n_shared_experts", "no_rope_layer_interval", "no_rope_layers",
    "num_attention_heads", "num_experts", "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads",
    "num_local_experts", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "shared_expert_intermediate_size",
    "sliding_window", "sliding_window_pattern", "use_sliding_window", "v_head_dim", "vocab_size",
}  # fmt: skip
_HARMLESS = {
    "attention_bias", "attention_dropout", "attention_multiplier", "attn_implementation", "attn_logit_softcapping",
    "attn_pdrop", "attn_scale", "attn_temperature_tuning", "embd_layer_norm", "enable_bias", "expert_model", "ffn_bias",
    "hidden_act", "hidden_activation", "hidden_dropout", "hidden_dropout_prob", "is_moe", "layer_norm_elementwise_affine",
    "layer_norm_eps", "layer_norm_epsilon", "layer_norm_bias", "layerdrop", "mlp_bias", "moe_router_activation",
    "n_ctx", "norm_topk_prob", "num_nextn_predict_layers", "output_hidden_states", "output_attentions",
    "qk_layernorm", "qk_head_dim", "do_layer_norm_before", "query_pre_attn_scalar", "rope_interleave", "use_qk_norm", "attention_in_fp32",
    "attention_softmax_in_fp32", "scale_attn_by_inverse_layer_idx", "scale_attn_weights", "reorder_and_upcast_attn",
    "summary_hidden_size", "initial_context_length", "scale_attention_softmax_in_fp32", "use_bidirectional_attention",
    "scale_embedding", "add_cross_attention", "moe_renormalize", "expert_aux_loss_alpha", "ep_size", "tp_size",
    "mlp_layer_types",
}  # fmt: skip
_SIZE = re.compile(
    r"layer|head|hidden|expert|rank|_size|_dim|window|chunk|sparse|mamba|ssm|conv|linear|recurrent|mlp|ffn|attn|"
    r"attention|moe|n_inner|cross|index|block|altup|laurel|indexer|compress"
)
_TOKENS = re.compile(
    r"token|_index$|loss|initializer|rope|dtype|router_|_std$|max_position|pretraining|chunk_size_feed"
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One kind of layer of a decoder-only transformer.

    Attributes:
        attention: Weights of the projections.
        kv_values: Numbers that the KV cache holds per token.
        kv_heads: Parts into which several devices can split these.
        decode_flops, prefill_flops: Operations for the attention of one token to another, in a decode and in a prompt.
        window: Number of latest tokens that it attends to; None: all.
        feed_forward: Weights that every token uses, with shared experts and the router.
        num_experts, experts_per_token, expert: Routed experts, those that a token uses, and the weights of one.
    """

    attention: int
    kv_values: int
    kv_heads: int
    decode_flops: float
    prefill_flops: float
    window: int | None
    feed_forward: int
    num_experts: int = 0
    experts_per_token: int = 0
    expert: int = 0


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Size of a decoder-only transformer; norms and biases are negligible.

    Attributes:
        layers: Kinds of layers and their numbers.
        source: The model or file whose config.json has these numbers.
        tied: Whether input and output embeddings are the same matrix.
        weights, expert_weights: Data types, see `WEIGHT_BITS`; embeddings always have 16 bits.
    """

    layers: tuple[tuple[Layer, int], ...]
    hidden: int
    num_heads: int
    vocabulary: int
    source: str
    tied: bool = False
    weights: str = "bf16"
    expert_weights: str = "bf16"

    @property
    def num_layers(self) -> int:
        return sum(num for _, num in self.layers)

    @property
    def tensor_parallel_sizes(self) -> list[int]:
        """Numbers of devices that can share a layer: they split the query heads, and split or copy those of keys and values."""
        kv_heads = {layer.kv_heads for layer, _ in self.layers}
        return [
            num
            for num in range(1, self.num_heads + 1)
            if self.num_heads % num == 0 and all(heads % num == 0 or num % heads == 0 for heads in kv_heads)
        ]

    @property
    def dense_parameters(self) -> int:
        """Weights in the matrices of all layers that every token uses."""
        return sum(num * (layer.attention + layer.feed_forward) for layer, num in self.layers)

    @property
    def expert_parameters(self) -> int:
        """Weights of all routed experts."""
        return sum(num * layer.num_experts * layer.expert for layer, num in self.layers)

    @property
    def layer_parameters(self) -> int:
        """Weights in the matrices of all layers."""
        return self.dense_parameters + self.expert_parameters

    @property
    def active_parameters(self) -> int:
        """Weights in the layers that one token uses."""
        routed = sum(num * layer.experts_per_token * layer.expert for layer, num in self.layers)
        return self.dense_parameters + routed

    @property
    def num_parameters(self) -> int:
        """Weights of all matrices, including embeddings."""
        return self.layer_parameters + self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes in the KV cache per token in 16 bit, on all devices together if each part is there once."""
        return 2 * sum(num * layer.kv_values for layer, num in self.layers)


def model_size(name: str) -> ModelSize:
    """The size of a model in models.json, by its name there or on Hugging Face, or in the config.json at a path. `InputError`
    if it is neither, or the config has a field that is missing, unknown or invalid.

    The owner and words for tuned versions, such as Instruct, make no difference; of quantized versions the end of the name
    has the type, such as Qwen3-14B-FP8.
    """
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json":
        return read_config(read_json_object(path, "model"), str(path))
    plain, weights = _plain_name(name)
    size = MODELS.get(plain) or _BY_SOURCE.get(plain)
    if size is None:
        raise unknown_name("model", name, ["the path of a config.json", *MODELS])
    return size if weights is None else replace(size, weights=weights, expert_weights=weights)


def _plain_name(name: str) -> tuple[str, str | None]:
    """The name of the version that is not tuned, and the data type in the name."""
    name, weights = name.rpartition("/")[2].lower(), None
    if (suffix := _QUANTIZED.search(name)) is not None:
        name, weights = name[: suffix.start()], "fp8" if "8" in suffix[0] else "int4"
    return "-".join(word for word in name.split("-") if word not in _TUNED), weights


class _Config:
    """Access to a config that names the field in errors."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values, self.source = values, source

    def fail(self, name: str, allowed: str) -> InputError:
        return InputError(f"{self.source}: {name}", self.values.get(name), allowed)

    def get(self, *names: str, default: int | None = None, zero: bool = False) -> int:
        """The first field of `names` that is set, an integer > 0 (or >= 0)."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < (0 if zero else 1):
                    raise self.fail(name, "an integer >= 0" if zero else "an integer > 0")
                return value
        if default is None:
            raise self.fail(names[0], "an integer > 0, which the config must have")
        return default

    def items(self, name: str, num: int) -> Sequence[Any] | None:
        """A list with one value per layer; None if it is not set."""
        value = self.values.get(name)
        if value is not None and (not isinstance(value, list) or len(value) != num):
            raise self.fail(name, f"a list of {num} values, one per layer")
        return value


def read_config(config: Mapping[str, Any], source: str = "config.json") -> ModelSize:
    """The size that a Hugging Face config describes; of models for several media, their text model.

    Raises:
        InputError: The model_type is unknown; or a field is missing, invalid, or unknown and may change the size.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        outer = {
            name: config[name] for name in ("quantization_config", "tie_word_embeddings") if name in config
        }
        config = outer | dict(text)
    read = _Config(config, source)
    family = config.get("model_type")
    if family not in GATED | UNGATED:
        raise read.fail("model_type", "one of " + ", ".join(sorted(GATED | UNGATED)))
    for name, value in config.items():
        if name in _KNOWN or name in _HARMLESS or name.startswith("_") or _TOKENS.search(name):
            continue
        # OPT projects its embeddings if they are smaller than the hidden vectors.
        if name == "word_embed_proj_dim" and value == config.get("hidden_size"):
            continue
        if _SIZE.search(name) and value is not None and value is not False:
            raise read.fail(name, "unset: its effect on size and speed is unknown")
    num = read.get("num_hidden_layers", "n_layer")
    hidden, heads = read.get("hidden_size", "n_embd"), read.get("num_attention_heads", "n_head")
    windows, has_experts = _windows(read, family, num), _expert_layers(read, num)
    layers = Counter(
        _layer(read, family, hidden, heads, window, routed)
        for window, routed in zip(windows, has_experts, strict=True)
    )
    weights, expert_weights = _weights(read)
    tied = config.get("tie_word_embeddings", family in _TIED_BY_DEFAULT)
    vocabulary = read.get("vocab_size")
    return ModelSize(
        tuple(layers.items()), hidden, heads, vocabulary, source, bool(tied), weights, expert_weights
    )


def _layer(read: _Config, family: str, hidden: int, heads: int, window: int | None, routed: bool) -> Layer:
    matrices = 3 if family in GATED else 2
    if read.values.get("kv_lora_rank") is not None:
        projections, kv_values, kv_heads, decode_flops, prefill_flops = _latent_attention(read, hidden, heads)
    else:
        if read.values.get("head_dim") is None and hidden % heads:
            raise read.fail("head_dim", "an integer, as hidden_size is no multiple of num_attention_heads")
        head = read.get("head_dim", default=hidden // heads)
        kv_heads = read.get("num_key_value_heads", default=heads)
        projections, kv_values = hidden * head * (2 * heads + 2 * kv_heads), 2 * kv_heads * head
        decode_flops = prefill_flops = 4.0 * heads * head
    attention = (projections, kv_values, kv_heads, decode_flops, prefill_flops, window)
    dense = matrices * hidden
    if not routed:
        default = 4 * hidden if family == "gpt2" else None
        size = read.get("intermediate_size_mlp", "intermediate_size", "ffn_dim", "n_inner", default=default)
        return Layer(*attention, dense * size)
    num_experts = read.get("num_local_experts", "num_experts", "n_routed_experts")
    size = read.get("moe_intermediate_size", "intermediate_size")
    shared = read.get("n_shared_experts", default=0, zero=True) * size
    shared += read.get("shared_expert_intermediate_size", default=0, zero=True)
    if family == "llama4_text":
        shared += size
    used = read.get("num_experts_per_tok")
    if used > num_experts:
        raise read.fail("num_experts_per_tok", f"at most the {num_experts} experts")
    return Layer(*attention, dense * shared + hidden * num_experts, num_experts, used, dense * size)


def _latent_attention(read: _Config, hidden: int, heads: int) -> tuple[int, int, int, float, float]:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): the cache holds one vector per token, which all heads and
    devices need. Decodes attend to these vectors, prompts to the keys and values computed from them."""
    rank, rope = read.get("kv_lora_rank"), read.get("qk_rope_head_dim")
    key, value = read.get("qk_nope_head_dim"), read.get("v_head_dim")
    query = heads * (key + rope)
    q_rank = read.get("q_lora_rank", default=0, zero=True)
    projections = q_rank * (hidden + query) if q_rank else hidden * query
    projections += hidden * (rank + rope) + rank * heads * (key + value) + heads * value * hidden
    return projections, rank + rope, 1, 2.0 * heads * (2 * rank + rope), 2.0 * heads * (key + rope + value)


def _windows(read: _Config, family: str, num: int) -> list[int | None]:
    """Window of each layer; None: all tokens."""
    values = read.values
    sizes = {
        "full_attention": None,
        "sliding_attention": "sliding_window",
        "chunked_attention": "attention_chunk_size",
    }
    kinds = read.items("layer_types", num)
    if kinds is not None:
        unknown = [kind for kind in kinds if kind not in sizes]
        if unknown:
            raise InputError(f"{read.source}: layer_types", unknown[0], ", ".join(sizes))
        fields = [sizes[kind] for kind in kinds]
        return [None if field is None else read.get(field) for field in fields]
    if values.get("attention_chunk_size") is not None:
        every = read.get("no_rope_layer_interval", default=4)
        ropes = read.items("no_rope_layers", num) if values.get("no_rope_layers") else None
        ropes = [(index + 1) % every for index in range(num)] if ropes is None else ropes
        return [read.get("attention_chunk_size") if rope else None for rope in ropes]
    if values.get("sliding_window") is None or values.get("use_sliding_window") is False:
        return [None] * num
    window = read.get("sliding_window")
    first, every = (
        0,
        {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "cohere2": 4, "olmo3": 4, "exaone4": 4}.get(family, 0),
    )
    if "sliding_window_pattern" in values:
        every = read.get("sliding_window_pattern")
    if family.startswith("qwen"):
        if not values.get("use_sliding_window"):
            return [None] * num
        first = read.get("max_window_layers", zero=True)
    return [window if index >= first and (not every or (index + 1) % every) else None for index in range(num)]


def _expert_layers(read: _Config, num: int) -> list[bool]:
    """Whether each layer has routed experts."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    if all(read.values.get(name) is None for name in names):
        return [False] * num
    first, freq = (
        read.get("first_k_dense_replace", default=0, zero=True),
        read.get("moe_layer_freq", default=1),
    )
    step = read.get("decoder_sparse_step", "interleave_moe_layer_step", default=1)
    dense = read.values.get("mlp_only_layers") or ()
    listed = read.values.get("moe_layers")
    return [
        index in listed
        if isinstance(listed, list)
        else index >= first and index % freq == 0 and (index + 1) % step == 0 and index not in dense
        for index in range(num)
    ]


def _weights(read: _Config) -> tuple[str, str]:
    """Data types of the weights, and of those of the experts, from quantization_config."""
    config = read.values.get("quantization_config")
    if config is None:
        return "bf16", "bf16"
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    bits: object = None
    if method == "mxfp4":
        return "bf16", "int4"
    if method in ("awq", "gptq"):
        bits = config.get("bits", config.get("w_bit"))
    elif method in ("fp8", "fbgemm_fp8"):
        bits = 8
    elif method == "compressed-tensors":
        groups = config.get("config_groups") or {}
        kinds = {group["weights"]["num_bits"] for group in groups.values() if group.get("weights")}
        bits = kinds.pop() if len(kinds) == 1 else None
    elif method == "bitsandbytes":
        bits = 4 if config.get("load_in_4bit") else 8
    name = {8: "fp8", 4: "int4"}.get(bits) if isinstance(bits, int) else None
    if name is None:
        raise InputError(f"{read.source}: quantization_config", config, "weights in fp8, int4 or mxfp4")
    return name, name


#: The configs in models.json, with `source`, the model that has them on Hugging Face, and `also`, others with the same sizes.
_TABLE: dict[str, dict[str, Any]] = parse_json(files(__package__).joinpath("models.json").read_text())
MODELS = {
    name: read_config(
        {key: value for key, value in config.items() if key not in ("source", "also")}, config["source"]
    )
    for name, config in _TABLE.items()
}
#: By the names on Hugging Face without owner and words for tuned versions.
_BY_SOURCE = {
    _plain_name(source)[0]: MODELS[name]
    for name, config in _TABLE.items()
    for source in (config["source"], *config.get("also", ()))
}
