"""Joined artifacts: one answer with the heads of all, over each transport and in this process, also if a part fails."""

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tailcast
from predictors.client import GrpcPredictor, PredictorError, SyncPredictor
from predictors.heads import Predicted
from predictors.proto import open_inference_pb2 as oip
from predictors.proto import predictor_v1_pb2 as pb
from predictors.runtime import open_runtime
from predictors.service.artifacts import open_sources
from predictors.service.in_process import InProcessPredictor
from predictors.service.process import open_server
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.prediction.predictor import JointPredictor, PredictionRequest, open_predictor
from tailcast.commands.predict import main
from tests.predictors import fakes
from tests.predictors.fakes import GatedRuntime, write_artifact, write_rich_artifact
from tests.predictors.proxy.fake_engine import chat, running_engine, running_proxy
from training.commands.evaluate import main as evaluate
from training.evaluating.batch_predictor import InferenceOptions, _joined, open_batch_predictor

JOINED = {"tiny": ["level"]}
SEA = PredictionRequest("", "sea", 100)


@pytest.fixture(scope="module")
def level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of urgency alone."""
    folder = tmp_path_factory.mktemp("artifacts") / "level"
    return write_rich_artifact(folder, heads=("urgency",), artifact_id="level", abstain_threshold=0.1)


@pytest.fixture
def address(artifact_folder: Path, level_folder: Path) -> str:
    return f"{artifact_folder}+{level_folder}"


def config(address: str, **options: Any) -> Any:
    return fakes.serve_config(artifact=address, http_port=0, provider="cpu", **options)


async def served(address: str, ask: Callable[[Any, str], Any], **options: Any) -> Any:
    """The result of `ask` with a server of the command and the address of its gRPC port."""
    server = open_server(config(address, **options))
    try:
        return await ask(server, f"127.0.0.1:{await server.start()}")
    finally:
        await server.stop()


def has_both(response: pb.PredictResponse) -> bool:
    row = fakes.expected_rich("sea")
    assert response.artifact_id == "tiny"
    assert response.mu == pytest.approx(fakes.expected("sea")[0], rel=1e-5)
    np.testing.assert_allclose(response.urgency.probabilities, row["urgency"], rtol=1e-5)
    return not response.missing


async def test_one_endpoint_responds_with_both_heads(address: str) -> None:
    async def ask(server: Any, grpc_address: str) -> None:
        async with grpc.aio.insecure_channel(grpc_address) as channel:
            stub = fakes.Stub(channel)
            assert has_both(await stub.Predict(pb.PredictRequest(prompt="sea", declared_tier=1)))
            batch = pb.PredictBatchRequest(requests=[pb.PredictRequest(prompt="sea")] * 3)
            outcomes = (await stub.PredictBatch(batch)).outcomes
            assert all(has_both(outcome.prediction) for outcome in outcomes)
            metadata = await stub.GetMetadata(pb.GetMetadataRequest())
            assert list(metadata.heads) == ["length", "urgency"]
            assert list(metadata.artifact_ids) == ["tiny", "level"]
            assert list(metadata.urgency_levels) == ["now", "soon", "late"]
            assert metadata.abstain_threshold == 0.1
            single = await stub.Predict(pb.PredictRequest(prompt="sea", artifact_id="level"))
            assert (single.artifact_id, single.HasField("mu"), single.HasField("urgency")) == (
                "level",
                False,
                True,
            )
            code, message = await fakes.status(stub.Predict(pb.PredictRequest(prompt="sea", declared_tier=3)))
            assert (code, message) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "declared_tier: got 3; allowed: 0 to 2",
            )
        async with aiohttp.ClientSession(f"http://127.0.0.1:{server.http_port}") as http:
            async with http.post("/v1/predict", json={"prompt": "sea", "declared_tier": 1}) as response:
                content = await response.json()
            assert {"mu", "urgency", "median_tokens"} <= content.keys()
            async with http.get("/v2/models/tiny") as response:
                outputs = [output["name"] for output in (await response.json())["outputs"]]
            assert {"mu", "urgency"} <= set(outputs)
            async with http.get("/metrics") as response:
                metrics = await response.text()
        for artifact, count in (("tiny", 5.0), ("level", 6.0)):
            total = sum(
                float(line.split()[-1])
                for line in metrics.splitlines()
                if line.startswith("tailcast_requests_total") and f'artifact="{artifact}",code="OK"' in line
            )
            assert total == count

    await served(address, ask)


async def test_the_order_of_the_parts_does_not_matter_and_shared_parts_load_once(
    artifact_folder: Path, level_folder: Path, tmp_path: Path
) -> None:
    second = write_artifact(tmp_path / "second", artifact_id="second")
    opened = open_sources(
        config(f"{level_folder}+{artifact_folder}", more_artifacts=[f"{second}+{level_folder}"])
    )
    names = [runtime.artifact.manifest.artifact_id for runtime in opened.runtimes]
    assert names == ["tiny", "level", "second"]
    assert opened.joined == {"tiny": ["level"], "second": ["level"]}
    more = [f"{artifact_folder}+{second}"]
    with pytest.raises(InputError, match="other artifacts than tiny, which is joined already"):
        open_sources(config(f"{artifact_folder}+{level_folder}", more_artifacts=more))


async def test_either_part_is_reloaded_by_itself(tmp_path: Path) -> None:
    write_artifact(tmp_path / "tiny" / "1")
    write_rich_artifact(tmp_path / "level" / "1", heads=("urgency",), artifact_id="level")
    for name in ("tiny", "level"):
        (tmp_path / name / "current").symlink_to(tmp_path / name / "1")

    async def ask(server: Any, grpc_address: str) -> None:
        async with GrpcPredictor(grpc_address) as client:
            [before] = await client.predict([SEA])
            second = write_rich_artifact(
                tmp_path / "level" / "2", heads=("urgency",), artifact_id="level", abstain_threshold=1.0
            )
            (tmp_path / "next").symlink_to(second)
            (tmp_path / "next").replace(tmp_path / "level" / "current")
            await server.reload()
            [after] = await client.predict([SEA])
            assert before.length == after.length
            assert before.urgency is not None
            assert after.urgency is not None
            assert (before.urgency.abstain_threshold, after.urgency.abstain_threshold) == (0.9, 1.0)
            assert (await client.metadata()).abstain_threshold == 1.0
        text = server.metrics.exposition().decode()
        assert 'tailcast_reloads_total{artifact="level",outcome="taken"} 1.0' in text
        assert 'tailcast_reloads_total{artifact="tiny",outcome="taken"} 1.0' not in text

    await served("+".join(str(tmp_path / name / "current") for name in ("tiny", "level")), ask)


PARTS = [("tiny", "level"), ("level", "tiny")]


def runtimes(failing: str, artifact_folder: Path, level_folder: Path, **options: Any) -> list[Any]:
    folders = {"tiny": artifact_folder, "level": level_folder}
    return [
        GatedRuntime(folder, **options) if name == failing else open_runtime(folder)
        for name, folder in folders.items()
    ]


@pytest.mark.parametrize(("failing", "other"), PARTS)
async def test_the_service_responds_without_a_failing_part(
    artifact_folder: Path, level_folder: Path, failing: str, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    parts = runtimes(failing, artifact_folder, level_folder, num_failures=2)
    async with fakes.server_and_stub(parts, joined=JOINED, http_port=0) as (server, stub):
        for _ in range(2):
            response = await stub.Predict(pb.PredictRequest(prompt="sea"))
            assert [each.part for each in response.missing] == [failing]
            assert response.HasField("mu") == (failing == "level")
            assert response.HasField("urgency") == (failing == "tiny")
        assert has_both(await stub.Predict(pb.PredictRequest(prompt="sea")))
    text = server.metrics.exposition().decode()
    assert f'tailcast_missing_parts_total{{artifact="{failing}"}} 2.0' in text
    assert f'tailcast_missing_parts_total{{artifact="{other}"}} 0.0' in text
    lines = [line for line in caplog.messages if "joined predictor" in line]
    assert len(lines) == 1
    assert f"the part {failing} of a joined predictor is left out" in lines[0]


async def test_the_service_fails_if_both_parts_fail(artifact_folder: Path, level_folder: Path) -> None:
    parts = [GatedRuntime(folder, num_failures=1) for folder in (artifact_folder, level_folder)]
    async with fakes.server_and_stub(parts, joined=JOINED) as (_, stub):
        code, message = await fakes.status(stub.Predict(pb.PredictRequest(prompt="sea")))
        assert code == grpc.StatusCode.INTERNAL
        assert "the batch failed (RuntimeError)" in message
        assert has_both(await stub.Predict(pb.PredictRequest(prompt="sea")))


@pytest.mark.parametrize("late", ["tiny", "level"])
async def test_the_service_responds_without_a_late_part_before_the_deadline(
    artifact_folder: Path, level_folder: Path, late: str
) -> None:
    parts = runtimes(late, artifact_folder, level_folder, is_open=False)
    gated = next(part for part in parts if isinstance(part, GatedRuntime))
    async with fakes.server_and_stub(parts, joined=JOINED) as (_, stub):
        response = await stub.Predict(pb.PredictRequest(prompt="sea"), timeout=0.3)
        assert [(each.part, each.reason) for each in response.missing] == [(late, "late")]
        gated.gate.set()
        assert has_both(await stub.Predict(pb.PredictRequest(prompt="sea"), timeout=5))


async def test_token_ids_are_those_of_the_first_part(artifact_folder: Path, level_folder: Path) -> None:
    parts = [open_runtime(artifact_folder), open_runtime(level_folder)]
    async with fakes.server_and_stub(parts, joined=JOINED) as (_, stub):
        response = await stub.Predict(pb.PredictRequest(token_ids=pb.TokenIds(ids=[1, 5, 2])))
        assert [(each.part, each.reason) for each in response.missing] == [("level", "InputError")]
        assert response.HasField("mu")


async def test_open_inference_gives_nan_for_a_missing_part(artifact_folder: Path, level_folder: Path) -> None:
    for failing in ("tiny", "level"):
        parts = runtimes(failing, artifact_folder, level_folder, num_failures=1)
        async with fakes.server_and_stub(parts, joined=JOINED) as (_, stub):
            request = oip.ModelInferRequest(model_name="tiny")
            for name, value in (("prompt", "sea"),):
                contents = oip.InferTensorContents(bytes_contents=[value.encode()])
                request.inputs.add(name=name, datatype="BYTES", shape=[1], contents=contents)
            contents = oip.InferTensorContents(int64_contents=[100])
            request.inputs.add(name="max_tokens", datatype="INT64", shape=[1], contents=contents)
            response = await stub.ModelInfer(request)
            assert response.parameters["missing"].string_param == f"{failing}: BatchError"
            kinds = {"FP32": "fp32_contents", "FP64": "fp64_contents"}
            values = {one.name: list(getattr(one.contents, kinds[one.datatype])) for one in response.outputs}
            assert len(values["urgency"]) == len(values["quantile_tokens"]) == 3
            of_length = ("mu", "sigma", "nu", "expected_tokens", "cvar_tokens", "quantile_tokens")
            assert np.isnan([*values["urgency"]]).all() == (failing == "level")
            for name in of_length:
                assert np.isnan(values[name]).all() == (failing == "tiny")
            assert "missing" not in (await stub.ModelInfer(request)).parameters


# In this process.


def break_runs(
    monkeypatch: pytest.MonkeyPatch, artifact_id: str, gate: threading.Event | None = None
) -> None:
    """Makes the model calls of an artifact for "sea" fail, or wait for the gate."""
    from predictors.runtime import ArtifactRuntime

    run = ArtifactRuntime.run

    def failing(self: ArtifactRuntime, *arguments: Any, **options: Any) -> Any:
        if self.artifact.manifest.artifact_id == artifact_id and len(arguments[0][0]) == 3:  # "sea"
            if gate is None:
                raise RuntimeError("injected failure")
            gate.wait(30)
        return run(self, *arguments, **options)

    monkeypatch.setattr(ArtifactRuntime, "run", failing)


@pytest.mark.parametrize(("failing", "other"), PARTS)
async def test_the_predictor_in_this_process_responds_without_a_failing_part(
    address: str, monkeypatch: pytest.MonkeyPatch, failing: str, other: str
) -> None:
    break_runs(monkeypatch, failing)
    predictor = open_predictor(address)
    assert isinstance(predictor, JointPredictor)
    sea, essay = await predictor.predict([SEA, PredictionRequest("", "a long essay", 100)])
    await predictor.close()
    [(part, reason)] = sea.missing
    assert (Path(part).name, reason) == (failing, "INTERNAL")
    assert (sea.length is None, sea.urgency is None) == (failing == "tiny", failing == "level")
    assert essay.missing == ()
    assert essay.length is not None
    assert essay.urgency is not None


async def test_the_service_in_this_process_responds_with_both_heads(address: str) -> None:
    """As a replica of Ray Serve opens it."""
    async with InProcessPredictor(address) as predictor:
        [prediction] = await predictor.predict([SEA])
        assert list((await predictor.metadata()).heads) == ["length", "urgency"]
    assert prediction.length is not None
    assert prediction.urgency is not None


def test_the_python_object_shows_a_missing_urgency(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with tailcast.load(address) as predictor:
        assert predictor.predict("sea").urgency is not None
        break_runs(monkeypatch, "level")
        for _ in range(2):
            length = predictor.predict("sea")
        assert length.median > 0
        assert length.urgency is None
        assert str(length).endswith("level: RuntimeError")
        assert len(caplog.messages) == 1
        rows = predictor.predictions(["sea", "a long essay"], [None] * 2, [None] * 2)
        assert [len(row.missing) for row in rows] == [1, 0]


@pytest.mark.mend  # Each of 256 rows waited for its own deadline of a service that hangs.
def test_a_service_that_fails_is_not_asked_again_for_each_text(
    artifact_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def late(self: SyncPredictor, requests: Sequence[PredictionRequest]) -> Any:
        sizes.append(len(requests))
        raise PredictorError.about(None, "DEADLINE_EXCEEDED", None, "x")

    monkeypatch.setattr(SyncPredictor, "predict", late)
    with tailcast.load(artifact_folder) as predictor:
        predictor.join("grpc://127.0.0.1:9")
        rows = predictor.predictions(["sea"] * 9, [None] * 9, [None] * 9)
    assert [len(row.missing) for row in rows] == [1] * 9
    assert sizes == [9]


@pytest.mark.mend
async def test_predict_shows_the_urgency_of_a_service(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python and `tailcast predict` dropped all heads of the first predictor but the length."""

    async def ask(server: Any, grpc_address: str) -> None:
        url = f"grpc://{grpc_address}"
        assert await asyncio.to_thread(main, ["sea", "--predictor", url]) == 0
        assert "urgency: " in capsys.readouterr().out
        data, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
        data.write_text(json.dumps({"messages": [{"role": "user", "content": "sea"}]}))
        arguments = ["--data", str(data), "--out", str(out), "--predictor", url, "--progress", "false"]
        assert await asyncio.to_thread(main, arguments) == 0
        assert "urgency_level" in json.loads(out.read_text().splitlines()[0])

    await served(address, ask)


