"""Triton's model repository and KServe's layout: the configuration parses, the model runs, a real server serves it."""

import json
import os
import runpy
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as tritonclient
import yaml
from google.protobuf import json_format, text_format
from numpy.typing import NDArray
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException

from benchmarks.shared.processes import free_port, running
from export.commands.package_artifact import main
from predictors.artifact import open_artifact
from predictors.runtime import open_runtime
from scheduler_core.prediction.api_request import read_request
from scheduler_core.prediction.prompt_text import PartTokens
from scheduler_core.prediction.requested_amount import with_amount
from scheduler_core.shell.files import RECORD
from tests.predictors.fakes import write_artifact, write_rich_artifact
from tests.predictors.test_artifact import public_key_file
from tests.predictors.test_open_inference import BODIES

ROOT = Path(__file__).parents[2]
TEXTS = ["name three rivers", "", "sea 北京 " * 30, "[SEP] the essay"]
FEED: dict[str, NDArray[Any]] = {
    "text": np.array(TEXTS, dtype=object),
    "served_model": np.array([0, 1, 2, 1]),
    "temperature": np.array([1, np.nan, 0.5, 0], dtype=np.float32),
}
SERVED = [None, "tiny-llm", "huge-llm", "tiny-llm"]
HEADS = ("length", "urgency")
TEXTS_IN = ("text", "messages", "options")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rich_artifact(tmp_path_factory.mktemp("triton") / "artifact", heads=HEADS)


@pytest.fixture(scope="module")
def repository(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository") / "models"
    assert main(["triton", str(folder), "--out", str(root)]) == 0
    return root


def check(outputs: dict[str, NDArray[Any]], folder: Path) -> None:
    """Asserts that Triton's outputs [4, ...] are the artifact's predictions of FEED."""
    expected = open_runtime(folder).predict(TEXTS, SERVED, [1.0, None, 0.5, 0.0])
    np.testing.assert_allclose(outputs["mu"][:, 0], expected.mu, rtol=1e-5)
    np.testing.assert_allclose(outputs["urgency"], expected.urgency, rtol=1e-5)


def test_configuration_is_what_triton_reads(repository: Path) -> None:
    assert {path.name for path in repository.iterdir()} == {"tailcast", RECORD}
    text = (repository / "tailcast" / "config.pbtxt").read_text()
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert (config.name, config.backend, config.max_batch_size) == ("tailcast", "python", 64)
    assert [tensor.name for tensor in config.input] == [*TEXTS_IN, "served_model", "temperature"]
    assert [tensor.name for tensor in config.input if tensor.optional] == list(TEXTS_IN)
    assert [tensor.name for tensor in config.output] == ["mu", "sigma", "nu", "urgency"]
    assert config.dynamic_batching.max_queue_delay_microseconds == 1000
    names = {path.name for path in (repository / "tailcast" / "1").iterdir()}
    assert names == {"model.onnx", "model.py", "scheduler_core", "tokenizer.json"}


def tensor(name: str, values: NDArray[Any]) -> SimpleNamespace:
    """As `triton_python_backend_utils.Tensor`."""
    return SimpleNamespace(name=name, values=values, as_numpy=lambda: values)


@pytest.mark.parametrize(("side", "amounts"), [("right", False), ("left", True), ("middle", False)])
def test_model_predicts_like_the_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str, amounts: bool
) -> None:
    """The Python backend's model under stand-ins for Triton's objects; the real server is below."""
    folder = write_rich_artifact(tmp_path / "artifact", heads=HEADS, truncation_side=side, amounts=amounts)
    backend = backend_of(folder, tmp_path / "models", monkeypatch)
    columns = FEED | {"text": np.array([text.encode() for text in TEXTS], dtype=object)}
    parts = (slice(0, 3), slice(3, 4))
    requests = [{name: values[rows].reshape(-1, 1) for name, values in columns.items()} for rows in parts]
    responses = backend.execute(requests)
    assert [len(response["mu"]) for response in responses] == [3, 1]
    check({name: np.concatenate([each[name] for each in responses]) for name in ("mu", "urgency")}, folder)


