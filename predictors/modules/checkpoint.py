"""The checkpoint folder: written by `train`, input of `export-onnx`, `evaluate` and `calibrate`.

| file | content |
|---|---|
| config.json | format_version, the `PredictorConfig`, the calibration, the encoder's transformers configuration |
| model.safetensors | all weights, encoder included |
| normalization.json | means and standard deviations of the targets |
| tokenizer.json, tokenizer_config.json | tokenizer, without truncation or padding |
| training.json | record of the training: split, data, metrics, versions |

Loading needs neither the network nor the folder the encoder came from, and runs no code out of the folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from predictors.modules.calibration import Calibration
from predictors.modules.config import PredictorConfig
from predictors.modules.encoder import build_encoder, config_of, load_tokenizer
from predictors.modules.normalization import Normalization
from predictors.modules.predictor import PromptPredictor
from scheduler_core.errors import InputError
from scheduler_core.files import atomic_directory, atomic_file, existing_file, write_json
from scheduler_core.json_text import read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 5
#: Of the folder's record, see `scheduler_core.files.atomic_directory`.
KIND = "checkpoint"
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
    model: PromptPredictor
    tokenizer: PreTrainedTokenizerBase
    config: PredictorConfig
    training_info: dict[str, Any]


def save_checkpoint(
    path: str | Path,
    model: PromptPredictor,
    tokenizer: PreTrainedTokenizerBase,
    training_info: Mapping[str, Any],
    *,
    extra_files: Mapping[str, Path] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint folder atomically.

    Args:
        path: The folder.
        model: The predictor; its weights are written in float32.
        tokenizer: The encoder's tokenizer.
        training_info: Content of `training.json`; JSON without NaN.
        extra_files: Name in the folder -> file to copy, for logs.
        overwrite: Replace an earlier checkpoint.

    Raises:
        InputError: The folder holds a checkpoint and `overwrite` is false, or something else.
    """
    from safetensors.torch import save_file

    config = {
        "format_version": FORMAT_VERSION,
        "predictor": model.config.to_json(),
        "calibration": model.calibration.to_json(),
        "encoder_config": config_of(model.encoder),
    }
    weights = {
        name: tensor.detach().cpu().float().contiguous() for name, tensor in model.state_dict().items()
    }
    with atomic_directory(path, KIND, overwrite=overwrite) as folder:
        write_json(folder / CONFIG, config)
        write_json(folder / NORMALIZATION, model.normalization.to_json())
        write_json(folder / TRAINING, dict(training_info))
        with atomic_file(folder / WEIGHTS) as temporary:  # safetensors writes for the owner alone
            save_file(weights, str(temporary), metadata={"format": "pt"})
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
        InputError: The folder or a file is missing or broken, its format is of another version, or the weights do
            not fit the configuration.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise InputError("checkpoint", str(path), "an existing checkpoint folder of train")
    content = read_json_object(folder / CONFIG, "checkpoint")
    _check_format(content.get("format_version"))
    config = PredictorConfig.from_json(content.get("predictor"), f"checkpoint {CONFIG}, predictor")
    encoder_config = content.get("encoder_config")
    if not isinstance(encoder_config, dict):
        raise InputError(f"checkpoint {CONFIG}, encoder_config", encoder_config, "a JSON object")
    normalization = Normalization.from_json(read_json_object(folder / NORMALIZATION, "checkpoint"))
    calibration = Calibration.from_json(content.get("calibration"))
    model = PromptPredictor(config, build_encoder(encoder_config), normalization, calibration=calibration)
    _load_weights(model, folder / WEIGHTS)
    for name in (TOKENIZER, TOKENIZER_CONFIG):
        existing_file(folder / name, "checkpoint")
    tokenizer = load_tokenizer(str(folder), truncation_side=config.truncation_side)
    training = read_json_object(folder / TRAINING, "checkpoint")
    return Checkpoint(folder, model.eval(), tokenizer, config, training)


def _check_format(version: object) -> None:
    if version == FORMAT_VERSION and not isinstance(version, bool):
        return
    reason = ""
    if isinstance(version, int) and 1 <= version < FORMAT_VERSION:
        reason = "; an older tailcast wrote this checkpoint: train it again"
    elif isinstance(version, int) and version > FORMAT_VERSION:
        reason = "; a newer tailcast wrote this checkpoint: upgrade"
    raise InputError(f"checkpoint {CONFIG}, format_version", version, f"{FORMAT_VERSION}{reason}")


def _load_weights(model: PromptPredictor, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    existing_file(path, "checkpoint")
    try:
        model.load_state_dict(load_file(str(path)), strict=True)
    except SafetensorError as error:
        raise InputError("checkpoint", str(path), f"a complete safetensors file ({error})") from error
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise InputError(
            "checkpoint", str(path), f"weights that fit {CONFIG} ({' '.join(lines[1:2])})"
        ) from error