async def test_urgency_of_a_service_is_joined_to_an_artifact(
    artifact_folder: Path, level_folder: Path
) -> None:
    async def ask(server: Any, grpc_address: str) -> None:
        def predict() -> Any:
            with tailcast.length_predictor.open_length_predictor(
                f"{artifact_folder}+grpc://{grpc_address}"
            ) as opened:
                return opened.predict("sea")

        length = await asyncio.to_thread(predict)
        assert length.urgency is not None

    await served(str(level_folder), ask)


def test_a_file_counts_the_predictions_without_a_part(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_runs(monkeypatch, "level")
    data, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    data.write_text("sea\na long essay\n")
    with caplog.at_level(logging.INFO):
        assert (
            main(["--data", str(data), "--out", str(out), "--predictor", address, "--progress", "false"]) == 0
        )
    assert "1 of 2 predictions lack the part" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("policy", "failing", "fault"),
    [("sept", "level", "fails"), ("hpjf", "tiny", "fails"), ("sept", "level", "late")],
)
async def test_the_proxy_orders_by_the_part_that_responds(
    address: str, monkeypatch: pytest.MonkeyPatch, policy: str, failing: str, fault: str
) -> None:
    options: dict[str, Any] = {"engine": "vllm", "policy": policy, "predictor": address}
    options |= {"online_calibration": False}
    gate = threading.Event() if fault == "late" else None
    async with running_engine() as fake, running_proxy(fake.url, **options) as proxy:
        for text in ("sea", "a long essay"):
            assert (await proxy.post(chat(text)))[0] == 200
        break_runs(monkeypatch, failing, gate)
        if gate is not None:
            proxy.server.handler.forecaster.deadline_s = 1.5
        for text in ("sea", "a long essay"):
            assert (await proxy.post(chat(text)))[0] == 200
        if gate is not None:
            gate.set()
        outcomes = {
            outcome: await proxy.metric(f'tailcast_proxy_predictions_total{{outcome="{outcome}"}}')
            for outcome in ("answered", "partial", "failed")
        }
    num_partial = 1 if gate is None else 2  # a late part is not asked by the next request
    assert outcomes == {"answered": 4 - num_partial, "partial": num_partial, "failed": 0}
    priorities = [body["priority"] for body in fake.bodies]
    assert priorities[:2] == priorities[2:]


