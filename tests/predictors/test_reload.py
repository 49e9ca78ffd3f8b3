"""Several artifacts at once, and replacing one while requests run."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto.predictor_v1_pb2_grpc import PredictorStub
from predictors.runtime import open_runtime
from predictors.service.artifacts import ArtifactSource
from predictors.service.batcher import BatchingSettings
from predictors.service.errors import ReloadError
from predictors.service.metrics import ServiceMetrics
from predictors.service.pipeline import Runtime
from scheduler_core.errors import InputError, TailcastError
from tests.predictors.fakes import (
    VOCAB,
    GatedRuntime,
    expected,
    running_server,
    server_and_stub,
    until,
    version_prefix,
    without_numbers,
    write_artifact,
    write_rich_artifact,
)


def place(path: Path) -> ArtifactSource:
    return ArtifactSource(str(path), "cpu", 1)


async def test_requests_choose_among_several_artifacts(tmp_path: Path, artifact_folder: Path) -> None:
    second = open_runtime(write_artifact(tmp_path / "second", artifact_id="second"))
    async with (
        running_server([open_runtime(artifact_folder), second]) as (_, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub: Any = PredictorStub(channel)  # type: ignore[no-untyped-call]
        metadata = await stub.GetMetadata(pb.GetMetadataRequest())
        assert list(metadata.artifact_ids) == ["tiny", "second"]
        other_metadata = await stub.GetMetadata(pb.GetMetadataRequest(artifact_id="second"))
        assert other_metadata.artifact_id == "second"
        default, other = [
            await stub.Predict(pb.PredictRequest(prompt="sea", artifact_id=name)) for name in ("", "second")
        ]
        assert (default.artifact_id, other.artifact_id) == ("tiny", "second")
        for call in (
            stub.Predict(pb.PredictRequest(prompt="sea", artifact_id="none")),
            stub.GetMetadata(pb.GetMetadataRequest(artifact_id="none")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() == grpc.StatusCode.NOT_FOUND
            assert "one of tiny, second" in (caught.value.details() or "")
        health: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("tiny", "second"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_two_artifacts_of_one_id_are_refused(artifact_folder: Path) -> None:
    runtimes = [open_runtime(artifact_folder), open_runtime(artifact_folder)]
    with pytest.raises(InputError, match="artifact: got 'tiny'"):
        async with running_server(runtimes):
            pass


async def test_a_new_version_takes_over_and_no_request_is_lost(tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(write_artifact(tmp_path / "one", artifact_version="one"))
    old = GatedRuntime(link, is_open=False)
    batching = BatchingSettings(max_batch=1, max_wait_s=0.0, max_queue=50, num_workers=2)
    metrics = ServiceMetrics()
    async with (
        running_server(old, batching=batching, reopen=lambda name: place(link).open(), metrics=metrics) as (
            server,
            address,
        ),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub: Any = PredictorStub(channel)  # type: ignore[no-untyped-call]
        # One stays inside the old version, behind its gate; the second worker is free.
        inside = asyncio.ensure_future(stub.Predict(pb.PredictRequest(prompt="sea")))
        await until(lambda: server.pipeline.num_in_flight == 1)
        assert not await server.artifacts.reload("tiny")
        write_artifact(tmp_path / "two", artifact_version="two")
        (tmp_path / "next").symlink_to(tmp_path / "two")
        (tmp_path / "next").replace(link)
        assert await server.artifacts.reload("tiny")
        later = await stub.Predict(pb.PredictRequest(prompt="sea"))
        assert not inside.done()
        old.gate.set()
        first = await inside
    assert [version_prefix(each.artifact_version) for each in (first, later)] == ["one", "two"]
    assert first.mu == later.mu == pytest.approx(expected("sea")[0], rel=1e-6)
    text = metrics.exposition().decode()
    for response, value in ((later, 1.0), (first, 0.0)):
        labels = f'artifact="tiny",provider="CPUExecutionProvider",version="{response.artifact_version}"'
        assert f"tailcast_artifact_info{{{labels}}} {value}" in text
    assert 'tailcast_reloads_total{artifact="tiny",outcome="taken"} 1.0' in text


async def test_many_reloads_under_load_lose_nothing(tmp_path: Path) -> None:
    folders = [write_artifact(tmp_path / str(number), artifact_version=f"v{number}") for number in range(2)]
    turn = iter(range(1, 100))

    def reopen(name: str) -> Runtime:
        return open_runtime(folders[next(turn) % 2])

    async with server_and_stub(open_runtime(folders[0]), reopen=reopen) as (server, stub):
        done = asyncio.Event()
        versions = []

        async def ask() -> None:
            while not done.is_set():
                response = await stub.Predict(pb.PredictRequest(prompt="name three rivers"))
                assert response.mu == pytest.approx(expected("name three rivers")[0], rel=1e-5)
                versions.append(version_prefix(response.artifact_version))

        askers = [asyncio.create_task(ask()) for _ in range(8)]
        for _ in range(6):
            assert await server.artifacts.reload("tiny")
            seen = len(versions)
            await until(lambda seen=seen: len(versions) > seen + 10)  # type: ignore[misc]
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
        (lambda path: place(path / "nothing").open(), "existing artifact folder"),
        (lambda path: place(damaged(write_artifact(path / "a"))).open(), "SHA-256"),
        (
            lambda path: place(write_artifact(path / "a", artifact_id="other")).open(),
            "artifact_id: got 'other'",
        ),
        (lambda path: place(write_artifact(path / "a", artifact_id="tiny")).open(), "heads"),
        (lambda path: Broken(write_rich_artifact(path / "a", artifact_version="new")), "no memory"),
        (
            lambda path: place(without_numbers(write_rich_artifact(path / "a"))).open(),
            "the model gave mu = nan",
        ),
    ],
    ids=["missing", "damaged", "another id", "fewer heads", "warm-up fails", "no numbers"],
)
async def test_a_bad_new_version_is_refused_and_the_old_one_stays(
    tmp_path: Path, rich_folder: Path, successor: Any, message: str
) -> None:
    runtime = open_runtime(rich_folder)
    version = runtime.artifact.manifest.artifact_version
    metrics = ServiceMetrics()
    async with (
        running_server(runtime, reopen=lambda name: successor(tmp_path), metrics=metrics) as (
            server,
            address,
        ),
        grpc.aio.insecure_channel(address) as channel,
    ):
        with pytest.raises(ReloadError, match=message):
            await server.artifacts.reload("tiny")
        await server.reload()  # says it in the log and goes on
        response = await PredictorStub(channel).Predict(pb.PredictRequest(prompt="sea"))
    assert response.artifact_version == version
    assert 'tailcast_reloads_total{artifact="tiny",outcome="refused"} 2.0' in metrics.exposition().decode()


async def test_a_start_verifies_as_a_reload_does(tmp_path: Path, artifact_folder: Path) -> None:
    broken = open_runtime(without_numbers(write_artifact(tmp_path / "a", artifact_id="broken")))
    with pytest.raises(TailcastError, match="the model gave mu = nan"):
        async with running_server([open_runtime(artifact_folder), broken]):
            pass


async def test_what_is_loaded_needs_its_folder_no_more(tmp_path: Path) -> None:
    runtime = open_runtime(write_artifact(tmp_path / "a"))
    async with running_server(runtime) as (_, address), grpc.aio.insecure_channel(address) as channel:
        shutil.rmtree(tmp_path / "a")
        stub: Any = PredictorStub(channel)  # type: ignore[no-untyped-call]
        by_ids = await stub.Predict(pb.PredictRequest(token_ids=pb.TokenIds(ids=[1, VOCAB["sea"], 2])))
        with pytest.raises(grpc.aio.AioRpcError, match=f"token_ids: got {len(VOCAB)}; allowed: 0 to"):
            await stub.Predict(pb.PredictRequest(token_ids=pb.TokenIds(ids=[len(VOCAB)])))
    assert by_ids.mu == pytest.approx(expected("sea")[0], rel=1e-6)


async def test_without_a_source_nothing_can_be_reloaded(artifact_folder: Path) -> None:
    async with running_server(open_runtime(artifact_folder)) as (server, _):
        with pytest.raises(ReloadError, match="no source"):
            await server.artifacts.reload("tiny")


def test_state_changes_with_the_manifest(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "a")
    first = place(folder).state()
    assert first == place(folder).state()
    (folder / "manifest.json.sig").write_text("a signature that comes later")
    second = place(folder).state()
    assert second != first
    shutil.rmtree(folder)
    assert place(folder).state() == (None, None)
    write_artifact(folder, artifact_version="another one")
    assert place(folder).state() not in (first, second, (None, None))
