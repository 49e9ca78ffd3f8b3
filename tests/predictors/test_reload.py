"""Several artifacts at once, and replacing one while requests run."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from predictors.proto import predictor_v1_pb2 as pb
from predictors.runtime import open_runtime
from predictors.service.artifacts import ArtifactSource
from predictors.service.batcher import BatchingSettings
from predictors.service.errors import ReloadError
from scheduler_core.errors import InputError, TailcastError
from tests.predictors.fakes import (
    VOCAB,
    GatedRuntime,
    expected,
    running_server,
    serve_config,
    server_and_stub,
    status,
    until,
    version_prefix,
    without_numbers,
    write_artifact,
    write_rich_artifact,
)

SEA = pb.PredictRequest(prompt="sea")


def source(path: Path) -> ArtifactSource:
    return ArtifactSource(str(path), serve_config(provider="cpu"))


async def test_requests_choose_among_several_artifacts(tmp_path: Path, artifact_folder: Path) -> None:
    second = open_runtime(write_artifact(tmp_path / "second", artifact_id="second"))
    async with server_and_stub([open_runtime(artifact_folder), second]) as (_, stub):
        assert list((await stub.GetMetadata(pb.GetMetadataRequest())).artifact_ids) == ["tiny", "second"]
        for name, artifact_id in (("", "tiny"), ("second", "second")):
            metadata = await stub.GetMetadata(pb.GetMetadataRequest(artifact_id=name))
            response = await stub.Predict(pb.PredictRequest(prompt="sea", artifact_id=name))
            health = await stub.Check(health_pb2.HealthCheckRequest(service=artifact_id))
            assert metadata.artifact_id == response.artifact_id == artifact_id
            assert health.status == health_pb2.HealthCheckResponse.SERVING
        for call in (
            stub.Predict(pb.PredictRequest(prompt="sea", artifact_id="none")),
            stub.GetMetadata(pb.GetMetadataRequest(artifact_id="none")),
        ):
            code, message = await status(call)
            assert (code, "one of tiny, second" in message) == (grpc.StatusCode.NOT_FOUND, True)


async def test_a_start_refuses_equal_ids_and_what_a_reload_would_refuse(
    tmp_path: Path, artifact_folder: Path
) -> None:
    broken = without_numbers(write_artifact(tmp_path / "a", artifact_id="broken"))
    for folder, kind, message in (
        (artifact_folder, InputError, "artifact: got 'tiny'"),
        (broken, TailcastError, "the model gave mu = nan"),
    ):
        with pytest.raises(kind, match=message):
            async with running_server([open_runtime(artifact_folder), open_runtime(folder)]):
                pass


async def test_a_new_version_takes_over_and_no_request_is_lost(tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(write_artifact(tmp_path / "one", artifact_version="one"))
    old = GatedRuntime(link, is_open=False)
    batching = BatchingSettings(max_batch=1, max_wait_s=0.0, max_queue=50, num_workers=2)
    async with server_and_stub(old, batching=batching, reopen=lambda name: source(link).open()) as (
        server,
        stub,
    ):
        # One stays inside the old version, behind its gate; the second worker is free.
        inside = asyncio.ensure_future(stub.Predict(SEA))
        await until(lambda: server.artifacts.num_in_flight == 1)
        assert not await server.artifacts.reload("tiny")
        write_artifact(tmp_path / "two", artifact_version="two")
        (tmp_path / "next").symlink_to(tmp_path / "two")
        (tmp_path / "next").replace(link)
        assert await server.artifacts.reload("tiny")
        later = await stub.Predict(SEA)
        assert not inside.done()
        old.gate.set()
        first = await inside
    assert [version_prefix(each.artifact_version) for each in (first, later)] == ["one", "two"]
    assert first.mu == later.mu == pytest.approx(expected("sea")[0], rel=1e-6)
    text = server.metrics.exposition().decode()
    for response, value in ((later, 1.0), (first, 0.0)):
        labels = f'artifact="tiny",provider="CPUExecutionProvider",version="{response.artifact_version}"'
        assert f"tailcast_artifact_info{{{labels}}} {value}" in text
    assert 'tailcast_reloads_total{artifact="tiny",outcome="taken"} 1.0' in text


async def test_many_reloads_under_load_lose_nothing(tmp_path: Path) -> None:
    folders = [write_artifact(tmp_path / str(number), artifact_version=f"v{number}") for number in range(2)]
    turn = iter(range(1, 100))

    def reopen(name: str) -> Any:
        return open_runtime(folders[next(turn) % 2])

    async with server_and_stub(open_runtime(folders[0]), reopen=reopen) as (server, stub):
        done = asyncio.Event()
        versions = []

        async def ask() -> None:
            while not done.is_set():
                response = await stub.Predict(SEA)
                assert response.mu == pytest.approx(expected("sea")[0], rel=1e-5)
                versions.append(version_prefix(response.artifact_version))

        askers = [asyncio.create_task(ask()) for _ in range(8)]
        for _ in range(6):
            assert await server.artifacts.reload("tiny")
            target = len(versions) + 10
            await until(lambda target=target: len(versions) > target)  # type: ignore[misc]
        done.set()
        await asyncio.gather(*askers)
    assert set(versions) == {"v0", "v1"}


class Broken(GatedRuntime):
    """Verified files, but it fails when it is used."""

    def warm_up(self) -> None:
        raise OSError("no memory")


def damaged(folder: Path) -> Path:
    (folder / "model.onnx").write_bytes(b"\0" * 10)
    return folder


@pytest.mark.parametrize(
    ("successor", "message"),
    [
        (lambda path: source(path / "nothing").open(), "existing artifact folder"),
        (lambda path: source(damaged(write_artifact(path / "a"))).open(), "SHA-256"),
        (lambda path: source(write_artifact(path / "a", artifact_id="x")).open(), "artifact_id: got 'x'"),
        (lambda path: source(write_artifact(path / "a", artifact_id="tiny")).open(), "heads"),
        (lambda path: Broken(write_rich_artifact(path / "a", artifact_version="new")), "no memory"),
        (
            lambda path: source(without_numbers(write_rich_artifact(path / "a"))).open(),
            "the model gave mu = nan",
        ),
    ],
    ids=["missing", "damaged", "another id", "fewer heads", "warm-up fails", "no numbers"],
)
async def test_a_bad_new_version_is_refused_and_the_old_one_stays(
    tmp_path: Path, rich_folder: Path, successor: Callable[[Path], Any], message: str
) -> None:
    runtime = open_runtime(rich_folder)
    async with server_and_stub(runtime, reopen=lambda name: successor(tmp_path)) as (server, stub):
        with pytest.raises(ReloadError, match=message):
            await server.artifacts.reload("tiny")
        await server.reload()  # says it in the log and goes on
        assert (await stub.Predict(SEA)).artifact_version == runtime.artifact.manifest.artifact_version
    refused = 'tailcast_reloads_total{artifact="tiny",outcome="refused"} 2.0'
    assert refused in server.metrics.exposition().decode()


async def test_what_is_loaded_needs_its_folder_no_more_and_without_a_source_stays(tmp_path: Path) -> None:
    runtime = open_runtime(write_artifact(tmp_path / "a"))
    async with server_and_stub(runtime) as (server, stub):
        shutil.rmtree(tmp_path / "a")
        response = await stub.Predict(pb.PredictRequest(token_ids=pb.TokenIds(ids=[1, VOCAB["sea"], 2])))
        with pytest.raises(ReloadError, match="no source"):
            await server.artifacts.reload("tiny")
    assert response.mu == pytest.approx(expected("sea")[0], rel=1e-6)
