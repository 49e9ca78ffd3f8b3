"""Tokenizer and model for all peers, as their users would write them; needs only an artifact folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from tokenizers import Tokenizer


class Model:
    """Maps texts to one dictionary of numbers each."""

    def __init__(self, folder: str, threads: int) -> None:
        path = Path(folder)
        manifest = json.loads((path / "manifest.json").read_text())
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        side = manifest["truncation_side"]  # the tokenizer cannot truncate the middle; long prompts are rare
        self.tokenizer.enable_truncation(
            manifest["max_length"], direction="right" if side == "middle" else side
        )
        self.tokenizer.enable_padding(pad_id=manifest["pad_token_id"])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session = onnxruntime.InferenceSession(
            str(path / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        names = ("input_ids", "attention_mask")
        self.extra = [
            tensor
            for tensor in manifest["inputs"]
            if tensor["name"] not in names and not tensor.get("optional")
        ]

    def __call__(self, texts: list[str]) -> list[dict[str, float]]:
        read = self.tokenizer.encode_batch(texts)
        return self.run([one.ids for one in read], [one.attention_mask for one in read])

    def run(self, ids: list[list[int]], mask: list[list[int]]) -> list[dict[str, float]]:
        """Runs the model on rows of equal length."""
        feed: dict[str, Any] = {"input_ids": np.array(ids), "attention_mask": np.array(mask)}
        for tensor in self.extra:  # conditions: unknown model, unknown temperature
            unknown = np.nan if tensor["dtype"].startswith("float") else 0
            feed[tensor["name"]] = np.full(len(ids), unknown, dtype=tensor["dtype"])
        mu, sigma = self.session.run(["mu", "sigma"], feed)
        return [{"mu": float(m), "sigma": float(s)} for m, s in zip(mu, sigma, strict=True)]
