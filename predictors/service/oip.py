"""The Open Inference Protocol (https://kserve.github.io): inference on named tensors, and its gRPC methods.

The model name is the artifact id. Inputs have N rows, shape [N] or [N, 1]; each row has a prompt or messages:

| input | type | |
|---|---|---|
| prompt | BYTES | text; empty: the row has messages |
| messages | BYTES | JSON list of messages with role and content, as in a request of any chat API; empty: the row has a prompt |
| options | BYTES | optional; JSON object with other members of such a request: tools, response_format, reasoning_effort, ...; those of all rows may be parameters of the request |
| served_model | BYTES | optional; empty: unknown |
| temperature | FP32 | optional; NaN: unknown |
| max_tokens | INT64 | optional |

Outputs are those of the artifact's graph (without sigma_within), nu if it is fixed, and with max_tokens also expected_tokens,
cvar_tokens and quantile_tokens (0.5, 0.9, 0.99) of the truncated length. Numbers of a part of joined artifacts that failed or
was late are NaN, and the parameter `missing` of the response has the reasons.
"""

from __future__ import annotations

import asyncio
import operator
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple, TypeVar

import grpc
import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from predictors.manifest import Manifest
from predictors.proto import open_inference_pb2 as oip
from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.calls import MAX_BATCH_REQUESTS, PredictorCalls, gather_in_chunks
from predictors.service.errors import UnknownArtifactError, UnparsableError, renamed
from predictors.service.grpc_methods import Context, unary
from predictors.service.json_request import MAX_JSON_VALUES, request_message
from predictors.service.messages import DEFAULT_QUANTILE_LEVELS, UNCOUNTED_BYTES
from predictors.service.pipeline import ServedArtifact
from scheduler_core.errors import InputError
from scheduler_core.shell.json_text import from_json, num_separators, parse_json

T = TypeVar("T")
Tensor = NDArray[Any]
InputTensor = tuple[str, str, Sequence[int], bytes | Sequence[Any]]
"""Name, datatype, shape, and raw bytes or values of an input."""

OIP_SERVICE = oip.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
SERVER_METADATA: dict[str, Any] = {
    "name": "tailcast",
    "version": metadata.version("tailcast"),
    "extensions": ["binary_tensor_data"],
}
PLATFORM = "onnxruntime_onnx"
DTYPES: dict[str, Any] = {"BYTES": np.object_, "INT64": "<i8", "FP32": "<f4", "FP64": "<f8"}
# Python types of values in JSON or protobuf; null is NaN.
PYTHON_TYPES: dict[str, set[type]] = {"BYTES": {str, bytes}, "INT64": {int}, "FP32": {int, float, type(None)}}
# Parameters of a request that are the protocol's, its extensions' or tritonclient's; others are options of all rows.
PROTOCOL_PARAMETERS = frozenset(
    ("binary_data_output", "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers")
)
# Fields of a request without an effect on these outputs.
WITHOUT_EFFECT = ("artifact_id", "quantile_levels", "declared_tier", "generated_tokens", "embedding")
# Output -> field of the response, if their names differ.
RESPONSE_FIELDS = {
    "urgency": "urgency.probabilities",
    "bucket": "bucket_probabilities",
    "expected_tokens": "truncated_length.expected_tokens",
    "cvar_tokens": "truncated_length.cvar_tokens",
}


class TensorType(NamedTuple):
    """Name, datatype and shape of an input or output; -1: any size."""

    name: str
    datatype: str
    shape: tuple[int, ...] = (-1,)


INPUTS = (
    TensorType("prompt", "BYTES"),
    TensorType("messages", "BYTES"),
    TensorType("options", "BYTES"),
    TensorType("served_model", "BYTES"),
    TensorType("temperature", "FP32"),
    TensorType("max_tokens", "INT64"),
)
TRUNCATED_LENGTH_OUTPUTS = (
    TensorType("expected_tokens", "FP64"),
    TensorType("cvar_tokens", "FP64"),
    TensorType("quantile_tokens", "FP64", (-1, len(DEFAULT_QUANTILE_LEVELS))),
)


