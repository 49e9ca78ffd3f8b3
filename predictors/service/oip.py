"""The Open Inference Protocol's view of an artifact: named tensors in, named tensors out (https://kserve.github.io).

A model is an artifact, its name the artifact's id. Inputs, N rows each, as [N] or [N, 1]:

| input | type | |
|---|---|---|
| prompt | BYTES | the texts |
| input_ids, attention_mask | INT64 [N, tokens] | instead of prompt: the tokenizer's ids, padded on the right |
| served_model | BYTES | may be left out; an empty name: not told |
| temperature | FP32 | may be left out; NaN: not told |
| max_tokens | INT64 | may be left out |

Outputs are those of the artifact's graph, nu where it is fixed, and with max_tokens expected_tokens, cvar_tokens and
quantile_tokens (0.5, 0.9, 0.99) of the capped length.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.calls import PredictorCalls
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
    wanted: Sequence[str],
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
    requests = _requests(calls, served, inputs)
    available = {
        output.name: output
        for output in output_types(served)
        if "max_tokens" in inputs or output not in CAPPED_OUTPUTS
    }
    for name in wanted:
        if name not in available:
            raise InputError("outputs", name, f"out of {', '.join(available)}")
    responses = await asyncio.gather(
        *(calls.predict(request, timeout_s, method="ModelInfer", trace=trace) for request in requests),
        return_exceptions=True,
    )
    good: list[pb.PredictResponse] = []
    for row, response in enumerate(responses):
        if isinstance(response, InputError):
            raise renamed(response, f"{response.field}[{row}]")
        if isinstance(response, BaseException):
            raise response
        good.append(response)
    chosen = wanted or list(available)
    return {
        name: np.array(
            [_value(response, name) for response in good], dtype=DTYPES[available[name].datatype]
        ).reshape(len(good), *available[name].shape[1:])
        for name in chosen
    }


def checked_tensor(name: str, datatype: str, shape: Sequence[int], values: Any) -> Tensor:
    """A tensor of the given type from flat or nested values.

    Raises:
        InputError: The type is unknown, or the values do not fit type or shape.
    """
    if datatype not in DTYPES:
        raise InputError(f"inputs.{name}.datatype", datatype, f"one of {', '.join(DTYPES)}")
    sizes = list(shape)
    if any(size < 0 for size in sizes) or math.prod(sizes) > 2**31:
        raise InputError(f"inputs.{name}.shape", sizes, "sizes >= 0")
    try:
        found = np.array(values, dtype=DTYPES[datatype])
        if found.size != math.prod(sizes):
            raise ValueError
        return found.reshape(sizes)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"inputs.{name}", f"values that do not fit {datatype} {sizes}", "values of that type and shape"
        ) from error


def _requests(calls: PredictorCalls, served: Served, inputs: Mapping[str, Tensor]) -> list[pb.PredictRequest]:
    known = {"prompt", "input_ids", "attention_mask", *(tensor.name for tensor in OPTIONAL_INPUTS)}
    for name in inputs:
        if name not in known:
            raise InputError("inputs", name, f"out of {', '.join(sorted(known))}")
    if ("prompt" in inputs) == ("input_ids" in inputs):
        raise InputError("inputs", sorted(inputs), "either prompt, or input_ids with attention_mask")
    if "prompt" in inputs:
        requests = [pb.PredictRequest(prompt=text) for text in _texts("prompt", inputs["prompt"])]
    else:
        requests = [pb.PredictRequest(token_ids=pb.TokenIds(ids=ids)) for ids in _token_rows(inputs)]
    if not 1 <= len(requests) <= calls.max_batch_requests:
        raise InputError("inputs", f"{len(requests)} rows", f"1 to {calls.max_batch_requests} of them")
    for name in ("served_model", "temperature", "max_tokens"):
        if name not in inputs:
            continue
        values = (
            _texts(name, inputs[name]) if name == "served_model" else _numbers(name, inputs[name]).tolist()
        )
        if len(values) != len(requests):
            raise InputError(f"inputs.{name}", f"{len(values)} rows", f"{len(requests)}, as of the prompts")
        for request, value in zip(requests, values, strict=True):
            if value == value:  # NaN: not told
                setattr(request, name, value)
    for request in requests:
        request.artifact_id = served.name
    return requests


def _column(name: str, tensor: Tensor) -> Tensor:
    if tensor.ndim not in (1, 2) or (tensor.ndim == 2 and tensor.shape[1] != 1):
        raise InputError(f"inputs.{name}.shape", list(tensor.shape), "[N] or [N, 1]")
    return tensor.reshape(-1)


def _texts(name: str, tensor: Tensor) -> list[str]:
    texts = []
    for value in _column(name, tensor):
        if not isinstance(value, bytes | str):
            raise InputError(f"inputs.{name}.datatype", type(value).__name__, "BYTES")
        try:
            texts.append(value if isinstance(value, str) else value.decode())
        except UnicodeDecodeError as error:
            raise InputError(f"inputs.{name}", value[:20], "UTF-8") from error
    return texts


def _numbers(name: str, tensor: Tensor) -> Tensor:
    wanted = np.integer if name == "max_tokens" else np.number
    if not np.issubdtype(tensor.dtype, wanted):
        allowed = "INT64 or another integer type" if name == "max_tokens" else "FP32 or another number type"
        raise InputError(f"inputs.{name}.datatype", str(tensor.dtype), allowed)
    return _column(name, tensor)


def _token_rows(inputs: Mapping[str, Tensor]) -> list[list[int]]:
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    if mask is None:
        mask = np.ones_like(ids)
    for name, tensor in (("input_ids", ids), ("attention_mask", mask)):
        if tensor.ndim != 2 or not np.issubdtype(tensor.dtype, np.integer) or tensor.shape != ids.shape:
            raise InputError(f"inputs.{name}", f"{tensor.dtype} {list(tensor.shape)}", "INT64 [N, tokens]")
    if np.any((ids < -(2**31)) | (ids >= 2**31)):
        raise InputError("inputs.input_ids", "an id of more than 32 bits", "the tokenizer's ids")
    if not np.isin(mask, (0, 1)).all() or np.any(np.diff(mask, axis=1) > 0):
        raise InputError("inputs.attention_mask", "no padding on the right", "rows of ones, then zeros")
    return [row[: int(count)].tolist() for row, count in zip(ids, mask.sum(axis=1), strict=True)]


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
