# mypy: ignore-errors
import os

import numpy as np
import triton_python_backend_utils as triton
from shared_model import Model


class TritonPythonModel:
    def initialize(self, args):
        self.model = Model(os.environ["ARTIFACT"], int(os.environ["THREADS"]))

    def execute(self, requests):
        texts, counts = [], []
        for request in requests:
            rows = triton.get_input_tensor_by_name(request, "prompt").as_numpy()[:, 0]
            texts += [text.decode() for text in rows]
            counts.append(len(rows))
        outputs = iter(self.model(texts))
        responses = []
        for count in counts:
            rows = [next(outputs) for _ in range(count)]
            outputs = [
                triton.Tensor(name, np.array([[row[name]] for row in rows], dtype=np.float32))
                for name in ("mu", "sigma")
            ]
            responses.append(triton.InferenceResponse(outputs))
        return responses
