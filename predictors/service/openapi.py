"""The OpenAPI description of /v1, generated from the messages; /v2 is described by the Open Inference Protocol."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.errors import STATUS

SCALARS: dict[int, dict[str, Any]] = {
    FieldDescriptor.CPPTYPE_INT32: {"type": "integer", "format": "int32"},
    # Protobuf's JSON mapping writes these as strings, and reads both.
    FieldDescriptor.CPPTYPE_INT64: {"type": ["string", "integer"], "format": "int64"},
    FieldDescriptor.CPPTYPE_DOUBLE: {"type": "number", "format": "double"},
    FieldDescriptor.CPPTYPE_BOOL: {"type": "boolean"},
    FieldDescriptor.CPPTYPE_STRING: {"type": "string"},
}
# Messages that are plain lists in a request.
LISTS = {"TokenIds", "ChatMessages"}
TEXT_PART = {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}
#: Path -> verb, summary, message of the request, message of the response.
PATHS = {
    "/v1/predict": ("post", "Predict for one prompt", "PredictRequest", "PredictResponse"),
    "/v1/predict-batch": (
        "post",
        "Predict for many prompts, each with its own outcome",
        "PredictBatchRequest",
        "PredictBatchResponse",
    ),
    "/v1/metadata": ("get", "Artifact, heads and limits", None, "GetMetadataResponse"),
    "/metrics": ("get", "Metrics for Prometheus", None, None),
    "/healthz": ("get", "Liveness", None, None),
    "/readyz": ("get", "Readiness", None, None),
}


def openapi() -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    schemas: dict[str, Any] = {
        "Status": {
            "type": "object",
            "properties": {
                "code": {"type": "integer"},
                "message": {"type": "string"},
                "details": {"type": "array", "items": {"type": "object"}},
            },
        }
    }
    for kind in (pb.PredictBatchRequest, pb.PredictBatchResponse, pb.GetMetadataResponse):
        _add_schema(kind.DESCRIPTOR, schemas)
    parts = {"type": "array", "items": TEXT_PART}
    schemas["ChatMessage"]["properties"]["content"] = {"anyOf": [{"type": "string"}, parts]}
    errors = {str(status): _content(code.name, "Status") for code, status in STATUS.values()}
    paths = {}
    for path, (verb, summary, request, response) in PATHS.items():
        responses = {"200": {"description": summary} if response is None else _content(summary, response)}
        operation: dict[str, Any] = {"summary": summary, "responses": responses}
        if response is not None:
            operation["responses"] |= errors
        if request is not None:
            operation["requestBody"] = {"required": True} | _content(summary, request)
        paths[path] = {verb: operation}
    paths["/v1/metadata"]["get"]["parameters"] = [
        {"name": "artifact_id", "in": "query", "schema": {"type": "string"}}
    ]
    return {
        "openapi": "3.1.0",
        "info": {"title": "tailcast prediction service", "version": metadata.version("tailcast")},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _content(description: str, message: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _reference(message)}}}


def _reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _add_schema(message: Descriptor, schemas: dict[str, Any]) -> None:
    """Adds the JSON schemas of a message and of all messages in it, by name."""
    if message.name in schemas:
        return
    properties: dict[str, Any] = {}
    schemas[message.name] = {"type": "object", "properties": properties, "additionalProperties": False}
    for field in message.fields:
        inner, is_list = field, field.is_repeated
        if field.message_type is not None and field.message_type.name in LISTS:
            [inner] = field.message_type.fields
            is_list = True
        if inner.message_type is None:
            schema: dict[str, Any] = dict(SCALARS[inner.cpp_type])
        else:
            _add_schema(inner.message_type, schemas)
            schema = _reference(inner.message_type.name)
        properties[field.name] = {"type": "array", "items": schema} if is_list else schema
