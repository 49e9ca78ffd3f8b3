"""The Open Inference Protocol over gRPC and REST: our methods, and tritonclient unchanged."""

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
import pytest

from predictors.proto import open_inference_pb2 as oip
from predictors.runtime import open_runtime
from scheduler_core.lengths import LogT
from scheduler_core.prediction.prompt_text import PartTokens
from tests.predictors.fakes import Stub, expected_rich, running_server, status, write_rich_artifact

PROMPTS = ["sea", "name three rivers", "write a long essay"]
MODELS = ["tiny-llm", "", "huge-llm"]


@pytest.fixture
async def addresses(rich_folder: Path) -> AsyncIterator[dict[str, str]]:
    async with running_server(open_runtime(rich_folder), http_port=0) as (server, address):
        yield {"grpc": address, "http": f"127.0.0.1:{server.http_port}"}


@pytest.fixture
async def stub(addresses: dict[str, str]) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(addresses["grpc"]) as channel:
        yield Stub(channel)


@pytest.fixture
async def http(addresses: dict[str, str]) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(base_url=f"http://{addresses['http']}") as session:
        yield session


def infer_request(**changes: Any) -> oip.ModelInferRequest:
    request = oip.ModelInferRequest(model_name="tiny", id="r1", **changes)
    for name, shape, texts in (("prompt", [3], PROMPTS), ("served_model", [3, 1], MODELS)):
        contents = oip.InferTensorContents(bytes_contents=[text.encode() for text in texts])
        request.inputs.add(name=name, datatype="BYTES", shape=shape, contents=contents)
    contents = oip.InferTensorContents(fp32_contents=[0.5, float("nan"), 1.0])
    request.inputs.add(name="temperature", datatype="FP32", shape=[3], contents=contents)
    return request


def outputs(response: oip.ModelInferResponse) -> dict[str, Any]:
    kinds = {"FP32": "fp32_contents", "FP64": "fp64_contents"}
    values = {one.name: getattr(one.contents, kinds[one.datatype]) for one in response.outputs}
    return {one.name: np.array(values[one.name]).reshape(list(one.shape)) for one in response.outputs}


async def test_infer_gives_the_artifacts_own_numbers(stub: Any) -> None:
    response = await stub.ModelInfer(infer_request())
    assert (response.model_name, response.id) == ("tiny", "r1")
    rows = [expected_rich(*row) for row in zip(PROMPTS, [1, 0, 2], [0.5, 0.0, 1.0], strict=True)]
    tensors = outputs(response)
    assert set(tensors) == {"mu", "sigma", "nu", "urgency", "bucket", "regression_tokens", "rank"}
    for name, values in tensors.items():
        np.testing.assert_allclose(values, [row[name] for row in rows], rtol=1e-5)


async def test_truncated_length_comes_with_max_tokens(stub: Any) -> None:
    request = infer_request()
    tokens = request.inputs.add(name="max_tokens", datatype="INT64", shape=[3])
    tokens.contents.int64_contents.extend([10, 500, 100_000])
    for name in ("expected_tokens", "quantile_tokens"):
        request.outputs.add(name=name)
    tensors = outputs(await stub.ModelInfer(request))
    assert list(tensors) == ["expected_tokens", "quantile_tokens"]
    row = expected_rich(PROMPTS[1])
    lengths = LogT(row["mu"], row["sigma"], row["nu"])
    assert tensors["expected_tokens"][1] == pytest.approx(float(lengths.expected(500)), rel=1e-5)
    quantiles = np.minimum(lengths.ppf([0.5, 0.9, 0.99]), 500)
    np.testing.assert_allclose(tensors["quantile_tokens"][1], quantiles, rtol=1e-4)