def output_types(manifest: Manifest) -> list[TensorType]:
    """Outputs of a model; the last three require max_tokens."""
    types = [
        TensorType(output.name, output.datatype, (-1, *map(int, output.shape[1:])))
        for output in manifest.outputs
        if output.name != "sigma_within"  # not in the record of a prediction
    ]
    if "length" in manifest.heads:
        if manifest.nu is not None:
            types.append(TensorType("nu", "FP32"))
        types += TRUNCATED_LENGTH_OUTPUTS
    return types


def model_metadata(calls: PredictorCalls, served: ServedArtifact) -> dict[str, Any]:
    """Model metadata of the protocol: name, versions, platform, inputs and outputs."""
    types = (INPUTS, output_types(calls.artifacts.manifest(served)))
    inputs, outputs = ([tensor._asdict() for tensor in each] for each in types)
    tensors = {"inputs": inputs, "outputs": outputs}
    return {"name": served.name, "versions": [served.version], "platform": PLATFORM} | tensors


def find(calls: PredictorCalls, name: str, version: str) -> ServedArtifact:
    """The artifact with an id and a version (empty: any); UnknownArtifactError if there is none."""
    if not name:
        raise UnknownArtifactError("model name", name, f"one of {', '.join(calls.artifacts.names)}")
    served = calls.artifacts.get(name)
    if version and version != served.version:
        raise UnknownArtifactError("model version", version, f"empty or {served.version}")
    return served


async def infer(
    calls: PredictorCalls,
    served: ServedArtifact,
    inputs: Iterable[InputTensor],
    names: Collection[str],
    parameters: Mapping[str, Any],
    timeout_s: float | None,
) -> tuple[list[tuple[TensorType, Tensor]], dict[str, str]]:
    """Predicts N rows within `timeout_s` (None: no limit) and returns the outputs `names` in order (empty:
    all), and the parameters of the response; `parameters` are those of the request. Raises the TailcastError of the first
    failed row."""
    with calls.counted("ModelInfer"):
        values = _input_values(inputs)
        others = (name for name in parameters if name not in PROTOCOL_PARAMETERS)
        options = {name: from_json(parameters[name]) for name in others}
        size = sum(len(text) for name in ("messages", "options") for text in values.get(name, ()))
        if size > UNCOUNTED_BYTES:  # parsing JSON takes long
            requests = await asyncio.to_thread(_requests, values, options)
        else:
            requests = _requests(values, options)
        for request in requests:
            request.artifact_id = served.name
        has_limits = all(request.HasField("max_tokens") for request in requests)
        available = {
            output.name: output
            for output in output_types(calls.artifacts.manifest(served))
            if has_limits or output not in TRUNCATED_LENGTH_OUTPUTS
        }
        for name in names:
            if name not in available:
                raise InputError("outputs", name, f"any of {', '.join(available)}")

    async def outcome(request: pb.PredictRequest) -> pb.PredictResponse | Exception:
        try:
            return await calls.predict(request, timeout_s, method="ModelInfer")
        except Exception as error:
            return error

    responses = []
    for row, result in enumerate(await gather_in_chunks((r.ByteSize(), outcome(r)) for r in requests)):
        if isinstance(result, Exception):
            raise renamed(result, f"{result.field}[{row}]") if isinstance(result, InputError) else result
        responses.append(result)
    tensors = []
    for output in (available[name] for name in names or available):
        rows = [_output_value(response, output) for response in responses]
        tensor = np.array(rows, dtype=DTYPES[output.datatype])
        tensors.append((output, tensor.reshape(len(rows), *output.shape[1:])))
    missing = {f"{each.part}: {each.reason}": None for response in responses for each in response.missing}
    return tensors, {"missing": "; ".join(missing)} if missing else {}


