"""HTTP gateway: predictions as JSON, metrics, probes, Open Inference Protocol over REST."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from aiohttp import web
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from predictors.hosting.http import HttpRunner, probe_routes, read_body
from predictors.hosting.live_page import LivePage, PromptQuery
from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.calls import PredictorCalls, check_batch
from predictors.service.config import ServeConfig
from predictors.service.errors import ErrorStatus, UnparsableError, renamed
from predictors.service.json_request import MAX_JSON_VALUES, observe_message, request_message
from predictors.service.messages import UNCOUNTED_BYTES
from predictors.service.metrics import ServiceMetrics
from predictors.service.oip import SERVER_METADATA, InputTensor, find, infer, model_metadata
from predictors.service.pipeline import ServedArtifact
from predictors.service.security import BearerTokens
from scheduler_core.errors import InputError, TailcastError
from scheduler_core.prediction.correction import RequestContext
from scheduler_core.prediction.predictions import LengthPrediction
from scheduler_core.shell.json_text import num_separators, parse_json

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# Probes need no token.
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"})
#: Header of the binary tensor extension.
HEADER_LENGTH = "Inference-Header-Content-Length"


async def start_gateway(
    config: ServeConfig,
    calls: PredictorCalls,
    metrics: ServiceMetrics,
    tokens: BearerTokens | None,
    *,
    tls: ssl.SSLContext | None,
    shares_port: bool,
) -> web.AppRunner:
    """Binds and serves the HTTP port of a server (InputError on failure); `cleanup` of the result closes it.
    A body above the configured size gets 413; a disconnect removes the request from the queue."""
    routes = web.RouteTableDef()

    @routes.post("/v1/predict")
    async def predict(request: web.Request) -> web.Response:
        with calls.counted("HTTP Predict"):
            content, message = await _read(request, request_message)
        try:
            response = await calls.predict(message, None, method="HTTP Predict")
        except InputError as error:
            is_model = error.field == "served_model" and content.get("model")
            raise renamed(error, "model" if is_model else error.field) from error
        return web.json_response(message_json(response))

    @routes.post("/v1/predict-batch")
    async def predict_batch(request: web.Request) -> web.Response:
        with calls.counted("PredictBatch"):
            _, batch = await _read(request, batch_message)
        response = await calls.predict_batch(batch, None)
        outcomes = []
        for outcome in response.outcomes:
            outcomes.append(json.dumps(message_json(outcome)))
            if len(outcomes) % 16 == 0:
                await asyncio.sleep(0)  # outcomes with many quantiles take a millisecond each
        return web.json_response(text=f'{{"outcomes": [{", ".join(outcomes)}]}}')

    @routes.post("/v1/observe")
    async def observe(request: web.Request) -> web.Response:
        with calls.counted("HTTP Observe"):
            _, message = await _read(request, observe_message)
            return web.json_response(message_json(await calls.observe(message)))

    @routes.get("/v1/metadata")
    async def metadata(request: web.Request) -> web.Response:
        message = pb.GetMetadataRequest(artifact_id=request.query.get("artifact_id", ""))
        return web.json_response(message_json(calls.metadata(message)))

    async def problem() -> str:
        return "" if calls.artifacts.is_ready else "not ready"

    middlewares = [_middleware(calls, tokens)]
    application = web.Application(client_max_size=config.max_message_bytes, middlewares=middlewares)
    application.add_routes(
        [*routes, *probe_routes(metrics.exposition, problem), *_open_inference_routes(calls)]
    )
    application.add_routes(live_page(calls).routes())
    runner = HttpRunner(application, shutdown_timeout=1, on_refused=calls.count_http)
    assert config.http_port is not None
    options: dict[str, Any] = {"ssl_context": tls, "reuse_port": shares_port or None}
    await runner.bind("http_port", config.host, config.http_port, **options)
    return runner


def live_page(calls: PredictorCalls) -> LivePage:
    """The live page of a service; it shows no tenants, because clients of the port are not told apart."""
    learner = calls.learner

    async def predict(query: PromptQuery) -> tuple[LengthPrediction, RequestContext]:
        messages = [{"role": "system", "content": query.system}] if query.system else []
        messages.append({"role": "user", "content": query.prompt})
        content: dict[str, Any] = {"messages": messages, "model": query.model or None}
        prediction, context = await calls.uncorrected(request_message(content))
        if prediction.length is None:
            raise TailcastError("the artifact has no length head")
        return prediction.length, context

    hint = "Report true lengths with Observe or POST /v1/observe: they appear here beside the predicted ones."
    if learner is None:
        hint = "This service does not learn true lengths: start it with --online_calibration true and --workers 1."
    return LivePage(
        title="tailcast serve",
        ended=deque() if learner is None else learner.ended,
        calibration=lambda: None if learner is None else learner.calibration,
        predict=predict,
        order=lambda: None,
        hint=hint,
        shows_tenants=False,
        hides_ids=lambda: learner is not None and learner.has_tenants,
    )


def _middleware(calls: PredictorCalls, tokens: BearerTokens | None) -> Any:
    @web.middleware
    async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Checks the bearer token, and converts errors to responses."""
        calls.receive_trace((name.lower(), value) for name, value in request.headers.items())
        try:
            if tokens is not None and request.path not in OPEN_PATHS:
                with calls.counted("HTTP"):
                    tokens.check(request.headers.get("Authorization"))
            return await handler(request)
        except web.HTTPException as error:
            calls.count_http(error.status)
            raise
        except Exception as error:
            status = ErrorStatus.of(error)
            content: dict[str, Any] = {"error": status.message}
            if not request.path.startswith("/v2"):
                content = MessageToDict(status.message_with_details())
            return web.json_response(content, status=status.http_status)

    return handle