async def test_metadata_and_health(stub: Any) -> None:
    assert (await stub.ServerLive(oip.ServerLiveRequest())).live
    assert (await stub.ServerReady(oip.ServerReadyRequest())).ready
    assert (await stub.ServerMetadata(oip.ServerMetadataRequest())).name == "tailcast"
    metadata = await stub.ModelMetadata(oip.ModelMetadataRequest(name="tiny"))
    names = [tensor.name for tensor in metadata.inputs]
    assert names == ["prompt", "messages", "options", "served_model", "temperature", "max_tokens"]
    shapes = {tensor.name: list(tensor.shape) for tensor in metadata.outputs}
    assert (shapes["mu"], shapes["urgency"], shapes["quantile_tokens"]) == ([-1], [-1, 3], [-1, 3])
    versioned = {"name": "tiny", "version": metadata.versions[0]}
    for request, ready in (({"name": "tiny"}, True), (versioned, True), ({"name": "other"}, False)):
        assert (await stub.ModelReady(oip.ModelReadyRequest(**request))).ready is ready
    code, _ = await status(stub.ModelMetadata(oip.ModelMetadataRequest(name="tiny", version="9")))
    assert code == grpc.StatusCode.NOT_FOUND


BAD_TENSORS: list[tuple[str, dict[str, Any], str]] = [
    ("prompt", {"shape": [4]}, "inputs.prompt: got"),
    ("prompt", {"shape": [2**40, 2**40]}, "inputs.prompt.shape"),
    ("prompt", {"shape": [0]}, "inputs.prompt"),
    ("prompt", {"datatype": "TEXT"}, "inputs.prompt.datatype"),
    ("prompt", {"contents": {"bytes_contents": [b"\xff", b"a", b"b"]}}, "inputs.prompt"),
    ("prompt", {"contents": {"bytes_contents": [b"a", b" ", b"b"]}}, "prompt[1]: got"),
    ("temperature", {"name": "input_ids"}, "inputs: got 'input_ids'"),
    ("temperature", {"name": "prompt"}, "inputs: got 'prompt'"),
    ("temperature", {"shape": [3, 1, 1]}, "inputs.temperature.shape"),
]
BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"raw_input_contents": [b"\x05\x00\x00\x00ab", b"", b""]}, "inputs.prompt"),
    ({"raw_input_contents": [b""]}, "raw_input_contents"),
    ({"outputs": [{"name": "expected_tokens"}]}, "outputs: got 'expected_tokens'"),
]


async def test_bad_requests_are_named(stub: Any) -> None:
    cases = [(infer_request(**fields), message) for fields, message in BAD_REQUESTS]
    cases.append((oip.ModelInferRequest(model_name="tiny"), "inputs: got []"))
    for name, changes, message in BAD_TENSORS:
        request = infer_request()
        [tensor] = [tensor for tensor in request.inputs if tensor.name == name]
        for field, value in changes.items():
            tensor.ClearField(field)
            tensor.MergeFrom(oip.ModelInferRequest.InferInputTensor(**{field: value}))
        cases.append((request, message))
    for request, expected in cases:
        code, message = await status(stub.ModelInfer(request))
        assert code == grpc.StatusCode.INVALID_ARGUMENT, (expected, message)
        assert expected in message
    for model in ("other", ""):
        request = infer_request()
        request.model_name = model
        assert (await status(stub.ModelInfer(request)))[0] == grpc.StatusCode.NOT_FOUND


