"""Every shipped recipe in the loop: trained at tiny size, exported, served; the order follows the predicted head."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from export.exporter import ExportConfig, export_onnx
from predictors.runtime import open_runtime
from scheduler_core.policies import make_policy
from scheduler_core.scheduler import Scheduler, SchedulerConfig
from scheduler_core.simulator.loop import Simulation
from scheduler_core.simulator.step_time import LinearStepTime
from scheduler_core.simulator.trace import Trace, TraceRequest
from scheduler_core.simulator.trace_predictions import Predictions, fetch_predictions
from tests.predictors.fakes import running_server
from tests.predictors.proxy.fake_engine import chat, gated, running_engine, running_proxy, until
from tests.training.data import prompts
from tests.training.test_train_configs import CONFIGS, architecture, arguments, encoders, files  # noqa: F401
from training.commands.train import main as train


class Order(NamedTuple):
    """A head of a recipe, a policy that needs it, and the policy's parameters."""

    head: str
    policy: str
    parameters: Mapping[str, float] = MappingProxyType({})


#: The paper's unlimited trust: the order is that of the most probable levels. The artifacts have no threshold to abstain.
TRUST = {"max_promotion": float("inf")}
TIE = Order("length", "tie")
ORDERS = {
    **dict.fromkeys(("tie-deberta", "minilm-cpu", "minilm-quickstart", "minilm-logs"), TIE),
    "ssjf-bert": Order("point", "ssjf"),
    "s3-distilbert-buckets": Order("bucket", "s3", {"reserve": 0}),
    "ltr-opt125m-listmle": Order("rank", "ltr"),
    **dict.fromkeys(("urgency-distilbert", "urgency-minilm"), Order("urgency", "hpjf", TRUST)),
    **dict.fromkeys(("semantic", "multitask"), Order("urgency", "semantic", TRUST)),
}
#: One recipe of every head; `make test-all` runs the others too.
QUICK = {"minilm-quickstart", "ssjf-bert", "s3-distilbert-buckets", "ltr-opt125m-listmle", "semantic"}

TEXTS = [text if row % 2 else text.replace("write", "now") for row, (text, _, _) in enumerate(prompts(12))]
EQUAL = {"arrival_s": 0.0, "prompt_tokens": 8, "output_tokens": 20, "max_tokens": 100}
TRACE = Trace(tuple(TraceRequest(request_id=f"r{at}", prompt=text, **EQUAL) for at, text in enumerate(TEXTS)))


@pytest.fixture(
    params=[pytest.param(path.stem, marks=() if path.stem in QUICK else pytest.mark.slow) for path in CONFIGS]
)
def served(request: pytest.FixtureRequest, encoders: Any, files: Any, tmp_path: Path) -> tuple[Order, Path]:  # noqa: F811
    """The order that a recipe is for, and the artifact of its tiny training."""
    stem = request.param
    options = arguments(stem, files, tmp_path / "checkpoint")
    options += ["--encoder", encoders[architecture(stem)], "--progress", "false"]
    options += ["--stage1.epochs", "12", "--stage1.learning_rate", "2e-3"]
    if stem == "semantic":  # Without dropout it learns the few texts, whatever the seed.
        options += ["--encoder_dropout", "0"]
    if stem.startswith("s3"):
        options += ["--bucket.num_buckets", "3"]
    assert train(options) == 0
    out = tmp_path / "artifact"
    export_onnx(ExportConfig(checkpoint=str(tmp_path / "checkpoint"), out=str(out), legacy_exporter=True))
    return ORDERS[stem], out


def simulated(order: Order, predictions: Predictions) -> list[str]:
    """Ids in the order in which a simulated engine for one request at a time begins them."""
    core = Scheduler(SchedulerConfig(max_num_seqs=1), make_policy(order.policy, order.parameters))
    records = Simulation(TRACE, core, LinearStepTime(), replace(predictions, latency_s={})).run().records
    return [record.request_id for record in sorted(records, key=lambda record: record.ttft_s)]


async def test_the_head_of_a_recipe_orders_requests(served: tuple[Order, Path]) -> None:
    order, folder = served
    runtime = open_runtime(folder)
    model = "small" if runtime.artifact.manifest.served_models else ""
    async with running_server(runtime) as (_, address):
        remote = await asyncio.to_thread(fetch_predictions, TRACE, f"grpc://{address}", served_model=model)
    local = await asyncio.to_thread(fetch_predictions, TRACE, str(folder), served_model=model)
    for predictions in (remote, local):
        assert predictions.num_failed == 0, predictions.errors
        assert all(getattr(prediction, order.head) is not None for prediction in predictions.by_id.values())
    arrivals = [row.request_id for row in TRACE.requests]
    orders = [simulated(order, predictions) for predictions in (remote, local)]
    assert orders[0] == orders[1] != arrivals
    assert await proxied(order, folder, model) != arrivals


async def proxied(order: Order, folder: Path, model: str) -> list[str]:
    """Ids in the order in which the proxy's queue sends the requests to an engine for one at a time."""
    go = asyncio.Event()
    options: dict[str, Any] = {"predictor": str(folder), "served_model": model, "release": 1}
    options |= {"policy": order.policy, "policy_parameters": dict(order.parameters)}
    async with running_engine(gated(go)) as engine, running_proxy(engine.url, **options) as proxy:
        tasks = [asyncio.create_task(proxy.post(chat("first of all")))]
        await until(lambda: engine.requests)
        for row in TRACE.requests:
            tasks.append(asyncio.create_task(proxy.post(chat(row.prompt or ""))))
            await until(lambda: proxy.server.num_in_flight == len(tasks))
        await proxy.reaches('tailcast_proxy_predictions_total{outcome="answered"}', len(tasks))
        go.set()
        assert {status for status, _ in await asyncio.gather(*tasks)} == {200}
    ids = {row.prompt: row.request_id for row in TRACE.requests}
    return [ids[body["messages"][0]["content"]] for body in engine.bodies[1:]]