def _input_values(inputs: Iterable[InputTensor]) -> dict[str, list[Any]]:
    """Values by name; validates name, type and shape before it converts values."""
    types = {tensor.name: tensor.datatype for tensor in INPUTS}
    tensors: dict[str, list[Any]] = {}
    values: Any
    for name, datatype, shape, data in inputs:
        if name not in types or name in tensors:
            raise InputError("inputs", name, f"any of {', '.join(types)}, each at most once")
        if datatype != types[name]:
            raise InputError(f"inputs.{name}.datatype", datatype, types[name])
        if len(shape) not in (1, 2) or list(shape[1:]) not in ([], [1]) or shape[0] < 0:
            raise InputError(f"inputs.{name}.shape", list(shape[:3]), "[N] or [N, 1]")
        if not 1 <= shape[0] <= MAX_BATCH_REQUESTS:
            raise InputError(f"inputs.{name}", f"{shape[0]} rows", f"1 to {MAX_BATCH_REQUESTS} rows")
        values = _raw_values(datatype, shape[0], data) if isinstance(data, bytes) else data
        try:
            if len(values) != shape[0] or not set(map(type, values)) <= PYTHON_TYPES[datatype]:
                raise ValueError(f"{len(values)} values, or wrong types")
            if datatype == "BYTES":
                values = [value if isinstance(value, bytes) else value.encode() for value in values]
                values = [value.decode() for value in values]
        except ValueError as error:
            reason, allowed = f"invalid values ({error})", f"{datatype} [{shape[0]}], text in UTF-8"
            raise InputError(f"inputs.{name}", reason, allowed) from error
        tensors[name] = values
    return tensors


def _raw_values(datatype: str, count: int, raw: bytes) -> list[Any]:
    """Values from little-endian bytes (BYTES: 4-byte length, then the value); empty for a wrong size."""
    if datatype != "BYTES":
        dtype = np.dtype(DTYPES[datatype])
        return np.frombuffer(raw, dtype).tolist() if len(raw) == count * dtype.itemsize else []
    strings: list[bytes] = []
    end = 0
    while end < len(raw) and len(strings) < count:
        (length,) = struct.unpack_from("<I", raw, end) if end + 4 <= len(raw) else (len(raw),)
        end += 4 + length
        strings.append(raw[end - length : end])
    return strings if end == len(raw) else []


def _requests(inputs: Mapping[str, list[Any]], parameters: Mapping[str, Any]) -> list[pb.PredictRequest]:
    """The request of each row, from the values by input, and the parameters, which are options of all rows."""
    if not {"prompt", "messages", "options"} & inputs.keys():
        raise InputError("inputs", sorted(inputs), "a list with prompt or messages")
    first, num_rows = next((name, len(values)) for name, values in inputs.items())
    for name, values in inputs.items():
        if len(values) != num_rows:
            raise InputError(f"inputs.{name}", f"{len(values)} rows", f"{num_rows}, as many as {first}")
    texts = (text for name in ("messages", "options") for text in inputs.get(name, ()))
    if sum(sum(num_separators(text.encode())) for text in texts) > MAX_JSON_VALUES:
        raise UnparsableError("JSON", f"messages and options with more than {MAX_JSON_VALUES} values")
    rows = enumerate(zip(*inputs.values(), strict=True))
    return [_request(dict(zip(inputs, row, strict=True)), parameters, number) for number, row in rows]


def _request(row: dict[str, Any], parameters: Mapping[str, Any], number: int) -> pb.PredictRequest:
    """The request of a row, from its values by input. Null, NaN and empty texts are not set."""
    prompt, messages, options = (row.pop(name, "") for name in ("prompt", "messages", "options"))
    request = pb.PredictRequest(prompt=prompt)
    if messages or options or parameters:
        body = {**parameters} | (_json(f"inputs.options[{number}]", options, dict) if options else {})
        inputs: dict[str, Any] = {"prompt": prompt} if prompt else {}
        if messages:
            inputs["messages"] = _json(f"inputs.messages[{number}]", messages, list)
        for name in inputs:
            if name in body:
                raise InputError(f"inputs.options[{number}]", name, f"unset, because the input {name} has it")
        body |= inputs
        try:
            request = request_message(body)
        except InputError as error:
            raise renamed(error, f"{error.field}[{number}]") from error
    of_options = [field.name for field, _ in request.ListFields()]
    for name in WITHOUT_EFFECT:
        if name in of_options:
            allowed = "unset, because no output has it; use Predict or /v1/predict"
            raise InputError(f"inputs.options[{number}].{name}", getattr(request, name), allowed)
    for name, value in row.items():
        if value in (None, "") or value != value:
            continue
        if name in of_options:
            raise InputError(f"inputs.options[{number}]", name, f"unset, because the input {name} has it")
        try:
            setattr(request, name, value)
        except ValueError as error:
            raise InputError(f"inputs.{name}[{number}]", value, "integers of 64 bits") from error
    return request


