"""Objects of registered dataclasses by name and parameters: policies, batch formers, routers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from scheduler_core.errors import unknown_name

K = TypeVar("K")


def construct(registry: str, name: str, kind: type[K], parameters: Mapping[str, Any] | None) -> K:
    """An object of a dataclass of the registry; `parameters` are values for its fields, the others keep their defaults.

    Raises:
        InputError: A parameter is unknown, or a value is outside its range.
    """
    names = sorted(field.name for field in fields(kind) if field.init)  # type: ignore[arg-type]
    for parameter in parameters or {}:
        if parameter not in names:
            raise unknown_name(f"parameter of {registry} {name}", parameter, names or ["none"])
    return kind(**(parameters or {}))
