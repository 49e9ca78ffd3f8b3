"""What answers at an address: the engine, its version and the model it serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data_gen.openai.client import Client
from data_gen.openai.wire import ReplyError
from scheduler_core.errors import InputError

UNKNOWN_ENGINE = "openai-compatible"
UNKNOWN_VERSION = "unknown"

_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp", "library": "ollama"}
"""Engine by `owned_by` of /v1/models."""

_PAGES = (
    ("vllm", "/version", "version"),
    ("sglang", "/get_server_info", "version"),
    ("llama.cpp", "/props", "build_info"),
    ("ollama", "/api/version", "version"),
    ("tgi", "/info", "version"),
)
"""(engine, page, field of its version)."""

SEEDED_ENGINES = ("vllm", "llama.cpp", "ollama", "tgi")
"""Engines that draw an answer from the seed of its own request."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Who answers."""

    name: str
    version: str
    model: str


def root_of(base_url: str) -> str:
    """The address without /v1, where engines have their own pages."""
    return base_url.removesuffix("/v1")


async def identify(client: Client, base_url: str, model: str) -> Engine:
    """Asks a server who it is.

    Args:
        client: Open client.
        base_url: Address up to /v1.
        model: Name that it must serve; empty takes the only one.

    Raises:
        InputError: If it does not serve the model, or the key is not accepted.
        ReplyError: If it does not answer, or not yet.
    """
    status, listed = await client.get(base_url + "/models")
    if status in (401, 403):
        raise InputError(
            "api_key_env", f"HTTP {status} from {base_url}", "a variable with a key that the server accepts"
        )
    if status in (408, 425, 429) or status >= 500:
        raise ReplyError(f"http_{status}", f"HTTP {status} from {base_url}/models", retry=True)
    entries = _entries(listed) if status == 200 else None
    if entries is None:
        if not model:
            raise InputError("model", model, f"a name: {base_url}/models does not list what is served")
        owner = ""
    else:
        model = _served(model, [str(entry["id"]) for entry in entries])
        owner = next(str(entry.get("owned_by")) for entry in entries if str(entry["id"]) == model)
    name, version = await _engine(client, root_of(base_url), _OWNERS.get(owner))
    return Engine(name, version, model)


def _entries(listed: Any) -> list[Mapping[str, Any]] | None:
    entries = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(entries, list):
        return None
    return [entry for entry in entries if isinstance(entry, dict) and "id" in entry] or None


def _served(model: str, names: list[str]) -> str:
    if not model and len(names) == 1:
        return names[0]
    for name in (model, f"{model}:latest"):
        if name in names:
            return name
    shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    raise InputError("model", model, f"a model that the server has: {shown}")


async def _engine(client: Client, root: str, hint: str | None) -> tuple[str, str]:
    for name, page, key in _PAGES:
        if hint is not None and name != hint:
            continue
        status, found = await client.get(root + page)
        if status == 200 and isinstance(found, dict) and isinstance(found.get(key), str):
            return name, found[key]
    return hint or UNKNOWN_ENGINE, UNKNOWN_VERSION
