# mypy: ignore-errors
import os

import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec, StringCodec
from mlserver.types import InferenceResponse
from shared_model import Model


class Predict(MLModel):
    async def load(self):
        self.model = Model(os.environ["ARTIFACT"], int(os.environ["THREADS"]))
        return True

    async def predict(self, payload):
        answers = self.model(StringCodec.decode_input(payload.inputs[0]))
        mu = np.array([[answer["mu"]] for answer in answers])
        sigma = np.array([[answer["sigma"]] for answer in answers])
        outputs = [NumpyCodec.encode_output("mu", mu), NumpyCodec.encode_output("sigma", sigma)]
        return InferenceResponse(model_name=self.name, outputs=outputs)
