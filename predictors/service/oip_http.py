"""The REST paths of the Open Inference Protocol, with the binary tensor extension that tritonclient uses by default."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import metadata
from typing import Any

from aiohttp import web

from predictors.http_edge import read_body
from predictors.service.calls import PredictorCalls
from predictors.service.errors import UnparsableError
from predictors.service.gateway import json_object
from predictors.service.oip import (
    INPUTS,
    PLATFORM,
    SERVER_NAME,
    InputTensors,
    find,
    infer,
    output_types,
)
from scheduler_core.errors import InputError

HEADER_LENGTH = "Inference-Header-Content-Length"


class OpenInferenceRoutes:
    """The handlers of the paths under /v2."""

    def __init__(self, calls: PredictorCalls) -> None:
        self._calls = calls

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Adds the paths under /v2."""
        router.add_get("/v2", self._server)
        router.add_get("/v2/health/live", self._live)
        router.add_get("/v2/health/ready", self._ready)
        for path in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
            router.add_get(path, self._model)
            router.add_get(f"{path}/ready", self._model_ready)
            router.add_post(f"{path}/infer", self._infer)

    async def _server(self, request: web.Request) -> web.Response:
        extensions = ["binary_tensor_data"]
        version = metadata.version("tailcast")
        return web.json_response({"name": SERVER_NAME, "version": version, "extensions": extensions})

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"live": True})

    async def _ready(self, request: web.Request) -> web.Response:
        ready = self._calls.artifacts.is_ready
        return web.json_response({"ready": ready}, status=200 if ready else 503)

    async def _model(self, request: web.Request) -> web.Response:
        served = self._find(request)
        tensors = {"inputs": INPUTS, "outputs": output_types(served)}
        content = {"name": served.name, "versions": [served.version], "platform": PLATFORM}
        return web.json_response(
            content | {kind: [asdict(tensor) for tensor in types] for kind, types in tensors.items()}
        )

    async def _model_ready(self, request: web.Request) -> web.Response:
        served = self._find(request)
        ready = self._calls.artifacts.is_artifact_ready(served)
        return web.json_response({"name": served.name, "ready": ready}, status=200 if ready else 503)

    async def _infer(self, request: web.Request) -> web.Response:
        served = self._find(request)
        content, binary = await _split(await read_body(request), request.headers.get(HEADER_LENGTH))
        inputs = _inputs(content, binary, InputTensors(self._calls.max_batch_requests))
        options = _listed(content, "outputs")
        names = [str(output.get("name", "")) for output in options]
        outputs = await infer(self._calls, served, inputs, dict.fromkeys(names), None)
        all_binary = bool(_parameters(content).get("binary_data_output", False))
        is_binary = {
            name: bool(_parameters(output).get("binary_data", all_binary))
            for name, output in zip(names, options, strict=True)
        }
        datatypes = {tensor.name: tensor.datatype for tensor in output_types(served)}
        described: list[dict[str, Any]] = []
        raw = []
        for name, values in outputs.items():
            output: dict[str, Any] = {"name": name, "datatype": datatypes[name], "shape": list(values.shape)}
            if is_binary.get(name, all_binary):
                raw.append(values.tobytes())
                output["parameters"] = {"binary_data_size": len(raw[-1])}
            else:
                output["data"] = values.reshape(-1).tolist()
            described.append(output)
        response = {"model_name": served.name, "model_version": served.version, "outputs": described}
        if isinstance(content.get("id"), str):
            response["id"] = content["id"]
        if not raw:
            return web.json_response(response)
        header = json.dumps(response).encode()
        return web.Response(
            body=b"".join([header, *raw]),
            headers={HEADER_LENGTH: str(len(header)), "Content-Type": "application/octet-stream"},
        )

    def _find(self, request: web.Request) -> Any:
        return find(self._calls, request.match_info["name"], request.match_info.get("version", ""))


async def _split(body: bytes, header_length: str | None) -> tuple[dict[str, Any], memoryview]:
    """The JSON part of a body, and the tensors behind it."""
    if header_length is None:
        return await json_object(body), memoryview(b"")
    is_number = header_length.isascii() and header_length.isdigit() and len(header_length) < 20
    length = int(header_length) if is_number else -1
    if not 0 <= length <= len(body):
        raise InputError(HEADER_LENGTH, header_length, f"0 to {len(body)}, the length of the body")
    return await json_object(body[:length]), memoryview(body)[length:]


def _inputs(content: dict[str, Any], binary: memoryview, tensors: InputTensors) -> dict[str, list[Any]]:
    at = 0
    for tensor in _listed(content, "inputs"):
        name, datatype = str(tensor.get("name", "")), str(tensor.get("datatype", ""))
        shape = tensor.get("shape")
        if not isinstance(shape, list) or not all(type(size) is int for size in shape):
            raise InputError(f"inputs.{name}.shape", shape, "a list of integers")
        count = tensors.expect(name, datatype, shape)
        size = _parameters(tensor).get("binary_data_size")
        if size is None:
            tensors.add(name, datatype, count, _flat(tensor.get("data"), count))
            continue
        if type(size) is not int or not 0 <= size <= len(binary) - at:
            raise InputError(f"inputs.{name}.parameters.binary_data_size", size, f"0 to {len(binary) - at}")
        tensors.add_raw(name, datatype, shape, bytes(binary[at : at + size]))
        at += size
    if at != len(binary):
        raise InputError("inputs", f"{len(binary)} bytes after the JSON part", f"{at}, as the inputs say")
    return tensors.values


def _flat(values: Any, count: int) -> list[Any]:
    """The first leaves of nested lists, in order: `count`, or one more if there are more."""
    leaves: list[Any] = []
    rest = [values]
    while rest and len(leaves) <= count:
        value = rest.pop()
        if isinstance(value, list):
            rest.extend(reversed(value))
        else:
            leaves.append(value)
    return leaves


def _listed(content: dict[str, Any], name: str) -> list[dict[str, Any]]:
    members = content.get(name, [])
    if not isinstance(members, list) or not all(isinstance(member, dict) for member in members):
        raise UnparsableError("inference request", f"{name} is not a list of objects")
    return members


def _parameters(content: dict[str, Any]) -> dict[str, Any]:
    parameters = content.get("parameters", {})
    if not isinstance(parameters, dict):
        raise UnparsableError("inference request", "parameters is not an object")
    return parameters
