"""The client without a network answers like the one with it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from predictors.client import InProcessPredictor, PredictorError, connect, load
from predictors.runtime import open_runtime
from predictors.service.batcher import BatchingSettings
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.predictor import PredictionRequest, Predictor
from tests.predictors.fakes import expected, running_server, until, without_numbers, write_artifact

PROMPTS = ["name three rivers", "sea", "write a long essay about the sea", "a a a"]


def requests(prompts: list[str] = PROMPTS, served_model: str = "") -> list[PredictionRequest]:
    return [PredictionRequest(f"r{index}", prompt, 100, served_model) for index, prompt in enumerate(prompts)]


async def test_same_answers_as_over_the_network(rich_folder: Path) -> None:
    wanted = requests(served_model="huge-llm")
    async with running_server(open_runtime(rich_folder)) as (_, address), connect(address) as remote:
        theirs = await remote.responses(wanted, truncated_length=True)
        lengths = await remote.predict(wanted)
    async with load(str(rich_folder)) as predictor:
        assert isinstance(predictor, Predictor)
        ours = await predictor.responses(wanted, truncated_length=True)
        assert [one.mu for one in await predictor.predict(wanted)] == pytest.approx(
            [one.mu for one in lengths]
        )
    for mine, other in zip(ours, theirs, strict=True):
        mine.ClearField("durations")
        other.ClearField("durations")
        # Batches may differ, and with them the last bits.
        for name in ("mu", "sigma", "nu", "regression_tokens", "rank"):
            assert getattr(mine, name) == pytest.approx(getattr(other, name), rel=1e-6)
        assert list(mine.urgency.probabilities) == pytest.approx(list(other.urgency.probabilities), rel=1e-6)
        assert mine.truncated_length.cvar_tokens == pytest.approx(
            other.truncated_length.cvar_tokens, rel=1e-5
        )
        assert (mine.request_id, mine.artifact_version, mine.served_model_known) == (
            other.request_id,
            other.artifact_version,
            other.served_model_known,
        )


@pytest.mark.parametrize(
    ("prompt", "served_model", "field"), [("", "", "prompt"), ("sea", "x", "served_model")]
)
async def test_refused_request_has_the_code_of_the_service(
    artifact_folder: Path, prompt: str, served_model: str, field: str
) -> None:
    async with load(str(artifact_folder)) as predictor:
        with pytest.raises(PredictorError, match=f"{field}: got") as caught:
            await predictor.predict(requests(["sea", prompt], served_model))
    assert caught.value.code == "INVALID_ARGUMENT"
    assert caught.value.request_id == ("r1" if not prompt else "r0")


async def test_a_full_queue_refuses_at_once(artifact_folder: Path) -> None:
    batching = BatchingSettings(max_batch=1, max_wait_s=0.0, max_queue=2)
    async with InProcessPredictor(artifact_folder, batching) as predictor:
        with pytest.raises(PredictorError) as caught:
            await predictor.predict(requests())
    assert caught.value.code == "RESOURCE_EXHAUSTED"


async def test_a_deadline_that_has_passed_is_told(artifact_folder: Path) -> None:
    async with load(str(artifact_folder)) as predictor:
        await predictor.predict(requests(["sea"]))
        with pytest.raises(PredictorError) as caught:
            await predictor.predict(requests(["sea"]), timeout_s=1e-9)
    assert caught.value.code == "DEADLINE_EXCEEDED"


async def test_missing_artifact_is_an_input_error_and_closing_it_is_harmless(tmp_path: Path) -> None:
    predictor = load(str(tmp_path / "none"))
    assert await predictor.predict([]) == []
    with pytest.raises(InputError, match="artifact"):
        await predictor.predict(requests())
    await predictor.close()


def test_one_client_serves_one_loop_after_the_other(artifact_folder: Path) -> None:
    predictor = load(str(artifact_folder))

    async def use() -> float:
        [found] = await predictor.predict(requests(["sea"]))
        await predictor.close()
        return found.mu

    assert asyncio.run(use()) == asyncio.run(use()) == pytest.approx(expected("sea")[0], rel=1e-6)


@pytest.mark.parametrize("attempts", [1, 3])
async def test_an_artifact_that_cannot_predict_is_refused_and_leaves_no_thread(
    tmp_path: Path, attempts: int
) -> None:
    folder = without_numbers(write_artifact(tmp_path / "a"))
    before = set(threading.enumerate())
    async with InProcessPredictor(folder) as predictor:
        for _ in range(attempts):
            with pytest.raises(TailcastError, match="the model gave mu = nan"):
                await predictor.predict(requests(["sea"]))

    def threads() -> list[threading.Thread]:
        running = set(threading.enumerate()) - before
        return [thread for thread in running if thread.name.startswith("tailcast")]

    await until(lambda: not threads())
    assert threads() == []


def test_client_imports_without_what_only_the_service_needs() -> None:
    code = (
        "import sys; blocked = ('torch', 'pydantic', 'onnxruntime', 'tokenizers', 'grpc_health', 'jsonargparse')\n"
        "for name in blocked: sys.modules[name] = None\n"
        "import predictors.client as c; c.connect('127.0.0.1:1'); c.SyncPredictor('127.0.0.1:1'); c.load('x')\n"
        "assert not any(name.startswith(('predictors.service', 'predictors.runtime')) for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
