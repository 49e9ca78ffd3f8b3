# mypy: ignore-errors
import os
import time

import ray
from ray import serve
from shared_model import Model

BATCH, WAIT_S = int(os.environ["MAX_BATCH"]), float(os.environ["MAX_WAIT_S"])
WORKERS = int(os.environ["WORKERS"])


@serve.deployment(num_replicas=WORKERS, max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
class Predict:
    def __init__(self):
        self.model = Model(os.environ["ARTIFACT"], int(os.environ["THREADS"]))

    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=WAIT_S)
    async def predict(self, prompts):
        return self.model(prompts)

    async def __call__(self, request):
        return await self.predict((await request.json())["prompt"])


if __name__ == "__main__":
    names = ("ARTIFACT", "THREADS", "MAX_BATCH", "MAX_WAIT_S", "WORKERS", "PYTHONPATH")
    ray.init(include_dashboard=False, runtime_env={"env_vars": {name: os.environ[name] for name in names}})
    serve.start(http_options={"host": "127.0.0.1", "port": int(os.environ["PORT"])})
    serve.run(Predict.bind(), route_prefix="/predict")
    while True:
        time.sleep(3600)