async def test_inference_over_http_as_json_and_as_binary(http: aiohttp.ClientSession) -> None:
    mus = [expected_rich(text)["mu"] for text in ("sea", "a long essay")]
    prompts = {"name": "prompt", "datatype": "BYTES", "shape": [2, 1], "data": [["sea"], ["a long essay"]]}
    async with http.post("/v2/models/tiny/infer", json={"id": "7", "inputs": [prompts]}) as response:
        plain = await response.json()
    assert (response.status, plain["id"], plain["model_name"]) == (200, "7", "tiny")
    tensors = {one["name"]: one for one in plain["outputs"]}
    np.testing.assert_allclose(tensors["mu"]["data"], mus, rtol=1e-5)
    assert tensors["urgency"]["shape"] == [2, 3]
    raw = b"\x03\x00\x00\x00sea\x0c\x00\x00\x00a long essay"
    size = {"binary_data_size": len(raw)}
    prompts = {"name": "prompt", "datatype": "BYTES", "shape": [2], "parameters": size}
    names = [{"name": "mu", "parameters": {"binary_data": True}}, {"name": "rank"}]
    head = json.dumps({"inputs": [prompts], "outputs": names}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    async with http.post("/v2/models/tiny/infer", data=head + raw, headers=headers) as response:
        body = await response.read()
    length = int(response.headers["Inference-Header-Content-Length"])
    described = json.loads(body[:length])["outputs"]
    assert described[0]["parameters"] == {"binary_data_size": 8}
    np.testing.assert_allclose(np.frombuffer(body[length:], "<f4"), mus, rtol=1e-5)
    assert "data" in described[1]


async def test_members_that_are_null_are_not_set(http: aiohttp.ClientSession) -> None:
    """As pydantic models of clients write them."""
    prompt = {"name": "prompt", "datatype": "BYTES", "shape": [1], "data": ["sea"], "parameters": None}
    body = {"id": None, "parameters": None, "inputs": [prompt], "outputs": None}
    for outputs in (None, [{"name": "mu", "parameters": None}]):
        async with http.post("/v2/models/tiny/infer", json=body | {"outputs": outputs}) as response:
            content = await response.json()
        assert response.status == 200, content
        tensors = {one["name"]: one for one in content["outputs"]}
        np.testing.assert_allclose(tensors["mu"]["data"], [expected_rich("sea")["mu"]], rtol=1e-5)


PROMPT = '{"name": "prompt", "datatype": "BYTES", "shape": [1], "data": ["sea"]}'
BAD_INPUTS = [
    '{"name": "prompt"}',
    '{"name": "prompt", "datatype": "BYTES", "shape": [1], "data": [3]}',
    '{"name": "prompt", "datatype": "BYTES", "shape": [1], "data": ["\\ud800"]}',
    '{"name": "prompt", "datatype": "BYTES", "shape": [true], "data": ["a"]}',
    '{"name": "prompt", "datatype": "BYTES", "shape": [9223372036854775808], "data": ["a"]}',
    '{"name": "prompt", "datatype": "BYTES", "shape": [1], "parameters": 3}',
    '{"name": "prompt", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 9}}',
    PROMPT + ', {"name": "temperature", "datatype": "FP32", "shape": [1], "data": [1e39]}',
    PROMPT + ', {"name": "\\ud800", "datatype": "FP32", "shape": [1], "data": [1]}',
]
MAX_TOKENS = '{"name": "max_tokens", "datatype": "INT64", "shape": [1], "data": %s}'
BAD_INPUTS += [
    f"{PROMPT}, {MAX_TOKENS % data}" for data in ("[9223372036854775808]", "[1.5]", "[true]", '["5"]')
]
BAD_REST = ['"outputs": [{"name": "\\ud800"}]', '"outputs": [{"name": "mu", "parameters": 1}]']
BAD_REST.append('"parameters": "\\ud800"')
BAD_BODIES = ["{}", '{"inputs": 3}', '{"inputs": [3]}', *(f'{{"inputs": [{bad}]}}' for bad in BAD_INPUTS)]
BAD_BODIES += [f'{{"inputs": [{PROMPT}], {rest}}}' for rest in BAD_REST]


async def test_wrong_inference_requests_are_400(http: aiohttp.ClientSession) -> None:
    cases = [(body, None) for body in BAD_BODIES]
    cases += [('{"inputs": []}', "500"), ('{"inputs": []}', "-1"), ('{"inputs": []}xyz', "14")]
    for body, length in cases:
        headers = {} if length is None else {"Inference-Header-Content-Length": length}
        async with http.post("/v2/models/tiny/infer", data=body.encode(), headers=headers) as response:
            assert (response.status, bool((await response.json())["error"])) == (400, True), body


# As another process that knows nothing of us.
TRITON = """
import importlib, json, sys
import numpy as np
import tritonclient.grpc as grpc_client
from tritonclient.grpc import service_pb2

kind, address = sys.argv[1], sys.argv[2]
module = importlib.import_module(f"tritonclient.{kind}")
client = module.InferenceServerClient(url=address)
prompts = np.array([text.encode() for text in json.loads(sys.argv[3])], dtype=np.object_)
inputs = [
    module.InferInput("prompt", [len(prompts)], "BYTES"),
    module.InferInput("temperature", [len(prompts)], "FP32"),
]
inputs[0].set_data_from_numpy(prompts)
inputs[1].set_data_from_numpy(np.array([0.5] * len(prompts), dtype=np.float32))
results = [
    client.infer("tiny", inputs),
    client.infer("tiny", inputs, outputs=[module.InferRequestedOutput("mu"), module.InferRequestedOutput("urgency")]),
]
try:
    client.infer("other", inputs)
    error = ""
except Exception as caught:
    error = str(caught)
metadata = client.get_model_metadata("tiny", **({"as_json": True} if kind == "grpc" else {}))
print(json.dumps({
    "ready": [client.is_server_live(), client.is_server_ready(), client.is_model_ready("tiny"), client.is_model_ready("other")],
    "inputs": [tensor["name"] for tensor in metadata["inputs"]],
    "mu": [result.as_numpy("mu").tolist() for result in results],
    "urgency": [result.as_numpy("urgency").tolist() for result in results],
    "error": error,
    "fields": {
        name: {field.name: [field.number, field.type, field.is_repeated] for field in message.fields}
        for name, message in service_pb2.DESCRIPTOR.message_types_by_name.items()
    },
}))
"""


@pytest.mark.parametrize("kind", ["grpc", "http"])
async def test_tritonclient_works_unchanged(addresses: dict[str, str], kind: str) -> None:
    for package in ("tritonclient", "rapidjson", *(["geventhttpclient"] if kind == "http" else [])):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    command = [sys.executable, "-c", TRITON, kind, addresses[kind], json.dumps(PROMPTS)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout.splitlines()[-1])
    assert output["ready"] == [True, True, True, False]
    assert output["inputs"][0] == "prompt"
    rows = [expected_rich(prompt, 0, 0.5) for prompt in PROMPTS]
    for name in ("mu", "urgency"):
        for values in output[name]:
            np.testing.assert_allclose(values, [row[name] for row in rows], rtol=1e-5)
    assert "other" in output["error"]
    for name, message in oip.DESCRIPTOR.message_types_by_name.items():  # our messages are the protocol's
        ours = {field.name: [field.number, field.type, field.is_repeated] for field in message.fields}
        assert ours == output["fields"][name], name


def test_tritonclient_and_ours_live_in_one_process() -> None:
    service_pb2 = pytest.importorskip("tritonclient.grpc").service_pb2
    assert service_pb2.ModelInferRequest.FromString(infer_request().SerializeToString()).model_name == "tiny"


SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"properties": {"b": {}, "c": {}}}}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
#: Requests of the chat API: those of the protocol must be read as these over HTTP.
BODIES: list[dict[str, Any]] = [
    {"prompt": "name three rivers"},
    {"prompt": "name three rivers", "response_format": SCHEMA, "max_tokens": 50},
    {
        "messages": [
            {"role": "system", "content": "write a long essay"},
            {"role": "user", "content": "name three rivers"},
            {"role": "assistant", "content": "the sea"},
            {"role": "user", "content": [{"type": "text", "text": "last"}]},
        ]
    },
    {"messages": [{"role": "user", "content": "last"}], "tools": [TOOL], "n": 3, "stop": ["sea"]},
    {"messages": [{"role": "user", "content": "last"}], "reasoning_effort": "high", "min_tokens": 64},
    {
        "messages": [{"role": "user", "content": "last"}],
        "model": "huge-llm",
        "temperature": 0.7,
        "max_tokens": 9,
    },
]
CONVERSATIONS = """
import importlib, json, sys
import numpy as np

kind, address, bodies = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
module = importlib.import_module(f"tritonclient.{kind}")
client = module.InferenceServerClient(url=address)


def infer(bodies, parameters=None):
    columns = {
        "prompt": [body.get("prompt", "") for body in bodies],
        "messages": [json.dumps(body["messages"]) if "messages" in body else "" for body in bodies],
        "options": [json.dumps({name: body[name] for name in body if name not in ("prompt", "messages")}) for body in bodies],
    }
    inputs = []
    for name, texts in columns.items():
        inputs.append(module.InferInput(name, [len(texts)], "BYTES"))
        inputs[-1].set_data_from_numpy(np.array([text.encode() for text in texts], dtype=np.object_))
    return client.infer("tiny", inputs, parameters=parameters)


print(json.dumps({
    "mu": infer(bodies).as_numpy("mu").tolist(),
    "sigma": infer(bodies).as_numpy("sigma").tolist(),
    "with parameters": infer(bodies[:1], {"max_tokens": 7, "reasoning_effort": "high"}).as_numpy("quantile_tokens").tolist(),
}))
"""


