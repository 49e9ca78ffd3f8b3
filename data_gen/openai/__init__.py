"""Sampling from servers that speak the OpenAI API: vLLM, SGLang, TGI, llama.cpp, Ollama and hosted ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from data_gen.openai.options import EngineError, OpenAIOptions

if TYPE_CHECKING:
    from data_gen.openai.backend import OpenAIBackend

__all__ = ["EngineError", "OpenAIBackend", "OpenAIOptions"]


def __getattr__(name: str) -> Any:
    """Imports the HTTP client only when it is needed: a command's options must not wait for it."""
    if name != "OpenAIBackend":
        raise AttributeError(name)
    from data_gen.openai.backend import OpenAIBackend

    return OpenAIBackend
