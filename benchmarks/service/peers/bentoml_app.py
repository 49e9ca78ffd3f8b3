# mypy: ignore-errors
import os

import bentoml
from shared_model import Model

BATCH = int(os.environ["MAX_BATCH"])


@bentoml.service(workers=int(os.environ["WORKERS"]), traffic={"timeout": 300, "max_concurrency": 10_000})
class Predict:
    def __init__(self) -> None:
        self.model = Model(os.environ["ARTIFACT"], int(os.environ["THREADS"]))

    # BentoML has no option "wait 3 ms": its latency limit only decides which requests are rejected.
    @bentoml.api(batchable=BATCH > 1, max_batch_size=max(2, BATCH), max_latency_ms=100_000)
    def predict(self, prompts: list[str]) -> list[dict]:
        return self.model(prompts)
