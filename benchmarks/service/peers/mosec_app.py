# mypy: ignore-errors
import os

from mosec import Server, Worker
from shared_model import Model

BATCH = int(os.environ["MAX_BATCH"])


class Predict(Worker):
    def __init__(self):
        self.model = Model(os.environ["ARTIFACT"], int(os.environ["THREADS"]))

    def forward(self, data):
        if BATCH == 1:
            return self.model([data["prompt"]])[0]
        return self.model([one["prompt"] for one in data])


if __name__ == "__main__":
    server = Server()
    wait_ms = max(1, round(float(os.environ["MAX_WAIT_S"]) * 1000))
    server.append_worker(Predict, num=int(os.environ["WORKERS"]), max_batch_size=BATCH, max_wait_time=wait_ms)
    server.run()
