"""Sampling from servers with the OpenAI API: vLLM, SGLang, TGI, llama.cpp, Ollama and hosted services."""
