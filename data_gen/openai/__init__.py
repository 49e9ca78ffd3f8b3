"""Sampling from servers that speak the OpenAI API: vLLM, SGLang, TGI, llama.cpp, Ollama and hosted ones."""
