"""`--public_key`: only artifacts that are signed with it are served, from the start on and after every reload."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from predictors.artifact import MANIFEST, SIGNATURE
from predictors.cli import main
from predictors.client import InProcessPredictor
from predictors.minisign import SecretKey, sign_file
from predictors.proto import predictor_v1_pb2 as pb
from predictors.proto.predictor_v1_pb2_grpc import PredictorStub
from predictors.service.errors import ReloadError
from predictors.service.metrics import PrometheusMetrics
from predictors.service.places import open_places
from scheduler_core.errors import InputError
from scheduler_core.predictor import PredictionRequest
from tests.predictors.fakes import expected, running_server, version_prefix, write_artifact
from tests.predictors.test_minisign import OTHER, public_key_file
from tests.predictors.test_workers import replace_artifact, running, version

OURS = SecretKey(b"ourkeyid", bytes(range(32, 64)))


def signed(folder: Path, key: SecretKey = OURS, **changes: Any) -> Path:
    write_artifact(folder, **changes)
    sign_file(folder / MANIFEST, key, "of a test")
    return folder


def unsigned(folder: Path) -> Path:
    return write_artifact(folder, artifact_version="two")


def of_another_key(folder: Path) -> Path:
    return signed(folder, OTHER, artifact_version="two")


def changed_afterwards(folder: Path) -> Path:
    path = signed(folder, artifact_version="two") / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"created": "2027-01-01T00:00:00+00:00"}))
    return folder


BAD = pytest.mark.parametrize(
    ("bad", "message"),
    [
        (unsigned, "signature manifest.json.minisig"),
        (of_another_key, f"allowed: key {OURS.public.name}"),
        (changed_afterwards, "manifest.json as it was signed"),
    ],
)


@BAD
def test_the_start_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: Any, message: str
) -> None:
    key = public_key_file(tmp_path / "ours.pub", OURS.public)
    good, refused = signed(tmp_path / "good", artifact_id="good"), bad(tmp_path / "refused")
    port_file = tmp_path / "port"
    options = [f"--public_key={key}", "--port=0", f"--port_file={port_file}"]
    assert main([str(refused), *options]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("serve-predictor: error: ")
    assert len(error.splitlines()) == 1
    assert message in error
    assert main([str(good), f'--more_artifacts=["{refused}"]', *options]) == 2
    assert message in capsys.readouterr().err
    assert not port_file.exists()


def test_what_is_no_public_key_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact = signed(tmp_path / "a")
    (tmp_path / "text").write_text("no key\n")
    for key in (tmp_path / "text", tmp_path / "nothing"):
        assert main([str(artifact), f"--public_key={key}", "--port=0"]) == 2
        assert "public_key" in capsys.readouterr().err


@BAD
async def test_a_reload_is_refused_and_the_signed_one_stays(tmp_path: Path, bad: Any, message: str) -> None:
    key = public_key_file(tmp_path / "ours.pub", OURS.public)
    link = tmp_path / "current"
    link.symlink_to(signed(tmp_path / "one", artifact_version="one"))
    places, runtimes = open_places([str(link)], provider="cpu", threads_per_run=1, public_key=str(key))
    metrics = PrometheusMetrics()
    async with (
        running_server(runtimes, reopen=lambda name: places[name].open(), metrics=metrics) as (
            server,
            address,
        ),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub: Any = PredictorStub(channel)  # type: ignore[no-untyped-call]

        async def answered_by() -> str:
            return version_prefix((await stub.Predict(pb.PredictRequest(prompt="sea"))).artifact_version)

        move(link, bad(tmp_path / "two"))
        with pytest.raises(ReloadError, match=message):
            await server.artifacts.reload("tiny")
        assert await answered_by() == "one"
        sign_file(link / MANIFEST, OURS, "now signed")
        assert await server.artifacts.reload("tiny")
        assert await answered_by() == "two"
        # The same content without its signature is no news to be taken, but no reason to go on silently either.
        (link / SIGNATURE).unlink()
        with pytest.raises(ReloadError, match="signature"):
            await server.artifacts.reload("tiny")
        assert await answered_by() == "two"
    text = metrics.exposition().decode()
    assert 'tailcast_reloads_total{artifact="tiny",outcome="refused"} 2.0' in text
    assert 'tailcast_reloads_total{artifact="tiny",outcome="taken"} 1.0' in text


async def test_a_key_that_is_replaced_counts_from_the_next_reload(tmp_path: Path) -> None:
    key = public_key_file(tmp_path / "ours.pub", OURS.public)
    [(_, place)] = open_places(
        [str(signed(tmp_path / "a"))], provider="cpu", threads_per_run=1, public_key=str(key)
    )[0].items()
    public_key_file(key, OTHER.public)
    with pytest.raises(InputError, match=f"allowed: key {OTHER.public.name}"):
        place.open()
    key.unlink()
    with pytest.raises(InputError, match="public_key"):
        place.open()


def test_workers_verify_and_a_late_signature_is_found_by_looking(tmp_path: Path) -> None:
    """The new version comes before its signature: the first look refuses it, the second one takes it."""
    key = public_key_file(tmp_path / "ours.pub", OURS.public)
    replace_artifact(tmp_path, "one")
    sign_file(tmp_path / "current" / MANIFEST, OURS, "one")
    options = ("--workers=2", f"--public_key={key}", "--reload_poll_s=0.05")
    with running(tmp_path, tmp_path / "current", *options) as server:
        port, _ = server.ports()
        assert version(port) == "one"
        assert f"artifacts must be signed with key {OURS.public.name}" in server.log
        replace_artifact(tmp_path, "two")
        server.wait_for(
            lambda: len(re.findall(r"a new version was refused, one\+\w+ stays: signature", server.log)) >= 2
        )
        assert version(port) == "one"
        sign_file(tmp_path / "current" / MANIFEST, OURS, "two")
        server.wait_for(lambda: len(re.findall(r"version two\+\w+ replaces one\+", server.log)) == 2)
        assert {version(port) for _ in range(4)} == {"two"}
        assert server.stop() == 0


async def test_in_process_clients_verify_too(tmp_path: Path) -> None:
    key = public_key_file(tmp_path / "ours.pub", OURS.public)
    request = PredictionRequest("r", "sea", 1)
    async with InProcessPredictor(signed(tmp_path / "a"), public_key=key) as predictor:
        [found] = await predictor.predict([request])
    assert found.mu == pytest.approx(expected("sea")[0], rel=1e-6)
    async with InProcessPredictor(signed(tmp_path / "b", OTHER), public_key=key) as predictor:
        with pytest.raises(InputError, match="signature"):
            await predictor.predict([request])


def move(link: Path, target: Path) -> None:
    """Lets a link name another folder, in one step."""
    following = link.with_name("next")
    following.symlink_to(target)
    following.replace(link)
