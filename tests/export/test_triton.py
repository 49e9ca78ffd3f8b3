"""Triton's model repository and KServe's layout: the configuration parses, the model runs, a real server serves it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as tritonclient
import yaml
from google.protobuf import json_format, text_format
from numpy.typing import NDArray
from tritonclient.grpc import model_config_pb2

from export.cli_package import main
from export.packages import metadata
from predictors.artifact import open_artifact
from predictors.runtime import open_runtime
from scheduler_core.files import RECORD
from tests.export.artifacts import write_text_artifact
from tests.predictors.test_signing import public_key_file

ROOT = Path(__file__).parents[2]
TEXTS = ["name three rivers", "", "naïve café 北京 " * 30, "[SEP] x"]
FEED: dict[str, NDArray[Any]] = {
    "text": np.array(TEXTS, dtype=object),
    "served_model": np.array([0, 1, 2, 1]),
    "temperature": np.array([1, np.nan, 0.5, 0], dtype=np.float32),
}
SERVED = [None, "small-llm", "large-llm", "small-llm"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_artifact(tmp_path_factory.mktemp("triton") / "artifact")


@pytest.fixture(scope="module")
def repository(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository") / "models"
    assert main(["triton", str(folder), "--out", str(root)]) == 0
    return root


def check(outputs: dict[str, NDArray[Any]], folder: Path) -> None:
    """Asserts that Triton's outputs [4, ...] are the artifact's predictions of FEED."""
    expected = open_runtime(folder).predict(TEXTS, SERVED, [1.0, None, 0.5, 0.0])
    np.testing.assert_allclose(outputs["mu"][:, 0], expected.mu, rtol=1e-5)
    np.testing.assert_allclose(outputs["sigma"][:, 0], expected.sigma, rtol=1e-5)


def test_configuration_is_what_triton_reads(repository: Path) -> None:
    assert {path.name for path in repository.iterdir()} == {"tailcast", RECORD}
    text = (repository / "tailcast" / "config.pbtxt").read_text()
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert (config.name, config.backend, config.max_batch_size) == ("tailcast", "python", 64)
    assert [tensor.name for tensor in config.input] == list(FEED)
    assert [tensor.name for tensor in config.output] == ["mu", "sigma"]
    assert config.dynamic_batching.max_queue_delay_microseconds == 1000
    assert {path.name for path in (repository / "tailcast" / "1").iterdir()} == {
        "model.onnx",
        "model.py",
        "tokenizer.json",
    }


class _Tensor:
    """As `triton_python_backend_utils.Tensor`."""

    def __init__(self, name: str, values: NDArray[Any]) -> None:
        self.name, self.values = name, values

    def as_numpy(self) -> NDArray[Any]:
        return self.values


@pytest.mark.parametrize("side", ["right", "left", "middle"])
def test_model_gives_the_predictions_of_the_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    """The Python backend's model under stand-ins for Triton's objects; the real server is below."""
    folder = write_text_artifact(tmp_path / "artifact", truncation_side=side)
    assert main(["triton", str(folder), "--out", str(tmp_path / "models")]) == 0
    utils = ModuleType("triton_python_backend_utils")
    values = {
        "Tensor": _Tensor,
        "InferenceResponse": lambda output_tensors: {tensor.name: tensor.values for tensor in output_tensors},
        "get_input_tensor_by_name": lambda request, name: _Tensor(name, request[name]),
    }
    for name, value in values.items():
        monkeypatch.setattr(utils, name, value, raising=False)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utils)
    model = tmp_path / "models" / "tailcast"
    config = text_format.Parse((model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    content = json_format.MessageToDict(config, preserving_proto_field_name=True)
    spec = importlib.util.spec_from_file_location("triton_model", model / "1" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    backend = module.TritonPythonModel()
    backend.initialize(
        {
            "model_config": json.dumps(content),
            "model_repository": str(model),
            "model_version": "1",
            "model_instance_kind": "CPU",
        }
    )
    columns = FEED | {"text": np.array([text.encode() for text in TEXTS], dtype=object)}
    requests = [
        {name: values[rows].reshape(-1, 1) for name, values in columns.items()}
        for rows in (slice(0, 3), slice(3, 4))
    ]
    responses = backend.execute(requests)
    assert [len(response["mu"]) for response in responses] == [3, 1]
    check(
        {name: np.concatenate([response[name] for response in responses]) for name in ("mu", "sigma")}, folder
    )


def test_kserve_layout(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "kserve"
    arguments = ["kserve", str(folder), "--out", str(out), "--storage_uri", "pvc://claim/models"]
    assert main([*arguments, "--name", "lengths"]) == 0
    resource = yaml.safe_load((out / "inference-service.yaml").read_text())
    assert (resource["kind"], resource["metadata"]["name"]) == ("InferenceService", "lengths")
    model = resource["spec"]["predictor"]["model"]
    assert model == {
        "modelFormat": {"name": "triton"},
        "protocolVersion": "v2",
        "storageUri": "pvc://claim/models",
    }
    manifest = open_artifact(folder).manifest
    assert resource["metadata"]["annotations"]["tailcast/artifact-version"] == manifest.artifact_version
    assert [path.name for path in (out / "models").iterdir()] == ["lengths"]
    description = json.loads((out / "metadata" / "lengths.json").read_text())
    assert description["inputs"][0] == {"name": "text", "datatype": "BYTES", "shape": [-1, 1]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["other"], "TARGET: got 'other'; allowed: triton, kserve"),
        (["kserve"], "storage_uri: got None; allowed: set for kserve"),
        (["triton", "--storage_uri", "x"], "storage_uri: got 'x'"),
        (["kserve", "--storage_uri", "x", "--name", "Not_This"], "name: got 'Not_This'"),
        (["triton", "--name", "a/b"], "name: got 'a/b'"),
        (["triton", "--max_batch_size", "0"], "max_batch_size: got 0"),
        (["triton", "--max_queue_delay_us", "-1"], "max_queue_delay_us: got -1"),
        (["triton", "--public_key", "nowhere"], "public_key: got 'nowhere'"),
    ],
)
def test_bad_option_is_named_and_nothing_is_written(
    folder: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target, *options = arguments
    assert main([target, str(folder), "--out", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_unsigned_artifacts_and_folders_of_others_are_refused(folder: Path, tmp_path: Path) -> None:
    key = public_key_file(tmp_path / "key.pub")
    assert main(["triton", str(folder), "--out", str(tmp_path / "o"), "--public_key", str(key)]) == 2
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    assert main(["triton", str(folder), "--out", str(tmp_path / "full")]) == 2
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["precious"]


def server_folder() -> Path:
    """The Triton server that `make triton-env` prepares; elsewhere with TAILCAST_TRITON_ENV."""
    folder = Path(os.environ.get("TAILCAST_TRITON_ENV", ROOT / ".venv-triton"))
    if not (folder / "pytriton" / "tritonserver" / "bin" / "tritonserver").is_file():
        pytest.skip(f"no Triton server in {folder}: make triton-env")
    return folder


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """HTTP and gRPC port of a real Triton with the repository."""
    environment = server_folder()
    triton = environment / "pytriton" / "tritonserver"
    http, grpc = free_ports(2)
    command = [str(triton / "bin" / "tritonserver"), "--model-repository", str(repository)]
    command += ["--backend-directory", str(triton / "backends"), "--allow-metrics", "false"]
    command += ["--http-address", "127.0.0.1", "--grpc-address", "127.0.0.1"]
    command += ["--http-port", str(http), "--grpc-port", str(grpc), "--exit-timeout-secs", "5"]
    libraries = os.environ | {"LD_LIBRARY_PATH": str(environment / "nvidia_pytriton.libs")}
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(command, env=libraries, stdout=stream, stderr=subprocess.STDOUT)
        try:
            wait_for(lambda: is_ready(http), process, log)
            yield http, grpc
        finally:
            process.terminate()
            process.wait(timeout=60)


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < end, log.read_text()[-4000:]
        time.sleep(0.2)


@pytest.mark.slow
def test_real_triton_answers_tritonclient(server: tuple[int, int], folder: Path) -> None:
    client = tritonclient.InferenceServerClient(f"127.0.0.1:{server[1]}")
    types = {"text": "BYTES", "served_model": "INT64", "temperature": "FP32"}
    inputs = []
    for name, array in FEED.items():
        tensor = tritonclient.InferInput(name, [len(array), 1], types[name])
        tensor.set_data_from_numpy(array.reshape(-1, 1))
        inputs.append(tensor)
    result = client.infer("tailcast", inputs)
    names = ("mu", "sigma")
    check({name: result.as_numpy(name) for name in names}, folder)
    client.close()


@pytest.mark.slow
def test_real_triton_speaks_the_open_inference_protocol(server: tuple[int, int], folder: Path) -> None:
    """As KServe does, over HTTP; the metadata are those that are written."""
    url = f"http://127.0.0.1:{server[0]}/v2/models/tailcast"
    with urllib.request.urlopen(url, timeout=60) as response:
        description = json.load(response)
    expected = metadata(open_artifact(folder), "tailcast")
    assert {name: description[name] for name in expected} == expected
    feed = FEED | {"temperature": np.array([1, 0, 0.5, 0], dtype=np.float32)}
    types = {"text": "BYTES", "served_model": "INT64", "temperature": "FP32"}
    inputs = [
        {"name": name, "datatype": types[name], "shape": [len(array), 1], "data": array.tolist()}
        for name, array in feed.items()
    ]
    request = urllib.request.Request(f"{url}/infer", json.dumps({"inputs": inputs}).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        outputs = {output["name"]: output["data"] for output in json.load(response)["outputs"]}
    predicted = open_runtime(folder).predict(TEXTS, SERVED, [1.0, 0.0, 0.5, 0.0])
    np.testing.assert_allclose(outputs["mu"], predicted.mu, rtol=1e-5)


def test_server_environment_is_complete_where_it_is_made() -> None:
    """What `make triton-env` must have put there, so that a half-made one is told apart from a failing server."""
    environment = server_folder()
    backend = environment / "pytriton" / "tritonserver" / "backends" / "python"
    for name in ("triton_python_backend_stub", "numpy", "onnxruntime", "tokenizers"):
        assert (backend / name).exists(), name
    assert shutil.which(str(backend / "triton_python_backend_stub"))
