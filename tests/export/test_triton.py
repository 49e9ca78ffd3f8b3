"""Triton's model repository and KServe's layout: the configurations parse, the parts run, a real server answers."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import tritonclient.grpc as tritonclient
import yaml
from google.protobuf import text_format
from numpy.typing import NDArray
from tritonclient.grpc import model_config_pb2

from export.cli_package import main
from export.text.text_graph import extensions_library
from export.triton.repository import RepositoryOptions, model_configs, write_repository
from predictors.artifact import open_artifact
from predictors.runtime import open_runtime
from scheduler_core.errors import InputError
from scheduler_core.lengths import LogT
from tests.export.artifacts import MAX_LENGTH, write_text_artifact
from tests.predictors.fakes import write_artifact, write_lexical_artifact
from tests.predictors.test_minisign import PUBLIC

ROOT = Path(__file__).parents[2]
TEXTS = ["name three rivers", "", "naïve café 北京 " * 30, "[SEP] x"]
FEED: dict[str, NDArray[Any]] = {
    "text": np.array(TEXTS, dtype=object),
    "served_model": np.array([0, 1, 2, 1]),
    "temperature": np.array([1, np.nan, 0.5, 0], dtype=np.float32),
    "max_tokens": np.array([10, 20, 1000, 1]),
}
SERVED = [None, "small-llm", "large-llm", "small-llm"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_artifact(tmp_path_factory.mktemp("triton") / "artifact")


@pytest.fixture(scope="module")
def repositories(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("repositories")
    for runtime in ("onnxruntime", "python"):
        (root / runtime).mkdir()
        options = RepositoryOptions(name="tailcast", runtime=runtime, capped=True, seq_multiple=4)  # type: ignore[arg-type]
        write_repository(open_artifact(folder), options, root / runtime)
    return {runtime: root / runtime for runtime in ("onnxruntime", "python")}


def config_of(repository: Path, name: str) -> Any:
    text = (repository / name / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def check(found: dict[str, NDArray[Any]], folder: Path) -> None:
    """Asserts that Triton's outputs [4, ...] are the artifact's predictions of FEED."""
    wanted = open_runtime(folder).predict(TEXTS, SERVED, [1.0, None, 0.5, 0.0])
    np.testing.assert_allclose(found["mu"][:, 0], wanted.mu, rtol=1e-5)
    np.testing.assert_allclose(found["sigma"][:, 0], wanted.sigma, rtol=1e-5)
    lengths, cap = LogT(wanted.mu, wanted.sigma, 3.5), FEED["max_tokens"]
    np.testing.assert_allclose(found["expected_tokens"][:, 0], lengths.expected(cap), rtol=1e-4)
    np.testing.assert_allclose(found["cvar_tokens"][:, 0], lengths.cvar(0.9, cap), rtol=1e-4)
    np.testing.assert_allclose(found["quantile_tokens"][:, 1], np.minimum(lengths.ppf(0.9), cap), rtol=1e-4)


@pytest.mark.parametrize("runtime", ["onnxruntime", "python"])
def test_configurations_are_what_triton_reads(repositories: dict[str, Path], runtime: str) -> None:
    repository = repositories[runtime]
    names = ("tailcast", "tailcast_tokenizer", "tailcast_model", "tailcast_length")
    assert {path.name for path in repository.iterdir()} == set(names)
    configs = {name: config_of(repository, name) for name in names}
    for name, config in configs.items():
        assert (config.name, config.max_batch_size) == (name, 64)
        assert (repository / name / "1").is_dir()
    ensemble = configs.pop("tailcast")
    assert [step.model_name for step in ensemble.ensemble_scheduling.step] == list(names[1:])
    assert [tensor.name for tensor in ensemble.input] == list(FEED)
    for config in configs.values():
        assert config.backend == runtime
        assert config.dynamic_batching.max_queue_delay_microseconds == 1000
    if runtime == "onnxruntime":
        assert list(configs["tailcast_tokenizer"].model_operations.op_library_filename) == [
            "libortextensions.so"
        ]


def test_steps_chained_as_the_ensemble_says_give_the_predictions(
    repositories: dict[str, Path], folder: Path
) -> None:
    """The parts under ONNX Runtime itself; the tensors are reshaped as the configurations say."""
    repository = repositories["onnxruntime"]
    ensemble = config_of(repository, "tailcast")
    values = {name: array.reshape(-1, 1) for name, array in FEED.items()}
    for step in ensemble.ensemble_scheduling.step:
        config = config_of(repository, step.model_name)
        options: Any = ort.SessionOptions()
        if config.model_operations.op_library_filename:
            options.register_custom_ops_library(str(extensions_library()))
        model = repository / step.model_name / "1" / "model.onnx"
        session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        feed = {}
        for tensor in config.input:
            array = values[step.input_map[tensor.name]]
            assert array.ndim == 1 + len(tensor.dims)
            assert all(
                wanted in (-1, size) for wanted, size in zip(tensor.dims, array.shape[1:], strict=True)
            )
            feed[tensor.name] = array.reshape(len(array)) if tensor.HasField("reshape") else array
        found = session.run([tensor.name for tensor in config.output], feed)
        for tensor, array in zip(config.output, found, strict=True):
            values[step.output_map[tensor.name]] = array[:, None] if tensor.HasField("reshape") else array
    assert values["input_ids"].shape == (4, MAX_LENGTH)
    check(values, folder)


def test_without_capped_lengths_nothing_is_paid_for_them(folder: Path, tmp_path: Path) -> None:
    models = write_repository(open_artifact(folder), RepositoryOptions(name="t"), tmp_path)
    assert [model.name for model in models] == ["t", "t_tokenizer", "t_model"]
    assert [tensor.name for tensor in models[0].inputs] == ["text", "served_model", "temperature"]
    assert [tensor.name for tensor in models[0].outputs] == ["mu", "sigma"]


def test_kserve_layout(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "kserve"
    arguments = ["kserve", str(folder), "--out", str(out), "--storage_uri", "pvc://claim/models"]
    assert main([*arguments, "--name", "lengths", "--runtime", "python"]) == 0
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
    assert {path.name for path in (out / "models").iterdir()} == {
        "lengths",
        "lengths_tokenizer",
        "lengths_model",
    }
    told = json.loads((out / "metadata" / "lengths.json").read_text())
    assert told["inputs"][0] == {"name": "text", "datatype": "BYTES", "shape": [-1, 1]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["other"], "TARGET: got 'other'; allowed: text, triton, kserve"),
        (["kserve"], "storage_uri: got None; allowed: set for kserve"),
        (["triton", "--storage_uri", "x"], "storage_uri: got 'x'"),
        (
            ["kserve", "--storage_uri", "x", "--name", "Not_This", "--runtime", "python"],
            "name: got 'Not_This'",
        ),
        (["triton", "--name", "a/b"], "name: got 'a/b'"),
        (["triton", "--max_batch_size", "0"], "max_batch_size: got 0"),
        (["triton", "--max_queue_delay_us", "-1"], "max_queue_delay_us: got -1"),
        (["triton", "--public_key", "nowhere"], "public_key: got 'nowhere'"),
        (["triton", "--public_key", PUBLIC], "signature manifest.json.minisig"),
    ],
)
def test_bad_option_is_named_and_nothing_is_written(
    folder: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target, *options = arguments
    assert main([target, str(folder), "--out", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_served_so_is_refused(folder: Path, tmp_path: Path) -> None:
    lexical = open_artifact(write_lexical_artifact(tmp_path / "lexical"))
    with pytest.raises(InputError, match="kind: got 'lexical'"):
        model_configs(lexical, RepositoryOptions(name="t"))
    plain = write_artifact(tmp_path / "plain")
    with pytest.raises(InputError, match=r"has no length\.onnx"):
        model_configs(open_artifact(plain), RepositoryOptions(name="t", capped=True))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    assert main(["triton", str(folder), "--out", str(tmp_path / "full"), "--runtime", "python"]) == 2
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["precious"]


def test_one_file_by_the_command(folder: Path, tmp_path: Path) -> None:
    assert main(["text", str(folder), "--out", str(tmp_path / "text.onnx"), "--capped", "true"]) == 0
    options: Any = ort.SessionOptions()
    options.register_custom_ops_library(str(extensions_library()))
    session = ort.InferenceSession(str(tmp_path / "text.onnx"), options, providers=["CPUExecutionProvider"])
    found = dict(zip([entry.name for entry in session.get_outputs()], session.run(None, FEED), strict=True))
    check({name: array.reshape(len(array), -1) for name, array in found.items()}, folder)


def server_folder() -> Path:
    """The Triton server that `make triton-env` prepares; elsewhere with TAILCAST_TRITON_ENV."""
    found = Path(os.environ.get("TAILCAST_TRITON_ENV", ROOT / ".venv-triton"))
    if not (found / "pytriton" / "tritonserver" / "bin" / "tritonserver").is_file():
        pytest.skip(f"no Triton server in {found}: make triton-env")
    return found


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
def server(
    repositories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int, int]]:
    """HTTP and gRPC port of a real Triton with the repository for its Python backend."""
    environment = server_folder()
    triton = environment / "pytriton" / "tritonserver"
    http, grpc = free_ports(2)
    command = [str(triton / "bin" / "tritonserver"), "--model-repository", str(repositories["python"])]
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
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5) as answer:
            return bool(answer.status == 200)
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
    types = {"text": "BYTES", "served_model": "INT64", "temperature": "FP32", "max_tokens": "INT64"}
    inputs = []
    for name, array in FEED.items():
        tensor = tritonclient.InferInput(name, [len(array), 1], types[name])
        tensor.set_data_from_numpy(array.reshape(-1, 1))
        inputs.append(tensor)
    answer = client.infer("tailcast", inputs)
    names = ("mu", "sigma", "expected_tokens", "cvar_tokens", "quantile_tokens")
    check({name: answer.as_numpy(name) for name in names}, folder)
    client.close()


@pytest.mark.slow
def test_real_triton_speaks_the_open_inference_protocol(server: tuple[int, int], folder: Path) -> None:
    """As KServe does, over HTTP; the metadata it tells are those that are written."""
    url = f"http://127.0.0.1:{server[0]}/v2/models/tailcast"
    with urllib.request.urlopen(url, timeout=60) as answer:
        told = json.load(answer)
    options = RepositoryOptions(name="tailcast", capped=True)
    wanted = model_configs(open_artifact(folder), options)[0].metadata()
    assert {name: told[name] for name in wanted} == wanted
    feed = FEED | {"temperature": np.array([1, 0, 0.5, 0], dtype=np.float32)}
    types = {"text": "BYTES", "served_model": "INT64", "temperature": "FP32", "max_tokens": "INT64"}
    inputs = [
        {"name": name, "datatype": types[name], "shape": [len(array), 1], "data": array.tolist()}
        for name, array in feed.items()
    ]
    request = urllib.request.Request(f"{url}/infer", json.dumps({"inputs": inputs}).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        outputs = {output["name"]: output["data"] for output in json.load(answer)["outputs"]}
    predicted = open_runtime(folder).predict(TEXTS, SERVED, [1.0, 0.0, 0.5, 0.0])
    np.testing.assert_allclose(outputs["mu"], predicted.mu, rtol=1e-5)


def test_server_environment_is_complete_where_it_is_made() -> None:
    """What `make triton-env` must have put there, so that a half-made one is told apart from a failing server."""
    environment = server_folder()
    backend = environment / "pytriton" / "tritonserver" / "backends" / "python"
    for name in ("triton_python_backend_stub", "numpy", "onnxruntime", "tokenizers"):
        assert (backend / name).exists(), name
    assert shutil.which(str(backend / "triton_python_backend_stub"))
