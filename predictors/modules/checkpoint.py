"""The checkpoint folder: what `train` writes, and `export-onnx` and `evaluate` read.

| file | content |
|---|---|
| config.json | format_version, the `PredictorConfig`, the encoder's transformers configuration |
| model.safetensors | all weights, encoder included |
| normalization.json | mu_mean, mu_std, sigma_log_mean, sigma_log_std |
| tokenizer.json, tokenizer_config.json | tokenizer, without truncation or padding |
| training.json | how it was trained: split, data, metrics, versions |

Loading needs neither the network nor the folder the encoder came from, and runs no code out of the folder.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from predictors.modules.encoder import build_encoder, config_of, load_tokenizer
from predictors.modules.normalization import Normalization
from predictors.modules.predictor import LengthPredictor, PredictorConfig
from scheduler_core.errors import InputError
from scheduler_core.files import atomic_directory, existing_file, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 1
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
NORMALIZATION = "normalization.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TRAINING = "training.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded checkpoint; the model is in eval mode, on the CPU, in float32."""

    path: Path
    model: LengthPredictor
    tokenizer: PreTrainedTokenizerBase
    config: PredictorConfig
    training_info: dict[str, Any]


def save_checkpoint(
    path: str | Path,
    model: LengthPredictor,
    tokenizer: PreTrainedTokenizerBase,
    training_info: Mapping[str, Any],
    *,
    extra_files: Mapping[str, Path] | None = None,
) -> None:
    """Writes a checkpoint folder in one step; a folder that stands there is replaced.

    Args:
        path: The folder.
        model: The predictor; its weights are written in float32.
        tokenizer: The encoder's tokenizer.
        training_info: Content of `training.json`; JSON without NaN.
        extra_files: Name in the folder -> file to copy, for logs.
    """
    from safetensors.torch import save_file

    config = {
        "format_version": FORMAT_VERSION,
        "predictor": dataclasses.asdict(model.config),
        "encoder_config": config_of(model.encoder),
    }
    weights = {
        name: tensor.detach().cpu().float().contiguous() for name, tensor in model.state_dict().items()
    }
    with atomic_directory(path) as folder:
        write_json(folder / CONFIG, config)
        write_json(folder / NORMALIZATION, model.normalization.to_json())
        write_json(folder / TRAINING, dict(training_info))
        save_file(weights, str(folder / WEIGHTS), metadata={"format": "pt"})
        (folder / WEIGHTS).chmod(0o644)  # safetensors writes for the owner alone
        _save_tokenizer(folder, tokenizer)
        for name, source in (extra_files or {}).items():
            shutil.copyfile(source, folder / name)


def _save_tokenizer(folder: Path, tokenizer: Any) -> None:
    # Truncation and padding of the last call live in the tokenizer's state and would be saved with it.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.save_pretrained(str(folder))


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Reads a checkpoint folder.

    Raises:
        InputError: The folder or a file is missing or broken, its format is newer than this program, or the weights
            do not fit the configuration.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise InputError("checkpoint", str(path), "an existing checkpoint folder, as train writes it")
    content = _read_json(folder / CONFIG)
    version = content.get("format_version")
    if not isinstance(version, int) or not 1 <= version <= FORMAT_VERSION:
        raise InputError(
            f"checkpoint {CONFIG}, format_version", version, f"a whole number from 1 to {FORMAT_VERSION}"
        )
    config = _predictor_config(content.get("predictor"))
    encoder_config = content.get("encoder_config")
    if not isinstance(encoder_config, dict):
        raise InputError(f"checkpoint {CONFIG}, encoder_config", encoder_config, "a JSON object")
    normalization = Normalization.from_json(_read_json(folder / NORMALIZATION))
    model = LengthPredictor(config, build_encoder(encoder_config), normalization)
    _load_weights(model, folder / WEIGHTS)
    for name in (TOKENIZER, TOKENIZER_CONFIG):
        existing_file(folder / name, "checkpoint")
    tokenizer = load_tokenizer(str(folder), truncation_side=config.truncation_side)
    return Checkpoint(folder, model.eval(), tokenizer, config, _read_json(folder / TRAINING))


def _predictor_config(content: object) -> PredictorConfig:
    names = {field.name for field in dataclasses.fields(PredictorConfig)}
    if not isinstance(content, dict) or not set(content) <= names:
        raise InputError(
            f"checkpoint {CONFIG}, predictor", content, f"a JSON object with {', '.join(sorted(names))}"
        )
    try:
        return PredictorConfig(**content)
    except TypeError as error:
        raise InputError(f"checkpoint {CONFIG}, predictor", content, str(error)) from error


def _load_weights(model: LengthPredictor, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    existing_file(path, "checkpoint")
    try:
        model.load_state_dict(load_file(str(path)), strict=True)
    except SafetensorError as error:
        raise InputError("checkpoint", str(path), f"a whole safetensors file ({error})") from error
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise InputError(
            "checkpoint", str(path), f"weights that fit {CONFIG} ({' '.join(lines[1:2])})"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    existing_file(path, "checkpoint")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError("checkpoint", str(path), f"a file with valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise InputError("checkpoint", str(path), "a JSON object")
    return content