def backend_of(folder: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model of an artifact's repository, as Triton's Python backend creates it."""
    assert main(["triton", str(folder), "--out", str(models)]) == 0
    utils = SimpleNamespace(
        Tensor=tensor,
        TritonError=str,
        InferenceResponse=lambda output_tensors, error=None: (
            error or {each.name: each.values for each in output_tensors}
        ),
        get_input_tensor_by_name=lambda request, name: (
            tensor(name, request[name]) if name in request else None
        ),
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utils)
    model = models / "tailcast"
    config = text_format.Parse((model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    content = json_format.MessageToDict(config, preserving_proto_field_name=True)
    backend = runpy.run_path(str(model / "1" / "model.py"))["TritonPythonModel"]()
    arguments = {"model_repository": str(model), "model_version": "1", "model_instance_kind": "CPU"}
    backend.initialize({"model_config": json.dumps(content), **arguments})
    return backend


def rows_of(bodies: list[dict[str, Any]]) -> dict[str, NDArray[Any]]:
    """The optional inputs of a request with these rows, from bodies of API requests."""
    texts = [body.get("prompt", "") for body in bodies]
    messages = [json.dumps(body["messages"]) if "messages" in body else "" for body in bodies]
    others = [
        {name: value for name, value in body.items() if name not in ("prompt", "messages")} for body in bodies
    ]
    options = [json.dumps(each) if each else "" for each in others]
    columns = zip(TEXTS_IN, (texts, messages, options), strict=True)
    return {
        name: np.array([value.encode() for value in values], dtype=object).reshape(-1, 1)
        for name, values in columns
    }


PARTS = {"conversations": True, "part_tokens": PartTokens(options=20, system=20, turns=20, last=20)}


def test_conversations_and_options_are_read_like_by_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [body for body in BODIES if not {"model", "max_tokens"} & body.keys()]
    folder = write_artifact(tmp_path / "artifact", **PARTS, max_length=100)
    runtime = open_runtime(folder)
    expected = runtime.predict([read_request(body).text(runtime.artifact.manifest.form) for body in bodies])
    backend = backend_of(folder, tmp_path / "models", monkeypatch)
    without_messages = {"text": np.array([[b"sea"]], dtype=object)}
    several, one = backend.execute([rows_of(bodies), without_messages])
    np.testing.assert_allclose(several["mu"][:, 0], expected.mu, rtol=1e-6)
    assert len(set(several["mu"][:, 0].tolist())) == len(bodies)
    np.testing.assert_allclose(one["mu"][:, 0], runtime.predict(["sea"]).mu, rtol=1e-6)


CHAT = [{"role": "user", "content": "sea"}]
UNREADABLE: list[tuple[dict[str, str], str]] = [
    ({}, "inputs: neither text nor messages"),
    ({"messages": "{}"}, "messages[0]: got '{}'; allowed: a JSON list"),
    ({"text": "sea", "options": "[1"}, "options[0]: got '[1'; allowed: a JSON object"),
    ({"text": "sea", "messages": json.dumps(CHAT)}, "got both; allowed: one of them"),
    ({"text": "sea", "options": json.dumps({"messages": CHAT})}, "options[0]: got a prompt"),
    (
        {"text": "sea", "options": '{"temperature": 0.5}'},
        "options[0]: got ['temperature']; allowed: options without",
    ),
    (
        {"text": "sea", "options": '{"max_tokens": 5}'},
        "options[0]: got ['max_tokens']; allowed: options without",
    ),
]


def test_what_cannot_be_read_is_an_error_of_its_request_by_itself(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backend_of(folder, tmp_path / "models", monkeypatch)
    conditions = {"served_model": np.array([[0]]), "temperature": np.array([[1.0]], dtype=np.float32)}
    requests = [
        {name: np.array([[text.encode()]], dtype=object) for name, text in texts.items()} | conditions
        for texts, _ in (*UNREADABLE, ({"text": "sea"}, ""))
    ]
    *errors, valid = backend.execute(requests)
    for error, (_, message) in zip(errors, UNREADABLE, strict=True):
        assert message in error
    np.testing.assert_allclose(valid["mu"][0], open_runtime(folder).predict(["sea"], [None], [1.0]).mu)


def test_the_repository_has_all_that_reads_requests(repository: Path) -> None:
    """In a process without tailcast; numpy is there."""
    folders = [str(repository / "tailcast" / "1"), str(Path(np.__file__).parents[1])]
    read = "from scheduler_core.prediction.api_request import read_request as read; print(read.__code__.co_filename)"
    code = (
        f"import sys; sys.path += {folders!r}; {read}; print(read({{'messages': {CHAT!r}, 'n': 3}}).text())"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd="/").stdout.split()
    assert output[0].startswith(folders[0])
    assert output[1] == "sea"


def test_amounts_need_no_tailcast_in_triton(tmp_path: Path) -> None:
    folder = write_rich_artifact(tmp_path / "artifact", heads=HEADS, amounts=True)
    assert main(["triton", str(folder), "--out", str(tmp_path / "models")]) == 0
    version = tmp_path / "models" / "tailcast" / "1"
    assert 'key: "amounts" value { string_value: "true" }' in (version.parent / "config.pbtxt").read_text()
    read = "from scheduler_core.prediction.requested_amount import with_amount; print(with_amount('Use 100 words.'))"
    code = f"import sys; sys.path.append({str(version)!r}); {read}"
    command = [sys.executable, "-I", "-S", "-c", code]  # without site-packages
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert output == with_amount("Use 100 words.") + "\n" != "Use 100 words.\n"


def test_kserve_layout(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "kserve"
    arguments = ["kserve", str(folder), "--out", str(out), "--storage_uri", "pvc://claim/models"]
    assert main([*arguments, "--name", "lengths"]) == 0
    resource = yaml.safe_load((out / "inference-service.yaml").read_text())
    assert (resource["kind"], resource["metadata"]["name"]) == ("InferenceService", "lengths")
    kind = {"modelFormat": {"name": "triton"}, "protocolVersion": "v2"}
    assert resource["spec"]["predictor"]["model"] == kind | {"storageUri": "pvc://claim/models"}
    manifest = open_artifact(folder).manifest
    assert resource["metadata"]["annotations"]["tailcast/artifact-version"] == manifest.artifact_version
    assert [path.name for path in (out / "models").iterdir()] == ["lengths"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["other"], "TARGET: got 'other'; allowed: triton, kserve"),
        (["kserve"], "storage_uri: got None; allowed: set for kserve"),
        (["triton", "--storage_uri", "x"], "storage_uri: got 'x'"),
        (["kserve", "--storage_uri", "x", "--name", "Not_This"], "name: got 'Not_This'"),
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


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[tuple[int, int]]:
    """HTTP and gRPC port of a real Triton with the repository."""
    folder = server_folder()
    triton, http, grpc = folder / "pytriton" / "tritonserver", free_port(), free_port()
    command = [str(triton / "bin" / "tritonserver"), "--model-repository", str(repository)]
    command += ["--backend-directory", str(triton / "backends"), "--allow-metrics", "false"]
    command += ["--http-address", "127.0.0.1", "--grpc-address", "127.0.0.1"]
    command += ["--http-port", str(http), "--grpc-port", str(grpc), "--exit-timeout-secs", "5"]
    libraries = {"LD_LIBRARY_PATH": str(folder / "nvidia_pytriton.libs")}
    with running(command, lambda: is_ready(http), environment=libraries, timeout_s=300):
        yield http, grpc


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@pytest.mark.slow
def test_real_triton_responds_tritonclient(server: tuple[int, int], folder: Path) -> None:
    client = tritonclient.InferenceServerClient(f"127.0.0.1:{server[1]}")
    types = {"text": "BYTES", "served_model": "INT64", "temperature": "FP32"}
    inputs = []
    for name, array in FEED.items():
        tensor = tritonclient.InferInput(name, [len(array), 1], types[name])
        tensor.set_data_from_numpy(array.reshape(-1, 1))
        inputs.append(tensor)
    result = client.infer("tailcast", inputs)
    check({name: result.as_numpy(name) for name in ("mu", "urgency")}, folder)
    chat = tritonclient.InferInput("messages", [len(TEXTS), 1], "BYTES")
    chat.set_data_from_numpy(
        np.array(
            [json.dumps([{"role": "user", "content": text}]).encode() for text in TEXTS], dtype=object
        ).reshape(-1, 1)
    )
    result = client.infer("tailcast", [chat, *inputs[1:]])
    check({name: result.as_numpy(name) for name in ("mu", "urgency")}, folder)
    options = tritonclient.InferInput("options", [len(TEXTS), 1], "BYTES")
    options.set_data_from_numpy(np.array([[b'{"temperature": 1}']] * len(TEXTS), dtype=object))
    with pytest.raises(
        InferenceServerException, match="options.0.: got .'temperature'.; allowed: options without"
    ):
        client.infer("tailcast", [options, *inputs])
    client.close()


@pytest.mark.slow
def test_real_triton_speaks_the_open_inference_protocol(server: tuple[int, int], folder: Path) -> None:
    """As KServe does, over HTTP."""
    url = f"http://127.0.0.1:{server[0]}/v2/models/tailcast"
    with urllib.request.urlopen(url, timeout=60) as response:
        description = json.load(response)
    assert description["inputs"][0] == {"name": "text", "datatype": "BYTES", "shape": [-1, 1]}
    assert [tensor["name"] for tensor in description["inputs"][1:3]] == ["messages", "options"]
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
