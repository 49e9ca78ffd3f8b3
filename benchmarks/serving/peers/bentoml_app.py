# mypy: ignore-errors
import os

import bentoml
from shared_model import Model

BATCH = int(os.environ["MAX_BATCH"])


@bentoml.service(workers=int(os.environ["WORKERS"]), traffic={"timeout": 300, "max_concurrency": 10_000})
class Predict:
    def __init__(self) -> None:
        self.model = Model(os.environ["ARTIFACT"], int(os.environ["THREADS"]))

    # It has no "wait 3 ms": the latency limit only decides what it refuses.
    @bentoml.api(batchable=BATCH > 1, max_batch_size=max(2, BATCH), max_latency_ms=100_000)
    def predict(self, prompts: list[str]) -> list[dict]:
        return self.model(prompts)
