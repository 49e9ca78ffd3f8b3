"""Sampling from servers that speak the OpenAI API: vLLM, SGLang, TGI, llama.cpp, Ollama and hosted ones."""

from data_gen.openai.backend import OpenAIBackend
from data_gen.openai.options import EngineError, OpenAIOptions

__all__ = ["EngineError", "OpenAIBackend", "OpenAIOptions"]
