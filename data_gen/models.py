"""How a model is named: a local folder or file, a hub name, or a file inside an installed package."""

from __future__ import annotations

from pathlib import Path

from scheduler_core.files import PACKAGE_SCHEME, inside_package


def resolve_model(model: str) -> str:
    """Path or hub name of a model; `package:NAME/PATH` is a file or folder inside an installed package.

    Raises:
        InputError: If the package is not installed or has no such file.
    """
    return str(inside_package(model, "model")) if model.startswith(PACKAGE_SCHEME) else model


def model_name(model: str) -> str:
    """The name that samples are recorded with unless another is given: the last part of `model`."""
    return Path(model.rstrip("/")).name.removesuffix(".gguf")
