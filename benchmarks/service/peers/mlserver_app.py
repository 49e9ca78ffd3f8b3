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
        outputs = self.model(StringCodec.decode_input(payload.inputs[0]))
        mu = np.array([[output["mu"]] for output in outputs])
        sigma = np.array([[output["sigma"]] for output in outputs])
        outputs = [NumpyCodec.encode_output("mu", mu), NumpyCodec.encode_output("sigma", sigma)]
        return InferenceResponse(model_name=self.name, outputs=outputs)
