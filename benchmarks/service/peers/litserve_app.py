# mypy: ignore-errors
import os

import litserve
from shared_model import Model

BATCH = int(os.environ["MAX_BATCH"])


class Predict(litserve.LitAPI):
    def setup(self, device):
        self.model = Model(os.environ["ARTIFACT"], int(os.environ["THREADS"]))

    def decode_request(self, request):
        return request["prompt"]

    def batch(self, prompts):
        return prompts

    def predict(self, prompts):
        return self.model(prompts) if BATCH > 1 else self.model([prompts])[0]

    def unbatch(self, answers):
        return answers

    def encode_response(self, answer):
        return answer


if __name__ == "__main__":
    api = Predict(max_batch_size=BATCH, batch_timeout=float(os.environ["MAX_WAIT_S"]))
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=int(os.environ["WORKERS"]))
    server.run(
        port=int(os.environ["PORT"]), host="127.0.0.1", generate_client_file=False, log_level="warning"
    )
