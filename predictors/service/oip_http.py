"""The REST paths of the Open Inference Protocol, with the binary tensor extension that tritonclient uses by default."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from predictors.http_edge import read_body
from predictors.service.calls import PredictorCalls
from predictors.service.errors import UnparsableError
from predictors.service.gateway import json_object
from predictors.service.oip import SERVER_METADATA, InputTensor, find, infer, model_metadata
from predictors.service.pipeline import ServedArtifact
from scheduler_core.errors import InputError

HEADER_LENGTH = "Inference-Header-Content-Length"


def open_inference_routes(calls: PredictorCalls) -> web.RouteTableDef:
    """The paths under /v2."""
    routes = web.RouteTableDef()

    def model(request: web.Request) -> ServedArtifact:
        return find(calls, request.match_info["name"], request.match_info.get("version", ""))

    @routes.get("/v2")
    async def server(request: web.Request) -> web.Response:
        return web.json_response(SERVER_METADATA)

    @routes.get("/v2/health/live")
    async def live(request: web.Request) -> web.Response:
        return web.json_response({"live": True})

    @routes.get("/v2/health/ready")
    async def ready(request: web.Request) -> web.Response:
        is_ready = calls.artifacts.is_ready
        return web.json_response({"ready": is_ready}, status=200 if is_ready else 503)

    async def metadata_of(request: web.Request) -> web.Response:
        return web.json_response(model_metadata(model(request)))

    async def model_ready(request: web.Request) -> web.Response:
        served = model(request)
        is_ready = calls.artifacts.is_artifact_ready(served)
        return web.json_response({"name": served.name, "ready": is_ready}, status=200 if is_ready else 503)

    async def model_infer(request: web.Request) -> web.Response:
        served = model(request)
        content, binary = await _split(await read_body(request), request.headers.get(HEADER_LENGTH))
        all_binary = _parameters(content).get("binary_data_output", False)
        is_binary = {
            str(output.get("name", "")): bool(_parameters(output).get("binary_data", all_binary))
            for output in _listed(content, "outputs")
        }
        outputs: list[dict[str, Any]] = []
        raw = []
        for tensor, values in await infer(calls, served, _inputs(content, binary), is_binary, None):
            output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype}
            output["shape"] = list(values.shape)
            if is_binary.get(tensor.name, all_binary):
                raw.append(values.tobytes())
                output["parameters"] = {"binary_data_size": len(raw[-1])}
            else:
                output["data"] = values.reshape(-1).tolist()
            outputs.append(output)
        response = {"model_name": served.name, "model_version": served.version, "outputs": outputs}
        if isinstance(content.get("id"), str):
            response["id"] = content["id"]
        if not raw:
            return web.json_response(response)
        header = json.dumps(response).encode()
        headers = {HEADER_LENGTH: str(len(header)), "Content-Type": "application/octet-stream"}
        return web.Response(body=b"".join([header, *raw]), headers=headers)

    for path in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        routes.get(path)(metadata_of)
        routes.get(f"{path}/ready")(model_ready)
        routes.post(f"{path}/infer")(model_infer)
    return routes


async def _split(body: bytes, header_length: str | None) -> tuple[dict[str, Any], bytes]:
    """The JSON part of a body, and the tensors behind it."""
    if header_length is None:
        return await json_object(body), b""
    is_number = header_length.isascii() and header_length.isdigit() and len(header_length) < 20
    length = int(header_length) if is_number else -1
    if not 0 <= length <= len(body):
        raise InputError(HEADER_LENGTH, header_length, f"0 to {len(body)}, the length of the body")
    return await json_object(body[:length]), body[length:]


def _inputs(content: dict[str, Any], binary: bytes) -> Iterator[InputTensor]:
    at = 0
    for tensor in _listed(content, "inputs"):
        name, datatype = (str(tensor.get(member, "")) for member in ("name", "datatype"))
        shape = tensor.get("shape")
        if not isinstance(shape, list) or not all(type(size) is int for size in shape):
            raise InputError(f"inputs.{name}.shape", shape, "a list of integers")
        size = _parameters(tensor).get("binary_data_size")
        if size is None:
            yield name, datatype, shape, _flat(tensor.get("data"))
            continue
        if type(size) is not int or not 0 <= size <= len(binary) - at:
            raise InputError(f"inputs.{name}.parameters.binary_data_size", size, f"0 to {len(binary) - at}")
        at += size
        yield name, datatype, shape, binary[at - size : at]
    if at != len(binary):
        raise InputError("inputs", f"{len(binary)} bytes after the JSON part", f"{at}, as the inputs say")


def _flat(values: Any) -> list[Any]:
    """The leaves of nested lists, in order."""
    leaves: list[Any] = []
    rest = [values]
    while rest:
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