async def test_evaluations_open_what_is_served_and_what_is_joined(address: str, tmp_path: Path) -> None:
    texts = ["name three rivers", "sea", "write a long essay", "sea"] * 5
    rows = [(number, sample) for number in range(20) for sample in range(4)]
    table = {
        "prompt_id": [f"p{number}" for number, _ in rows],
        "prompt": [texts[number] for number, _ in rows],
        "model": ["tiny-llm"] * len(rows),
        "output_tokens": [40 + 3 * number + sample for number, sample in rows],
        "finished": [True] * len(rows),
    }
    data, out = tmp_path / "data.parquet", tmp_path / "out.json"
    pq.write_table(pa.table(table), data)
    columns = (texts, ["tiny-llm", None] * 10, [None] * 20)
    options = InferenceOptions(progress=False, accelerator="cpu")

    def compared(grpc_address: str) -> None:
        joined = open_batch_predictor(address, options)
        service = open_batch_predictor(f"grpc://{grpc_address}", options)
        assert joined.urgency_levels == service.urgency_levels == ("now", "soon", "late")
        assert (joined.nu, joined.form) == (service.nu, service.form)
        expected, predicted = joined.predict(*columns).arrays(), service.predict(*columns).arrays()
        assert expected.keys() == predicted.keys() == {"mu", "sigma", "nu", "urgency"}
        for name, values in expected.items():
            np.testing.assert_allclose(predicted[name], values, rtol=1e-6)
        results = []
        for predictor in (address, f"grpc://{grpc_address}"):
            arguments = [predictor, "--data", str(data), "--json", str(out), "--overwrite", "true"]
            assert evaluate([*arguments, "--progress", "false", "--ceiling", "false"]) == 0
            results.append(json.loads(out.read_text()))
        assert [result["predictor"]["kind"] for result in results] == ["artifact", "service"]
        first, second = (result["model"]["point"]["mae_tokens"] for result in results)
        assert first == pytest.approx(second, rel=1e-6)

    await served(address, lambda server, grpc_address: asyncio.to_thread(compared, grpc_address))


