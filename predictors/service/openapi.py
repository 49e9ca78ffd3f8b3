"""The OpenAPI description of /v1, generated from the messages; /v2 is described by the Open Inference Protocol."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from predictors.proto import predictor_v1_pb2 as pb

ERRORS = {
    "400": "A field is wrong; the message names it.",
    "401": "A valid bearer token is needed.",
    "404": "No such artifact.",
    "408": "The body was not complete in time.",
    "413": "The body is too large.",
    "415": "The body's compression is neither gzip nor deflate.",
    "429": "The queue is full; try again later.",
    "500": "The model failed.",
    "503": "Starting or draining.",
    "504": "The deadline passed in the queue.",
}
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
CONTENT_PARTS = {
    "type": "array",
    "items": {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}},
}


def openapi() -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    paths: dict[str, Any] = {
        "/v1/predict": {"post": _operation("Predict for one prompt", "PredictResponse", "PredictRequest")},
        "/v1/predict-batch": {
            "post": _operation(
                "Predict for many prompts, each with its own outcome",
                "PredictBatchResponse",
                "PredictBatchRequest",
            )
        },
        "/v1/metadata": {
            "get": _operation("Artifact, heads and limits", "GetMetadataResponse")
            | {"parameters": [{"name": "artifact_id", "in": "query", "schema": {"type": "string"}}]}
        },
        "/metrics": {"get": _operation("Metrics for Prometheus")},
        "/healthz": {"get": _operation("Liveness")},
        "/readyz": {"get": _operation("Readiness")},
    }
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
    schemas["ChatMessage"]["properties"]["content"] = {"anyOf": [{"type": "string"}, CONTENT_PARTS]}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tailcast prediction service",
            "version": metadata.version("tailcast"),
            "description": "Predicted output lengths of LLM requests. Fields: predictor_v1.proto.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(summary: str, response: str | None = None, request: str | None = None) -> dict[str, Any]:
    success: dict[str, Any] = {"description": summary}
    operation: dict[str, Any] = {"summary": summary, "responses": {"200": success}}
    if response is not None:
        success["content"] = _json(_reference(response))
        operation["responses"] |= {
            code: {"description": text, "content": _json(_reference("Status"))}
            for code, text in ERRORS.items()
        }
    if request is not None:
        operation["requestBody"] = {"required": True, "content": _json(_reference(request))}
    return operation


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


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
