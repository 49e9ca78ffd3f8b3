"""The artifact that comes with tailcast: the predictor `pretrained` of every command.

`SHA256SUMS`, in the format of sha256sum, pins its manifest, which pins every other file.
"""

from __future__ import annotations

from pathlib import Path

from scheduler_core.errors import InputError
from scheduler_core.files import sha256_file

#: The spelling of this artifact wherever an artifact folder can stand.
PRETRAINED = "pretrained"
NAME = "tailcast-minilm"
FOLDER = Path(__file__).parent / NAME
_MANIFEST, _SUMS = "manifest.json", "SHA256SUMS"
#: What a checkpoint holds and an artifact does not.
_TRAINING = "training.json"


def pretrained_path() -> Path:
    """The artifact's folder.

    Raises:
        InputError: It is not part of this installation, or its manifest is not the pinned one.
    """
    manifest, sums = FOLDER / _MANIFEST, FOLDER.parent / _SUMS
    if not sums.is_file() or not manifest.is_file():
        advice = "give an artifact folder or grpc://HOST:PORT"
        raise InputError(f"predictor pretrained: this installation comes without {FOLDER}; {advice}")
    digest, pinned = sha256_file(manifest), sums.read_text(encoding="utf-8").partition(" ")[0]
    if digest != pinned:
        raise InputError(f"SHA-256 of {manifest}", digest, f"{pinned}, as in {_SUMS}")
    return FOLDER


def pin(folder: Path) -> None:
    """Writes `SHA256SUMS` beside an artifact that is to ship."""
    text = f"{sha256_file(folder / _MANIFEST)}  {folder.name}/{_MANIFEST}\n"
    (folder.parent / _SUMS).write_text(text, encoding="utf-8")


def predictor_folder(predictor: str | Path) -> Path:
    """The folder of a predictor by its spelling: the text "pretrained", or a path; raises as `pretrained_path`."""
    return pretrained_path() if predictor == PRETRAINED else Path(predictor)


def artifact_folder(artifact: str | Path) -> Path:
    """As `predictor_folder`; InputError for a checkpoint of `train` too."""
    folder = predictor_folder(artifact)
    if (folder / _TRAINING).is_file() and not (folder / _MANIFEST).exists():
        raise InputError(f"artifact: {folder} is a checkpoint; run export-onnx {folder} --out ARTIFACT first")
    return folder
