"""Texts to padded token ids, for Triton's Python backend; needs numpy and tokenizers where Triton runs.

Parameters in config.pbtxt: max_length, truncation_side, pad_token_id, seq_multiple, max_chars. tokenizer.json stands
beside this file.
"""

import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        values = {name: entry["string_value"] for name, entry in parameters.items()}
        folder = os.path.join(args["model_repository"], args["model_version"])
        self.max_length = int(values["max_length"])
        self.side = values["truncation_side"]
        self.pad = int(values["pad_token_id"])
        self.multiple = int(values["seq_multiple"])
        self.max_chars = int(values["max_chars"])
        self.tokenizer = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        if self.side != "middle":
            self.tokenizer.enable_truncation(self.max_length, direction=self.side)

    def execute(self, requests):
        texts, sizes = [], []
        for request in requests:
            found = pb_utils.get_input_tensor_by_name(request, "text").as_numpy().reshape(-1)
            texts += [entry.decode("utf-8", errors="replace") for entry in found]
            sizes.append(len(found))
        ids = self.read(texts)
        seq = max(len(row) for row in ids)
        seq = min(-(-seq // self.multiple) * self.multiple, self.max_length)
        input_ids = np.full((len(ids), seq), self.pad, dtype=np.int64)
        attention_mask = np.zeros((len(ids), seq), dtype=np.int64)
        for row, tokens in enumerate(ids):
            input_ids[row, : len(tokens)] = tokens
            attention_mask[row, : len(tokens)] = 1
        ends = np.cumsum(sizes)
        return [
            pb_utils.InferenceResponse(
                output_tensors=[
                    pb_utils.Tensor("input_ids", input_ids[end - size : end]),
                    pb_utils.Tensor("attention_mask", attention_mask[end - size : end]),
                ]
            )
            for size, end in zip(sizes, ends, strict=True)
        ]

    def read(self, texts):
        """Token ids of each text, truncated."""
        if self.side != "middle":
            cut = [self.cut(text, self.max_chars, self.side) for text in texts]
            return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(cut)]
        first, last = self.max_length - self.max_length // 2, self.max_length // 2
        limit = self.max_chars * first // self.max_length
        read = [
            text if len(text) <= 2 * limit else self.cut(text, limit, "right") + self.cut(text, limit, "left")
            for text in texts
        ]
        whole = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(read)]
        return [ids if len(ids) <= self.max_length else ids[:first] + ids[-last:] for ids in whole]

    @staticmethod
    def cut(text, limit, dropped):
        """At most limit characters of the end that is not dropped, cut between words where there is a gap to cut at."""
        if len(text) <= limit:
            return text
        if dropped == "right":
            text = text[:limit]
            at = max(text.rfind(" "), text.rfind("\n"))
            return text[:at] if at > limit // 2 else text
        text = text[-limit:]
        gaps = [at for at in (text.find(" "), text.find("\n")) if at >= 0]
        return text[min(gaps) :] if gaps and min(gaps) < limit // 2 else text