@pytest.mark.parametrize("kind", ["grpc", "http"])
async def test_conversations_and_options_are_read_as_over_http(tmp_path: Path, kind: str) -> None:
    parts = PartTokens(options=20, system=20, turns=20, last=20)
    fields = {"conversations": True, "part_tokens": parts, "max_length": 100}
    folder = write_rich_artifact(tmp_path / "a", heads=("length",), **fields)
    async with running_server(open_runtime(folder), http_port=0) as (server, address):
        ports = {"grpc": address, "http": f"127.0.0.1:{server.http_port}"}
        command = [sys.executable, "-c", CONVERSATIONS, kind, ports[kind], json.dumps(BODIES)]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        output = json.loads(done.stdout.splitlines()[-1])
        responses = []
        async with aiohttp.ClientSession(f"http://{ports['http']}") as http:
            for body in BODIES:
                async with http.post("/v1/predict", json=body) as response:
                    responses.append(await response.json())
    for name in ("mu", "sigma"):
        np.testing.assert_allclose(output[name], [response[name] for response in responses], rtol=1e-6)
    assert len(set(output["mu"])) == len(BODIES)
    assert max(output["with parameters"][0]) <= 7


CHAT = json.dumps([{"role": "user", "content": "sea"}])
BAD_ROWS: list[tuple[dict[str, str], str]] = [
    ({"messages": "{}"}, "inputs.messages[0]: got '{}'; allowed: a JSON list"),
    ({"messages": "[1"}, "inputs.messages[0]: got '[1'; allowed: valid JSON"),
    ({"options": "[]"}, "inputs.options[0]: got '[]'; allowed: a JSON object"),
    ({"prompt": "sea", "options": '{"n": 1, "n": 2}'}, "inputs.options[0]"),
    ({"prompt": "sea", "messages": CHAT}, "prompt, messages[0]: got '2 inputs'"),
    ({"messages": CHAT, "options": f'{{"messages": {CHAT}}}'}, "unset, because the input messages has it"),
    (
        {"messages": CHAT, "served_model": "tiny-llm", "options": '{"model": "huge-llm"}'},
        "the input served_model has it",
    ),
    ({"prompt": "sea", "options": '{"maxtokens": 5}'}, "member[0]: got 'maxtokens'; allowed: max_tokens"),
    ({"prompt": "sea", "options": '{"declared_tier": 1}'}, "inputs.options[0].declared_tier: got 1"),
    ({"prompt": "sea", "options": '{"artifact_id": "other"}'}, "inputs.options[0].artifact_id: got 'other'"),
    ({"messages": "[]"}, "messages[0]: got ''; allowed: a non-empty text"),
    ({"prompt": "sea", "options": "[" + "[]," * 60_000 + "[]]"}, "more than 100000 values"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
async def test_what_cannot_be_read_of_a_row_is_named(stub: Any, row: dict[str, str], message: str) -> None:
    request = oip.ModelInferRequest(model_name="tiny")
    for name, text in row.items():
        contents = oip.InferTensorContents(bytes_contents=[text.encode()])
        request.inputs.add(name=name, datatype="BYTES", shape=[1], contents=contents)
    code, details = await status(stub.ModelInfer(request))
    assert (code, message in details) == (grpc.StatusCode.INVALID_ARGUMENT, True), details
