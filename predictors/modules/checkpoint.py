"""The checkpoint folder: written by `train`, input of `export-onnx`, `evaluate` and `calibrate`.

| file | content |
|---|---|
| config.json | format_version, the `PredictorConfig`, the calibration, the encoder's transformers configuration |
| model.safetensors | all weights, including the encoder |
| normalization.json | means and standard deviations of the targets |
| tokenizer.json, tokenizer_config.json | tokenizer, without truncation or padding |
| training.json | record of the training: split, data, metrics, versions |

Loading needs no network and no encoder folder, and runs no code from the checkpoint folder.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from predictors.manifest import NORMALIZATION, TOKENIZER, check_format
from predictors.modules.config import Calibration, PredictorConfig, read_config
from predictors.modules.encoder import build_encoder, config_of, load_tokenizer
from predictors.modules.normalization import Normalization
from predictors.modules.predictor import PromptPredictor
from scheduler_core.errors import InputError
from scheduler_core.shell.files import atomic_directory, atomic_file, existing_file, write_json
from scheduler_core.shell.json_text import read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 5
#: Kind of the output folder, see `scheduler_core.shell.files.atomic_directory`.
KIND = "checkpoint"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
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
    """Writes a checkpoint folder atomically, with weights in float32; InputError if `path` has other content,
    or has a checkpoint and `overwrite` is false. `extra_files` (name -> file) are copied."""
    from safetensors.torch import save_file

    config = {
        "format_version": FORMAT_VERSION,
        "predictor": dataclasses.asdict(model.config),
        "calibration": dataclasses.asdict(model.calibration),
        "encoder_config": config_of(model.encoder),
    }
    weights = {
        name: tensor.detach().cpu().float().contiguous() for name, tensor in model.state_dict().items()
    }
    with atomic_directory(path, KIND, overwrite=overwrite) as folder:
        write_json(folder / CONFIG, config)
        write_json(folder / NORMALIZATION, dataclasses.asdict(model.normalization))
        write_json(folder / TRAINING, dict(training_info))
        with atomic_file(folder / WEIGHTS) as temporary:  # safetensors sets mode 0600
            save_file(weights, str(temporary), metadata={"format": "pt"})
        # The tokenizer would also save the truncation and padding settings of its last call.
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        tokenizer.save_pretrained(str(folder))
        for name, source in (extra_files or {}).items():
            shutil.copyfile(source, folder / name)


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Loads a checkpoint folder; InputError if the folder or a file is missing or invalid, the format version
    differs, or the weights do not match the configuration."""
    folder = Path(path)
    if not folder.is_dir():
        raise InputError("checkpoint", str(path), "an existing checkpoint folder, written by train")
    content = read_json_object(folder / CONFIG, "checkpoint")
    version = content.get("format_version")
    check_format(f"checkpoint {CONFIG}, format_version", version, FORMAT_VERSION, "train it again")
    config = read_config(PredictorConfig, content.get("predictor"), f"checkpoint {CONFIG}, predictor")
    calibration = read_config(Calibration, content.get("calibration"), f"checkpoint {CONFIG}, calibration")
    statistics = read_json_object(folder / NORMALIZATION, "checkpoint")
    if missing := dataclasses.asdict(Normalization()).keys() - statistics.keys():
        raise InputError(f"checkpoint {NORMALIZATION}", sorted(statistics), f"also {', '.join(missing)}")
    normalization = read_config(Normalization, statistics, f"checkpoint {NORMALIZATION}")
    encoder = build_encoder(content.get("encoder_config"))
    model = PromptPredictor(config, encoder, normalization, calibration=calibration)
    _load_weights(model, folder / WEIGHTS)
    for name in (TOKENIZER, TOKENIZER_CONFIG):
        existing_file(folder / name, "checkpoint")
    tokenizer = load_tokenizer(str(folder), truncation_side=config.truncation_side)
    training = read_json_object(folder / TRAINING, "checkpoint")
    return Checkpoint(folder, model.eval(), tokenizer, config, training)


def _load_weights(model: PromptPredictor, path: Path) -> None:
    from safetensors.torch import load_file

    existing_file(path, "checkpoint")
    try:
        model.load_state_dict(load_file(str(path)), strict=True)
    except Exception as error:  # safetensors and torch share no base class
        reason = str(error).splitlines()[:2][-1].strip()  # line 1 has only the class name
        allowed = f"a complete safetensors file with weights that match {CONFIG} ({reason})"
        raise InputError("checkpoint", str(path), allowed) from error
