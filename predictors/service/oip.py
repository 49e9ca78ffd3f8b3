"""The Open Inference Protocol's view of an artifact: named tensors in, named tensors out (https://kserve.github.io).

A model is an artifact, its name the artifact's id. Inputs, N rows each, as [N] or [N, 1]:

| input | type | |
|---|---|---|
| prompt | BYTES | the texts |
| input_ids, attention_mask | INT64 [N, tokens] | instead of prompt: the tokenizer's ids, padded on the right to at most max_length |
| served_model | BYTES | may be left out; an empty name: not told |
| temperature | FP32 | may be left out; NaN: not told |
| max_tokens | INT64 | may be left out |

Outputs are those of the artifact's graph, nu where it is fixed, and with max_tokens expected_tokens, cvar_tokens and
quantile_tokens (0.5, 0.9, 0.99) of the capped length.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.calls import PredictorCalls, at_once
from predictors.service.capped import DEFAULT_QUANTILE_LEVELS
from predictors.service.errors import UnknownArtifactError, renamed
from predictors.service.models import Served
from scheduler_core.errors import InputError

Tensor = NDArray[Any]

DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BYTES": np.object_,
}
TOKEN_INPUTS = ("input_ids", "attention_mask")
# Input -> kinds of numpy's dtypes that it can have, and their names for messages.
KINDS = {
    "prompt": ("O", "BYTES"),
    "served_model": ("O", "BYTES"),
    "temperature": ("iuf", "FP32 or another number type"),
    "max_tokens": ("iu", "INT64 or another integer type"),
    "input_ids": ("iu", "INT64 or another integer type"),
    "attention_mask": ("iu", "INT64 or another integer type"),
}
# Of values in JSON or protobuf, by the kind of the dtype; null is NaN.
PYTHON_TYPES: dict[str, set[type]] = {
    "O": {str, bytes},
    "i": {int},
    "u": {int},
    "f": {int, float, type(None)},
}
PLATFORM = "onnxruntime_onnx"
# Where a response has what the graph's output of another name gives.
RESPONSE_FIELDS = {"urgency": "urgency.probabilities", "bucket": "bucket_probabilities"}


@dataclass(frozen=True, slots=True)
class TensorType:
    """Name, datatype and shape of an input or output; -1 is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


OPTIONAL_INPUTS = (
    TensorType("served_model", "BYTES", (-1,)),
    TensorType("temperature", "FP32", (-1,)),
    TensorType("max_tokens", "INT64", (-1,)),
)
CAPPED_OUTPUTS = (
    TensorType("expected_tokens", "FP64", (-1,)),
    TensorType("cvar_tokens", "FP64", (-1,)),
    TensorType("quantile_tokens", "FP64", (-1, len(DEFAULT_QUANTILE_LEVELS))),
)


def input_types(served: Served) -> list[TensorType]:
    """What a model takes; `prompt` can be replaced by token ids."""
    return [TensorType("prompt", "BYTES", (-1,)), *OPTIONAL_INPUTS]


def output_types(served: Served) -> list[TensorType]:
    """What a model gives; the last three only with max_tokens."""
    manifest = served.pipeline.runtime.artifact.manifest
    found = [
        TensorType(output.name, "FP32", (-1, *(size for size in output.shape[1:] if isinstance(size, int))))
        for output in manifest.outputs
        if _has_field(RESPONSE_FIELDS.get(output.name, output.name))
    ]
    if "length" in manifest.heads:
        if manifest.nu is not None:
            found.append(TensorType("nu", "FP32", (-1,)))
        found += CAPPED_OUTPUTS
    return found


def find(calls: PredictorCalls, name: str, version: str) -> Served:
    """The artifact of that id and version (empty: any).

    Raises:
        UnknownArtifactError: There is none.
    """
    if not name:
        raise UnknownArtifactError("model name", name, f"one of {', '.join(calls.artifacts.names)}")
    served = calls.artifacts.get(name)
    if version and version != served.version:
        raise UnknownArtifactError("model version", version, f"empty or {served.version}")
    return served


