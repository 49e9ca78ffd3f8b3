"""The Open Inference Protocol over gRPC: our methods, and tritonclient unchanged."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from predictors.proto import open_inference_pb2 as oip
from predictors.proto.open_inference_pb2_grpc import GRPCInferenceServiceStub
from predictors.runtime import open_runtime
from scheduler_core.lengths import LogT
from tests.predictors.fakes import expected_rich, running_server

PROMPTS = ["sea", "name three rivers", "write a long essay"]
MODELS = ["tiny-llm", "", "huge-llm"]
NUMBERS = [1, 0, 2]


@pytest.fixture
async def address(rich_folder: Path) -> AsyncIterator[str]:
    async with running_server(open_runtime(rich_folder), http_port=0) as (server, address):
        yield f"{address} 127.0.0.1:{server.http_port}"


@pytest.fixture
async def stub(address: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(address.split()[0]) as channel:
        yield GRPCInferenceServiceStub(channel)


def infer_request(**changes: Any) -> oip.ModelInferRequest:
    request = oip.ModelInferRequest(model_name="tiny", id="r1")
    prompts = request.inputs.add(name="prompt", datatype="BYTES", shape=[3])
    prompts.contents.bytes_contents.extend(prompt.encode() for prompt in PROMPTS)
    models = request.inputs.add(name="served_model", datatype="BYTES", shape=[3, 1])
    models.contents.bytes_contents.extend(name.encode() for name in MODELS)
    temperature = request.inputs.add(name="temperature", datatype="FP32", shape=[3])
    temperature.contents.fp32_contents.extend([0.5, float("nan"), 1.0])
    for name, value in changes.items():
        setattr(request, name, value)
    return request


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


def output(response: oip.ModelInferResponse, name: str) -> Any:
    [found] = [one for one in response.outputs if one.name == name]
    kind = {"FP32": "fp32_contents", "FP64": "fp64_contents"}[found.datatype]
    return np.array(getattr(found.contents, kind)).reshape(list(found.shape))


async def test_infer_gives_the_artifacts_own_numbers(stub: Any) -> None:
    response = await stub.ModelInfer(infer_request())
    assert (response.model_name, response.id) == ("tiny", "r1")
    wanted = [
        expected_rich(prompt, number, temperature)
        for prompt, number, temperature in zip(PROMPTS, NUMBERS, [0.5, 0.0, 1.0], strict=True)
    ]
    names = {one.name for one in response.outputs}
    assert names == {"mu", "sigma", "nu", "urgency", "bucket", "regression_tokens", "rank"}
    for name in names:
        np.testing.assert_allclose(output(response, name), [row[name] for row in wanted], rtol=1e-5)


async def test_truncated_length_comes_with_max_tokens(stub: Any) -> None:
    request = infer_request()
    tokens = request.inputs.add(name="max_tokens", datatype="INT64", shape=[3])
    tokens.contents.int64_contents.extend([10, 500, 100_000])
    request.outputs.add(name="expected_tokens")
    request.outputs.add(name="quantile_tokens")
    response = await stub.ModelInfer(request)
    assert [one.name for one in response.outputs] == ["expected_tokens", "quantile_tokens"]
    wanted = expected_rich(PROMPTS[1])
    lengths = LogT(wanted["mu"], wanted["sigma"], wanted["nu"])
    assert output(response, "expected_tokens")[1] == pytest.approx(float(lengths.expected(500)), rel=1e-5)
    np.testing.assert_allclose(
        output(response, "quantile_tokens")[1], np.minimum(lengths.ppf([0.5, 0.9, 0.99]), 500), rtol=1e-4
    )


async def test_metadata_and_health(stub: Any) -> None:
    assert (await stub.ServerLive(oip.ServerLiveRequest())).live
    assert (await stub.ServerReady(oip.ServerReadyRequest())).ready
    assert (await stub.ModelReady(oip.ModelReadyRequest(name="tiny"))).ready
    assert not (await stub.ModelReady(oip.ModelReadyRequest(name="other"))).ready
    metadata = await stub.ModelMetadata(oip.ModelMetadataRequest(name="tiny"))
    assert [tensor.name for tensor in metadata.inputs] == [
        "prompt",
        "served_model",
        "temperature",
        "max_tokens",
    ]
    shapes = {tensor.name: list(tensor.shape) for tensor in metadata.outputs}
    assert (shapes["mu"], shapes["urgency"], shapes["quantile_tokens"]) == ([-1], [-1, 3], [-1, 3])
    version = metadata.versions[0]
    assert (await stub.ModelReady(oip.ModelReadyRequest(name="tiny", version=version))).ready
    code, _ = await refusal(stub.ModelMetadata(oip.ModelMetadataRequest(name="tiny", version="9")))
    assert code == grpc.StatusCode.NOT_FOUND


def bad_requests() -> dict[str, tuple[oip.ModelInferRequest, str]]:
    def changed(at: str, **fields: Any) -> oip.ModelInferRequest:
        request = infer_request()
        for tensor in request.inputs:
            if tensor.name == at:
                for field, value in fields.items():
                    if field == "shape":
                        tensor.shape[:] = value
                    else:
                        setattr(tensor, field, value)
        return request

    none = oip.ModelInferRequest(model_name="tiny")
    utf8 = infer_request()
    utf8.inputs[0].contents.bytes_contents[0] = b"\xff"
    raw = infer_request()
    raw.raw_input_contents.extend([b"\x05\x00\x00\x00ab", b"", b""])
    few = infer_request()
    few.raw_input_contents.append(b"")
    wanted = infer_request()
    wanted.outputs.add(name="expected_tokens")
    twice = infer_request()
    twice.inputs.add(name="prompt", datatype="BYTES", shape=[0])
    return {
        "no inputs": (none, "inputs: got []"),
        "shape": (changed("prompt", shape=[4]), "inputs.prompt: got"),
        "other input": (changed("temperature", name="input_ids"), "inputs: got 'input_ids'"),
        "negative shape": (changed("prompt", shape=[-3]), "inputs.prompt.shape"),
        "huge shape": (changed("prompt", shape=[2**40, 2**40]), "inputs.prompt.shape"),
        "no rows": (changed("prompt", shape=[0]), "inputs.prompt"),
        "datatype": (changed("prompt", datatype="TEXT"), "inputs.prompt.datatype"),
        "wrong datatype": (changed("temperature", datatype="FP64"), "inputs.temperature"),
        "unknown input": (changed("temperature", name="heat"), "inputs: got 'heat'"),
        "rows": (changed("temperature", shape=[3, 1, 1]), "inputs.temperature.shape"),
        "utf-8": (utf8, "inputs.prompt"),
        "raw": (raw, "inputs.prompt"),
        "raw count": (few, "raw_input_contents"),
        "output": (wanted, "outputs: got 'expected_tokens'"),
        "twice": (twice, "inputs: got 'prompt'"),
        "empty prompt": (_with_prompt(b" "), "prompt[1]: got"),
    }


def _with_prompt(text: bytes) -> oip.ModelInferRequest:
    request = infer_request()
    request.inputs[0].contents.bytes_contents[1] = text
    return request


async def test_bad_requests_are_named(stub: Any) -> None:
    for name, (request, wanted) in bad_requests().items():
        code, message = await refusal(stub.ModelInfer(request))
        assert code == grpc.StatusCode.INVALID_ARGUMENT, (name, message)
        assert wanted in message, (name, message)
    code, _ = await refusal(stub.ModelInfer(infer_request(model_name="other")))
    assert code == grpc.StatusCode.NOT_FOUND
    code, _ = await refusal(stub.ModelInfer(infer_request(model_name="")))
    assert code == grpc.StatusCode.NOT_FOUND


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
fields = {
    name: {field.name: [field.number, field.type, field.is_repeated] for field in message.fields}
    for name, message in service_pb2.DESCRIPTOR.message_types_by_name.items()
}
print(json.dumps({
    "live": client.is_server_live(),
    "ready": [client.is_server_ready(), client.is_model_ready("tiny"), client.is_model_ready("other")],
    "inputs": [tensor["name"] for tensor in metadata["inputs"]],
    "mu": [result.as_numpy("mu").tolist() for result in results],
    "urgency": [result.as_numpy("urgency").tolist() for result in results],
    "rank": results[0].as_numpy("rank").tolist(),
    "error": error,
    "fields": fields,
}))
"""