def _json(field: str, text: str, kind: type[T]) -> T:
    """The JSON list or object in a text."""
    try:
        value = parse_json(text, unique_keys=True, lone_surrogates="refuse")
    except ValueError as error:
        raise InputError(field, text[:40], f"valid JSON ({error})") from error
    if not isinstance(value, kind):
        raise InputError(field, text[:40], "a JSON list" if kind is list else "a JSON object")
    return value


def _output_value(response: pb.PredictResponse, output: TensorType) -> Any:
    name = RESPONSE_FIELDS.get(output.name, output.name)
    if response.missing and not _is_set(response, name.partition(".")[0]):
        return np.full(output.shape[1:], np.nan)
    if name == "quantile_tokens":
        return [quantile.tokens for quantile in response.truncated_length.quantiles]
    return operator.attrgetter(name)(response)


def _is_set(response: pb.PredictResponse, name: str) -> bool:
    if name == "quantile_tokens":
        name = "truncated_length"
    if response.DESCRIPTOR.fields_by_name[name].is_repeated:
        return bool(getattr(response, name))
    return bool(response.HasField(name))


def open_inference_handler(calls: PredictorCalls) -> grpc.GenericRpcHandler[Any, Any]:
    """gRPC handler of inference.GRPCInferenceService."""

    async def live(request: oip.ServerLiveRequest, context: Context) -> Message:
        return oip.ServerLiveResponse(live=True)

    async def ready(request: oip.ServerReadyRequest, context: Context) -> Message:
        return oip.ServerReadyResponse(ready=calls.artifacts.is_ready)

    async def model_ready(request: oip.ModelReadyRequest, context: Context) -> Message:
        try:
            served = find(calls, request.name, request.version)
        except UnknownArtifactError:
            return oip.ModelReadyResponse(ready=False)
        return oip.ModelReadyResponse(ready=calls.artifacts.is_artifact_ready(served))

    async def server_metadata(request: oip.ServerMetadataRequest, context: Context) -> Message:
        return oip.ServerMetadataResponse(**SERVER_METADATA)

    async def metadata_of(request: oip.ModelMetadataRequest, context: Context) -> Message:
        return oip.ModelMetadataResponse(**model_metadata(calls, find(calls, request.name, request.version)))

    async def model_infer(request: oip.ModelInferRequest, context: Context) -> Message:
        with calls.counted("ModelInfer"):
            served = find(calls, request.model_name, request.model_version)
        names = dict.fromkeys(output.name for output in request.outputs)
        options = {name: _parameter(value) for name, value in request.parameters.items()}
        outputs, parameters = await infer(
            calls, served, _inputs(request), names, options, context.time_remaining()
        )
        response = oip.ModelInferResponse(model_name=served.name, model_version=served.version, id=request.id)
        for name, text in parameters.items():
            response.parameters[name].string_param = text
        for (name, datatype, _), values in outputs:
            output = response.outputs.add(name=name, datatype=datatype, shape=values.shape)
            # A client that sends raw bytes gets raw bytes.
            if request.raw_input_contents:
                response.raw_output_contents.append(values.tobytes())
            else:
                getattr(output.contents, f"{datatype.lower()}_contents").extend(values.reshape(-1).tolist())
        return response

    methods = {
        "ServerLive": unary(live, oip.ServerLiveRequest),
        "ServerReady": unary(ready, oip.ServerReadyRequest),
        "ModelReady": unary(model_ready, oip.ModelReadyRequest),
        "ServerMetadata": unary(server_metadata, oip.ServerMetadataRequest),
        "ModelMetadata": unary(metadata_of, oip.ModelMetadataRequest),
        "ModelInfer": unary(model_infer, oip.ModelInferRequest),
    }
    return grpc.method_handlers_generic_handler(OIP_SERVICE, methods)


def _parameter(parameter: oip.InferParameter) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    return None if kind is None else getattr(parameter, kind)


def _inputs(request: oip.ModelInferRequest) -> Iterator[InputTensor]:
    raws = request.raw_input_contents
    if raws and len(raws) != len(request.inputs):
        raise InputError("raw_input_contents", f"{len(raws)} entries", f"{len(request.inputs)}")
    for number, tensor in enumerate(request.inputs):
        values = getattr(tensor.contents, f"{tensor.datatype.lower()}_contents", [])
        yield tensor.name, tensor.datatype, tensor.shape, raws[number] if raws else values