async def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a UTF-8 body; UnparsableError for other content or too many values."""
    # A smaller body cannot have too many values.
    if len(body) > MAX_JSON_VALUES and sum(await asyncio.to_thread(num_separators, body)) > MAX_JSON_VALUES:
        reason = f"more than {MAX_JSON_VALUES} values; use gRPC or binary tensors for larger requests"
        raise UnparsableError("JSON object", reason)
    try:
        content = parse_json(body.decode("utf-8-sig"), unique_keys=True, lone_surrogates="refuse")
    except ValueError as error:
        raise UnparsableError("JSON object", error) from error
    if not isinstance(content, dict):
        raise UnparsableError("JSON object", type(content).__name__)
    await asyncio.sleep(0)
    return content


async def _read(request: web.Request, convert: Callable[[dict[str, Any]], T]) -> tuple[dict[str, Any], T]:
    """The JSON object in the body of a request, and the message that it is converted to."""
    body = await read_body(request)
    content = await json_object(body)
    if len(body) <= UNCOUNTED_BYTES:
        return content, convert(content)
    return content, await asyncio.to_thread(convert, content)


def batch_message(content: dict[str, Any]) -> pb.PredictBatchRequest:
    """The batch from an object with a list of `requests`; InputError as `request_message`."""
    requests = content.get("requests")
    if not isinstance(requests, list) or len(content) > 1:
        raise InputError("requests", [*content], "an object with nothing but a list of requests")
    check_batch(len(requests))
    batch = pb.PredictBatchRequest()
    for index, request in enumerate(requests):
        try:
            batch.requests.append(request_message(request))
        except InputError as error:
            raise renamed(error, f"requests[{index}].{error.field}") from error
    return batch


def message_json(message: Message) -> dict[str, Any]:
    """A message in protobuf's JSON mapping, with the names of the .proto file."""
    content: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return content


def _open_inference_routes(calls: PredictorCalls) -> web.RouteTableDef:
    """Routes under /v2, with the binary tensor extension, the default of tritonclient."""
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
        return web.json_response(model_metadata(calls, model(request)))

    async def model_ready(request: web.Request) -> web.Response:
        served = model(request)
        is_ready = calls.artifacts.is_artifact_ready(served)
        return web.json_response({"name": served.name, "ready": is_ready}, status=200 if is_ready else 503)

    async def model_infer(request: web.Request) -> web.Response:
        with calls.counted("ModelInfer"):
            served = model(request)
            content, binary = await _split(await read_body(request), request.headers.get(HEADER_LENGTH))
        options = _parameters(content)
        all_binary = options.get("binary_data_output", False)
        is_binary = {
            str(output.get("name", "")): bool(_parameters(output).get("binary_data", all_binary))
            for output in _listed(content, "outputs")
        }
        outputs: list[dict[str, Any]] = []
        raw = []
        tensors, parameters = await infer(calls, served, _inputs(content, binary), is_binary, options, None)
        for tensor, values in tensors:
            output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype}
            output["shape"] = list(values.shape)
            if is_binary.get(tensor.name, all_binary):
                raw.append(values.tobytes())
                output["parameters"] = {"binary_data_size": len(raw[-1])}
            else:
                output["data"] = values.reshape(-1).tolist()
            outputs.append(output)
        response: dict[str, Any] = {"model_name": served.name, "model_version": served.version}
        response["outputs"] = outputs
        if parameters:
            response["parameters"] = parameters
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
    """The JSON part of a body, and the binary tensors after it."""
    if header_length is None:
        return await json_object(body), b""
    is_number = header_length.isascii() and header_length.isdigit() and len(header_length) < 20
    length = int(header_length) if is_number else -1
    if not 0 <= length <= len(body):
        raise InputError(HEADER_LENGTH, header_length, f"0 to {len(body)}, the length of the body")
    return await json_object(body[:length]), body[length:]


def _inputs(content: dict[str, Any], binary: bytes) -> Iterator[InputTensor]:
    offset = 0
    for tensor in _listed(content, "inputs"):
        name, datatype = (str(tensor.get(member, "")) for member in ("name", "datatype"))
        shape = tensor.get("shape")
        if not isinstance(shape, list) or not all(type(size) is int for size in shape):
            raise InputError(f"inputs.{name}.shape", shape, "a list of integers")
        size = _parameters(tensor).get("binary_data_size")
        if size is None:
            yield name, datatype, shape, _flat(tensor.get("data"))
            continue
        remaining = len(binary) - offset
        if type(size) is not int or not 0 <= size <= remaining:
            raise InputError(f"inputs.{name}.parameters.binary_data_size", size, f"0 to {remaining}")
        offset += size
        yield name, datatype, shape, binary[offset - size : offset]
    if offset != len(binary):
        raise InputError("inputs", f"{len(binary)} bytes of binary data", f"{offset}, the sum of sizes")


def _flat(values: Any) -> list[Any]:
    """The leaves of nested lists, in order."""
    leaves: list[Any] = []
    stack = [values]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack.extend(reversed(value))
        else:
            leaves.append(value)
    return leaves


def _listed(content: dict[str, Any], name: str) -> list[dict[str, Any]]:
    members = content.get(name)
    if members is None:  # null is what clients write for members that are not set
        return []
    if not isinstance(members, list) or not all(isinstance(member, dict) for member in members):
        raise UnparsableError("inference request", f"{name} is not a list of objects")
    return members


def _parameters(content: dict[str, Any]) -> dict[str, Any]:
    parameters = content.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise UnparsableError("inference request", "parameters is not an object")
    return parameters
