"""The artifacts shipped with tailcast: the predictors `pretrained`, `tiny` and `urgency` of all commands.

`SHA256SUMS`, in the format of sha256sum, pins their manifests, which pin all other files.
"""

from __future__ import annotations

from pathlib import Path

from scheduler_core.errors import InputError
from scheduler_core.prediction.predictor import SHIPPED
from scheduler_core.shell.files import sha256_file

#: Names of these artifacts, accepted wherever an artifact folder is.
PRETRAINED, TINY, URGENCY = SHIPPED
FOLDERS = {
    PRETRAINED: Path(__file__).parent / "tailcast-minilm",
    TINY: Path(__file__).parent / "tailcast-tiny",
    URGENCY: Path(__file__).parent / "tailcast-urgency",
}
_MANIFEST, _SUMS = "manifest.json", "SHA256SUMS"
#: File of a checkpoint that an artifact does not have.
_TRAINING = "training.json"


def shipped_folder(predictor: str) -> Path:
    """The folder of an artifact named in `FOLDERS`; InputError if this installation does not include it, or
    if its manifest differs from the pinned one."""
    folder = FOLDERS[predictor]
    manifest, sums = folder / _MANIFEST, folder.parent / _SUMS
    if not sums.is_file() or not manifest.is_file():
        advice = "use an artifact folder or grpc://HOST:PORT"
        raise InputError(f"predictor {predictor}: this installation does not include {folder}; {advice}")
    digest, pinned = sha256_file(manifest), _pins(sums).get(f"{folder.name}/{_MANIFEST}")
    if digest != pinned:
        raise InputError(f"SHA-256 of {manifest}", digest, f"{pinned}, as in {_SUMS}")
    return folder


def pin(folder: Path) -> None:
    """Adds the manifest of an artifact to the `SHA256SUMS` in its parent folder."""
    sums = folder.parent / _SUMS
    pins = _pins(sums) if sums.is_file() else {}
    pins[f"{folder.name}/{_MANIFEST}"] = sha256_file(folder / _MANIFEST)
    sums.write_text("".join(f"{pins[name]}  {name}\n" for name in sorted(pins)), encoding="utf-8")


def _pins(sums: Path) -> dict[str, str]:
    """File -> SHA-256."""
    lines = sums.read_text(encoding="utf-8").splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def predictor_folder(predictor: str | Path) -> Path:
    """The folder of a predictor, given a key of `FOLDERS` or a path; raises as `shipped_folder`."""
    return shipped_folder(str(predictor)) if predictor in FOLDERS else Path(predictor)


def artifact_folder(artifact: str | Path) -> Path:
    """As `predictor_folder`, but also raises InputError for a checkpoint of `train`."""
    folder = predictor_folder(artifact)
    if (folder / _TRAINING).is_file() and not (folder / _MANIFEST).exists():
        raise InputError(f"artifact: {folder} is a checkpoint; run export-onnx {folder} --out ARTIFACT first")
    return folder
