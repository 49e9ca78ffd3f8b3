"""An ONNX graph for Triton's Python backend, where the server has no onnxruntime backend; needs numpy and onnxruntime.

Parameters in config.pbtxt: threads. model.onnx stands beside this file.
"""

import json
import os

import numpy as np
import onnxruntime as ort
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        folder = os.path.join(args["model_repository"], args["model_version"])
        options = ort.SessionOptions()
        options.intra_op_num_threads = int(config["parameters"]["threads"]["string_value"])
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        wanted = ["CUDAExecutionProvider"] if args["model_instance_kind"] == "GPU" else []
        path = os.path.join(folder, "model.onnx")
        self.session = ort.InferenceSession(path, options, providers=[*wanted, "CPUExecutionProvider"])
        if wanted and self.session.get_providers()[0] != wanted[0]:
            raise pb_utils.TritonModelException("this onnxruntime cannot use the GPU")
        # Scalars of a row have a dimension of their own in Triton, and none in the graph.
        self.is_scalar = {entry.name: len(entry.shape) == 1 for entry in self.session.get_inputs()}
        self.outputs = [entry["name"] for entry in config["output"]]

    def execute(self, requests):
        feed, sizes = {}, []
        for name, is_scalar in self.is_scalar.items():
            parts = [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for request in requests]
            sizes = [len(part) for part in parts]
            whole = np.concatenate(parts)
            feed[name] = whole.reshape(len(whole)) if is_scalar else whole
        found = self.session.run(self.outputs, feed)
        found = [values.reshape(len(values), -1) for values in found]
        ends = np.cumsum(sizes)
        return [
            pb_utils.InferenceResponse(
                output_tensors=[
                    pb_utils.Tensor(name, values[end - size : end])
                    for name, values in zip(self.outputs, found, strict=True)
                ]
            )
            for size, end in zip(sizes, ends, strict=True)
        ]
