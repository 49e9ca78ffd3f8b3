"""Model for Triton's Python backend that predicts from requests; copied into a model repository as `model.py`.

A row has a text, or messages: a JSON list as in a request of any chat API. Its options are a JSON object with other members
of such a request: tools, response_format, reasoning_effort, ... All three inputs are optional.

Triton's Python needs numpy, onnxruntime and tokenizers, but not tailcast, of which the modules that read requests, model.onnx
and tokenizer.json are in the same folder. The parameters in config.pbtxt are threads, max_length, truncation_side, pad_token_id,
max_chars, amounts, conversations and part_tokens.
"""

import json
import os
import sys

import numpy as np
import onnxruntime as ort
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer

#: Inputs of texts, which are optional.
TEXTS = ("text", "messages", "options")


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {name: entry["string_value"] for name, entry in config["parameters"].items()}
        folder = os.path.join(args["model_repository"], args["model_version"])
        self.max_length = int(parameters["max_length"])
        self.truncation_side = parameters["truncation_side"]
        self.pad_token_id = int(parameters["pad_token_id"])
        self.max_chars = int(parameters["max_chars"])
        sys.path.append(folder)  # of tailcast, the package has only the modules that this needs
        from scheduler_core.prediction.api_request import read_request
        from scheduler_core.prediction.prompt_text import PartTokens, PromptForm
        from scheduler_core.prediction.requested_amount import with_amount

        self.with_amount = with_amount if parameters["amounts"] == "true" else str
        self.read_request = read_request
        part_tokens = json.loads(parameters["part_tokens"])
        self.form = PromptForm(
            conversations=parameters["conversations"] == "true",
            part_tokens=None if part_tokens is None else PartTokens(**part_tokens),
        )
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
        self.conditions = [entry["name"] for entry in config["input"] if entry["name"] not in TEXTS]
        self.outputs = [entry["name"] for entry in config["output"]]

    def execute(self, requests):
        responses, valid = {}, {}
        for number, request in enumerate(requests):
            try:
                valid[number] = self.texts(request)
            except ValueError as error:
                responses[number] = pb_utils.InferenceResponse(
                    output_tensors=[], error=pb_utils.TritonError(str(error))
                )
        if valid:
            predicted = self.predict([requests[number] for number in valid], list(valid.values()))
            responses |= dict(zip(valid, predicted, strict=True))
        return [responses[number] for number in range(len(requests))]

    def predict(self, requests, texts):
        """Responses to requests with these texts of their rows."""
        columns = {
            name: [
                pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)
                for request in requests
            ]
            for name in self.conditions
        }
        ends = np.cumsum([len(rows) for rows in texts])
        texts = [text for rows in texts for text in rows]
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

    def texts(self, request):
        """What the predictor reads of each row of a request; ValueError with the reason if one cannot be read."""
        columns = {}
        for name in TEXTS:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is not None:
                values = tensor.as_numpy().reshape(-1)
                columns[name] = [entry.decode("utf-8", errors="replace") for entry in values]
        if not {"text", "messages"} & columns.keys():
            raise ValueError("inputs: neither text nor messages")
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return [self.text(number, **row) for number, row in enumerate(rows)]

    def text(self, number, text="", messages="", options=""):
        if not (messages or options):
            return text
        body = self.parsed(f"options[{number}]", options, dict) if options else {}
        if text and messages:
            raise ValueError(f"text, messages[{number}]: got both; allowed: one of them")
        prompt = (
            {"messages": self.parsed(f"messages[{number}]", messages, list)} if messages else {"prompt": text}
        )
        if prompt.keys() & body.keys() or self.read_request(body).has_prompt:
            raise ValueError(f"options[{number}]: got a prompt; allowed: no prompt, which is another input")
        request = self.read_request(body | prompt)
        if request.model or request.temperature is not None or request.max_tokens is not None:
            allowed = "options without the model and the temperature, which are other inputs, and without a limit, which changes no output"
            raise ValueError(f"options[{number}]: got {sorted(body)}; allowed: {allowed}")
        return request.text(self.form)

    def parsed(self, name, text, kind):
        """The JSON list or object in a text; ValueError for other texts."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, kind):
            raise ValueError(
                f"{name}: got {text[:40]!r}; allowed: a JSON {'list' if kind is list else 'object'}"
            )
        return value

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
