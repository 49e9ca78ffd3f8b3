"""Artifact folders, their manifests and signatures; several artifacts in service, and replacing one while requests run."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import onnx
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from grpc_health.v1 import health_pb2

from predictors import manifest as manifests
from predictors.artifact import hash_files, open_artifact, write_manifest
from predictors.commands.serve_predictor import main
from predictors.manifest import MANIFEST, Manifest, content_version, parse_manifest
from predictors.proto import predictor_v1_pb2 as pb
from predictors.runtime import open_runtime
from predictors.service.artifacts import ArtifactSource, open_sources
from predictors.service.batcher import BatchingSettings
from predictors.service.errors import ReloadError
from predictors.service.in_process import InProcessPredictor
from predictors.signing import read_private_key, read_public_key, sign_file
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.prediction.predictor import PredictionRequest
from tests.predictors import fakes
from tests.predictors.fakes import GatedRuntime, expected, read_manifest, server_and_stub, write_artifact
from tests.waiting import until

OURS = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(range(32, 64)))
REQUEST = PredictionRequest("r", "sea", 1)
SEA = pb.PredictRequest(prompt="sea")
NO_NUMBERS = "the model returned mu = nan"


def parse(content: dict[str, Any], **changes: Any) -> Manifest:
    """The manifest of changed content, whose version is made to fit unless it is among the changes."""
    changed = content | changes
    return parse_manifest({**changed, "artifact_version": content_version(changed), **changes})


def test_version_follows_the_content(artifact_folder: Path, tmp_path: Path) -> None:
    content = read_manifest(artifact_folder)
    version = content["artifact_version"]
    assert version == content_version(dict(reversed(content.items())))
    assert re.fullmatch("[0-9a-f]{12}", version)
    same = {"created": "2027-01-01T00:00:00+00:00", "artifact_version": "another"}
    assert content_version(content | same | {"files": content["files"] | {"run.json": "0" * 64}}) == version
    assert content_version(content | {"files": content["files"] | {"model.onnx.data": "0" * 64}}) != version
    others = [write_artifact(tmp_path / str(nu), nu=nu) for nu in (3.5, 3.6)]
    versions = [open_artifact(folder).manifest.artifact_version for folder in others]
    assert versions[0] == version != versions[1]
    prefixed = open_artifact(write_artifact(tmp_path / "prefixed", artifact_version="1.2+x")).manifest
    assert prefixed.artifact_version == f"1.2+x+{version}"


# An edited number of the manifest was not noticed.
@pytest.mark.mend
def test_every_field_is_needed_and_an_edited_one_is_another_version(rich_folder: Path) -> None:
    with pytest.raises(InputError, match="artifact_version: got .*changed after the export"):
        parse_manifest(read_manifest(rich_folder) | {"max_length": 17})
    for field in read_manifest(rich_folder):
        content = read_manifest(rich_folder)
        del content[field]
        with pytest.raises(InputError, match=f"artifact manifest, {field}"):
            parse_manifest(content)
    for version, advice in ((manifests.FORMAT_VERSION + 1, "upgrade"), (4, "export it again")):
        with pytest.raises(InputError, match=rf"format_version: got \d+; allowed: .*{advice}"):
            parse_manifest(read_manifest(rich_folder) | {"format_version": version, "something_new": {}})


@pytest.mark.parametrize("name", ["model.onnx", "tokenizer.json", "manifest.json"])
def test_changed_or_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_artifact(tmp_path / "a")
    (folder / name).write_bytes((folder / name).read_bytes()[:-2])
    reason = "a file with valid JSON" if name == "manifest.json" else rf"artifact file {name}: got 'SHA-256"
    with pytest.raises(InputError, match=reason):
        open_artifact(folder)
    (folder / name).unlink()
    with pytest.raises(InputError, match=rf"{name}.*exist"):
        open_artifact(folder)
    with pytest.raises(InputError, match="nowhere"):
        open_artifact(tmp_path / "nowhere")


def test_broken_json_is_refused(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "a")
    for text, message in (
        (b"", "not empty"),
        (b"{", "valid JSON"),
        (b"\xff\xfe\x00", "valid JSON"),
        (b'{"format_version": true}', "format_version: got True"),
        (b'{"nu": 1, "a": {"b": 1, "b": 2}}', "the key 'b' occurs twice"),
        (b'{"nu": NaN}', "NaN is not a finite number"),
        (b'{"a": ' * 101 + b"1" + b"}" * 101, "deeper than 100 levels"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply"),
    ):
        (folder / "manifest.json").write_bytes(text)
        with pytest.raises(InputError, match=rf"^artifact.*{re.escape(message)}"):
            open_artifact(folder)


TABLES = {"sigma_scale": [1.0], "mu_shift": [0.0]}
ENCODER = {"architecture": "bag", "source": "fake", "num_parameters": 32, "num_layers": None, "width": 2}
WRONG: list[tuple[str, object, str]] = [
    # field, value, what the error names
    *((field, value, field) for field, values in {
        "artifact_id": ["", "a\nb", "x" * 501],
        "created": ["now", "2026-01-02T03:04:05", "2026-01-02T03:04:05+01:00", 1],
        "heads": [[], "length", ["mood"], ["length", "length"]],
        "files": [None, {}, {"model.onnx": "0" * 64}],
        "encoder": [None, {}, ENCODER | {"more": 1}],
        "nu": [0, 10**400, True, "3.5"],
        "max_length": [0, 16.0, True, None, 10**30],
        "served_models": ["tiny-llm", ["a", "a"], [""]],
        "urgency_levels": [["now", "late"]],
        "abstain_threshold": [0.5, "0.5"],
        "bucket_edges": [[100.0]],
        "calibration": [
            {"sigma_scale": [1.0]}, TABLES | {"x": [1.0]}, TABLES | {"sigma_scale": [0.0]},
            TABLES | {"mu_shift": [0.0, 0.0]}, TABLES | {"mu_shift": [1e7]},
        ],
        "license": [""],
        "inputs": [None, [], [{"name": "input_ids"}]],
        "outputs": [[{"name": "mu", "dtype": "float32", "shape": ["batch"], "unit": "log tokens"}]],
        "tokenizer_files": [["other.json"]],
        "format_version": [True, None, "6", 6.0, 0],
        "something_new": [1],
    }.items() for value in values),
    *(("files", {name: "0" * 64}, f"files, {name}") for name in (
        "../secret", "/etc/passwd", "sub/file", "..", "", ".hidden", "a\\b", "x" * 256,
    )),
    ("opset", {"ai.onnx": True}, "opset, ai.onnx"),
    ("encoder", ENCODER | {"num_parameters": 0}, "encoder, num_parameters"),
]  # fmt: skip
CONTRADICTIONS: list[tuple[str, object, str]] = [
    ("urgency_levels", ["now"], "urgency_levels"),
    ("bucket_edges", [], "bucket_edges"),
    ("bucket_edges", [200.0, 100.0], "bucket_edges"),
    ("served_models", [], "served_models"),
    ("nu", 3.5, "outputs"),
    ("heads", ["length"], "urgency_levels|abstain_threshold"),
    ("conditioning", None, "inputs"),
    ("conditioning", {"unknown_models": True, "temperature": False}, "inputs"),
    ("calibration", TABLES, "calibration"),
]


@pytest.mark.parametrize(("field", "value", "named"), WRONG)
def test_wrong_field_is_named(artifact_folder: Path, field: str, value: object, named: str) -> None:
    with pytest.raises(InputError, match=f"^artifact manifest, {re.escape(named)}[^:]*: got") as caught:
        parse(read_manifest(artifact_folder), **{field: value})
    assert len(str(caught.value).splitlines()) == 1


def test_fields_that_contradict_each_other_are_named(rich_folder: Path) -> None:
    for field, value, named in CONTRADICTIONS:
        with pytest.raises(InputError, match=f"^artifact manifest, ({named}): got"):
            parse(read_manifest(rich_folder), **{field: value})


# Files and keys that the manifest does not know were accepted.
@pytest.mark.mend
@pytest.mark.parametrize("name", ["notes.txt", ".hidden", "model.onnx.data", ".tailcast.jsonl"])
def test_what_the_manifest_does_not_list_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_artifact(tmp_path / "a")
    (folder / ".tailcast.json").write_text("{}")
    open_artifact(folder)
    (folder / name).mkdir()
    with pytest.raises(InputError, match=rf"artifact: got \['{re.escape(name)}'\]; allowed: .*json lists"):
        open_artifact(folder)


@pytest.mark.parametrize("name", ["manifest.json", "model.onnx", "tokenizer.json"])
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_artifact(tmp_path / "a")
    (tmp_path / "current").symlink_to(folder)
    open_artifact(tmp_path / "current")
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(InputError, match=rf"artifact file {name}: got .*inside the artifact folder"):
        open_artifact(folder)


# External weights that no hash covers were read.
@pytest.mark.mend
@pytest.mark.parametrize("location", ["../weights.bin", "/etc/passwd", "sub/w", ""])
def test_weights_outside_the_folder_are_refused(tmp_path: Path, location: str) -> None:
    folder = write_artifact(tmp_path / "a")
    (tmp_path / "weights.bin").write_bytes(b"\0" * 4096)
    model = onnx.load(folder / "model.onnx")
    [tensor] = [each for each in model.graph.initializer if each.name == "table"]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    content = read_manifest(folder) | {"files": hash_files(folder)}
    content["artifact_version"] = content_version(content)
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"artifact file model\.onnx: got .*xternal"):
        open_runtime(folder)


def test_listed_external_weights_are_read(tmp_path: Path, artifact_folder: Path) -> None:
    folder = write_artifact(tmp_path / "a")
    model = onnx.load(folder / "model.onnx")
    options = {"location": "model.onnx.data", "size_threshold": 64}
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, **options)
    write_manifest(folder, open_artifact(artifact_folder).manifest)
    assert "model.onnx.data" in open_artifact(folder).manifest.files
    inside, outside = (open_runtime(each).predict(["sea"]).mu for each in (artifact_folder, folder))
    assert inside == outside
    (folder / "model.onnx.data").write_bytes(b"\0" * 200)
    with pytest.raises(InputError, match=r"model\.onnx\.data: got 'SHA-256"):
        open_artifact(folder)


def test_served_models_are_numbered_or_refused() -> None:
    known_only = manifests.Conditions(unknown_models=False, temperature=True)
    any_model = manifests.Conditions(unknown_models=True, temperature=True)
    for served_models, conditioning, numbers in (
        # of None, "", a, b, other
        ((), None, [0, 0, 0, 0, 0]),
        (("a", "b"), None, [0, 0, 0, 0, None]),
        (("a", "b"), any_model, [0, 0, 1, 2, 0]),
        (("a", "b"), known_only, [None, None, 1, 2, None]),
        (("a",), known_only, [1, 1, 1, None, None]),
    ):
        manifest = Manifest.model_construct(served_models=served_models, conditioning=conditioning)
        for name, number in zip((None, "", "a", "b", "other"), numbers, strict=True):
            if number is not None:
                assert manifest.served_model_number(name) == number
                continue
            with pytest.raises(InputError, match="served_model: got .*one of a"):
                manifest.served_model_number(name)


def private_key_file(path: Path, key: Any = OURS, password: bytes | None = None) -> Path:
    """Writes a private key as `openssl genpkey -algorithm ed25519` does."""
    encryption: Any = serialization.NoEncryption()
    if password is not None:
        encryption = serialization.BestAvailableEncryption(password)
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(pem, pkcs8, encryption))
    return path


def public_key_file(path: Path, key: Any = OURS) -> Path:
    """Writes a public key as `openssl pkey -pubout` does."""
    kind = serialization.PublicFormat.SubjectPublicKeyInfo
    path.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, kind))
    return path


def signed(folder: Path, key: Ed25519PrivateKey = OURS, **changes: Any) -> Path:
    write_artifact(folder, **changes)
    sign_file(folder / MANIFEST, key)
    return folder


def test_keys_and_signatures_are_those_of_openssl(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    secret, public, text = tmp_path / "key.pem", tmp_path / "key.pub", tmp_path / "text"
    text.write_text("hello\n")

    def run(*arguments: object) -> None:
        subprocess.run([openssl, *map(str, arguments)], check=True, capture_output=True)

    run("genpkey", "-algorithm", "ed25519", "-out", secret)
    run("pkey", "-in", secret, "-pubout", "-out", public)
    sign_file(text, read_private_key(secret))
    run("pkeyutl", "-verify", "-pubin", "-inkey", public, "-rawin", "-in", text, "-sigfile", f"{text}.sig")
    read_public_key(public).verify((tmp_path / "text.sig").read_bytes(), b"hello\n")


def test_key_with_a_password_takes_it(tmp_path: Path) -> None:
    path = private_key_file(tmp_path / "key.pem", password=b"secret")
    assert read_private_key(path, "secret").private_bytes_raw() == OURS.private_bytes_raw()
    for password in ("wrong", None):
        with pytest.raises(InputError, match="sign: got .*Ed25519 private key"):
            read_private_key(path, password)


def test_other_keys_are_named(tmp_path: Path) -> None:
    other = X25519PrivateKey.generate()
    (tmp_path / "text").write_text("no key\n")
    for path in (tmp_path / "text", public_key_file(tmp_path / "x.pub", other), tmp_path / "nothing"):
        with pytest.raises(InputError, match="public_key: got"):
            read_public_key(path)
    for path in (tmp_path / "text", private_key_file(tmp_path / "x.pem", other), tmp_path / "x.pub"):
        with pytest.raises(InputError, match="sign: got"):
            read_private_key(path)


@pytest.mark.parametrize("how", ["unsigned", "of another key", "changed afterwards"])
async def test_bad_signature_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
    folder, key = tmp_path / "a", public_key_file(tmp_path / "ours.pub")
    signed(folder, OTHER if how == "of another key" else OURS)
    open_artifact(folder)
    if how == "unsigned":
        (folder / manifests.SIGNATURE).unlink()
    elif how == "changed afterwards":
        assert open_artifact(folder, public_key=key) == open_artifact(folder)
        (folder / MANIFEST).write_text((folder / MANIFEST).read_text() + " ")
    assert main([str(folder), f"--public_key={key}", "--port=0"]) == 2
    [error] = capsys.readouterr().err.strip().splitlines()
    missing, wrong = "is missing; public_key requires it", "is invalid for manifest.json and the"
    assert (missing if how == "unsigned" else wrong) in error
    async with InProcessPredictor(folder, public_key=key) as predictor:
        with pytest.raises(InputError, match="signature"):
            await predictor.predict([REQUEST])


async def test_wrong_signatures_are_refused_at_a_reload(tmp_path: Path) -> None:
    key = public_key_file(tmp_path / "ours.pub")
    link = tmp_path / "current"
    link.symlink_to(signed(tmp_path / "one", artifact_version="one"))
    config = fakes.serve_config(artifact=str(link), provider="cpu", public_key=str(key))
    sources, runtimes, _ = open_sources(config)
    async with server_and_stub(runtimes, reopen=lambda name: sources[name].open()) as (server, stub):

        async def version() -> str:
            return fakes.version_prefix((await stub.Predict(SEA)).artifact_version)

        fakes.replace_artifact(tmp_path, "two")
        with pytest.raises(ReloadError, match="is missing; public_key requires it"):
            await server.artifacts.reload("tiny")
        assert await version() == "one"
        sign_file(link / MANIFEST, OURS)
        assert await server.artifacts.reload("tiny")
        assert await version() == "two"
        # The same content without its signature is no news to be taken, but no reason to go on silently either.
        (link / manifests.SIGNATURE).unlink()
        with pytest.raises(ReloadError, match="signature"):
            await server.artifacts.reload("tiny")
        assert await version() == "two"
        # A key that is replaced counts from the next reload.
        sign_file(link / MANIFEST, OURS)
        public_key_file(key, OTHER)
        with pytest.raises(ReloadError, match="signature"):
            await server.artifacts.reload("tiny")
    text = server.metrics.exposition().decode()
    assert 'tailcast_reloads_total{artifact="tiny",outcome="refused"} 3.0' in text
    assert 'tailcast_reloads_total{artifact="tiny",outcome="taken"} 1.0' in text


def source(path: Path) -> ArtifactSource:
    return ArtifactSource(str(path), fakes.serve_config(provider="cpu"))


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
        prediction = stub.Predict(pb.PredictRequest(prompt="sea", artifact_id="none"))
        for call in (prediction, stub.GetMetadata(pb.GetMetadataRequest(artifact_id="none"))):
            code, message = await fakes.status(call)
            assert (code, "one of tiny, second" in message) == (grpc.StatusCode.NOT_FOUND, True)


# A service was ready and then answered 500.
@pytest.mark.mend
async def test_start_refuses_equal_ids_and_what_reloads_refuse(tmp_path: Path, artifact_folder: Path) -> None:
    broken = fakes.without_numbers(write_artifact(tmp_path / "a", artifact_id="broken"))
    equal = (artifact_folder, InputError, "artifact: got 'tiny'")
    for folder, kind, message in (equal, (broken, TailcastError, NO_NUMBERS)):
        with pytest.raises(kind, match=message):
            async with fakes.running_server([open_runtime(artifact_folder), open_runtime(folder)]):
                pass


async def test_a_new_version_takes_over_and_no_request_is_lost(tmp_path: Path) -> None:
    link = tmp_path / "current"
    fakes.replace_artifact(tmp_path, "one")
    old = GatedRuntime(link, is_open=False)
    batching = BatchingSettings(max_batch=1, max_wait_s=0.0, max_queue=50, num_workers=2)
    options = {"batching": batching, "reopen": lambda name: source(link).open()}
    async with server_and_stub(old, **options) as (server, stub):
        # One stays inside the old version, behind its gate; the second worker is free.
        inside = asyncio.ensure_future(stub.Predict(SEA))
        await until(lambda: server.artifacts.num_in_flight == 1)
        assert not await server.artifacts.reload("tiny")
        fakes.replace_artifact(tmp_path, "two")
        assert await server.artifacts.reload("tiny")
        later = await stub.Predict(SEA)
        assert not inside.done()
        old.gate.set()
        first = await inside
    assert [fakes.version_prefix(each.artifact_version) for each in (first, later)] == ["one", "two"]
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
                versions.append(fakes.version_prefix(response.artifact_version))

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
        (lambda path: Broken(fakes.write_rich_artifact(path / "a", artifact_version="new")), "no memory"),
        (lambda at: source(fakes.without_numbers(fakes.write_rich_artifact(at / "a"))).open(), NO_NUMBERS),
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


# The tokenizer was read late: a deleted folder broke token ids.
@pytest.mark.mend
async def test_what_is_loaded_needs_its_folder_no_more_and_without_a_source_stays(tmp_path: Path) -> None:
    async with server_and_stub(open_runtime(write_artifact(tmp_path / "a"))) as (server, stub):
        shutil.rmtree(tmp_path / "a")
        ids = pb.TokenIds(ids=[1, fakes.VOCAB["sea"], 2])
        response = await stub.Predict(pb.PredictRequest(token_ids=ids))
        with pytest.raises(ReloadError, match="cannot reload"):
            await server.artifacts.reload("tiny")
    assert response.mu == pytest.approx(expected("sea")[0], rel=1e-6)