@pytest.mark.parametrize("has_nu", [False, True])
def test_evaluations_join_the_arrays_of_a_length_from_one_part(artifact_folder: Path, has_nu: bool) -> None:
    part = open_batch_predictor(artifact_folder, InferenceOptions(progress=False, accelerator="cpu"))
    numbers = {"mu": np.zeros(1), "sigma": np.ones(1)} | ({"nu": np.full(1, 3.5)} if has_nu else {})
    others = {"mu": np.ones(1), "nu": np.ones(1), "quantiles": np.ones((1, 3)), "rank": np.ones(1)}
    parts = [replace(part, nu=None, predict=lambda *_, by=by: Predicted(**by)) for by in (numbers, others)]
    predicted = _joined(parts).predict(["sea"], [None], [None]).arrays()
    assert predicted.keys() == numbers.keys() | {"rank"}
    assert predicted["mu"] == 0


async def test_an_evaluation_without_a_part_is_an_error(artifact_folder: Path, level_folder: Path) -> None:
    parts = runtimes("level", artifact_folder, level_folder, num_failures=1)
    async with fakes.running_server(parts, joined=JOINED) as (_, grpc_address):
        service = await asyncio.to_thread(
            open_batch_predictor, f"grpc://{grpc_address}", InferenceOptions(progress=False)
        )
        with pytest.raises(TailcastError, match="some predictions lack level: BatchError"):
            await asyncio.to_thread(service.predict, ["sea"], [None], [None])
