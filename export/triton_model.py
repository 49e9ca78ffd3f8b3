"""Model for Triton's Python backend that predicts from text; copied into a model repository as `model.py`.

Triton's Python needs numpy, onnxruntime and tokenizers, but not tailcast. model.onnx and tokenizer.json are in the
same folder; the parameters in config.pbtxt are threads, max_length, truncation_side, pad_token_id, max_chars and amounts.
"""

import json
import os
import sys

import numpy as np
import onnxruntime as ort
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {name: entry["string_value"] for name, entry in config["parameters"].items()}
        folder = os.path.join(args["model_repository"], args["model_version"])
        self.max_length = int(parameters["max_length"])
        self.truncation_side = parameters["truncation_side"]
        self.pad_token_id = int(parameters["pad_token_id"])
        self.max_chars = int(parameters["max_chars"])
        self.with_amount = str
        if parameters["amounts"] == "true":
            sys.path.append(folder)  # of tailcast, the package has only the modules that this needs
            from scheduler_core.prediction.requested_amount import with_amount

            self.with_amount = with_amount
        self.tokenizer = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        if self.truncation_side != "middle":
            self.tokenizer.enable_truncation(self.max_length, direction=self.truncation_side)
        options = ort.SessionOptions()
        options.intra_op_num_threads = int(parameters["threads"])
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        gpu = ["CUDAExecutionProvider"] if args["model_instance_kind"] == "GPU" else []
        path = os.path.join(folder, "model.onnx")
        self.session = ort.InferenceSession(path, options, providers=[*gpu, "CPUExecutionProvider"])
        if gpu and self.session.get_providers()[0] != gpu[0]:
            raise pb_utils.TritonModelException("this onnxruntime cannot use the GPU")
        self.conditions = [entry["name"] for entry in config["input"] if entry["name"] != "text"]
        self.outputs = [entry["name"] for entry in config["output"]]

    def execute(self, requests):
        columns = {
            name: [
                pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)
                for request in requests
            ]
            for name in ("text", *self.conditions)
        }
        ends = np.cumsum([len(texts) for texts in columns["text"]])
        texts = [entry.decode("utf-8", errors="replace") for entry in np.concatenate(columns["text"])]
        feed = self.padded(self.token_ids(texts))
        feed |= {name: np.concatenate(columns[name]) for name in self.conditions}
        outputs = [values.reshape(len(texts), -1) for values in self.session.run(self.outputs, feed)]
        return [
            pb_utils.InferenceResponse(
                output_tensors=[
                    pb_utils.Tensor(name, values) for name, values in zip(self.outputs, parts, strict=True)
                ]
            )
            for parts in zip(*(np.split(values, ends[:-1]) for values in outputs), strict=True)
        ]

    def padded(self, ids):
        """Padded input_ids and attention_mask of lists of token ids."""
        shape = (len(ids), max(len(row) for row in ids))
        input_ids = np.full(shape, self.pad_token_id, dtype=np.int64)
        attention_mask = np.zeros(shape, dtype=np.int64)
        for row, tokens in enumerate(ids):
            input_ids[row, : len(tokens)] = tokens
            attention_mask[row, : len(tokens)] = 1
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def token_ids(self, texts):
        """Truncated token ids of each text, from at most `max_chars` characters of each end that is kept."""
        limit = self.max_chars
        texts = [self.with_amount(text) for text in texts]
        if self.truncation_side == "right":
            texts = [text[:limit] for text in texts]
        elif self.truncation_side == "left":
            texts = [text[-limit:] for text in texts]
        else:
            texts = [text if len(text) <= 2 * limit else text[:limit] + text[-limit:] for text in texts]
        ids = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts)]
        first, last = self.max_length - self.max_length // 2, self.max_length // 2
        return [row if len(row) <= self.max_length else row[:first] + row[-last:] for row in ids]