async def infer(
    calls: PredictorCalls,
    served: Served,
    inputs: Mapping[str, Tensor],
    wanted: Collection[str],
    timeout_s: float | None,
    trace: Any = None,
) -> dict[str, Tensor]:
    """Predicts N rows.

    Args:
        calls: What the service does.
        served: The model.
        inputs: Input name -> tensor.
        wanted: Names of the outputs, in order; none: all there are.
        timeout_s: Seconds until the caller gives up; None: never.
        trace: The caller's trace.

    Raises:
        TailcastError: The first row's that failed, or an input or output is wrong.
    """
    available = {
        output.name: output
        for output in output_types(served)
        if "max_tokens" in inputs or output not in CAPPED_OUTPUTS
    }
    for name in wanted:
        if name not in available:
            raise InputError("outputs", name, f"out of {', '.join(available)}")

    async def outcome(request: pb.PredictRequest) -> pb.PredictResponse | Exception:
        try:
            return await calls.predict(request, timeout_s, method="ModelInfer", trace=trace)
        except Exception as error:
            return error

    responses = await at_once((one.ByteSize(), outcome(one)) for one in _requests(served, inputs))
    good: list[pb.PredictResponse] = []
    for row, response in enumerate(responses):
        if isinstance(response, InputError):
            raise renamed(response, f"{response.field}[{row}]")
        if isinstance(response, Exception):
            raise response
        good.append(response)
    chosen = wanted or available
    return {
        name: np.array(
            [_value(response, name) for response in good], dtype=DTYPES[available[name].datatype]
        ).reshape(len(good), *available[name].shape[1:])
        for name in chosen
    }


class InputTensors:
    """The inputs of one request by name; each one's name, type and shape are checked before its values are read.

    Args:
        calls: What the service does.
        served: The model.
    """

    def __init__(self, calls: PredictorCalls, served: Served) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._max_rows = calls.max_batch_requests
        self._max_length = served.pipeline.runtime.artifact.manifest.max_length

    def expect(self, name: str, datatype: str, shape: Sequence[int]) -> int:
        """Checks what is said of an input; the number of its values.

        Raises:
            InputError: The input is unknown or there already, or its type or shape is none that it can have.
        """
        if name not in KINDS:
            raise InputError("inputs", name, f"out of {', '.join(sorted(KINDS))}")
        if name in self.tensors:
            raise InputError("inputs", name, "every name once")
        if datatype not in DTYPES:
            raise InputError(f"inputs.{name}.datatype", datatype, f"one of {', '.join(DTYPES)}")
        kinds, allowed = KINDS[name]
        if np.dtype(DTYPES[datatype]).kind not in kinds:
            raise InputError(f"inputs.{name}.datatype", datatype, allowed)
        if name in TOKEN_INPUTS:
            if self._max_length is None:
                raise InputError(
                    f"inputs.{name}", "token ids", "a prompt: this artifact reads texts, not tokens"
                )
            if len(shape) != 2 or not 0 <= shape[1] <= self._max_length:
                raise InputError(f"inputs.{name}.shape", shape[:3], f"[N, 0 to {self._max_length} tokens]")
        elif len(shape) not in (1, 2) or list(shape[1:]) not in ([], [1]):
            raise InputError(f"inputs.{name}.shape", shape[:3], "[N] or [N, 1]")
        if not 0 <= shape[0] < 2**31:
            raise InputError(f"inputs.{name}.shape", shape[:3], "sizes >= 0")
        if not 1 <= shape[0] <= self._max_rows:
            raise InputError(f"inputs.{name}", f"{shape[0]} rows", f"1 to {self._max_rows} of them")
        return math.prod(shape)

    def add(self, name: str, datatype: str, shape: Sequence[int], values: Any) -> None:
        """Adds an input that is expected, from flat values.

        Raises:
            InputError: They do not fit.
        """
        dtype = np.dtype(DTYPES[datatype])
        try:
            if isinstance(values, list) and not set(map(type, values)) <= PYTHON_TYPES[dtype.kind]:
                raise TypeError
            with np.errstate(over="ignore"):  # infinity, which is then refused
                self.tensors[name] = np.array(values, dtype=dtype).reshape(tuple(shape))
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(
                f"inputs.{name}",
                f"values that do not fit {datatype} {list(shape)}",
                "values of that type and shape",
            ) from error

    def add_raw(self, name: str, datatype: str, shape: Sequence[int], raw: bytes) -> None:
        """Adds an input from its raw bytes: little-endian, row by row; BYTES elements each after their length in 4 bytes.

        Raises:
            InputError: They do not fit.
        """
        count = self.expect(name, datatype, shape)
        if datatype == "BYTES":
            self.add(name, datatype, shape, _byte_strings(name, raw, count))
            return
        dtype = np.dtype(DTYPES[datatype]).newbyteorder("<")
        if len(raw) != count * dtype.itemsize:
            raise InputError(f"inputs.{name}", f"{len(raw)} raw bytes", str(count * dtype.itemsize))
        self.add(name, datatype, shape, np.frombuffer(raw, dtype=dtype))


