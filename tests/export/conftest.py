from pathlib import Path
from typing import Any

import pytest

from export.exporter import ExportConfig, export_onnx
from predictors.manifest import Manifest
from predictors.modules.checkpoint import save_checkpoint
from predictors.modules.config import Calibration
from predictors.modules.encoder import load_tokenizer
from predictors.modules.heads import Heads, LengthHead
from tests.training.checkpoints import TOWER, predictor
from tests.training.tiny import ENCODERS

TRAINING_INFO = {"data": {"name": "fits.parquet", "sha256": "ab" * 32}, "metrics": {"mu_r2": 0.25}}
TRAINING_INFO["urgency"] = {"abstain_threshold": 0.35}
# What a predictor of the length alone is, as TIE has it.
PLAIN: dict[str, Any] = {"heads": Heads(length=LengthHead(TOWER)), "conditioning": None}
PLAIN["served_models"] = ("tiny-llm",)
#: Folders by name.
Folders = dict[str, Path]
CALIBRATION = Calibration(
    (1.0, 1.5, 0.7),
    (0.0, 0.3, -0.2),
    ((0.1, 0.05, -0.1), (0.2, 0.0, 0.1), (0.0, 0.0, 0.0)),
    ((-0.1, 0.05, 0.1), (0.0, 0.1, 0.0), (0.3, 0.0, -0.1)),
)
LEGACY = ("bert", "deberta", "distilbert", "modernbert", "opt", "plain")
#: Name -> checkpoint, older exporter.
EXPORTS = {name: (name, False) for name in ("bert", "deberta")}
EXPORTS |= {f"{name}-legacy": (name, True) for name in LEGACY}


def write_checkpoint(folder: Path, kind: str, **options: Any) -> Path:
    """A checkpoint of a tiny random predictor, 48 tokens long; returns its folder.

    All heads, conditions and a calibration, unless `options` (fields of the configuration) say otherwise.
    """
    encoder = ENCODERS[kind](folder / "encoder")
    poolings = ("mean", "last") if kind == "opt" else ("cls", "mean", "max")
    model = predictor(encoder, **({"pooling": poolings, "prompt_length": True} | options))
    if model.num_models == CALIBRATION.num_models:
        model.set_calibration(CALIBRATION)
    save_checkpoint(folder / kind, model, load_tokenizer(encoder), TRAINING_INFO)
    return folder / kind


def export(checkpoint: Path, out: Path, **options: Any) -> Manifest:
    """Exports with torch's older exporter, which is several times faster, unless told otherwise."""
    options = {"legacy_exporter": True} | options
    return export_onnx(ExportConfig(checkpoint=str(checkpoint), out=str(out), **options))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Checkpoint folders by kind of encoder, and "plain"; tests must not write into them."""
    root = tmp_path_factory.mktemp("checkpoints")
    folders = {kind: write_checkpoint(root / kind, kind) for kind in ENCODERS}
    return folders | {"plain": write_checkpoint(root / "plain", "bert", **PLAIN)}


@pytest.fixture(scope="session")
def artifacts(checkpoints: Folders, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Artifact folders by name of `EXPORTS`; tests must not write into them."""
    root = tmp_path_factory.mktemp("exported")
    for name, (kind, legacy) in EXPORTS.items():
        export(checkpoints[kind], root / name, legacy_exporter=legacy)
    return {name: root / name for name in EXPORTS}