async def triton(kind: str, address: str) -> dict[str, Any]:
    command = [sys.executable, "-c", TRITON, kind, address, json.dumps(PROMPTS)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("kind", ["grpc", "http"])
async def test_tritonclient_works_unchanged(address: str, kind: str) -> None:
    _need_triton(kind)
    found = await triton(kind, address.split()[0 if kind == "grpc" else 1])
    assert found["live"]
    assert found["ready"] == [True, True, False]
    assert found["inputs"][0] == "prompt"
    wanted = [expected_rich(prompt, 0, 0.5) for prompt in PROMPTS]
    for result in (0, 1):
        np.testing.assert_allclose(found["mu"][result], [row["mu"] for row in wanted], rtol=1e-5)
        np.testing.assert_allclose(found["urgency"][result], [row["urgency"] for row in wanted], rtol=1e-5)
    np.testing.assert_allclose(found["rank"], [row["rank"] for row in wanted], rtol=1e-5)
    assert "other" in found["error"]


async def test_our_messages_are_those_of_the_protocol(address: str) -> None:
    _need_triton("grpc")
    theirs = (await triton("grpc", address.split()[0]))["fields"]
    for name, message in oip.DESCRIPTOR.message_types_by_name.items():
        ours = {field.name: [field.number, field.type, field.is_repeated] for field in message.fields}
        assert ours == theirs[name], name


def test_tritonclient_and_ours_live_in_one_process() -> None:
    _need_triton("grpc")
    service_pb2 = pytest.importorskip("tritonclient.grpc").service_pb2
    sent = infer_request(model_name="tiny")
    assert service_pb2.ModelInferRequest.FromString(sent.SerializeToString()).model_name == "tiny"


def _need_triton(kind: str) -> None:
    import importlib.util

    for package in ("tritonclient", "rapidjson", *(["geventhttpclient"] if kind == "http" else [])):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