def _byte_strings(name: str, raw: bytes, count: int) -> list[bytes]:
    found = []
    at = 0
    for _ in range(count):
        (length,) = struct.unpack_from("<I", raw, at) if at + 4 <= len(raw) else (len(raw),)
        at += 4 + length
        found.append(raw[at - length : at])
    if at != len(raw):
        raise InputError(
            f"inputs.{name}", f"{len(raw)} raw bytes", f"{count} times a length and as many bytes"
        )
    return found


def _requests(served: Served, inputs: Mapping[str, Tensor]) -> Iterator[pb.PredictRequest]:
    """The rows, one by one; what is wrong with any of them is found before the first."""
    if ("prompt" in inputs) == ("input_ids" in inputs):
        raise InputError("inputs", sorted(inputs), "either prompt, or input_ids with attention_mask")
    source = inputs["prompt" if "prompt" in inputs else "input_ids"]
    columns = {}
    for tensor in OPTIONAL_INPUTS:
        if tensor.name in inputs:
            values = inputs[tensor.name].reshape(-1)
            if len(values) != len(source):
                raise InputError(
                    f"inputs.{tensor.name}", f"{len(values)} rows", f"{len(source)}, as of the prompts"
                )
            columns[tensor.name] = (
                _texts(tensor.name, values) if tensor.datatype == "BYTES" else values.tolist()
            )
    for row, value in enumerate(columns.get("max_tokens", ())):
        if not -(2**63) <= value < 2**63:
            raise InputError(f"inputs.max_tokens[{row}]", value, "an integer of 64 bits")
    rows: Iterable[pb.PredictRequest]
    if "prompt" in inputs:
        rows = (pb.PredictRequest(prompt=text) for text in _texts("prompt", source.reshape(-1)))
    else:
        rows = (pb.PredictRequest(token_ids=pb.TokenIds(ids=ids)) for ids in _token_rows(inputs))
    return _with_columns(rows, columns, served.name)


def _with_columns(
    rows: Iterable[pb.PredictRequest], columns: Mapping[str, Sequence[Any]], artifact_id: str
) -> Iterator[pb.PredictRequest]:
    for number, request in enumerate(rows):
        request.artifact_id = artifact_id
        for name, values in columns.items():
            if values[number] == values[number]:  # NaN: not told
                setattr(request, name, values[number])
        yield request


def _texts(name: str, values: Tensor) -> list[str]:
    texts = []
    for value in values:
        try:
            texts.append(value.encode().decode() if isinstance(value, str) else value.decode())
        except UnicodeError as error:
            raise InputError(f"inputs.{name}", "bytes that are not UTF-8", "UTF-8") from error
    return texts


def _token_rows(inputs: Mapping[str, Tensor]) -> Iterator[list[int]]:
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask", np.ones(ids.shape, dtype=np.int8))
    if mask.shape != ids.shape:
        raise InputError(
            "inputs.attention_mask.shape", list(mask.shape), f"{list(ids.shape)}, as of input_ids"
        )
    if np.any((ids < -(2**31)) | (ids >= 2**31)):
        raise InputError("inputs.input_ids", "an id of more than 32 bits", "the tokenizer's ids")
    if np.any((mask != 0) & (mask != 1)) or np.any(mask[:, 1:] > mask[:, :-1]):
        raise InputError("inputs.attention_mask", "no padding on the right", "rows of ones, then zeros")
    lengths = mask.sum(axis=1, dtype=np.int64)
    return (row[:length].tolist() for row, length in zip(ids, lengths, strict=True))


def _has_field(path: str) -> bool:
    return path.partition(".")[0] in pb.PredictResponse.DESCRIPTOR.fields_by_name


def _value(response: pb.PredictResponse, name: str) -> Any:
    if name == "quantile_tokens":
        return [quantile.tokens for quantile in response.capped.quantiles]
    if name in ("expected_tokens", "cvar_tokens"):
        return getattr(response.capped, name)
    value: Any = response
    for part in RESPONSE_FIELDS.get(name, name).split("."):
        value = getattr(value, part)
    return value
